"""From a model folder to a folder of trained heads: data, training, files, card."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from .._version import __version__
from ..config.validate import check_choice, check_int
from ..errors import ConfigError, ModelError
from ..extras import require
from ..models import load_model
from ..models.config_reader import read_config
from ..models.default import MODEL_NAME, default_model
from ..models.folder_cache import cache_root, file_sha256
from ..text.tokenizer import load_tokenizer
from .cache import CacheReader
from .card import write_card
from .collect import CollectConfig, Collector, collect
from .data import TrainingData
from .fingerprint import model_sha256
from .loop import Product, Training, TrainSettings
from .loss import FrozenHead
from .overlap import read_texts
from .prompts import SOURCES

__all__ = [
    "PRODUCTS",
    "Exclusion",
    "Progress",
    "TrainOptions",
    "default_collect",
    "default_settings",
    "finish",
    "make_product",
    "train",
]

PRODUCTS = ("medusa", "redrafter", "drafter")
LICENCE = "Apache-2.0"


class Progress(Protocol):
    """Who shows how far it is; every method may be called often."""

    def on_collect(self, collector: Collector) -> None: ...

    def on_train(self, training: Training) -> None: ...


@dataclass(frozen=True)
class TrainOptions:
    """Everything that `specdec train-*` takes.

    model               target's folder; None: the built-in default model
    output              folder for the result; must not hold other files
    cache_dir           of the data, shared by the products; None: below the cache root
    work_dir            of the checkpoint; None: below the cache root
    collect             what data; see CollectConfig
    collect_time_limit  seconds after which collecting stops and training takes what is there
    settings            see TrainSettings
    draft_vocab_size    tokens that the heads score
    num_heads           Medusa heads
    num_layers          residual blocks per head (Medusa, ReDrafter) or decoder layers (drafter)
    draft_len           recurrent steps trained over (ReDrafter)
    intermediate_size   MLP neurons of each layer (drafter)
    dtype               of the stored weights
    exclude             files whose texts must not be trained on (13-word overlap)
    plots               write loss and accuracy curves next to the result (needs matplotlib)
    """

    product: str
    output: Path
    model: Path | None = None
    cache_dir: Path | None = None
    work_dir: Path | None = None
    collect: CollectConfig = field(default_factory=CollectConfig)
    collect_time_limit: float | None = None
    settings: TrainSettings = field(default_factory=TrainSettings)
    draft_vocab_size: int = 8192
    num_heads: int = 4
    num_layers: int = 2
    draft_len: int = 5
    intermediate_size: int = 768
    dtype: str = "float16"
    exclude: tuple[Path, ...] = ()
    plots: bool = False
    device: str = "cpu"
    command: str = ""

    def __post_init__(self) -> None:
        check_choice("product", self.product, PRODUCTS, ConfigError)
        for name, low, high in (
            ("draft_vocab_size", 16, 1 << 20),
            ("num_heads", 1, 16),
            ("num_layers", 1, 16),
            ("draft_len", 1, 16),
            ("intermediate_size", 8, 1 << 20),
        ):
            check_int(name, getattr(self, name), ConfigError, low=low, high=high)
        kinds = ("float16", "bfloat16", "float32")
        check_choice(
            "dtype", self.dtype, (*kinds, "int8") if self.product == "medusa" else kinds,
            ConfigError,
        )  # fmt: skip
        check_choice("device", self.device, ("cpu", "cuda"), ConfigError)


def default_collect() -> CollectConfig:
    """The data that the shipped files were made with."""
    return CollectConfig()


def default_settings(product: str) -> TrainSettings:
    """The settings that the shipped files were made with."""
    if product == "drafter":
        return TrainSettings(learning_rate=1e-3, batch_texts=4, steps=3000)
    return TrainSettings()


def train(options: TrainOptions, progress: Progress) -> dict[str, Any]:
    """Run it all; returns the card. ConfigError or ModelError before any work when it cannot be."""
    if options.plots:
        require("matplotlib", "--plots")
    device = _device(options.device)
    excluded = Exclusion(options.exclude)
    _check_output(options.output)
    model_path = default_model() if options.model is None else Path(options.model).expanduser()
    sha = model_sha256(model_path)
    name = MODEL_NAME if options.model is None else model_path.name
    cache_dir = options.cache_dir or cache_root() / "training" / f"{name}-{sha[:12]}"
    collect(
        model_path,
        cache_dir,
        options.collect,
        time_limit_s=options.collect_time_limit,
        on_step=progress.on_collect,
    )
    reader = CacheReader(cache_dir)
    if reader.description["model_sha256"] != sha:
        raise ModelError(f"{cache_dir}: holds data of another model; give another --cache-dir")
    tokenizer = load_tokenizer(None, model_path)
    data = TrainingData(
        reader,
        draft_vocab_size=options.draft_vocab_size,
        decode=tokenizer.decode if options.exclude else None,
        exclude=excluded,
    )
    product = make_product(options, data, model_path, sha, name, device)
    work_dir = options.work_dir or cache_root() / "training" / f"work-{options.product}-{sha[:12]}"
    training = Training(product, data, options.settings, folder=work_dir, device=device)
    training.run(on_step=progress.on_train)
    return finish(options, training, data, sha, name, excluded.report)


class Exclusion:
    """The texts of the excluded files, read once as they are needed. ConfigError if one cannot be.

    report  after reading: name, sha256 and number of strings of each file
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [Path(path).expanduser() for path in paths]
        self.report: list[dict[str, Any]] = []
        for path in self._paths:
            if not path.is_file():
                raise ConfigError(f"exclude = {str(path)!r}: no such file; give text files")

    def __iter__(self) -> Iterator[str]:
        self.report = []
        for path in self._paths:
            entry: dict[str, Any] = {
                "name": path.name,
                "sha256": file_sha256(path),
                "strings": 0,
            }
            self.report.append(entry)
            for text in read_texts(path):
                entry["strings"] += 1
                yield text


def make_product(
    options: TrainOptions,
    data: TrainingData,
    model_path: Path,
    sha: str,
    name: str,
    device: torch.device,
) -> Product:
    """The product of the options, its head and embeddings taken from the target."""
    target = load_model(model_path, max_rows=16, max_seq_len=32)
    head = FrozenHead(target.head_rows(data.token_ids), data.ranked, device)
    share = options.settings.soft_share
    if options.product == "medusa":
        from .medusa import MedusaProduct

        return MedusaProduct(
            data, head, num_heads=options.num_heads, num_layers=options.num_layers,
            soft_share=share, model_name=name, model_sha256=sha, dtype=options.dtype,
            device=device,
        )  # fmt: skip
    embedding = target.embed(torch.arange(data.vocab_size, dtype=torch.int32))
    if options.product == "redrafter":
        from .redrafter import RedrafterProduct

        return RedrafterProduct(
            data, head, embedding, num_layers=options.num_layers, draft_len=options.draft_len,
            soft_share=share, model_sha256=sha, dtype=options.dtype,
            seed=options.settings.seed, device=device,
        )  # fmt: skip
    from .drafter import DrafterProduct, drafter_shape

    config = read_config(model_path)
    shape = drafter_shape(
        config, num_layers=options.num_layers, intermediate_size=options.intermediate_size,
        draft_vocab_size=len(data.token_ids),
    )  # fmt: skip
    return DrafterProduct(
        data, head, embedding, config, shape, soft_share=share, model_sha256=sha,
        dtype=options.dtype, device=device,
    )  # fmt: skip


def finish(
    options: TrainOptions,
    training: Training,
    data: TrainingData,
    sha: str,
    name: str,
    excluded: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Write the files and the card of a finished run; returns the card."""
    result, product = training.result, training.product
    held_out = result.evaluations[-1][1] if result.evaluations else training.evaluate()
    notes = {
        "steps": training.step,
        "train_tokens": data.num_train_tokens,
        "held_out_tokens": data.num_held_out_tokens,
        "accuracy": held_out["accuracy"],
        # What the runtime's budget starts from: [position][rank].
        "guess_rates": held_out["rank_accuracy"],
    }
    output = options.output
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    product.save(partial, notes)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(partial.iterdir())
    }
    last = result.losses[-50:]
    card = {
        "product": options.product,
        "version": __version__,
        "command": options.command,
        "licence": LICENCE,
        "target": {"name": name, "sha256": sha},
        "files": {name_: entry["bytes"] for name_, entry in files.items()},
        "sha256": {name_: entry["sha256"] for name_, entry in files.items()},
        "data": {
            **asdict(options.collect),
            "train_texts": len(data.train),
            "train_tokens": data.num_train_tokens,
            "held_out_texts": len(data.held_out),
            "held_out_tokens": data.num_held_out_tokens,
            "dropped_texts": data.dropped,
            "excluded": list(excluded),
            "draft_vocab_size": len(data.token_ids),
            "coverage": data.coverage(),
            "sources": SOURCES,
        },
        "shape": product.describe(),
        "training": {
            **asdict(options.settings),
            "steps": training.step,
            "first_loss": sum(result.losses[:50]) / max(1, len(result.losses[:50])),
            "last_loss": sum(last) / max(1, len(last)),
        },
        "held_out": held_out,
        "evaluations": result.evaluations,
    }
    write_card(partial, card)
    if options.plots:
        from .plots import write_plots

        write_plots(partial, options.product, result)
    for path in partial.iterdir():  # safetensors writes its files private
        path.chmod(0o644)
    if output.exists():
        shutil.rmtree(output)
    partial.rename(output)
    return card


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda': torch sees no GPU here; use --device cpu")
    return torch.device(name)


def _check_output(output: Path) -> None:
    """An existing folder is only replaced if an earlier run wrote it."""
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not (output / "config.json").is_file()):
        raise ConfigError(
            f"output = {str(output)!r}: exists and was not written by this command; give another "
            "folder"
        )

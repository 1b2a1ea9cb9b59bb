"""Any supported checkpoint into one folder of safetensors shards with config.json.

The folder is an ordinary model folder: every place that takes a model takes it. Weights of a GGUF
file keep their blocks with dtype "auto", and --quantization makes blocks of floats
(models/block_config.py); heads and drafters lie in folders of their own below it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .._version import __version__
from ..config.engine import normalize_dtype
from ..config.ranks import MAX_RANKS
from ..config.validate import check_choice, check_int
from ..errors import ConfigError, ModelError, UnsupportedConfigError, UnsupportedModelError
from ..models.block_checkpoint import BlockCheckpoint
from ..models.block_config import block_config
from ..models.config_reader import ModelConfig, read_config
from ..models.decoder_file import write_decoder_file
from ..models.draft_vocab import DRAFT_VOCAB_FILE, read_draft_vocab
from ..models.folder_cache import file_sha256
from ..models.gguf_weights import GgufCheckpoint
from ..models.native import DERIVED_SUFFIXES
from ..models.native_config import NotNativeError, native_shape
from ..models.open_checkpoint import open_checkpoint
from ..models.quantize import QUANTIZATIONS, quantized_loader, worst_first
from ..models.rank_checkpoint import rank_folder, write_ranks
from ..models.safetensors_file import SafetensorsFile, write_safetensors
from ..models.shard import Shard
from ..models.weights import INDEX, Checkpoint
from .folder_writer import written_folder

__all__ = ["CHECKPOINT", "MEDUSA", "REDRAFTER", "ConvertOptions", "convert"]

CHECKPOINT = "checkpoint"
MEDUSA, REDRAFTER = "medusa", "redrafter"  # folders of what drafts, below a checkpoint
SHARD_BYTES = 1 << 30
# Beside the weights, as far as they are there.
_OTHER_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", DRAFT_VOCAB_FILE, "LICENSE", "LICENSE.txt",
)  # fmt: skip
_SOURCES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.json")


@dataclass(frozen=True)
class ConvertOptions:
    """What `specdec convert` is told. Raises ConfigError, UnsupportedConfigError.

    dtype            "auto": as the checkpoint says, a GGUF file's weights in their own width
    quantization     None, "int8", "int4": matrices become blocks (native families)
    tp_size          ranks that the model will be spread over: each gets shards of its own rows
    perplexity       a text whose perplexity is told before and after quantization
    medusa_model     Medusa heads for this model, to be kept beside it
    redrafter_model  a ReDrafter for this model
    shard_bytes      a shard is closed before it grows beyond this
    """

    dtype: str = "auto"
    quantization: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    perplexity: Path | None = None
    medusa_model: Path | None = None
    redrafter_model: Path | None = None
    allow_pickle: bool = False
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        if self.pp_size != 1:
            raise UnsupportedConfigError(
                f"pp_size = {self.pp_size}: limit 1, pipelines of several devices are not "
                "supported in this version; use --pp_size=1"
            )
        check_int("tp_size", self.tp_size, ConfigError, low=1, high=MAX_RANKS)
        object.__setattr__(self, "dtype", normalize_dtype("dtype", self.dtype))
        if self.quantization is not None:
            check_choice("quantization", self.quantization, tuple(QUANTIZATIONS), ConfigError)
        if self.perplexity is not None and (self.quantization is None or self.tp_size > 1):
            raise ConfigError(
                "perplexity: of a model before and after quantization, on one rank; give "
                "--quantization, and no --tp_size"
            )
        check_int("shard_bytes", self.shard_bytes, ConfigError, low=1)


@dataclass(frozen=True)
class Converted:
    """What was written. format: of most weights."""

    folder: Path
    num_tensors: int
    num_shards: int
    num_resumed: int
    weight_bytes: int
    format: str


def convert(
    model_dir: str | Path,
    output_dir: str | Path,
    options: ConvertOptions,
    *,
    tell: Callable[[str], object] = lambda text: None,
) -> Converted:
    """Write `output_dir`. The same call goes on where an interrupted one has stopped.

    tell  called with one line for each shard

    Raises ConfigError, ModelError, UnsupportedModelError.
    """
    config = read_config(Path(model_dir).expanduser())
    weights = _Weights(config, options)
    origin = {
        "made_by": f"specdec_ext {__version__}",
        "model": str(config.path.resolve()),
        "files": _source_hashes(config),
        "dtype": options.dtype,
        "quantization": options.quantization,
        "heads": {
            name: {"path": str(path.resolve()), "files": _hashes(path)}
            for name, path in _heads(options).items()
        },
        "shard_bytes": options.shard_bytes,
        "tp_size": options.tp_size,
    }
    target = Path(output_dir).expanduser()
    with weights, written_folder(target, CHECKPOINT, origin, resumes=True) as folder:
        shards, resumed = weights.write(folder, tell)
        _write_config(config, weights, folder)
        _copy_others(config, folder)
        if options.tp_size == 1:  # the C++ runtime has one rank
            write_decoder_file(folder)
        if options.quantization is not None:
            _report(config, worst_first(weights.errors), options, folder, tell)
        for name, path in _heads(options).items():
            tell(f"{name}: {path}")
            _HEADS[name](path, folder / name, config, options.allow_pickle)
    return Converted(
        target, len(weights.names), shards, resumed, weights.bytes_written, weights.main_format
    )


def _report(
    config: ModelConfig,
    errors: Sequence[tuple[str, float]],
    options: ConvertOptions,
    folder: Path,
    tell: Callable[[str], object],
) -> None:
    """What narrowing did, told and kept in quantization.json."""
    from .quantization_report import error_table, perplexity, write_report

    for line in error_table(errors):
        tell(line)
    found = None
    if options.perplexity is not None:
        before, after = (perplexity(model, options.perplexity) for model in (config.path, folder))
        found = {
            "text": options.perplexity.name,
            "tokens": after["tokens"],
            "before": before["perplexity"],
            "after": after["perplexity"],
        }
        tell(
            f"perplexity of {found['text']} ({found['tokens']} tokens): {found['before']:.3f} "
            f"before, {found['after']:.3f} after"
        )
    write_report(folder, str(options.quantization), errors, found)


def _heads(options: ConvertOptions) -> dict[str, Path]:
    given = {MEDUSA: options.medusa_model, REDRAFTER: options.redrafter_model}
    return {name: path.expanduser() for name, path in given.items() if path is not None}


class _Weights:
    """The tensors of the source as they are to be written, one at a time."""

    def __init__(self, config: ModelConfig, options: ConvertOptions) -> None:
        self._config, self._options = config, options
        self._checkpoint = open_checkpoint(config, allow_pickle=options.allow_pickle)
        self.blocks: dict[str, str] = {}
        self.errors: dict[str, float] = {}
        self.bytes_written = 0
        self.dtype = options.dtype if options.dtype != "auto" else config.dtype
        checkpoint, wide = self._checkpoint, options.dtype == "auto"
        try:
            shape = native_shape(config)
            expected: dict[str, tuple[int, ...]] | None = shape.expected_weights()
            size = options.tp_size
            self._ranks = [Shard.of(shape, rank, size) for rank in range(size if size > 1 else 0)]
        except NotNativeError as error:
            if options.quantization is not None or config.is_gguf or options.tp_size > 1:
                what = f"tp_size={options.tp_size}"
                if options.quantization is not None:
                    what = f"quantization={options.quantization!r}"
                what = "a GGUF file" if config.is_gguf else what
                raise UnsupportedModelError(
                    f"{config.path}: {what} needs a native family ({error})"
                ) from error
            expected, self._ranks = None, []
        if isinstance(checkpoint, (GgufCheckpoint, BlockCheckpoint)):
            if options.quantization is not None:
                raise UnsupportedModelError(
                    f"{config.path}: quantization = {options.quantization!r}: its weights have a "
                    "width already; leave it out"
                )
            assert expected is not None  # only native families have blocks
            self._load: Callable[..., Any] = (
                checkpoint.weight if wide else partial(checkpoint.load, dtype=self.dtype)
            )
            self.main_format = checkpoint.main_format() if wide else str(self.dtype)
            self.names = list(expected)
        else:
            assert isinstance(checkpoint, Checkpoint)  # one for ranks is refused when opened
            self.dtype = self.dtype or checkpoint.dtype()
            self._load = partial(checkpoint.load, dtype=self.dtype)
            self.main_format = options.quantization or self.dtype
            self.names = list(expected if expected is not None else checkpoint.entries)
            if options.quantization is not None:
                whole: Any = partial(checkpoint.load, dtype="float32")
                self._load = quantized_loader(whole, options.quantization, self.errors)
        if expected is not None:
            head_ids = read_draft_vocab(config.path, config.vocab_size)
            if head_ids is not None and "lm_head.weight" in expected:
                expected["lm_head.weight"] = (len(head_ids), config.hidden_size)
            tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
            checkpoint.check(expected, ignored=tied, ignored_suffixes=DERIVED_SUFFIXES)

    def __enter__(self) -> _Weights:
        return self

    def __exit__(self, *error: object) -> None:
        self._checkpoint.__exit__(*error)

    def write(self, folder: Path, tell: Callable[[str], object]) -> tuple[int, int]:
        """Write the shards and their index, of each rank; (shards, those of them that were
        there)."""
        if not self._ranks:
            return self._write_shards(folder, folder.parent, self.names, self._load, tell)
        count = resumed = 0
        for shard in self._ranks:
            own = rank_folder(folder, shard.rank)
            own.mkdir(exist_ok=True)

            def load(name: str, shard: Shard = shard) -> Any:
                return self._load(name, rows=shard.rows(name))

            tied = self._config.tie_word_embeddings
            names = [name for name in self.names if shard.reads(name, tied=tied)]
            tell(f"rank {shard.rank} of {shard.size}")
            written, there = self._write_shards(own, folder.parent, names, load, tell)
            count, resumed = count + written, resumed + there
        write_ranks(folder, len(self._ranks))
        return count, resumed

    def _write_shards(
        self,
        folder: Path,
        aside: Path,
        names: list[str],
        load: Callable[[str], Any],
        tell: Callable[[str], object],
    ) -> tuple[int, int]:
        weight_map: dict[str, str] = {}
        waiting = names
        count = resumed = size = 0
        while waiting:
            count += 1
            file = folder / f"model-{count:05d}.safetensors"
            if file.is_file():  # of a run that was interrupted
                done = self._note_written(file, load)
                resumed += 1
                tell(f"{file.name}: is there")
            else:
                shard = self._next_shard(waiting, load)
                part = aside / file.name  # under its final name it is complete
                write_safetensors(part, shard)
                part.rename(file)
                done = list(shard)
                self._checkpoint.drop_pages()
                tell(f"{file.name}: {len(done)} tensors, {file.stat().st_size} bytes")
            weight_map |= dict.fromkeys(done, file.name)
            size += file.stat().st_size
            waiting = waiting[len(done) :]
        index = {
            "metadata": {"total_size": size},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        self.bytes_written += size
        return count, resumed

    def _next_shard(self, names: list[str], load: Callable[[str], Any]) -> dict[str, Any]:
        """The first of `names`, as many as a shard holds."""
        shard: dict[str, Any] = {}
        size = 0
        for name in names:
            value = load(name)
            array = value[0] if isinstance(value, tuple) else value
            bits: Any = getattr(array, "bits", array)
            size += int(bits.nbytes)
            if shard and size > self._options.shard_bytes:
                break
            if isinstance(value, tuple):
                self.blocks[name] = value[1]
            shard[name] = array
        return shard

    def _note_written(self, file: Path, load: Callable[[str], Any]) -> list[str]:
        """The tensors of a shard that is there, and which of them are blocks."""
        written = SafetensorsFile(file)
        for name in written.names:
            if written.about(name)[0] == "U8":
                self.blocks[name] = load(name)[1]
        return written.names


def _hashes(path: Path) -> dict[str, str]:
    """sha256 of a file, or of the files of a folder. Raises ModelError."""
    if path.is_file():
        return {path.name: file_sha256(path)}
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder; give a local one, nothing is downloaded")
    return {file.name: file_sha256(file) for file in sorted(path.iterdir()) if file.is_file()}


def _source_hashes(config: ModelConfig) -> dict[str, str]:
    if config.is_gguf:
        return _hashes(config.path)
    patterns = [*_SOURCES, *_OTHER_FILES]
    files = {file for pattern in patterns for file in config.path.glob(pattern) if file.is_file()}
    return {file.name: file_sha256(file) for file in sorted(files)}


def _write_config(config: ModelConfig, weights: _Weights, folder: Path) -> None:
    content = {key: value for key, value in config.raw.items() if key != "torch_dtype"}
    content["dtype"] = weights.dtype
    if weights.blocks:
        content["quantization_config"] = block_config(weights.blocks)
    (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n")


def _copy_others(config: ModelConfig, folder: Path) -> None:
    if config.is_gguf:
        from ..text.gguf_tokenizer import gguf_tokenizer

        tokenizer = gguf_tokenizer(config.path)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return
    for name in _OTHER_FILES:
        if (config.path / name).is_file():
            shutil.copyfile(config.path / name, folder / name)


def _add_medusa(source: Path, target: Path, config: ModelConfig, allow_pickle: bool) -> None:
    from ..drafters.medusa.convert import write_heads
    from ..drafters.medusa.heads import load_heads

    heads = load_heads(source, allow_pickle=allow_pickle)
    found = heads.config
    _check_sizes("Medusa heads", source, found.hidden_size, found.vocab_size, config)
    write_heads(target, heads, "specdec")


def _add_redrafter(source: Path, target: Path, config: ModelConfig, allow_pickle: bool) -> None:
    from ..drafters.redrafter.model import load_redrafter, save_redrafter

    drafter = load_redrafter(source, allow_pickle=allow_pickle)
    shape = drafter.shape
    _check_sizes("a ReDrafter", source, shape.hidden_size, shape.vocab_size, config)
    save_redrafter(drafter, target)


_HEADS = {MEDUSA: _add_medusa, REDRAFTER: _add_redrafter}


def _check_sizes(
    what: str, source: Path, hidden_size: int, vocab_size: int, config: ModelConfig
) -> None:
    found, wanted = (hidden_size, vocab_size), (config.hidden_size, config.vocab_size)
    if found != wanted:
        raise ModelError(
            f"{source}: {what} for hidden_size {found[0]} and vocab_size {found[1]}; "
            f"{config.path} has {wanted[0]} and {wanted[1]}: give those trained for this model"
        )

"""A checkpoint that `specdec convert` wrote, checked against limits and timed: an engine folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from .._version import __version__
from ..config.engine import SchedulerConfig
from ..config.limits import MAX_DRAFT_LEN
from ..config.lookahead import LookaheadDecodingConfig
from ..config.methods import MedusaDecodingConfig, ReDrafterDecodingConfig
from ..config.ngram import NGramDecodingConfig
from ..config.parse import SpeculativeConfig
from ..config.sources import AutoDecodingConfig
from ..config.validate import check_int
from ..engine.served_cost import TABLE_FILE, cost_key, write_table
from ..errors import ConfigError, ModelError, UnsupportedConfigError
from ..models.config_reader import read_config
from ..models.host_arrays import kv_dtype_name
from ..models.native import NativeModel
from ..models.native_config import native_shape
from ..models.packed_model import PackedWeights, pack_model, source_entries
from ..models.rank_checkpoint import read_ranks
from ..models.shard import Shard
from .convert import CHECKPOINT, MEDUSA, REDRAFTER
from .engine_folder import ENGINE, ENGINE_FILE, MODEL, EngineFolder, engine_mode
from .folder_writer import check_folder, written_folder

if TYPE_CHECKING:
    from ..llm import LLM

__all__ = ["BuildOptions", "build"]

# A build may wait longer for the times of many rows than a first request may.
_COST_TIME_LIMIT_S = 20.0


@dataclass(frozen=True)
class BuildOptions:
    """What `specdec build` is told: the limits of TensorRT-LLM's names, and what drafts.

    max_input_len    None: what max_seq_len leaves
    max_seq_len      prompt + output tokens; None: what the model and the memory have room for
    max_num_tokens   rows of one pass; None: chosen
    max_draft_len    drafts of one step; None: that of the heads, for Medusa and ReDrafter
    """

    max_batch_size: int = 32
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    max_beam_width: int = 1
    max_draft_len: int | None = None
    speculative_decoding_mode: str | None = None
    gather_generation_logits: bool = False
    tokens_per_block: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.max_beam_width != 1:
            raise UnsupportedConfigError(
                f"max_beam_width = {self.max_beam_width}: limit 1, there is no beam search; use "
                "--max_beam_width=1"
            )
        if self.max_draft_len is not None:
            check_int("max_draft_len", self.max_draft_len, ConfigError, low=0, high=MAX_DRAFT_LEN)
        engine_mode(self.speculative_decoding_mode)
        lengths = (self.max_input_len, self.max_seq_len)
        if None not in lengths and self.max_input_len >= self.max_seq_len:  # type: ignore[operator]
            raise ConfigError(
                f"max_input_len = {self.max_input_len} leaves no room for an output token in "
                f"max_seq_len = {self.max_seq_len}; lower one or raise the other"
            )


def build(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    options: BuildOptions,
    rebuild: tuple[str, ...],
    *,
    tell: Callable[[str], object] = lambda text: None,
) -> EngineFolder:
    """Write the engine folder `output_dir`, which may hold the checkpoint's folder.

    rebuild  the command that does this again, for refusals
    tell     called with one line for each stage

    Raises ConfigError, ModelError.
    """
    checkpoint = Path(checkpoint_dir).expanduser()
    target = Path(output_dir).expanduser()
    is_model = (checkpoint / "config.json").is_file() or checkpoint.is_file()
    source, place = ("MODEL", checkpoint)
    if is_model or (checkpoint / ENGINE_FILE).is_file():  # a folder of somebody else's
        source, place = (str(checkpoint) if is_model else "MODEL", Path("CHECKPOINT"))
    write_one = f"specdec convert --model_dir={source} --output_dir={place}"
    manifest = check_folder(checkpoint, CHECKPOINT, f"write one: {write_one}")
    config = _speculation(checkpoint, options)
    _check_rows(options, config)
    files = manifest["files"]
    origin = {
        "made_by": f"specdec_ext {__version__}",
        "checkpoint": str(checkpoint.resolve()),
        "files": {name: entry["sha256"] for name, entry in files.items()},
        "command": list(rebuild),
    }
    with written_folder(target, ENGINE, origin, resumes=False) as folder:
        weights: dict[str, str] = {}
        for name, about in files.items():
            is_head = name.split("/")[0] in (MEDUSA, REDRAFTER)
            _link(checkpoint / name, (folder if is_head else folder / MODEL) / name)
            if name.endswith(".safetensors") and not is_head:
                weights[name] = about["sha256"]
        tell(f"weights and tokenizer of {checkpoint}")
        engine = _measured(folder, target, options, config, rebuild, weights, tell)
        engine.write(folder)
    return engine


def _link(source: Path, target: Path) -> None:
    """The same file under another name, which costs no disk; a copy on another file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copy2(source, target)


def _speculation(checkpoint: Path, options: BuildOptions) -> SpeculativeConfig | None:
    """A configuration with as many drafts as the engine is to have room for."""
    mode, drafts = engine_mode(options.speculative_decoding_mode), options.max_draft_len
    if mode in (MEDUSA, REDRAFTER):
        folder = checkpoint / mode
        if not folder.is_dir():
            raise ModelError(
                f"{checkpoint}: speculative_decoding_mode = {options.speculative_decoding_mode!r} "
                f"needs {mode}/ in the checkpoint; convert again with --{mode}_model=DIR"
            )
        config: Any = (
            MedusaDecodingConfig(folder) if mode == MEDUSA else ReDrafterDecodingConfig(folder)
        )
        if drafts is None:
            return config  # type: ignore[no-any-return]
    elif mode == "none":
        if drafts:
            raise ConfigError(
                f"max_draft_len = {drafts} without speculative_decoding_mode; say how is drafted, "
                "for example --speculative_decoding_mode=ngram, or leave max_draft_len out"
            )
        return None
    elif mode == "auto":
        return AutoDecodingConfig(max_draft_len=drafts) if drafts else AutoDecodingConfig()
    if not drafts:
        raise ConfigError(
            f"speculative_decoding_mode = {options.speculative_decoding_mode!r} "
            f"{'without max_draft_len' if drafts is None else 'with max_draft_len = 0'}: give "
            f"--max_draft_len, 1..{MAX_DRAFT_LEN}; lookahead (7,7,7) needs 83"
        )
    if mode == "lookahead":  # any number of drafts is that of a triple
        return LookaheadDecodingConfig(drafts, 2, 1)
    return NGramDecodingConfig(max_draft_len=drafts)


def _check_rows(options: BuildOptions, config: SpeculativeConfig | None) -> None:
    drafts = 0 if config is None else config.max_draft_len
    need, rows = options.max_batch_size * (drafts + 1), options.max_num_tokens
    if rows is not None and rows < need:
        raise ConfigError(
            f"max_num_tokens = {rows} is less than max_batch_size x (max_draft_len + 1) = "
            f"{options.max_batch_size} x {drafts + 1} = {need}; raise max_num_tokens to {need}, or "
            "lower one of the others"
        )


def _measured(
    folder: Path,
    target: Path,
    options: BuildOptions,
    config: SpeculativeConfig | None,
    rebuild: tuple[str, ...],
    weights: Mapping[str, str],
    tell: Callable[[str], object],
) -> EngineFolder:
    """Load what lies in `folder` within the limits, write its table of step times and, of what the
    CPU's native decoder runs, its packed weights.

    weights  sha256 of the files with the weights, by their names in the model's folder
    """
    from ..llm import LLM

    drafts = 0 if config is None else config.max_draft_len
    # Networks are loaded when the engine runs; here their rows count.
    room = NGramDecodingConfig(max_draft_len=drafts) if drafts else None
    cache = {"tokens_per_block": options.tokens_per_block} if options.tokens_per_block else None
    scheduler = SchedulerConfig(
        max_batch_size=options.max_batch_size,
        max_seq_len=options.max_seq_len,
        max_input_len=options.max_input_len,
        max_num_tokens=options.max_num_tokens,
    )
    tp_size = read_ranks(folder / MODEL)
    with LLM(
        folder / MODEL,
        tensor_parallel_size=tp_size,
        speculative_config=room,
        scheduler_config=scheduler,
        kv_cache_config=cache,
        device=options.device,
    ) as llm:
        tell(f"{llm.model.info.architecture}, {llm.model.info.dtype}, on {llm.device}")
        cost = llm.measure_step_cost(_COST_TIME_LIMIT_S)
        if cost is not None:
            write_table(folder / MODEL / TABLE_FILE, cost_key(llm.model), cost, 0)
            rows, seconds = cost.columns[:2]
            some = sorted({*range(0, len(rows), 4), len(rows) - 1})
            words = ", ".join(f"{rows[i]}: {1e3 * seconds[i]:.2f} ms" for i in some)
            tell(f"T(rows), the time of a pass by its rows: {words}")
        for file in _packed(folder / MODEL, llm, weights, rebuild):
            tell(f"packed weights: {file.name}, {file.stat().st_size} bytes")
        return EngineFolder(
            path=target,
            max_batch_size=llm.memory.max_batch_size,
            max_input_len=options.max_input_len or llm.memory.max_seq_len - 1,
            max_seq_len=llm.memory.max_seq_len,
            max_num_tokens=llm.memory.max_num_tokens,
            max_beam_width=1,
            max_draft_len=drafts,
            tokens_per_block=llm.memory.tokens_per_block,
            mode=options.speculative_decoding_mode,
            gather_generation_logits=options.gather_generation_logits,
            dtype=str(kv_dtype_name(llm.model)),
            device=llm.device,
            isa=_core.cpu_isa() if llm.device == "cpu" else "",
            tp_size=tp_size,
            built_by=__version__,
            rebuild=rebuild,
        )


def _packed(
    folder: Path, llm: LLM, weights: Mapping[str, str], rebuild: tuple[str, ...]
) -> Iterator[Path]:
    """Write the packed weights of each rank; none for a device or the adapter."""
    if llm.device != "cpu" or not isinstance(llm.model, NativeModel):
        return
    config = read_config(folder)
    shape, dtype = native_shape(config), llm.model.kv_dtype_name
    size = read_ranks(folder)
    for rank in range(size):
        shard = Shard.of(shape, rank, size) if size > 1 else None
        model: Any = llm.model
        if rank > 0:
            model = NativeModel(
                config, shape, dtype, impl_reason="", max_rows=1,
                max_seq_len=llm.model.max_position, own_widths=bool(config.blocks), shard=shard,
            )  # fmt: skip
        wanted = PackedWeights.of(dtype, bool(config.blocks), None, shard)
        own = {n: sha for n, sha in weights.items() if size == 1 or n.startswith(f"rank{rank}/")}
        path = folder / wanted.file_name
        pack_model(path, model, config, shape, wanted,
                   sources=source_entries(folder, own), rebuild=rebuild)  # fmt: skip
        yield path

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
from pathlib import Path

from .._version import __version__
from ..errors import ModelError
from ..models.block_config import FP8_KV, block_config
from ..models.config_reader import ModelConfig, read_config
from ..models.decoder_file import write_decoder_file
from ..models.draft_vocab import DRAFT_VOCAB_FILE
from ..models.folder_cache import file_sha256
from ..models.quantize import worst_first
from .convert_options import ConvertOptions
from .folder_writer import written_folder
from .source_weights import SourceWeights

__all__ = ["CHECKPOINT", "MEDUSA", "REDRAFTER", "ConvertOptions", "convert"]

CHECKPOINT = "checkpoint"
MEDUSA, REDRAFTER = "medusa", "redrafter"  # folders of what drafts, below a checkpoint
# Beside the weights, as far as they are there.
_OTHER_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", DRAFT_VOCAB_FILE, "LICENSE", "LICENSE.txt",
)  # fmt: skip
_SOURCES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.json")


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
    weights = SourceWeights(config, options)
    narrowing = options.narrowing
    origin = {
        "made_by": f"specdec_ext {__version__}",
        "model": str(config.path.resolve()),
        "files": _source_hashes(config),
        "dtype": options.dtype,
        "quantization": narrowing.plain if narrowing is not None else None,
        "heads": {
            name: {"path": str(path.resolve()), "files": _hashes(path)}
            for name, path in _heads(options).items()
        },
        "shard_bytes": options.shard_bytes,
        "tp_size": options.tp_size,
    }
    target = Path(output_dir).expanduser()
    with weights, written_folder(target, CHECKPOINT, origin, resumes=True) as folder:
        for note in weights.notes:
            tell(note)
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
    assert options.narrowing is not None
    write_report(folder, options.narrowing.plain, errors, found)


def _heads(options: ConvertOptions) -> dict[str, Path]:
    given = {MEDUSA: options.medusa_model, REDRAFTER: options.redrafter_model}
    return {name: path.expanduser() for name, path in given.items() if path is not None}


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


def _write_config(config: ModelConfig, weights: SourceWeights, folder: Path) -> None:
    content = {key: value for key, value in config.raw.items() if key != "torch_dtype"}
    content["dtype"] = weights.dtype
    if weights.blocks:
        content["quantization_config"] = block_config(weights.blocks)
    if config.fp8_kv:
        content |= FP8_KV
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

"""The tensors of a checkpoint that is converted, and the shards that they are written to."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UnsupportedModelError
from ..models.block_checkpoint import BlockCheckpoint
from ..models.config_reader import ModelConfig
from ..models.draft_vocab import read_draft_vocab
from ..models.fused_rows import FusedCheckpoint
from ..models.gguf_weights import GgufCheckpoint
from ..models.kv_storage import read_kv_scales
from ..models.native import IGNORED_SUFFIXES
from ..models.native_config import NotNativeError, native_shape
from ..models.open_checkpoint import open_checkpoint
from ..models.quant_checkpoint import QuantCheckpoint
from ..models.quantize import check_quantizable, quantized_loader
from ..models.rank_checkpoint import rank_folder, write_ranks
from ..models.safetensors_file import SafetensorsFile, write_safetensors
from ..models.shard import Shard
from ..models.weights import INDEX, Checkpoint
from .convert_options import ConvertOptions

__all__ = ["SourceWeights"]


class SourceWeights:
    """The tensors of the source as they are to be written, one at a time."""

    def __init__(self, config: ModelConfig, options: ConvertOptions) -> None:
        self._config, self._options = config, options
        self._checkpoint = open_checkpoint(config, allow_pickle=options.allow_pickle)
        self.blocks: dict[str, str] = {}
        self.errors: dict[str, float] = {}
        self.notes: list[str] = []  # what a user did not ask for
        self.bytes_written = 0
        self.dtype = options.dtype if options.dtype != "auto" else config.dtype
        checkpoint, wide = self._checkpoint, options.dtype == "auto"
        try:
            shape = native_shape(config)
            expected: dict[str, tuple[int, ...]] | None = shape.expected_weights()
            size = options.tp_size
            self._ranks = [Shard.of(shape, rank, size) for rank in range(size if size > 1 else 0)]
        except NotNativeError as error:
            has_width = config.is_gguf or config.quant is not None
            if options.quantization is not None or has_width or options.tp_size > 1:
                what = f"tp_size={options.tp_size}"
                if options.quantization is not None:
                    what = f"quantization={options.quantization!r}"
                what = f"a checkpoint by {config.quant.method}" if config.quant else what
                what = "a GGUF file" if config.is_gguf else what
                raise UnsupportedModelError(
                    f"{config.path}: {what} needs a native family ({error})"
                ) from error
            expected, self._ranks = None, []
        files = checkpoint.files if isinstance(checkpoint, FusedCheckpoint) else checkpoint
        if isinstance(files, (GgufCheckpoint, BlockCheckpoint, QuantCheckpoint)):
            if options.quantization is not None:
                raise UnsupportedModelError(
                    f"{config.path}: quantization = {options.quantization!r}: its weights have a "
                    "width already; leave it out"
                )
            assert expected is not None  # only native families have blocks
            if self.dtype is None and isinstance(files, QuantCheckpoint):
                self.dtype = files.dtype()
            own: Callable[..., Any] = checkpoint.weight  # type: ignore[union-attr]
            self._load: Callable[..., Any] = (
                own if wide else partial(checkpoint.load, dtype=self.dtype)
            )
            to_floats = config.quant is not None and config.quant.form == "fp8"
            kept = wide and not to_floats
            self.main_format = files.main_format() if kept else str(self.dtype)
            self.names = list(expected)
        else:
            assert isinstance(files, Checkpoint)  # one for ranks is refused when opened
            self.dtype = self.dtype or files.dtype()
            self._load = partial(checkpoint.load, dtype=self.dtype)
            narrowing = options.narrowing
            self.main_format = str(narrowing or self.dtype)
            self.names = list(expected if expected is not None else files.entries)
            if narrowing is not None:
                assert expected is not None  # only native families are narrowed
                tied, name = config.tie_word_embeddings, str(self.dtype)
                stay = check_quantizable(config.path, expected, narrowing, dtype=name, tied=tied)
                self.notes += [] if stay is None else [stay]
                whole: Any = partial(checkpoint.load, dtype="float32")
                self._load = quantized_loader(whole, narrowing, self.errors, dtype=name, tied=tied)
        if expected is not None:
            head_ids = read_draft_vocab(config.path, config.vocab_size)
            if head_ids is not None and "lm_head.weight" in expected:
                expected["lm_head.weight"] = (len(head_ids), config.hidden_size)
            ignored = ("lm_head.weight",) if config.tie_word_embeddings else ()
            checkpoint.check(expected, ignored=ignored, ignored_suffixes=IGNORED_SUFFIXES)
            if isinstance(checkpoint, FusedCheckpoint) and not self._ranks:
                self.names = list(checkpoint.stored(expected))  # as the family's folders have them
        self._kv_scales = read_kv_scales(config, options.allow_pickle)
        self.names += [name for name in self._kv_scales if name not in self.names]

    def __enter__(self) -> SourceWeights:
        return self

    def __exit__(self, *error: object) -> None:
        self._checkpoint.__exit__(*error)

    def write(self, folder: Path, tell: Callable[[str], object]) -> tuple[int, int]:
        """Write the shards and their index, of each rank; (shards, those of them that were
        there)."""
        if not self._ranks:

            def whole(name: str) -> Any:
                scale = self._kv_scales.get(name)
                return self._load(name) if scale is None else scale

            return self._write_shards(folder, folder.parent, self.names, whole, tell)
        count = resumed = 0
        for shard in self._ranks:
            own = rank_folder(folder, shard.rank)
            own.mkdir(exist_ok=True)

            def load(name: str, shard: Shard = shard) -> Any:
                scale = self._kv_scales.get(name)  # of all heads: a rank takes its own
                return self._load(name, rows=shard.rows(name)) if scale is None else scale

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

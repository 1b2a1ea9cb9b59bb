"""Which packed file has the weights of a model that is asked for, and how one comes to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..config.quantization import Quantization
from ..errors import ModelError
from ..log import logger
from .config_reader import ModelConfig
from .default import is_default_model
from .folder_cache import cache_root, cached_folder, remembered_sha256
from .packed_file import PackedFile, packed_name, write_packed
from .rope import rope_tables
from .shard import Shard

if TYPE_CHECKING:
    from .native import NativeModel
    from .native_config import NativeShape

__all__ = ["PackedWeights", "find_packed", "pack_model", "source_entries"]


@dataclass(frozen=True)
class PackedWeights:
    """What a file of packed weights is made for: load_model's arguments that change a bit of it.

    dtype       of weights that are floats, and of K and V
    own_widths  each weight in the width that the source has
    quantization
                as Quantization.plain says it
    """

    dtype: str
    own_widths: bool
    quantization: str | dict[str, Any] | None
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of(
        cls, dtype: str, own_widths: bool, quantization: Quantization | None, shard: Shard | None
    ) -> PackedWeights:
        rank, ranks = (0, 1) if shard is None else (shard.rank, shard.size)
        plain = None if quantization is None else quantization.plain
        return cls(dtype, own_widths, plain, rank, ranks)

    @property
    def file_name(self) -> str:
        return packed_name(self.rank, self.ranks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "own_widths": self.own_widths,
            "quantization": self.quantization,
            "rank": self.rank,
            "ranks": self.ranks,
        }


def pack_model(
    path: Path,
    model: NativeModel,
    config: ModelConfig,
    shape: NativeShape,
    wanted: PackedWeights,
    *,
    sources: Mapping[str, Mapping[str, Any]],
    rebuild: Sequence[str] = (),
) -> None:
    """Write the packed weights of a model that was loaded as `wanted` says.

    sources  of each file that was read: bytes, mtime_ns, sha256
    rebuild  see write_packed(). Raises OSError.
    """
    ropes = {
        index: rope_tables(config.hf, model.max_position, shape.rope_layer_types[index])
        for index in sorted(set(shape.rope_index) - {-1})
    }
    write_packed(
        path,
        model.core,
        ropes,
        weights={**wanted.to_dict(), "width": model.info.dtype, "sources": dict(sources)},
        config=model.weights_config,
        rebuild=rebuild,
        warnings=model.info.warnings,
    )


def find_packed(
    config: ModelConfig,
    shape: NativeShape,
    wanted: PackedWeights,
    load: Callable[[], NativeModel] | None = None,
) -> PackedFile | None:
    """The packed weights of a model; None: there are none, so they are read and packed.

    An engine's folder has them beside the weights that they were made of. Those of the built-in
    model lie below the cache root, made when it is asked for first, with what `load` gives.

    Raises ModelError for a file that cannot be used.
    """
    if config.is_gguf:
        if load is None or not wanted.own_widths or not is_default_model(config.path):
            return None
        return _cached(config, shape, wanted, load)
    path = config.path / wanted.file_name
    if not path.is_file():
        return None
    packed = PackedFile.open(path)
    found = {name: packed.weights.get(name) for name in wanted.to_dict()}
    if found != wanted.to_dict():
        logger.info("%s: packed as %s, asked for %s: not used", path, found, wanted.to_dict())
        return None
    _check_sources(config.path, packed)
    return packed


def _check_sources(folder: Path, packed: PackedFile) -> None:
    """Raises ModelError where the model's files are others than those that were packed."""
    sources = packed.weights.get("sources")
    for name, about in (sources if isinstance(sources, dict) else {}).items():
        file = folder / str(name)
        try:
            stat = file.stat()
            same = about["bytes"] == stat.st_size and (
                about["mtime_ns"] == stat.st_mtime_ns or about["sha256"] == remembered_sha256(file)
            )
        except (OSError, KeyError, TypeError) as error:
            raise ModelError(
                f"{packed.path}: header.weights.sources[{str(name)!r}] cannot be compared with "
                f"{file} ({error!r}); {packed.remedy}"
            ) from error
        if not same:
            raise ModelError(
                f"{packed.path}: was packed from another {file.name} (header.weights.sources) than "
                f"lies beside it; {packed.remedy}"
            )


def source_entries(folder: Path, entries: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What a packed file says of its sources, file name -> sha256."""
    result = {}
    for name, sha256 in entries.items():
        stat = (folder / name).stat()
        result[name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
    return result


def _cached(
    config: ModelConfig,
    shape: NativeShape,
    wanted: PackedWeights,
    load: Callable[[], NativeModel],
) -> PackedFile | None:
    sha256 = remembered_sha256(config.path)
    origin = {
        "source_sha256": sha256,
        "made_by": f"specdec_ext {_core.__version__}",
        "layout": str(_core.PACK_LAYOUT),
        "dtype": wanted.dtype,
    }
    folder = cache_root() / "packed" / f"{config.path.stem}-{sha256[:12]}-{wanted.dtype}"

    def write(work: Path) -> None:
        logger.info("%s: packed once, below %s", config.path.name, folder)
        pack_model(work / wanted.file_name, load(), config, shape, wanted, sources={})

    try:
        return PackedFile.open(cached_folder(folder, origin, write) / wanted.file_name)
    except ModelError as error:  # a cache that cannot be written: packed at every load
        logger.info("%s", error)
        return None

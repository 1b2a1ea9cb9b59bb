"""How the pages of a model hold K and V: their type, its scales, and what a token takes.

A model computes K and V in `kv_dtype`; its pages hold that, or fewer bits (KvCacheConfig.dtype).
Shapes and bytes follow from _core.kv_row_width, which append, attention and compaction go by too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import ConfigError, ModelError, UnsupportedModelError
from .config_reader import ModelConfig
from .host_arrays import HostArray, converted, kv_dtype_name
from .rank_checkpoint import rank_folder, read_ranks
from .weights import Checkpoint

if TYPE_CHECKING:
    from .place import Place

__all__ = [
    "KV_SCALE_SUFFIXES",
    "KvStorage",
    "LayerPool",
    "kv_storage",
    "page_shape",
    "storage_dtype",
]
__all__ += ["read_kv_scales", "stored_name", "token_bytes", "wanted_type"]

# KvCacheConfig.dtype -> dtype of the pages, for what no model computes in.
_NARROW = {"fp8": "float8_e4m3fn", "int8": "int8"}
# What checkpoints call the scales of a layer's K and V, behind "model.layers.<i>.self_attn.":
# compressed-tensors and AutoFP8, ModelOpt; old AutoFP8 files have one for both.
_SCALE_NAMES = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"))
_ONE_SCALE = "kv_scale"
KV_SCALE_SUFFIXES = tuple(
    f".self_attn.{name}" for name in (*(n for pair in _SCALE_NAMES for n in pair), _ONE_SCALE)
)


@dataclass(frozen=True)
class KvStorage:
    """dtype             of the pages, as torch names it
    k_scale, v_scale  float32 [layers, G], of float8_e4m3fn pages: K is what they hold times this;
                      None: 1
    """

    dtype: str
    k_scale: np.ndarray | None = None
    v_scale: np.ndarray | None = None

    def of_heads(self, first: int, last: int) -> KvStorage:
        """The same of K/V heads first, ..., last - 1."""
        own = [
            None if scale is None else np.ascontiguousarray(scale[:, first:last])
            for scale in (self.k_scale, self.v_scale)
        ]
        return KvStorage(self.dtype, *own)

    @property
    def in_words(self) -> str:
        if self.dtype != _NARROW["fp8"]:
            return f"{self.dtype} K/V"
        return f"{self.dtype} K/V, scales {'1' if self.k_scale is None else 'of the checkpoint'}"


def storage_dtype(wanted: str, kv_dtype: str, place: Place | None) -> str:
    """The dtype of pages: KvCacheConfig.dtype = `wanted`, a model that computes in `kv_dtype`.

    Raises ConfigError for one that cannot be had.
    """
    if wanted in ("auto", kv_dtype):
        return kv_dtype
    if wanted not in _NARROW:
        raise ConfigError(
            f"KvCacheConfig.dtype = {wanted!r}: this model keeps K and V in {kv_dtype}; use "
            f"'auto', 'fp8' or 'int8', or load the model with dtype={wanted!r}"
        )
    if wanted == "int8" and place is not None and not place.is_cpu:
        raise ConfigError(
            f"KvCacheConfig.dtype = 'int8': {place.name} has no kernels for it; use 'fp8', "
            "which is as narrow, or device='cpu'"
        )
    return _NARROW[wanted]


def wanted_type(wanted: str, config: ModelConfig) -> str:
    """KvCacheConfig.dtype with "auto" as the checkpoint means it: fp8 if its K/V were made for it,
    else the model's own."""
    return "fp8" if wanted == "auto" and config.fp8_kv else wanted


def kv_storage(
    config: ModelConfig,
    wanted: str,
    kv_dtype: str,
    place: Place | None,
    allow_pickle: bool = False,
    rank: int = 0,
) -> KvStorage:
    """How the pages of this model hold K and V, of all its K/V heads.

    rank  whose shards have the scales, of a checkpoint that was converted for several ranks

    Raises ConfigError, ModelError.
    """
    dtype = storage_dtype(wanted_type(wanted, config), kv_dtype, place)
    if dtype != _NARROW["fp8"] or config.is_gguf:
        return KvStorage(dtype)
    in_ranks = read_ranks(config.path) > 1
    folder = rank_folder(config.path, rank) if in_ranks else config.path
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        return KvStorage(dtype, *_read_scales(config, checkpoint))


def read_kv_scales(config: ModelConfig, allow_pickle: bool) -> dict[str, HostArray]:
    """The scales that a folder has, float32, by the names of their tensors. Raises ModelError."""
    if config.is_gguf:
        return {}
    with Checkpoint(config.path, allow_pickle=allow_pickle) as checkpoint:
        names = [name for name in checkpoint.entries if name.endswith(KV_SCALE_SUFFIXES)]
        return {name: np.array(checkpoint.load(name, "float32")) for name in names}


def _read_scales(
    config: ModelConfig, checkpoint: Checkpoint
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """float32 [layers, G] of K and of V; None where the checkpoint has none."""
    pairs = (*_SCALE_NAMES, (_ONE_SCALE, _ONE_SCALE))
    prefix = "model.layers.{}.self_attn."
    found = [p for p in pairs if any(prefix.format(0) + name in checkpoint.entries for name in p)]
    if not found:
        return None, None
    scales = []
    for name in found[0]:
        rows = [
            _read_scale(config, checkpoint, prefix.format(layer) + name)
            for layer in range(config.num_layers)
        ]
        scales.append(np.stack(rows))
    return scales[0], scales[1]


def _read_scale(config: ModelConfig, checkpoint: Checkpoint, name: str) -> np.ndarray:
    """float32 [G]."""
    entry = checkpoint.entries.get(name)
    if entry is None:
        raise ModelError(
            f"{config.path}: tensor {name!r} is missing, other layers have a scale of their K/V; "
            "the files are incomplete"
        )
    size = int(np.prod(entry.shape))
    if size not in (1, config.num_kv_heads):
        raise ModelError(
            f"{entry.file}: tensor {name!r} has shape {list(entry.shape)}: a scale of K/V is one "
            f"number, or one for each of the {config.num_kv_heads} K/V heads"
        )
    if entry.dtype not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModelError(
            f"{entry.file}: tensor {name!r} has dtype {entry.dtype}: a scale of K/V is float32, "
            "bfloat16 or float16"
        )
    values: Any = converted(checkpoint.read(name), "float32")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ModelError(
            f"{entry.file}: tensor {name!r} = {values.reshape(-1).tolist()}: a scale of K/V is a "
            "finite number above 0; the checkpoint is damaged"
        )
    return np.broadcast_to(values.reshape(-1), config.num_kv_heads).astype(np.float32)


def stored_name(model: Any) -> str | None:
    """The dtype of a model's pages as torch names it; None for what has no K/V."""
    storage = getattr(model, "kv_storage", None)
    return kv_dtype_name(model) if storage is None else storage.dtype


def page_shape(
    model: Any, num_pages: int, page_size: int, layers: int | None = None
) -> tuple[int, ...]:
    """The pages of K, and of V: [layers, P, G, S, elements of a token's vector]; of so many layers,
    None: all."""
    width = _core.kv_row_width(str(stored_name(model)), model.head_dim)
    layers = model.num_layers if layers is None else layers
    return layers, num_pages, model.num_kv_heads, page_size, width


@dataclass(frozen=True)
class LayerPool:
    """Pages of the layers of a narrow window, where they are fewer than the others' and go by
    numbers of their own (a device; cpp/kv/page_parts.h).

    layers  of the model
    k, v    [len(layers), P, G, S, elements of a token's vector]
    """

    layers: tuple[int, ...]
    k: Any
    v: Any


def token_bytes(model: Any, dtype: str) -> int:
    """K and V of one token in all layers, in pages of `dtype`; `model` has num_layers,
    num_kv_heads and head_dim."""
    row = _core.kv_row_bytes(dtype, model.head_dim)
    return 2 * int(model.num_layers) * int(model.num_kv_heads) * row

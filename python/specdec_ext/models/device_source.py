"""A checkpoint's tensors for a device: as they are stored where a kernel reads that, or floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config.quantization import Quantization
from ..log import logger
from .device_blocks import Loaded, is_kept
from .host_arrays import as_torch
from .quantize import quantized_loader, worst_first
from .shard import Shard, take_columns

__all__ = ["DeviceSource"]


class DeviceSource:
    """Loads from an open checkpoint.

    dtype         of the model
    own_widths    blocks stay blocks
    quantization  weights become blocks
    tied          the embeddings are the head
    shard         whose part of each tensor is loaded, of one of several ranks; None: all of it
    shapes        of the whole tensors, by name
    """

    def __init__(
        self,
        checkpoint: Any,
        dtype: torch.dtype,
        *,
        own_widths: bool,
        quantization: Quantization | None,
        tied: bool = False,
        shard: Shard | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._checkpoint, self._dtype, self._quantization = checkpoint, dtype, quantization
        self._shard, self._shapes = shard, shapes or {}
        self._errors: dict[str, float] = {}
        self._converted: set[str] = set()
        self._load: Any = checkpoint.load
        if quantization is not None:
            whole = partial(checkpoint.load, dtype="float32")
            name = str(dtype).removeprefix("torch.")
            self._load = quantized_loader(whole, quantization, self._errors, dtype=name, tied=tied)
        elif own_widths and hasattr(checkpoint, "weight"):
            self._load = checkpoint.weight

    def load(self, name: str) -> Loaded:
        """A tensor, or the blocks of a matrix and their format, which a device has kernels for."""
        found = self._part(self._load, name)
        if not isinstance(found, tuple):
            return as_torch(found)
        if is_kept(found[1], self._dtype):
            return found
        self._converted.add(found[1])
        return as_torch(self._part(self._checkpoint.load, name))

    def _part(self, load: Callable[..., Any], name: str) -> Any:
        shard = self._shard
        if shard is None:
            return load(name)
        weight, columns = load(name, rows=shard.rows(name)), shard.columns(name)
        if columns is None:
            return weight
        return take_columns(weight, columns, self._shapes[name][1], name)

    @property
    def quantization_errors(self) -> tuple[tuple[str, float], ...]:
        """As NativeModel has them."""
        return worst_first(self._errors)

    def tell(self, path: Path, where: str) -> None:
        """Log what a user did not ask for: once, after all is loaded."""
        if self._converted:
            formats = ", ".join(sorted(self._converted))
            dtype = str(self._dtype).removeprefix("torch.")
            logger.info("%s: %s weights become %s on %s", path, formats, dtype, where)
        for name, lost in self.quantization_errors[:3]:
            logger.info("%s: %s: relative error %.4f", self._quantization, name, lost)

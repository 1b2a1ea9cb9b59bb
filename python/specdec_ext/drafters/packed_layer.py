"""Layers of a drafter's network on the CPU: in blocks of few bits.

Every draft reads the whole network, so its bytes are its time. What it says only has to be likely:
the target decides, and speculative text is plain decoding's whatever was drafted. With 8 bits as
many drafts are right as with 16; 4 bits lose about one in a hundred, where the target of 4 bits
reads so little that the time counts more (docs/methods/redrafter.md, "Width").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _core
from ..models.block_config import BLOCKS
from ..models.host_arrays import HostArray, converted, kv_dtype_name, stacked
from ..models.quantize import to_blocks

__all__ = ["drafter_format", "pack_layer"]


def drafter_format(target: Any) -> str | None:
    """The blocks of a drafter's layers beside this target: Q4_1 if it has 4 bits, Q8_0 beside
    others that compute in 16 bits; None beside float32: as floats."""
    if kv_dtype_name(target) == "float32":
        return None
    width = str(getattr(getattr(target, "info", None), "dtype", ""))
    return "q4_1" if width.startswith(("q4", "int4")) else "q8_0"


def pack_layer(
    weights: Sequence[HostArray], bias: HostArray | None, dtype: str, format: str | None
) -> Any:
    """_core.PackedLinear of weights [n, K], one below the other, and a bias of all rows.

    format  of the blocks; None, and rows of no whole blocks: they stay floats, of `dtype`
    """
    addend = None if bias is None else converted(bias, "float32")
    if format is None or weights[0].shape[1] % BLOCKS[format][0]:
        return _core.PackedLinear(stacked(weights, dtype), addend)
    blocks = [to_blocks(np.asarray(converted(weight, "float32")), format) for weight in weights]
    return _core.PackedLinear((np.concatenate(blocks), format), addend)

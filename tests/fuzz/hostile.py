"""Valid arguments made hostile: one to three of a call's arguments are replaced or damaged."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Arguments = dict[str, Any]

INTS = [
    -1, 0, 1, 2, 127, 128, 129, 255, 65535, 2**24, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64,
    -2, -128, -(2**31), -(2**31) - 1, -(2**63), -(2**64),
]  # fmt: skip
WORDS = [-1, 0, 1, 2, 63, 127, 128, 2**16, 2**30, 2**31 - 1, 2**31 - 2, -(2**31), -2, -128]
FLOATS = [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, -0.0, 1e-45, 1e38, 1e300, 2.0]
STRINGS = ["", "cpu", "cuda", "x" * 5000, "\ud800", "a\0b", "float32", "Ünïcödé"]
OBJECTS: list[Any] = [None, [], {}, (), object(), b"", 1.5, "x", True, -1, [None], [[]], [2**40]]
NOT_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn)
DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64,
    torch.uint8, torch.int8, torch.bool, torch.complex64, torch.uint32,
]  # fmt: skip


def hostile_int(rng: random.Random) -> Any:
    return rng.choice([*INTS, rng.randrange(-300, 300), 1.5, None, "3"])


def hostile_float(rng: random.Random) -> Any:
    return rng.choice([*FLOATS, *FLOATS, None, "x", rng.uniform(-2, 2)])


def poisoned(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """A copy with a few wild values."""
    copy = tensor.clone()
    flat = copy.reshape(-1)
    for _ in range(rng.choice([1, 1, 2, 5])):
        if flat.numel() == 0:
            break
        at = rng.randrange(flat.numel())
        if copy.dtype == torch.bool:
            flat[at] = bool(rng.getrandbits(1))
        elif copy.dtype == torch.uint8:
            flat[at] = rng.randrange(256)
        elif copy.dtype.is_floating_point:
            flat[at] = torch.tensor(rng.choice(FLOATS), dtype=torch.float64).to(copy.dtype)
        else:
            flat[at] = rng.choice(WORDS)
    return flat.reshape(copy.shape)


def unaligned(tensor: torch.Tensor) -> Any:
    """The same values at an address that is no multiple of the element's size."""
    size = tensor.element_size()
    if size == 1 or tensor.dtype in NOT_IN_NUMPY:
        return tensor
    raw = np.zeros(tensor.numel() * size + 1, np.uint8)
    array = raw[1:].view(tensor.numpy().dtype).reshape(tensor.shape)
    array[...] = tensor.numpy()
    return array


def backwards(tensor: torch.Tensor) -> Any:
    """Negative strides, which torch does not have."""
    return tensor if tensor.dtype in NOT_IN_NUMPY else tensor.numpy()[::-1]


def read_only(tensor: torch.Tensor) -> Any:
    if tensor.dtype in NOT_IN_NUMPY:
        return tensor
    array = tensor.numpy().copy()
    array.setflags(write=False)
    return array


def endless(tensor: torch.Tensor) -> torch.Tensor:
    """A first axis of 2^31 or 2^40 entries, all in the same place."""
    wide = tensor[:1] if tensor.ndim and tensor.shape[0] else torch.zeros(1, dtype=tensor.dtype)
    return wide.expand(2**40, *wide.shape[1:])


def other_shape(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    shape = list(tensor.shape)
    change = rng.randrange(5)
    if change == 0 or not shape:
        shape.insert(rng.randrange(len(shape) + 1), rng.choice([0, 1, 2]))
    elif change == 1:
        shape.pop(rng.randrange(len(shape)))
    else:
        axis = rng.randrange(len(shape))
        shape[axis] = max(0, rng.choice([0, 1, shape[axis] - 1, shape[axis] + 1, 2 * shape[axis]]))
    return torch.zeros(shape, dtype=tensor.dtype)


def hostile_tensor(rng: random.Random, tensor: torch.Tensor) -> Any:
    kind = rng.randrange(16)
    if kind < 6:
        return poisoned(rng, tensor)
    if kind < 8:
        return other_shape(rng, tensor)
    if kind == 8:
        return torch.zeros(tensor.shape, dtype=rng.choice(DTYPES))
    if kind == 9:
        return unaligned(tensor) if rng.random() < 0.5 else backwards(tensor)
    if kind == 10:
        return endless(tensor)
    if kind == 11:
        return torch.empty(0, *tensor.shape[1:], dtype=tensor.dtype)
    if kind == 12:
        return tensor.transpose(0, -1) if tensor.ndim > 1 else tensor[::2]
    if kind == 13:
        return rng.choice(
            [read_only(tensor), torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")]
        )
    if kind == 14 and tensor.dtype.is_floating_point:
        return tensor.clone().requires_grad_()
    return rng.choice(OBJECTS)


def hostile_list(rng: random.Random, values: list[Any]) -> Any:
    copy = list(values)
    kind = rng.randrange(6)
    if kind == 0 or not copy:
        return rng.choice([[], copy * 2, [0] * 5000, *OBJECTS])
    at = rng.randrange(len(copy))
    if kind == 1:
        copy.pop(at)
    elif kind == 2:
        copy.insert(at, copy[at])
    else:
        copy[at] = hostile(rng, copy[at])
    return tuple(copy) if isinstance(values, tuple) else copy


def hostile(rng: random.Random, value: Any) -> Any:
    """Something else in place of a valid argument."""
    if isinstance(value, torch.Tensor):
        return hostile_tensor(rng, value)
    if isinstance(value, np.ndarray):
        return hostile_tensor(rng, torch.from_numpy(value.copy()))
    if isinstance(value, bool):
        return rng.choice([not value, *OBJECTS])
    if isinstance(value, int):
        return hostile_int(rng)
    if isinstance(value, float):
        return hostile_float(rng)
    if isinstance(value, str):
        return rng.choice([*STRINGS, None, 3])
    if isinstance(value, (list, tuple)):
        return hostile_list(rng, list(value) if isinstance(value, list) else value)
    return rng.choice([value, *OBJECTS])


def damaged(rng: random.Random, arguments: Arguments) -> Arguments:
    """The arguments with up to three of them made hostile; at times, all valid."""
    changed = dict(arguments)
    count = min(len(changed), rng.choice([0, 1, 1, 1, 2, 3]))
    for name in rng.sample(sorted(changed), count):
        changed[name] = hostile(rng, changed[name])
    return changed


def text_of(value: Any) -> str:
    """One argument in a report."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        shape = f"{type(value).__name__}{tuple(value.shape)} {value.dtype}"
        hidden = isinstance(value, torch.Tensor) and value.is_meta
        return shape if hidden or np.prod(value.shape) > 20 else f"{shape} {value.tolist()}"
    return repr(value)[:120]


Target = Callable[[random.Random], None]

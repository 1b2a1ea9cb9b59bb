"""The table of attention kernels as the tests walk it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cuda_problems import hostile_problem
from reference_attention import Problem

from specdec_ext import ops

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A kernel of ops.supported_attention(), or the generic one on one kind of storage."""

    name: str
    family: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    row_tile: int


def generic(dtype: str, kv_dtype: str, head_dim: int) -> Row:
    return Row("generic", "generic", DTYPES[dtype], DTYPES[kv_dtype], head_dim, 1)


def table() -> list[Row]:
    """What multiplies in the dtype of q; test_cuda_fp8.py is about the others."""
    rows = [
        Row(
            r["name"],
            r["family"],
            DTYPES[r["dtype"]],
            DTYPES[r["kv_dtype"]],
            r["head_dim"],
            r["row_tile"],
        )
        for r in ops.supported_attention()
        if r["math_dtype"] == r["dtype"]
    ]
    return [
        *rows,
        generic("float16", "float16", 64),
        generic("bfloat16", "bfloat16", 8),
        generic("float16", "bfloat16", 72),
        generic("bfloat16", "float8_e4m3fn", 200),
        generic("float16", "float8_e4m3fn", 256),
    ]


def is_fast(row: Row) -> bool:
    return row.family != "generic"


def tiles_of(head_dim: int) -> list[Row]:
    """All row tiles of each family, half precision."""
    half = torch.float16
    return [
        row for row in table() if (row.head_dim, row.dtype, row.kv_dtype) == (head_dim, half, half)
    ]


def families() -> list[Row]:
    """The smallest tile of each family, half precision, head_dim 64."""
    smallest: dict[str, Row] = {}
    for row in sorted(tiles_of(64), key=lambda row: row.row_tile):
        smallest.setdefault(row.family, row)
    return [smallest[family] for family in sorted(smallest)]


def kernels() -> list[Row]:
    """families(), and of each kind of page a kernel of several warps: what barriers are for."""
    half, found = torch.float16, families()
    for family in sorted({row.family for row in table() if is_fast(row)}):
        for kv_dtype in (half, torch.float8_e4m3fn):
            kind = (family, half, kv_dtype, 64)
            tiles = [r for r in table() if (r.family, r.dtype, r.kv_dtype, r.head_dim) == kind]
            tiles.sort(key=lambda row: row.row_tile)
            found += [row for row in tiles[1:2] if row not in found]
    return found


each_kernel = pytest.mark.parametrize("row", kernels(), ids=lambda row: row.name)
each_family = pytest.mark.parametrize("row", families(), ids=lambda row: row.name)


def instance_problem(row: Row, seed: int, **options: Any) -> Problem:
    """A problem in the storage that a row of the table is for."""
    return hostile_problem(
        seed,
        head_dim=row.head_dim,
        dtype=row.dtype,
        kv_dtype=row.kv_dtype,
        scales=2 - seed % 2 if row.kv_dtype == torch.float8_e4m3fn else 0,
        **options,
    )

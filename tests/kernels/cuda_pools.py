"""Pools of K/V pages for the accelerator's K/V operations, and what they hold afterwards."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import torch
from cuda_calls import Target
from cuda_problems import F8, nan_pages, places, put
from kernel_calls import int32
from reference_attention import shuffled_pages

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 70000.0, -1e38, 448.0, 465.0, -480.0]


def raw(pages: torch.Tensor) -> torch.Tensor:
    return pages.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[pages.element_size()])


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits; the payload of a NaN is not promised."""
    got = got.cpu()
    same = raw(got) == raw(expected)
    same |= got.float().isnan() & expected.float().isnan()
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} elements differ"


def stored(values: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """[R, G, K] as the pages hold it: divided by the scale, rounded to nearest even, saturated."""
    numbers = values.float()
    if scale is not None:
        numbers = numbers / scale[:, None]
    if dtype == F8:
        numbers = numbers.clamp(-448.0, 448.0)
    return numbers.to(dtype)


@dataclasses.dataclass
class Pool:
    """Ragged requests over shuffled, poisoned pages."""

    kv_len: list[int]
    rows: list[int]
    page_size: int
    table: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def cu_rows(self) -> list[int]:
        return [sum(self.rows[:b]) for b in range(len(self.rows) + 1)]

    def geometry(self, target: Target) -> dict[str, Any]:
        return {
            "page_table": target.put(self.table),
            "kv_len": target.put(int32(self.kv_len)),
            "cu_rows": target.put(int32(self.cu_rows)),
            "max_rows": max(self.rows),
            "max_kv_len": max(c + n for c, n in zip(self.kv_len, self.rows, strict=True)),
        }

    def written(self, which: str, values: torch.Tensor, skipped: tuple[int, ...] = ()) -> Any:
        """The pages after `values` [R, G, K], in the pages' dtype, were appended."""
        pages = getattr(self, which).clone()
        for b, (c, n) in enumerate(zip(self.kv_len, self.rows, strict=True)):
            if n and b not in skipped:
                first = self.cu_rows[b]
                where = places(self.table[b], range(c, c + n), self.page_size)
                put(pages, *where, values[first : first + n])
        return pages


LENGTHS = [0, 5, 130, 17, 64], [3, 1, 40, 0, 9]  # kv_len and rows


def make_pool(
    seed: int,
    page_size: int,
    head_dim: int,
    kv_dtype: torch.dtype,
    lengths: tuple[list[int], list[int]] = LENGTHS,
    num_kv_heads: int = 3,
) -> Pool:
    kv_len, rows = (list(part) for part in lengths)  # tests may change their own
    table, num_pages = shuffled_pages(random.Random(seed), kv_len, rows, page_size)
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    return Pool(
        kv_len, rows, page_size, table, nan_pages(shape, kv_dtype), nan_pages(shape, kv_dtype)
    )


def scales_of(kind: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
    """0: none, 1: one of the tensor, 2: one for each head."""
    if kind == 0:
        return {}
    count = num_kv_heads if kind == 2 else 1
    return {
        "k_scale": torch.tensor([0.37, 1.9, 0.011][:count]),
        "v_scale": torch.tensor([2.3, 0.7, 0.0513][:count]),
    }


def moved(target: Target, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: target.put(tensor) for name, tensor in tensors.items()}


def halfway() -> torch.Tensor:
    """[3, 24] numbers half way between two of e4m3: a quotient that is off by a bit shows."""
    i = torch.arange(72)
    return ((8.5 + i % 8) * 2.0 ** (i // 8 - 4)).view(3, 24)

"""Compaction of K/V on every backend: bits move, and nothing else does."""

from __future__ import annotations

import random

import pytest
import torch
from cuda_calls import Target, every_backend
from cuda_pools import BF16, F32
from cuda_problems import F8, places
from kernel_calls import int32
from reference_attention import WILD_PAGE_ID, random_tree, shuffled_pages

from specdec_ext import ops


@pytest.mark.parametrize("page_size", [1, 4, 32, 128])
@pytest.mark.parametrize("dtype", [F32, BF16, F8])
@pytest.mark.parametrize("seed", range(4))
@every_backend
def test_compaction_moves_bits_and_nothing_else(
    target: Target, page_size: int, dtype: torch.dtype, seed: int
) -> None:
    rng = random.Random(seed)
    rows = [rng.choice([1, 2, rng.randint(2, 128), 128]) for _ in range(5)] + [0]
    kv_len = [rng.randint(0, 70) for _ in rows]
    table, num_pages = shuffled_pages(rng, kv_len, rows, page_size)
    head_dim = rng.choice([8, 24, 64])
    size = (3, num_pages, 2, page_size, head_dim * dtype.itemsize)
    gen = torch.Generator().manual_seed(seed)
    k = torch.randint(0, 256, size, generator=gen, dtype=torch.uint8)  # NaN payloads and all
    v = torch.randint(0, 256, size, generator=gen, dtype=torch.uint8)
    paths = torch.full((6, 128), WILD_PAGE_ID, dtype=torch.int32)
    counts = []
    for b, n in enumerate(rows):
        shape = rng.choice(["chain", "deep", "random", "branches", "medusa"])
        parents = random_tree(rng, n, shape)[:n]
        node, path = (rng.randrange(n), []) if n else (0, [])
        while node > 0:
            path.insert(0, node)
            node = parents[node]
        counts.append(len(path))
        paths[b, : len(path)] = int32(path)

    def after(pages: torch.Tensor) -> torch.Tensor:
        out = pages.clone()
        for b in range(6):
            to = places(table[b], range(kv_len[b] + 1, kv_len[b] + 1 + counts[b]), page_size)
            path = [kv_len[b] + int(node) for node in paths[b, : counts[b]]]
            page, slot = places(table[b], path, page_size)
            out[:, to[0], :, to[1]] = pages[:, page, :, slot]
        return out

    got_k, got_v = target.put(k.clone()), target.put(v.clone())
    ops.compact_kv(
        got_k.view(dtype),
        got_v.view(dtype),
        target.put(table),
        target.put(int32(kv_len)),
        target.put(int32([sum(rows[:b]) for b in range(7)])),
        target.put(paths),
        target.put(int32(counts)),
        num_rows=sum(rows),
        max_kv_len=max(c + n for c, n in zip(kv_len, rows, strict=True)),
        backend=target.backend,
    )
    assert torch.equal(got_k.cpu(), after(k))
    assert torch.equal(got_v.cpu(), after(v))

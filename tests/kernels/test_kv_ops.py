"""Append, compaction, argmax and mask packing: exact, element by element."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_calls import assert_same_bits, bits, int32, threads
from reference_attention import random_tree, shuffled_pages

from specdec_ext import _core, ops

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
KINDS = [F32, BF16, F16]


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize("page_size", [1, 2, 16, 128])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("kv_dtype", KINDS)
def test_append(page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    rng = random.Random(page_size)
    kv_len, rows = [0, 5, 130, 17], [3, 1, 40, 9]
    table, num_pages = shuffled_pages(rng, kv_len, rows, page_size)
    k_pages = poisoned(num_pages, 3, page_size, 24, dtype=kv_dtype)
    v_pages = poisoned(num_pages, 3, page_size, 24, dtype=kv_dtype)
    fused = (torch.randn(sum(rows), 2 * 3 * 24 + 5) * 100).to(dtype)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 70000.0, -1e38])
    fused[0, :8] = special.to(dtype)  # what a 16-bit cache may not hold
    k, v = fused[:, :72].unflatten(1, (3, 24)), fused[:, 72:144].unflatten(1, (3, 24))
    expected_k, expected_v = k_pages.clone(), v_pages.clone()
    row = 0
    for b, (c, n) in enumerate(zip(kv_len, rows, strict=True)):
        for t in range(c, c + n):
            page = int(table[b, t // page_size])
            expected_k[page, :, t % page_size] = k[row].float().to(kv_dtype)
            expected_v[page, :, t % page_size] = v[row].float().to(kv_dtype)
            row += 1
    cu_rows = [0, 3, 4, 44, 53]
    for count in (1, 2):
        with threads(count):
            got_k, got_v = k_pages.clone(), v_pages.clone()
            ops.append_kv(k, v, got_k, got_v, table, int32(kv_len), int32(cu_rows))
        same_nan = got_k.isnan() & expected_k.isnan()  # the payload of a NaN is not promised
        assert bool(((bits(got_k) == bits(expected_k)) | same_nan).all())
        assert_same_bits(got_v, expected_v)


@pytest.mark.parametrize("page_size", [1, 4, 32])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_compact_moves_bits_and_nothing_else(page_size: int, dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    rows = [rng.randint(1, 128) for _ in range(5)]
    kv_len = [rng.randint(0, 70) for _ in rows]
    table, num_pages = shuffled_pages(rng, kv_len, rows, page_size)
    size = (3, num_pages, 2, page_size, 16)
    k_pages, v_pages = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    k_pages.view(torch.uint8)[0, 0] = 0xFF  # NaN payloads travel unchanged
    paths = torch.full((5, 127), 2**31 - 1, dtype=torch.int32)
    counts = []
    for b, n in enumerate(rows):
        parents = random_tree(rng, n, rng.choice(["chain", "deep", "random", "branches"]))
        path = []
        node = rng.randrange(n)
        while node > 0:
            path.insert(0, node)
            node = parents[node]
        counts.append(len(path))
        paths[b, : len(path)] = int32(path)
    cu_rows = [sum(rows[:b]) for b in range(6)]

    def moved(pages: torch.Tensor) -> torch.Tensor:
        out = pages.clone()
        for b in range(5):
            for i in range(counts[b]):
                t, s = kv_len[b] + 1 + i, kv_len[b] + int(paths[b, i])
                out[:, int(table[b, t // page_size]), :, t % page_size] = pages[
                    :, int(table[b, s // page_size]), :, s % page_size
                ]
        return out

    expected = moved(k_pages), moved(v_pages)
    for count in (1, 2, 4):
        got_k, got_v = k_pages.clone(), v_pages.clone()
        with threads(count):
            ops.compact_kv(got_k, got_v, table, int32(kv_len), int32(cu_rows), paths, int32(counts))
        assert_same_bits(got_k, expected[0])
        assert_same_bits(got_v, expected[1])


# -- Argmax --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 2, 15, 63, 64, 65, 1023, 1024, 1025, 5000, 49152])
def test_argmax(vocab: int) -> None:
    torch.manual_seed(vocab)
    scores = torch.randn(37, vocab + 3)[:, 1 : vocab + 1]  # unaligned, strided rows
    scores[1] = -math.inf
    scores[2] = 0.25  # all tied
    scores[3] = torch.randint(0, 2, (vocab,)).float()
    scores[4] = torch.where(torch.rand(vocab) < 0.5, 0.0, -0.0)  # equal zeros of both signs
    scores[5, vocab // 2] = math.inf
    scores[6] = -math.inf
    scores[6, vocab - 1] = -3e38
    scores[7:9] = math.inf
    out = torch.full((37,), -7, dtype=torch.int32)
    for count in (1, 2):
        with threads(count):
            assert ops.argmax(scores, out) is out
        first_max = [row.index(max(row)) for row in scores.tolist()]
        assert out.tolist() == first_max


@pytest.mark.parametrize("vocab", [1, 17, 64, 1030, 3000])
def test_argmax_of_a_row_with_a_nan_is_minus_one(vocab: int) -> None:
    positions = sorted({0, vocab // 3, vocab // 2, vocab - 1})
    scores = torch.randn(len(positions) + 1, vocab)
    scores[:, vocab // 4] = math.inf  # also when the maximum came first
    for row, at in enumerate(positions):
        scores[row, at] = torch.nan
    out = torch.zeros(len(positions) + 1, dtype=torch.int32)
    ops.argmax(scores, out)
    assert out.tolist() == [-1] * len(positions) + [vocab // 4]


# -- Masks ---------------------------------------------------------------------------------------

SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 84, 127, 128]


def unpack(words: torch.Tensor, size: int) -> list[list[bool]]:
    rows = words.view(torch.int32).tolist()
    return [[bool(row[j // 32] >> (j % 32) & 1) for j in range(size)] for row in rows]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", ["chain", "star", "branches", "deep", "random"])
def test_mask_from_parents(size: int, shape: str) -> None:
    parents = random_tree(random.Random(size), size, shape)
    expected = [[False] * size for _ in range(size)]
    for i in range(size):
        node = i
        while node >= 0:
            expected[i][node] = True
            node = parents[node]
    words = ops.mask_from_parents(parents)
    assert words.shape == (size, -(-size // 32))
    assert words.dtype == torch.uint32
    assert unpack(words, size) == expected
    assert_same_bits(ops.pack_mask(torch.tensor(expected)), words)


@given(st.integers(1, 128), st.integers(1, 9), st.integers(0, 2**30))
@settings(max_examples=60)
def test_pack_mask_round_trip(size: int, rows: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    mask = torch.rand(size, rows, generator=gen).T > 0.5  # not contiguous
    words = ops.pack_mask(mask)
    assert unpack(words, size) == mask.tolist()
    past = [row[-1] >> (size - 1) % 32 >> 1 for row in words.tolist()]
    assert not any(past), "bits past the last column are zero"


# -- Step plans ----------------------------------------------------------------------------------


def test_step_forms_equal_the_plain_ones() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    parents = [random_tree(rng, 20, "random"), []]
    kv_len, rows = [33, 12], [20, 7]
    table, num_pages = shuffled_pages(rng, kv_len, rows, 8)
    pages = [[p for p in row if p < num_pages] for row in table.tolist()]
    plan = _core.make_step_plan(
        [[0] * 20, [0] * 7], parents=parents, kv_len=kv_len, page_table=pages
    )
    size = (4, num_pages, 2, 8, 32)
    k_pages, v_pages = torch.randn(size), torch.randn(size)
    k, v, q = torch.randn(27, 2, 32), torch.randn(27, 2, 32), torch.randn(27, 6, 32)
    expected_k, expected_v = k_pages.clone(), v_pages.clone()
    geometry = (table, int32(kv_len), int32([0, 20, 27]))
    chain = [-1, *range(6)]
    mask = torch.cat([ops.mask_from_parents(p).view(torch.int32) for p in (parents[0], chain)])
    for layer in (2, 0, 3):
        ops.append_kv(k, v, expected_k[layer], expected_v[layer], *geometry)
        ops.step_append_kv(plan, layer, k, v, k_pages, v_pages)
        assert_same_bits(k_pages, expected_k)
        assert_same_bits(v_pages, expected_v)
        expected, out = torch.empty_like(q), torch.empty_like(q)
        options = dict(scale=0.2, sliding_window=25, softcap=4.0, sinks=torch.randn(6))
        ops.spec_attention(
            q, k_pages[layer], v_pages[layer], *geometry, mask=mask, out=expected, **options
        )
        assert ops.step_attention(plan, layer, q, out, k_pages, v_pages, **options) is out
        assert_same_bits(out, expected)

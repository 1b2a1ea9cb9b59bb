"""K/V in 8 bits on the CPU: the bytes against NumPy, attention against float64, its bits against
those over float32 pages of the same values, which test_spec_attention.py holds to every rule."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from kernel_calls import assert_same_bits, attend, bits, int32, threads
from narrow_kv import E4M3, INT8, SCALE_BYTES, e4m3_code, e4m3_values, int8_vector, narrow
from reference_attention import attend as reference
from reference_attention import random_problem, random_tree, rounding_bound, shuffled_pages

from specdec_ext import _core, ops

KINDS = [E4M3, INT8]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SPECIAL = [0.0, -0.0, 448.0, 464.0, -465.0, 1e-40, -(2.0**-10), 3 * 2.0**-10, 2.0**-6, 1e30]


def width(dtype: torch.dtype, head_dim: int) -> int:
    return _core.kv_row_width(str(dtype).removeprefix("torch."), head_dim)


def stored(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> bytes:
    """One head of one row as the reference stores it."""
    wide = x.float().numpy()
    if dtype == INT8:
        return int8_vector(wide)
    return bytes(e4m3_code(float(np.float32(v) / np.float32(scale))) for v in wide)


def equal_bytes(got: torch.Tensor, expected: bytes) -> bool:
    """But for the payload of a scale that is NaN."""
    found = bytes(got.view(torch.uint8).tolist())
    scale = np.frombuffer(expected[-SCALE_BYTES:], np.float32)
    if got.dtype == INT8 and np.isnan(scale).all():
        last = np.frombuffer(found[-SCALE_BYTES:], np.float32)
        return found[:-SCALE_BYTES] == expected[:-SCALE_BYTES] and bool(np.isnan(last).all())
    return found == expected


# -- Storing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 200])
def test_append_stores_what_the_reference_does(
    page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int
) -> None:
    rng = random.Random(page_size)
    torch.manual_seed(head_dim)
    kv_len, rows = [0, 5, 40, 17], [3, 1, 21, 9]
    table, num_pages = shuffled_pages(rng, kv_len, rows, page_size)
    shape = (num_pages, 2, page_size, width(kv_dtype, head_dim))
    k = (torch.randn(sum(rows), 2, head_dim) * 10).to(dtype)
    v = (torch.randn(sum(rows), 2, head_dim) ** 3).to(dtype)
    k[0, 0, :8] = torch.tensor(SPECIAL[:8]).to(dtype)
    k[1, 0, 3], k[1, 1, 5], k[2, 0], k[2, 1] = math.nan, math.inf, 0.0, 1e-38
    k[3, 0] = torch.arange(head_dim) + 0.5  # ties
    scales: dict[str, torch.Tensor] = {}
    if kv_dtype == E4M3:
        scales = {"k_scale": torch.tensor([0.5, 0.03]), "v_scale": torch.tensor([2.0, 1.7])}
    for count in (1, 2):
        pages = [torch.full(shape, 7, dtype=torch.int8).view(kv_dtype) for _ in range(2)]
        with threads(count):
            ops.append_kv(k, v, *pages, table, int32(kv_len), int32([0, 3, 4, 25, 34]), **scales)
        row, written = 0, set()
        for b, (c, n) in enumerate(zip(kv_len, rows, strict=True)):
            for t in range(c, c + n):
                page, slot = int(table[b, t // page_size]), t % page_size
                written.add((page, slot))
                for g in range(2):
                    for x, there, name in ((k, pages[0], "k_scale"), (v, pages[1], "v_scale")):
                        scale = float(scales[name][g]) if scales else 1.0
                        expected = stored(x[row, g], kv_dtype, scale)
                        assert equal_bytes(there[page, g, slot], expected), (row, g, name)
                row += 1
        for page in range(num_pages):
            for slot in range(page_size):
                if (page, slot) not in written:
                    assert bool((pages[0].view(torch.int8)[page, :, slot] == 7).all())


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_rope_append_stores_what_append_does(kv_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 40), torch.randn(5, 2, 40), torch.randn(5, 2, 40)
    shape = (3, 2, 4, width(kv_dtype, 40))
    geometry = (int32([2, 0, 1]).view(1, 3), int32([3]), int32([0, 5]))
    one, two = (
        [torch.zeros(shape, dtype=torch.int8).view(kv_dtype) for _ in range(2)] for _ in range(2)
    )
    ops.append_kv(k, v, *one, *geometry)
    ops.rope_append_kv(q, k, v, *two, *geometry, int32([3, 4, 5, 6, 7]), q_out=q.clone())
    for a, b in zip(one, two, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("seed", range(4))
def test_a_vector_is_stored_the_same_whatever_stands_beside_it(seed: int) -> None:
    """Bits depend on no history: a page that held other numbers, other rows, another place."""
    torch.manual_seed(seed)
    k, v = torch.randn(9, 1, 32), torch.randn(9, 1, 32) * 100
    alone = [torch.zeros(1, 1, 16, 36, dtype=INT8) for _ in range(2)]
    for row in range(9):
        ops.append_kv(k[row : row + 1], v[row : row + 1], *alone, int32([0]).view(1, 1),
                      int32([row]), int32([0, 1]))  # fmt: skip
    dirty = [torch.randint(-128, 127, (1, 1, 16, 36), dtype=INT8) for _ in range(2)]
    ops.append_kv(k, v, *dirty, int32([0]).view(1, 1), int32([0]), int32([0, 9]))
    for a, b in zip(alone, dirty, strict=True):
        assert_same_bits(a[:, :, :9], b[:, :, :9])


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_compact_moves_bytes(kv_dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    table, num_pages = shuffled_pages(rng, [13], [20], 4)
    shape = (3, num_pages, 2, 4, width(kv_dtype, 16))
    before = [torch.randint(-128, 128, shape, dtype=torch.int16).to(torch.int8) for _ in range(2)]
    pages = [part.clone().view(kv_dtype) for part in before]
    path = sorted(rng.sample(range(1, 20), 7))
    ops.compact_kv(*pages, table, int32([13]), int32([0, 20]), int32(path).view(1, 7), int32([7]))

    def at(part: torch.Tensor, token: int) -> torch.Tensor:
        return part.view(torch.int8)[:, int(table[0, token // 4]), :, token % 4]

    for old, new in zip(before, pages, strict=True):
        expected = old.clone()
        for i, node in enumerate(path):
            at(expected, 14 + i)[...] = at(old, 13 + node)
        assert_same_bits(new.view(torch.int8), expected)


# -- Attention -----------------------------------------------------------------------------------


def check(problem_seed: int, kv_dtype: torch.dtype, scaled: int = 0, **sizes: object) -> None:
    """Bits of float32 pages of the same values; float64 within twice torch's error."""
    wide = random_problem(problem_seed, kv_dtype=F32, **sizes)  # type: ignore[arg-type]
    scales: list[torch.Tensor | None] = [None, None]
    if kv_dtype == E4M3 and scaled:
        heads = wide.k_pages.shape[1] if scaled == 2 else 1
        scales = [torch.rand(heads) + 0.1, torch.rand(heads) * 3 + 0.1]
    stored_in, values = narrow(wide, kv_dtype, *scales)
    got = attend(stored_in)
    assert_same_bits(got, attend(values))
    exact = reference(values)
    rival = (reference(values, F32).double() - exact).abs()
    bound = 2 * rival.max() + rounding_bound(values)
    if got.dtype != F32:
        eps = {BF16: 2.0**-8, F16: 2.0**-11}[got.dtype]
        bound = bound + 1.01 * eps * exact.abs() + 2.0**-24
    assert not got.isnan().any()
    assert bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 72, 80, 128, 200, 256])
@pytest.mark.parametrize("tree", [None, "deep"])
def test_head_dims(kv_dtype: torch.dtype, head_dim: int, tree: str | None) -> None:
    for scaled in (0, 1, 2):
        check(
            head_dim, kv_dtype, scaled, kv_len=[37, 5], rows=[9, 21], head_dim=head_dim, tree=tree
        )


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("page_size", [1, 2, 8, 32, 128])
def test_page_sizes(kv_dtype: torch.dtype, page_size: int) -> None:
    check(page_size, kv_dtype, 2, kv_len=[131, 0, 64], rows=[7, 33, 1], page_size=page_size,
          tree="random")  # fmt: skip


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_types_of_q(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    check(1, kv_dtype, 1, kv_len=[90, 4], rows=[12, 30], dtype=dtype, tree="branches")


@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 64, 128])
def test_extras_and_sharing(kv_dtype: torch.dtype, rows: int) -> None:
    for count in (1, 2, 3):
        with threads(count):
            check(rows, kv_dtype, 2, kv_len=[300], rows=[rows], num_heads=6, tree="random",
                  sliding_window=37, softcap=3.0, sinks=True)  # fmt: skip


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_every_code(kv_dtype: torch.dtype) -> None:
    """V holds every number there is; one key, so that the result is V."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(4, 1, 1, 64)
    values = torch.tensor(e4m3_values()).view(4, 64)
    pages = codes.view(E4M3)
    if kv_dtype == INT8:
        scale = torch.full((4, 1, 1, 1), 0.37).view(torch.uint8).view(4, 1, 1, 4)
        pages = torch.cat([codes, scale], dim=3).view(INT8)
        values = codes.view(torch.int8).float().view(4, 64) * torch.tensor(0.37)
    keys = torch.zeros_like(pages.view(torch.uint8)).view(kv_dtype)
    out = torch.full((4, 1, 64), 9.0)
    ops.spec_attention(
        torch.zeros(4, 1, 64), keys, pages, int32([0, 1, 2, 3]).view(4, 1), int32([0] * 4),
        int32([0, 1, 2, 3, 4]), out=out, scale=1.0,
    )  # fmt: skip
    same_nan = values.isnan() & out[:, 0].isnan()
    assert bool(((out[:, 0] == values) | same_nan).all())


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_what_is_not_finite_shows(kv_dtype: torch.dtype) -> None:
    k, v = torch.ones(2, 1, 8), torch.ones(2, 1, 8)
    v[0, 0, 3] = math.nan
    pages = [torch.zeros(1, 1, 4, width(kv_dtype, 8), dtype=torch.int8).view(kv_dtype)
             for _ in range(2)]  # fmt: skip
    geometry = (int32([0]).view(1, 1), int32([0]), int32([0, 2]))
    ops.append_kv(k, v, *pages, *geometry)
    status = torch.zeros(1, dtype=torch.int32)
    out = ops.spec_attention(
        torch.ones(2, 1, 8), *pages, *geometry, out=torch.empty(2, 1, 8), scale=1.0, status=status
    )
    assert bool(out[:, 0, 3].isnan().all()) and int(status[0]) == 1


def test_step_forms_equal_the_plain_ones() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    parents = [random_tree(rng, 20, "random")]
    table, num_pages = shuffled_pages(rng, [33], [20], 8)
    plan = _core.make_step_plan(
        [[0] * 20], parents=parents, kv_len=[33],
        page_table=[[p for p in table[0].tolist() if p < num_pages]],
    )  # fmt: skip
    for kv_dtype in KINDS:
        shape = (2, num_pages, 2, 8, width(kv_dtype, 32))
        pages = [torch.zeros(shape, dtype=torch.int8).view(kv_dtype) for _ in range(2)]
        copies = [part.clone() for part in pages]
        k, v, q = torch.randn(20, 2, 32), torch.randn(20, 2, 32), torch.randn(20, 6, 32)
        geometry = (table, int32([33]), int32([0, 20]))
        mask = ops.mask_from_parents(parents[0]).view(torch.int32)
        ops.step_append_kv(plan, 1, k, v, *pages)
        ops.append_kv(k, v, *(part[1] for part in copies), *geometry)
        for a, b in zip(pages, copies, strict=True):
            assert_same_bits(a, b)
        expected = ops.spec_attention(
            q, *(part[1] for part in copies), *geometry, mask=mask, out=torch.empty_like(q),
            scale=0.2,
        )  # fmt: skip
        got = ops.step_attention(plan, 1, q, torch.empty_like(q), *pages, scale=0.2)
        assert_same_bits(got, expected)


# -- Refusals ------------------------------------------------------------------------------------


def test_refusals() -> None:
    geometry = (int32([0]).view(1, 1), int32([0]), int32([0, 1]))
    rows = torch.zeros(1, 1, 8)
    pages = [torch.zeros(1, 1, 4, 12, dtype=INT8) for _ in range(2)]
    with pytest.raises(ValueError, match="k_scale is given and k_pages has dtype int8"):
        one = torch.ones(1)
        ops.append_kv(rows, rows, *pages, *geometry, k_scale=one, v_scale=one)
    with pytest.raises(ValueError, match="head_dim of 6"):
        ops.append_kv(rows, rows, *(part[..., :10] for part in pages), *geometry)
    with pytest.raises(ValueError, match="head_dim of -1"):
        ops.append_kv(rows, rows, *(part[..., :3] for part in pages), *geometry)


def test_bits_reads_bytes() -> None:
    """The comparison above sees every byte."""
    assert bits(torch.tensor([1, -2], dtype=INT8)).tolist() == [1, -2]

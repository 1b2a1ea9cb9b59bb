"""The pure parts of benchmarks/gpu: limits, workloads, references, result files, tables."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.gpu import (
    cells,
    floors,
    ours,
    peers,
    problem,
    profile,
    timing,
)
from benchmarks.gpu.cells import AttentionCell, StepCell
from benchmarks.gpu.run import Target

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


# -- choice of kernels ---------------------------------------------------------------------------


def test_8_bit_products_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    e4m3 = "float8_e4m3fn"
    row = {"dtype": "bfloat16", "kv_dtype": e4m3, "head_dim": 128}
    table = [
        {**row, "math_dtype": "bfloat16", "family": "ampere", "name": "wide", "row_tile": 64},
        {**row, "math_dtype": e4m3, "family": "hopper", "name": "r64", "row_tile": 64},
        {**row, "math_dtype": e4m3, "family": "hopper", "name": "r128", "row_tile": 128},
    ]
    major = 9
    fake = SimpleNamespace(
        supported_attention=lambda: table, device_limits=lambda _: SimpleNamespace(major=major)
    )
    monkeypatch.setattr(ours, "ops", fake)
    target = Target("cuda-emu-fast", CPU)
    assert ours.instance_for(AttentionCell(8, 64, 100), target) is None
    assert ours.instance_for(AttentionCell(8, 64, 100, kv_dtype=e4m3), target) is None
    for rows, name in ((1, "r64"), (16, "r64"), (17, "r128"), (64, "r128")):
        cell = AttentionCell(8, rows, 100, kv_dtype=e4m3, fp8_math=True)
        assert ours.instance_for(cell, target) == name
    major = 8
    with pytest.raises(ours.Unsupported, match="products of float8_e4m3fn"):
        ours.instance_for(AttentionCell(8, 64, 100, kv_dtype=e4m3, fp8_math=True), target)


# -- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_heads", "context", "requests", "rows", "us", "compute_bound"),
    [  # read off the table that the targets were set with
        (32, 1024, 1, 1, 3.9, False),
        (32, 4096, 32, 84, 520, False),
        (32, 16384, 8, 64, 503, False),
        (8, 1024, 1, 64, 1.4, True),
        (8, 4096, 8, 27, 32, False),
        (8, 16384, 8, 64, 174, True),
        (8, 16384, 32, 1, 500, False),
        (8, 65536, 8, 84, 913, True),
    ],
)
def test_floor(
    kv_heads: int, context: int, requests: int, rows: int, us: float, compute_bound: bool
) -> None:
    work = AttentionCell(requests, rows, context, kv_heads).work()
    assert work.floor_us == pytest.approx(us, rel=0.03)
    assert work.compute_bound is compute_bound


def test_fp8_halves_bytes_and_doubles_the_rate() -> None:
    cell = AttentionCell(8, 64, 16384, kv_dtype="float8_e4m3fn", fp8_math=True)
    assert cell.work().floor_us == pytest.approx(87, rel=0.01)
    slow = AttentionCell(8, 64, 16384, kv_dtype="float8_e4m3fn")
    assert slow.work().floor_us == pytest.approx(174, rel=0.01)
    wide = AttentionCell(8, 64, 16384)
    queries = 2 * 8 * 64 * 32 * 128 * 2
    assert 2 * (slow.work().needed_bytes - queries) == wide.work().needed_bytes - queries


def test_a_prompt_counts_its_causal_half() -> None:
    work = AttentionCell(1, 4096, 0).work()
    assert work.flops == 4 * 32 * 128 * 4096 * 4097 // 2
    assert floors.moved(10, 20).needed_bytes == 30


# -- workloads ------------------------------------------------------------------------------------


def test_cells_are_those_of_the_targets() -> None:
    every = cells.attention_cells()
    names = [cell.name for cell in every]
    assert len(set(names)) == len(names)
    groups = Counter(group for cell in every for group in cell.groups)
    assert groups == {"G1": 1, "G2": 108, "G3": 1, "G4": 2, "G5": 1, "G6": 9, "prefill": 4}
    (first,) = [cell for cell in every if "G1" in cell.groups]
    assert (first.requests, first.rows, first.context) == (8, 64, 16384)
    assert (first.num_heads, first.num_kv_heads, first.head_dim, first.page_size) == (
        32,
        8,
        128,
        64,
    )


def test_peers_are_measured_on_twenty_and_four_cells_that_exist() -> None:
    names = {cell.name for cell in cells.attention_cells()}
    assert len(cells.PEER_CELLS) == 20
    assert len(cells.TORCH_PEER_CELLS) == 4
    assert names >= cells.PEER_CELLS | cells.TORCH_PEER_CELLS
    by_name = {cell.name: cell for cell in cells.attention_cells()}
    compared = {group for name in cells.PEER_CELLS for group in by_name[name].groups}
    assert compared >= {"G1", "G2", "G3", "G4", "G5"}


def test_quick_and_emulated_keep_every_kind() -> None:
    every = cells.attention_cells()
    kept = {group for cell in cells.quick(every) for group in cell.groups}
    assert kept >= {"G1", "G2", "G3", "G4", "G5", "prefill"}
    assert len(cells.quick(every)) < 30
    tiny = cells.emulated(every)
    kinds = {(c.group_size, c.kv_dtype, c.fp8_math, c.is_prompt, c.rows == 1) for c in every}
    assert {(c.group_size, c.kv_dtype, c.fp8_math, c.is_prompt, c.rows == 1) for c in tiny} == kinds
    assert max(c.requests * c.rows * (c.context + c.rows) for c in tiny) < 10_000


@pytest.mark.parametrize("kind", ["append", "rope_append", "compact", "build_step", "argmax"])
def test_step_cells_move_what_they_must(kind: str) -> None:
    cell = StepCell(kind, 8, 64)
    assert cell.work().flops == 0
    if kind == "compact":  # 6 tokens of 8 requests and 32 layers, K and V, read and written
        assert cell.work().needed_bytes == 2 * 6 * 8 * 32 * 2 * 8 * 128 * 2
    assert cell.tiny().work().needed_bytes < cell.work().needed_bytes


# -- inputs and references ------------------------------------------------------------------------


def test_trees_are_trees() -> None:
    for seed in range(5):
        parents = problem.random_tree(84, 15, seed)
        bits = problem.ancestor_bits(parents)
        assert parents[0] == -1
        assert all(0 <= parent < i for i, parent in enumerate(parents) if i)
        assert int(bits.sum(1).max()) <= 16
        assert bool(bits[:, 0].all())
        assert bool(bits.diagonal().all())


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 65, 128])
def test_pack_puts_column_j_at_bit_j(width: int) -> None:
    bits = torch.rand(7, width, generator=torch.Generator().manual_seed(width)) < 0.5
    bits[0] = True
    words = problem.pack(bits)
    assert words.shape == (7, -(-width // 32))
    for i in range(7):
        for j in range(width):
            assert (int(words[i, j // 32]) >> (j % 32) & 1) == int(bits[i, j])


def plain(inputs: problem.Problem) -> torch.Tensor:
    """The cell by loops over rows and heads: slow, and shares nothing with references()."""
    cell = inputs.cell
    out = torch.zeros(inputs.out.shape, dtype=torch.float32)
    for b in range(cell.requests):
        for m in range(cell.rows):
            if cell.is_prompt:
                seen = list(range(m + 1))
            else:
                tree = [j for j in range(cell.rows) if inputs.bits[m, j]]
                seen = [*range(cell.context), *(cell.context + j for j in tree)]
            for h in range(cell.num_heads):
                g = h // cell.group_size
                keys, values = [], []
                for token in seen:
                    page = int(inputs.page_table[b, token // cell.page_size])
                    at = token % cell.page_size
                    keys.append(inputs.k_pages[page, g, at].float())
                    values.append(inputs.v_pages[page, g, at].float())
                q = inputs.q[b * cell.rows + m, h].float()
                weights = torch.softmax(torch.stack(keys) @ q * inputs.scale, 0)
                out[b * cell.rows + m, h] = weights @ torch.stack(values)
    return out


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("rows", "context"), [(5, 21), (1, 30), (9, 0)])
def test_references(rows: int, context: int, kv_dtype: str) -> None:
    cell = AttentionCell(2, rows, context, 2, 4, 16, 16, kv_dtype=kv_dtype)
    (inputs,) = problem.make_sets(cell, CPU, problem.RandomPool(CPU))
    expected = plain(inputs)
    right = expected.to(torch.bfloat16)
    assert problem.error(inputs, right) < 4e-3
    for spoil in (math.nan, 0.5):  # one element of the last head of the last row
        wrong = right.clone()
        wrong[-1, -1, 3] += spoil
        assert not problem.error(inputs, wrong) < problem.MAX_ERROR_16BIT


@pytest.mark.parametrize("peer", [peers.Sdpa, peers.SdpaGather])
def test_torch_peers_compute_the_cell(peer: type[peers.Peer]) -> None:
    for rows, context in ((5, 21), (1, 30), (9, 0)):
        cell = AttentionCell(2, rows, context, 2, 4, 16, 16)
        sets = problem.make_sets(cell, CPU, problem.RandomPool(CPU))
        assert problem.error(sets[0], peer(sets)(0)) < problem.MAX_ERROR_16BIT
    sets = problem.make_sets(
        AttentionCell(2, 5, 21, 2, 4, 16, 16, kv_dtype="float8_e4m3fn"),
        CPU,
        problem.RandomPool(CPU),
    )
    with pytest.raises(peers.Absent, match="one type only"):
        peer(sets)


def test_small_sets_rotate_and_large_ones_do_not() -> None:
    cell = AttentionCell(1, 5, 100)
    assert len(problem.make_sets(cell, CPU, problem.RandomPool(CPU))) == 1
    set_bytes = 2 * 2 * 2 * 8 * 64 * 128  # what make_sets counts on a device
    assert problem.num_sets(set_bytes) * set_bytes > 200_000_000
    assert problem.num_sets(100_000_000) == 3
    assert problem.num_sets(200_000_000) == 1


def test_no_timer_runs_every_set_once() -> None:
    seen: list[int] = []
    assert timing.NoTimer().measure({"a": seen.append, "b": seen.append}, 3) == {}
    assert seen == [0, 1, 2, 0, 1, 2]


# -- profiles ------------------------------------------------------------------------------------


def test_what_a_kernel_adds_to_a_call() -> None:
    """A kernel that begins early and waits is shown with its wait, and adds what it ends later."""
    one_call = [(0.0, 10.0, "main"), (8.0, 13.0, "finish"), (14.0, 20.0, "main"), (15, 19, "rest")]
    later = [(begin + 100, end + 100, name) for begin, end, name in one_call]
    found = profile.by_kernel([*later, *one_call], calls=2)
    assert found["main"].launches == 2
    assert found["main"].lasts == 8
    assert found["main"].adds == pytest.approx((10 + 7 + 90 + 7) / 4)  # 90: nothing ran before
    assert (found["finish"].lasts, found["finish"].adds) == (5, 3)
    assert (found["rest"].launches, found["rest"].adds) == (1, 0)

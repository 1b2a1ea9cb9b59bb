"""The pure parts of benchmarks/gpu: limits, workloads, references, result files, tables."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import common
from benchmarks.gpu import (
    cells,
    floors,
    ours,
    peers,
    problem,
    report,
    results,
    stages,
    timing,
)
from benchmarks.gpu.cells import AttentionCell, StepCell
from benchmarks.gpu.results import Store
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


# -- result files ---------------------------------------------------------------------------------


def test_device_names() -> None:
    assert results.device_slug("NVIDIA H200") == "h200"
    assert results.device_slug("NVIDIA GeForce RTX 4090") == "rtx-4090"
    assert results.device_slug("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"


def test_scrub_leaves_no_folders() -> None:
    text = f"{ROOT}/cuda/x.cu(3): error at /somewhere/deep/file.h:4, a/b stays"
    assert results.scrub(text) == "cuda/x.cu(3): error at file.h:4, a/b stays"


def test_a_store_continues_its_file(tmp_path: Path) -> None:
    store = Store.open(tmp_path, "abc1234", emulated=True)
    assert store.path.name.startswith("emulated-")
    assert store.path.name.endswith("-abc1234.json")
    store.put("test", "good", {"status": "ok"})
    with store.failing("test", "bad"):
        raise ValueError("broken")
    again = Store.open(tmp_path, "abc1234", emulated=True)
    assert again.path == store.path
    assert again.has("test", "good")
    assert not again.has("test", "bad"), "what failed is measured again"
    assert again.cells("test")["bad"]["error"] == "ValueError: broken"
    assert not Store.open(tmp_path, "abc1234", emulated=True, force=True).has("test", "good")
    assert not Store.open(tmp_path, "fff0000", emulated=True).has("test", "good")
    assert not list(tmp_path.glob("*.new"))
    (tmp_path / "emulated-nvl-2026-11-21-eee0000.json").write_text("of another device")
    assert not Store.open(tmp_path, "eee0000", emulated=True).path.exists()


def test_emulated_and_measured_files_do_not_mix(tmp_path: Path) -> None:
    store = Store.open(tmp_path, "abc1234", emulated=True)
    store.data["emulated"] = False
    store.write()
    with pytest.raises(SystemExit, match="emulated is False, not True"):
        Store.open(tmp_path, "abc1234", emulated=True)
    assert not results.EMULATED_RESULTS.is_relative_to(common.RESULTS)
    run = [str(ROOT / "benchmarks/gpu/run.sh"), "bench-step", "--emulated", "--out"]
    done = subprocess.run([*run, str(common.RESULTS)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "emulated results do not go where measured ones are kept" in done.stderr


def test_run_sh_refuses_what_it_does_not_know() -> None:
    script = str(ROOT / "benchmarks/gpu/run.sh")
    for arguments, text in (
        (["bogus"], "unknown argument: bogus"),
        (["test", "--out"], "--out needs a value"),
        ([], "--emulated"),
    ):
        done = subprocess.run([script, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert text in done.stderr


def test_architectures() -> None:
    assert stages.architectures(9, 0) == "80-virtual;90-real;90a-real"
    assert stages.architectures(8, 6) == "80-virtual;86-real"


# -- the sanitizer's answers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (0, "========= ERROR SUMMARY: 0 errors\n", "ok"),
        (9, "========= ERROR SUMMARY: 3 errors\n", "failed"),
        (1, "AssertionError\n========= ERROR SUMMARY: 0 errors\n", "failed"),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "ok"),
        (9, "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", "failed"),
        (1, "========= Device not supported. Please refer to the documentation\n", "unavailable"),
        (1, "RuntimeError: CUDA error 999: unknown error\n", "unavailable"),
        (127, "", "unavailable"),
    ],
)
def test_sanitizer_verdicts(status: int, output: str, expected: str) -> None:
    assert stages.judge_sanitizer(status, output)["status"] == expected


# -- tables ---------------------------------------------------------------------------------------


def program(us: float, work: floors.Work) -> dict[str, Any]:
    return {
        "status": "ok",
        "us": us,
        "over_floor": us / work.floor_us,
        "gb_per_s": work.needed_bytes / us / 1e3,
        "tflop_per_s": work.flops / us / 1e6,
    }


def record(cell: AttentionCell, exact: float, fast: float, **peers: float) -> dict[str, Any]:
    work = cell.work()
    times = {"exact": exact, "fast": fast, **peers}
    return {
        "status": "ok",
        "groups": list(cell.groups),
        "context": cell.context,
        "floor_us": work.floor_us,
        "programs": {name: program(us, work) for name, us in times.items()},
    }


def test_targets_and_page() -> None:
    first = AttentionCell(8, 64, 16384, groups=("G1", "G2"))
    decode = AttentionCell(32, 1, 16384, groups=("G5", "G6"))
    peers = {"flashinfer-xqa": 660.0, "flashinfer-fa2": 330.0}
    found = {
        first.name: record(first, 220.0, 210.0, **peers),
        decode.name: record(decode, 520.0, 500.0),
        "bits": {"status": "ok", "exact": True, "elements": 10, "differing": 0},
        "compact-b8-m64": {"status": "ok", "kind": "compact", "floor_us": 1.0, "us": 7.5},
    }
    ceilings = {"read_bytes_per_s": 4.4e12}
    rows = report.targets(found, {"compact-b8-m64": found["compact-b8-m64"]}, ceilings)
    table = {(group, what): value for group, what, _, value in rows}
    assert table["G1", f"{first.name}: XQA / ours"] == pytest.approx(3.0)
    assert table["G1", f"{first.name}: fastest peer / ours"] == pytest.approx(1.5)
    assert table["G2", "fastest peer / ours, worst cell"] == pytest.approx(1.5)
    assert table["G5", f"{decode.name}: share of the read stream"] == pytest.approx(0.94, rel=0.01)
    assert table["G6", "differing elements in 1 cells"] == 0
    assert table["G6", "exact / fast, worst cell"] == pytest.approx(220 / 210)
    assert table["compact", "compact-b8-m64: us"] == 7.5
    assert table["prefill", "fastest peer / ours, worst"] == "not measured"
    environment = {
        "device": "NVIDIA H200",
        "date": "2026-11-21T00:00:00",
        "commit": "abc1234",
        "dirty": True,
        "nvcc": "13.0",
        "versions": {"torch": "2.11"},
    }
    data: dict[str, Any] = {
        "emulated": False,
        "environment": environment,
        "stages": {"bench-kernel": {"cells": found, "ceilings": ceilings}},
    }
    page = report.page(json.loads(json.dumps(data)))
    assert "abc1234, with uncommitted changes" in page
    assert "flashinfer-fa2 330.0" in page
    data["emulated"] = True
    page = report.page(data)
    assert "No times." in page
    assert "## Targets" not in page


def test_targets_of_a_step_with_its_model() -> None:
    rows = report.step_targets(
        {
            "model-b1-m1": {"status": "ok", "us": 4000.0, "floor_us": 3200.0},
            "model-b1-m84": {"status": "ok", "us": 4400.0, "floor_us": 3300.0},
            "model-b1-m84-exact": {"status": "ok", "us": 4840.0, "floor_us": 3300.0},
            "model-b8-m27": {"status": "failed", "error": "out of memory"},
        }
    )
    values = {(target, what): value for target, what, _, value in rows}
    assert values["G7", "T(1) / floor, 1 request"] == pytest.approx(1.25)
    assert values["G7", "T(84) / T(1), 1 request"] == pytest.approx(1.1)
    assert values["exact", "exact / fast, 1 x 84 rows"] == pytest.approx(1.1)
    assert values["G7", "T(27) / floor, 8 requests"] == "not measured"


def test_cells_with_a_model() -> None:
    every = cells.model_cells()
    assert len({cell.name for cell in every}) == len(every)
    one = next(cell for cell in every if cell.name == "model-b1-m1")
    # An 8B model's weights without the embedding, 16 bits, and the K/V of 1024 tokens.
    assert one.work().needed_bytes == pytest.approx(15.0e9 + 0.134e9, rel=0.01)
    assert one.work().floor_us == pytest.approx(3520, rel=0.01)
    wide = next(cell for cell in every if cell.name == "model-b1-m84")
    assert wide.work().needed_bytes < 1.01 * one.work().needed_bytes
    assert wide.work().flops == pytest.approx(84 * one.work().flops)


def test_geomean() -> None:
    assert report.geomean([]) is None
    assert report.geomean([2.0, 8.0]) == pytest.approx(4.0)


# -- timing, on a device that only keeps a diary --------------------------------------------------


class FakeCuda:
    """What timing.py uses of torch.cuda. Replaying a graph takes a millisecond per launch."""

    def __init__(self) -> None:
        self.now = 0.0
        self.diary: list[str] = []
        self.capturing: FakeGraph | None = None

    def synchronize(self) -> None:
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    def Stream(self) -> str:
        return "stream"

    def stream(self, stream: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    @contextlib.contextmanager
    def graph(self, graph: FakeGraph, stream: str) -> Iterator[None]:
        assert stream == "stream"
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None

    def Event(self, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)


class FakeGraph:
    def __init__(self, device: FakeCuda) -> None:
        self.device, self.launches = device, list[str]()

    def replay(self) -> None:
        self.device.now += len(self.launches)
        self.device.diary.append(self.launches[0])


class FakeEvent:
    def __init__(self, device: FakeCuda) -> None:
        self.device, self.at = device, -1.0

    def record(self) -> None:
        self.at = self.device.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_graph_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeCuda()
    monkeypatch.setattr(timing, "cuda", device)
    sets: dict[str, list[int]] = {"a": [], "b": []}

    def program(name: str) -> timing.Program:
        def run(index: int) -> None:
            if device.capturing:
                device.capturing.launches.append(name)
                sets[name].append(index)

        return run

    def waits(index: int) -> None:
        device.synchronize()

    timer = timing.GraphTimer()
    found = timer.measure({"a": program("a"), "b": program("b"), "waits": waits}, 7)
    assert found == {"a": [1e3] * 5, "b": [1e3] * 5}, "a launch takes 1 ms"
    assert "capturing" in timer.failures["waits"]
    assert sets["a"] == [*range(7)] * 3, "every set as often, 20 launches at least"
    # One replay at the capture, then in each round an untimed and a timed one, turning the order.
    assert "".join(device.diary) == "ab" + "aabb" + "bbaa" + "aabb" + "bbaa" + "aabb"

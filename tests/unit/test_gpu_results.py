"""The GPU benchmark's result files, verdicts, tables and timers: what needs no GPU."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import common
from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import (
    engine_cells,
    floors,
    report,
    results,
    stages,
    timing,
)
from benchmarks.gpu.cells import AttentionCell
from benchmarks.gpu.results import Store

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


# -- result files ---------------------------------------------------------------------------------


def test_device_names() -> None:
    assert results.device_slug("NVIDIA H200") == "h200"
    assert results.device_slug("NVIDIA GeForce RTX 4090") == "rtx-4090"
    assert results.device_slug("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"


def test_scrub_leaves_no_folders() -> None:
    text = f"{ROOT}/cuda/x.cu(3): error at /somewhere/deep/file.h:4, a/b stays"
    assert results.scrub(text) == "cuda/x.cu(3): error at file.h:4, a/b stays"


ENVIRONMENT = {
    "device": "emulated",
    "date": "2026-11-22T00:00:00",
    "commit": "abc1234",
    "dirty": False,
}


def test_a_store_continues_its_file(tmp_path: Path) -> None:
    store = Store.open(tmp_path, ENVIRONMENT)
    assert store.path.name == "emulated-2026-11-22-abc1234.json"
    store.put("test", "good", {"status": "ok"})
    for status in ("failed", "hung", "started", "sticky", "crashed"):
        store.put("test", status, {"status": status})
    again = Store.open(tmp_path, {**ENVIRONMENT, "date": "2026-11-23T00:00:00", "dirty": True})
    assert again.path == store.path
    assert again.data["environment"]["dirty"] is True
    assert again.has("test", "good")
    for status in ("failed", "hung", "started", "sticky", "crashed", "unknown"):
        assert not again.has("test", status), "what did not end well is run again"
    assert not Store.open(tmp_path, ENVIRONMENT, force=True).has("test", "good")
    assert not Store.open(tmp_path, {**ENVIRONMENT, "commit": "fff0000"}).has("test", "good")
    assert not list(tmp_path.glob("*.new"))
    (tmp_path / "emulated-nvl-2026-11-21-eee0000.json").write_text("of another device")
    assert not Store.open(tmp_path, {**ENVIRONMENT, "commit": "eee0000"}).path.exists()


def test_emulated_and_measured_files_do_not_mix(tmp_path: Path) -> None:
    store = Store.open(tmp_path, ENVIRONMENT)
    store.data["emulated"] = False
    store.write()
    with pytest.raises(SystemExit, match="emulated is False, not True"):
        Store.open(tmp_path, ENVIRONMENT)
    assert not results.EMULATED_RESULTS.is_relative_to(common.RESULTS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["tests", "--out"], "argument --out: expected one argument"),
        ([], "the following arguments are required: STAGE"),
        (
            ["bench-step", "--emulated", "--out", str(common.RESULTS)],
            "emulated results do not go where measured ones are kept",
        ),
    ],
)
def test_the_runner_refuses_what_it_does_not_know(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        runner.main(arguments)
    assert stop.value.code == 2
    assert text in capsys.readouterr().err


def test_run_sh_starts_the_runner() -> None:
    script = str(ROOT / "benchmarks/gpu/run.sh")
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [script, "bogus"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 2
    assert "bogus: no such stage; there are all, first-hour, build" in done.stderr


def test_architectures() -> None:
    assert stages.architectures(9, 0) == "90a-real"
    assert stages.architectures(8, 6) == "86-real"


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
        "stages": {
            "bench-kernel": {"cells": {**found, "ceilings": {"status": "ok", "ceilings": ceilings}}}
        },
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
    every = engine_cells.model_cells()
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

"""The runner of GPU parts, on a stub device that hangs, loses its context, crashes and is slow."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import bench, profile, report, small_set, stages, supervise
from benchmarks.gpu.results import Store
from benchmarks.gpu.run import Target, call
from benchmarks.gpu.supervise import Part, Progress

LIMIT_S = 5.0  # of parts that end
SHORT_S = 0.3  # of parts that hang


class StubDevice:
    """One process's view of a device: after a sticky error every later call of it fails."""

    lost = ""

    def launch(self, behaviour: str) -> dict[str, Any]:
        if self.lost:
            raise RuntimeError(self.lost)
        getattr(self, behaviour)()
        return {"status": "ok", "summary": behaviour}

    def good(self) -> None:
        print("launched")

    def slow(self) -> None:
        time.sleep(0.2)

    def hangs(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("spinning on a barrier", flush=True)
        while True:
            time.sleep(1)

    def hangs_in_a_command(self) -> None:
        code = "import os, time; print('command', os.getpid(), flush=True); time.sleep(1000)"
        call([sys.executable, "-c", code])

    def sticky(self) -> None:
        StubDevice.lost = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(self.lost)

    def crashes(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)  # as a machine without memory does

    def wrong(self) -> None:
        raise ArithmeticError("error 0.5 against float32")


DEVICE = StubDevice()


def parts(*behaviours: str, limit_s: float = LIMIT_S) -> list[Part]:
    return [
        Part(
            "stub",
            f"{i}-{behaviour}",
            partial(DEVICE.launch, behaviour),
            SHORT_S if behaviour.startswith("hangs") else limit_s,
        )
        for i, behaviour in enumerate(behaviours)
    ]


ENVIRONMENT = {
    "device": "emulated",
    "date": "2026-11-22T00:00:00",
    "commit": "abc1234",
    "dirty": False,
    "nvcc": "13.0",
    "versions": {},
}


def open_store(folder: Path) -> Store:
    return Store.open(folder, ENVIRONMENT)


def run(folder: Path, every: Sequence[Part], seconds: float = 60.0, **options: Any) -> Progress:
    store = open_store(folder)
    deadline = time.monotonic() + seconds
    return supervise.run_parts(every, store, folder / "logs", deadline, **options)


def statuses(folder: Path) -> dict[str, str]:
    (file,) = folder.glob("*.json")
    cells = json.loads(file.read_text())["stages"]["stub"]["cells"]
    return {name: cell["status"] for name, cell in cells.items()}


def test_what_breaks_a_process_breaks_one_part(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    every = parts("good", "hangs", "slow", "sticky", "crashes", "wrong", "good")
    progress = run(tmp_path, every)
    assert statuses(tmp_path) == {
        "0-good": "ok",
        "1-hangs": "hung",
        "2-slow": "ok",
        "3-sticky": "sticky",
        "4-crashes": "crashed",
        "5-wrong": "failed",
        "6-good": "ok",
    }
    assert progress.done == ["0-good", "2-slow", "6-good"]
    assert progress.failed == ["1-hangs", "3-sticky", "4-crashes", "5-wrong"]
    assert not progress.left
    cells = open_store(tmp_path).cells("stub")
    assert cells["1-hangs"]["summary"] == "killed after 0 s"
    assert "spinning on a barrier" in cells["1-hangs"]["output"], "where it hung"
    assert "illegal memory access" in cells["3-sticky"]["summary"]
    assert cells["4-crashes"]["summary"] == "SIGKILL"
    assert cells["5-wrong"]["error"] == "ArithmeticError: error 0.5 against float32"
    page = report.page(open_store(tmp_path).data)
    table = page.partition("## Not done")[2].partition("## stub")[0]
    assert [row for row in table.splitlines() if "hung" in row and "1-hangs" in row]
    assert "0-good" not in table

    # Again: what ended well is not run, new parts come first, then failed, then quarantined ones.
    capfd.readouterr()
    again = run(tmp_path, [*every, *parts("good", "good")[1:]])
    assert again.done == ["1-good"]
    printed = re.findall(r"^  (\S+):", capfd.readouterr().out, re.MULTILINE)
    assert printed == ["1-good", "5-wrong", "1-hangs", "3-sticky", "4-crashes"]
    assert open_store(tmp_path).cells("stub")["1-hangs"]["tries"] == 2


def test_commands_of_a_part_end_with_it(tmp_path: Path) -> None:
    (part,) = parts("hangs_in_a_command")
    outcome = supervise.isolated(part.work, 3.0, tmp_path / "log")
    assert outcome.record["status"] == "hung"
    match = re.search(r"command (\d+)", outcome.record["output"])
    assert match, "its output is kept"
    assert gone(int(match[1]))


def gone(pid: int) -> bool:
    """Whether a killed process has left within a few seconds."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # nobody waits for an orphan here
            return True
        time.sleep(0.02)
    return False


def test_no_part_is_called_hung_for_want_of_time(tmp_path: Path) -> None:
    every = [*parts("good", limit_s=1000.0), *parts("good", "slow")[1:]]
    progress = run(tmp_path, every, seconds=100.0)
    assert progress.left == ["0-good"]
    assert statuses(tmp_path) == {"1-slow": "ok"}


def test_a_device_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    def dead() -> dict[str, Any]:
        raise RuntimeError("no device")

    every = parts("good", "wrong", "hangs", "good", "good")
    progress = run(tmp_path, every, probe=dead)
    assert progress.device_gone == "2-hangs"
    assert progress.left == ["3-good", "4-good"], "nothing is blamed for it"
    alive = run(tmp_path, every, probe=partial(DEVICE.launch, "good"))
    assert not alive.device_gone
    assert alive.done == ["3-good", "4-good"]


def test_parts_beside_one_that_takes_the_device_with_it_are_left_for_the_next_run(
    tmp_path: Path,
) -> None:
    def dead() -> dict[str, Any]:
        time.sleep(0.5)
        raise RuntimeError("no device")

    beside = [
        dataclasses.replace(part, alone=False) for part in parts(*["hangs"] * 4, "good", "good")
    ]
    (first, *others) = beside
    progress = run(
        tmp_path, [first, *(dataclasses.replace(p, limit_s=50.0) for p in others)], probe=dead,
        jobs=4,
    )  # fmt: skip
    assert progress.device_gone == "0-hangs"
    assert progress.failed == ["0-hangs"]
    assert sorted(progress.left) == ["1-hangs", "2-hangs", "3-hangs", "4-good", "5-good"]
    # Nobody waited for the others until they would be called hung.
    found = statuses(tmp_path)
    assert found == {"0-hangs": "hung", **{f"{i}-hangs": "started" for i in (1, 2, 3)}}


@pytest.mark.parametrize(
    ("text", "sticky"),
    [
        ("launch of argmax_kernel: unknown error", True),
        ("CUDA error: operation not supported on global/shared address space", True),
        ("an illegal memory access was encountered", True),
        ("CUDA error: unspecified launch failure", True),
        ("uncorrectable NVLink error detected during the execution", True),
        ("launch of argmax_kernel: invalid configuration argument", False),
        ("ValueError: unknown error in a checkpoint", False),
        ("operation not supported", False),
    ],
)
def test_what_spoils_a_process_is_told_from_what_only_failed(text: str, sticky: bool) -> None:
    assert (supervise.STICKY.search(text) is not None) == sticky


def test_checks_run_beside_each_other_and_what_is_timed_alone(tmp_path: Path) -> None:
    """Each part leaves when it began and ended. Checks wait for each other, so that they end only
    if three of them run at once."""

    def note(name: str, ready: str) -> dict[str, Any]:
        (tmp_path / f"began-{name}").touch()
        while len(list(tmp_path.glob(f"began-{ready}*"))) < (3 if ready else 0):
            time.sleep(0.005)
        others = {path.name.partition("-")[2] for path in tmp_path.glob("began-*")}
        others -= {path.name.partition("-")[2] for path in tmp_path.glob("ended-*")}
        (tmp_path / f"ended-{name}").touch()
        return {"status": "ok", "summary": " ".join(sorted(others - {name}))}

    every = [
        Part("stub", name, partial(note, name, "check" if "check" in name else ""), 20.0, alone)
        for name, alone in (
            ("check-1", False), ("check-2", False), ("check-3", False), ("timed-1", True),
            ("timed-2", True), ("last", False),
        )
    ]  # fmt: skip
    progress = run(tmp_path, every, jobs=3)
    assert not progress.failed
    cells = open_store(tmp_path).cells("stub")
    for name in ("timed-1", "timed-2", "last"):
        assert cells[name]["summary"] == "", "nothing ran beside it"


def test_killed_at_random_the_file_stays_readable(tmp_path: Path) -> None:
    every = [
        Part("stub", f"part-{i}", partial(_leave_pid, tmp_path, i), LIMIT_S) for i in range(30)
    ]
    generator = random.Random(7)
    seen: set[str] = set()
    kills = 0
    for _ in range(15):
        # The runner is a child that is killed like any that takes too long; its own child is in
        # another session and goes by its death signal alone.
        work = partial(_run_all, tmp_path, every)
        outcome = supervise.isolated(work, generator.uniform(0.02, 0.25), tmp_path / "runner.log")
        if list(tmp_path.glob("*.json")):
            seen |= set(statuses(tmp_path).values())
        if outcome.record["status"] == "ok":
            break
        kills += 1
    assert kills > 2
    assert "started" in seen, "the mark of what was running"
    assert seen <= {"ok", "started"}
    assert all(gone(int(file.read_text() or 0)) for file in tmp_path.glob("pid-*"))
    run(tmp_path, every)
    assert set(statuses(tmp_path).values()) == {"ok"}
    assert len(statuses(tmp_path)) == 30


def _leave_pid(folder: Path, i: int) -> dict[str, Any]:
    (folder / f"pid-{i}").write_text(str(os.getpid()))
    time.sleep(0.02)
    return {"status": "ok"}


def _run_all(folder: Path, every: Sequence[Part]) -> dict[str, Any]:
    run(folder, every)
    return {"status": "ok"}


# -- the plan -------------------------------------------------------------------------------------

GPU = Target("cuda", torch.device("cuda"))
EMULATED = Target("cuda-emu-fast", torch.device("cpu"))


@pytest.mark.parametrize("target", [GPU, EMULATED], ids=["cuda", "emulated"])
def test_parts_have_names_of_their_own_and_fit_into_a_run(target: Target) -> None:
    for stage in runner.STAGES:
        found = runner.parts_of(stage, target, quick=False)
        assert found, stage
        names = [(part.stage, part.name) for part in found]
        assert len(set(names)) == len(names), stage
        if target is GPU:
            assert max(part.limit_s for part in found) <= 480, "a run is ten minutes at most"


def test_what_failed_comes_after_later_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def parts_of(stage: str, target: Target, quick: bool) -> list[Part]:
        works = {"good": "good", "wrong": "wrong"} if stage == "one-tile" else {"good": "good"}
        return [
            Part(stage, f"{stage}-{name}", partial(DEVICE.launch, b)) for name, b in works.items()
        ]

    monkeypatch.setattr(runner, "parts_of", parts_of)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    args = argparse.Namespace(quick=False, cells="", jobs=1)
    for names, printed in (
        (["build", "one-tile"], ["build-good", "one-tile-good", "one-tile-wrong"]),
        (["build", "one-tile", "engine"], ["engine-good", "one-tile-wrong"]),
    ):
        store = open_store(tmp_path)
        assert runner.run(names, EMULATED, store, time.monotonic() + 100, args) == 1
        found = re.findall(r"^  (\S+):", capfd.readouterr().out, re.MULTILINE)
        assert found == printed
    works = partial(DEVICE.launch, "wrong")
    monkeypatch.setattr(runner, "parts_of", lambda s, t, q: [Part(s, f"{s}-part", works)])
    store = Store(tmp_path / "other.json", {**open_store(tmp_path).data, "stages": {}})
    assert runner.run(["build", "engine"], EMULATED, store, time.monotonic() + 100, args) == 1
    assert "engine" not in store.data["stages"], "nothing works without a build"


def test_the_first_hour_runs_every_kernel_before_it_times_the_ten_targets() -> None:
    order = runner.GROUPS["first-hour"]
    assert order == ("build", "conformance", "one-tile", "two-tile", "engine", "targets")
    assert runner.STAGES[: len(order)] == order
    once = [p.name for stage in ("one-tile", "two-tile") for p in runner.parts_of(stage, GPU, True)]
    from specdec_ext import ops

    table = {row["name"]: row for row in ops.supported_attention()}
    assert set(table) <= set(once)
    several = [
        name for name, row in table.items()
        if row["family"] == "hopper"
        and (row["row_tile"] > 64 or row["kv_dtype"] not in (row["dtype"], row["math_dtype"]))
    ]  # fmt: skip
    several += [name for name, _ in small_set.products_that_hand_over()]
    assert min(once.index(name) for name in several) > max(
        once.index(name) for name in table if name not in several
    )
    operations = [name for name, _ in small_set.operations()]
    assert {*operations, *(f"once-{name}" for name in small_set.ONCE)} <= set(once)
    targets = bench.targets(GPU)
    assert len(targets) == 10
    assert all(part.limit_s <= 240 for part in targets)


def test_every_file_of_tests_that_has_a_device_is_run_on_one() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    folders = [f"tests/{name}" for name in ("kernels", "engine", "model")]
    status, output = call([*command, "-m", "not emulated", *folders])
    assert status == 0
    test_on_cuda = re.compile(
        r"^(tests/\S+?\.py)::\w+\[(?:[^\]]*-)?cuda(?:-[^\]]*)?\]", re.MULTILINE
    )
    files = set(test_on_cuda.findall(output))
    assert len(files) > 40
    run_there = {*stages._kernel_tests(), *stages.DEVICE_TESTS}
    # What remains wants the default model, which a machine without a network may lack.
    assert files - run_there == {"tests/engine/test_device_default_model.py"}


def test_the_profiler_finds_what_a_part_measures() -> None:
    """It runs a part's own work with a timer of its own."""
    found = [*bench.bench_kernel(GPU, quick=False), *bench.bench_step(GPU, quick=False)]
    for part in found:
        work: Any = part.work
        assert work.func is bench._timed and callable(work.args[0]), part.name
    name = "_ZN7specdec4cuda12_GLOBAL__N_115row_laws_kernelIfEEvNS0_13RowLawsParamsEii"
    assert profile.short(
        "void specdec::cuda::(anonymous namespace)::argmax_kernel<float>(int)"
    ) == ("argmax_kernel<float>(int)")
    assert "row_laws_kernel" in profile.short(name)


def test_emulated_parts_have_time() -> None:
    assert stages.limit(EMULATED) > stages.limit(GPU) == supervise.LIMIT_S

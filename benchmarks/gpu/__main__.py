"""Builds, tests and measures on a CUDA GPU: benchmarks/gpu/run.sh STAGE... [options]; docs/gpu.md.

Every part runs in a process of its own with a limit of its own, and its result is written as soon
as it ends. Run the same command again and it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import common
from benchmarks.gpu import report, stages, supervise
from benchmarks.gpu.results import EMULATED_RESULTS, Store, clocks, environment
from benchmarks.gpu.run import ROOT, Target
from benchmarks.gpu.supervise import Part, Progress

INCOMPLETE = 75  # some parts are left: run the stage again
DEVICE_GONE = 70  # the device does not answer any more
# In the order in which they are worth running. Targets are parts of the bench stages.
STAGES = (
    "build", "conformance", "one-tile", "two-tile", "engine", "targets", "tests", "sanitize",
    "bench-kernel", "bench-step",
)  # fmt: skip
GROUPS = {"all": STAGES, "first-hour": STAGES[: STAGES.index("targets") + 1]}


def parts_of(stage: str, target: Target, quick: bool) -> list[Part]:
    """Returns what a stage is made of; all but `build` import the package."""
    if stage in ("targets", "bench-kernel", "bench-step"):
        from benchmarks.gpu import bench

        if stage == "targets":
            return bench.targets(target)
        return (bench.bench_kernel if stage == "bench-kernel" else bench.bench_step)(target, quick)
    makers: dict[str, Callable[[Target], list[Part]]] = {
        "build": stages.build,
        "conformance": stages.conformance,
        "one-tile": stages.one_tile,
        "two-tile": stages.two_tile,
        "engine": stages.engine,
        "tests": stages.tests,
        "sanitize": stages.sanitize,
    }
    return makers[stage](target)


def run_all(
    names: Sequence[str], target: Target, store: Store, deadline: float, args: argparse.Namespace
) -> Progress:
    """Runs stages as one list of parts, behind the build: what failed in an earlier run comes after
    everything that is new, whatever its stage."""
    logs = ROOT / "build" / ("gpu-emulated" if target.emulated else "gpu") / "logs"
    probe = None if target.emulated else answer
    total = Progress()
    for group in ([n for n in names if n == "build"], [n for n in names if n != "build"]):
        parts = [part for name in group for part in parts_of(name, target, args.quick)]
        chosen = {(p.stage, p.name): p for p in parts if re.search(args.cells, p.name)}
        total.add(
            supervise.run_parts(list(chosen.values()), store, logs, deadline, probe, args.jobs)
        )
        if total.device_gone or (group == ["build"] and (total.failed or total.left)):
            break  # nothing that follows can work
        importlib.invalidate_caches()  # what was just built was not there before
    return total


def run(
    names: Sequence[str], target: Target, store: Store, deadline: float, args: argparse.Namespace
) -> int:
    """Runs stages; returns 0, 1 if a part failed, INCOMPLETE or DEVICE_GONE."""
    started = time.monotonic()
    if "build" in names and not target.emulated and not stages.SITE.exists():
        store.cells("build").clear()  # the records are of another machine
    if not target.emulated:
        store.note_run({"stages": list(names), "clocks_start": clocks()})
    try:
        progress = run_all(names, target, store, deadline, args)
    finally:  # the tables are those of what was measured, whatever ended the run
        if not target.emulated:
            store.note_run({"clocks_end": clocks()}, begin=False)
        store.path.parent.mkdir(parents=True, exist_ok=True)  # no part had the time to begin
        store.path.with_suffix(".md").write_text(report.page(store.data))
    print(
        f"{len(progress.done)} done now, {len(progress.failed)} failed, {len(progress.left)} left, "
        f"{time.monotonic() - started:.0f} s, {store.path.name}"
    )
    if progress.device_gone:
        print(
            f"the device does not answer after {progress.device_gone}: reset it or take another "
            "one, then run the same command again; this part will come last"
        )
        return DEVICE_GONE
    return 1 if progress.failed else INCOMPLETE if progress.left else 0


def answer() -> dict[str, object]:
    """The probe: a context, a kernel, a copy back."""
    if int(torch.ones(1000, device="cuda").sum().item()) != 1000:
        raise ArithmeticError("the device cannot add")
    return {"status": "ok"}


def describe_machine(commit: str, emulated: bool) -> dict[str, object]:
    """Returns environment(), asked in a process of its own: this one never opens the device.

    Raises   SystemExit if no device answers.
    """

    def work() -> dict[str, object]:
        if not emulated and not torch.cuda.is_available():
            raise RuntimeError("no CUDA device; --emulated runs the stages on the CPU")
        return {"status": "ok", "environment": environment(commit, emulated)}

    found = supervise.isolated(work, supervise.LIMIT_S, ROOT / "build" / "gpu" / "device.log")
    if found.record["status"] != "ok":
        why = found.record.get("error") or found.record.get("summary")
        raise SystemExit(f"benchmarks.gpu: {why}")
    known: dict[str, object] = found.record["environment"]
    return known


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="+", metavar="STAGE", help=", ".join([*GROUPS, *STAGES]))
    parser.add_argument("--emulated", action="store_true", help="tiny sizes on the CPU, no times")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--cells", default="", help="only parts whose name matches this expression")
    parser.add_argument("--quick", action="store_true", help="the targets, few rounds")
    parser.add_argument("--force", action="store_true", help="run again what has a result")
    parser.add_argument(
        "--jobs", type=int,
        help="parts that run beside each other, of those that are not timed (half of the "
        "processors, at most 8; emulated 1)",
    )  # fmt: skip
    parser.add_argument("--commit", default="", help="of this copy, if it is no git checkout")
    parser.add_argument(
        "--seconds", type=float,
        help="of the whole run: no part is started that could outlast it (570; emulated 7200)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.stages[0] == "report":
        for file in args.stages[1:]:
            print(report.page(json.loads(Path(file).read_text())), end="")
        return 0
    names = [name for given in args.stages for name in GROUPS.get(given, (given,))]
    for name in names:
        if name not in STAGES:
            parser.error(f"{name}: no such stage; there are {', '.join([*GROUPS, *STAGES])}")
    if args.emulated and args.out is not None and args.out.resolve().is_relative_to(common.RESULTS):
        parser.error(f"--out {args.out}: emulated results do not go where measured ones are kept")
    if args.jobs is None:
        args.jobs = 1 if args.emulated else min(8, max(1, (os.cpu_count() or 1) // 2))
    deadline = time.monotonic() + (args.seconds or (7200 if args.emulated else 570))
    folder = args.out or (EMULATED_RESULTS if args.emulated else common.RESULTS)
    store = Store.open(folder, describe_machine(args.commit, args.emulated), args.force)
    backend, device = ("cuda-emu-fast", "cpu") if args.emulated else ("cuda", "cuda")
    target = Target(backend, torch.device(device))
    return run(list(dict.fromkeys(names)), target, store, deadline, args)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())

"""Runs one stage: python -m benchmarks.gpu STAGE [options]; see docs/gpu.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import common
from benchmarks.gpu import report, stages
from benchmarks.gpu.results import EMULATED_RESULTS, Store, clocks
from benchmarks.gpu.run import Run, Target

INCOMPLETE = 75  # some cells are left: run the stage again
STAGES = ("build", "test", "sanitize", "bench-kernel", "bench-step")


def _stage(name: str) -> Callable[[Run], None]:
    if name.startswith("bench"):
        from benchmarks.gpu import bench  # imports the package, which `build` makes

        return bench.bench_kernel if name == "bench-kernel" else bench.bench_step
    return {"build": stages.build, "test": stages.test, "sanitize": stages.sanitize}[name]


def run_stage(name: str, run: Run) -> int:
    """Runs a stage; returns 0, 1 if a part failed, or INCOMPLETE if there was no time for one."""
    started = time.monotonic()
    if not run.emulated:
        run.store.note(name, "clocks_start", clocks())
    _stage(name)(run)
    if not run.emulated:
        run.store.note(name, "clocks_end", clocks())
    run.store.path.with_suffix(".md").write_text(report.page(run.store.data))
    records = run.store.cells(name)
    failed = [part for part, record in records.items() if record["status"] == "failed"]
    print(
        f"{name}: {len(records)} parts, {len(failed)} failed, {len(run.left)} left, "
        f"{time.monotonic() - started:.0f} s, {run.store.path.name}"
    )
    return 1 if failed else INCOMPLETE if run.left else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("stage", choices=[*STAGES, "report"])
    parser.add_argument("file", nargs="?", type=Path, help="of report: the result file")
    parser.add_argument("--emulated", action="store_true", help="tiny sizes on the CPU, no times")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--cells", default="", help="only parts whose name matches this expression")
    parser.add_argument("--quick", action="store_true", help="the targets, few rounds")
    parser.add_argument("--force", action="store_true", help="measure again what has a result")
    parser.add_argument("--commit", default="", help="of this copy, if it is no git checkout")
    parser.add_argument("--seconds", type=float, default=420, help="start nothing after that")
    args = parser.parse_args(argv)
    if args.stage == "report":
        if args.file is None:
            parser.error("report needs a result file")
        print(report.page(json.loads(args.file.read_text())), end="")
        return 0
    if args.emulated and args.out is not None and args.out.resolve().is_relative_to(common.RESULTS):
        parser.error(f"--out {args.out}: emulated results do not go where measured ones are kept")
    if not args.emulated and not torch.cuda.is_available():
        parser.error("no CUDA device; --emulated runs the stages on the CPU")
    folder = args.out or (EMULATED_RESULTS if args.emulated else common.RESULTS)
    store = Store.open(folder, args.commit, args.emulated, args.force)
    backend, device = ("cuda-emu-fast", "cpu") if args.emulated else ("cuda", "cuda")
    run = Run(
        store,
        Target(backend, torch.device(device)),
        time.monotonic() + args.seconds,
        args.cells,
        args.quick,
    )
    return run_stage(args.stage, run)


if __name__ == "__main__":
    sys.exit(main())

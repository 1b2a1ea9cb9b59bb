"""Where the time of a cell goes: microseconds of each of its kernels, as torch's profiler has them.

python -m benchmarks.gpu.profile CELL...     expressions of cells' names (docs/gpu.md)
ncu ... python -m benchmarks.gpu.profile --bare CELL...     runs them, for another profiler

A call is replayed as a CUDA graph. A kernel may begin before the one in front of it ends (a
dependent launch): `lasts` has that wait, `adds` is from the latest end so far to the kernel's own.
What the kernels of a call add is its time, gaps included. ncu runs each kernel alone.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu import bench
from benchmarks.gpu.ours import open_backend
from benchmarks.gpu.run import Target
from benchmarks.gpu.timing import GraphTimer, NoTimer, Program

CALLS = 10
NAME = re.compile(r"(?:void )?([\w:]+(?:<.{0,60})?)")


@dataclass
class Kernel:
    """What a call's launches of one kernel take."""

    launches: float  # of a call
    lasts: float  # us, the mean launch
    adds: float  # us


@dataclass
class KernelTimer:
    """A Timer that writes down every program's kernels, by name."""

    failures: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, dict[str, Kernel]] = field(default_factory=dict)

    def measure(self, programs: Mapping[str, Program], num_sets: int) -> dict[str, list[float]]:
        timer = GraphTimer(launches=CALLS)
        for name, program in programs.items():
            timer.warm_up(program, num_sets)
            graph, calls = timer.capture(program, num_sets)
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities, acc_events=True) as seen:
                graph.replay()
                torch.cuda.synchronize()
            events = [
                (e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3, e.name())
                for e in seen.profiler.kineto_results.events()
                if e.device_type() == torch.autograd.DeviceType.CUDA
            ]
            self.kernels[name] = by_kernel(events, calls)
        return {}


def by_kernel(events: Sequence[tuple[float, float, str]], calls: int) -> dict[str, Kernel]:
    """Returns what the kernels of `calls` calls take, from (begin, end, name) in us."""
    lasts: dict[str, list[float]] = defaultdict(list)
    adds: dict[str, float] = defaultdict(float)
    latest: float | None = None  # of all ends so far
    for begin, end, name in sorted(events):
        before = begin if latest is None else latest
        lasts[name].append(end - begin)
        adds[name] += max(end - before, 0.0)
        latest = max(end, before)
    return {
        name: Kernel(len(us) / calls, statistics.mean(us), adds[name] / len(us))
        for name, us in lasts.items()
    }


def short(name: str) -> str:
    """Returns a kernel's name without its namespaces and arguments."""
    if name.startswith("_Z"):
        name = subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip()
    name = name.replace("specdec::cuda::", "").replace("(anonymous namespace)::", "")
    match = NAME.match(name)
    return (match[1] if match else name)[:80]


def show(name: str, timer: KernelTimer) -> None:
    for program, kernels in timer.kernels.items():
        total = sum(kernel.launches * kernel.adds for kernel in kernels.values())
        print(f"{name} {program}: {total:.1f} us")
        print("    us of a call = launches x adds, each lasts")
        ordered = sorted(kernels.items(), key=lambda item: -item[1].launches * item[1].adds)
        for kernel, k in ordered:
            print(
                f"  {k.launches * k.adds:9.1f} = {k.launches:5.1f} x {k.adds:7.2f}, {k.lasts:7.2f}"
                f"  {short(kernel)}"
            )
    sys.stdout.flush()


def main(expressions: list[str]) -> int:
    target = Target("cuda", torch.device("cuda"))
    open_backend(target)
    parts = [*bench.bench_kernel(target, quick=False, with_peers=False)]
    parts += bench.bench_step(target, quick=False)
    bare = "--bare" in expressions
    for part in parts:
        if not any(re.fullmatch(expression, part.name) for expression in expressions):
            continue
        timer: NoTimer | KernelTimer = NoTimer() if bare else KernelTimer()
        work: Any = part.work
        measure = work.args[0]  # bench._timed(measure, ...)
        try:
            measure(target, timer)
        except Exception as error:
            print(f"{part.name}: {type(error).__name__}: {error}")
        if isinstance(timer, KernelTimer):
            show(part.name, timer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

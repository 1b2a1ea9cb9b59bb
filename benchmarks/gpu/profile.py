"""Where the time of a cell goes: microseconds of each of its kernels, as torch's profiler has them.

python -m benchmarks.gpu.profile CELL...     expressions of cells' names (docs/gpu.md)
ncu ... python -m benchmarks.gpu.profile --bare CELL...     runs them, for another profiler

Kernels are launched one after another, not as a graph; one that waits for the kernel before it
(a dependent launch) is shown with that wait. ncu runs each alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu import bench
from benchmarks.gpu.ours import open_backend
from benchmarks.gpu.run import Target
from benchmarks.gpu.timing import NoTimer, Program

CALLS = 10
NAME = re.compile(r"(?:void )?([\w:]+(?:<.{0,60})?)")


@dataclass
class KernelTimer:
    """A Timer that writes down every program's kernels: name -> (launches of a call, mean us)."""

    failures: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)

    def measure(self, programs: Mapping[str, Program], num_sets: int) -> dict[str, list[float]]:
        for name, program in programs.items():
            for index in range(3):
                program(index % num_sets)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                for index in range(CALLS):
                    program(index % num_sets)
                torch.cuda.synchronize()
            found: dict[str, list[float]] = defaultdict(list)
            for event in seen.events():
                found[event.name].append(event.device_time)
            self.kernels[name] = {
                kernel: (len(us) / CALLS, sum(us) / len(us)) for kernel, us in found.items()
            }
        return {}


def short(name: str) -> str:
    """Returns a kernel's name without its namespaces and arguments."""
    if name.startswith("_Z"):
        name = subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip()
    name = name.replace("specdec::cuda::", "").replace("(anonymous namespace)::", "")
    match = NAME.match(name)
    return (match[1] if match else name)[:80]


def show(name: str, timer: KernelTimer) -> None:
    for program, kernels in timer.kernels.items():
        total = sum(count * us for count, us in kernels.values())
        print(f"{name} {program}: {total:.1f} us")
        for kernel, (count, us) in sorted(
            kernels.items(), key=lambda item: -item[1][0] * item[1][1]
        ):
            print(f"  {count * us:9.1f} us = {count:5.1f} x {us:8.2f}  {short(kernel)}")
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

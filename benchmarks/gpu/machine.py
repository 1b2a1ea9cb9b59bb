"""The machine that predictions are made for, and what a kernel of it is: resources and overheads.

A kernel takes as long as its slowest resource; what does not overlap is added: launches, first
loads, barriers. Counts of instructions are those of the compiled kernels (sass_loops.json, written
by scripts/cuda_check). What is assumed rather than counted stands in Device and in the constants
below. What a first H200 refuted was replaced, and says so; the rest was not fitted to anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import floors

LOOPS = Path(__file__).with_name("sass_loops.json")

Counts = Mapping[str, int]


@dataclass(frozen=True)
class Device:
    """An H200. Rates that a program reaches, not those of a data sheet, where they are known."""

    sms: int = 132
    clock_hz: float = 1.755e9
    shared_bytes: int = 227 << 10
    l2_bytes: int = 50 << 20
    hbm_bytes_per_s: float = floors.BANDWIDTH
    l2_bytes_per_s: float = 5.5e12
    l2_bytes_per_cycle: int = 64  # of one multiprocessor
    tensor_flops: float = floors.FLOPS_16BIT  # of a long dense product by wgmma
    launch_us: float = 1.0  # between two kernels of a graph, one waiting for the other
    first_load_us: float = 1.5  # a page looked up, its first bytes there
    l2_latency_us: float = 0.45  # of an access that the one before decides
    memory_latency_us: float = 0.8  # of a bulk copy while memory is busy
    barrier_us: float = 0.35  # a sum over a block of 1024 threads


# Shares of a rate.
# What attention kernels reach of a dense product's rate, if the softmax hides. Measured; 0.85 was
# assumed. 4 % of the difference is the clock, which falls to 1.69 GHz in such a kernel.
TENSOR_SHARE = 0.70
ISSUE_SHARE = 0.8  # of a scheduler's slots: what code with few independent instructions reaches
# 32-bit lanes of a pipe of one scheduler: a warp's instruction holds it for 32 / lanes cycles.
PIPE_CYCLES = {"issue": 1, "fp32": 1, "int": 2, "special": 8, "convert": 2, "shuffle": 4}


@dataclass(frozen=True)
class Kernel:
    """One kernel: what each resource needs, in microseconds, and what nothing overlaps."""

    name: str
    needs: Mapping[str, float]
    fixed_us: float

    @property
    def us(self) -> float:
        return max(self.needs.values(), default=0.0) + self.fixed_us

    @property
    def bound(self) -> str:
        if not self.needs or self.fixed_us > max(self.needs.values()):
            return "latency"
        return max(self.needs, key=lambda name: self.needs[name])


@dataclass(frozen=True)
class Prediction:
    cell: str
    floor_us: float
    kernels: tuple[Kernel, ...]

    @property
    def us(self) -> float:
        return sum(kernel.us for kernel in self.kernels)

    @property
    def bound(self) -> str:
        longest = max(self.kernels, key=lambda kernel: kernel.us)
        return f"{longest.name}: {longest.bound}"


_loops: dict[str, list[dict[str, Counts]]] = {}


def loops_of(kernel: str) -> list[dict[str, Counts]]:
    """Returns the loops of a compiled kernel.

    Raises   KeyError if there is no such kernel: it was renamed and not recorded anew.
    """
    if not _loops:
        _loops.update(json.loads(LOOPS.read_text()))
    return _loops[kernel]


def slots(counts: Counts) -> dict[str, float]:
    """Returns the cycles of a scheduler that a warp's trip takes on each pipe."""
    found = {pipe: counts.get(pipe, 0) * float(each) for pipe, each in PIPE_CYCLES.items()}
    found["issue"] /= ISSUE_SHARE
    return found

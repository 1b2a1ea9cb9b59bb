"""Device time of programs that are compared: CUDA graphs, replayed in both orders.

A program runs one set of inputs. Its launches over all sets are captured in one graph, so that gaps
between launches are the device's own and no cache holds the inputs; a figure is the time of one
replay over the launches in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

cuda: Any = torch.cuda  # parts of it have no types
LAUNCHES = 20
ROUNDS = 5
Program = Callable[[int], Any]  # runs the set of that index


class Timer(Protocol):
    """Runs programs; returns microseconds per launch of every round, or nothing.

    A program that cannot be captured is missing from the result and its error in `failures`.
    """

    failures: dict[str, str]

    def measure(self, programs: Mapping[str, Program], num_sets: int) -> dict[str, list[float]]: ...


@dataclass
class GraphTimer:
    """Times on a CUDA device."""

    rounds: int = ROUNDS
    launches: int = LAUNCHES
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # One stream for everything: the package keeps its scratch memory by stream.
        self._stream = cuda.Stream()

    def warm_up(self, program: Program, num_sets: int) -> None:
        """Runs a program a few times where it will be captured."""
        with cuda.stream(self._stream):
            for index in range(min(3, num_sets)):
                program(index)
        cuda.synchronize()

    def capture(self, program: Program, num_sets: int) -> tuple[torch.cuda.CUDAGraph, int]:
        """Returns a graph of the program's launches over all sets, and their number."""
        launches = -(-self.launches // num_sets) * num_sets
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, stream=self._stream):
            for launch in range(launches):
                program(launch % num_sets)
        graph.replay()
        cuda.synchronize()
        return graph, launches

    def measure(self, programs: Mapping[str, Program], num_sets: int) -> dict[str, list[float]]:
        self.failures = {}
        graphs = {}
        # All before the first capture: scratch memory that grew later would leave a graph behind
        # with the old one's address.
        cuda.synchronize()
        for program in programs.values():
            self.warm_up(program, num_sets)
        for name, program in programs.items():
            try:
                graphs[name] = self.capture(program, num_sets)
            except RuntimeError as error:  # a peer that waits for the device, for example
                self.failures[name] = f"{type(error).__name__}: {error}"
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for round_ in range(self.rounds):
            names = list(graphs) if round_ % 2 == 0 else list(graphs)[::-1]
            for name in names:
                graph, launches = graphs[name]
                graph.replay()  # the clocks and the instruction cache are this program's
                start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3 / launches)
        return times


@dataclass
class NoTimer:
    """Runs every program once on every set and tells no time: the emulated mode."""

    failures: dict[str, str] = field(default_factory=dict)

    def measure(self, programs: Mapping[str, Program], num_sets: int) -> dict[str, list[float]]:
        for program in programs.values():
            for index in range(num_sets):
                program(index)
        return {}


def median(rounds: list[float]) -> float:
    return statistics.median(rounds)


def ceilings(timer: GraphTimer, gigabytes: float = 4.0) -> dict[str, float]:
    """Measures this device's limits: reading, copying (read and written counted), bf16 products.

    Returns  bytes per second and operations per second. The read figure is the best of several
             reductions of torch: one of them may be limited by its own arithmetic.
    """
    words = int(gigabytes * 1e9) // 32000 * 8000  # whole rows of the reduction below
    # Random bits, but no NaN pattern: exponents of all ones are cleared.
    source = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
    source.bitwise_and_(~0x40000000)
    target = torch.empty_like(source)
    floats = source.view(torch.float32)
    size = 8192
    a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    c = torch.empty_like(a)
    reads: dict[str, Program] = {
        "sum": lambda _: floats.sum(),
        "amax": lambda _: source.amax(),
        "rows": lambda _: floats.view(-1, 8000).sum(1),
    }
    others: dict[str, Program] = {
        "copy": lambda _: target.copy_(source),
        "matmul": lambda _: torch.mm(a, b, out=c),
    }
    short = GraphTimer(timer.rounds, launches=4)
    read = {name: median(us) for name, us in short.measure(reads, 1).items()}
    other = {name: median(us) for name, us in short.measure(others, 1).items()}
    return {
        "read_bytes_per_s": words * 4 / min(read.values()) * 1e6,
        "copy_bytes_per_s": 2 * words * 4 / other["copy"] * 1e6,
        "bf16_flops": 2 * size**3 / other["matmul"] * 1e6,
    }

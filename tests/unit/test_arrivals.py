"""The trace of benchmarks.trace_replay: its law, its clock, and what it reports."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.arrivals import Served, figures, gaps, quantile, replay


def test_arrivals_are_a_poisson_process() -> None:
    times = gaps(20000, 7)
    assert times == gaps(20000, 7) != gaps(20000, 8)
    waits = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert min(waits) >= 0.0
    mean = sum(waits) / len(waits)
    assert abs(mean - 1.0) < 5 / math.sqrt(len(waits))
    # Exponential: as many above x as exp(-x) says.
    for x in (0.5, 1.0, 3.0):
        share, law = sum(w > x for w in waits) / len(waits), math.exp(-x)
        assert abs(share - law) < 5 * math.sqrt(law * (1 - law) / len(waits))


class Server:
    """Serves one request at a time: a first token after 1 s, one more each second."""

    def __init__(self, tokens: list[int]) -> None:
        self.now, self.tokens = 100.0, tokens
        self.queue: list[int] = []
        self.seen: list[tuple[int, float]] = []
        self.done = 0
        self.first = 0.0

    def submit(self, index: int) -> None:
        self.queue.append(index)
        self.seen.append((index, self.now))

    def step(self) -> Iterator[Served]:
        self.now += 1.0
        self.done += 1
        index = self.queue[0]
        if self.done == 1:
            self.first = self.now
        if self.done == self.tokens[index]:
            self.queue.pop(0)
            self.done = 0
            yield Served(index, self.first, self.now, self.tokens[index])


def test_the_clock_skips_what_nobody_is_served_in() -> None:
    server = Server([3, 2, 1])
    found = replay([5.0, 6.5, 1000.0], server.submit, server.step, clock=lambda: server.now)
    # The second came in the middle of a step of the first and waited; the third came much later.
    assert server.seen == [(0, 100.0), (1, 102.0), (2, 105.0)]
    assert found["ttft_s"] == pytest.approx([1.0, 2.5, 1.0])
    assert found["tpot_s"] == [1.0, 1.0, None]
    assert found["tokens"] == [3, 2, 1]
    assert found["seconds"] == pytest.approx(996.0) and found["busy_s"] == pytest.approx(6.0)
    assert found["most"] == 2
    row: dict[str, Any] = figures(found)
    assert row["tokens"] == 6 and row["tokens_per_second"] == pytest.approx(6 / 996)
    assert row["ttft_p50_s"] == pytest.approx(1.0) and row["ttft_p99_s"] == pytest.approx(2.5)


def test_quantiles() -> None:
    values = [float(v) for v in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1.0)) == (50, 99, 100)
    assert quantile([3.0], 0.01) == quantile([3.0], 0.99) == 3.0

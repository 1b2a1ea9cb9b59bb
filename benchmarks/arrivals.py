"""A trace of requests that arrive as a Poisson process, and its replay by anything that has steps.

Needs the standard library alone, so that a peer's own environment can run it.

The law. The gaps between arrivals are independent and exponential with mean 1 / rate. Prompts are
drawn from evaluation sets, first the set, each alike, then a prompt of it, with replacement; so
lengths are those of the sets. All draws come from one seed, and those of another rate are the same
gaps, scaled.

The clock. It is the wall clock without the time in which nobody is served: where no request is in
flight, it jumps to the next arrival. Whoever arrives while a step runs is submitted behind it, and
its waiting counts from its arrival. So the times of requests are those of a server in real time,
and a replay takes only as long as there is work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Served", "figures", "gaps", "quantile", "replay"]


@dataclass(frozen=True)
class Served:
    """One request. Times: seconds of time.perf_counter().

    index   in the trace
    tokens  that were generated
    """

    index: int
    first_token: float
    last_token: float
    tokens: int


def gaps(count: int, seed: int) -> list[float]:
    """Times of arrival of a process of rate 1; divide them by the rate."""
    rng = random.Random(f"arrivals-{seed}")
    now, times = 0.0, []
    for _ in range(count):
        now += rng.expovariate(1.0)
        times.append(now)
    return times


def replay(
    arrivals: Sequence[float],
    submit: Callable[[int], object],
    step: Callable[[], Iterable[Served]],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Serve requests that arrive at these seconds, in ascending order.

    submit  takes the request of an index
    step    runs one; returns those that it has ended

    Returns lists by request: `ttft_s` from its arrival, `tpot_s` per token behind the first (None
    for fewer than two), `tokens`; and `seconds` of the clock from the first arrival to the last
    token, `busy_s` of the wall clock, `most` requests in flight or waiting at once.
    """
    ttft: list[float] = [0.0] * len(arrivals)
    tpot: list[float | None] = [None] * len(arrivals)
    tokens = [0] * len(arrivals)
    begin = clock()
    offset = begin - arrivals[0]  # of the wall clock ahead of the trace's
    sent = done = most = 0
    last = 0.0
    while done < len(arrivals):
        now = clock() - offset
        if sent == done and arrivals[sent] > now:
            offset -= arrivals[sent] - now
            now = arrivals[sent]
        while sent < len(arrivals) and arrivals[sent] <= now:
            submit(sent)
            sent += 1
        most = max(most, sent - done)
        for served in step():
            done += 1
            at = served.index
            ttft[at] = served.first_token - offset - arrivals[at]
            if served.tokens > 1:
                tpot[at] = (served.last_token - served.first_token) / (served.tokens - 1)
            tokens[at] = served.tokens
            last = max(last, served.last_token - offset)
    return {
        "ttft_s": ttft, "tpot_s": tpot, "tokens": tokens, "seconds": last - arrivals[0],
        "busy_s": clock() - begin, "most": most,
    }  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 10000) * len(ordered) // 10000) - 1)]


def figures(found: dict[str, Any]) -> dict[str, float]:
    """What is reported of a replay: throughput, and p50 and p99 of the times."""
    each = [value for value in found["tpot_s"] if value is not None]
    return {
        "tokens_per_second": sum(found["tokens"]) / found["seconds"],
        "requests_per_second": len(found["tokens"]) / found["seconds"],
        "ttft_p50_s": quantile(found["ttft_s"], 0.5),
        "ttft_p99_s": quantile(found["ttft_s"], 0.99),
        "tpot_p50_s": quantile(each, 0.5),
        "tpot_p99_s": quantile(each, 0.99),
        "tokens": sum(found["tokens"]),
        "seconds": found["seconds"],
        "busy_s": found["busy_s"],
        "most": found["most"],
    }

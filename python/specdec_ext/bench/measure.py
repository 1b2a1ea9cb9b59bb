"""Timed calls of generate(): with speculation and plain, taking turns.

Rules: both kinds run in one process on one engine, one call of each per round, the order turned
round every round; a ratio is taken within a round, and the median over rounds is reported. Calls
before the first round are not counted.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..request.sampling_params import SamplingParams
from ..text.metrics import SpecCounter, ratio

__all__ = [
    "Call",
    "Comparison",
    "compare",
    "percentile",
    "plain_params",
    "random_prompts",
    "step_times",
]

PERCENTILES = (10, 25, 50, 75, 90, 99)


def random_prompts(vocab_size: int, count: int, length: int, seed: int) -> list[list[int]]:
    """[count][length] token ids, uniform; the same for the same seed."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def plain_params(params: SamplingParams) -> SamplingParams:
    """The same request without speculation."""
    return dataclasses.replace(params, speculative_config=False, prediction=None)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the closest ranks, as numpy's default."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100.0
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclass
class Call:
    """One generate() call over all prompts. Times in seconds."""

    seconds: float
    num_prompt_tokens: int
    token_ids: list[list[int]]
    ttft_ms: list[float]
    tpot_ms: list[float]  # per output token after the first
    counter: SpecCounter
    num_forward_passes: int
    forward_s: float
    draft_s: float  # in drafters written in Python
    host_s: float  # the rest of the engine's steps
    errors: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)


def _sums(llm: Any) -> tuple[int, float, float, float]:
    """(forward passes, forward s, drafter s, step s) since the engine was made."""
    metrics = llm.get_metrics()
    drafter = metrics["drafter"] or {}
    time_s = metrics["time"]
    return (
        metrics["num_forward_passes"],
        time_s["forward_s"],
        float(drafter.get("seconds") or 0.0),
        time_s["step_s"],
    )


def one_call(llm: Any, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Call:
    """Decode the prompts together and take the time; every call computes its prompts anew."""
    llm.reset_prefix_cache()
    before = _sums(llm)
    begin = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False
    )
    seconds = time.perf_counter() - begin
    after = _sums(llm)
    forward_s, draft_s, step_s = (after[i] - before[i] for i in (1, 2, 3))
    counter = SpecCounter(0, keep_steps=False)
    for output in outputs:
        counter.add(_counter_of(output.metrics))
    return Call(
        seconds=seconds,
        num_prompt_tokens=sum(len(ids) for ids in prompts),
        token_ids=[list(output.outputs[0].token_ids) for output in outputs],
        ttft_ms=_known(o.metrics.get("time_to_first_token_ms") for o in outputs),
        tpot_ms=_known(o.metrics.get("mean_itl_ms") for o in outputs),
        counter=counter,
        num_forward_passes=after[0] - before[0],
        forward_s=forward_s,
        draft_s=draft_s,
        host_s=step_s - forward_s - draft_s,
        errors=[o.outputs[0].error for o in outputs if o.outputs[0].error is not None],
    )


def _known(values: Any) -> list[float]:
    return [float(value) for value in values if value is not None]


def _counter_of(metrics: dict[str, Any]) -> SpecCounter:
    """A request's sums again, from what it reports."""
    spec = metrics["speculative_decoding"]
    return SpecCounter(
        spec["num_spec_tokens"],
        keep_steps=False,
        num_steps=metrics["num_forward_passes"],
        num_spec_steps=spec["num_spec_steps"],
        num_accepted=spec["num_accepted_draft_tokens"],
        num_drafts=spec["num_draft_tokens"],
        num_prefill_steps=metrics["num_prefill_passes"],
        num_rows=metrics["num_rows"],
        num_tokens=metrics["num_generated_tokens"],
        histogram=list(spec["acceptance_histogram"]),
    )


@dataclass
class Comparison:
    """Rounds of the two kinds of calls; `plain` is empty if there is nothing to compare with."""

    calls: list[Call]
    plain: list[Call]

    @property
    def errors(self) -> list[str]:
        return [error for call in (*self.calls, *self.plain) for error in call.errors]

    @property
    def identical(self) -> bool | None:
        """Every call gave the tokens of plain decoding; None without it."""
        if not self.plain:
            return None
        expected = self.plain[0].token_ids
        return all(call.token_ids == expected for call in (*self.calls, *self.plain))

    @property
    def speedups(self) -> list[float]:
        """Time of plain decoding / time with speculation, per round."""
        return [p.seconds / c.seconds for c, p in zip(self.calls, self.plain, strict=False)]

    def to_dict(self) -> dict[str, Any]:
        """What every benchmark reports of it."""
        speedups = self.speedups
        return {
            "plain": series(self.plain) if self.plain else None,
            "speedup": statistics.median(speedups) if speedups else None,
            "speedup_range": [min(speedups), max(speedups)] if speedups else None,
            "identical_to_plain": self.identical,
            "speculative_decoding": total(self.calls).to_dict(),
            "failed_requests": len(self.errors),
        }


def total(calls: Sequence[Call]) -> SpecCounter:
    """The counters of all calls."""
    counter = SpecCounter(0, keep_steps=False)
    for call in calls:
        counter.add(call.counter)
    return counter


def series(calls: Sequence[Call]) -> dict[str, Any]:
    """Times of calls of one kind, in vLLM's names: latencies are of whole calls, in seconds;
    ttfts_ms and tpots_ms of every request of every call."""
    latencies = [call.seconds for call in calls]
    counter = total(calls)

    def median(values: Sequence[float]) -> float | None:
        return statistics.median(values) if values else None

    return {
        "avg_latency": statistics.fmean(latencies),
        "median_latency": statistics.median(latencies),
        "latencies": latencies,
        "percentiles": {str(p): percentile(latencies, p) for p in PERCENTILES},
        "output_tokens_per_second": median([c.num_tokens / c.seconds for c in calls]),
        "median_ttft_ms": median([ms for c in calls for ms in c.ttft_ms]),
        "median_tpot_ms": median([ms for c in calls for ms in c.tpot_ms]),
        "tokens_per_forward_pass": ratio(counter.num_tokens, counter.num_steps),
        "rows_per_forward_pass": ratio(counter.num_rows, counter.num_steps),
        "ttfts_ms": [ms for c in calls for ms in c.ttft_ms],
        "tpots_ms": [ms for c in calls for ms in c.tpot_ms],
        "time_s": {
            "forward": median([c.forward_s for c in calls]),
            "draft": median([c.draft_s for c in calls]),
            "host": median([c.host_s for c in calls]),
        },
    }


def step_times(
    llm: Any, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, Any] | None:
    """Where a step's time goes, of two more calls, the first not counted. None on the CPU.

    Returns {"decode": {"steps", "draft_ms", "verify_ms", "accept_ms", "host_ms"}, "prefill": ...}:
    means per step. These calls are none of those whose latency is reported.
    """
    time_steps = getattr(llm.engine, "time_steps", None)
    if time_steps is None:
        return None
    for _ in range(2):
        time_steps()
        one_call(llm, prompts, params)
    report = {}
    for kind, sums in llm.get_metrics()["overlap"]["step_times"].items():
        steps = sums.pop("steps")
        means = {f"{part}_ms": ratio(1e3 * seconds, steps) for part, seconds in sums.items()}
        report[kind] = {"steps": steps, **means}
    return report


def compare(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    num_iters: int,
    num_iters_warmup: int,
    on_call: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Rounds of a call with speculation and a plain one; without a method only the latter kind.

    on_call  told ("warm-up" or "round", number from 1, how many) before each round
    Raises RequestError before any work.
    """
    speculative = llm.speculative_config is not None
    kinds = [params, plain_params(params)] if speculative else [params]
    calls: list[list[Call]] = [[] for _ in kinds]
    for phase, count in (("warm-up", num_iters_warmup), ("round", num_iters)):
        for i in range(count):
            if on_call is not None:
                on_call(phase, i + 1, count)
            order = range(len(kinds)) if i % 2 == 0 else reversed(range(len(kinds)))
            for kind in order:
                call = one_call(llm, prompts, kinds[kind])
                if phase == "round":
                    calls[kind].append(call)
    return Comparison(calls[0], calls[1] if speculative else [])

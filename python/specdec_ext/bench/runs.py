"""The benchmarks themselves: each takes an LLM and prompts and returns a JSON-ready report.

Keys are those of `vllm bench latency` and `vllm bench throughput` where those have one.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ..config.lookahead import LookaheadDecodingConfig
from ..request.sampling_params import SamplingParams
from ..request.speculation import with_defaults
from .machine import about_engine, about_machine, clocks
from .measure import Call, Comparison, compare, series, step_times

__all__ = ["latency", "sweep", "throughput"]

Prompts = Sequence[Sequence[int]]
OnCall = Callable[[str, int, int], None] | None


def _workload(prompts: Prompts, params: SamplingParams, source: str, **more: Any) -> dict[str, Any]:
    lengths = [len(ids) for ids in prompts]
    return {
        "prompts": source,
        "input_len": [min(lengths), max(lengths)],
        "output_len": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        **more,
    }


def _promises(llm: Any, params: SamplingParams) -> dict[str, bool]:
    """Whether the text has the model's law, and whether it is token for token the plain one."""
    config = llm.speculative_config
    params = with_defaults(params, config)
    real = config is None or not config.synthetic_rates
    return {
        "lossless": real and params.lossless,
        "expects_plain_tokens": real and (params.greedy or params.acceptance == "exact_match"),
    }


def _report(name: str, llm: Any, params: SamplingParams, **content: Any) -> dict[str, Any]:
    return {
        "benchmark": name,
        **content,
        **about_engine(llm),
        **_promises(llm, params),
        "machine": about_machine(llm.device),
    }


def latency(
    llm: Any,
    prompts: Prompts,
    params: SamplingParams,
    *,
    source: str,
    num_iters: int,
    num_iters_warmup: int,
    on_call: OnCall = None,
) -> dict[str, Any]:
    """Time of a batch from submission to the last token."""
    before = clocks(llm.device)
    result = compare(
        llm, prompts, params, num_iters=num_iters, num_iters_warmup=num_iters_warmup,
        on_call=on_call,
    )  # fmt: skip
    return _report(
        "latency",
        llm,
        params,
        **series(result.calls),
        **result.to_dict(),
        step_times=step_times(llm, prompts, params),
        workload=_workload(
            prompts, params, source, batch_size=len(prompts), num_iters=num_iters,
            num_iters_warmup=num_iters_warmup,
        ),
        clocks={"before": before, "after": clocks(llm.device)},
    )  # fmt: skip


def _rates(calls: Sequence[Call]) -> dict[str, Any]:
    """vLLM's keys; times are medians over the calls."""
    elapsed = statistics.median(call.seconds for call in calls)
    first = calls[0]
    output_tokens = statistics.median(call.num_tokens for call in calls)
    all_tokens = first.num_prompt_tokens + output_tokens
    return {
        "elapsed_time": elapsed,
        "num_requests": len(first.token_ids),
        "total_num_tokens": all_tokens,
        "requests_per_second": len(first.token_ids) / elapsed,
        "tokens_per_second": all_tokens / elapsed,
        "total_input_tokens": first.num_prompt_tokens,
        "total_output_tokens": output_tokens,
        "output_throughput": output_tokens / elapsed,
        "elapsed_times": [call.seconds for call in calls],
    }


def throughput(
    llm: Any,
    prompts: Prompts,
    params: SamplingParams,
    *,
    source: str,
    num_iters: int,
    num_iters_warmup: int,
    on_call: OnCall = None,
) -> dict[str, Any]:
    """All prompts at once; the engine runs max_batch_size of them together."""
    before = clocks(llm.device)
    result = compare(
        llm, prompts, params, num_iters=num_iters, num_iters_warmup=num_iters_warmup,
        on_call=on_call,
    )  # fmt: skip
    report = result.to_dict()
    if result.plain:
        report["plain"] = {**_rates(result.plain), **series(result.plain)}
    return _report(
        "throughput",
        llm,
        params,
        **_rates(result.calls),
        **series(result.calls),
        **report,
        workload=_workload(
            prompts, params, source, num_prompts=len(prompts), num_iters=num_iters,
            num_iters_warmup=num_iters_warmup,
        ),
        clocks={"before": before, "after": clocks(llm.device)},
    )  # fmt: skip


def _variant(params: SamplingParams, draft: int | tuple[int, int, int] | None) -> SamplingParams:
    """The request with this draft length or triple, always; None: as the engine decides."""
    if draft is None:
        return params
    if isinstance(draft, tuple):
        triple = LookaheadDecodingConfig(*draft, adaptive=False)
        return dataclasses.replace(params, speculative_config=triple)
    changes = {"max_draft_len": draft, "adaptive": False}
    return dataclasses.replace(params, speculative_config=changes)


def _row(
    batch_size: int, draft: int | tuple[int, int, int] | None, result: Comparison, name: str
) -> dict[str, Any]:
    figures = series(result.calls)
    report = result.to_dict()
    spec = report["speculative_decoding"]
    return {
        "batch_size": batch_size,
        "draft": name if draft is None else list(draft) if isinstance(draft, tuple) else draft,
        "median_latency": figures["median_latency"],
        "latencies": figures["latencies"],
        "output_tokens_per_second": figures["output_tokens_per_second"],
        "plain_output_tokens_per_second": report["plain"]["output_tokens_per_second"],
        "plain_latencies": report["plain"]["latencies"],
        "speedup": report["speedup"],
        "speedup_range": report["speedup_range"],
        "mean_acceptance_length": spec["mean_acceptance_length"],
        "draft_acceptance_rate": spec["draft_acceptance_rate"],
        "tokens_per_forward_pass": figures["tokens_per_forward_pass"],
        "rows_per_forward_pass": figures["rows_per_forward_pass"],
        "identical_to_plain": report["identical_to_plain"],
        "failed_requests": report["failed_requests"],
    }


def sweep(
    llm: Any,
    prompts: Prompts,
    params: SamplingParams,
    *,
    source: str,
    batch_sizes: Sequence[int],
    drafts: Sequence[int | tuple[int, int, int] | None],
    num_iters: int,
    num_iters_warmup: int,
    on_cell: Callable[[int, int], None] | None = None,
    rows: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Every batch size with every draft length (None: the engine's own choice), each against plain
    decoding in its own rounds.

    prompts  a batch takes the first of them, again from the start if there are too few
    on_cell  told (number from 1, how many) before each cell
    rows     filled as cells are done, for whoever is interrupted
    """
    rows = [] if rows is None else rows
    before = clocks(llm.device)
    config = llm.speculative_config
    cells = [(batch, draft) for batch in batch_sizes for draft in drafts]
    for i, (batch, draft) in enumerate(cells):
        if on_cell is not None:
            on_cell(i + 1, len(cells))
        items = [prompts[k % len(prompts)] for k in range(batch)]
        result = compare(
            llm, items, _variant(params, draft), num_iters=num_iters,
            num_iters_warmup=num_iters_warmup,
        )  # fmt: skip
        rows.append(_row(batch, draft, result, "adaptive" if config.adaptive else "configured"))
    best = {
        str(batch): max(
            (row for row in rows if row["batch_size"] == batch), key=lambda row: row["speedup"]
        )["draft"]
        for batch in batch_sizes
    }
    return _report(
        "sweep",
        llm,
        params,
        rows=rows,
        best_draft_by_batch_size=best,
        failed_requests=sum(row["failed_requests"] for row in rows),
        identical_to_plain=all(row["identical_to_plain"] for row in rows),
        workload=_workload(
            prompts, params, source, batch_sizes=list(batch_sizes), num_iters=num_iters,
            num_iters_warmup=num_iters_warmup,
        ),
        clocks={"before": before, "after": clocks(llm.device)},
    )  # fmt: skip

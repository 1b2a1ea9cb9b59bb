"""Measures T(rows, context), the time of one forward pass by its rows and the length of the text.

The adaptive draft length weighs the tokens a draft may bring against this table, so it is measured
on the model and the machine that will run, once, before the first speculative request. Every row
reads the K/V cache: what is nearly free after a short prompt is not after a long one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from .._core import StepCost
from ..config.engine import pages_for

if TYPE_CHECKING:
    import torch

    from specdec_ext.models.base import StepModel

    Pages = torch.Tensor | _core.LazyZeros

__all__ = ["StepCost", "measure_cost", "measure_growth", "measure_step_cost"]

# Row counts up to one request's largest step; beyond the last the table grows linearly. They stand
# close where passes begin to cost more: eight rows are almost free, each further one is not.
ROW_COUNTS = (1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 13, 16, 20, 24, 32, 48, 64, 96, 128)
_CONTEXT_TOKENS = 128
TIME_LIMIT_S = 2.0  # of times by rows; what a longer context adds gets half as long
# What a longer context adds is measured at a few of them; a shorter difference would be noise.
_GROWTH_ROWS = (1, 4, 12, 32, 64)
_LONG_CONTEXT_TOKENS, _LEAST_LONG_CONTEXT_TOKENS = 2048, 512


def measure_step_cost(
    model: StepModel,
    *,
    num_pages: int,
    page_size: int,
    max_rows: int = 128,
    rounds: int = 4,
    time_limit_s: float = TIME_LIMIT_S,
    recorded: Callable[[Any], float] | None = None,
) -> tuple[list[int], list[float]]:
    """Times ``model.forward`` on chains of 1, 2, ... rows after a short context.

    The row counts are gone through in rounds, so that a disturbance does not fall on one of them
    alone, and the least time of each is kept.
    The model's bound K/V pages are written (pages 0, 1, ...): call it while no request is running.

    Args:
        recorded: Seconds of a plan's pass where steps are recorded as graphs; None: the host's.

    Returns:
        Row counts (ascending from 1) and the least time of each, in seconds. At least two points.
        Measuring stops after about `time_limit_s`; the table is then extrapolated.
    """
    capacity = min(num_pages * page_size, model.max_position)
    context = max(0, min(_CONTEXT_TOKENS, capacity - max_rows))
    counts = [n for n in ROW_COUNTS if n <= max_rows and context + n <= capacity]
    plans = {count: _chain(count, context, page_size) for count in counts}
    if counts:
        model.forward(plans[counts[0]])  # warm-up
    best: dict[int, float] = {}
    begin = time.perf_counter()
    for _ in range(1 if recorded else rounds):  # a device's clock tells the same each time
        # The first round may take half of the time; what it does not reach is extrapolated.
        for count in counts if not best else list(best):
            start = time.perf_counter()
            if len(best) >= 2 and start - begin > time_limit_s * (0.5 if count not in best else 1):
                break
            seconds = _seconds(model, plans[count], recorded)
            best[count] = min(best.get(count, float("inf")), seconds)
    return list(best), list(best.values())


def measure_growth(
    model: StepModel,
    rows: Sequence[int],
    pages: tuple[Pages, Pages],
    *,
    rounds: int = 3,
    time_limit_s: float = TIME_LIMIT_S / 2,
    recorded: Callable[[Any], float] | None = None,
) -> list[float]:
    """What each token of context more adds to a pass of one request, by its rows.

    Args:
        rows: Row counts, ascending, as measure_step_cost() returned them.
        pages: The model's bound K/V pages [layers, pages, heads, page size, head_dim], as KvPages
            has them; their first ones are overwritten.
        recorded: See measure_step_cost().

    Returns:
        Seconds per token, as many as rows. Zeros where the cache is too short to tell. Measuring
        stops after about `time_limit_s`; between the counts that it reached it is linear.
    """
    num_pages, page_size = pages[0].shape[1], pages[0].shape[3]
    capacity = min(num_pages * page_size, model.max_position)
    counts = [n for n in _GROWTH_ROWS if n <= rows[-1]]
    far = min(_LONG_CONTEXT_TOKENS, capacity - counts[-1])
    if far < _LEAST_LONG_CONTEXT_TOKENS:
        return [0.0] * len(rows)
    for part in pages:  # memory that was never written is one page of zeros to the machine
        count = pages_for(far + counts[-1], page_size)
        if isinstance(part, _core.LazyZeros):
            part.write_zeros(count)
        else:
            part[:, :count].zero_()
    near = {n: _chain(n, _CONTEXT_TOKENS, page_size) for n in counts}
    long = {n: _chain(n, far, page_size) for n in counts}
    best: dict[int, list[float]] = {}
    begin = time.perf_counter()
    for _ in range(1 if recorded else rounds):
        for n in counts:
            if best and time.perf_counter() - begin > time_limit_s:
                break
            # Side by side: the machine's speed drifts more than the context costs.
            pair = [_seconds(model, plan, recorded) for plan in (near[n], long[n])]
            best[n] = [min(both) for both in zip(pair, best.get(n, pair), strict=True)]
    known = sorted(best)
    added = [max(0.0, best[n][1] - best[n][0]) / (far - _CONTEXT_TOKENS) for n in known]
    last = known[-1]  # after it, in proportion to the rows
    return [float(np.interp(n, known, added)) if n <= last else added[-1] * n / last for n in rows]


def _seconds(model: StepModel, plan: Any, recorded: Callable[[Any], float] | None) -> float:
    if recorded is not None:
        return recorded(plan)
    begin = time.perf_counter()
    model.forward(plan)
    return time.perf_counter() - begin


def _chain(count: int, context: int, page_size: int) -> Any:
    """A step of one request: a chain of ``count`` rows after ``context`` tokens."""
    return _core.make_step_plan(
        [[0] * count],
        kv_len=[context],
        page_table=[list(range(pages_for(context + count, page_size)))],
        needs_logits=False,
    )


def measure_cost(
    model: StepModel,
    pages: tuple[Pages, Pages],
    *,
    max_rows: int = 128,
    time_limit_s: float = TIME_LIMIT_S,
    recorded: Callable[[Any], float] | None = None,
) -> StepCost | None:
    """The table of a model whose K/V pages are `pages`; None: too little room to tell.

    max_rows  of a step that the model was made for
    recorded  see measure_step_cost()
    """
    num_pages, page_size = pages[0].shape[1], pages[0].shape[3]
    rows, seconds = measure_step_cost(
        model,
        num_pages=num_pages,
        page_size=page_size,
        max_rows=min(max_rows, 128),
        time_limit_s=time_limit_s,
        recorded=recorded,
    )
    if len(rows) < 2:
        return None
    growth = measure_growth(model, rows, pages, time_limit_s=time_limit_s / 2, recorded=recorded)
    return StepCost(
        dict(zip(rows, seconds, strict=True)), dict(zip(rows, growth, strict=True)), _CONTEXT_TOKENS
    )

"""Measures T(rows), the time of one forward pass as a function of its rows.

The adaptive draft length weighs the tokens a draft may bring against this table, so it is measured
on the model and the machine that will run, once, before the first speculative request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from specdec_ext import _core

if TYPE_CHECKING:
    from specdec_ext.models.base import StepModel

# Row counts up to one request's largest step; beyond the last the table grows linearly.
ROW_COUNTS = (1, 2, 3, 4, 6, 8, 11, 12, 13, 16, 20, 24, 32, 48, 64, 96, 128)
_CONTEXT_TOKENS = 128
_TIME_LIMIT_S = 2.0


def measure_step_cost(
    model: StepModel, *, num_pages: int, page_size: int, max_rows: int = 128, repeats: int = 3
) -> tuple[list[int], list[float]]:
    """Times ``model.forward`` on chains of 1, 2, ... rows after a short context.

    The model's bound K/V pages are written (pages 0, 1, ...): call it while no request is running.

    Returns:
        Row counts (ascending from 1) and the least time of each, in seconds. At least two points.
        Measuring stops after about two seconds; the table is then extrapolated.
    """
    capacity = min(num_pages * page_size, model.max_position)
    context = max(0, min(_CONTEXT_TOKENS, capacity - max_rows))
    rows: list[int] = []
    seconds: list[float] = []
    begin = time.perf_counter()
    for count in ROW_COUNTS:
        if count > max_rows or context + count > capacity:
            break
        plan = _core.make_step_plan(
            [[0] * count],
            kv_len=[context],
            page_table=[list(range(num_pages_for(context + count, page_size)))],
            needs_logits=False,
        )
        best = float("inf")
        for _ in range(repeats + (len(rows) == 0)):
            start = time.perf_counter()
            model.forward(plan)
            best = min(best, time.perf_counter() - start)
        rows.append(count)
        seconds.append(best)
        if time.perf_counter() - begin > _TIME_LIMIT_S and len(rows) >= 2:
            break
    return rows, seconds


def num_pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // page_size)


def calibrate_step_cost(
    executor: Any, model: StepModel, *, num_pages: int, page_size: int
) -> dict[int, float]:
    """Measures the table, hands it to the executor and returns it as {rows: seconds}."""
    rows, seconds = measure_step_cost(model, num_pages=num_pages, page_size=page_size)
    if len(rows) >= 2:
        executor.set_step_cost(rows, seconds)
    return dict(zip(rows, seconds, strict=True))

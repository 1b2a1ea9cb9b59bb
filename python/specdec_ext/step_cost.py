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
    model: StepModel, *, num_pages: int, page_size: int, max_rows: int = 128, rounds: int = 4
) -> tuple[list[int], list[float]]:
    """Times ``model.forward`` on chains of 1, 2, ... rows after a short context.

    The row counts are gone through in rounds, so that a disturbance does not fall on one of them
    alone, and the least time of each is kept.
    The model's bound K/V pages are written (pages 0, 1, ...): call it while no request is running.

    Returns:
        Row counts (ascending from 1) and the least time of each, in seconds. At least two points.
        Measuring stops after about two seconds; the table is then extrapolated.
    """
    capacity = min(num_pages * page_size, model.max_position)
    context = max(0, min(_CONTEXT_TOKENS, capacity - max_rows))
    counts = [n for n in ROW_COUNTS if n <= max_rows and context + n <= capacity]
    plans = {
        count: _core.make_step_plan(
            [[0] * count],
            kv_len=[context],
            page_table=[list(range(num_pages_for(context + count, page_size)))],
            needs_logits=False,
        )
        for count in counts
    }
    if counts:
        model.forward(plans[counts[0]])  # warm-up
    best: dict[int, float] = {}
    begin = time.perf_counter()
    for _ in range(rounds):
        # The first round may take half of the time; what it does not reach is extrapolated.
        for count in counts if not best else list(best):
            start = time.perf_counter()
            if len(best) >= 2 and start - begin > _TIME_LIMIT_S * (0.5 if count not in best else 1):
                break
            model.forward(plans[count])
            best[count] = min(best.get(count, float("inf")), time.perf_counter() - start)
    return list(best), list(best.values())


def num_pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // page_size)


def calibrate_step_cost(
    executor: Any, model: StepModel, *, num_pages: int, page_size: int, max_rows: int = 128
) -> dict[int, float]:
    """Measures the table, hands it to the executor and returns it as {rows: seconds}.

    max_rows  of a step that the model was made for
    """
    rows, seconds = measure_step_cost(
        model, num_pages=num_pages, page_size=page_size, max_rows=min(max_rows, 128)
    )
    if len(rows) >= 2:
        executor.set_step_cost(rows, seconds)
    return dict(zip(rows, seconds, strict=True))

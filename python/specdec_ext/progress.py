"""Progress bar of LLM.generate: stderr only, silent where stderr is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from .metrics import SpecCounter, ratio
from .request_state import RequestState

__all__ = ["Progress"]

_REFRESH_S = 0.1


class Progress:
    """Counts finished requests; shows acceptance length (AL) and tokens/s beside them."""

    def __init__(self, states: Sequence[RequestState], use_tqdm: bool | Callable[..., Any]) -> None:
        self._states = states
        self._bar: Any = None
        self._start = self._last = time.perf_counter()
        self._shown = 0
        if use_tqdm is False:
            return
        make: Any = use_tqdm
        if use_tqdm is True:
            try:
                from tqdm import tqdm as make  # type: ignore[import-untyped,no-redef]
            except ImportError:  # a bar is a nicety
                return
        # disable=None: off unless the stream is a terminal
        self._bar = make(
            total=len(states), desc="decoding", unit="req", dynamic_ncols=True, disable=None
        )

    def update(self) -> None:
        """Called after every step."""
        now = time.perf_counter()
        if self._bar is None or now - self._last < _REFRESH_S:
            return
        self._last = now
        self._show(now)

    def _show(self, now: float) -> None:
        counter = SpecCounter(0, keep_steps=False)
        for state in self._states:
            counter.add(state.counter)
        done = sum(state.finished for state in self._states)
        rate = ratio(counter.num_tokens, now - self._start)
        self._bar.set_postfix_str(
            f"AL={counter.mean_acceptance_length:.2f} tok/s={rate:.1f}", refresh=False
        )
        self._bar.update(done - self._shown)
        self._shown = done

    def close(self) -> None:
        if self._bar is not None:
            self._show(time.perf_counter())
            self._bar.close()

"""Progress bar of LLM.generate: stderr only, silent where stderr is not a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ..log import logger
from .metrics import SpecCounter, ratio

__all__ = ["Progress"]

_REFRESH_S = 0.1


class Counted(Protocol):
    """What the bar reads of a request."""

    @property
    def counter(self) -> SpecCounter: ...
    @property
    def finished(self) -> bool: ...


class Progress:
    """Counts finished requests; shows acceptance length (AL) and tokens/s as well."""

    def __init__(self, states: Sequence[Counted], use_tqdm: bool | Callable[..., Any]) -> None:
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
        with self._guard():
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
        with self._guard():
            self._show(now)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """A bar is a nicety: where it raises, decoding goes on without it."""
        try:
            yield
        except Exception as error:
            self._bar = None
            logger.warning(
                "the progress bar raised %s: %s; decoding goes on without it",
                type(error).__name__, error,
            )  # fmt: skip

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
            with self._guard():
                self._show(time.perf_counter())
                self._bar.close()

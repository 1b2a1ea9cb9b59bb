"""What the requests of an engine add up to, each counted once whatever was interrupted."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ..config.acceptance import describe
from ..request.resolve import EngineLimits, ResolvedRequest
from ..text.metrics import SpecCounter
from .request_state import RequestState

__all__ = ["Ledger", "how_decoded", "synthetic_acceptance"]

# So many requests that have ended are kept before they are added to the sums.
_KEPT_ENDED = 16


class Ledger:
    """Sums over requests. The engine's lock guards it."""

    def __init__(self) -> None:
        # By id: an entry that is made twice is one.
        self._ended: dict[int, tuple[str | None, SpecCounter]] = {}
        self._totals = SpecCounter(0, keep_steps=False)
        self._reasons: dict[str, int] = {}

    def end(self, state: RequestState) -> None:
        """A request has ended; may be said again as long as it is among the `live` of fold()."""
        self._ended[state.rid] = (state.finish_reason, state.counter)

    def fold(self, live: Collection[int]) -> None:
        """Add what has ended to the sums, but for the ids in `live`."""
        if len(self._ended) < _KEPT_ENDED:
            return
        through = {rid: entry for rid, entry in self._ended.items() if rid not in live}
        left = {rid: entry for rid, entry in self._ended.items() if rid in live}
        totals, reasons = self._add(through.values())
        self._totals, self._reasons, self._ended = totals, reasons, left

    def sums(self, states: Iterable[RequestState]) -> tuple[SpecCounter, dict[str, int]]:
        """Everything so far, with the requests that still run; how many have ended, by reason."""
        live = {state.rid: (state.finish_reason, state.counter) for state in states}
        return self._add({**live, **self._ended}.values())

    def _add(
        self, entries: Iterable[tuple[str | None, SpecCounter]]
    ) -> tuple[SpecCounter, dict[str, int]]:
        totals = SpecCounter(self._totals.num_spec_tokens, keep_steps=False)
        totals.add(self._totals)
        reasons = dict(self._reasons)
        for reason, counter in entries:
            totals.add(counter)
            if reason is not None:
                reasons[reason] = reasons.get(reason, 0) + 1
        return totals, reasons


def synthetic_acceptance(limits: EngineLimits) -> dict[str, Any] | None:
    config = limits.speculative_config
    return config.synthetic_acceptance if config is not None else None


def how_decoded(model: Any, limits: EngineLimits, request: ResolvedRequest) -> dict[str, Any]:
    """What the request's metrics say of how its text came about."""
    about: dict[str, Any] = {
        "numerics": getattr(model, "numerics", "exact"),
        "model_impl": getattr(model, "impl", "unknown"),
        "acceptance": describe(request.params.acceptance),
        "lossless": request.params.lossless,
    }
    synthetic = synthetic_acceptance(limits)
    if synthetic is not None and request.submit_kwargs["speculative"]:
        about["acceptance"] = "synthetic (not the model's text)"
        about["lossless"] = False
        about["synthetic_acceptance"] = synthetic
    return about

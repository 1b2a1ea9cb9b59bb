"""Drives an executor and a step model: submissions and cancels at chosen steps, the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hash_target import HashFunction, HashModel
from specdec_ext import _core
from specdec_ext.models.kv_storage import page_shape, stored_name

# T(rows) of a machine on which rows are not free, so that adaptive budgets really choose.
STEP_COST = ([1, 2, 4, 8, 16, 32, 64, 128], [1.0, 1.02, 1.05, 1.1, 1.3, 1.9, 3.1, 5.6])


def best_of(scores: Any) -> np.ndarray:
    """int32 [rows] first largest score of each row, -1 where one is NaN."""
    rows = np.asarray(scores)
    return np.where(np.isnan(rows).any(axis=1), -1, rows.argmax(axis=1)).astype(np.int32)


@dataclass
class Job:
    """One request of a test: when it enters, what it asks, when (if ever) it is cancelled."""

    prompt: list[int]
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    submit_step: int = 0
    cancel_step: int | None = None


@dataclass
class Delivery:
    """What the executor delivered for one job."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    forwards: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    cancelled: bool = False


class Engine:
    """An executor over a step model and its pages, with the page law checked after every step."""

    def __init__(
        self,
        model: Any,
        k_pages: Any,
        v_pages: Any,
        *,
        max_batch_size: int,
        max_seq_len: int,
        max_num_tokens: int,
        **options: Any,
    ) -> None:
        self.model = model
        self.num_pages = k_pages.shape[1]
        self.max_seq_len = max_seq_len
        self.ex = _core.Executor(
            k_pages,
            v_pages,
            vocab_size=model.vocab_size,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            check_integrity=True,
            **options,
        )
        self.ex.set_step_cost(*STEP_COST)
        self.step_count = 0

    def step(self, before_forward: Callable[[Any], None] | None = None) -> list[Any] | None:
        """Runs one step; returns its outputs, or None when there was nothing to run."""
        plan = self.ex.plan()
        if plan is None:
            return None
        # No row, draft or not, lies where the last token would have to: its output has no place.
        assert int(plan.positions.max()) <= self.max_seq_len - 2
        if before_forward is not None:
            before_forward(plan)
        self.step_count += 1
        result = self.model.forward(plan)
        # Every other step that has scores comes with their best tokens, as the native decoder's do.
        best = best_of(result) if plan.needs_logits and plan.step % 2 else None
        return self.ex.commit(plan, result, best=best)

    def run(self, jobs: list[Job], max_steps: int = 1_000_000) -> list[Delivery]:
        """Runs jobs to their ends; returns one delivery per job, in order."""
        deliveries = [Delivery() for _ in jobs]
        pending = sorted(range(len(jobs)), key=lambda i: jobs[i].submit_step)
        cancels = {i for i, job in enumerate(jobs) if job.cancel_step is not None}
        ids: dict[int, int] = {}
        step = 0
        while pending or self.ex.num_unfinished:
            while pending and (jobs[pending[0]].submit_step <= step or not self.ex.num_unfinished):
                index = pending.pop(0)
                job = jobs[index]
                rid = self.ex.submit(job.prompt, max_tokens=job.max_tokens, **job.options)
                ids[rid] = index
            for rid, index in list(ids.items()):
                due = index in cancels and step >= (jobs[index].cancel_step or 0)
                if due and deliveries[index].finish_reason is None:
                    deliveries[index].cancelled = self.ex.cancel(rid)
                    cancels.discard(index)
            outputs = self.step()
            step += 1
            assert step < max_steps, "the executor does not come to an end"
            for out in outputs or []:
                self.record(deliveries[ids[out.request_id]], out)
        self.assert_idle()
        return deliveries

    @staticmethod
    def record(delivery: Delivery, out: Any) -> None:
        assert delivery.finish_reason is None, "output after the end of a request"
        assert not delivery.cancelled, "output after a cancel"
        delivery.tokens += out.tokens
        delivery.logprobs += out.logprobs or []
        delivery.prompt_logprobs += out.prompt_logprobs
        delivery.forwards += 1
        delivery.num_drafts += out.num_drafts
        delivery.num_accepted += out.num_accepted
        assert out.num_accepted <= out.num_drafts
        assert out.num_accepted <= len(out.tokens)
        if out.finish_reason is not None:
            delivery.finish_reason = out.finish_reason
            delivery.stop_reason = out.stop_reason
            delivery.error = out.error

    def assert_idle(self) -> None:
        """Nothing is held: every page is free, no promise, pool or history is left."""
        stats = self.ex.stats()
        assert stats["free_pages"] == stats["total_pages"] == self.num_pages
        assert stats["promised_pages"] == 0
        assert stats["running"] == stats["waiting"] == 0
        assert stats["history_bytes"] == 0


def hash_engine(
    function: HashFunction,
    *,
    page_size: int = 16,
    num_pages: int | None = None,
    max_batch_size: int = 16,
    max_seq_len: int = 512,
    max_num_tokens: int = 512,
    make: Any = None,
    **options: Any,
) -> Any:
    """Returns an Engine (or `make`) over a HashModel; without `num_pages` every request fits."""
    if num_pages is None:
        num_pages = max_batch_size * -(-(max_seq_len + 128) // page_size)
    model = HashModel(function, num_pages, page_size)
    return (make or Engine)(
        model,
        model.k_pages,
        model.v_pages,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        **options,
    )


def poisoned_pages(model: Any, num_pages: int, page_size: int) -> tuple[torch.Tensor, ...]:
    """K and V pages of a model that hold NaN: all bits set, which in int8 pages is a scale of NaN
    behind numbers that are not 0."""
    shape = page_shape(model, num_pages, page_size)
    dtype = getattr(torch, str(stored_name(model)))
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return tuple(torch.full(size, -1, dtype=torch.int8).view(dtype) for _ in range(2))


def model_engine(
    model: Any,
    *,
    page_size: int = 16,
    max_batch_size: int,
    max_seq_len: int,
    max_num_tokens: int = 1024,
    **options: Any,
) -> Engine:
    """Returns an engine over a real step model, with its own pages, poisoned with NaN."""
    num_pages = max_batch_size * -(-(max_seq_len + 128) // page_size)
    k_pages, v_pages = poisoned_pages(model, num_pages, page_size)
    model.bind_cache(k_pages, v_pages)
    return Engine(
        model,
        k_pages,
        v_pages,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        **options,
    )

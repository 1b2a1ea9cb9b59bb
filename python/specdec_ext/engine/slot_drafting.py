"""Drafters of slots in steps that the host runs: between stage() and build(), and after a pass."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..drafters import DraftInputs, PromptInputs, SlotDrafter
from ..log import logger
from .staged_words import StagedWords

__all__ = ["SlotDrafting"]


class _Front:
    """The executor, with the drafter between its stage() and build()."""

    def __init__(self, drafting: SlotDrafting) -> None:
        self.plan, self.commit = drafting.plan, drafting.commit
        self._executor = drafting.executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class SlotDrafting:
    """Asks one drafter for the drafts of each step, over the executor's own slots.

    The loop calls plan() and commit() in place of the executor's (``front``). start() and end() may
    be called from any thread, the others from the stepping thread.

    executor     a _core.Executor whose steps the host runs
    hidden_size  size of the model's hidden states; one float32 row per slot is kept if the drafter
                 needs it
    """

    def __init__(
        self,
        drafter: SlotDrafter,
        executor: Any,
        *,
        hidden_size: int,
    ) -> None:
        self.drafter = drafter
        self.executor = executor
        self._slots = executor.host_slots
        self._staging = executor.host_staging
        self._layout = executor.staging_layout
        self._status = np.zeros(self._layout.requests, dtype=np.int32)  # written, never read
        # There are few places for staged steps, so views are reused while the batch stays the same.
        self._views = functools.lru_cache(maxsize=32)(self._make_views)
        self._read_prompts: Callable[[PromptInputs], None] | None = getattr(
            drafter, "read_prompts", None
        )
        self._after_commit: Callable[..., None] | None = getattr(drafter, "after_commit", None)
        self._prepare: Callable[[], None] | None = getattr(drafter, "prepare", None)
        self._draft_probs: Callable[[int], Any] | None = getattr(drafter, "draft_probs", None)
        self._draws_probs = self._draft_probs is not None
        self._one_by_one = bool(getattr(drafter, "drafts_one_by_one", False))
        self._hidden_size = hidden_size
        self._kept: np.ndarray | None = None
        if drafter.needs_hidden:
            self._kept = np.zeros((len(self._slots), hidden_size), dtype=np.float32)
        self._options: dict[int, Mapping[str, Any]] = {}
        self._planned: Any = None  # what stage() said of the step at hand
        self._drafted = False
        self._drafted_step = -1
        self._hidden: np.ndarray | None = None
        self._seconds = 0.0
        self._usual_s = 0.0  # of a step or of a draft, lately
        self._pass_s = 0.0  # of a draft model's pass, lately
        self._failures = 0
        # Called after the drafter's drafts, before build().
        self.before_build: Callable[[], None] | None = None
        self.front = _Front(self)

    # -- requests -----------------------------------------------------------------------------

    def start(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        submit_kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Called when a request that wants drafts was submitted."""
        self._options[request_id] = options

    def end(self, request_id: int) -> None:
        """Called when a request has ended; unknown ids are ignored."""
        self._options.pop(request_id, None)

    def propose(self) -> None:
        """Drafts are made when the step is planned."""

    def observe(self, outputs: Iterable[Any]) -> None:
        """What was accepted lies in the slots."""

    def drop_ended(self) -> None:
        """A slot that another request enters is told to the drafter then."""

    # -- a step -------------------------------------------------------------------------------

    def plan(self) -> Any:
        """The executor's next plan with the drafter's drafts in it, or None. Where it was
        interrupted, the same step again."""
        staged = self._planned = self.executor.stage()
        if staged is None:
            return None
        if staged.index != self._drafted_step:
            self._draft(staged)
            self._drafted_step = staged.index
        if self.before_build is not None:
            self.before_build()
        return self.executor.build()

    def _draft(self, staged: Any) -> None:
        for entry in staged.entries:
            self._guarded(self.drafter.enter, entry.slot, self._options.get(entry.request_id, {}))
        wanted = staged.most_asked > 0
        self._drafted = wanted
        if self._drafted:
            if self._prepare is not None:
                self._guarded(self._prepare)
                self._prepare = None
            begin = time.perf_counter()
            self._guarded(self.drafter.draft, self._inputs(staged))
            self._tell_cost(time.perf_counter() - begin, staged, wanted)

    def hidden_for(self, plan: Any) -> np.ndarray | None:
        """The buffer that the model fills in this step, if the drafter needs it."""
        self._hidden = None
        if self._kept is not None:
            self._hidden = np.empty((plan.num_logit_rows, self._hidden_size), dtype=np.float32)
        return self._hidden

    def commit(self, plan: Any, result: Any, **changes: Any) -> list[Any]:
        """As the executor's; prompts are read by the drafter too, and hidden states kept."""
        if self._read_prompts is not None and self._planned.num_prompts:
            self._guarded(self._read_prompts, self._prompts(self._planned))
        if self._draws_probs and self._drafted and plan.needs_logits:
            assert self._draft_probs is not None
            changes["draft_probs"] = self._draft_probs(self._planned.num_decodes)
        if self._hidden is not None:
            changes.update(hidden=self._hidden, kept=self._kept)
        outputs = list(self.executor.commit(plan, result, **changes))
        if self._after_commit is not None:
            prompts = self._prompts(self._planned) if self._planned.num_prompts else None
            layout = self.executor.slot_layout
            self._guarded(self._after_commit, plan, layout, self._slots, prompts)
        return outputs

    def stats(self) -> dict[str, Any]:
        return {
            "name": self.drafter.name,
            "seconds": self._seconds,
            "failures": self._failures,
            **self.drafter.stats(),
        }

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        """An exception of the drafter costs the step its drafts, nothing else."""
        try:
            call(*arguments)
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                logger.warning(
                    "the drafter %r raised %s: %s; this step runs without its drafts (further "
                    "failures are only counted, see get_metrics()['drafter'])",
                    self.drafter.name, type(error).__name__, error,
                    exc_info=error,
                )  # fmt: skip

    def _inputs(self, staged: Any) -> DraftInputs:
        return DraftInputs(
            layout=self.executor.slot_layout,
            slots=self._slots,
            samples=staged.needs_scores,
            hidden=self._kept,
            max_width=max(staged.most_asked, 1),
            max_kv_len=staged.max_kv_len,
            pass_price=self._pass_s * staged.second_worth,
            **self._views(staged.ring, staged.num_prompts, staged.num_decodes),
        )

    def _make_views(self, ring: int, first: int, count: int) -> dict[str, Any]:
        step = self._step(ring)
        layout = self._layout
        return {
            "slot_ids": step.part(layout.slot_ids + first, count),
            "max_drafts": step.part(layout.max_drafts + first, count),
            "page_table": step.page_table(first + count)[first:],
            "laws": step.laws(count, first),
            "status": self._status[:count],
        }

    def _step(self, ring: int) -> StagedWords:
        step = StagedWords(self._layout)
        step.words = self._staging[ring]
        return step

    def _prompts(self, staged: Any) -> PromptInputs:
        step, count = self._step(staged.ring), staged.num_prompts
        layout = self._layout
        return PromptInputs(
            tokens=step.part(layout.prompt_tokens, staged.num_prompt_rows),
            slot_ids=step.part(layout.slot_ids, count),
            kv_len=step.part(layout.kv_len, count),
            cu_rows=step.part(layout.cu_rows, count + 1),
            page_table=step.page_table(count),
            max_rows=staged.max_rows,
            max_kv_len=staged.max_kv_len,
        )

    def _tell_cost(self, seconds: float, staged: Any, wanted: bool) -> None:
        """The executor weighs drafts against what making them takes."""
        self._seconds += seconds
        if not wanted:
            return
        if self._one_by_one and (passes := getattr(self.drafter, "passes_made", 0)) > 0:
            self._pass_s = _lately(self._pass_s, seconds / passes)
        drafts = staged.most_asked if self._one_by_one else 1
        self._usual_s = _lately(self._usual_s, seconds / drafts)
        each = self._usual_s
        self.executor.set_draft_cost(*((0.0, each) if self._one_by_one else (each, 0.0)))


def _lately(old: float, new: float) -> float:
    """One step in which the machine did something else counts as twice what is usual."""
    return 0.9 * old + 0.1 * min(new, 2 * old) if old else new

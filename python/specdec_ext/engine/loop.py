"""The loop around the executor: submit -> plan -> forward -> commit -> text -> stop strings.

One object serves synchronous and asynchronous callers. Any thread may submit and cancel at any
time. A caller that needs progress calls step(); a lock lets one step run at a time. A step advances
all requests, whichever caller they belong to.

A forward pass that raises fails the requests of its step with that message, and no others.

Ctrl-C (anything that is not an Exception) may end step() anywhere; the next step() goes on there. A
plan that was not committed is planned again unchanged. The executor keeps what a step has delivered
until the next plan, and each request remembers the last output that it took, so nothing that other
callers wait for is lost. User code (processors, drafters, on_update) is guarded where it is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..errors import EngineError
from ..log import logger
from ..models.host_arrays import as_torch
from ..request.resolve import EngineLimits
from ..text.metrics import describe_budget
from .ledger import synthetic_acceptance
from .logits_processing import process_scores
from .memory_plan import MemoryPlan
from .request_state import RequestState
from .request_table import RequestTable
from .step_lock import close_at_exit

if TYPE_CHECKING:
    import torch

__all__ = ["EngineLoop"]


class EngineLoop(RequestTable):
    """Drives one executor and one model.

    executor       specdec_ext._core.Executor, or anything with its submit/plan/commit/fail/cancel/
                   stats
    model          a StepModel (models/base.py)
    calibrate      called once, before the first step of an adaptive request, to give the executor
                   T(rows, context). If it returns an object, that is told the time of every pass
                   from then on
    spares_others  prompts beside other requests are limited by T(rows), so T is needed for them too
    drafting       SlotDrafting or UserDrafting, if drafts are made in Python
    release_pages  gives the memory of unused pages back to the operating system
    """

    def __init__(
        self,
        executor: Any,
        model: Any,
        *,
        limits: EngineLimits,
        memory: MemoryPlan | None = None,
        tokenizer: Any = None,
        calibrate: Callable[[], object] | None = None,
        spares_others: bool = False,
        drafting: Any = None,
        release_pages: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(
            executor,
            model,
            limits,
            tokenizer=tokenizer,
            drafting=drafting,
            spares_others=spares_others,
        )
        self.memory = memory
        self.numerics: str = getattr(model, "numerics", "exact")
        self._calibrate = calibrate
        self._release_pages = release_pages
        self._stepping = False  # a step has begun and not all its outputs have been routed
        self._step_start = 0.0
        self._result: Any = None  # of that step's forward pass
        self._hidden: Any = None
        self._results: dict[int, Any] = {}  # scores of the steps in flight, if logits are wanted
        self._forward_s = self._step_s = 0.0
        self._served_cost: Any = None
        self._num_steps = 0
        close_at_exit(self)

    def step(self) -> bool:
        """Run one forward pass for all requests that are ready. False: none was."""
        self._steps.check("generate(), or another call that makes steps,")
        with self._steps.lock:
            self._require_open()
            resumed, self._stepping = self._stepping, True
            if resumed:  # the last step was interrupted
                self._recover()
                self._route(self.executor.outputs())
            self._cancel_dropped()
            self._calibrate_once()
            self._step_start = time.perf_counter()
            outputs = self._advance(resumed)
            if outputs is None:
                self._stepping = False
                return False
            self._route(outputs)
            self._after_step()
            self._stepping = False
            self._num_steps += 1
            self._step_s += time.perf_counter() - self._step_start
            return True

    def _recover(self) -> None:
        """Called after an interrupt, before the outputs of the interrupted step are fetched."""

    def _after_step(self) -> None:
        """Called when all outputs of a step have been routed."""

    def _advance(self, resumed: bool) -> list[Any] | None:
        """Run the next step, or the interrupted one; return its outputs. None: no request runs."""
        drafting = self._drafting
        if drafting is not None and not resumed:
            drafting.propose()
        self._grammars.force()
        try:
            plan = self._grammars.plan(drafting) if self._grammars else self.executor.plan()
        except EngineError as error:  # a rank is lost: no step can run
            self._stop_all(str(error))
            raise
        except Exception as error:  # out of memory: part of the step is planned
            self._stop_for(error)
            return None
        if plan is None:
            if not self.executor.in_flight:
                return None
            self._num_steps -= 1  # nothing runs
            return list(self.executor.deliver())
        self._hidden = drafting.hidden_for(plan) if drafting is not None else None
        begin = time.perf_counter()
        try:
            if self._hidden is None:
                self._result = self.model.forward(plan)
            else:
                self._result = self.model.forward(plan, self._hidden)
            seconds = time.perf_counter() - begin
            self._forward_s += seconds
            if self._served_cost is not None:
                self._served_cost.observe(plan, seconds)
            if self._wants_logits:  # where it is read later the model writes into the same memory
                late = self.executor.overlap_depth > 0
                result = as_torch(self._result)
                self._results[plan.step] = result.clone() if late else result
            outputs = self._commit(plan, self._result)
            return outputs
        except EngineError as error:  # a rank is lost: no step can run
            self._stop_all(str(error))
            raise
        except Exception as error:
            return self._fail_step(plan, error)

    def run(
        self, states: Iterable[RequestState], on_step: Callable[[], None] | None = None
    ) -> None:
        """Step until all of `states` have ended."""
        ended = self._num_ended
        pending = [s for s in states if not s.finished]
        if not pending and self._stepping:
            self.step()  # one that was cut short may have ended them without telling on_update
        while pending:
            if not self.step():
                # Nothing to run, yet they have not ended: do not wait for ever.
                for state in [s for s in pending if not s.finished]:
                    self._end(state, "error", "the executor has no step for this request")
                ended = -1
            if on_step is not None:
                on_step()
            if self._num_ended != ended:
                ended = self._num_ended
                while pending and pending[-1].finished:  # most end in the order they came in
                    pending.pop()

    def close(self) -> None:
        """Cancel running requests; later calls raise EngineError. May be called twice."""
        if self._steps.is_a_fork:
            return
        self._steps.check("close()")
        self.abandon()
        self._cancel_dropped()
        with self._steps.lock:
            if not self._closed and (text := describe_budget(self.executor.stats())):
                logger.info(text)
            self._closed = True
            self.abandon()  # requests that were submitted in the meantime
            self._cancel_dropped()
            if self._drafting is not None:
                self._drafting.drop_ended()
            if self._served_cost is not None:
                self._served_cost.close()

    def reset_prefix_cache(self) -> int:
        """Forget the published pages that no running request holds; return their number.

        If no request runs, the memory of all pages goes back to the operating system.
        """
        self._steps.check("reset_prefix_cache()")
        with self._steps.lock:
            dropped = int(self.executor.reset_prefix_cache())
            if self._release_pages is not None and not self.executor.stats().get("running", 0):
                self._release_pages()
            return dropped

    def get_metrics(self) -> dict[str, Any]:
        """Sums since the engine was made (docs/metrics.md)."""
        self._steps.refuse_in_fork()
        self._cancel_dropped()
        with self._lock:
            totals, finished = self._ledger.sums(self._states.values())
            prompt_tokens = self._prompt_tokens
        return {
            "numerics": self.numerics,
            "model_impl": getattr(self.model, "impl", "unknown"),
            "device": getattr(getattr(self.model, "info", None), "device", "cpu"),
            "prompt_tokens": prompt_tokens,
            "generation_tokens": totals.num_tokens,
            "num_forward_passes": self._num_steps,
            "request_success": finished,
            "speculative_decoding": totals.to_dict(),
            "prediction": totals.tokens_of("prediction"),
            "grammar": totals.tokens_of("grammar"),
            "draft_sources": totals.draft_sources,
            "synthetic_acceptance": synthetic_acceptance(self.limits),
            "time": {
                "step_s": self._step_s,
                "forward_s": self._forward_s,
                "host_overhead_s": self._step_s - self._forward_s,
            },
            "executor": dict(self.executor.stats()),
            "memory": self.memory.to_dict() if self.memory is not None else None,
            "drafter": self._drafting.stats() if self._drafting is not None else None,
        }

    def _commit(self, plan: Any, result: Any) -> list[Any]:
        grammars = self._grammars
        best = getattr(self.model, "best_ids", None) if plan.needs_logits else None
        asked = self._has_processors or grammars.undecided
        trees = self.executor.choice_trees() if asked else ()
        if grammars.undecided:
            grammars.mask(trees, result, drawn=False, best=best)
        trees = [tree for tree in trees if tree.processed]
        words: dict[str, Any] = {}
        if grammars.masks or grammars.errors:
            words = {"masks": grammars.masks, "errors": grammars.errors}
        if not trees:
            return list(self.executor.commit(plan, result, best=best, **words))
        scores, errors = self._process_trees(trees, result)
        words["errors"] = {**grammars.errors, **errors}
        return list(self.executor.commit(plan, scores, raw=result, **words))

    def _process_trees(
        self, trees: Iterable[Any], scores: Any
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """The step's scores after the callers' processors, and the errors of those that failed."""
        with self._lock:
            states = {t.request_id: self._states.get(t.request_id) for t in trees}
        processors = {rid: s.params.logits_processors or () for rid, s in states.items() if s}
        return process_scores(trees, scores, processors)

    def _calibrate_once(self) -> None:
        if self._calibrate is None or not self._wants_calibration:
            return
        try:
            self._served_cost = self._calibrate()
        except Exception as error:
            # Without the table drafts keep their configured length: slower at worst, never wrong.
            logger.warning("step-cost calibration failed (%s); draft lengths stay fixed", error)
        self._calibrate = None

    def _fail_step(self, plan: Any, error: Exception) -> list[Any]:
        message = f"forward pass failed: {type(error).__name__}: {error}"
        logger.error(message, exc_info=error)
        try:
            return list(self.executor.fail(plan, message))
        except Exception as broken:
            self._stop_all(f"the engine stopped: {broken} (after: {message}); make a new LLM")
            return []

    def _stop_for(self, error: Exception) -> None:
        message = f"the engine stopped: {type(error).__name__}: {error}; make a new LLM"
        logger.error(message, exc_info=error)
        self._stop_all(message)

    def _stop_all(self, message: str) -> None:
        """End all requests with an error: the executor itself cannot go on."""
        with self._lock:
            states = list(self._states.values())
            self._closed, self._why_closed = True, message
        for state in states:
            self._end(state, "error", message)

    def _route(self, outputs: Iterable[Any]) -> None:
        """Give each request what a step has delivered to it.

        After an interrupt it is called again with the same outputs; nothing is done twice.
        """
        now = time.perf_counter()
        for out in outputs:
            with self._lock:
                state = self._states.get(out.request_id)
                if state is None:
                    self.executor.cancel(out.request_id)  # no caller waits for it
                    continue
                logits = None
                if self._wants_logits and out.logit_rows:
                    logits = self._results[out.step][out.logit_rows].clone()
                ended = state.consume(out, self._step_start, now, logits)
                if ended:
                    self._account(state)
                    if out.finish_reason is None:  # a stop string: the executor does not know it
                        self.executor.cancel(state.rid)
            if state.on_update is not None:
                state.notify()
            if ended:
                with self._lock:
                    self._states.pop(state.rid, None)
                    self._ledger.fold(self._states)
            if self._results:
                for step in [step for step in self._results if step < out.step]:
                    del self._results[step]
        if self._drafting is not None:
            self._drafting.observe(outputs)
            self._drafting.drop_ended()

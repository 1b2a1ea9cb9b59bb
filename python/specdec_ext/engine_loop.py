"""The loop around the executor: submit -> plan -> forward -> commit -> text -> stop strings.

One object serves synchronous and asynchronous callers. Any thread may submit and cancel any time;
whoever needs progress calls step(), and a lock lets one step run at a time. A step advances every
request, whoever waits for it.

A forward pass that raises fails the requests of its step with that message and nobody else.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .acceptance import describe
from .detokenizer import DetokenizerFactory
from .drafter_config import DrafterConfig
from .errors import EngineError, RequestError
from .log import logger
from .logits_processing import process_scores
from .memory_plan import MemoryPlan
from .metrics import SpecCounter
from .request_check import EngineLimits, ResolvedRequest, resolve_request, stream_seed
from .request_state import RequestState
from .sampling_params import SamplingParams

__all__ = ["EngineLoop"]


def _external_probs(params: SamplingParams) -> Any:
    """What the request's own drafts were drawn from, float32 [drafts, vocabulary] on the CPU.

    None without logits, and for a greedy request: it compares tokens.
    """
    draft = params.external_draft
    if draft is None or draft.logits is None or params.greedy:
        return None
    import torch

    try:
        scores = torch.as_tensor(draft.logits).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"ExternalDraftTokensConfig.logits cannot be read as numbers ({error}); give a float "
            "tensor [number of drafts, vocabulary]"
        ) from None
    probs = scores.softmax(dim=-1)
    for i, row in enumerate(probs):
        if not bool(row.isfinite().all()):
            raise RequestError(
                f"ExternalDraftTokensConfig.logits[{i}] holds a NaN or +inf, or only -inf: its "
                "softmax is no distribution; give the draft model's finite scores"
            )
    return probs.float()


class EngineLoop:
    """Drives one executor and one model.

    executor   specdec_ext._core.Executor, or anything with its submit/plan/commit/fail/cancel/stats
    model      a StepModel (models/base.py)
    calibrate  called once, before the first step of an adaptive request, while no request runs: it
               measures the model's step cost and writes into KV pages
    drafting   a drafters.DraftSession, when drafts come from Python
    after_commit  called after each commit(): makes the K/V moves of an executor that defers them
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
        drafting: Any = None,
        after_commit: Callable[[], object] | None = None,
    ) -> None:
        self.executor = executor
        self.model = model
        self.limits = limits
        self.memory = memory
        self.tokenizer = tokenizer
        self.numerics: str = getattr(model, "numerics", "exact")
        self._detokenizers = DetokenizerFactory(tokenizer) if tokenizer is not None else None
        self._calibrate = calibrate
        self._drafting = drafting
        self._after_commit = after_commit
        self._step_lock = threading.Lock()
        self._lock = threading.Lock()  # guards what follows
        self._states: dict[int, RequestState] = {}
        self._ids = itertools.count()
        self._totals = SpecCounter(0, keep_steps=False)
        self._finished: dict[str, int] = {}
        self._prompt_tokens = 0
        self._closed = False
        self._wants_calibration = False
        self._forward_s = 0.0
        self._step_s = 0.0
        self._num_steps = 0

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise the RequestError that submit() would raise; do no work."""
        self._require_open()
        params = self._with_defaults(params)
        resolve_request(prompt_token_ids, params, self.limits, self.tokenizer)
        self._check_text_parameters(params)
        _external_probs(params)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        on_update: Callable[[RequestState], None] | None = None,
    ) -> RequestState:
        """Queue a request. `on_update` is called from the stepping thread after each change.

        Raises RequestError before anything is queued.
        """
        self._require_open()
        params = self._with_defaults(params)
        resolved = resolve_request(prompt_token_ids, params, self.limits, self.tokenizer)
        self._check_text_parameters(params)
        probs = _external_probs(params)
        if probs is not None:
            resolved.submit_kwargs["external_probs"] = probs
        detokenizer = None
        if self._detokenizers is not None and params.detokenize:
            detokenizer = self._detokenizers.make(params.skip_special_tokens)
        with self._lock:
            number = next(self._ids)
            if params.seed is None and not params.greedy:
                resolved.submit_kwargs["seed"] = stream_seed(self.limits.seed, number)
            state = RequestState(
                request_id=str(number),
                prompt=prompt,
                resolved=resolved,
                params=params,
                detokenizer=detokenizer,
                token_text=self._detokenizers.token_text if self._detokenizers else None,
                on_update=on_update,
                about=self._about(params, resolved),
            )
            try:
                state.rid = self.executor.submit(
                    resolved.prompt_token_ids, **resolved.submit_kwargs
                )
            except ValueError as error:  # a limit that only the executor knows
                raise RequestError(str(error)) from None
            self._states[state.rid] = state
            if self._drafting is not None and resolved.submit_kwargs["speculative"]:
                self._drafting.start(
                    state.rid,
                    resolved.prompt_token_ids,
                    resolved.submit_kwargs,
                    resolved.draft_options,
                )
            self._prompt_tokens += len(resolved.prompt_token_ids)
            adaptive = resolved.submit_kwargs.get("adaptive")
            config = self.limits.speculative_config
            if resolved.submit_kwargs["speculative"] and config is not None:
                self._wants_calibration |= config.adaptive if adaptive is None else adaptive
        return state

    def cancel(self, state: RequestState) -> bool:
        """End a request; False if it had already ended. What it delivered stays."""
        with self._lock:
            if self._states.pop(state.rid, None) is None:
                return False
            self.executor.cancel(state.rid)
            self._end(state, "cancelled")
        state.notify()
        return True

    def step(self) -> bool:
        """Run one forward pass for whoever is ready. False: there was nothing to run."""
        with self._step_lock:
            self._require_open()
            self._calibrate_once()
            start = time.perf_counter()
            if self._drafting is not None:
                self._drafting.propose()
            plan = self.executor.plan()
            if plan is None:
                return False
            hidden = self._drafting.hidden_for(plan) if self._drafting is not None else None
            interrupted: BaseException | None = None
            result: Any = None
            forward_begin = forward_end = time.perf_counter()
            try:
                if hidden is None:
                    result = self.model.forward(plan)
                else:
                    result = self.model.forward(plan, hidden)
                forward_end = time.perf_counter()
                outputs = self._commit(plan, result)
                if self._after_commit is not None:
                    self._after_commit()
                if self._drafting is not None:
                    self._drafting.observe(outputs, hidden)
            except BaseException as error:
                outputs = self._fail_step(plan, error)
                if not isinstance(error, Exception):
                    interrupted = error
            self._route(outputs, start, result)
            if self._drafting is not None:
                self._drafting.drop_ended()
            end = time.perf_counter()
            self._num_steps += 1
            self._forward_s += forward_end - forward_begin
            self._step_s += end - start
            if interrupted is not None:
                raise interrupted
            return True

    def run(
        self, states: Iterable[RequestState], on_step: Callable[[], None] | None = None
    ) -> None:
        """Step until all of `states` have ended."""
        pending = [s for s in states if not s.finished]
        while pending:
            if not self.step():
                # Nothing to run, yet they have not ended: do not wait for ever.
                for state in [s for s in pending if not s.finished]:
                    self._abandon(state, "the executor has no step for this request")
            if on_step is not None:
                on_step()
            pending = [s for s in pending if not s.finished]

    def close(self) -> None:
        """Cancel what runs; later calls raise EngineError. May be called twice."""
        with self._lock:
            states = list(self._states.values())
        for state in states:
            self.cancel(state)
        with self._step_lock:
            self._closed = True
            if self._drafting is not None:
                self._drafting.drop_ended()

    def reset_prefix_cache(self) -> int:
        """Forget the published pages that no running request holds; returns how many."""
        return int(self.executor.reset_prefix_cache())

    @property
    def num_unfinished(self) -> int:
        with self._lock:
            return len(self._states)

    def get_metrics(self) -> dict[str, Any]:
        """Sums since the engine was made (docs/metrics.md)."""
        with self._lock:
            # Requests that still run count too; their per-step lists stay theirs.
            totals = SpecCounter(self._totals.num_spec_tokens, keep_steps=False)
            totals.add(self._totals)
            for state in self._states.values():
                totals.add(state.counter)
            finished = dict(self._finished)
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
            "synthetic_acceptance": self._synthetic_acceptance(),
            "time": {
                "step_s": self._step_s,
                "forward_s": self._forward_s,
                "host_overhead_s": self._step_s - self._forward_s,
            },
            "executor": dict(self.executor.stats()),
            "memory": self.memory.to_dict() if self.memory is not None else None,
            "drafter": self._drafting.stats() if self._drafting is not None else None,
        }

    def _about(self, params: SamplingParams, resolved: ResolvedRequest) -> dict[str, Any]:
        """What the request's metrics say of how its text came about."""
        about: dict[str, Any] = {
            "numerics": self.numerics,
            "model_impl": getattr(self.model, "impl", "unknown"),
            "acceptance": describe(params.acceptance),
            "lossless": params.lossless,
        }
        synthetic = self._synthetic_acceptance()
        if synthetic is not None and resolved.submit_kwargs["speculative"]:
            about["acceptance"] = "synthetic (not the model's text)"
            about["lossless"] = False
            about["synthetic_acceptance"] = synthetic
        return about

    def _synthetic_acceptance(self) -> dict[str, Any] | None:
        config = self.limits.speculative_config
        return config.synthetic_acceptance if config is not None else None

    def _with_defaults(self, params: SamplingParams) -> SamplingParams:
        config = self.limits.speculative_config
        return config.with_defaults(params) if isinstance(config, DrafterConfig) else params

    def _commit(self, plan: Any, result: Any) -> list[Any]:
        with self._lock:
            processed = {r: s for r, s in self._states.items() if s.params.logits_processors}
        if not processed or not plan.needs_logits:  # none of them decides anything in this step
            return list(self.executor.commit(plan, result))
        scores, errors = process_scores(plan, result, processed)
        return list(self.executor.commit(plan, scores, raw=result, errors=errors))

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new LLM")

    def _check_text_parameters(self, params: SamplingParams) -> None:
        if self.tokenizer is None and params.stop:
            raise RequestError(
                f"SamplingParams.stop = {list(params.stop)!r}: stop strings need a tokenizer; use "
                "stop_token_ids, or give the LLM a tokenizer"
            )

    def _calibrate_once(self) -> None:
        if self._calibrate is None or not self._wants_calibration:
            return
        if self.executor.stats().get("running", 0):
            return  # it writes into pages: wait for a moment when none is in use
        calibrate, self._calibrate = self._calibrate, None
        begin = time.perf_counter()
        try:
            # What it overwrites may be published.
            self.executor.reset_prefix_cache()
            calibrate()
        except Exception as error:
            # Without the table drafts keep their configured length: slower at worst, never wrong.
            logger.warning("step-cost calibration failed (%s); draft lengths stay fixed", error)
        logger.info("step-cost calibration took %.2f s", time.perf_counter() - begin)

    def _fail_step(self, plan: Any, error: BaseException) -> list[Any]:
        message = f"forward pass failed: {type(error).__name__}: {error}"
        if isinstance(error, Exception):
            logger.error(message, exc_info=error)
        else:
            message = f"interrupted: {type(error).__name__}"
        try:
            return list(self.executor.fail(plan, message))
        except Exception as broken:
            self._stop_all(f"the engine stopped: {broken} (after: {message})")
            return []

    def _stop_all(self, message: str) -> None:
        """The executor itself cannot go on: nobody may wait for it."""
        with self._lock:
            states = list(self._states.values())
            self._closed = True
        for state in states:
            self._abandon(state, message)

    def _abandon(self, state: RequestState, message: str) -> None:
        with self._lock:
            if self._states.pop(state.rid, None) is None:
                return
            self.executor.cancel(state.rid)
            self._end(state, "error", error=message)
        state.notify()

    def _route(self, outputs: Iterable[Any], start: float, result: Any) -> None:
        """Give each request what the step delivered to it."""
        for out in outputs:
            with self._lock:
                state = self._states.get(out.request_id)
                if state is None:
                    continue
                if out.logit_rows:
                    # A copy: the model writes its next scores into the same memory.
                    state.add_logits(result[out.logit_rows].clone())
                cut_short = state.consume(out, start)
                if state.finished:
                    del self._states[out.request_id]
                    self._account(state)
                if cut_short:  # a stop string ended it, the executor does not know
                    self.executor.cancel(out.request_id)
            state.notify()

    def _end(self, state: RequestState, reason: str, error: str | None = None) -> None:
        state.end(reason, error=error)
        self._account(state)

    def _account(self, state: RequestState) -> None:
        if self._drafting is not None:
            self._drafting.end(state.rid)
        reason = state.finish_reason or "unknown"
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self._totals.add(state.counter)

"""The requests of an engine: which were submitted, which have ended, and which owner each has.

Any thread may submit and cancel at any time. Ctrl-C may strike between any two calls: nothing is
done twice, and no request is forgotten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..config.parse import is_adaptive
from ..errors import EngineError, RequestError
from ..extras import require
from ..request.resolve import EngineLimits, ResolvedRequest, resolve_request, stream_seed
from ..request.sampling_params import SamplingParams
from ..text.detokenizer import DetokenizerFactory
from ..text.grammar import GrammarCompiler
from .draft_sources import source_names
from .external_probs import draft_probs
from .grammar_masks import GrammarMasks
from .ledger import Ledger, how_decoded
from .request_state import OUTPUTS_AT_ONCE, Owner, RequestState
from .step_lock import StepLock
from .step_records import StepRecords

__all__ = ["RequestTable"]


class RequestTable:
    """Requests by the executor's ids, from submit() to their end. EngineLoop steps them.

    executor       specdec_ext._core.Executor, or anything with its submit and cancel
    model          a StepModel (models/base.py), for what results report about their decoding
    drafting       SlotDrafting or UserDrafting, if drafts are made in Python
    spares_others  prompts beside other requests need to know how long steps take
    """

    def __init__(
        self,
        executor: Any,
        model: Any,
        limits: EngineLimits,
        *,
        tokenizer: Any = None,
        drafting: Any = None,
        spares_others: bool = False,
    ) -> None:
        self.executor = executor
        self.model = model
        self.limits = limits
        self.tokenizer = tokenizer
        self._detokenizers = DetokenizerFactory(tokenizer) if tokenizer is not None else None
        self._sources = source_names(limits.speculative_config)
        self._compiler = GrammarCompiler(tokenizer, limits.vocab_size, limits.eos_token_ids)
        self._grammars = GrammarMasks(executor)
        self._drafting = drafting
        self._spares_others = spares_others
        self._steps = StepLock()
        self._dropped: deque[Owner | None] = deque()  # owners that are gone; None: all owners
        self._lock = threading.Lock()  # guards what follows
        self._states: dict[int, RequestState] = {}
        self._ids = itertools.count()
        self._ledger = Ledger()
        self._prompt_tokens = 0
        self._wants_logits = False  # a request does, or did
        self._has_processors = False  # a request does, or did
        self._closed = self._wants_calibration = False
        self._why_closed = "the engine is closed; make a new LLM"
        self._num_ended = 0

    def resolve(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> ResolvedRequest:
        """Check a request and prepare it for submit(). Raises RequestError; does no work."""
        self._require_open()
        for name in ("logits_processors", "return_generation_logits"):
            if getattr(params, name):
                require("torch", f"SamplingParams.{name}")
        resolved = resolve_request(prompt_token_ids, params, self.limits, self.tokenizer)
        probs = draft_probs(params.external_draft, params.greedy)
        if probs is not None:
            resolved.submit_kwargs["external_probs"] = probs
        if resolved.params.structured_outputs is None:
            return resolved
        grammar = self._compiler.compile(resolved.params.structured_outputs)
        return dataclasses.replace(resolved, grammar=grammar)

    def require_room(self, count: int, reserved: int = 0) -> None:
        """Raise QueueFullError unless `count` more requests may be submitted now.

        reserved  requests of others that are about to be submitted
        """
        self._require_open()
        self._cancel_dropped()
        self.limits.require_room(len(self._states) + reserved, count)

    @property
    def is_open(self) -> bool:
        """Whether requests may be submitted, if there is room for them."""
        return not self._closed

    def submit(
        self,
        request: ResolvedRequest,
        *,
        prompt: str | None = None,
        on_update: Callable[[RequestState], None] | None = None,
        owner: object | None = None,
        watched: bool = True,
    ) -> RequestState:
        """Queue a request.

        on_update  called from the stepping thread after each change; after an interrupt perhaps
                   twice
        owner      when this object is deleted, the request is cancelled
        watched    False: the caller does not read `version` or `has_news` after each step. Outputs
                   then reach the state several at a time, which costs less, or when a caller looks

        Raises RequestError before anything is queued.
        """
        self.require_room(1)
        params, kwargs = request.params, request.submit_kwargs
        detokenizer = None
        if self._detokenizers is not None and params.detokenize:
            detokenizer = self._detokenizers.make(params.skip_special_tokens)
        held = None
        if not (watched or on_update or _needs_each_output(params) or self._drafting):
            kwargs = {**kwargs, "outputs_at_once": OUTPUTS_AT_ONCE}
            held = self.executor.held
        with self._lock:
            # Check again under the lock: only now is the place taken.
            self._require_open()
            self.limits.require_room(len(self._states), 1)
            number = next(self._ids)
            if params.seed is None and not params.greedy:
                kwargs = {**kwargs, "seed": stream_seed(self.limits.seed, number)}
            state = RequestState(
                request_id=str(number),
                prompt=prompt,
                resolved=request,
                detokenizer=detokenizer,
                token_text=self._detokenizers.token_text if self._detokenizers else None,
                on_update=on_update,
                about=how_decoded(self.model, self.limits, request),
                sources=self._sources,
                owner=None if owner is None else Owner(owner, self._dropped.append),
                steps=StepRecords(self._sources) if params.return_steps else None,
                held=held,
            )
            if request.grammar is not None:
                kwargs = {**kwargs, "forced": request.grammar.beginning}
            # A step may plan it before submit() has returned: all that steps ask for is there then.
            state.rid = rid = int(self.executor.reserve())
            if state.owner is not None:
                state.owner.rid = rid
            try:
                self._prepare(state, request, kwargs)
                self.executor.submit(request.prompt_token_ids, **kwargs, id=rid)
            except BaseException as error:  # Ctrl-C too
                self._states.pop(rid, None)
                self._forget(rid)
                self.executor.cancel(rid)
                if isinstance(error, ValueError):  # a limit that only the executor knows
                    raise RequestError(str(error)) from None
                raise
            self._prompt_tokens += len(request.prompt_token_ids)
            adaptive = kwargs.get("adaptive")
            config = self.limits.speculative_config
            if kwargs["speculative"] or kwargs["prediction"]:
                self._wants_calibration |= is_adaptive(config) if adaptive is None else adaptive
            self._wants_calibration |= self._spares_others and len(self._states) > 1
        return state

    def _prepare(
        self, state: RequestState, request: ResolvedRequest, kwargs: dict[str, Any]
    ) -> None:
        """What a step needs to know of a request that it runs."""
        params = request.params
        self._states[state.rid] = state
        self._wants_logits |= params.return_generation_logits
        self._has_processors |= bool(params.logits_processors)
        if request.grammar is not None:
            self._grammars.start(state.rid, request.grammar, speculative=kwargs["speculative"])
        if self._drafting is not None and kwargs["speculative"]:
            options = request.draft_options
            self._drafting.start(state.rid, request.prompt_token_ids, kwargs, options)

    def _forget(self, rid: int) -> None:
        if self._drafting is not None:
            self._drafting.end(rid)
        self._grammars.end(rid)

    def cancel(self, state: RequestState) -> bool:
        """End a request; False if it had already ended. What it delivered stays."""
        return self._end(state, "cancelled")

    def abandon(self) -> None:
        """Cancel every request, soon. A destructor may call this: it takes no lock."""
        self._dropped.append(None)

    @property
    def num_unfinished(self) -> int:
        self._steps.refuse_in_fork()
        self._cancel_dropped()
        with self._lock:
            return sum(not state.finished for state in self._states.values())

    def _require_open(self) -> None:
        self._steps.refuse_in_fork()
        if self._closed:
            raise EngineError(self._why_closed)

    def _cancel_dropped(self) -> None:
        """Cancel the requests whose owners are gone. An owner leaves the list when that is done: an
        interrupt loses none, and threads that do it at once take out none that the others need."""
        for owner in [*self._dropped]:
            with self._lock:
                states = [*self._states.values()] if owner is None else []
                if owner is not None and owner.rid in self._states:
                    states.append(self._states[owner.rid])
            for state in states:
                self.cancel(state)
            with contextlib.suppress(ValueError):  # another thread has taken it out
                self._dropped.remove(owner)

    def _end(self, state: RequestState, reason: str, error: str | None = None) -> bool:
        """End a request from outside a step; False: it had ended."""
        if self._steps.is_a_fork:
            return False
        with self._lock:
            if state.rid not in self._states:
                return False
            had_ended = state.finished
            state.end(reason, error=error)  # which asks the executor what it holds of the request
            self.executor.cancel(state.rid)
            self._account(state)
            del self._states[state.rid]
        state.notify()
        return not had_ended

    def _account(self, state: RequestState) -> None:
        self._forget(state.rid)
        self._ledger.end(state)
        self._num_ended += 1


def _needs_each_output(params: SamplingParams) -> bool:
    """What a step delivers is looked at by itself: for its own scores, drafts or stop strings."""
    return bool(
        params.stop
        or params.return_steps
        or params.return_generation_logits
        or params.logprobs is not None
        or params.prompt_logprobs is not None
    )

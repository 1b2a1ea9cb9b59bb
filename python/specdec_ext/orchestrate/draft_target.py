"""Draft-target as an external loop: a small model writes, the target verifies, call by call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..config.limits import MAX_DRAFT_LEN
from ..config.validate import check_bool, check_float, check_int
from ..errors import ConfigError
from ..request.external_draft import ExternalDraftTokensConfig
from ..request.resolve import stream_seed
from ..request.sampling_params import SamplingParams
from .loop import ExternalLoop, Proposer, Running, require_reuse

if TYPE_CHECKING:
    from ..text.outputs import RequestOutput
    from .generator import Generator

__all__ = ["draft_target", "stream_draft_target"]

# The draft's draws must not be the target's own numbers when one is accepted by the other.
_DRAFT_STREAM = 0x6472616674


class _Drafts(Proposer):
    """Asks the draft model for all requests in one call of generate."""

    def __init__(
        self,
        draft: Generator,
        num_draft_tokens: int,
        use_draft_logits: bool,
        threshold: float | None,
    ) -> None:
        self._draft = draft
        self._count = num_draft_tokens
        self._logits = use_draft_logits
        self._threshold = threshold
        self._max_len = draft.engine.limits.max_seq_len

    def propose(self, running: Sequence[Running]) -> list[ExternalDraftTokensConfig | None]:
        counts = [min(self._count, r.room, self._max_len - len(r.text)) for r in running]
        asked = [(r, n) for r, n in zip(running, counts, strict=True) if n > 0]
        if not asked:
            return [None] * len(running)
        outputs = iter(
            self._draft.generate(
                [{"prompt_token_ids": r.text} for r, _ in asked],
                [self._params(r, n) for r, n in asked],
                use_tqdm=False,
            )
        )
        return [
            self._config(next(outputs), r) if n > 0 else None
            for r, n in zip(running, counts, strict=True)
        ]

    def rule(self, params: SamplingParams) -> str:
        if params.greedy or not self._logits:
            return "exact_match"
        return "rejection" if self._threshold is None else "threshold"

    def _params(self, request: Running, count: int) -> SamplingParams:
        """The draft may not stop: it always writes `count` tokens."""
        params = dataclasses.replace(
            request.call(None), max_tokens=count, min_tokens=0, logprobs=None, ignore_eos=True,
            stop_token_ids=None, return_generation_logits=False,
        )  # fmt: skip
        if params.greedy:
            return params
        if not self._logits:
            # Same law, same seed, same position: the same number decides on both sides, which makes
            # equal tokens likely. The target's own draw is compared, so nothing is biased.
            return params
        # q must be the law that the token came from: softmax(logits / temperature).
        assert params.seed is not None
        return dataclasses.replace(
            params, seed=stream_seed(params.seed, _DRAFT_STREAM), top_k=0, top_p=1.0, min_p=0.0,
            repetition_penalty=1.0, logit_bias=None, bad_words=None, allowed_token_ids=None,
            logits_processors=None, return_generation_logits=True,
        )  # fmt: skip

    def _config(self, output: RequestOutput, request: Running) -> ExternalDraftTokensConfig | None:
        one = output.outputs[0]
        if one.error is not None or not one.token_ids:
            return None  # the target continues alone
        logits = one.generation_logits
        if logits is not None:
            logits = logits / request.params.temperature
        return ExternalDraftTokensConfig(
            one.token_ids, logits, self._threshold if logits is not None else None
        )


def _check_vocabularies(target: Generator, draft: Generator) -> None:
    """Equal ids must mean equal tokens. Compared by content where both have a tokenizer."""
    sizes = (target.model.vocab_size, draft.model.vocab_size)
    words = f"draft model with {sizes[1]} token ids for a target with {sizes[0]}"
    if target.tokenizer is not None and draft.tokenizer is not None:
        theirs = {i: token for token, i in draft.tokenizer.get_vocab().items()}
        ours = {i: token for token, i in target.tokenizer.get_vocab().items()}
        for i in sorted(set(ours) | set(theirs)):
            if ours.get(i) != theirs.get(i):
                raise ConfigError(
                    f"{words}: token {i} is {ours.get(i)!r} in the target's tokenizer and "
                    f"{theirs.get(i)!r} in the draft's; use a draft with the target's vocabulary"
                )
    if sizes[0] != sizes[1]:
        raise ConfigError(f"{words}: use a draft with the target's vocabulary")


def _loop(
    target: Generator,
    draft: Generator,
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    num_draft_tokens: int,
    use_draft_logits: bool,
    acceptance_threshold: float | None,
) -> ExternalLoop:
    count = check_int("num_draft_tokens", num_draft_tokens, ConfigError, low=1, high=MAX_DRAFT_LEN)
    logits = check_bool("use_draft_logits", use_draft_logits, ConfigError)
    if acceptance_threshold is not None:
        check_float("acceptance_threshold", acceptance_threshold, ConfigError, above=0.0, high=1.0)
        if not logits:
            raise ConfigError(
                f"acceptance_threshold = {acceptance_threshold} without use_draft_logits: it is "
                "compared with p / q; set use_draft_logits=True or leave it out"
            )
    if target is draft:
        raise ConfigError("target and draft are the same LLM object; load the draft on its own")
    require_reuse(draft)
    _check_vocabularies(target, draft)
    proposer = _Drafts(draft, count, logits, acceptance_threshold)
    return ExternalLoop(target, prompts, sampling_params, proposer)


def draft_target(
    target: Generator,
    draft: Generator,
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    num_draft_tokens: int = 4,
    use_draft_logits: bool = False,
    acceptance_threshold: float | None = None,
) -> list[RequestOutput]:
    """Decode prompts together; `draft` writes num_draft_tokens per iteration, `target` verifies.

    target, draft         both need kv_cache_config.enable_block_reuse, and one vocabulary
    prompts, sampling_params
                          as for LLM.generate; no `n`, presence or frequency penalty
    use_draft_logits      sampled requests: keep drafts by p / q, with the draft's scores, instead
                          of comparing tokens. Both are lossless. Greedy requests compare tokens
    acceptance_threshold  in (0, 1]: keep a draft if p / q is at least this. LOSSY

    Raises ConfigError, RequestError before any work.
    """
    return _loop(
        target, draft, prompts, sampling_params, num_draft_tokens, use_draft_logits,
        acceptance_threshold,
    ).run()  # fmt: skip


def stream_draft_target(
    target: Generator,
    draft: Generator,
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    num_draft_tokens: int = 4,
    use_draft_logits: bool = False,
    acceptance_threshold: float | None = None,
    streaming_interval: int = 1,
) -> Iterator[list[RequestOutput]]:
    """As draft_target(); yields the outputs of all prompts every `streaming_interval` iterations.

    Their delta fields hold what is new. Raises at the call, before any work.
    """
    interval = check_int("streaming_interval", streaming_interval, ConfigError, low=1)
    loop = _loop(
        target, draft, prompts, sampling_params, num_draft_tokens, use_draft_logits,
        acceptance_threshold,
    )  # fmt: skip
    return loop.stream(interval)

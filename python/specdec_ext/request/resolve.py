"""Hold one request against the engine: vocabulary, lengths, triples. Before any work is done.

Every check that needs the model or the engine's configuration is here; SamplingParams has made the
others. The result is the keyword arguments of Executor.submit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.engine import SchedulerConfig, pages_for
from ..config.limits import MAX_KNOWN_DRAFTS, MAX_WEIGHED_DRAFTS
from ..config.lookahead import max_draft_len
from ..config.parse import SpeculativeConfig
from ..config.validate import check_int, show
from ..errors import CapacityError, QueueFullError, RequestError
from .longer_texts import how_to_fit
from .prediction import prediction_ids
from .sampling_params import SamplingParams
from .speculation import resolve_speculation, with_defaults

__all__ = [
    "EngineLimits",
    "ResolvedRequest",
    "check_prompt_len",
    "resolve_request",
    "stream_seed",
]

_MASK_64 = 2**64 - 1


@dataclass(frozen=True)
class EngineLimits:
    """The limits that a request is checked against."""

    vocab_size: int
    max_seq_len: int
    eos_token_ids: tuple[int, ...]
    speculative_config: SpeculativeConfig | None
    num_pages: int
    tokens_per_block: int
    seed: int = 0
    max_queued_requests: int = SchedulerConfig.max_queued_requests
    max_input_len: int | None = None
    # Pages that a prompt's text takes at once in steps of so many rows; None: no window.
    pages_in_window: Callable[[int, int], int] | None = None
    # Positions of the model, which max_seq_len cannot exceed; None: they are not known.
    max_position: int | None = None

    def require_room(self, held: int, count: int) -> None:
        """Raise QueueFullError unless `count` requests may join the `held` unfinished ones."""
        most = self.max_queued_requests
        if held + count > most:
            raise QueueFullError(
                f"{count} more requests with {held} unfinished exceed "
                f"SchedulerConfig.max_queued_requests = {most}; wait until some have ended, send "
                "fewer at once, or raise it"
            )


@dataclass(frozen=True)
class ResolvedRequest:
    """A valid request: its tokens, Executor.submit's keywords, and the deepest path of a step.

    params         as given, with the defaults of the engine's method
    draft_options  what the request asks of a drafter in Python (speculation.py)
    grammar        the compiled form of the output (text/grammar.py); None: any text
    """

    params: SamplingParams
    prompt_token_ids: list[int]
    submit_kwargs: dict[str, Any]
    num_spec_tokens: int
    max_tokens: int
    draft_options: Mapping[str, Any] = field(default_factory=dict)
    grammar: Any = None

    def output(self, index: int) -> ResolvedRequest:
        """The request for output `index` of several: 0 is what one alone would be; others of a
        seeded request draw from the stream (seed, index), and bring no logprobs of the prompt."""
        if index == 0:
            return self
        changes: dict[str, Any] = {"prompt_logprobs": None}
        if self.params.seed is not None:
            changes["seed"] = stream_seed(self.params.seed, index)
        return dataclasses.replace(
            self,
            params=dataclasses.replace(self.params, **changes),
            submit_kwargs={**self.submit_kwargs, **changes},
        )


def stream_seed(seed: int, stream: int) -> int:
    """Seed of an independent random stream (splitmix64; Steele, Lea, Flood, OOPSLA 2014)."""
    z = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def _check_ids(name: str, ids: Iterable[object], vocab_size: int) -> list[int]:
    return [
        check_int(f"{name}[{i}]", token, RequestError, low=0, high=vocab_size - 1,
                  remedy=f"the model's vocabulary has {vocab_size} tokens")
        for i, token in enumerate(ids)
    ]  # fmt: skip


def _prompt_ids(prompt_token_ids: Sequence[int], vocab_size: int) -> list[int]:
    ids = list(prompt_token_ids)
    # One pass in C for the usual list of plain ints; the slow path words the refusal.
    if not all(type(t) is int for t in ids) or (ids and not 0 <= min(ids) <= max(ids) < vocab_size):
        ids = _check_ids("prompt_token_ids", ids, vocab_size)
    return ids


def _bad_words(params: SamplingParams, tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """Id sequences of the forbidden words; a string is forbidden with and without leading space."""
    sequences: list[list[int]] = []
    for i, word in enumerate(params.bad_words or ()):
        name = f"SamplingParams.bad_words[{i}]"
        if not isinstance(word, str):
            sequences.append(_check_ids(name, word, vocab_size))
            continue
        if tokenizer is None:
            raise RequestError(
                f"{name} = {show(word)}: a string needs a tokenizer; pass token ids or load the "
                "model with its tokenizer"
            )
        for text in dict.fromkeys((word, word.lstrip(), " " + word.lstrip())):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in sequences:
                sequences.append(_check_ids(name, ids, vocab_size))
    return sequences


def _acceptance(params: SamplingParams) -> dict[str, Any]:
    """submit's keywords about acceptance; its own defaults where the rule has no such parameter."""
    kwargs = {
        "posterior_threshold": params.posterior_threshold,
        "posterior_alpha": params.posterior_alpha,
        "acceptance_threshold": params.acceptance_threshold,
    }
    return {
        "acceptance": params.acceptance,
        **{name: value for name, value in kwargs.items() if value is not None},
    }


def _check_capacity(
    prompt_len: int, max_tokens: int, spec: dict[str, Any], limits: EngineLimits
) -> None:
    """Refuse a request whose worst case is larger than the whole page pool.

    The last step starts with all but one token in the cache and adds that token and its drafts.
    """
    drafts = 0
    if spec["speculative"]:
        drafts = max_draft_len(*spec["lookahead"]) if "lookahead" in spec else spec["max_draft_len"]
        drafts += spec.get("suffix_draft_len", 0)
    pages = pages_for(prompt_len + max_tokens + drafts, limits.tokens_per_block)
    if limits.pages_in_window is not None:
        pages = min(pages, limits.pages_in_window(prompt_len, 1 + max(drafts, MAX_KNOWN_DRAFTS)))
    if pages > limits.num_pages:
        raise CapacityError(
            f"request of {prompt_len} prompt tokens + max_tokens = {max_tokens} + {drafts} drafts "
            f"needs {pages} KV pages of {limits.tokens_per_block} tokens, the whole pool has "
            f"{limits.num_pages}; lower max_tokens or raise KvCacheConfig.max_tokens"
        )


def _check_form(tokenizer: Any, limits: EngineLimits) -> None:
    """Refuse a form of the output where this engine cannot hold it."""
    if tokenizer is None:
        raise RequestError(
            "SamplingParams.structured_outputs: a form of text needs a tokenizer; load the model "
            "with its tokenizer"
        )
    config = limits.speculative_config
    if config is not None and config.synthetic_rates:
        raise RequestError(
            "SamplingParams.structured_outputs: this engine keeps drafts at synthetic rates and "
            "holds them against nothing; build the LLM without synthetic_acceptance_length and "
            "synthetic_acceptance_rates"
        )


def check_prompt_len(count: int, max_seq_len: int, max_position: int | None = None) -> None:
    """CapacityError unless a prompt of `count` tokens leaves room for one more."""
    if count >= max_seq_len:
        raise CapacityError(
            f"prompt has {count} tokens, max_seq_len = {max_seq_len} leaves no room for an output "
            f"token; shorten the prompt to {max_seq_len - 1} tokens"
            + how_to_fit(max_seq_len, max_position)
        )


def resolve_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    limits: EngineLimits,
    tokenizer: Any = None,
) -> ResolvedRequest:
    """The request in the executor's terms, with the defaults of the engine's method.

    Raises RequestError (CapacityError when no engine of this size could run it) naming the field,
    the value, the limit and the remedy.
    """
    params = with_defaults(params, limits.speculative_config)
    if tokenizer is None and params.stop:
        raise RequestError(
            f"SamplingParams.stop = {list(params.stop)!r}: stop strings need a tokenizer; use "
            "stop_token_ids, or give the LLM a tokenizer"
        )
    vocab = limits.vocab_size
    # Before anything is copied.
    check_prompt_len(len(prompt_token_ids), limits.max_seq_len, limits.max_position)
    if limits.max_input_len is not None and len(prompt_token_ids) > limits.max_input_len:
        raise CapacityError(
            f"prompt has {len(prompt_token_ids)} tokens, SchedulerConfig.max_input_len = "
            f"{limits.max_input_len}; shorten the prompt, or build the engine with more"
        )
    prompt = _prompt_ids(prompt_token_ids, vocab)
    if not prompt:
        raise RequestError(
            "prompt is empty: there is no token to continue; give at least one token "
            "(for example the model's begin-of-text token)"
        )
    room = limits.max_seq_len - len(prompt)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise CapacityError(
            f"SamplingParams.max_tokens = {max_tokens} with a prompt of {len(prompt)} tokens "
            f"exceeds max_seq_len = {limits.max_seq_len}; use max_tokens <= {room}, or None for as "
            "many as fit"
        )
    if params.min_tokens > max_tokens:
        raise RequestError(
            f"SamplingParams.min_tokens = {params.min_tokens} is greater than the {max_tokens} "
            f"tokens that fit max_seq_len = {limits.max_seq_len}; lower min_tokens"
        )
    allowed = params.allowed_token_ids
    spec_kwargs, depth, draft_options = resolve_speculation(params, limits.speculative_config)
    external = params.external_draft
    if external is not None:
        external.check_vocabulary(vocab)
        depth = max(depth, len(external.tokens))
    prediction: list[int] = []
    if params.prediction is not None:
        prediction = prediction_ids(
            params.prediction, prompt, tokenizer, vocab, limits.max_seq_len, limits.max_position
        )
    forces = params.structured_outputs is not None and spec_kwargs["speculative"]
    depth = max(depth, MAX_KNOWN_DRAFTS if forces else 0, min(len(prediction), MAX_WEIGHED_DRAFTS))
    if params.structured_outputs is not None:
        _check_form(tokenizer, limits)
    _check_capacity(len(prompt), max_tokens, spec_kwargs, limits)
    for token in params.logit_bias or ():
        check_int("SamplingParams.logit_bias key", token, RequestError, low=0, high=vocab - 1,
                  remedy=f"the model's vocabulary has {vocab} tokens")  # fmt: skip
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab:
            raise RequestError(
                f"SamplingParams.{name} = {getattr(params, name)} is greater than the vocabulary "
                f"of {vocab} tokens; lower it"
            )
    kwargs: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": params.min_tokens,
        "eos_token_ids": list(limits.eos_token_ids),
        "stop_token_ids": _check_ids(
            "SamplingParams.stop_token_ids", params.stop_token_ids or (), vocab
        ),
        "ignore_eos": params.ignore_eos,
        "seed": (limits.seed if params.seed is None else params.seed) & _MASK_64,
        "temperature": 0.0 if params.greedy else params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        **_acceptance(params),
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": dict(params.logit_bias or {}),
        "bad_words": _bad_words(params, tokenizer, vocab),
        "allowed_token_ids": None
        if allowed is None
        else _check_ids("SamplingParams.allowed_token_ids", allowed, vocab),
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "processes_scores": bool(params.logits_processors),
        "cache_salt": params.cache_salt,
        "priority": params.priority,
        "return_logits": params.return_generation_logits,
        "return_drafts": params.return_steps,
        "external_drafts": [] if external is None else list(external.tokens),
        "prediction": prediction,
        "grammar": params.structured_outputs is not None,
        "end_after_drafts": external is not None and not external.continue_decoding,
        **spec_kwargs,
    }
    count = len(kwargs["stop_token_ids"])
    count += 0 if kwargs["ignore_eos"] else len(kwargs["eos_token_ids"])
    if count > _MAX_STOP_IDS:
        raise RequestError(
            f"SamplingParams.stop_token_ids: {count} end and stop ids together, at most "
            f"{_MAX_STOP_IDS} fit; give fewer stop_token_ids"
        )
    return ResolvedRequest(params, prompt, kwargs, depth, max_tokens, draft_options)


# End and stop ids of a request (cpp/algo/slot.h), stated here so that no core is needed to refuse.
_MAX_STOP_IDS = 256

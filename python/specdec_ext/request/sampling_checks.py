"""The checks of SamplingParams: ranges, forms, and what does not go together.

Each takes the parameters and returns the fields to write back in their normal form. They run in the
order of CHECKS, each on what the ones before it have written. All raise RequestError
(UnsupportedRequestError) naming field, value, limit and remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..config.acceptance import check_acceptance
from ..config.validate import check_bool, check_float, check_int, check_str, show
from ..errors import RequestError
from .external_draft import ExternalDraftTokensConfig
from .prediction import check_prediction
from .sampling_fields import SamplingFields
from .sampling_lists import (
    MAX_BAD_WORDS,
    MAX_ID_LIST,
    MAX_STOP_CHARS,
    MAX_TOKEN_ID,
    check_bad_words,
    check_ids,
    check_logit_bias,
    check_processors,
)
from .speculative_config import check_speculative_config
from .structured_outputs import check_structured_outputs

__all__ = ["CHECKS", "MAX_LOGPROBS"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_OUTPUTS = 128
WHERE = "SamplingParams."

Fields = dict[str, Any]


def _law(p: SamplingFields) -> Fields:
    def number(name: str, remedy: str, **bounds: float) -> float:
        return check_float(WHERE + name, getattr(p, name), RequestError, remedy=remedy, **bounds)

    return {
        "temperature": number("temperature", "0.0 is greedy", low=0.0),
        "top_p": number("top_p", "1.0 is off", above=0.0, high=1.0),
        "min_p": number("min_p", "0.0 is off", low=0.0, high=1.0),
        # -1 switches top-k off in vLLM and transformers.
        "top_k": max(
            0,
            check_int(
                WHERE + "top_k", p.top_k, RequestError,
                low=-1, high=MAX_TOKEN_ID, remedy="0 or -1 is off",
            ),
        ),
        "n": check_int(WHERE + "n", p.n, RequestError, low=1, high=MAX_OUTPUTS),
    }  # fmt: skip


def _outputs(p: SamplingFields) -> Fields:
    if p.n > 1 and p.greedy:
        raise RequestError(
            f"{WHERE}n = {p.n} with greedy decoding: the outputs would be equal; "
            "set temperature > 0 or n = 1"
        )
    return {}


def _lengths(p: SamplingFields) -> Fields:
    result: Fields = {}
    if p.max_tokens is not None:
        result["max_tokens"] = check_int(
            WHERE + "max_tokens", p.max_tokens, RequestError,
            low=1, high=MAX_TOKEN_ID, remedy="ask for at least one token",
        )  # fmt: skip
    result["min_tokens"] = check_int(
        WHERE + "min_tokens", p.min_tokens, RequestError, low=0, high=MAX_TOKEN_ID
    )
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise RequestError(
            f"{WHERE}min_tokens = {p.min_tokens} is greater than max_tokens = "
            f"{p.max_tokens}; lower min_tokens or raise max_tokens"
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(p, name)) is not None:
            result[name] = check_int(WHERE + name, count, RequestError, low=0, high=MAX_LOGPROBS)
    if p.seed is not None:
        result["seed"] = check_int(
            WHERE + "seed", p.seed, RequestError, low=-(2**63), high=2**64 - 1
        )
    return result


def _stops(p: SamplingFields) -> Fields:
    for name in (
        "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize",
        "return_generation_logits", "return_steps",
    ):  # fmt: skip
        check_bool(WHERE + name, getattr(p, name), RequestError)
    raw = p.stop
    strings = [] if raw is None else [raw] if isinstance(raw, str) else raw
    if not isinstance(strings, (list, tuple)):
        raise RequestError(
            f"{WHERE}stop = {show(raw)}: expected a string or a list of strings, "
            f"got {type(raw).__name__}; pass for example ['\\n\\n']"
        )
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(
            f"{WHERE}stop has {len(strings)} strings, limit {MAX_STOP_STRINGS}; shorten the list"
        )
    for i, text in enumerate(strings):
        if check_str(f"{WHERE}stop[{i}]", text, RequestError, max_len=MAX_STOP_CHARS) == "":
            raise RequestError(
                f"{WHERE}stop[{i}] is empty: it would stop every request at once; remove it"
            )
    if strings and not p.detokenize:
        raise RequestError(
            f"{WHERE}stop = {show(raw)} with detokenize = False: stop strings are "
            "searched in the text; set detokenize = True or use stop_token_ids"
        )
    stop_ids = () if p.stop_token_ids is None else p.stop_token_ids
    return {
        "stop": tuple(strings),
        "stop_token_ids": tuple(check_ids("stop_token_ids", stop_ids, max_count=MAX_BAD_WORDS)),
    }


def _scores(p: SamplingFields) -> Fields:
    result: Fields = {
        "repetition_penalty": check_float(
            WHERE + "repetition_penalty", p.repetition_penalty, RequestError,
            above=0.0, high=100.0, remedy="1.0 is off",
        ),
        "bad_words": check_bad_words(p.bad_words),
        "logit_bias": check_logit_bias(p.logit_bias),
        "logits_processors": check_processors(p.logits_processors),
    }  # fmt: skip
    for name in ("presence_penalty", "frequency_penalty"):
        result[name] = check_float(
            WHERE + name, getattr(p, name), RequestError, low=-2.0, high=2.0, remedy="0.0 is off"
        )
    if p.allowed_token_ids is not None:
        ids = check_ids("allowed_token_ids", p.allowed_token_ids, max_count=MAX_ID_LIST)
        if not ids:
            raise RequestError(
                f"{WHERE}allowed_token_ids is empty: no token could follow; "
                "name at least one id or leave it None"
            )
        result["allowed_token_ids"] = tuple(sorted(set(ids)))
    return result


def _speculation(p: SamplingFields) -> Fields:
    check_str(WHERE + "cache_salt", p.cache_salt, RequestError, max_len=256)
    priority = check_int(
        WHERE + "priority", p.priority, RequestError, low=-(2**31), high=2**31 - 1,
        remedy="smaller is more urgent",
    )  # fmt: skip
    return {
        "priority": priority,
        "speculative_config": check_speculative_config(p.speculative_config),
    }


def _external_draft(p: SamplingFields) -> Fields:
    draft: Any = p.external_draft
    if isinstance(draft, Mapping):
        try:
            draft = ExternalDraftTokensConfig(**draft)
        except TypeError as error:
            raise RequestError(f"{WHERE}external_draft: {error}") from None
    if not isinstance(draft, ExternalDraftTokensConfig | None):
        raise RequestError(
            f"{WHERE}external_draft = {show(draft)}: expected an "
            f"ExternalDraftTokensConfig, got {type(draft).__name__}"
        )
    return {"external_draft": draft}


def _prediction(p: SamplingFields) -> Fields:
    prediction = check_prediction(p.prediction)
    if prediction is not None and p.external_draft is not None:
        raise RequestError(
            f"{WHERE}prediction and external_draft are both set: both are the text after the "
            "prompt; give one of them"
        )
    if prediction is not None and p.speculative_config is False:
        raise RequestError(
            f"{WHERE}prediction with speculative_config = False: drafts are taken from a "
            "prediction; remove one of them"
        )
    return {"prediction": prediction}


def _structured_outputs(p: SamplingFields) -> Fields:
    constraint = check_structured_outputs(p.structured_outputs)
    if constraint is not None and p.ignore_eos:
        raise RequestError(
            f"{WHERE}ignore_eos = True with structured_outputs: a text that has its form ends with "
            "the model's end token; remove one of them"
        )
    return {"structured_outputs": constraint}


def _external_rule(p: SamplingFields) -> Fields:
    """Drafts that come with logits are accepted by them."""
    draft = p.external_draft
    if draft is None or draft.logits is None:
        return {}
    threshold = draft.acceptance_threshold
    if threshold is None:
        return {"acceptance": "rejection"} if p.acceptance == "exact_match" else {}
    if p.acceptance in ("exact_match", "threshold") and (
        p.acceptance_threshold is None or p.acceptance_threshold == threshold
    ):
        return {"acceptance": "threshold", "acceptance_threshold": threshold}
    raise RequestError(
        f"ExternalDraftTokensConfig.acceptance_threshold = {threshold} but "
        f"{WHERE}acceptance = {p.acceptance!r}, acceptance_threshold = "
        f"{p.acceptance_threshold}; give the rule in one place"
    )


def _acceptance(p: SamplingFields) -> Fields:
    return check_acceptance(
        p.acceptance, p.posterior_threshold, p.posterior_alpha, p.acceptance_threshold
    )


CHECKS: tuple[Callable[[SamplingFields], Fields], ...] = (
    _law, _outputs, _lengths, _stops, _scores, _speculation, _external_draft,
    _prediction, _structured_outputs, _external_rule, _acceptance,
)  # fmt: skip

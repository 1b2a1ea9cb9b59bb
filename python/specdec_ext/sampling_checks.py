"""The checks of SamplingParams: ranges, forms, and what does not go together.

Each takes the parameters and returns the fields to write back in their normal form. They run in the
order of CHECKS, each on what the ones before it have written. All raise RequestError
(UnsupportedRequestError) naming field, value, limit and remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .acceptance import check_acceptance
from .config import MAX_DRAFT_LEN
from .config_parse import parse_speculative_config
from .drafter_config.medusa_choices import parse_choices
from .errors import RequestError, UnsupportedRequestError
from .external_draft import ExternalDraftTokensConfig
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
from .validate import check_bool, check_float, check_int, check_str, show

if TYPE_CHECKING:
    from .sampling_params import SamplingParams

__all__ = ["CHECKS", "MAX_LOGPROBS"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_OUTPUTS = 128
WHERE = "SamplingParams."

Fields = dict[str, Any]


def _supported(p: SamplingParams) -> Fields:
    def refuse(name: str, why: str, remedy: str) -> UnsupportedRequestError:
        return UnsupportedRequestError(f"{WHERE}{name} = {show(getattr(p, name))}: {why}; {remedy}")

    for name, why in (
        ("best_of", "outputs are not ranked; ask for n outputs and choose among them"),
        ("beam_width", "beam search is never combined with speculation and is not supported"),
    ):
        value = getattr(p, name)
        if value is not None and check_int(WHERE + name, value, RequestError, low=1) != 1:
            raise refuse(name, why, f"use {name} = 1")
    if p.structured_outputs is not None:
        raise refuse("structured_outputs", "not supported in this version", "leave it None")
    return {}


def _law(p: SamplingParams) -> Fields:
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


def _outputs(p: SamplingParams) -> Fields:
    if p.n > 1 and p.greedy:
        raise RequestError(
            f"{WHERE}n = {p.n} with greedy decoding: the outputs would be equal; "
            "set temperature > 0 or n = 1"
        )
    return {}


def _lengths(p: SamplingParams) -> Fields:
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


def _stops(p: SamplingParams) -> Fields:
    for name in (
        "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize",
        "return_generation_logits",
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


def _scores(p: SamplingParams) -> Fields:
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


def _lookahead(p: SamplingParams) -> Fields:
    if p.lookahead_config is None:
        return {}
    # A bad triple of a request is the request's mistake, whatever form it came in.
    try:
        config = parse_speculative_config(p.lookahead_config, method="lookahead")
    except ValueError as error:
        raise RequestError(f"{WHERE}lookahead_config: {error}") from None
    if config is not None and (config.draft_len_steps or config.synthetic_rates):
        raise RequestError(
            f"{WHERE}lookahead_config sets an option of the engine (draft_len_schedule, "
            "max_concurrency, synthetic_acceptance_...); pass it to LLM(speculative_config=...)"
        )
    result: Fields = {"lookahead_config": config}
    if config is not None and not config.adaptive:
        if p.adaptive:
            raise RequestError(
                f"{WHERE}adaptive = True but lookahead_config.adaptive = False; "
                "set only one of them"
            )
        result["adaptive"] = False
    return result


def _speculation(p: SamplingParams) -> Fields:
    for name in ("speculative", "adaptive", "use_draft_logits"):
        if getattr(p, name) is not None:
            check_bool(WHERE + name, getattr(p, name), RequestError)
    check_str(WHERE + "cache_salt", p.cache_salt, RequestError, max_len=256)
    result = _lookahead(p)
    if p.max_draft_len is not None:
        result["max_draft_len"] = check_int(
            WHERE + "max_draft_len", p.max_draft_len, RequestError, low=0, high=MAX_DRAFT_LEN
        )
    if p.medusa_choices is not None:
        name = WHERE + "medusa_choices"
        result["medusa_choices"] = parse_choices(p.medusa_choices, name, RequestError)
        if p.lookahead_config is not None:
            raise RequestError(
                f"{name} and lookahead_config are both set; set only the one that "
                "belongs to the engine's method"
            )
    for name in ("redrafter_num_beams", "redrafter_draft_len_per_beam"):
        if (number := getattr(p, name)) is not None:
            result[name] = check_int(
                WHERE + name, number, RequestError,
                low=1, high=MAX_DRAFT_LEN, remedy="max_draft_len = 0 switches drafts off",
            )  # fmt: skip
    if p.lookahead_config is not None and p.max_draft_len is not None:
        raise RequestError(
            f"{WHERE}lookahead_config = {result['lookahead_config'].wng} and max_draft_len "
            f"= {p.max_draft_len}: the triple already fixes the draft length; set only the "
            "one that belongs to the engine's method"
        )
    asked = [
        name
        for name in (
            "lookahead_config", "medusa_choices", "max_draft_len", "redrafter_num_beams",
            "redrafter_draft_len_per_beam",
        )
        if getattr(p, name)
    ]  # fmt: skip
    if p.speculative is False and asked:
        raise RequestError(
            f"{WHERE}speculative = False but {asked[0]} asks for drafts; remove one of them"
        )
    return result


def _external_draft(p: SamplingParams) -> Fields:
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


def _external_rule(p: SamplingParams) -> Fields:
    """Drafts that come with logits are held against them."""
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


def _acceptance(p: SamplingParams) -> Fields:
    return check_acceptance(
        p.acceptance, p.posterior_threshold, p.posterior_alpha, p.acceptance_threshold
    )


CHECKS: tuple[Callable[[SamplingParams], Fields], ...] = (
    _supported, _law, _outputs, _lengths, _stops, _scores, _speculation, _external_draft,
    _external_rule, _acceptance,
)  # fmt: skip

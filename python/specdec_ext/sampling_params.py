"""What one request asks for: lengths, sampling, stops, score processors, speculation.

`SamplingParams()` decodes greedily. The object is valid once it exists, as far as that can be said
without a model; token ids are held against the vocabulary and triples against the engine when the
request is submitted (request_check.py). Names are vLLM's. Fields of what is not supported (beams,
structured outputs, ...) exist so that a request that sets them is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .acceptance import check_acceptance, is_lossless
from .config import MAX_DRAFT_LEN, LookaheadDecodingConfig
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
from .validate import check_bool, check_float, check_int, check_str, show, unknown_key

__all__ = ["MAX_LOGPROBS", "LogitsProcessor", "SamplingParams"]

# (token_ids so far: prompt and output, scores [V]) -> scores [V]; a function of these alone.
LogitsProcessor = Callable[[list[int], Any], Any]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_OUTPUTS = 128

# Other projects' spellings, accepted by SamplingParams.from_dict.
_ALIASES = {
    "num_draft_tokens": "max_draft_len",
    "num_speculative_tokens": "max_draft_len",
    "prompt_lookup_num_tokens": "max_draft_len",
    "max_new_tokens": "max_tokens",
    "max_output_len": "max_tokens",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "num_beams": "beam_width",
    "guided_decoding": "structured_outputs",
    "draft_acceptance_threshold": "acceptance_threshold",
    "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
    "external_draft_tokens_config": "external_draft",
}
# Spellings of the off switch whose meaning is inverted.
_OFF_SWITCHES = ("disable_spec_decode", "disable_speculative_decoding")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request; immutable, so one object may serve many requests.

    Lengths     max_tokens (None: as many as fit), min_tokens (no stop before), ignore_eos
    Sampling    temperature (0: greedy), top_k (0 or -1: all), top_p (0..1], min_p 0..1; cut in the
                order min_p, top_k, top_p (docs/methods/sampling.md); seed: the same seed gives the
                same tokens, whoever shares the batch and, with exact_match, however they were
                drafted (None: a stream of its own, drawn from the engine's seed and the number of
                the request); n outputs
    Stops       stop (strings), stop_token_ids, include_stop_str_in_output
    Scores      logit_bias {token id: -100..100}, bad_words (strings or id lists),
                allowed_token_ids, repetition_penalty > 0, presence_penalty and
                frequency_penalty -2..2; logits_processors: callables (token_ids, scores) -> scores,
                called before all of these for every node of a draft tree with the tokens in front
                of it; scores: float32 [V], its own copy
    Output      logprobs, prompt_logprobs (None, or 0..20 best tokens beside the chosen and the
                prompt's own), skip_special_tokens, detokenize (False: token ids only; not with
                `stop`), return_generation_logits (the model's own scores of every delivered token,
                before processors)
    Speculation speculative (None: as the engine; False: plain decoding; True: needs an engine with
                a speculative_config), lookahead_config (w,n,g within the engine's triple),
                max_draft_len (0..the engine's), medusa_choices (a tree within the engine's number
                of nodes), redrafter_num_beams, redrafter_draft_len_per_beam (1..the engine's),
                use_draft_logits (draft models; None: as the engine), adaptive (None: as the engine)
                external_draft: drafts that the request brings along (docs/orchestrate.md)
    Acceptance  acceptance: "exact_match" or "rejection" (lossless), "typical" or "threshold"
                (lossy); posterior_threshold, posterior_alpha: for typical (None: 0.09, 0.3);
                acceptance_threshold: for threshold, in (0, 1] (docs/methods/sampling.md)
    Sharing     cache_salt: requests share pools and cached prompts only with the same salt

    Raises RequestError (UnsupportedRequestError for beams, best_of, structured outputs) naming
    field, value, limit and remedy.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    bad_words: Sequence[str | Sequence[int]] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] | None = field(default=None, repr=False)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    seed: int | None = None
    speculative: bool | None = None
    lookahead_config: LookaheadDecodingConfig | None = None
    max_draft_len: int | None = None
    medusa_choices: Any = None
    adaptive: bool | None = None
    acceptance: str = "exact_match"
    posterior_threshold: float | None = None
    posterior_alpha: float | None = None
    acceptance_threshold: float | None = None
    redrafter_num_beams: int | None = None
    redrafter_draft_len_per_beam: int | None = None
    use_draft_logits: bool | None = None
    cache_salt: str = ""
    external_draft: ExternalDraftTokensConfig | None = None
    return_generation_logits: bool = False
    # Refused unless they are off.
    best_of: int | None = None
    beam_width: int = 1
    structured_outputs: object | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._refuse_unsupported()
        self._check_sampling()
        self._check_lengths()
        self._check_stops()
        self._check_scores()
        self._check_speculation()
        self._adopt_external_rule()
        self._set(
            **check_acceptance(
                self.acceptance,
                self.posterior_threshold,
                self.posterior_alpha,
                self.acceptance_threshold,
            )
        )

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _refuse_unsupported(self) -> None:
        def refuse(name: str, why: str, remedy: str) -> UnsupportedRequestError:
            value = show(getattr(self, name))
            return UnsupportedRequestError(f"SamplingParams.{name} = {value}: {why}; {remedy}")

        for name, why in (
            ("best_of", "outputs are not ranked; ask for n outputs and choose among them"),
            ("beam_width", "beam search is never combined with speculation and is not supported"),
        ):
            value = getattr(self, name)
            if value is not None and check_int(f"SamplingParams.{name}", value, RequestError,
                                               low=1) != 1:  # fmt: skip
                raise refuse(name, why, f"use {name} = 1")
        if self.structured_outputs is not None:
            raise refuse("structured_outputs", "not supported in this version", "leave it None")

    def _check_sampling(self) -> None:
        def number(name: str, remedy: str, **bounds: float) -> float:
            field_name = f"SamplingParams.{name}"
            return check_float(
                field_name, getattr(self, name), RequestError, remedy=remedy, **bounds
            )

        self._set(
            temperature=number("temperature", "0.0 is greedy", low=0.0),
            top_p=number("top_p", "1.0 is off", above=0.0, high=1.0),
            min_p=number("min_p", "0.0 is off", low=0.0, high=1.0),
            # -1 switches top-k off in vLLM and transformers.
            top_k=max(
                0,
                check_int(
                    "SamplingParams.top_k", self.top_k, RequestError,
                    low=-1, high=MAX_TOKEN_ID, remedy="0 or -1 is off",
                ),
            ),
            n=check_int("SamplingParams.n", self.n, RequestError, low=1, high=MAX_OUTPUTS),
        )  # fmt: skip
        if self.n > 1 and self.greedy:
            raise RequestError(
                f"SamplingParams.n = {self.n} with greedy decoding: the outputs would be equal; "
                "set temperature > 0 or n = 1"
            )

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            self._set(
                max_tokens=check_int(
                    "SamplingParams.max_tokens", self.max_tokens, RequestError,
                    low=1, high=MAX_TOKEN_ID, remedy="ask for at least one token",
                )
            )  # fmt: skip
        self._set(
            min_tokens=check_int(
                "SamplingParams.min_tokens", self.min_tokens, RequestError, low=0, high=MAX_TOKEN_ID
            )
        )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"SamplingParams.min_tokens = {self.min_tokens} is greater than max_tokens = "
                f"{self.max_tokens}; lower min_tokens or raise max_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                field_name = f"SamplingParams.{name}"
                count = check_int(
                    field_name, getattr(self, name), RequestError, low=0, high=MAX_LOGPROBS
                )
                self._set(**{name: count})
        if self.seed is not None:
            self._set(
                seed=check_int(
                    "SamplingParams.seed", self.seed, RequestError, low=-(2**63), high=2**64 - 1
                )
            )

    def _check_stops(self) -> None:
        for name in (
            "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize",
            "return_generation_logits",
        ):  # fmt: skip
            check_bool(f"SamplingParams.{name}", getattr(self, name), RequestError)
        raw = self.stop
        strings = [] if raw is None else [raw] if isinstance(raw, str) else raw
        if not isinstance(strings, (list, tuple)):
            raise RequestError(
                f"SamplingParams.stop = {show(raw)}: expected a string or a list of strings, "
                f"got {type(raw).__name__}; pass for example ['\\n\\n']"
            )
        if len(strings) > MAX_STOP_STRINGS:
            raise RequestError(
                f"SamplingParams.stop has {len(strings)} strings, limit {MAX_STOP_STRINGS}; "
                "shorten the list"
            )
        for i, text in enumerate(strings):
            if check_str(f"SamplingParams.stop[{i}]", text, RequestError,
                         max_len=MAX_STOP_CHARS) == "":  # fmt: skip
                raise RequestError(
                    f"SamplingParams.stop[{i}] is empty: it would stop every request at once; "
                    "remove it"
                )
        if strings and not self.detokenize:
            raise RequestError(
                f"SamplingParams.stop = {show(raw)} with detokenize = False: stop strings are "
                "searched in the text; set detokenize = True or use stop_token_ids"
            )
        stop_ids = () if self.stop_token_ids is None else self.stop_token_ids
        self._set(
            stop=tuple(strings),
            stop_token_ids=tuple(check_ids("stop_token_ids", stop_ids, max_count=MAX_BAD_WORDS)),
        )

    def _check_scores(self) -> None:
        self._set(
            repetition_penalty=check_float(
                "SamplingParams.repetition_penalty", self.repetition_penalty, RequestError,
                above=0.0, high=100.0, remedy="1.0 is off",
            ),
            bad_words=check_bad_words(self.bad_words),
            logit_bias=check_logit_bias(self.logit_bias),
            logits_processors=check_processors(self.logits_processors),
        )  # fmt: skip
        for name in ("presence_penalty", "frequency_penalty"):
            value = check_float(
                f"SamplingParams.{name}", getattr(self, name), RequestError,
                low=-2.0, high=2.0, remedy="0.0 is off",
            )  # fmt: skip
            self._set(**{name: value})
        if self.allowed_token_ids is not None:
            ids = check_ids("allowed_token_ids", self.allowed_token_ids, max_count=MAX_ID_LIST)
            if not ids:
                raise RequestError(
                    "SamplingParams.allowed_token_ids is empty: no token could follow; "
                    "name at least one id or leave it None"
                )
            self._set(allowed_token_ids=tuple(sorted(set(ids))))

    def _check_speculation(self) -> None:
        for name in ("speculative", "adaptive", "use_draft_logits"):
            if getattr(self, name) is not None:
                check_bool(f"SamplingParams.{name}", getattr(self, name), RequestError)
        check_str("SamplingParams.cache_salt", self.cache_salt, RequestError, max_len=256)
        if self.lookahead_config is not None:
            # A bad triple of a request is the request's mistake, whatever form it came in.
            try:
                config = parse_speculative_config(self.lookahead_config, method="lookahead")
            except ValueError as error:
                raise RequestError(f"SamplingParams.lookahead_config: {error}") from None
            self._set(lookahead_config=config)
            if config is not None and not config.adaptive:
                if self.adaptive:
                    raise RequestError(
                        "SamplingParams.adaptive = True but lookahead_config.adaptive = False; "
                        "set only one of them"
                    )
                self._set(adaptive=False)
        if self.max_draft_len is not None:
            self._set(
                max_draft_len=check_int(
                    "SamplingParams.max_draft_len", self.max_draft_len, RequestError,
                    low=0, high=MAX_DRAFT_LEN,
                )
            )  # fmt: skip
        if self.medusa_choices is not None:
            field_name = "SamplingParams.medusa_choices"
            self._set(medusa_choices=parse_choices(self.medusa_choices, field_name, RequestError))
            if self.lookahead_config is not None:
                raise RequestError(
                    f"{field_name} and lookahead_config are both set; set only the one that "
                    "belongs to the engine's method"
                )
        for name in ("redrafter_num_beams", "redrafter_draft_len_per_beam"):
            if getattr(self, name) is not None:
                number = check_int(
                    f"SamplingParams.{name}", getattr(self, name), RequestError,
                    low=1, high=MAX_DRAFT_LEN, remedy="max_draft_len = 0 switches drafts off",
                )  # fmt: skip
                self._set(**{name: number})
        if self.lookahead_config is not None and self.max_draft_len is not None:
            raise RequestError(
                f"SamplingParams.lookahead_config = {self.lookahead_config.wng} and max_draft_len "
                f"= {self.max_draft_len}: the triple already fixes the draft length; set only the "
                "one that belongs to the engine's method"
            )
        if isinstance(self.external_draft, Mapping):
            try:
                self._set(external_draft=ExternalDraftTokensConfig(**self.external_draft))
            except TypeError as error:
                raise RequestError(f"SamplingParams.external_draft: {error}") from None
        if not isinstance(self.external_draft, ExternalDraftTokensConfig | None):
            raise RequestError(
                f"SamplingParams.external_draft = {show(self.external_draft)}: expected an "
                f"ExternalDraftTokensConfig, got {type(self.external_draft).__name__}"
            )
        asked = [
            name
            for name in (
                "lookahead_config", "medusa_choices", "max_draft_len", "redrafter_num_beams",
                "redrafter_draft_len_per_beam",
            )
            if getattr(self, name)
        ]  # fmt: skip
        if self.speculative is False and asked:
            raise RequestError(
                f"SamplingParams.speculative = False but {asked[0]} asks for drafts; remove one of "
                "them"
            )

    def _adopt_external_rule(self) -> None:
        """Drafts that come with logits are held against them."""
        draft = self.external_draft
        if draft is None or draft.logits is None:
            return
        threshold = draft.acceptance_threshold
        if threshold is None:
            if self.acceptance == "exact_match":
                self._set(acceptance="rejection")
        elif self.acceptance in ("exact_match", "threshold") and (
            self.acceptance_threshold is None or self.acceptance_threshold == threshold
        ):
            self._set(acceptance="threshold", acceptance_threshold=threshold)
        else:
            raise RequestError(
                f"ExternalDraftTokensConfig.acceptance_threshold = {threshold} but "
                f"SamplingParams.acceptance = {self.acceptance!r}, acceptance_threshold = "
                f"{self.acceptance_threshold}; give the rule in one place"
            )

    @property
    def greedy(self) -> bool:
        """No random number is drawn: the largest score wins, the smaller id on ties."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def lossless(self) -> bool:
        """Outputs have the model's own law, with any drafter."""
        return self.greedy or is_lossless(self.acceptance)

    @property
    def needs_scores(self) -> bool:
        """True when a step needs whole score rows, not just the best token."""
        return bool(
            not self.greedy
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids is not None
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.logprobs is not None
            or self.return_generation_logits
            or self.prompt_logprobs is not None
            or self.logits_processors
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from JSON-like keys, accepting other projects' spellings; unknown keys are refused.

        Raises RequestError as the constructor does.
        """
        if not isinstance(values, Mapping):
            raise RequestError(
                f"sampling parameters = {show(values)}: expected an object with keys, "
                f"got {type(values).__name__}"
            )
        names = {f.name for f in fields(cls)}
        known = names | set(_ALIASES) | set(_OFF_SWITCHES)
        given: dict[str, Any] = {}
        for key, value in values.items():
            if not isinstance(key, str) or key.lower().replace("-", "_") not in known:
                raise unknown_key("SamplingParams", str(key), known, RequestError)
            name = key.lower().replace("-", "_")
            if name in _OFF_SWITCHES:
                name, value = "speculative", not check_bool(name, value, RequestError)
            name = _ALIASES.get(name, name)
            if name in given and given[name] != value:
                raise RequestError(
                    f"SamplingParams.{name} is given twice, as {show(given[name])} and as "
                    f"{show(value)} ({key}); keep one"
                )
            given[name] = value
        return cls(**given)

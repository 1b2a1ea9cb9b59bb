"""What one request asks for: lengths, sampling, stops, score processors, speculation.

`SamplingParams()` decodes greedily. The object is valid once it exists, as far as that can be said
without a model (sampling_checks.py); token ids are held against the vocabulary and triples against
the engine when the request is submitted (request_check.py). Names are vLLM's. Fields of what is not
supported (beams, structured outputs, ...) exist so that a request that sets them is refused by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .acceptance import is_lossless
from .config import LookaheadDecodingConfig
from .errors import RequestError
from .external_draft import ExternalDraftTokensConfig
from .sampling_checks import CHECKS, MAX_LOGPROBS
from .validate import check_bool, show, unknown_key

__all__ = ["MAX_LOGPROBS", "LogitsProcessor", "SamplingParams"]

# (token_ids so far: prompt and output, scores [V]) -> scores [V]; a function of these alone.
LogitsProcessor = Callable[[list[int], Any], Any]

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
    Acceptance  acceptance: "exact_match" or "rejection" (lossless), "typical", "threshold" or, for
                ReDrafter, "best_beam" (lossy); posterior_threshold, posterior_alpha: for typical
                (None: 0.09, 0.3); acceptance_threshold: for threshold, in (0, 1]
                (docs/methods/sampling.md)
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
        for check in CHECKS:
            for name, value in check(self).items():
                object.__setattr__(self, name, value)

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

"""What one request asks for: lengths, sampling, stops, score processors, speculation.

`SamplingParams()` decodes greedily. The object is valid once it exists, as far as that can be said
without a model (sampling_checks.py); token ids are checked against the vocabulary, and triples
against the engine, when the request is submitted (resolve.py). Names are vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..config.acceptance import is_lossless
from ..config.validate import check_bool, check_int, show, unknown_key
from ..errors import RequestError, UnsupportedRequestError
from .sampling_checks import CHECKS, MAX_LOGPROBS
from .sampling_fields import LogitsProcessor, SamplingFields
from .speculative_config import SPELLINGS, fold_spellings

__all__ = ["MAX_LOGPROBS", "LogitsProcessor", "SamplingParams"]

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
# Features of other projects that are refused, unless they are off (None or 1).
_REFUSED = {
    "best_of": "outputs are not ranked; ask for n outputs and choose among them; use best_of = 1",
    "beam_width": "beam search is never combined with speculation and is not supported; use "
    "beam_width = 1",
}
# Spellings of the off switch whose meaning is inverted.
_OFF_SWITCHES = ("disable_spec_decode", "disable_speculative_decoding")


@dataclass(frozen=True)
class SamplingParams(SamplingFields):
    """Parameters of one request. Immutable, so one object may serve many requests.

    Length
      max_tokens            the most output tokens; None: as many as fit
      min_tokens            no end before this many
      ignore_eos            go on after the end token
    Sampling                docs/methods/sampling.md
      temperature           0: greedy
      top_k, top_p, min_p   0 or -1 (all), (0, 1], [0, 1]; applied in the order min_p, top_k, top_p
      seed                  the same seed gives the same tokens, whoever shares the batch and, with
                            exact_match, however they were drafted. None: a separate stream, derived
                            from the engine's seed and the number of the request
      n                     number of outputs
      acceptance            which drafts are kept: "exact_match" or "rejection" (lossless),
                            "typical", "threshold" or, for ReDrafter, "best_beam" (lossy)
      posterior_threshold, posterior_alpha
                            of typical acceptance; None: 0.09, 0.3
      acceptance_threshold  of threshold acceptance, in (0, 1]
    Stops
      stop                  strings; the output ends before the first of them
      stop_token_ids        the output ends after the first of them
      include_stop_str_in_output
                            keep the stop string
    Scores
      logit_bias            {token id: -100..100}
      bad_words             strings or lists of token ids that must not appear
      allowed_token_ids     no other tokens may appear
      repetition_penalty    above 0
      presence_penalty, frequency_penalty
                            -2..2
      logits_processors     callables (token_ids, scores) -> scores. Each is called before all of
                            the above, for every node of a draft tree, with the tokens that lead to
                            the node; scores is float32 [V], its own copy
    Output
      logprobs              None, or the 0..20 best tokens besides the chosen one
      prompt_logprobs       the same for the prompt's tokens
      skip_special_tokens   leave special tokens out of the text
      detokenize            False: token ids only; not with `stop`
      return_generation_logits
                            the model's scores for every delivered token, before processors
      return_steps          what each step drafted and accepted, and how long it took
    Drafts
      speculative_config    None: as the engine. False: plain decoding. A configuration of the
                            engine's method, within the engine's bounds. Or a dict of changes to
                            the engine's configuration, whose keys are also accepted as keywords:
                            lookahead_config (w, n, g within the engine's triple), max_draft_len
                            (0..the engine's), medusa_choices (a tree within the engine's number of
                            nodes), redrafter_num_beams and redrafter_draft_len_per_beam (1..the
                            engine's), use_draft_logits (for draft models), adaptive
      prediction            the expected output, as text or token ids. Drafts are taken from it; it
                            changes no token (docs/methods/prediction.md)
      external_draft        drafts that come with the request (docs/orchestrate.md)
    Other
      structured_outputs    the form that the output must have: {"json": schema}, {"regex":
                            expression}, {"choice": texts}, {"grammar": Lark or GBNF} or
                            {"json_object": True}, an object with these attributes, or OpenAI's
                            response_format. The output ends where the form does
                            (docs/methods/grammar.md)
      cache_salt            requests share pools and cached prompts only with the same salt
      priority              -2^31..2^31-1. A request with a smaller number starts earlier and, with
                            SchedulerConfig.policy "max_utilization", gives its K/V pages back later

    Raises RequestError (UnsupportedRequestError for beams and best_of) that names field, value,
    limit and remedy.
    """

    @classmethod
    def _respell(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Translate keywords to the fields' own names; drop those that switch something off."""
        for name, why in _REFUSED.items():
            value = given.pop(name, None)
            if (
                value is None
                or check_int(f"SamplingParams.{name}", value, RequestError, low=1) == 1
            ):
                continue
            raise UnsupportedRequestError(f"SamplingParams.{name} = {show(value)}: {why}")
        return fold_spellings(given)

    def __post_init__(self) -> None:
        for check in CHECKS:
            for name, value in check(self).items():
                object.__setattr__(self, name, value)

    @property
    def lossless(self) -> bool:
        """Whether outputs have the model's own distribution, with any drafter."""
        return self.greedy or is_lossless(self.acceptance)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from JSON-like keys; other projects' spellings are accepted.

        Raises RequestError for an unknown key, and as the constructor does.
        """
        if not isinstance(values, Mapping):
            raise RequestError(
                f"sampling parameters = {show(values)}: expected an object with keys, "
                f"got {type(values).__name__}"
            )
        names = {f.name for f in fields(cls)} | {*SPELLINGS, *_REFUSED}
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

"""What one request asks of one method: the executor's keywords, a drafter's options.

The engine's configuration is an upper bound: a request may ask for less, never for more. Every
refusal is a RequestError with both numbers and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..config.lookahead import LookaheadDecodingConfig, max_draft_len
from ..config.medusa_choices import MAX_TOP_K, Choice, check_choices
from ..config.methods import (
    DrafterConfig,
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    MedusaDecodingConfig,
    ReDrafterDecodingConfig,
)
from ..config.ngram import NGramDecodingConfig
from ..config.parse import SpeculativeConfig
from ..config.suffix import SuffixDecodingConfig
from ..config.validate import show
from ..errors import RequestError
from .sampling_params import SamplingParams
from .speculative_config import Changes

__all__ = ["Speculation", "of_method", "refuse_draft_logits"]

# Executor.submit's keywords, drafts on the deepest path, a drafter's options.
Speculation = tuple[dict[str, Any], int, dict[str, Any]]

# Changes that belong to one method: refused by an engine of another.
_METHOD_OF_CHANGE = {
    "redrafter_num_beams": "redrafter",
    "redrafter_draft_len_per_beam": "redrafter",
}


# Whose drafts may be drawn from the drafter's own law.
_WITH_DRAFT_LOGITS = (DraftTargetDecodingConfig, Eagle3DecodingConfig)


def of_method(
    params: SamplingParams, changes: Mapping[str, Any], engine: SpeculativeConfig
) -> Speculation:
    """A request of an engine with one method, or what concerns one of several sources."""
    _refuse_other_methods(params, changes, engine)
    if isinstance(engine, LookaheadDecodingConfig):
        kwargs, depth, options = _lookahead(changes, engine)
    elif isinstance(engine, NGramDecodingConfig):
        kwargs, depth, options = _length(changes, engine, "prompt lookup")
    elif isinstance(engine, SuffixDecodingConfig):
        kwargs, depth, options = _length(changes, engine, "suffix decoding")
    else:
        assert isinstance(engine, DrafterConfig)
        kwargs, depth, options = _drafter(params, changes, engine)
    if kwargs["speculative"] and "adaptive" in changes:
        kwargs["adaptive"] = changes["adaptive"]
    return kwargs, depth, options


def refuse_draft_logits(changes: Mapping[str, Any]) -> None:
    raise RequestError(
        f"SamplingParams.use_draft_logits = {changes['use_draft_logits']}: this engine has no "
        "draft model; build the LLM with a DraftTargetDecodingConfig or leave it out"
    )


def _refuse_other_methods(
    params: SamplingParams, changes: Mapping[str, Any], engine: SpeculativeConfig
) -> None:
    """Raise RequestError for what belongs to another method than the engine's."""
    if "use_draft_logits" in changes and not isinstance(engine, _WITH_DRAFT_LOGITS):
        refuse_draft_logits(changes)
    words = engine.words if isinstance(engine, DrafterConfig) else engine.method
    if "medusa_choices" in changes and engine.method != "medusa":
        raise RequestError(
            f"SamplingParams.medusa_choices: this engine decodes with {words}; remove it"
        )
    for name, method in _METHOD_OF_CHANGE.items():
        if name in changes and engine.method != method:
            raise RequestError(
                f"SamplingParams.{name} = {show(changes[name])}: this engine decodes with "
                f"{engine.method!r}, not {method!r}; remove the parameter"
            )
    if params.acceptance == "best_beam" and engine.method != "redrafter":
        raise RequestError(
            "SamplingParams.acceptance = 'best_beam': ReDrafter's rule for its beams, this engine "
            f"decodes with {engine.method!r}; use 'rejection', or 'typical'"
        )
    if engine.synthetic_rates and params.acceptance != "exact_match":
        raise RequestError(
            f"SamplingParams.acceptance = {params.acceptance!r}: this engine keeps drafts at "
            "synthetic rates and holds them against nothing; leave acceptance out, or build the "
            "LLM without synthetic_acceptance_length and synthetic_acceptance_rates"
        )


def _lookahead(changes: Mapping[str, Any], engine: LookaheadDecodingConfig) -> Speculation:
    if "max_draft_len" in changes:
        raise RequestError(
            f"SamplingParams.max_draft_len = {changes['max_draft_len']}: this engine decodes with "
            "lookahead, whose draft length follows from the triple; set lookahead_config instead"
        )
    triple = engine.triple
    if "lookahead_config" in changes:
        triple = changes["lookahead_config"].triple
        names = ("max_window_size", "max_ngram_size", "max_verification_set_size")
        for name, asked, limit in zip(names, triple, engine.triple, strict=True):
            if asked > limit:
                raise RequestError(
                    f"SamplingParams.lookahead_config.{name} = {asked} is greater than the "
                    f"engine's {limit} (request {triple}, engine {engine.triple}); lower it, or "
                    "build the LLM with a larger triple"
                )
        need, have = max_draft_len(*triple) + 1, engine.max_draft_len + 1
        if need > have:
            raise RequestError(
                f"SamplingParams.lookahead_config = {triple} needs {need} step tokens, the "
                f"engine's {engine.triple} has {have}; lower the triple"
            )
    if triple == (1, 1, 0):
        return {"speculative": False}, 0, {}
    return {"speculative": True, "lookahead": triple}, triple[1] - 1, {}


def _length(
    changes: Mapping[str, Any],
    engine: NGramDecodingConfig | SuffixDecodingConfig | DrafterConfig,
    words: str,
) -> Speculation:
    """max_draft_len, within the engine's."""
    if "lookahead_config" in changes:
        raise RequestError(
            f"SamplingParams.lookahead_config = {changes['lookahead_config'].triple}: this engine "
            f"decodes with {words}; set max_draft_len instead"
        )
    limit = engine.max_draft_len
    length = changes.get("max_draft_len", limit)
    if length > limit:
        raise RequestError(
            f"SamplingParams.max_draft_len = {length} is greater than the engine's {limit}; "
            "lower it, or build the LLM with a larger max_draft_len"
        )
    if length == 0:
        return {"speculative": False}, 0, {}
    kwargs = {"speculative": True, "max_draft_len": length}
    return kwargs, min(length, engine.max_draft_path_len), {}


def _drafter(
    params: SamplingParams, changes: Mapping[str, Any], engine: DrafterConfig
) -> Speculation:
    find: Mapping[type, Callable[..., Speculation]] = {
        DraftTargetDecodingConfig: _draft_target,
        Eagle3DecodingConfig: _draft_target,
        MedusaDecodingConfig: _medusa,
        ReDrafterDecodingConfig: _redrafter,
    }
    plain = _length(changes, engine, engine.words)
    more = find.get(type(engine))
    return plain if more is None else more(params, changes, engine, *plain)


def _draft_target(
    params: SamplingParams,
    changes: Mapping[str, Any],
    engine: DraftTargetDecodingConfig | Eagle3DecodingConfig,
    kwargs: dict[str, Any],
    depth: int,
    options: dict[str, Any],
) -> Speculation:
    """Options: adaptive, use_draft_logits, acceptance."""
    acceptance = params.acceptance
    by_probs = acceptance in ("rejection", "threshold")
    # True is a configuration's default, and no demand there.
    demanded = isinstance(params.speculative_config, Changes) and changes.get("use_draft_logits")
    if demanded and not by_probs and not params.greedy:
        raise RequestError(
            f"SamplingParams.use_draft_logits = True with acceptance = {acceptance!r}, which looks "
            "at tokens alone; set acceptance='rejection' or leave use_draft_logits out"
        )
    if depth == 0:
        return kwargs, depth, options
    options = {
        "adaptive": changes.get("adaptive", engine.adaptive),
        "use_draft_logits": changes.get("use_draft_logits", engine.use_draft_logits),
        "acceptance": acceptance,
    }
    return kwargs, depth, options


def _medusa(
    params: SamplingParams,
    changes: Mapping[str, Any],
    engine: MedusaDecodingConfig,
    kwargs: dict[str, Any],
    depth: int,
    options: dict[str, Any],
) -> Speculation:
    """Options: medusa_choices, the request's tree, and adaptive."""
    choices: tuple[Choice, ...] = changes.get("medusa_choices", engine.medusa_choices)
    if "medusa_choices" in changes:
        check_choices(
            choices,
            "SamplingParams.medusa_choices",
            RequestError,
            num_heads=engine.num_medusa_heads,
            top_k=getattr(engine, "_top_k", MAX_TOP_K),
            max_nodes=engine.max_draft_len,
            remedy="use a smaller tree, or build the LLM with a larger one",
        )
    if not kwargs["speculative"]:
        return kwargs, 0, {}
    kwargs["max_draft_len"] = min(kwargs["max_draft_len"], len(choices))
    depth = max(len(choice) for choice in choices[: kwargs["max_draft_len"]])
    adaptive = changes.get("adaptive", engine.adaptive)
    return kwargs, depth, {"medusa_choices": choices, "adaptive": adaptive}


def _redrafter(
    params: SamplingParams,
    changes: Mapping[str, Any],
    engine: ReDrafterDecodingConfig,
    kwargs: dict[str, Any],
    depth: int,
    options: dict[str, Any],
) -> Speculation:
    """Options: num_beams, length, temperature, adaptive, keeps_laws."""
    if not kwargs["speculative"]:
        return kwargs, depth, options
    chosen = {"num_beams": engine.num_beams, "draft_len_per_beam": engine.draft_len_per_beam}
    for name, limit in chosen.items():
        asked = changes.get(f"redrafter_{name}", limit)
        if asked > limit:
            raise RequestError(
                f"SamplingParams.redrafter_{name} = {asked} is greater than the engine's "
                f"{name} = {limit}; lower it, or build the LLM with a larger {name}"
            )
        chosen[name] = asked
    beams, length = chosen["num_beams"], chosen["draft_len_per_beam"]
    kwargs["max_draft_len"] = min(kwargs["max_draft_len"], beams * length)
    options = {
        "num_beams": beams,
        "length": length,
        "temperature": 1.0 if engine.greedy_search or params.greedy else params.temperature,
        "adaptive": changes.get("adaptive", engine.adaptive),
        "keeps_laws": params.acceptance == "best_beam" and not params.greedy,
    }
    return kwargs, min(depth, length), options

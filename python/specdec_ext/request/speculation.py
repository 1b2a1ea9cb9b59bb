"""A request's speculation held against the engine's, which may have several sources.

A request chooses among the engine's sources, and within the bounds of each (of_method.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config.lookahead import LookaheadDecodingConfig
from ..config.methods import MedusaDecodingConfig
from ..config.parse import SpeculativeConfig
from ..config.sources import CompositeDecodingConfig, method_of
from ..config.validate import show
from ..errors import RequestError
from .of_method import Speculation, of_method, refuse_draft_logits
from .sampling_params import SamplingParams
from .speculative_config import Changes

__all__ = ["Speculation", "resolve_speculation", "with_defaults"]

# Method -> what a request may choose: field of its configuration -> key of Changes.
_OF_A_REQUEST: Mapping[str, Mapping[str, str]] = {
    "lookahead": {},  # the triple is one value
    "ngram": {"max_draft_len": "max_draft_len"},
    "suffix": {"max_draft_len": "max_draft_len"},
    "draft_target": {"max_draft_len": "max_draft_len", "use_draft_logits": "use_draft_logits"},
    "eagle3": {"max_draft_len": "max_draft_len", "use_draft_logits": "use_draft_logits"},
    "medusa": {"medusa_choices": "medusa_choices"},
    "redrafter": {
        "num_beams": "redrafter_num_beams",
        "draft_len_per_beam": "redrafter_draft_len_per_beam",
    },
    "user_provided": {"max_draft_len": "max_draft_len"},
}


def with_defaults(params: SamplingParams, engine: SpeculativeConfig | None) -> SamplingParams:
    """The request, with what the engine's configuration sets for requests that leave it open:
    Medusa's acceptance and its parameters.

    Drafts that a request brings along, or takes from its prediction, are held against the rule that
    they define themselves: a lossy default of the engine must not decide about them.
    """
    engine = method_of(engine)
    if not isinstance(engine, MedusaDecodingConfig) or engine.acceptance == "exact_match":
        return params
    asked = params.speculative_config
    off = asked is False or (isinstance(asked, Changes) and asked.get("max_draft_len") == 0)
    proposed = params.external_draft is not None or params.prediction is not None
    if off or proposed or params.acceptance != "exact_match":
        return params
    return dataclasses.replace(
        params,
        acceptance=engine.acceptance,
        posterior_threshold=engine.posterior_threshold,
        posterior_alpha=engine.posterior_alpha,
    )


def resolve_speculation(params: SamplingParams, engine: SpeculativeConfig | None) -> Speculation:
    """What the request asks of an engine with this configuration. Raises RequestError."""
    asked = params.speculative_config
    if asked is False:
        return {"speculative": False}, 0, {}
    if engine is None:
        _refuse_without_speculation(params)
        return {"speculative": False}, 0, {}
    changes: Mapping[str, Any] = {}
    if isinstance(asked, Changes):
        changes = asked
    elif asked is not None and not isinstance(asked, bool):
        if isinstance(engine, CompositeDecodingConfig):
            return _of_sources(params, asked, engine)
        changes = _changes_of(asked, engine)
    if isinstance(engine, CompositeDecodingConfig):
        return _composite(params, changes, engine)
    return of_method(params, changes, engine)


def _composite(
    params: SamplingParams,
    changes: Mapping[str, Any],
    engine: CompositeDecodingConfig,
    asked: Mapping[str, Mapping[str, Any] | None] | None = None,
) -> Speculation:
    """Both sources, each with the changes that concern it. max_draft_len bounds each of them.

    asked  of the request's own sources the changes to each, None: it takes no drafts of that one
    """
    if params.acceptance == "best_beam":
        raise RequestError(
            "SamplingParams.acceptance = 'best_beam': this engine's drafts are of several sources, "
            "and the rule is ReDrafter's for its beams alone; use 'rejection', or 'typical'"
        )
    if changes.get("use_draft_logits"):
        raise RequestError(
            "SamplingParams.use_draft_logits = True: this engine's drafts are of several sources, "
            "and drafts that are drawn cannot share a tree with others; leave it out"
        )
    length = changes.get("max_draft_len")
    if length is not None and length > engine.max_draft_len:
        raise RequestError(
            f"SamplingParams.max_draft_len = {length} is greater than the engine's "
            f"{engine.max_draft_len}; lower it, or build the LLM with a larger max_draft_len"
        )
    resolved: dict[str, Speculation] = {}
    for source in engine.sources:
        given = changes if asked is None else asked.get(source.method)
        if given is None:
            resolved[source.method] = {"speculative": False}, 0, {}
            continue
        takes = ("max_draft_len",) if source is engine.suffix else given
        own = {name: given[name] for name in takes if name in given}
        if "max_draft_len" in own and asked is None:
            own["max_draft_len"] = min(own["max_draft_len"], source.max_draft_len)
            # The triple says how long lookahead's drafts are.
            is_lookahead = isinstance(source, LookaheadDecodingConfig)
            if is_lookahead and own.pop("max_draft_len") == 0:
                resolved[source.method] = {"speculative": False}, 0, {}
                continue
        one = dataclasses.replace(params, speculative_config=None)
        resolved[source.method] = of_method(one, own, source)
    suffix, depth, _ = resolved[engine.suffix.method]
    kwargs, drafter_depth, options = resolved[engine.drafter.method]
    also = suffix["max_draft_len"] if suffix["speculative"] else 0
    if not also and not kwargs["speculative"]:
        return {"speculative": False}, 0, {}
    if not kwargs["speculative"]:
        off = isinstance(engine.drafter, LookaheadDecodingConfig)
        kwargs = {"lookahead": (1, 1, 0)} if off else {"max_draft_len": 0}
    kwargs = {**kwargs, "speculative": True, "suffix_draft_len": also}
    if "adaptive" in changes:
        kwargs["adaptive"] = changes["adaptive"]
    return kwargs, max(depth, drafter_depth), options


def _of_sources(
    params: SamplingParams, asked: SpeculativeConfig, engine: CompositeDecodingConfig
) -> Speculation:
    """A request that names sources: those alone, within the engine's bounds."""
    named = asked.sources if isinstance(asked, CompositeDecodingConfig) else (asked,)
    own = {source.method: source for source in engine.sources}
    changes: dict[str, Mapping[str, Any] | None] = dict.fromkeys(own)
    for source in named:
        if source.method not in own:
            raise RequestError(
                f"SamplingParams.speculative_config is of method {source.method!r}, this engine "
                f"decodes with {' and '.join(map(repr, own))}; use one of them, both, or False"
            )
        one = _changes_of(source, own[source.method])
        # These are of the whole, or never on; a length at its default is no choice.
        dropped = {"adaptive", "use_draft_logits"}
        if source.max_draft_len == getattr(type(source), "max_draft_len", None):
            dropped.add("max_draft_len")
        changes[source.method] = {k: v for k, v in one.items() if k not in dropped}
    off = {} if asked.adaptive else {"adaptive": False}
    return _composite(params, off, engine, changes)


def _changes_of(asked: SpeculativeConfig, engine: SpeculativeConfig) -> Mapping[str, Any]:
    """A configuration as changes to the engine's. Raises RequestError for what a request cannot
    choose; a field at its default is not a choice."""
    if isinstance(asked, LookaheadDecodingConfig):
        off = {} if asked.adaptive else {"adaptive": False}
        return {"lookahead_config": asked, **off}
    if asked.method != engine.method:
        raise RequestError(
            f"SamplingParams.speculative_config is of method {asked.method!r}, this engine decodes "
            f"with {engine.method!r}; use that, or False"
        )
    own = _OF_A_REQUEST[asked.method]
    changes: dict[str, Any] = {} if asked.adaptive else {"adaptive": False}
    for field in dataclasses.fields(asked):
        value, have = getattr(asked, field.name), getattr(engine, field.name)
        if field.name in own:
            if not (field.name == "medusa_choices" and getattr(asked, "uses_default_tree", False)):
                changes[own[field.name]] = value
        elif field.name != "adaptive" and value not in (have, *_defaults(asked, field)):
            raise RequestError(
                f"SamplingParams.speculative_config.{field.name} = {show(value)}: the engine's "
                f"choice, which is {show(have)}; leave it out, or build the LLM with it"
            )
    return changes


def _defaults(asked: SpeculativeConfig, field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """What the field is where nobody has chosen it."""
    if field.name == "max_draft_depth":  # follows from the length of a chain
        return (asked.max_draft_path_len,)
    if field.name == "model" and isinstance(asked, MedusaDecodingConfig) and asked.uses_shipped:
        return (asked.model,)
    return (field.default,)


def _refuse_without_speculation(params: SamplingParams) -> None:
    asked = params.speculative_config
    named: dict[str, Any] = {}
    if isinstance(asked, Changes):
        if "use_draft_logits" in asked:
            refuse_draft_logits(asked)
        named = {name: value for name, value in asked.items() if value}
    elif asked is not None:
        named = {"speculative_config": asked}
    proposed = params.external_draft is not None or params.prediction is not None
    if params.acceptance != "exact_match" and not proposed:
        named["acceptance"] = params.acceptance
    for name, value in named.items():
        raise RequestError(
            f"SamplingParams.{name} = {show(value)}: this engine has no speculative_config; pass "
            "one to LLM(speculative_config=...) or remove the parameter"
        )

"""`SamplingParams.speculative_config`: what one request says about speculation, in every form.

None                      as the engine decodes
False                     plain decoding
a method's configuration  within the engine's bounds; also as dict, list, JSON, YAML or a name;
                          of an engine with several sources one of them, or both
"auto"                    as None
a dict of changes         to the engine's own configuration, whatever its method (SPELLINGS)

The keys of a dict of changes are accepted as keywords of SamplingParams too. `speculative` = True
needs an engine that speculates, False is plain decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from ..config.limits import MAX_DRAFT_LEN
from ..config.medusa_choices import parse_choices
from ..config.parse import SpeculativeConfig, parse_speculative_config
from ..config.sources import AutoDecodingConfig
from ..config.validate import check_bool, check_int, show
from ..errors import RequestError

__all__ = [
    "DRAFTS",
    "SPELLINGS",
    "Changes",
    "RequestSpeculation",
    "check_speculative_config",
    "fold_spellings",
]

WHERE = "SamplingParams."
# What asks for drafts of another form, and what says how they are made or chosen.
DRAFTS = (
    "lookahead_config", "medusa_choices", "max_draft_len", "redrafter_num_beams",
    "redrafter_draft_len_per_beam",
)  # fmt: skip
SPELLINGS = ("speculative", *DRAFTS, "use_draft_logits", "adaptive")


class Changes(dict[str, Any]):
    """Changes to the engine's configuration, checked; keys of SPELLINGS. `speculative` is True."""


# False, but the type of a bare `False` is bool; True never stays.
RequestSpeculation: TypeAlias = SpeculativeConfig | Changes | bool | None


def fold_spellings(given: dict[str, Any]) -> dict[str, Any]:
    """SamplingParams' keywords with those of SPELLINGS made part of speculative_config.

    Raises RequestError where two of them contradict each other. What another SamplingParams has
    checked (dataclasses.replace) gives way; None takes it back.
    """
    asked = {name: given[name] for name in SPELLINGS if given.get(name) is not None}
    rest = {name: value for name, value in given.items() if name not in SPELLINGS}
    base = rest.get("speculative_config")
    was: dict[str, Any] = {}
    if isinstance(base, Changes):
        was = {name: value for name, value in base.items() if name not in given}
        rest["speculative_config"] = was or None
    if not asked:
        return rest
    on = asked.get("speculative")
    if on is not None:
        check_bool(WHERE + "speculative", on, RequestError)
    if not isinstance(base, Changes) and base not in (None, on):
        name = "speculative" if on is not None else next(iter(asked))
        raise RequestError(
            f"{WHERE}{name} = {show(given[name])} with speculative_config = {show(base)}: both say "
            "how the request is to be decoded; give speculative_config alone"
        )
    if on is False:
        drafts = [name for name in DRAFTS if asked.get(name)]
        if drafts:
            raise RequestError(
                f"{WHERE}speculative = False but {drafts[0]} asks for drafts; remove one of them"
            )
        return {**rest, "speculative_config": False}
    return {**rest, "speculative_config": {**was, **asked}}


def check_speculative_config(value: object) -> RequestSpeculation:
    """`value` in its normal form. Raises RequestError."""
    if value is None or value is False:
        return value
    if value is True:
        return Changes(speculative=True)
    if isinstance(value, Mapping) and all(key in SPELLINGS for key in value):
        folded = fold_spellings(dict(value)).get("speculative_config", {})
        return False if folded is False else _check_changes(folded)
    # A bad configuration of a request is the request's mistake, whatever form it came in.
    config = _parsed("speculative_config", value)
    if isinstance(config, AutoDecodingConfig):
        return None if config.adaptive else Changes(adaptive=False)
    return False if config is None else config


def _parsed(name: str, value: object, method: str | None = None) -> SpeculativeConfig | None:
    try:
        config = parse_speculative_config(value, method)
    except ValueError as error:
        raise RequestError(f"{WHERE}{name}: {error}") from None
    if config is not None and (config.draft_len_steps or config.synthetic_rates):
        raise RequestError(
            f"{WHERE}{name} sets an option of the engine (draft_len_schedule, max_concurrency, "
            "synthetic_acceptance_...); pass it to LLM(speculative_config=...)"
        )
    return config


def _check_changes(given: Mapping[str, Any]) -> Changes | None:
    changes = Changes({name: value for name, value in given.items() if value is not None})
    for name in ("adaptive", "use_draft_logits"):
        if name in changes:
            check_bool(WHERE + name, changes[name], RequestError)
    if "max_draft_len" in changes:
        changes["max_draft_len"] = check_int(
            WHERE + "max_draft_len", changes["max_draft_len"], RequestError,
            low=0, high=MAX_DRAFT_LEN,
        )  # fmt: skip
    for name in ("redrafter_num_beams", "redrafter_draft_len_per_beam"):
        if name in changes:
            changes[name] = check_int(
                WHERE + name, changes[name], RequestError,
                low=1, high=MAX_DRAFT_LEN, remedy="max_draft_len = 0 switches drafts off",
            )  # fmt: skip
    if "medusa_choices" in changes:
        name = WHERE + "medusa_choices"
        changes["medusa_choices"] = parse_choices(changes["medusa_choices"], name, RequestError)
    if "lookahead_config" in changes:
        _check_lookahead(changes)
    return changes or None


def _check_lookahead(changes: Changes) -> None:
    config = _parsed("lookahead_config", changes["lookahead_config"], "lookahead")
    if config is None:
        del changes["lookahead_config"]
        return
    changes["lookahead_config"] = config
    if "medusa_choices" in changes:
        raise RequestError(
            f"{WHERE}medusa_choices and lookahead_config are both set; set only the one that "
            "belongs to the engine's method"
        )
    if "max_draft_len" in changes:
        raise RequestError(
            f"{WHERE}lookahead_config and max_draft_len = {changes['max_draft_len']}: the triple "
            "already fixes the draft length; set only the one that belongs to the engine's method"
        )
    if not config.adaptive:
        if changes.get("adaptive"):
            raise RequestError(
                f"{WHERE}adaptive = True but lookahead_config.adaptive = False; set only one of "
                "them"
            )
        changes["adaptive"] = False

"""The rules by which drafts are accepted, and which of them are lossless."""

from __future__ import annotations

from typing import Any

from ..errors import RequestError
from .validate import check_choice, check_float

__all__ = ["ACCEPTANCE_RULES", "check_acceptance", "describe", "is_lossless"]

# Name -> lossless: the output has the target's own law, whatever the drafter.
ACCEPTANCE_RULES = {
    "exact_match": True,
    "rejection": True,
    "typical": False,
    "threshold": False,
    "best_beam": False,
}
POSTERIOR_THRESHOLD = 0.09
POSTERIOR_ALPHA = 0.3


def is_lossless(rule: str) -> bool:
    """Whether the rule keeps the target's law."""
    return ACCEPTANCE_RULES[rule]


def describe(rule: str) -> str:
    """The rule's name for people; a lossy one says so."""
    return rule if is_lossless(rule) else f"{rule} (lossy)"


def check_acceptance(
    rule: object,
    posterior_threshold: object,
    posterior_alpha: object,
    acceptance_threshold: object,
) -> dict[str, Any]:
    """SamplingParams' fields about acceptance, checked; typical's defaults filled in.

    Raises RequestError, also for a parameter that belongs to another rule.
    """
    where = "SamplingParams."
    name = check_choice(where + "acceptance", rule, ACCEPTANCE_RULES, RequestError)
    owners = {
        "posterior_threshold": ("typical", posterior_threshold, POSTERIOR_THRESHOLD),
        "posterior_alpha": ("typical", posterior_alpha, POSTERIOR_ALPHA),
        "acceptance_threshold": ("threshold", acceptance_threshold, None),
    }
    checked: dict[str, Any] = {"acceptance": name}
    for field, (owner, value, default) in owners.items():
        if value is not None:
            value = check_float(where + field, value, RequestError, above=0.0, high=1.0)
            if owner != name:
                raise RequestError(
                    f"{where}{field} = {value}: a parameter of acceptance = {owner!r}, this "
                    f"request has {name!r}; set acceptance = {owner!r} or remove {field}"
                )
        elif owner == name:
            value = default
            if value is None:
                raise RequestError(
                    f"{where}{field} is not set: acceptance = {owner!r} needs it; give a number "
                    "in (0, 1], for example 0.3"
                )
        checked[field] = value
    return checked

"""What the sources of drafts are called, by the number that a step's outputs say."""

from __future__ import annotations

from .. import _core
from ..config.parse import SpeculativeConfig
from ..config.sources import method_of

__all__ = ["source_names"]

# Where an engine without a method verifies drafts that nobody names.
_PLAIN = "request"


def source_names(config: SpeculativeConfig | None) -> tuple[tuple[str, ...], str]:
    """(names by StepOutput's numbers, the name of drafts that a device made by itself).

    The engine's network goes by its method's name.
    """
    method = method_of(config)
    own = _PLAIN if method is None else method.method
    network = own if own not in _core.DRAFT_SOURCES else "model"
    names = tuple(network if name == "model" else name for name in _core.DRAFT_SOURCES)
    return names, own

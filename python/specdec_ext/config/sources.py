"""Configurations of several sources in one step, and of "auto"; checked without torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from ..errors import ConfigError, UnsupportedConfigError
from .base import OPTION_NAMES, SpeculationOptions
from .limits import MAX_DRAFT_LEN
from .lookahead import LookaheadDecodingConfig
from .methods import (
    DrafterConfig,
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    UserDrafterConfig,
)
from .suffix import SuffixDecodingConfig
from .validate import check_bool, check_int, show

__all__ = ["AutoDecodingConfig", "CompositeDecodingConfig", "Source", "method_of"]

Source: TypeAlias = SuffixDecodingConfig | LookaheadDecodingConfig | DrafterConfig

_PAIRS = "suffix decoding and one of Medusa, ReDrafter, EAGLE-3, a draft model and lookahead"


@dataclass(frozen=True)
class CompositeDecodingConfig(SpeculationOptions):
    """Two sources draft for a step: suffix decoding, and one method that costs more.

    sources   a SuffixDecodingConfig and a MedusaDecodingConfig, ReDrafterDecodingConfig,
              Eagle3DecodingConfig, DraftTargetDecodingConfig or LookaheadDecodingConfig, in any
              order
    adaptive  True: the draft budget takes the drafts that pay and asks the second source only where
              the first promises less. False, also if a source says so: both draft all they can

    and the options of every method (SpeculationOptions), which are given here and not in a source.
    A draft model and an EAGLE-3 head propose their likeliest tokens (use_draft_logits=False),
    because drafts that are drawn cannot share a tree with others.
    """

    method: ClassVar[str] = "composite"

    sources: tuple[Source, ...] = ()
    adaptive: bool = True

    def __post_init__(self) -> None:
        where = "CompositeDecodingConfig."
        check_bool(where + "adaptive", self.adaptive, ConfigError)
        sources = tuple(self.sources)
        suffix = [s for s in sources if isinstance(s, SuffixDecodingConfig)]
        others = [s for s in sources if not isinstance(s, SuffixDecodingConfig)]
        if len(suffix) != 1 or len(others) != 1 or not _can_follow(others[0]):
            names = ", ".join(getattr(s, "method", type(s).__name__) for s in sources)
            raise UnsupportedConfigError(
                f"{where}sources = [{names}]: a step takes drafts of {_PAIRS}; name these two"
            )
        for source in sources:
            for name in OPTION_NAMES:
                if getattr(source, name) is not None:
                    raise ConfigError(
                        f"{where}sources: {source.method} sets {name} = "
                        f"{show(getattr(source, name))}, an option of the whole; pass it to "
                        "CompositeDecodingConfig"
                    )
        adaptive = self.adaptive and all(s.adaptive for s in sources)
        self._set(
            adaptive=adaptive,
            sources=tuple(_as_source(s, adaptive) for s in (*suffix, *others)),
        )
        self._check_options()

    @property
    def suffix(self) -> SuffixDecodingConfig:
        suffix = self.sources[0]
        assert isinstance(suffix, SuffixDecodingConfig)
        return suffix

    @property
    def drafter(self) -> LookaheadDecodingConfig | DrafterConfig:
        """The second source, asked where suffix decoding promises less."""
        drafter = self.sources[1]
        assert not isinstance(drafter, SuffixDecodingConfig)
        return drafter

    @property
    def max_draft_len(self) -> int:
        """The most draft tokens of one step."""
        return min(sum(source.max_draft_len for source in self.sources), MAX_DRAFT_LEN)

    @property
    def max_draft_path_len(self) -> int:
        """Drafts on one root-to-leaf path: the most that one step can accept."""
        return max(source.max_draft_path_len for source in self.sources)

    @property
    def deepest_draft(self) -> int:
        """Levels of the tree of a step, at most."""
        return max(source.deepest_draft for source in self.sources)

    def with_drafter(self, drafter: DrafterConfig) -> CompositeDecodingConfig:
        """A copy with a completed configuration of its drafter."""
        return dataclasses.replace(self, sources=(self.suffix, drafter))

    def to_dict(self) -> dict[str, object]:
        """The sources as a list of dicts, and the options that are set."""
        return {**super().to_dict(), "sources": [source.to_dict() for source in self.sources]}


@dataclass(frozen=True)
class AutoDecodingConfig(SpeculationOptions):
    """The default: suffix decoding, and the drafter that is shipped for the model if there is one.

    max_draft_len  the most drafts of suffix decoding in a step, 1..127
    adaptive       True: the draft budget takes the drafts that pay; False: all are verified

    and the options of every method (SpeculationOptions). An engine replaces it by a
    SuffixDecodingConfig or a CompositeDecodingConfig (with_drafter).
    """

    method: ClassVar[str] = "auto"

    max_draft_len: int = SuffixDecodingConfig.max_draft_len
    adaptive: bool = True

    def __post_init__(self) -> None:
        where = "AutoDecodingConfig."
        length = check_int(
            where + "max_draft_len", self.max_draft_len, ConfigError, low=1, high=MAX_DRAFT_LEN
        )
        self._set(max_draft_len=length)
        check_bool(where + "adaptive", self.adaptive, ConfigError)
        self._check_options()

    @property
    def max_draft_path_len(self) -> int:
        """Drafts on one root-to-leaf path that suffix decoding makes."""
        return min(self.max_draft_len, SuffixDecodingConfig.max_tree_depth)

    def with_drafter(
        self, drafter: DrafterConfig | None
    ) -> SuffixDecodingConfig | CompositeDecodingConfig:
        """The configuration for a model for which `drafter` is shipped; None: none is."""
        options: dict[str, Any] = {name: getattr(self, name) for name in OPTION_NAMES}
        if drafter is None:
            return SuffixDecodingConfig(
                max_draft_len=self.max_draft_len, adaptive=self.adaptive, **options
            )
        suffix = SuffixDecodingConfig(max_draft_len=self.max_draft_len)
        return CompositeDecodingConfig(sources=(suffix, drafter), adaptive=self.adaptive, **options)


def _can_follow(source: Any) -> bool:
    if isinstance(source, LookaheadDecodingConfig):
        return not source.is_plain
    return isinstance(source, DrafterConfig) and not isinstance(source, UserDrafterConfig)


def _as_source(source: Any, adaptive: bool) -> Source:
    changes: dict[str, Any] = {"adaptive": adaptive} if source.adaptive != adaptive else {}
    draws = (DraftTargetDecodingConfig, Eagle3DecodingConfig)
    if isinstance(source, draws) and source.use_draft_logits:
        changes["use_draft_logits"] = False
    result: Source = dataclasses.replace(source, **changes) if changes else source
    return result


def method_of(config: Any) -> Any:
    """The configuration of the source besides suffix decoding; a single method is returned."""
    return config.drafter if isinstance(config, CompositeDecodingConfig) else config

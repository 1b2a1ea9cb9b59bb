"""A drafter that the user has written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ConfigError
from .drafter import DrafterConfig
from .limits import MAX_DRAFT_LEN
from .validate import check_bool, check_int, show

__all__ = ["UserDrafterConfig"]


@dataclass(frozen=True)
class UserDrafterConfig(DrafterConfig):
    """Drafts from an object of the user's: `drafter.propose(history, budget)`.

    drafter        has `propose(history, budget) -> tokens | (tokens, parents) |
                   (tokens, parents, probs)`; history: the request's tokens, list[int]; budget: the
                   most drafts that will be verified; parents[i] < i or -1 for the last token of
                   history (None: a chain); probs [n, V]: what the drafts were drawn from (None:
                   they were chosen without chance); or a drafters.Proposal. Nothing it
                   does can change greedy output, and only probs that are not true can change the
                   law of sampled output: drafts from the first one on that is not usable are
                   dropped, what it raises is counted, and the step continues
                   (docs/methods/own_drafter.md).
    max_draft_len  drafts of one step, 1..127
    adaptive       accepted for uniformity; a user's drafter decides its own lengths
    """

    method: ClassVar[str] = "user_provided"
    words: ClassVar[str] = "a user's drafter"

    drafter: Any = None
    max_draft_len: int = 16
    adaptive: bool = True

    def __post_init__(self) -> None:
        where = "UserDrafterConfig."
        if not callable(getattr(self.drafter, "propose", None)):
            raise ConfigError(
                f"{where}drafter = {show(self.drafter)}: expected an object with "
                "propose(history, budget)"
            )
        length = check_int(where + "max_draft_len", self.max_draft_len, ConfigError,
                           low=1, high=MAX_DRAFT_LEN)  # fmt: skip
        self._set(max_draft_len=length)
        check_bool(where + "adaptive", self.adaptive, ConfigError)
        self._check_options()

    @property
    def max_draft_path_len(self) -> int:
        """The most that one step can accept."""
        return self.max_draft_len

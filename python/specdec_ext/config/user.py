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
    """Drafts from an object that you write (docs/methods/own_drafter.md).

    drafter        has `propose(history, budget)`, which returns tokens, (tokens, parents),
                   (tokens, parents, probs) or a drafters.Proposal.
                     history  the request's tokens, list[int]
                     budget   the most drafts that will be verified
                     parents  parents[i] < i, or -1 for the last token of history; None: a chain
                     probs    float32 [n, V], the distributions that the drafts were drawn from;
                              None: they were chosen, not drawn
                   A drafter cannot change greedy output, and only untrue probs can change the
                   distribution of sampled output. The first unusable draft and all after it are
                   dropped; if propose raises, that is counted and the step continues
    max_draft_len  the most drafts of a step, 1..127
    adaptive       accepted, without effect: the drafter decides its own lengths
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

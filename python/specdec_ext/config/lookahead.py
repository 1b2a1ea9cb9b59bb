"""Lookahead's configuration, and the step tokens that a triple (W,N,G) takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import ConfigError
from .base import SpeculationOptions
from .limits import MAX_DRAFT_LEN, MAX_STEP_TOKENS
from .validate import check_bool, check_int

__all__ = ["LookaheadDecodingConfig", "max_draft_len"]


def _check_triple(window_size: object, ngram_size: object, verification_set_size: object) -> None:
    where = "LookaheadDecodingConfig."
    w = check_int(where + "max_window_size", window_size, ConfigError, low=1)
    n = check_int(where + "max_ngram_size", ngram_size, ConfigError, low=1)
    g = check_int(where + "max_verification_set_size", verification_set_size, ConfigError, low=0)
    if n == 1 and (w, g) != (1, 0):
        raise ConfigError(
            f"{where}max_ngram_size = 1 with (W,N,G) = ({w},1,{g}): an n-gram of one token leaves "
            "nothing to look ahead; use (1,1,0) for plain decoding or max_ngram_size >= 2"
        )


def max_draft_len(window_size: int, ngram_size: int, verification_set_size: int) -> int:
    """The most draft tokens that lookahead (W,N,G) verifies in one step.

    D = (0 if N == 1 else N - 2) + (W - 1 + G) * (N - 1); the step has D + 1 tokens.
    (7,7,7) -> 83, (4,3,4) -> 15, (2,2,1) -> 2, (1,1,0) -> 0. The result may exceed MAX_DRAFT_LEN,
    so that a refusal can name it.

    Raises ConfigError for W < 1, N < 1, G < 0, or N == 1 with (W,G) != (1,0).
    Source: TensorRT-LLM, LookaheadDecodingConfig::calculateSpeculativeResource.
    """
    _check_triple(window_size, ngram_size, verification_set_size)
    w, n, g = int(window_size), int(ngram_size), int(verification_set_size)
    return (0 if n == 1 else n - 2) + (w - 1 + g) * (n - 1)


@dataclass(frozen=True)
class LookaheadDecodingConfig(SpeculationOptions):
    """Lookahead decoding with window W, n-gram size N and verification set G.

    max_window_size            W >= 1, Jacobi columns
    max_ngram_size             N >= 1, tokens of a guess, including the one already decided
    max_verification_set_size  G >= 0, the most guesses verified in a step
    adaptive                   True: the draft budget shrinks (w,n,g) within the triple; False: it
                               is fixed

    and the options of every method (SpeculationOptions).

    As an engine's configuration the triple is an upper bound for every request. (1,1,0) is plain
    decoding. Raises ConfigError for an invalid triple or more than 128 step tokens.
    """

    method: ClassVar[str] = "lookahead"

    max_window_size: int = 4
    max_ngram_size: int = 3
    max_verification_set_size: int = 4
    adaptive: bool = True

    def __post_init__(self) -> None:
        w, n, g = self.max_window_size, self.max_ngram_size, self.max_verification_set_size
        draft_len = max_draft_len(w, n, g)
        self._set(
            max_window_size=int(w),
            max_ngram_size=int(n),
            max_verification_set_size=int(g),
            adaptive=check_bool("LookaheadDecodingConfig.adaptive", self.adaptive, ConfigError),
        )
        if draft_len > MAX_DRAFT_LEN:
            raise ConfigError(
                f"LookaheadDecodingConfig (W,N,G) = ({w},{n},{g}) needs max_draft_len = "
                f"{draft_len} ({draft_len + 1} step tokens), limit {MAX_DRAFT_LEN} "
                f"({MAX_STEP_TOKENS} step tokens); make the window, n-gram size or "
                "verification set smaller, for example (7,7,7) needs 83"
            )
        self._check_options()

    @property
    def triple(self) -> tuple[int, int, int]:
        """(W, N, G)."""
        return self.max_window_size, self.max_ngram_size, self.max_verification_set_size

    @property
    def max_draft_len(self) -> int:
        """Draft tokens of one step, at most."""
        return max_draft_len(*self.triple)

    @property
    def max_draft_path_len(self) -> int:
        """Drafts on one root-to-leaf path: the most that one step can accept."""
        return self.max_ngram_size - 1

    @property
    def deepest_draft(self) -> int:
        """Levels of the tree of a step: the last window row hangs under the rows above it."""
        w, n, g = self.triple
        window, guess = w + n - 3, n - 1 if g else 0
        return 0 if n == 1 else max(window, guess)

    @property
    def is_plain(self) -> bool:
        return self.triple == (1, 1, 0)

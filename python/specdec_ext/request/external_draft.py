"""Drafts that come with a request, as TensorRT-LLM's ExternalDraftTokensConfig.

Like all configuration this module works without torch: logits are anything with a two-dimensional
`shape` (a torch tensor, a NumPy array) or a list of rows, and stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.base import Spelled
from ..config.limits import MAX_DRAFT_LEN
from ..config.validate import check_bool, check_float, check_int, show
from ..errors import RequestError
from .sampling_lists import MAX_TOKEN_ID

__all__ = ["ExternalDraftTokensConfig"]


def _logits_shape(logits: Any) -> tuple[int, int]:
    """(rows, columns) of something two-dimensional."""
    name = "ExternalDraftTokensConfig.logits"
    shape = getattr(logits, "shape", None)
    if shape is None and isinstance(logits, Sequence) and not isinstance(logits, (str, bytes)):
        widths = {len(row) if isinstance(row, Sequence) else -1 for row in logits}
        if len(widths) == 1 and -1 not in widths:
            shape = (len(logits), widths.pop())
    if shape is None or len(shape) != 2:
        got = show(logits) if shape is None else f"a tensor of shape {tuple(shape)}"
        raise RequestError(
            f"{name} = {got}: expected one row of scores per draft, [number of drafts, vocabulary]"
        )
    return int(shape[0]), int(shape[1])


@dataclass(frozen=True)
class ExternalDraftTokensConfig(metaclass=Spelled):
    """A chain of drafts for the text right after the prompt; verified in the prompt's last pass.

    tokens                1..127 token ids, the first one follows the prompt's last token
    logits                [len(tokens), vocabulary]: the scores whose softmax each token was drawn
                          from. Without them a draft is kept if it equals the model's own choice
    acceptance_threshold  in (0, 1], needs logits: keep a draft if p / q is at least this, instead
                          of by chance. LOSSY: the output no longer has the model's law
    continue_decoding     after that pass decode on to max_tokens (go_on is an accepted spelling).
                          False, as in TensorRT-LLM: the request ends with it, finish reason
                          "length", 1 to len(tokens) + 1 tokens

    Raises RequestError naming field, value, limit and remedy.
    """

    tokens: Sequence[int]
    logits: Any = field(default=None, repr=False, compare=False)
    acceptance_threshold: float | None = None
    continue_decoding: bool = False

    @classmethod
    def _respell(cls, given: dict[str, Any]) -> dict[str, Any]:
        if "go_on" in given:
            if "continue_decoding" in given:
                raise RequestError(
                    "ExternalDraftTokensConfig: continue_decoding and go_on are two names of one "
                    "switch; give one of them"
                )
            given["continue_decoding"] = given.pop("go_on")
        return given

    def __post_init__(self) -> None:
        where = "ExternalDraftTokensConfig."
        tokens: Any = self.tokens
        if hasattr(tokens, "tolist"):
            tokens = tokens.tolist()
        if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Sequence):
            raise RequestError(
                f"{where}tokens = {show(self.tokens)}: expected a list of token ids, got "
                f"{type(self.tokens).__name__}"
            )
        if not 1 <= len(tokens) <= MAX_DRAFT_LEN:
            raise RequestError(
                f"{where}tokens has {len(tokens)} drafts: give 1..{MAX_DRAFT_LEN}; without drafts "
                "leave external_draft out"
            )
        ids = tuple(
            check_int(f"{where}tokens[{i}]", token, RequestError, low=0, high=MAX_TOKEN_ID,
                      remedy="token ids are integers >= 0")
            for i, token in enumerate(tokens)
        )  # fmt: skip
        object.__setattr__(self, "tokens", ids)
        check_bool(where + "continue_decoding", self.continue_decoding, RequestError)
        if self.logits is not None:
            rows, _ = _logits_shape(self.logits)
            if rows != len(ids):
                raise RequestError(
                    f"{where}logits has {rows} rows for {len(ids)} drafts: give one row per draft"
                )
        if self.acceptance_threshold is not None:
            threshold = check_float(
                where + "acceptance_threshold", self.acceptance_threshold, RequestError,
                above=0.0, high=1.0,
            )  # fmt: skip
            object.__setattr__(self, "acceptance_threshold", threshold)
            if self.logits is None:
                raise RequestError(
                    f"{where}acceptance_threshold = {threshold} without logits: it is compared "
                    "with p / q, and q comes from the draft's logits; pass logits or leave it None"
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError for an id or a row width that is not the model's."""
        where = "ExternalDraftTokensConfig."
        for i, token in enumerate(self.tokens):
            check_int(f"{where}tokens[{i}]", token, RequestError, low=0, high=vocab_size - 1,
                      remedy=f"the model's vocabulary has {vocab_size} tokens")  # fmt: skip
        if self.logits is not None:
            _, columns = _logits_shape(self.logits)
            if columns != vocab_size:
                raise RequestError(
                    f"{where}logits has {columns} columns, the model's vocabulary has {vocab_size} "
                    "tokens: draft and target must share their vocabulary"
                )

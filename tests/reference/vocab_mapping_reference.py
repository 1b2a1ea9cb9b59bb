"""Drafts across vocabularies (TLI) by the book: dictionaries, float64. Shares no code with python/.

A vocabulary is written down as a list of Tok: what a token is, not how a tokenizer spells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tok:
    """text     its bytes; empty: it is no text
    special  its name, if it is a special token
    is_byte  it spells one byte that its vocabulary may have as text, too: <0x41>
    """

    text: bytes = b""
    special: str = ""
    is_byte: bool = False


@dataclass(frozen=True)
class Ends:
    """Which tokens begin and end a text, and which one pads."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


def chosen(vocabulary: Sequence[Tok], text: bytes) -> int | None:
    """The id that a tokenizer writes for a text: the first that is no byte token."""
    if not text:
        return None
    for bytes_too in (False, True):
        for token, tok in enumerate(vocabulary):
            if tok.text == text and (bytes_too or not tok.is_byte):
                return token
    return None


def pairs(
    target: Sequence[Tok], draft: Sequence[Tok], target_ends: Ends, draft_ends: Ends
) -> dict[int, int]:
    """The target's id -> the draft model's, of tokens that may be drafted."""
    result: dict[int, int] = {}
    for mine, tok in enumerate(target):
        other = None
        if tok.special:
            same = [o for o, t in enumerate(draft) if t.special == tok.special]
            other = same[0] if same else None
        elif tok.text and chosen(target, tok.text) == mine:
            other = chosen(draft, tok.text)
        if other is not None:
            result[mine] = other
    roles = [(target_ends.bos, draft_ends.bos)]
    roles += list(zip(target_ends.eos, draft_ends.eos, strict=False))
    for begin, end in roles:
        if begin is None or end is None or begin in result or end in set(result.values()):
            continue
        result[begin] = end
    return result


def overlap(target: Sequence[Tok], draft: Sequence[Tok]) -> float:
    """The share of the smaller set of texts that is in the other."""
    ours = {tok.text for tok in target if tok.text}
    theirs = {tok.text for tok in draft if tok.text}
    return len(ours & theirs) / min(len(ours), len(theirs))


def reads(
    target: Sequence[Tok],
    draft: Sequence[Tok],
    target_ends: Ends,
    draft_ends: Ends,
    token: int,
) -> int:
    """The one token that the draft model reads for one of the target's."""
    paired = pairs(target, draft, target_ends, draft_ends)
    if token in paired:
        return paired[token]
    text = target[token].text
    while text:
        found = chosen(draft, text)
        if found is not None:
            return found
        text = text[1:]
    if token in target_ends.eos and draft_ends.eos and not target[token].text:
        return draft_ends.eos[0]
    for stand_in in (draft_ends.pad, *draft_ends.eos, draft_ends.bos):
        if stand_in is not None:
            return stand_in
    return 0


def draft_law(
    scores: np.ndarray, paired: dict[int, int], size: int, temperature: float
) -> np.ndarray:
    """q over the target's `size` tokens, from the draft model's scores over its own vocabulary."""
    masked = np.full(len(scores), -np.inf)
    for other in paired.values():
        masked[other] = np.float64(scores[other]) / temperature
    weights = np.exp(masked - masked.max())
    weights /= weights.sum()
    q = np.zeros(size)
    for mine, other in paired.items():
        q[mine] = weights[other]
    return q


def output_law(p: np.ndarray, q: np.ndarray, told: np.ndarray) -> np.ndarray:
    """The exact law of a token that rejection sampling delivers: a draft d of the law q is kept
    with min(1, p / told), else one is drawn of max(0, p - told). `told` is what the sampler takes
    for q."""
    kept = np.array([min(1.0, p[d] / told[d]) if told[d] > 0 else 1.0 for d in range(len(p))])
    rest = np.maximum(p - told, 0.0)
    result = q * kept
    if rest.sum() > 0:
        result = result + (1.0 - result.sum()) * rest / rest.sum()
    return result

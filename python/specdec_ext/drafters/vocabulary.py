"""Do a target and a draft model mean the same tokens by the same ids?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .shared_tokens import SharedTokens, stand_in

__all__ = ["VocabularyMap", "map_vocabulary"]


@dataclass(frozen=True)
class VocabularyMap:
    """How a draft model's ids relate to the target's.

    num_scores  leading columns of the draft model's scores that may become drafts
    input_ids   [V of the target] what the draft model reads for an id; empty: the id itself
    output_ids  [num_scores] ascending: the tokens of these columns; empty: the columns' numbers
    overlap     share of the smaller vocabulary that the other one has, too; None: they are one
    """

    num_scores: int
    input_ids: list[int]
    output_ids: list[int]
    overlap: float | None = None


def map_vocabulary(
    target: Any,
    draft: Any,
    target_tokenizer: Any,
    draft_tokenizer: Any,
    shared: SharedTokens | None = None,
) -> VocabularyMap:
    """Compare two StepModels' vocabularies by content and relate them.

    The tokenizers' words are compared id by id; one may have ids that the other lacks after its
    last one, as padding and added special tokens make them. Without both tokenizers the sizes have
    to be equal. Raises ConfigError with both sizes and the first token that differs.

    shared  what tokenizers that are not the same have in common; the draft model's head scores
            these tokens, in this order
    """
    if shared is not None:
        return _mapped(target, draft, shared)
    sizes = (target.vocab_size, draft.vocab_size)
    if target_tokenizer is not None and draft_tokenizer is not None:
        _compare(target_tokenizer, draft_tokenizer, sizes, draft.info.path)
    elif sizes[0] != sizes[1]:
        missing = "target" if target_tokenizer is None else "draft model"
        raise ConfigError(
            f"draft model {str(draft.info.path)!r}: its vocabulary has {sizes[1]} tokens, "
            f"the target's {sizes[0]}, and without a tokenizer of the {missing} nobody can say "
            "that only padding differs; put the tokenizer's files into the folder"
        )
    input_ids: list[int] = []
    if draft.vocab_size < target.vocab_size:
        # Ids that the draft model does not know: it reads something else, and guesses on.
        tail = target.vocab_size - draft.vocab_size
        input_ids = [*range(draft.vocab_size), *[stand_in(draft.info)] * tail]
    head_ids = getattr(draft, "head_ids", None)
    if head_ids is None:
        return VocabularyMap(min(sizes), input_ids, [])
    output_ids = [token for token in head_ids.tolist() if token < target.vocab_size]
    return VocabularyMap(len(output_ids), input_ids, output_ids)


def _mapped(target: Any, draft: Any, shared: SharedTokens) -> VocabularyMap:
    target_of = dict(zip(shared.draft_ids.tolist(), shared.target_ids.tolist(), strict=True))
    # Fewer where the draft model's own head scores a part of its vocabulary.
    output_ids = [target_of[token] for token in draft.head_ids.tolist()]
    output_ids = [token for token in output_ids if token < target.vocab_size]
    padding = target.vocab_size - len(shared.input_ids)
    input_ids = shared.input_ids.tolist()[: target.vocab_size] + [stand_in(draft.info)] * padding
    return VocabularyMap(len(output_ids), input_ids, output_ids, shared.overlap)


def _compare(target: Any, draft: Any, sizes: tuple[int, int], path: Path) -> None:
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    mine = {token_id: word for word, token_id in ours.items()}
    other = {token_id: word for word, token_id in theirs.items()}
    # Behind its last id a vocabulary says nothing: padding.
    common = min(max(mine, default=-1), max(other, default=-1))
    for token_id in range(common + 1):
        if mine.get(token_id) != other.get(token_id):
            raise ConfigError(
                f"draft model {str(path)!r}: its vocabulary is not the target's. Sizes: "
                f"target {sizes[0]} ({len(mine)} words), draft {sizes[1]} ({len(other)} words); "
                f"first difference at id {token_id}: target {mine.get(token_id)!r}, draft "
                f"{other.get(token_id)!r}; use a draft model with the target's tokenizer, or "
                "allow_vocab_mapping=True to draft the tokens that both have"
            )

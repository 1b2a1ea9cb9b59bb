"""A draft model whose head scores only part of the vocabulary.

Besides the usual files such a folder has `draft_vocab.safetensors` with one tensor, `token_ids`
int32 [V']: row i of `lm_head.weight` [V', hidden] scores token token_ids[i]. The embedding has the
whole vocabulary. With tied embeddings there is no `lm_head.weight`: the head is the embedding's
rows token_ids. Tokens that are not listed are never drafted.

An engine may ask for a part of the tokens, too: a drafter for a target with another vocabulary
scores what both have.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ModelError

__all__ = ["DRAFT_VOCAB_FILE", "ScoredRows", "read_draft_vocab", "scored_rows"]

DRAFT_VOCAB_FILE = "draft_vocab.safetensors"


def read_draft_vocab(folder: Path, vocab_size: int) -> np.ndarray | None:
    """int64 token ids [V'] of the head's rows; None if the folder has no such file.

    Raises ModelError for a file that is damaged or does not fit `vocab_size`.
    """
    path = folder / DRAFT_VOCAB_FILE
    if not path.is_file():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            if names != ["token_ids"]:
                raise ModelError(f"{path}: holds {names}, expected the one tensor 'token_ids'")
            ids = file.get_tensor("token_ids")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    if ids.dtype not in (np.int32, np.int64) or ids.ndim != 1 or ids.size == 0:
        raise ModelError(
            f"{path}: token_ids is {ids.dtype} {list(ids.shape)}, expected int32 [V'] with V' >= 1"
        )
    ids = ids.astype(np.int64)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ModelError(
            f"{path}: token_ids holds {low if low < 0 else high}, the model's ids are "
            f"0..{vocab_size - 1}"
        )
    if len(np.unique(ids)) != len(ids):
        raise ModelError(f"{path}: token_ids holds an id twice; each row needs a different token")
    result: np.ndarray = ids
    return result


@dataclass(frozen=True)
class ScoredRows:
    """The rows of a head that scores a part of the vocabulary, in the order of its scores.

    token_ids   int64 [V'] the token of each score: the embedding's rows where the two are tied
    places      int64 [V'] its row in the file's lm_head.weight
    file_rows   rows that lm_head.weight has
    """

    token_ids: np.ndarray
    places: np.ndarray
    file_rows: int


def scored_rows(
    path: Path, vocab_size: int, of_file: np.ndarray | None, wanted: np.ndarray | None
) -> ScoredRows | None:
    """None: all tokens, as they are.

    of_file  read_draft_vocab(): the tokens of the file's rows; None: all
    wanted   int64 of distinct tokens, in the order that their scores are to have; None: those of
             the file in ascending order. What the file does not have is left out

    Raises ModelError where nothing is left to score.
    """
    if wanted is None:
        if of_file is None:
            return None
        order = of_file.argsort()
        return ScoredRows(of_file[order], order, len(of_file))
    place_of = np.full(vocab_size, -1, dtype=np.int64)
    tokens = np.arange(vocab_size) if of_file is None else of_file
    place_of[tokens] = np.arange(len(tokens))
    kept = wanted[place_of[wanted] >= 0]
    if not len(kept):
        raise ModelError(
            f"{path}: {DRAFT_VOCAB_FILE} lists none of the {len(wanted)} tokens that are asked "
            "for; use a draft model whose head scores its whole vocabulary"
        )
    return ScoredRows(kept, place_of[kept], len(tokens))

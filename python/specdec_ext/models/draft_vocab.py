"""A draft model whose head scores only part of the vocabulary.

Besides the usual files such a folder has `draft_vocab.safetensors` with one tensor, `token_ids`
int32 [V']: row i of `lm_head.weight` [V', hidden] scores token token_ids[i]. The embedding has the
whole vocabulary. With tied embeddings there is no `lm_head.weight`: the head is the embedding's
rows token_ids. Tokens that are not listed are never drafted.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import ModelError

__all__ = ["DRAFT_VOCAB_FILE", "read_draft_vocab"]

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

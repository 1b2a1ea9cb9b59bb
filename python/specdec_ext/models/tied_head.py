"""Do a checkpoint's embeddings serve as its head, as its configuration says?

Some checkpoints state tie_word_embeddings and hold a head that was trained apart. transformers ties
the two only where they are equal, and so does this package: everything else goes by the
configuration that read_config() gives, which says so.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..log import logger
from .host_arrays import HostArray, converted, dtype_name, row_slice
from .safetensors_file import FLOATS, SafetensorsFile

__all__ = ["EMBEDDING", "HEAD", "are_equal", "has_own_head"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_QUANTISED_HEADS = ("lm_head.qweight", "lm_head.weight_packed")
_FLOATS = ("float32", "bfloat16", "float16")
_PART_ELEMENTS = 1 << 22


def has_own_head(folder: Path) -> bool:
    """The safetensors files of a folder hold a head that is not their embeddings. False for files
    that cannot be read: whoever opens the checkpoint says what is wrong."""
    try:
        files = _files(folder)
        heads = [name for name in (HEAD, *_QUANTISED_HEADS) if name in files]
        if not heads or EMBEDDING not in files:
            return False
        if heads[0] != HEAD:
            return True
        paths = files[EMBEDDING], files[HEAD]
        stamps = tuple((stat.st_mtime_ns, stat.st_size) for stat in (p.stat() for p in paths))
        return _differ(*paths, stamps)
    except Exception:  # every kind of damaged file
        return False


def are_equal(a: HostArray, b: HostArray) -> bool:
    """The same numbers in two matrices, whatever float type they are in."""
    if a.shape != b.shape:
        return False
    kinds = {dtype_name(a), dtype_name(b)}
    if len(kinds) > 1 and not kinds <= set(_FLOATS):
        return False
    step = max(1, _PART_ELEMENTS // max(1, a.shape[1]))
    for first in range(0, a.shape[0], step):
        parts = [row_slice(tensor, slice(first, first + step)) for tensor in (a, b)]
        if len(kinds) > 1:
            parts = [converted(part, "float32") for part in parts]
        bits: list[Any] = [getattr(part, "bits", part) for part in parts]
        if not np.array_equal(*bits):
            return False
    return True


def _files(folder: Path) -> dict[str, Path]:
    """Tensor -> its file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    if not single.is_file():
        return {}
    return dict.fromkeys(SafetensorsFile(single).names, single)


@functools.lru_cache(maxsize=64)
def _differ(embedding: Path, head: Path, stamps: tuple[tuple[int, int], ...]) -> bool:
    """stamps  of the files: others are compared anew"""
    del stamps
    table, own = SafetensorsFile(embedding), SafetensorsFile(head)
    if table.about(EMBEDDING)[0] != own.about(HEAD)[0] and not all(
        FLOATS.get(file.about(name)[0]) in _FLOATS
        for file, name in ((table, EMBEDDING), (own, HEAD))
    ):
        return True
    if are_equal(table.tensor(EMBEDDING), own.tensor(HEAD)):
        return False
    logger.warning(
        "%s: tie_word_embeddings is true, and %s is not %s: it is used as the head of its own "
        "that it is", head, HEAD, EMBEDDING,
    )  # fmt: skip
    return True

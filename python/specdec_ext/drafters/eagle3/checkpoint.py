"""EAGLE-3 heads without torch: their tensors, checked against config.json and the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...config.eagle3 import Eagle3DecodingConfig
from ...errors import ModelError
from ...models.host_arrays import HostArray, dtype_name, take_rows
from ...models.weights import Checkpoint
from ..shipped import folder_of
from .shape import Eagle3Shape, read_eagle3_shape

__all__ = ["EMBEDDING", "Eagle3Weights", "check_target", "read_eagle3", "taps_of"]

EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_OFFSETS = "d2t"
# The other direction of d2t, and what `speculators` copies of the target for training.
_IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
# The first part of a name in the layout of `speculators`, and in SpecForge's.
_LAYER = ("layers.0.", "midlayer.")


@dataclass(frozen=True)
class Eagle3Weights:
    """A head as it is on disk: every tensor is there, fits and is finite.

    tensors    by the names of shape.expected_weights(), floats of any width
    token_ids  int32 [draft_vocab_size], increasing: the target's token of each row of lm_head
    embedding  [vocab_size, hidden_size]; None: the target's
    """

    shape: Eagle3Shape
    tensors: Mapping[str, HostArray]
    token_ids: np.ndarray
    embedding: HostArray | None = None


def read_eagle3(folder: str | Path, *, allow_pickle: bool = False) -> Eagle3Weights:
    """The head of a folder.

    Raises ModelError naming the file, the field or tensor, and what was expected: for a damaged or
    foreign configuration, missing, extra or misshapen tensors, a d2t that names no tokens, pickle
    files (unless allowed, then read with weights_only=True), values that are not finite.
    """
    folder = Path(folder).expanduser()
    shape = read_eagle3_shape(folder)
    expected = shape.expected_weights()
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        names = _canonical_names(checkpoint)
        entries = {name: checkpoint.entries[found] for name, found in names.items()}
        if EMBEDDING in names:
            expected[EMBEDDING] = (shape.vocab_size, shape.hidden_size)
        ignored = [names[name] for name in (*_IGNORED, _OFFSETS) if name in names]
        checkpoint.check(
            {names.get(name, name): extents for name, extents in expected.items()},
            ignored=ignored,
            ignored_suffixes=_IGNORED_SUFFIXES,
        )
        order, ids = None, np.arange(shape.draft_vocab_size, dtype=np.int32)
        if _OFFSETS in entries:
            offsets = checkpoint.read(names[_OFFSETS])
            order, ids = _token_ids(offsets, shape, str(entries[_OFFSETS].file))
        elif shape.draft_vocab_size != shape.vocab_size:
            raise ModelError(
                f"{folder}: tensor {_OFFSETS!r} [{shape.draft_vocab_size}] is missing; the head "
                f"scores {shape.draft_vocab_size} of {shape.vocab_size} tokens, and it must say "
                "which"
            )
        tensors = {name: checkpoint.load(names[name]) for name in expected}
        if checkpoint.warnings:
            raise ModelError(
                f"{folder / checkpoint.warnings[0].split('; ')[0]}; the head would propose nothing "
                "of use, so it is refused: train or copy it again"
            )
    if order is not None:
        tensors[_HEAD] = take_rows(tensors[_HEAD], order)
    return Eagle3Weights(shape, tensors, ids, tensors.pop(EMBEDDING, None))


def check_target(
    weights: Eagle3Weights, *, hidden_size: int, vocab_size: int, num_layers: int
) -> tuple[int, ...]:
    """The taps of a target of these sizes. Raises ModelError where the head is of another one."""
    shape = weights.shape
    for name, ours, theirs in (
        ("hidden_size", shape.target_hidden_size, hidden_size),
        ("vocab_size", shape.vocab_size, vocab_size),
    ):
        if ours != theirs:
            raise ModelError(
                f"eagle3: the head was trained for {name} = {ours}, the target has {theirs}; give "
                "the head of this target"
            )
    if weights.embedding is None and shape.hidden_size != hidden_size:
        raise ModelError(
            f"eagle3: tensor {EMBEDDING!r} [{shape.vocab_size}, {shape.hidden_size}] is missing; "
            f"the target's embeddings have hidden_size = {hidden_size} and do not fit the head's "
            f"{shape.hidden_size}"
        )
    return shape.target_taps(num_layers)


def taps_of(config: Eagle3DecodingConfig, weights: Eagle3Weights, model: Any) -> tuple[int, ...]:
    """check_target() of a model, or of its configuration; errors name the head's folder."""
    try:
        return check_target(
            weights,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            num_layers=model.num_layers,
        )
    except ModelError as error:
        raise type(error)(f"{folder_of(config)}: {error}") from None


def _canonical_names(checkpoint: Checkpoint) -> dict[str, str]:
    """SpecForge's name -> the name in the file."""
    names: dict[str, str] = {}
    theirs, ours = _LAYER
    for found in checkpoint.entries:
        name = ours + found.removeprefix(theirs) if found.startswith(theirs) else found
        if name in names:
            raise ModelError(
                f"{checkpoint.entries[found].file}: tensors {names[name]!r} and {found!r} are two "
                "spellings of the same weight; keep one"
            )
        names[name] = found
    return names


def _token_ids(
    offsets: Any, shape: Eagle3Shape, where: str
) -> tuple[np.ndarray | None, np.ndarray]:
    """(rows of lm_head in the order of their tokens, None: they are; these tokens). A row's token
    is its number plus its offset."""
    size = shape.draft_vocab_size
    if (
        not isinstance(offsets, np.ndarray)
        or offsets.dtype not in (np.int32, np.int64)
        or list(offsets.shape) != [size]
    ):
        raise ModelError(
            f"{where}: tensor {_OFFSETS!r} is {dtype_name(offsets)} {list(offsets.shape)}, "
            f"expected int64 [{size}]"
        )
    # Compared before the sum, which could wrap around.
    limit = shape.vocab_size
    rows = np.arange(size, dtype=np.int64)
    bad = (offsets < -rows) | (offsets >= limit - rows)
    if bad.any():
        row = int(bad.argmax())
        raise ModelError(
            f"{where}: tensor {_OFFSETS!r}[{row}] = {int(offsets[row])} makes row {row} of lm_head "
            f"token {row + int(offsets[row])}; the target's tokens are 0..{limit - 1}"
        )
    ids = rows + offsets
    order = np.argsort(ids, kind="stable")
    twice = np.flatnonzero(np.diff(ids[order]) == 0)
    if len(twice):
        token = int(ids[order][twice[0]])
        raise ModelError(
            f"{where}: tensor {_OFFSETS!r} names token {token} twice; every row of lm_head scores "
            "a token of its own"
        )
    in_order = bool((order == rows).all())
    return None if in_order else order, np.ascontiguousarray(ids[order], dtype=np.int32)

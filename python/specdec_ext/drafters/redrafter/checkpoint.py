"""ReDrafter's files without torch: their configuration and tensors, checked.

Folder: config.json and model.safetensors as Apple's ml-recurrent-drafter writes them;
`tie_lm_head`, `draft_vocab_size` and the tensor `token_ids` are this package's own. What the
tensors are for: model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...config.validate import show
from ...errors import ModelError, UnsupportedModelError
from ...models.host_arrays import HostArray, dtype_name
from ...models.json_file import read_json
from ...models.weights import SINGLE, Checkpoint

__all__ = [
    "MODEL_TYPE",
    "TOKEN_IDS",
    "RedrafterShape",
    "RedrafterWeights",
    "check_token_ids",
    "read_redrafter",
    "read_redrafter_shape",
]

MODEL_TYPE = "recurrent_drafting_drafter"
TOKEN_IDS = "token_ids"

# Limits of config.json's integers: far above any drafter, there to stop a damaged file before it
# asks for memory.
_LIMITS = {
    "vocab_size": (1, 1 << 24),
    "hidden_size": (1, 1 << 20),
    "exit_dim": (1, 1 << 21),
    "num_draft_layers": (0, 64),
}
# What the first part of a tensor's name is called by other versions of the reference.
_SPELLINGS = {"input_proj": ("input_proj", "input_projs"), "lm_head": ("lm_head", "lm_heads", "0")}


@dataclass(frozen=True)
class RedrafterShape:
    """The fields of config.json that decide what the tensors are.

    vocab_size        tokens of the target
    draft_vocab_size  tokens that the head scores; None: all of the target's
    tie_lm_head       the head is the target's, restricted to `token_ids` if there are any
    """

    vocab_size: int
    hidden_size: int
    exit_dim: int
    num_draft_layers: int
    rnn: bool
    tie_lm_head: bool = False
    draft_vocab_size: int | None = None

    @property
    def has_input_proj(self) -> bool:
        return self.exit_dim != 2 * self.hidden_size

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every floating-point tensor of a checkpoint."""
        hidden, exit_dim, blocks = self.hidden_size, self.exit_dim, self.num_draft_layers
        expected: dict[str, tuple[int, ...]] = {}
        if self.has_input_proj:
            expected["input_proj.weight"] = (exit_dim, 2 * hidden)
            expected["input_proj.bias"] = (exit_dim,)
        for i in range(blocks):
            expected[f"lm_head.{i}.linear.weight"] = (exit_dim, exit_dim)
            expected[f"lm_head.{i}.linear.bias"] = (exit_dim,)
        if not self.tie_lm_head:
            scored = self.draft_vocab_size or self.vocab_size
            expected[f"lm_head.{blocks}.weight"] = (scored, exit_dim)
        if self.rnn:
            expected["rnn_u.weight"] = (hidden, hidden)
            expected["rnn_u.bias"] = (hidden,)
            expected["rnn_w.weight"] = (hidden, hidden)
        return expected


@dataclass(frozen=True)
class RedrafterWeights:
    """A drafter as it is on disk: every tensor is there, fits and is finite.

    tensors    by the names of shape.expected_weights(), floats of any width
    token_ids  int32 [draft_vocab_size], increasing: the target's token of each score; None where
               every token has one
    """

    shape: RedrafterShape
    tensors: Mapping[str, HostArray]
    token_ids: np.ndarray | None = None

    def linear(self, name: str) -> tuple[HostArray, HostArray | None]:
        """(weight, bias or None) of a layer."""
        return self.tensors[name + ".weight"], self.tensors.get(name + ".bias")


def read_redrafter_shape(folder: str | Path) -> RedrafterShape:
    """config.json of a drafter's folder, checked. Raises ModelError."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ModelError(
            f"redrafter model = {str(folder)!r} {kind}; give a local folder with config.json and "
            f"{SINGLE} (Apple's ml-recurrent-drafter format); nothing is downloaded"
        )
    path = folder / "config.json"
    raw = read_json(
        path, "the drafter's configuration", remedy=f"give a folder with it and {SINGLE}"
    )
    model_type = raw.get("model_type")
    if model_type != MODEL_TYPE:
        raise UnsupportedModelError(
            f"{path}: model_type = {show(model_type)}: a ReDrafter has {MODEL_TYPE!r}; is this the "
            "folder of the target or of other heads?"
        )
    numbers = {name: _integer(path, raw, name, *limits) for name, limits in _LIMITS.items()}
    rnn = _flag(path, raw, "rnn", None)
    tied = _flag(path, raw, "tie_lm_head", False)
    scored = None
    if raw.get("draft_vocab_size") is not None:
        scored = _integer(path, raw, "draft_vocab_size", 1, numbers["vocab_size"])
    shape = RedrafterShape(**numbers, rnn=rnn, tie_lm_head=tied, draft_vocab_size=scored)
    if tied and shape.exit_dim != shape.hidden_size:
        raise ModelError(
            f"{path}: tie_lm_head with exit_dim = {shape.exit_dim}: the target's head reads "
            f"hidden_size = {shape.hidden_size} values; the two must be equal"
        )
    return shape


def read_redrafter(folder: str | Path, *, allow_pickle: bool = False) -> RedrafterWeights:
    """The drafter of a folder.

    Raises ModelError naming the file, the field or tensor, and what was expected: for a damaged
    or foreign configuration, missing, extra or misshapen tensors, pickle files
    (unless allowed, then read with weights_only=True), values that are not finite.
    """
    folder = Path(folder).expanduser()
    shape = read_redrafter_shape(folder)
    expected = shape.expected_weights()
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        names = _canonical_names(checkpoint)
        ids = _load_token_ids(checkpoint, shape)
        head = f"lm_head.{shape.num_draft_layers}.weight"
        if head in expected and head not in names:
            raise ModelError(
                f"{folder}: tensor {head!r} {list(expected[head])} is missing from the checkpoint; "
                "if the drafter shares the target's head, config.json must say "
                '"tie_lm_head": true'
            )
        known = {*expected, TOKEN_IDS} if ids is not None else set(expected)
        extra = sorted(set(names) - known)
        if extra:
            entry = checkpoint.entries[names[extra[0]]]
            raise ModelError(
                f"{entry.file}: tensor {names[extra[0]]!r} {list(entry.shape)} (and "
                f"{len(extra) - 1} more) has no place in the drafter that config.json describes; "
                "the files do not belong together"
            )
        checkpoint.check(
            {names.get(name, name): extents for name, extents in expected.items()},
            ignored=(TOKEN_IDS,) if ids is not None else (),
        )
        weights = {name: checkpoint.load(names[name]) for name in expected}
        if checkpoint.warnings:
            raise ModelError(
                f"{folder / checkpoint.warnings[0].split('; ')[0]}; the drafter would propose "
                "nothing of use, so it is refused: train or copy it again"
            )
    return RedrafterWeights(shape, weights, ids)


def _canonical_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Canonical name -> the name in the file, for every spelling of the reference."""
    names: dict[str, str] = {}
    for found in checkpoint.entries:
        first, _, rest = found.partition(".")
        first = next((ours for ours, all_ in _SPELLINGS.items() if first in all_), first)
        name = f"{first}.{rest}" if rest else first
        if name in names:
            raise ModelError(
                f"{checkpoint.entries[found].file}: tensors {names[name]!r} and {found!r} are two "
                "spellings of the same weight; keep one"
            )
        names[name] = found
    return names


def _load_token_ids(checkpoint: Checkpoint, shape: RedrafterShape) -> np.ndarray | None:
    entry = checkpoint.entries.get(TOKEN_IDS)
    if shape.draft_vocab_size is None:
        return None
    if entry is None:
        raise ModelError(
            f"{checkpoint.folder}: tensor {TOKEN_IDS!r} [{shape.draft_vocab_size}] is missing; "
            "config.json states draft_vocab_size, so it must say which tokens these are"
        )
    return check_token_ids(checkpoint.load(TOKEN_IDS), shape, str(entry.file))


def check_token_ids(ids: HostArray, shape: RedrafterShape, where: str) -> np.ndarray:
    """int32, contiguous; ModelError unless they are increasing ids of the target's tokens."""
    if (
        not isinstance(ids, np.ndarray)
        or ids.dtype not in (np.int32, np.int64)
        or list(ids.shape) != [shape.draft_vocab_size]
    ):
        raise ModelError(
            f"{where}: tensor {TOKEN_IDS!r} is {dtype_name(ids)} {list(ids.shape)}, expected int32 "
            f"[{shape.draft_vocab_size}]"
        )
    first, last = int(ids[0]), int(ids[-1])
    if first < 0 or last >= shape.vocab_size or not bool((ids[1:] > ids[:-1]).all()):
        raise ModelError(
            f"{where}: tensor {TOKEN_IDS!r} must be increasing token ids within "
            f"0..{shape.vocab_size - 1} (it goes from {first} to {last})"
        )
    return np.ascontiguousarray(ids, dtype=np.int32)


def _integer(path: Path, raw: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelError(
            f"{path}: {name} = {show(value)}: expected an integer {low}..{high}; the file is "
            "damaged or not a drafter's"
        )
    return value


def _flag(path: Path, raw: Mapping[str, Any], name: str, default: bool | None) -> bool:
    value = raw.get(name, default)
    if not isinstance(value, bool):
        raise ModelError(f"{path}: {name} = {show(value)}: expected true or false")
    return value

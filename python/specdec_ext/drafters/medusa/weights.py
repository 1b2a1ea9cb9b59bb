"""Medusa heads as they are on disk: their configuration, and their tensors, checked.

Head h (0-based) guesses the token h + 2 places after the row whose hidden state it reads: one
further than the target's own head. It is `num_medusa_layers` residual blocks, x + SiLU(Wx + b),
and an LM head. The LM head is one of three:

    "own"     a matrix per head
    "shared"  one matrix for all heads
    "target"  the target's output head, nothing is stored

and may cover a part of the vocabulary: `token_ids` then maps its rows to token ids.

On disk: a folder with config.json and medusa_lm_head.safetensors, which holds
"{h}.{l}.linear.weight" [H, H], "{h}.{l}.linear.bias" [H], "{h}.{L}.weight" [V', H] (own) or
"lm_head.weight" (shared), "token_ids" int32 [V']. A weight in int8 comes with a float32
"..._scale" per row. Other projects' files: checkpoint.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ... import _core
from ...config.medusa import MAX_HEADS
from ...config.validate import show
from ...errors import ModelError
from ...models.host_arrays import HostArray, converted, dtype_name
from ...models.safetensors_file import SafetensorsFile

__all__ = [
    "HEADS_FILE",
    "LM_HEADS",
    "HeadWeights",
    "MedusaHeadsConfig",
    "check_token_ids",
    "check_weights",
    "read_heads_config",
    "read_own_heads",
    "read_tensors",
]

HEADS_FILE = "medusa_lm_head.safetensors"
LM_HEADS = ("own", "shared", "target")
MAX_LAYERS = 32
_FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class MedusaHeadsConfig:
    """What config.json says of the heads.

    vocab_size         of the target; the heads' own rows are draft_vocab_size (None: all of it)
    lm_head            "own", "shared" or "target"
    has_bias           of the residual blocks' linear layers
    model_sha256       of the target's weight file they were trained for; "" if unknown
    training           what the trainer notes; its "guess_rates" [heads][ranks], how often a head's
                       guess of a rank is right where the guesses above it were, are where the
                       draft budget starts and what `specdec tree` reads
    medusa_choices     the tree to use where the user names none, or None
    """

    hidden_size: int
    vocab_size: int
    num_medusa_heads: int
    num_medusa_layers: int = 1
    lm_head: str = "own"
    draft_vocab_size: int | None = None
    has_bias: bool = True
    base_model_name_or_path: str = ""
    model_sha256: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)
    medusa_choices: Any = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("hidden_size", 1, 1 << 20),
            ("vocab_size", 1, 1 << 26),
            ("num_medusa_heads", 1, MAX_HEADS),
            ("num_medusa_layers", 0, MAX_LAYERS),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ModelError(
                    f"Medusa heads: {name} = {show(value)}: expected an integer {low}..{high}"
                )
        if self.lm_head not in LM_HEADS:
            raise ModelError(
                f"Medusa heads: lm_head = {show(self.lm_head)}: expected one of "
                f"{', '.join(LM_HEADS)}"
            )
        size = self.draft_vocab_size
        if size is not None and (type(size) is not int or not 1 <= size <= self.vocab_size):
            raise ModelError(
                f"Medusa heads: draft_vocab_size = {show(size)}: expected 1..{self.vocab_size}, "
                "the target's vocab_size"
            )

        if not isinstance(self.training, Mapping):
            raise ModelError(
                f"Medusa heads: training = {show(self.training)}: expected an object with keys"
            )

    @property
    def head_rows(self) -> int:
        """Scores that a head gives: draft_vocab_size, or the whole vocabulary."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every matrix and bias, in the file's order."""
        size, layers = self.hidden_size, self.num_medusa_layers
        expected: dict[str, tuple[int, ...]] = {}
        for head in range(self.num_medusa_heads):
            for layer in range(layers):
                expected[f"{head}.{layer}.linear.weight"] = (size, size)
                if self.has_bias:
                    expected[f"{head}.{layer}.linear.bias"] = (size,)
        if self.lm_head == "own":
            for head in range(self.num_medusa_heads):
                expected[f"{head}.{layers}.weight"] = (self.head_rows, size)
        elif self.lm_head == "shared":
            expected["lm_head.weight"] = (self.head_rows, size)
        return expected

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "medusa", **asdict(self)}


@dataclass(frozen=True)
class HeadWeights:
    """Heads as they are on disk: every tensor is there, fits and is finite.

    tensors    by the names of config.expected_weights(), floats of any width
    token_ids  int32 [V'] of distinct ids, exactly when config.draft_vocab_size is set
    """

    config: MedusaHeadsConfig
    tensors: Mapping[str, HostArray]
    token_ids: np.ndarray | None = None

    def block(self, head: int, layer: int) -> tuple[HostArray, HostArray | None]:
        """(weight [H, H], bias [H] or None) of a residual block."""
        name = f"{head}.{layer}.linear."
        return self.tensors[name + "weight"], self.tensors.get(name + "bias")

    def lm_heads(self) -> list[HostArray]:
        """[V', H]: one per head ("own"), one ("shared"), none ("target")."""
        layers = self.config.num_medusa_layers
        if self.config.lm_head == "own":
            heads = range(self.config.num_medusa_heads)
            return [self.tensors[f"{head}.{layers}.weight"] for head in heads]
        return [self.tensors["lm_head.weight"]] if self.config.lm_head == "shared" else []


def check_token_ids(config: MedusaHeadsConfig, token_ids: Any) -> np.ndarray | None:
    """`token_ids` as int32 [V'], distinct and inside the vocabulary; ModelError otherwise."""
    size, vocab = config.draft_vocab_size, config.vocab_size
    if (size is None) != (token_ids is None):
        raise ModelError(
            f"Medusa heads: draft_vocab_size = {size} "
            + ("needs" if token_ids is None else "does not go with")
            + " the tensor token_ids, which names the token of each row"
        )
    if token_ids is None:
        return None
    if not isinstance(token_ids, np.ndarray) or token_ids.dtype.kind not in "iu":
        raise ModelError(f"Medusa heads: token_ids is {dtype_name(token_ids)}; expected integers")
    if tuple(token_ids.shape) != (size,):
        raise ModelError(
            f"Medusa heads: token_ids has shape {list(token_ids.shape)}, draft_vocab_size is {size}"
        )
    low, high, distinct = int(token_ids.min()), int(token_ids.max()), len(np.unique(token_ids))
    if low < 0 or high >= vocab or distinct != size:
        raise ModelError(
            f"Medusa heads: token_ids: expected {size} distinct ids 0..{vocab - 1}, found "
            f"{distinct} in {low}..{high}"
        )
    return np.ascontiguousarray(token_ids, dtype=np.int32)


def check_weights(
    config: MedusaHeadsConfig, tensors: Mapping[str, HostArray], *, source: str
) -> HeadWeights:
    """The heads of `tensors`, by the names of the file; every one is used, none is missing."""
    ids = check_token_ids(config, tensors.get("token_ids"))
    left = dict(tensors)
    left.pop("token_ids", None)
    kept: dict[str, HostArray] = {}
    for name, shape in config.expected_weights().items():
        value = left.pop(name, None)
        if value is None:
            raise ModelError(
                f"{source}: tensor {name!r} {list(shape)} is missing; the heads are "
                "incomplete or config.json belongs to others"
            )
        if tuple(value.shape) != shape:
            raise ModelError(
                f"{source}: tensor {name!r} has shape {list(value.shape)}, expected "
                f"{list(shape)} by config.json"
            )
        scale = left.pop(name + "_scale", None)
        kept[name] = _floats(value, scale, f"{source}: tensor {name!r}")
        bad = _core.count_not_finite(kept[name])
        if bad:
            raise ModelError(
                f"{source}: tensor {name!r} holds {bad} NaN or infinite values; train or "
                "convert the heads again"
            )
    if left:
        name = min(left)
        raise ModelError(
            f"{source}: tensor {name!r} {list(left[name].shape)} (and {len(left) - 1} more) has no "
            f"place in {config.num_medusa_heads} heads of {config.num_medusa_layers} layers with "
            f"lm_head {config.lm_head!r}"
        )
    return HeadWeights(config, kept, ids)


def _floats(value: HostArray, scale: HostArray | None, what: str) -> HostArray:
    """float32, float16 or bfloat16; int8 needs its scale, other dtypes must have none."""
    kind = dtype_name(value)
    if (kind == "int8") != (scale is not None):
        raise ModelError(
            f"{what} is {kind} "
            + ("without" if scale is None else "with")
            + " a tensor ..._scale; int8 has one float32 scale per row, other dtypes none"
        )
    if scale is None:
        if kind not in _FLOATS:
            raise ModelError(f"{what} is {kind}; expected floats or int8")
        return converted(value, "float32") if kind == "float64" else value
    if tuple(scale.shape) != tuple(value.shape[:1]) or dtype_name(scale) not in _FLOATS:
        raise ModelError(
            f"{what} [{value.shape[0]}, ...] has scales {dtype_name(scale)} {list(scale.shape)}"
        )
    scales: Any = converted(scale, "float32")
    result: np.ndarray = np.asarray(value, dtype=np.float32) * scales[:, None]
    return result


def read_own_heads(folder: str | Path) -> HeadWeights:
    """The heads that save_medusa_heads() wrote; ModelError for anything else."""
    path = Path(folder) / HEADS_FILE
    config, _ = read_heads_config(Path(folder) / "config.json")
    return check_weights(config, read_tensors(path), source=str(path))


def read_tensors(
    path: Path, wanted: Callable[[Iterable[str]], list[str]] = list
) -> dict[str, HostArray]:
    """Tensors of a safetensors file where they are mapped; ModelError for a damaged one.

    wanted  of all names those to read
    """
    try:
        file = SafetensorsFile(path)
        return {name: file.tensor(name) for name in wanted(file.names)}
    except Exception as error:  # SafetensorError, OSError, a type that nobody has
        raise ModelError(
            f"{path}: not a complete safetensors file ({error}); copy or download it again"
        ) from error


def read_heads_config(path: Path) -> tuple[MedusaHeadsConfig, dict[str, Any]]:
    """The configuration that save_medusa_heads() wrote, and the whole file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected an object with keys, got {type(content).__name__}")
    known = {f.name for f in fields(MedusaHeadsConfig)}
    missing = {"hidden_size", "vocab_size", "num_medusa_heads"} - content.keys()
    if missing:
        raise ModelError(f"{path}: {sorted(missing)[0]!r} is missing")
    try:
        config = MedusaHeadsConfig(**{k: v for k, v in content.items() if k in known})
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    return config, content

"""Medusa: heads on the target's last hidden state guess the next tokens, and one step verifies a
fixed tree of the guesses."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..errors import ConfigError
from .acceptance import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD
from .base import MODEL_SPELLINGS, Spellings
from .drafter import DrafterConfig
from .dtypes import normalize_dtype
from .limits import MAX_DRAFT_LEN
from .medusa_choices import (
    MAX_TOP_K,
    Choice,
    check_choices,
    medusa_tree,
    parse_choices,
    prune_choices,
    published_trees,
)
from .validate import check_bool, check_choice, check_float, check_int, show

__all__ = ["ACCEPTANCES", "SHIPPED_HEADS", "MedusaDecodingConfig"]

# One-hot drafts: rejection keeps exactly those that exact match keeps (docs/methods/sampling.md).
ACCEPTANCES = ("exact_match", "rejection", "typical")
# Package data: heads of the built-in default model.
SHIPPED_HEADS = Path(__file__).resolve().parent.parent / "data" / "medusa"
DEFAULT_TREE = "mc_sim_7b_63"
DEFAULT_HEADS = 4  # of a file whose heads cannot be counted without torch
MAX_HEADS = 32

# Names of head tensors in the spellings of drafters/medusa/checkpoint.py; group 1 is the head.
_HEAD_NAMES = re.compile(
    r"(?:base_model\.|model\.)?(?:medusa_heads?\.)?(?:blocks\.|lm_heads\.)?(\d+)\."
    r"(?:(?:layers\.)?\d+\.(?:linear\.)?)?weight"
)


@dataclass(frozen=True)
class MedusaDecodingConfig(DrafterConfig):
    """Medusa decoding.

    model                folder or file with the heads (docs/methods/medusa.md lists the formats);
                         None: the heads that are shipped for the built-in default model
    medusa_choices       the tree: a list of choices, its paths only, a published name, text or a
                         file (config/medusa_choices.py). None: the tree that comes with the heads,
                         else as much of mc_sim_7b_63 as the heads can fill. The constructed object
                         holds a tuple of tuples, parents before children
    num_medusa_heads     use this many of the file's heads; None: all of them
    acceptance           the rule for sampled requests that leave theirs at its default:
                         "exact_match" or "rejection" (lossless, and equal for these drafts), or
                         "typical" (lossy: it changes the output's distribution). Greedy requests
                         are the same under all
    posterior_threshold  parameter of typical acceptance, in (0, 1]; None: 0.09
    posterior_alpha      parameter of typical acceptance, in (0, 1]; None: 0.3
    dtype                type of the heads' weights: "auto" (on the CPU 8 or 4 bits, on a device the
                         target's), "float32", "bfloat16", "float16"
    adaptive             True: verify as many nodes of the tree as pay, by measured step times and
                         by what was accepted so far; False: always the whole tree

    A request may choose its own tree, SamplingParams.medusa_choices, within this configuration's
    number of nodes and the number of heads.
    """

    method: ClassVar[str] = "medusa"
    words: ClassVar[str] = "Medusa"
    aliases: ClassVar[Mapping[str, str]] = {
        "medusa_model": "model",
        "medusa_model_dir": "model",
        "medusa_num_heads": "num_medusa_heads",
        "choices": "medusa_choices",
    }

    spellings: ClassVar[Spellings] = MODEL_SPELLINGS

    model: Any = None
    medusa_choices: Any = None
    num_medusa_heads: int | None = None
    acceptance: str = "exact_match"
    posterior_threshold: float | None = None
    posterior_alpha: float | None = None
    dtype: str = "auto"
    adaptive: bool = True

    def __post_init__(self) -> None:
        where = "MedusaDecodingConfig."
        self._set(_is_shipped=self.model is None)
        self._set(model=_model_path(self.model, where + "model"))
        if self.num_medusa_heads is not None:
            heads = check_int(where + "num_medusa_heads", self.num_medusa_heads, ConfigError,
                              low=1, high=MAX_HEADS)  # fmt: skip
            self._set(num_medusa_heads=heads)
        self._check_acceptance(where)
        self._set(dtype=normalize_dtype(where + "dtype", self.dtype))
        check_bool(where + "adaptive", self.adaptive, ConfigError)
        if self.medusa_choices is None:
            self._set(
                medusa_choices=_default_choices(Path(self.model), self.num_medusa_heads),
                _is_default_tree=True,
            )
        else:
            field = where + "medusa_choices"
            choices = parse_choices(self.medusa_choices, field, ConfigError)
            check_choices(choices, field, ConfigError, num_heads=self.num_medusa_heads)
            self._set(medusa_choices=choices)
        self._check_options()
        if self.synthetic_rates and self.acceptance != "exact_match":
            raise ConfigError(
                f"{where}acceptance = {self.acceptance!r} with synthetic acceptance, which holds "
                "drafts against nothing; keep one of them"
            )

    def _check_acceptance(self, where: str) -> None:
        rule = check_choice(where + "acceptance", self.acceptance, ACCEPTANCES, ConfigError)
        self._set(acceptance=rule)
        for name, default in (
            ("posterior_threshold", POSTERIOR_THRESHOLD),
            ("posterior_alpha", POSTERIOR_ALPHA),
        ):
            value = getattr(self, name)
            if value is not None:
                value = check_float(where + name, value, ConfigError, above=0.0, high=1.0)
                if rule != "typical":
                    raise ConfigError(
                        f"{where}{name} = {value}: a parameter of acceptance = 'typical', here it "
                        f"is {rule!r}; set acceptance = 'typical' or remove {name}"
                    )
            elif rule == "typical":
                value = default
            self._set(**{name: value})

    @property
    def uses_default_tree(self) -> bool:
        """No tree was asked for: it may be cut to the heads that a file turns out to have."""
        return bool(getattr(self, "_is_default_tree", False))

    @property
    def uses_shipped(self) -> bool:
        """No heads were asked for."""
        return bool(getattr(self, "_is_shipped", False))

    def with_heads(self, num_heads: int, num_scores: int) -> MedusaDecodingConfig:
        """This configuration for `num_heads` heads with `num_scores` scores each.

        Raises ConfigError when it asks for more than they have.
        """
        field = "MedusaDecodingConfig."
        number = num_heads if self.num_medusa_heads is None else self.num_medusa_heads
        if number > num_heads:
            raise ConfigError(
                f"{field}num_medusa_heads = {number}: {self.model} has {num_heads} heads; lower it"
            )
        choices = self.medusa_choices
        if self.uses_default_tree:
            choices = tuple(c for c in prune_choices(choices, number) if max(c) < num_scores)
        top_k = min(MAX_TOP_K, num_scores)
        check_choices(choices, field + "medusa_choices", ConfigError, num_heads=number, top_k=top_k)
        known = dataclasses.replace(self, medusa_choices=choices, num_medusa_heads=number)
        known._set(_top_k=top_k)
        return known

    @property
    def max_draft_len(self) -> int:
        """Nodes of the tree."""
        return len(self.medusa_choices)

    @property
    def max_draft_path_len(self) -> int:
        """Depth of the tree."""
        return medusa_tree(self.medusa_choices).depth

    @property
    def deepest_draft(self) -> int:
        """A request's own tree may be as deep as there are heads."""
        deepest = self.num_medusa_heads or MAX_HEADS
        return min(deepest, self.max_draft_len)

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON-ready values."""
        result = super().to_dict()
        result["model"] = str(self.model)
        result["medusa_choices"] = [list(choice) for choice in self.medusa_choices]
        return result


def _model_path(model: object, field: str) -> str:
    if model is None:
        if not SHIPPED_HEADS.is_dir():
            raise ConfigError(
                f"{field} = None: this installation ships no Medusa heads; give the folder of "
                "trained heads"
            )
        return str(SHIPPED_HEADS)
    if not isinstance(model, (str, Path)):
        raise ConfigError(
            f"{field} = {show(model)}: expected the path of a folder or file with Medusa heads, "
            f"got {type(model).__name__}"
        )
    path = Path(model).expanduser()
    if not path.exists():
        raise ConfigError(
            f"{field} = {str(model)!r}: no such folder or file; give a local path (nothing is "
            "downloaded)"
        )
    return str(path)


def _default_choices(path: Path, num_heads: int | None) -> tuple[Choice, ...]:
    """The tree of the heads' config.json, or the best-known published one, cut to the heads."""
    folder = path if path.is_dir() else path.parent
    config = _read_json(folder / "config.json")
    counted = count_heads(path)
    heads = min(h for h in (num_heads, counted or None, MAX_HEADS) if h is not None)
    if counted is None and num_heads is None:
        heads = DEFAULT_HEADS
    own = config.get("medusa_choices")
    if own is None:
        return prune_choices(published_trees()[DEFAULT_TREE], heads)
    field = f"{folder / 'config.json'}: medusa_choices"
    choices = prune_choices(parse_choices(own, field, ConfigError), heads)
    check_choices(choices, field, ConfigError, max_nodes=MAX_DRAFT_LEN)
    return choices


def count_heads(path: Path) -> int | None:
    """Heads in a safetensors file or folder, from the tensors' names; None if they cannot be read
    without torch (pickle files) or there are none."""
    names: set[str] = set()
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        if file.suffix == ".safetensors":
            names |= set(_tensor_names(file))
    heads = {int(m.group(1)) for name in names if (m := _HEAD_NAMES.fullmatch(name))}
    return max(heads) + 1 if heads else None


def _tensor_names(file: Path) -> Iterable[str]:
    """Names in the header of a safetensors file; none if it is damaged, which loading will say."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size)) if size <= 100 << 20 else {}
    except (OSError, ValueError, struct.error, RecursionError):
        return ()
    return header if isinstance(header, dict) else ()


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # loading the heads will say what is wrong with it, if it is needed
    return content if isinstance(content, dict) else {}

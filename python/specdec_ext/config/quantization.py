"""LLM(quantization=...): the widths that float weights are rounded to while they are loaded.

A name of QUANTIZATIONS, or a mapping that says more: {"method": "int4", "group_size": 128,
"embeddings": "keep", "head": "int8"}. Servers have the same choices: group_size as in AWQ, GPTQ and
TensorRT-LLM (-1: whole rows), the types of the two tables as in llama.cpp
(--token-embedding-type, --output-tensor-type).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .validate import check_choice, check_int, show, unknown_key

__all__ = ["QUANTIZATIONS", "TABLE_TYPES", "Quantization"]

# Method -> block format of projections, elements that share a scale in it (0: a whole row), and the
# format of larger groups, which repeats its scale in every block; None: it has no other groups.
_METHODS: dict[str, tuple[str, int, str | None]] = {
    "int8": ("q8_0", 32, "q8_g"),
    "int4": ("q4_1", 32, "q4_g"),
    "fp8": ("f8_g", 64, "f8_g"),
    "fp8_w8a8": ("f8_a8", 0, None),
}
QUANTIZATIONS = tuple(_METHODS)
# Every token passes the embeddings and the head, and few bits hurt them most: 8 bits by default.
_TABLES: dict[str, str | None] = {"keep": None, "int8": "q8_0", "int4": "q4_1", "fp8": "f8_g"}
TABLE_TYPES = tuple(_TABLES)
_DEFAULT_TABLE = "int8"
_KEYS = ("method", "group_size", "embeddings", "head")
_MAX_GROUP = 1 << 16
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Quantization:
    """method      of QUANTIZATIONS
    group_size  elements of a row that share a scale; 0: whole rows
    embeddings, head
                of TABLE_TYPES: what the two tables become; None: as the other one where they are
                one matrix, else "int8"
    """

    method: str
    group_size: int
    embeddings: str | None = None
    head: str | None = None

    @classmethod
    def of(cls, value: object) -> Quantization:
        """What a user gave, or `plain`, checked. Raises ConfigError."""
        if isinstance(value, Quantization):
            return value
        field = "quantization"
        if not isinstance(value, Mapping):
            method = check_choice(field, value, QUANTIZATIONS, ConfigError)
            return cls(method, _METHODS[method][1])
        for key in value:
            if key not in _KEYS:
                raise unknown_key(field, str(key), _KEYS, ConfigError)
        method = check_choice(f"{field}.method", value.get("method"), QUANTIZATIONS, ConfigError)
        tables = {
            name: check_choice(f"{field}.{name}", value[name], TABLE_TYPES, ConfigError)
            for name in ("embeddings", "head")
            if value.get(name) is not None
        }
        return cls(method, _group_size(method, value.get("group_size")), **tables)

    @property
    def plain(self) -> str | dict[str, Any]:
        """The name, where that says all; else the mapping."""
        said: dict[str, Any] = {"method": self.method}
        if self.group_size != _METHODS[self.method][1]:
            said["group_size"] = self.group_size or -1
        tables = {"embeddings": self.embeddings, "head": self.head}
        said |= {name: kind for name, kind in tables.items() if kind is not None}
        return self.method if len(said) == 1 else said

    def __str__(self) -> str:
        """In words, as ModelInfo.dtype has it."""
        said = self.plain
        if isinstance(said, str):
            return said
        more = [f"{key}={value}" for key, value in said.items() if key != "method"]
        return f"{self.method} ({', '.join(more)})"

    @property
    def format(self) -> str:
        """The block format of projections."""
        own, size, larger = _METHODS[self.method]
        return own if self.group_size == size or larger is None else larger

    def format_of(self, name: str, *, tied: bool) -> str | None:
        """The block format of a matrix; None: it is kept in floats.

        tied  the embeddings are the head. Raises ConfigError where the two were to differ then.
        """
        if name not in (EMBEDDINGS, HEAD):
            return self.format
        first, second = self.embeddings, self.head
        if tied and None not in (first, second) and first != second:
            raise ConfigError(
                f"quantization.embeddings = {first!r}, quantization.head = {second!r}: the "
                "embeddings of this model are its head (tie_word_embeddings); give one of the two, "
                "or both the same"
            )
        if name == HEAD:
            first, second = second, first
        chosen = first or (second if tied else None) or _DEFAULT_TABLE
        return _TABLES[chosen]


def _group_size(method: str, value: object) -> int:
    """Raises ConfigError for one that no block format holds."""
    _, own, larger = _METHODS[method]
    if value is None:
        return own
    field = "quantization.group_size"
    if value == -1:
        return 0
    if larger is None:
        raise ConfigError(
            f"{field} = {show(value)}: {method} has one scale for a whole row; leave it out, or "
            "use 'fp8', which has groups"
        )
    size = check_int(field, value, ConfigError, low=own, high=_MAX_GROUP,
                     remedy=f"give a multiple of {own}, or -1 for whole rows")  # fmt: skip
    if size % own:
        raise ConfigError(
            f"{field} = {size}: scales of {method} are those of whole blocks of {own} elements; "
            f"give a multiple of {own} up to {_MAX_GROUP}, or -1 for whole rows"
        )
    return size

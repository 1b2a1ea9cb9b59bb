"""Schemas that nothing finite fits, and what only looks like one."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_ext.request.finite_schema import never_ends

SELF: dict[str, Any] = {"$ref": "#"}
NEEDS_ITSELF = {"type": "object", "properties": {"a": SELF}, "required": ["a"]}


@pytest.mark.parametrize(
    "schema",
    [
        False,
        SELF,
        NEEDS_ITSELF,
        {"allOf": [{"type": "integer"}, SELF]},
        {"anyOf": [SELF, {"$ref": "#/anyOf/0"}]},
        {"anyOf": []},
        {"type": "array", "items": SELF, "minItems": 1},
        {"type": "array", "prefixItems": [SELF], "minItems": 1},
        {"type": ["array", "object"], "items": SELF, "minItems": 2, **{
            key: value for key, value in NEEDS_ITSELF.items() if key != "type"}},
        {"type": "object", "additionalProperties": SELF, "required": ["a"]},
        {"type": "object", "additionalProperties": SELF, "minProperties": 1},
        {"type": "object", "properties": {"a": SELF}, "additionalProperties": False,
         "minProperties": 1},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
)  # fmt: skip
def test_nothing_finite_fits(schema: Any) -> None:
    assert never_ends(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "integer"},
        {"const": 1, "allOf": [SELF]},
        {"type": "object", "properties": {"a": SELF}},
        {"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]},
        {"type": "array", "items": SELF},
        {"type": "array", "prefixItems": [{}], "items": SELF, "minItems": 1},
        {"type": ["array", "object"], "items": SELF, "minItems": 2},
        {"anyOf": [SELF, {"type": "null"}]},
        {"type": "object", "additionalProperties": SELF},
        {"type": "object", "additionalProperties": SELF, "properties": {"a": {}},
         "required": ["a"]},
        {"type": "object", "additionalProperties": SELF, "properties": {"a": {}},
         "minProperties": 1},
        {"type": "object", "additionalProperties": SELF, "patternProperties": {"^a": {}},
         "required": ["ab"]},
        {"type": "object", "required": ["a"]},
        {"$ref": "#/$defs/none"},
        # Values that keywords cannot have are no matter of this look.
        {"type": 5}, {"type": ["object", 5]}, {"type": "object", "required": [["a"]]},
        {"type": "object", "required": 3, "properties": [], "minProperties": "1"},
        {"anyOf": 3, "allOf": {}, "$ref": 7}, {"type": "array", "minItems": "2", "items": SELF},
    ],
)  # fmt: skip
def test_something_finite_fits(schema: Any) -> None:
    assert not never_ends(schema)


@pytest.mark.parametrize("ends", [False, True])
def test_long_chains_and_wide_objects_take_no_time(ends: bool) -> None:
    """Linear in the schema: a square of this would take hours."""
    count = 15_000
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    chain[f"a{count}"] = {"type": "integer"} if ends else {"$ref": "#/$defs/a0"}
    wide = {
        "type": "object",
        "properties": {f"p{i}": {"$ref": f"#/$defs/a{i}"} for i in range(count)},
        "required": [f"p{i}" for i in range(count)],
        "$defs": chain,
    }
    assert never_ends(wide) is not ends

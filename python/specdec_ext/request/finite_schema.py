"""Does a JSON schema describe anything that ends? Grammars of schemas that do not never do either.

What is recursive is fine where a way out exists (an optional property, an empty list). Keywords
that are not looked at here are taken to allow something; the grammar's compiler has its own word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["never_ends"]

Pointer = str
_MAX_SCHEMAS = 20_000


def never_ends(schema: Any) -> bool:
    """True if every instance of `schema` would be infinite."""
    schemas: dict[Pointer, Any] = {}
    _collect(schema, schema, "#", schemas)
    ends: dict[Pointer, bool] = {}
    # The least fixed point: what needs nothing ends, then what needs only those, and so on.
    changed = True
    while changed:
        changed = False
        for pointer, node in schemas.items():
            if not ends.get(pointer) and _ends(node, pointer, ends):
                ends[pointer] = changed = True
    return len(schemas) < _MAX_SCHEMAS and not ends.get("#", False)


def _collect(root: Any, node: Any, pointer: Pointer, found: dict[Pointer, Any]) -> None:
    """Every schema that an instance may have to meet, by its place."""
    todo = [(pointer, node)]
    while todo and len(found) < _MAX_SCHEMAS:
        at, here = todo.pop()
        if at in found:
            continue
        found[at] = here
        if not isinstance(here, Mapping):
            continue
        ref = here.get("$ref")
        if isinstance(ref, str) and ref.startswith("#"):
            todo.append((ref, _lookup(root, ref)))
        todo += _parts(here, at)


def _parts(node: Mapping[Any, Any], at: Pointer) -> list[tuple[Pointer, Any]]:
    parts: list[tuple[Pointer, Any]] = []
    if isinstance(node.get("properties"), Mapping):
        parts += [(f"{at}/properties/{name}", sub) for name, sub in node["properties"].items()]
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(node.get(key), Sequence) and not isinstance(node[key], str):
            parts += [(f"{at}/{key}/{i}", sub) for i, sub in enumerate(node[key])]
    if "items" in node:
        parts.append((f"{at}/items", node["items"]))
    return parts


def _lookup(root: Any, ref: str) -> Any:
    """The schema at a local reference; True, which allows anything, where there is none."""
    node = root
    for part in ref.lstrip("#").strip("/").split("/"):
        if not part:
            continue
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            return True
    return node


def _ends(node: Any, at: Pointer, ends: Mapping[Pointer, bool]) -> bool:
    """Is there a finite instance, as far as it is known of other schemas?"""
    if not isinstance(node, Mapping):
        return node is not False
    if "const" in node or "enum" in node:
        return True
    ref = node.get("$ref")
    if isinstance(ref, str) and ref.startswith("#") and not ends.get(ref):
        return False
    alternatives = [
        [ends.get(f"{at}/{key}/{i}", False) for i in range(len(node[key]))]
        for key in ("anyOf", "oneOf")
        if isinstance(node.get(key), list)
    ]
    if not all(any(ways) for ways in alternatives):
        return False
    whole = node.get("allOf")
    if isinstance(whole, list) and not all(ends.get(f"{at}/allOf/{i}") for i in range(len(whole))):
        return False
    kinds = node.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not kinds or any(kind not in ("object", "array") for kind in kinds):
        return True  # a number or a text will do
    ways = {"object": _object_ends, "array": _array_ends}
    return any(ways[kind](node, at, ends) for kind in kinds)


def _object_ends(node: Mapping[Any, Any], at: Pointer, ends: Mapping[Pointer, bool]) -> bool:
    properties = node.get("properties")
    if not isinstance(properties, Mapping) or not isinstance(node.get("required"), list):
        return True
    needed = [name for name in node["required"] if name in properties]
    return all(ends.get(f"{at}/properties/{name}", False) for name in needed)


def _array_ends(node: Mapping[Any, Any], at: Pointer, ends: Mapping[Pointer, bool]) -> bool:
    least = node.get("minItems", 0)
    if not isinstance(least, int) or least <= 0:
        return True
    first = node.get("prefixItems")
    count = len(first) if isinstance(first, list) else 0
    heads = all(ends.get(f"{at}/prefixItems/{i}", False) for i in range(min(count, least)))
    return heads and (least <= count or "items" not in node or ends.get(f"{at}/items", False))

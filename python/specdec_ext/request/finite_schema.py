"""Does a JSON schema describe anything that ends? Grammars of schemas that do not never do either.

What is recursive is fine where a way out exists (an optional property, an empty list). Keywords
that are not looked at here, and values that a keyword cannot have, are taken to allow something;
the grammar's compiler has its own word.

Each schema becomes conditions that all have to hold; a condition names schemas of which one has to
end. The time is linear in the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["never_ends"]

Pointer = str
Conditions = list[list[Pointer]]  # one schema of each list has to end; of an empty list none does
_MAX_SCHEMAS = 50_000


def never_ends(schema: Any) -> bool:
    """True if every instance of `schema` would be infinite."""
    nodes = _Nodes(schema).conditions
    if nodes is None:
        return False
    missing = {at: len(conditions) for at, conditions in nodes.items()}
    asked: dict[Pointer, list[tuple[Pointer, int]]] = {}  # by whom, in which condition
    for at, conditions in nodes.items():
        for index, ways in enumerate(conditions):
            for way in ways:
                asked.setdefault(way, []).append((at, index))
    ended, met = set[Pointer](), set[tuple[Pointer, int]]()
    # The least fixed point: what needs nothing ends, then what needs only those, and so on.
    ready = [at for at, count in missing.items() if count == 0]
    while ready:
        at = ready.pop()
        if at in ended:
            continue
        ended.add(at)
        for owner, index in asked.get(at, ()):
            if (owner, index) in met:
                continue
            met.add((owner, index))
            missing[owner] -= 1
            if missing[owner] == 0:
                ready.append(owner)
    return "#" not in ended


class _Nodes:
    """conditions  by place in the schema; None: there are too many to tell"""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._todo: list[tuple[Pointer, Any]] = [("#", root)]
        self.conditions: dict[Pointer, Conditions] | None = {}
        while self._todo:
            at, node = self._todo.pop()
            if at in self.conditions:
                continue
            if len(self.conditions) >= _MAX_SCHEMAS:
                self.conditions = None
                return
            self.conditions[at] = self._of(node, at)

    def _at(self, at: Pointer, node: Any) -> Pointer:
        """The place `at`, which `node` stands at and which is looked at later."""
        self._todo.append((at, node))
        return at

    def _of(self, node: Any, at: Pointer) -> Conditions:
        if not isinstance(node, Mapping):
            return [[]] if node is False else []
        if "const" in node or "enum" in node:
            return []
        found: Conditions = []
        ref = node.get("$ref")
        if isinstance(ref, str) and ref.startswith("#"):
            # One place has one name, however it is reached.
            place = "#" if ref in ("#", "#/") else ref
            found.append([self._at(place, _lookup(self._root, ref))])
        for key in ("anyOf", "oneOf"):
            if isinstance(node.get(key), list):
                found.append([self._at(f"{at}/{key}/{i}", x) for i, x in enumerate(node[key])])
        if isinstance(node.get("allOf"), list):
            found += [[self._at(f"{at}/allOf/{i}", x)] for i, x in enumerate(node["allOf"])]
        given = node.get("type", [])
        kinds = [given] if isinstance(given, str) else given if isinstance(given, list) else []
        ways = {"object": self._of_object, "array": self._of_array}
        if kinds and all(isinstance(kind, str) and kind in ways for kind in kinds):
            each = [ways[kind](node, at) for kind in dict.fromkeys(kinds)]
            if len(each) == 1:
                return found + each[0]
            assert self.conditions is not None
            for i, conditions in enumerate(
                each
            ):  # one of them has to hold: as schemas of their own
                self.conditions[f"{at}/type/{i}"] = conditions
            found.append([f"{at}/type/{i}" for i in range(len(each))])
        return found  # else a number or a text will do

    def _of_object(self, node: Mapping[Any, Any], at: Pointer) -> Conditions:
        given = node.get("properties")
        properties = given if isinstance(given, Mapping) else {}
        # What properties that are not named are; None: anything.
        others: list[Pointer] | None = None
        more, patterns = node.get("additionalProperties", True), node.get("patternProperties")
        if isinstance(more, Mapping) or more is False:
            others = [self._at(f"{at}/additionalProperties", more)]
            if isinstance(patterns, Mapping):
                others += [
                    self._at(f"{at}/patternProperties/{name}", x) for name, x in patterns.items()
                ]
        found: Conditions = []
        required = node.get("required")
        for name in required if isinstance(required, list) else ():
            if not isinstance(name, str):
                continue
            if name in properties:
                found.append([self._at(f"{at}/properties/{name}", properties[name])])
            elif others is not None and more is not False:
                found.append(others)
        least = node.get("minProperties")
        if isinstance(least, int) and least > 0 and others is not None and not found:
            named = [self._at(f"{at}/properties/{name}", x) for name, x in properties.items()]
            found.append(others if least > len(named) else [*named, *others])
        return found

    def _of_array(self, node: Mapping[Any, Any], at: Pointer) -> Conditions:
        least = node.get("minItems", 0)
        if not isinstance(least, int) or least <= 0:
            return []
        given = node.get("prefixItems")
        first = given[:least] if isinstance(given, list) else []
        found = [[self._at(f"{at}/prefixItems/{i}", x)] for i, x in enumerate(first)]
        count = len(given) if isinstance(given, list) else 0
        if least > count and "items" in node:
            found.append([self._at(f"{at}/items", node["items"])])
        return found


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

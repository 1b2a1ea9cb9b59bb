"""Medusa choices: which combinations of the heads' guesses a step verifies.

A choice is a path of ranks: [0, 1] is the second-best guess of head 1 under the best guess of
head 0. The choices together are a tree; its root, the golden token, is no choice. They come as

    a full list        every node: [[0], [1], [0, 0], [0, 1]]
    paths only         the leaves: [[1], [0, 0], [0, 1]]; every prefix is implied. A list is read so
                       when no choice in it continues another one
    a published name   "mc_sim_7b_63", "vicuna_7b_stage2", ... (published_trees())
    text               JSON, or TensorRT-LLM's "{0,0,0},{0,1}"
    a file             .json, .yaml or .txt with one of these, or {"medusa_choices": ...}

The order of a full list is kept (the published ones have their best choices in front), except that
a parent moves before its children. Paths are ordered by depth, then by ranks.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import SpecdecError
from .limits import MAX_DRAFT_LEN
from .validate import check_int, show

__all__ = [
    "MAX_TOP_K",
    "Choice",
    "MedusaTree",
    "check_choices",
    "medusa_tree",
    "parse_choices",
    "prune_choices",
    "published_trees",
]

MAX_TOP_K = 64  # guesses per head; published trees use 10
MAX_DEPTH = 32
MAX_TEXT_CHARS = 64 * 1024

Choice = tuple[int, ...]

_LITERAL = re.compile(r"[\[({][\[\](){},\s\d+-]*")
_SUFFIXES = (".json", ".yaml", ".yml", ".txt")


@dataclass(frozen=True)
class MedusaTree:
    """A valid set of choices as a tree; node 0 is the golden token, node i + 1 is choices[i].

    choices  parents before children
    parents  index of each choice's parent among the choices, -1 for the golden token
    """

    choices: tuple[Choice, ...]
    parents: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Heads that the tree uses."""
        return max(len(choice) for choice in self.choices)

    @property
    def top_k(self) -> tuple[int, ...]:
        """Guesses that it needs of each head."""
        return tuple(
            1 + max(c[head] for c in self.choices if len(c) > head) for head in range(self.depth)
        )

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Nodes from the root to each leaf, the left-most leaf (smallest ranks) first."""
        index = {choice: i + 1 for i, choice in enumerate(self.choices)}
        inner = {choice[:-1] for choice in self.choices}
        leaves = sorted(choice for choice in self.choices if choice not in inner)
        return tuple((0, *(index[leaf[: n + 1]] for n in range(len(leaf)))) for leaf in leaves)

    def cut(self, max_nodes: int, max_depth: int) -> tuple[int, ...]:
        """Indices of the first `max_nodes` choices that are at most `max_depth` deep."""
        kept = [i for i, choice in enumerate(self.choices) if len(choice) <= max_depth]
        return tuple(kept[:max_nodes])


@functools.lru_cache(maxsize=256)
def medusa_tree(choices: tuple[Choice, ...]) -> MedusaTree:
    """The tree of choices that parse_choices() has returned."""
    index = {choice: i for i, choice in enumerate(choices)}
    return MedusaTree(choices, tuple(index.get(c[:-1], -1) for c in choices))


@functools.lru_cache(maxsize=1)
def published_trees() -> Mapping[str, tuple[Choice, ...]]:
    """The trees that were published with Medusa models, by name (medusa_trees.json)."""
    text = Path(__file__).with_name("medusa_trees.json").read_text(encoding="utf-8")
    return {
        name: tuple(tuple(choice) for choice in tree) for name, tree in json.loads(text).items()
    }


def parse_choices(value: object, field: str, error: type[SpecdecError]) -> tuple[Choice, ...]:
    """The choices in any of the accepted forms, complete, parents before their children.

    Raises `error` naming `field` and the offending choice: no list, no integers, negative ranks,
    duplicates, a choice without its parent, none at all, more than 127.
    """
    if isinstance(value, (str, Path)):
        return _from_text(str(value), field, error)
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        raise error(
            f"{field} = {show(value)}: expected a list of choices, got {type(value).__name__}; "
            "for example [[0], [1], [0, 0]], or a name such as 'mc_sim_7b_63'"
        )
    if len(value) > 4 * MAX_DRAFT_LEN:
        raise _too_many(field, len(value), error)
    choices = [_choice(item, f"{field}[{i}]", error) for i, item in enumerate(value)]
    if not choices:
        raise error(f"{field} is empty; give at least one choice, for example [[0]]")
    known: dict[Choice, int] = {}
    for i, choice in enumerate(choices):
        if choice in known:
            raise error(
                f"{field}[{i}] = {list(choice)} is a duplicate of {field}[{known[choice]}]; "
                "keep one"
            )
        known[choice] = i
    inner = {choice[:n] for choice in choices for n in range(1, len(choice))}
    if inner and not inner & known.keys():
        complete = sorted(inner | known.keys(), key=lambda c: (len(c), c))
    else:
        complete = _in_order(choices, known, field, error)
    if len(complete) > MAX_DRAFT_LEN:
        raise _too_many(field, len(complete), error)
    return tuple(complete)


def check_choices(
    choices: Sequence[Choice],
    field: str,
    error: type[SpecdecError],
    *,
    num_heads: int | None = None,
    top_k: int = MAX_TOP_K,
    max_nodes: int = MAX_DRAFT_LEN,
    remedy: str = "use a smaller tree",
) -> None:
    """Hold valid choices against what the heads and the engine have.

    num_heads  None: not known yet
    top_k      guesses a head can give: ranks are 0..top_k - 1
    """
    for choice in choices:
        if num_heads is not None and len(choice) > num_heads:
            raise error(
                f"{field}: choice {list(choice)} needs {len(choice)} heads, there are {num_heads}; "
                "remove it, or use a model with more heads"
            )
        if max(choice) >= top_k:
            raise error(
                f"{field}: choice {list(choice)} has rank {max(choice)}, ranks are 0..{top_k - 1}; "
                "remove it"
            )
    if len(choices) > max_nodes:
        raise error(
            f"{field} has {len(choices)} choices, the first too many is "
            f"{list(choices[max_nodes])}, limit {max_nodes}; {remedy}"
        )


def prune_choices(choices: Sequence[Choice], num_heads: int) -> tuple[Choice, ...]:
    """The choices that `num_heads` heads can serve."""
    return tuple(choice for choice in choices if len(choice) <= num_heads)


def _choice(item: object, field: str, error: type[SpecdecError]) -> Choice:
    if isinstance(item, (str, bytes, Mapping)) or not isinstance(item, Sequence):
        raise error(
            f"{field} = {show(item)}: expected a list of ranks, got {type(item).__name__}; a "
            "choice is for example [0, 1]"
        )
    if not 1 <= len(item) <= MAX_DEPTH:
        raise error(
            f"{field} = {show(item)} has {len(item)} ranks, allowed 1..{MAX_DEPTH}; the root is "
            "no choice"
        )
    where = f"{field} = {show(item)}: rank"
    return tuple(check_int(where, rank, error, low=0, high=MAX_TOP_K - 1) for rank in item)


def _in_order(
    choices: Sequence[Choice], known: Mapping[Choice, int], field: str, error: type[SpecdecError]
) -> list[Choice]:
    """A full list with every parent before its children; raises for a gap."""
    placed: dict[Choice, None] = {}
    for i, choice in enumerate(choices):
        for n in range(1, len(choice) + 1):
            prefix = choice[:n]
            if prefix not in known:
                raise error(
                    f"{field}[{i}] = {list(choice)}: its parent {list(prefix)} is not among the "
                    "choices; add it, or give the paths to the leaves only"
                )
            placed.setdefault(prefix)
    return list(placed)


def _too_many(field: str, count: int, error: type[SpecdecError]) -> SpecdecError:
    return error(
        f"{field} has {count} choices, limit {MAX_DRAFT_LEN} ({MAX_DRAFT_LEN + 1} step tokens with "
        "the golden token); use a smaller tree"
    )


def _from_text(text: str, field: str, error: type[SpecdecError]) -> tuple[Choice, ...]:
    stripped = text.strip()
    if len(stripped) > MAX_TEXT_CHARS:
        raise error(f"{field} has {len(stripped)} characters, limit {MAX_TEXT_CHARS}; shorten it")
    if stripped in published_trees():
        return published_trees()[stripped]
    if _LITERAL.fullmatch(stripped):
        return parse_choices(_literal(stripped, field, error), field, error)
    path = Path(stripped).expanduser()
    if path.suffix.lower() in _SUFFIXES:
        return _from_file(path, field, error)
    raise error(
        f"{field} = {show(text)}: neither a list such as [[0],[0,0]], nor a file "
        f"({', '.join(_SUFFIXES)}), nor a published tree ({', '.join(published_trees())})"
    )


def _literal(text: str, field: str, error: type[SpecdecError]) -> object:
    """Nested lists in brackets, braces or parentheses, with or without the outermost pair."""
    brackets = text.translate(str.maketrans("{}()", "[][]"))
    brackets = re.sub(r",\s*\]", "]", brackets).strip().removesuffix(",")
    # In TensorRT-LLM's spelling one pair of braces is one choice.
    alone = text.startswith("{") and text.count("{") == 1
    for candidate in (brackets, f"[{brackets}]")[alone:]:
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, list):
            return value
    raise error(
        f"{field} = {show(text)}: not a list of choices; write for example [[0],[0,0]] or "
        "{0,0},{1}"
    )


def _from_file(path: Path, field: str, error: type[SpecdecError]) -> tuple[Choice, ...]:
    where = f"{field} (file {str(path)!r})"
    try:
        if path.stat().st_size > MAX_TEXT_CHARS:
            raise error(
                f"{where} has {path.stat().st_size} bytes, limit {MAX_TEXT_CHARS}; is it a list of "
                "choices?"
            )
        text = path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{where} cannot be read ({problem}); give a UTF-8 text file") from None
    if text in published_trees():
        return published_trees()[text]
    if _LITERAL.fullmatch(text):
        return parse_choices(_literal(text, where, error), where, error)
    import yaml

    try:
        value = yaml.safe_load(text)  # JSON is YAML
    except (yaml.YAMLError, RecursionError):
        value = None
    if isinstance(value, Mapping) and "medusa_choices" in value:
        value = value["medusa_choices"]
        if isinstance(value, str) and value in published_trees():
            return published_trees()[value]
    if not isinstance(value, list):
        raise error(
            f"{where}: expected a list of choices, or an object with the key medusa_choices, found "
            f"{show(text)}"
        )
    return parse_choices(value, where, error)

"""The best tree for a number of nodes, and the best number of nodes for a machine.

rates[h][r] is how often head h's guess of rank r is right where the guesses above it were. The node
[r0, r1, ...] is accepted with probability rates[0][r0] * rates[1][r1] * ...; a tree's step delivers
1 + the sum over its nodes. A child is never likelier than its parent, so the best tree of n nodes
is the n likeliest paths, and each best tree contains the smaller ones.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .limits import MAX_DRAFT_LEN
from .medusa_choices import MAX_TOP_K, Choice
from .validate import check_float, check_int, show

__all__ = ["TunedSize", "best_tree", "check_rates", "likelihood", "read_rates", "tune_size"]

Rates = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class TunedSize:
    """One number of nodes: tokens of a step, its time as a multiple of a step of one row, and
    tokens per that time (1.0 is plain decoding)."""

    nodes: int
    tokens: float
    cost: float

    @property
    def gain(self) -> float:
        return self.tokens / self.cost


def check_rates(value: object, field: str) -> Rates:
    """[heads][ranks] of numbers 0..1; those of a head sum to at most 1."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(
            f"{field} = {show(value)}: expected a list with the rates of each head, for example "
            "[[0.6, 0.2], [0.4, 0.15]]"
        )
    rates = []
    for head, row in enumerate(value):
        if not isinstance(row, Sequence) or isinstance(row, str) or not 1 <= len(row) <= MAX_TOP_K:
            raise ConfigError(
                f"{field}[{head}] = {show(row)}: expected a list of 1..{MAX_TOP_K} rates"
            )
        numbers = tuple(
            check_float(f"{field}[{head}][{rank}]", rate, ConfigError, low=0.0, high=1.0)
            for rank, rate in enumerate(row)
        )
        if sum(numbers) > 1.0 + 1e-6:
            raise ConfigError(
                f"{field}[{head}] sums to {sum(numbers):.4f}: a head's guesses exclude each other; "
                "give rates per rank, not cumulative ones"
            )
        rates.append(numbers)
    return tuple(rates)


def read_rates(path: str | Path) -> Rates:
    """Rates of a JSON file: a list, {"guess_rates": ...}, or a heads' config.json with them in
    "training". A folder stands for its config.json."""
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error})") from None
    if isinstance(content, Mapping):
        inner = content.get("training")
        content = content.get(
            "guess_rates", inner.get("guess_rates") if isinstance(inner, Mapping) else None
        )
        if content is None:
            raise ConfigError(f"{file}: no guess_rates in it; measure them: specdec tree --measure")
    return check_rates(content, f"{file}: guess_rates")


def likelihood(choice: Choice, rates: Rates) -> float:
    """The probability that a step accepts this node; 0 for a rank or head that has no rate."""
    result = 1.0
    for head, rank in enumerate(choice):
        known = head < len(rates) and rank < len(rates[head])
        result *= rates[head][rank] if known else 0.0
    return result


def best_tree(rates: Rates, max_nodes: int) -> list[tuple[Choice, float]]:
    """The likeliest paths with their probabilities, the likeliest first, parents before children.

    Fewer than max_nodes when no other has a probability above 0. Ties: shorter, then smaller ranks.
    """
    check_int("max_nodes", max_nodes, ConfigError, low=1, high=MAX_DRAFT_LEN)
    tree: list[tuple[Choice, float]] = []
    heap: list[tuple[float, int, Choice]] = [
        (-rate, 1, (rank,)) for rank, rate in enumerate(rates[0]) if rate > 0.0
    ]
    heapq.heapify(heap)
    while heap and len(tree) < max_nodes:
        negative, depth, choice = heapq.heappop(heap)
        tree.append((choice, -negative))
        if depth < len(rates):
            for rank, rate in enumerate(rates[depth]):
                if rate > 0.0:
                    heapq.heappush(heap, (negative * rate, depth + 1, (*choice, rank)))
    return tree


def tune_size(
    tree: Sequence[tuple[Choice, float]],
    cost: Callable[[int], float],
    draft_seconds: float = 0.0,
) -> list[TunedSize]:
    """Every size from 0 (plain decoding) to the whole tree.

    cost           T(rows): seconds of a step by its rows, a StepCost
    draft_seconds  what evaluating the heads costs each step
    """
    sizes, tokens = [TunedSize(0, 1.0, 1.0)], 1.0
    for nodes, (_, probability) in enumerate(tree, 1):
        tokens += probability
        sizes.append(TunedSize(nodes, tokens, (cost(nodes + 1) + draft_seconds) / cost(1)))
    return sizes

"""Suffix decoding in plain Python, from its definition: every place of the text is looked at.

Shares nothing with the core. Probabilities are fractions of 65536, rounded down at each node, as
they are in the core, so that trees can be compared exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

ONE = 65536
PATTERNS = (1, 3, 8)
OCCURRENCES = 8
# The chance that the next token is one of those that followed a match of 1, 2, ... tokens.
AGREEMENT = (24904, 36045, 42598, 47186, 52429, 55050, 57672, 58982, 62259)


@dataclass(frozen=True)
class Node:
    """A draft: parent -1 is the text's last token; prob, share of ONE; match in tokens."""

    token: int
    parent: int
    prob: int
    share: int
    match: int


@dataclass
class _Group:
    """Occurrences (their order, position behind, match) that agree with one path of drafts."""

    token: int
    parent: int
    depth: int
    places: list[tuple[int, int, int]]
    prob: int
    share: int
    match: int


def agreeing(text: list[int], place: int, most: int) -> int:
    """Tokens in front of `place` that are those at the end of the text, at most `most`."""
    count = 0
    while count < min(most, place) and text[place - count - 1] == text[len(text) - count - 1]:
        count += 1
    return count


def occurrences(text: list[int], most: int, searched: int | None = None) -> list[tuple[int, int]]:
    """(place, match): the most recent occurrences of the longest patterns, those in front of place
    `searched` (None: the end)."""
    searched = len(text) if searched is None else searched
    places: list[int] = []
    for size in sorted(PATTERNS, reverse=True):
        if size > len(text) - 1:
            continue
        end = text[len(text) - size :]
        found = [p for p in range(size, searched) if text[p - size : p] == end]
        for place in found[::-1][:OCCURRENCES]:
            if place not in places and len(places) < OCCURRENCES:
                places.append(place)
    return [(place, agreeing(text, place, most)) for place in places]


def draft(
    text: list[int],
    max_drafts: int,
    *,
    max_tree_depth: int = 24,
    min_prob: int = 0,
    spec_factor: int = 0,
    max_depth: int = 127,
    searched: int | None = None,
) -> list[Node]:
    """The drafts behind the text, best first."""
    found = occurrences(text, max_tree_depth, searched)
    max_depth = min(max_depth, max_tree_depth)
    if spec_factor:
        longest = max((match for _, match in found), default=0)
        max_drafts = min(max_drafts, spec_factor * longest // ONE)
    waiting: list[_Group] = []

    def expand(places: list[tuple[int, int, int]], parent: int, depth: int, prob: int) -> None:
        weights = [2 ** min(match, 12) for _, _, match in places]
        total, longest = sum(weights), max(match for _, _, match in places) + depth
        reached = prob * AGREEMENT[min(longest, len(AGREEMENT)) - 1] // ONE
        followed: dict[int, list[int]] = {}
        for i, (_, place, _) in enumerate(places):
            if place + depth < len(text):
                followed.setdefault(text[place + depth], []).append(i)
        for token, members in followed.items():
            weight = sum(weights[i] for i in members)
            p = reached * weight // total
            if p > 0 and p >= min_prob:
                group = [places[i] for i in members]
                share = ONE * weight // total
                waiting.append(_Group(token, parent, depth + 1, group, p, share, longest))

    nodes: list[Node] = []
    if found and max_drafts > 0 and max_depth > 0:
        expand([(i, place, match) for i, (place, match) in enumerate(found)], -1, 0, ONE)
    while waiting and len(nodes) < max_drafts:
        best = min(waiting, key=lambda g: (-g.prob, g.depth, g.places[0][0]))
        waiting.remove(best)
        nodes.append(Node(best.token, best.parent, best.prob, best.share, best.match))
        if best.depth < max_depth:
            expand(best.places, len(nodes) - 1, best.depth, best.prob)
    return nodes

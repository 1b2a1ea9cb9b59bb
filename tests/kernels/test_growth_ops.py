"""Trees of a draft model that grow on a step's stream, on every backend, against Python lists.

The oracle drops nothing while it grows: the definition says which nodes are the most valuable in
the end, the operations drop at once what can no longer be one of them.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from cuda_calls import CPU, Target, every_backend
from kernel_calls import int32

from specdec_ext import ops

VOCAB, COLUMNS, SENTINEL = 60, 40, -7
LAYOUT = ops.SlotLayout(method="proposed", max_seq_len=400)


@dataclasses.dataclass
class Node:
    token: int
    parent: int
    worth: np.float32
    is_open: bool = False  # it was read, or the next pass reads it
    level: int = 0


@dataclasses.dataclass
class Tree:
    """One request."""

    limit: int
    nodes: list[Node] = dataclasses.field(default_factory=list)
    level: int = 0
    place: dict[int, int] = dataclasses.field(default_factory=lambda: {-1: 0})  # of the last pass

    def order(self) -> list[int]:
        return sorted(range(len(self.nodes)), key=lambda i: (-self.nodes[i].worth, i))

    def kept(self) -> list[int]:
        """The most valuable ones, parents first."""
        return sorted(self.order()[: self.limit])

    def open_nodes(self, level: int | None = None) -> list[int]:
        return [
            i for i in self.kept() if self.nodes[i].is_open and level in (None, self.nodes[i].level)
        ]

    def grow(self, said: list[list[tuple[int, float]]], max_open: int) -> None:
        """said: (token, share) behind each node of the newest level that is open."""
        parents = [-1] if self.level == 0 else self.open_nodes(self.level)
        if self.limit == 0 or not parents:
            return
        self.level += 1
        first = len(self.nodes)
        for parent, children in zip(parents, said, strict=False):
            above = np.float32(1.0) if parent < 0 else self.nodes[parent].worth
            last = np.float32(2.0)
            for token, share in children:
                if not (0 < share <= last and token >= 0):
                    break
                last = np.float32(share)
                worth = above * last if last < 1 else above
                self.nodes.append(Node(token, parent, np.float32(worth), level=self.level))
        new = range(first, len(self.nodes))
        kept = set(self.kept())
        best = sorted(new, key=lambda i: (-self.nodes[i].worth, i))[:max_open]
        for i in best:
            self.nodes[i].is_open = i in kept

    def rows(self) -> tuple[list[tuple[int, int, int]], int]:
        """(token, parent, the parent's row in the pass before) of the next pass behind the golden
        token, and how many are new."""
        new = len(self.open_nodes(self.level)) if self.level else 0
        if new == 0:
            return [], 0
        read = self.open_nodes()
        before, self.place = self.place, {-1: 0, **{node: row for row, node in enumerate(read, 1)}}
        above = [(self.nodes[i].token, self.nodes[i].parent) for i in read]
        return [(token, self.place[parent], before[parent]) for token, parent in above], new

    def drafts(self) -> list[tuple[int, int, float]]:
        """(token, parent among the drafts, worth), the most valuable first."""
        best = self.order()[: self.limit]
        place = {-1: -1, **{node: i for i, node in enumerate(best)}}
        nodes = [self.nodes[i] for i in best]
        return [(n.token, place[n.parent], float(n.worth)) for n in nodes]


def children(rng: random.Random, width: int, ids: list[int] | None) -> tuple[list[Any], list[Any]]:
    """Columns and shares of a row, and what they mean. Many are equal; some are none."""
    columns = rng.sample(range(COLUMNS), width)
    shares = sorted((rng.choice([0.5, 0.25, 0.25, 0.125, 1.0, 0.3]) for _ in columns), reverse=True)
    if rng.random() < 0.3:
        i = rng.randrange(width)
        what = rng.choice(["nan", "zero", "rises", "column"])
        if what == "column":
            columns[i] = rng.choice([-1, COLUMNS])
        else:
            shares[i] = {"nan": float("nan"), "zero": 0.0, "rises": 1.5}[what]
    tokens = [-1 if not 0 <= c < COLUMNS else (c if ids is None else ids[c]) for c in columns]
    return [columns, shares], list(zip(tokens, shares, strict=True))


def slots_of(target: Target, requests: int) -> torch.Tensor:
    """Slots in the middle of their text."""
    slots = target.put(torch.zeros(requests, LAYOUT.slot_bytes, dtype=torch.uint8))
    for slot in range(requests):
        ops.enter_slot(slots, slot, LAYOUT.request_bytes([5], max_tokens=300))
    results, path, path_len = ops.make_results(LAYOUT, requests, target.device)
    ops.commit_step(
        LAYOUT, slots, target.put(int32(range(requests))), target.put(int32(range(requests + 1))),
        target.put(int32([9] * requests)), results=results, path=path, path_len=path_len,
        backend=target.backend,
    )  # fmt: skip
    return slots


def grow_trees(target: Target, rng: random.Random) -> None:
    requests, width, levels = rng.randrange(1, 6), rng.choice([1, 2, 3, 5]), rng.randrange(1, 6)
    ids = rng.sample(range(VOCAB), COLUMNS) if rng.random() < 0.5 else None
    trees = [Tree(rng.choice([0, 1, 4, 9, 30])) for _ in range(requests)]
    put, where = target.put, {"backend": target.backend}
    # What another step left.
    growths = put(torch.randint(0, 100, ops.make_growths(requests).shape, dtype=torch.uint8))
    golden = [rng.randrange(VOCAB) for _ in range(requests)]
    for level in range(levels):
        places = 1 if level == 0 else width
        drawn = [[children(rng, width, ids) for _ in range(places)] for _ in range(requests)]
        given = torch.tensor([[row[0] for row, _ in of] for of in drawn])
        shares = torch.tensor([[row[1] for row, _ in of] for of in drawn])
        max_open = width if level + 1 < levels else 0
        ops.grow_drafts(
            growths, put(shares), put(given), put(int32([t.limit for t in trees])),
            num_columns=COLUMNS, max_open=max_open, begins=level == 0,
            token_ids=None if ids is None else put(int32(ids)), **where,
        )  # fmt: skip
        for tree, of in zip(trees, drawn, strict=True):
            tree.grow([said for _, said in of], max_open)
        wanted = [tree.rows() if tree.level == level + 1 else ([], 0) for tree in trees]
        size = sum(len(rows) + 1 for rows, new in wanted if new) + rng.choice([0, 3])
        tokens, parents, sources = (
            put(torch.full((size,), SENTINEL, dtype=torch.int32)) for _ in range(3)
        )
        cu_rows = put(torch.full((requests + 1,), SENTINEL, dtype=torch.int32))
        logit_rows = put(torch.full((requests, width), SENTINEL, dtype=torch.int32))
        ops.pack_drafts(
            growths, put(int32(golden)), tokens=tokens, parents=parents, cu_rows=cu_rows,
            logit_rows=logit_rows, sources=sources, **where,
        )  # fmt: skip
        rows, firsts, needed = [], [0], []
        for token, (behind, new) in zip(golden, wanted, strict=True):
            begin = len(rows)
            if new:
                rows += [(token, -1, -1), *behind]
            firsts.append(len(rows))
            last = list(range(len(rows) - new, len(rows)))
            needed.append(last + [0] * (width - new))
            assert not new or begin < len(rows)
        rows += [(0, -1, -1)] * (size - len(rows))
        got = zip(tokens.tolist(), parents.tolist(), sources.tolist(), strict=True)
        assert list(got) == rows
        assert cu_rows.tolist() == firsts
        assert logit_rows.tolist() == needed
    slots = slots_of(target, requests)
    order = rng.sample(range(requests), requests)
    ops.propose_growths(LAYOUT, slots, put(int32([*order])), growths, **where)
    size = 128 * requests
    tokens, parents = (put(torch.zeros(size, dtype=torch.int32)) for _ in range(2))
    cu_rows = put(torch.zeros(requests + 1, dtype=torch.int32))
    kv_len = put(torch.zeros(requests, dtype=torch.int32))
    ops.draft_step(
        LAYOUT, slots, put(int32([*order])), tokens=tokens, parents=parents, cu_rows=cu_rows,
        kv_len=kv_len, **where,
    )  # fmt: skip
    first = cu_rows.tolist()
    for b, (tree, slot) in enumerate(zip(trees, order, strict=True)):
        drafts = tree.drafts()
        part = slice(first[b] + 1, first[b + 1])
        assert tokens.tolist()[part] == [token for token, _, _ in drafts]
        assert parents.tolist()[part] == [parent + 1 for _, parent, _ in drafts]
        words = slots[slot].cpu().view(torch.float32)  # 127 estimates and padding end a slot
        assert words[len(words) - 128 :][: len(drafts)].tolist() == [w for _, _, w in drafts]


@every_backend
def test_the_most_valuable_nodes_stay_and_are_read(target: Target) -> None:
    for seed in range(200 if target == CPU else 25):
        grow_trees(target, random.Random(seed))


@every_backend
def test_rows_that_do_not_fit_are_left_out(target: Target) -> None:
    put, where = target.put, {"backend": target.backend}
    growths = put(ops.make_growths(3))
    shares = put(torch.tensor([[[0.5, 0.25]]] * 3))
    columns = put(torch.tensor([[[1, 2]]] * 3))
    ops.grow_drafts(growths, shares, columns, put(int32([5, 5, 5])), num_columns=COLUMNS,
                    max_open=2, begins=True, **where)  # fmt: skip
    tokens, parents = (put(torch.full((7,), SENTINEL, dtype=torch.int32)) for _ in range(2))
    cu_rows, logit_rows = put(int32([SENTINEL] * 4)), put(int32([[SENTINEL] * 2] * 3))
    ops.pack_drafts(growths, put(int32([7, 8, 9])), tokens=tokens, parents=parents,
                    cu_rows=cu_rows, logit_rows=logit_rows, **where)  # fmt: skip
    assert cu_rows.tolist() == [0, 3, 6, 6]
    assert tokens.tolist() == [7, 1, 2, 8, 1, 2, 0]
    assert parents.tolist() == [-1, 0, 0, -1, 0, 0, -1]
    assert logit_rows.tolist() == [[1, 2], [4, 5], [0, 0]]


@every_backend
def test_as_many_children_as_there_may_be(target: Target) -> None:
    """64 of each of 64 nodes, of which 127 stay."""
    rng = random.Random(5)
    put, tree = target.put, Tree(127)
    growths = put(ops.make_growths(1))
    for places in (1, 64):
        shares = [sorted((rng.random() for _ in range(64)), reverse=True) for _ in range(places)]
        columns = [[*range(64)] for _ in range(places)]
        tensor = torch.tensor([shares])
        ops.grow_drafts(growths, put(tensor), put(torch.tensor([columns])), put(int32([127])),
                        num_columns=64, max_open=64 if places == 1 else 0, begins=places == 1,
                        backend=target.backend)  # fmt: skip
        rows = zip(columns, tensor[0].tolist(), strict=True)
        said = [list(zip(tokens, of, strict=True)) for tokens, of in rows]
        tree.grow(said, 64 if places == 1 else 0)
    slots = slots_of(target, 1)
    ops.propose_growths(LAYOUT, slots, put(int32([0])), growths, backend=target.backend)
    got = [put(torch.zeros(n, dtype=torch.int32)) for n in (128, 128, 2, 1)]
    ops.draft_step(LAYOUT, slots, put(int32([0])), tokens=got[0], parents=got[1], cu_rows=got[2],
                   kv_len=got[3], backend=target.backend)  # fmt: skip
    assert got[2].tolist() == [0, 128]
    assert got[0].tolist()[1:] == [token for token, _, _ in tree.drafts()]
    assert got[1].tolist()[1:] == [parent + 1 for _, parent, _ in tree.drafts()]


def growing() -> dict[str, Any]:
    return {
        "growths": ops.make_growths(2),
        "shares": torch.zeros(2, 1, 3),
        "columns": torch.zeros(2, 1, 3, dtype=torch.int64),
        "limits": int32([1, 1]),
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"growths": torch.zeros(2, 8, dtype=torch.uint8)}, "growths"),
        ({"shares": torch.zeros(2, 65, 3)}, r"65 nodes of 3 children: give 1\.\.64"),
        ({"shares": torch.zeros(2, 2, 3), "columns": torch.zeros(2, 2, 3, dtype=torch.int64)},
         "one node for the first level"),
        ({"columns": torch.zeros(2, 1, 3, dtype=torch.int32)}, "columns"),
        ({"limits": int32([1])}, "limits"),
        ({"max_open": 65}, r"max_open = 65: give 0\.\.64"),
        ({"num_columns": 0}, "num_columns = 0"),
        ({"token_ids": int32([1])}, "token_ids"),
    ],
)  # fmt: skip
def test_bad_levels_are_refused(changed: dict[str, Any], message: str) -> None:
    given = {**growing(), "num_columns": 3, "max_open": 1, "begins": True, **changed}
    with pytest.raises((ValueError, TypeError), match=message):
        ops.grow_drafts(given.pop("growths"), given.pop("shares"), given.pop("columns"),
                        given.pop("limits"), **given)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"golden": int32([1])}, "golden"),
        ({"parents": int32([1])}, "parents"),
        ({"cu_rows": int32([1, 2])}, "cu_rows"),
        ({"logit_rows": torch.zeros(2, 65, dtype=torch.int32)}, r"65 places: give 1\.\.64"),
    ],
)
def test_bad_rows_are_refused(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "golden": int32([1, 1]), "tokens": int32([0] * 4), "parents": int32([0] * 4),
        "cu_rows": int32([0] * 3), "logit_rows": torch.zeros(2, 1, dtype=torch.int32), **changed,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=message):
        ops.pack_drafts(ops.make_growths(2), given.pop("golden"), **given)


def test_trees_of_other_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="growths has 3 requests, slot_ids 2"):
        ops.propose_growths(LAYOUT, ops.make_slots(LAYOUT, 2), int32([0, 1]), ops.make_growths(3))

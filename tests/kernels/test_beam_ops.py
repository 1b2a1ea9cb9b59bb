"""Beam search on a step's stream, on every backend, against beams in Python lists.

The oracle keeps beams as paths and sums in double precision. Where two sums are nearer than single
precision tells, either order will do: such cases are made only on purpose, with equal scores.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from cuda_calls import Target, every_backend
from kernel_calls import int32

from reference.redrafter_reference import beam_search, likeliest_tree
from specdec_ext import ops

SENTINEL = -7


class Search:
    """Buffers of D requests on a target, and the depths as they go on."""

    def __init__(self, target: Target, requests: int, length: int, width: int) -> None:
        self.target, self.requests, self.length, self.width = target, requests, length, width

        def noise(*shape: int) -> torch.Tensor:
            return target.put(torch.full(shape, SENTINEL, dtype=torch.int32))

        nodes = (requests, length, width)
        self.beams = {
            "tokens": noise(*nodes),
            "parents": noise(*nodes),
            # Left by beams of another step, which looked good.
            "log_probs": target.put(torch.full(nodes, -0.25)),
            "reached": noise(requests),
        }
        self.next_rows, self.next_tokens = noise(requests, width), noise(requests, width)

    def grow(
        self,
        depth: int,
        rows: list[list[float]],
        asked: list[tuple[int, int]],
        ids: list[int] | None,
        kept: int,
        heat: list[float] | None = None,
    ) -> None:
        """rows: the scores of each; the best `kept` of them are what the operation is given."""
        best, columns = torch.topk(torch.tensor(rows), kept)
        put = self.target.put
        ops.grow_beams(
            put(best), put(columns), **self.beams, depth=depth, num_scores=len(rows[0]),
            num_beams=put(int32([n for n, _ in asked])), lengths=put(int32([n for _, n in asked])),
            next_rows=self.next_rows, next_tokens=self.next_tokens,
            token_ids=None if ids is None else put(int32(ids)), backend=self.target.backend,
            temperatures=None if heat is None else put(torch.tensor(heat)),
        )  # fmt: skip

    def trees(self) -> list[tuple[list[int], list[int]]]:
        count = self.length * self.width
        shape = (self.requests, count)
        drafts, parents, nodes = (
            self.target.put(torch.full(shape, SENTINEL, dtype=torch.int32)) for _ in range(3)
        )
        counts = self.target.put(torch.full((self.requests,), SENTINEL, dtype=torch.int32))
        ops.merge_beams(**self.beams, draft_tokens=drafts, draft_parents=parents, counts=counts,
                        draft_nodes=nodes, backend=self.target.backend)  # fmt: skip
        found = []
        for b, (tokens, above, n) in enumerate(
            zip(drafts.tolist(), parents.tolist(), counts.tolist(), strict=True)
        ):
            node_of = nodes[b].tolist()
            assert node_of[n:] == [SENTINEL] * (count - n) and len(set(node_of[:n])) == n
            for i, node in enumerate(node_of[:n]):
                depth, place = divmod(node, self.width)
                assert self.beams["tokens"][b, depth, place] == tokens[i]
                above_place = int(self.beams["parents"][b, depth, place])
                above_node = (depth - 1) * self.width + above_place if depth else None
                assert above_node == (node_of[above[i]] if above[i] >= 0 else None)
            assert tokens[n:] == above[n:] == [-1] * (count - n)
            assert all(-1 <= parent < i for i, parent in enumerate(above[:n]))
            found.append((tokens[:n], above[:n]))
        return found


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


class Scorer:
    """Random scores of a path, the same whenever they are asked for; some of them hostile."""

    def __init__(self, seed: int, columns: int, hostile: float) -> None:
        self.seed, self.columns, self.hostile = seed, columns, hostile

    def __call__(self, request: int, path: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{self.seed} {request} {path}")
        scores = [float(torch.tensor(rng.gauss(0, 2))) for _ in range(self.columns)]
        if rng.random() < self.hostile:
            bad = rng.choice([math.nan, math.inf, -math.inf])
            for _ in range(rng.choice([1, 2, self.columns])):
                scores[rng.randrange(self.columns)] = bad
        return scores


def run_case(target: Target, seed: int, hostile: bool = False) -> int:
    """Depth after depth; returns the nodes that were compared. `hostile`: most rows have scores
    that are no numbers or infinite, and one request a temperature that is none."""
    rng = random.Random(seed)
    requests = rng.choice([1, 2, 5])
    width, length = rng.choice([(1, 1), (1, 6), (3, 4), (5, 5), (9, 3), (40, 2), (70, 1)])
    columns = rng.choice([2, 7, 40, 90])
    kept = min(columns, rng.choice([50, 50, 5]))
    ids = sorted(rng.sample(range(1000), columns)) if rng.random() < 0.5 else None
    scorer = Scorer(seed, columns, 0.6 if hostile else rng.choice([0.0, 0.0, 0.2]))
    heat = None
    if hostile or rng.random() < 0.4:
        heat = [rng.choice([0.25, 0.5, 1.0, 3.0]) for _ in range(requests)]
        if hostile or rng.random() < 0.2:
            heat[-1] = rng.choice([0.0, -2.0, math.inf, math.nan])
    asked = [
        (rng.choice([0, 1, width, width, width + 3, rng.randrange(1, width + 1)]),
         rng.choice([0, 1, length, length, length + 2]))
        for _ in range(requests)
    ]  # fmt: skip

    def scores_of(request: int, tokens: tuple[int, ...]) -> list[float]:
        """What the operation is given of the row: the others are below everything."""
        scores = scorer(request, tokens)
        if any(math.isnan(s) or s == math.inf for s in scores):
            return scores
        order = sorted(range(columns), key=lambda i: -scores[i])[:kept]
        return [s if i in order else -math.inf for i, s in enumerate(scores)]

    search = Search(target, requests, length, width)
    # The path of each row as the operation said it; None: nobody's.
    paths: list[tuple[int, ...] | None] = [()] * requests
    sums_found: list[dict[tuple[int, ...], float]] = [{} for _ in range(requests)]
    for depth in range(length):
        # Rows of nobody are as good as any.
        rows = [
            scorer(i // (len(paths) // requests), (-1,) if path is None else path)
            for i, path in enumerate(paths)
        ]
        search.grow(depth, rows, asked, ids, kept, heat)
        following: list[tuple[int, ...] | None] = []
        for b in range(requests):
            for j in range(width):
                token = int(search.beams["tokens"][b, depth, j])
                row, given = int(search.next_rows[b, j]), int(search.next_tokens[b, j])
                assert row // (len(paths) // requests) == b
                before = paths[row]
                if token < 0:
                    assert (given, row % (len(paths) // requests)) == (0, 0)
                    following.append(None)
                    continue
                assert given == token and before is not None
                assert int(search.beams["parents"][b, depth, j]) == row % (len(paths) // requests)
                following.append((*before, token))
                sums_found[b][(*before, token)] = float(search.beams["log_probs"][b, depth, j])
        paths = following
    compared = 0
    for b, (beams, depths) in enumerate(asked):

        def score(path: tuple[int, ...], b: int = b) -> list[float]:
            return scores_of(b, path if ids is None else tuple(ids[i] for i in path))

        wanted = []
        warmth = 1.0 if heat is None else heat[b]
        if beams and depths and 0 < warmth < math.inf:
            wanted = beam_search(score, min(beams, width), min(depths, length), warmth)
        if ids is not None:
            wanted = [(tuple(ids[i] for i in path), sums) for path, sums in wanted]
        tokens, parents = search.trees()[b]
        found = paths_of(tokens, parents)
        tree = likeliest_tree(wanted, 127)
        assert len(set(found)) == len(found)
        assert sorted(found) == sorted(paths_of(*tree)), (seed, b)
        sums = {path[: d + 1]: total for path, by in wanted for d, total in enumerate(by)}
        order = [sums[path] for path in found]
        assert order == pytest.approx([sums_found[b][path] for path in found], abs=1e-4)
        assert all(x >= y - 1e-5 for x, y in itertools.pairwise(order))
        compared += len(found)
    return compared


@every_backend
def test_beams_and_trees_equal_the_reference(target: Target) -> None:
    cases = 40 if target.backend == "cuda-emu" else 150
    assert sum(run_case(target, seed) for seed in range(cases)) > 8 * cases


@every_backend
def test_hostile_scores_and_temperatures(target: Target) -> None:
    assert sum(run_case(target, seed, hostile=True) for seed in range(60)) > 60


@every_backend
def test_ties_go_to_the_beam_that_stood_first(target: Target) -> None:
    """All scores equal: the columns in the order in which they were given, beam after beam."""
    search = Search(target, 1, 2, 3)
    search.grow(0, [[1.0] * 8], [(3, 2)], None, 8)
    given = search.beams["tokens"][0, 0].tolist()
    assert sorted(given) == sorted(set(given))
    assert search.next_rows.tolist() == [[0, 0, 0]]
    search.grow(1, [[1.0] * 8] * 3, [(3, 2)], None, 8)
    assert search.beams["parents"][0, 1].tolist() == [0, 0, 0]
    assert search.next_rows.tolist() == [[0, 0, 0]]
    expected = math.log(1 / 8)
    assert search.beams["log_probs"][0, :, 0].tolist() == pytest.approx([expected, 2 * expected])
    tokens, parents = search.trees()[0]
    assert tokens[0] == given[0] and parents == [-1, 0, 0, 0]


@every_backend
def test_what_is_too_unlikely_for_a_float_is_no_beam(target: Target) -> None:
    search = Search(target, 1, 2, 3)
    search.grow(0, [[1e38, -1e38, 9e37]], [(3, 2)], None, 3, [0.1])
    assert search.beams["tokens"][0, 0].tolist() == [0, 2, -1]
    assert search.next_tokens.tolist() == [[0, 2, 0]]


@every_backend
def test_what_is_out_of_order_is_not_looked_at(target: Target) -> None:
    """Nor a column that there is not; the softmax is over what is left."""
    put, search = target.put, Search(target, 3, 1, 4)
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.0], [2.0, 2.0, 2.0, 2.0], [1.0, 0.0, -1.0, -2.0]])
    columns = torch.tensor([[5, 1, 2, 3], [0, 6, 2, 1], [-1, 0, 1, 2]])
    ops.grow_beams(
        put(scores), put(columns), **search.beams, depth=0, num_scores=6,
        num_beams=put(int32([4] * 3)), lengths=put(int32([1] * 3)), next_rows=search.next_rows,
        next_tokens=search.next_tokens, backend=target.backend,
    )  # fmt: skip
    assert search.beams["tokens"][:, 0].tolist() == [[5, 1, -1, -1], [0, -1, -1, -1], [-1] * 4]
    assert search.beams["reached"].tolist() == [1, 1, 0]
    total = math.log(1 + math.exp(-2))
    assert search.beams["log_probs"][0, 0, :2].tolist() == pytest.approx([-total, -2 - total])
    assert search.beams["log_probs"][1, 0, 0].item() == 0.0


@every_backend
def test_beams_that_hang_together_badly_make_entries_that_are_no_drafts(target: Target) -> None:
    put = target.put
    tokens = put(int32([[[4, 5], [6, -1]], [[-1, 5], [7, 8]]]))
    parents = put(int32([[[-1, -1], [9, 0]], [[-1, -1], [0, 1]]]))
    log_probs = put(
        torch.tensor([[[-1.0, -2.0], [-3.0, 0.0]], [[-1.0, -2.0], [-3.0, float("nan")]]])
    )
    drafts, above, counts = (put(torch.zeros(s, dtype=torch.int32)) for s in ((2, 4), (2, 4), (2,)))

    def merge(*reached: int) -> None:
        ops.merge_beams(tokens, parents, log_probs, put(int32(reached)), draft_tokens=drafts,
                        draft_parents=above, counts=counts, backend=target.backend)  # fmt: skip

    merge(2, 99)
    assert counts.tolist() == [1, 3]
    assert (drafts[0].tolist(), above[0].tolist()) == ([6, -1, -1, -1], [-2, -1, -1, -1])
    assert (drafts[1].tolist(), above[1].tolist()) == ([5, 7, 8, -1], [-1, -2, 0, -1])
    merge(-1, -(2**31))
    assert counts.tolist() == [0, 0]
    assert drafts.tolist() == above.tolist() == [[-1] * 4] * 2


def arguments() -> dict[str, Any]:
    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    return {
        "scores": torch.zeros(2, 5), "columns": torch.zeros(2, 5, dtype=torch.int64),
        "tokens": ints(2, 4, 3), "parents": ints(2, 4, 3), "log_probs": torch.zeros(2, 4, 3),
        "reached": ints(2), "depth": 0, "num_scores": 9, "num_beams": ints(2), "lengths": ints(2),
        "next_rows": ints(2, 3), "next_tokens": ints(2, 3),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"depth": 4}, r"depth = 4: give 0\.\.3"),
        ({"depth": 1}, "scores"),
        ({"num_scores": 0}, "num_scores = 0"),
        ({"scores": torch.zeros(2, 65)}, r"scores has 65 columns: give 1\.\.64"),
        ({"scores": torch.zeros(2, 5).double()}, "scores"),
        ({"columns": torch.zeros(2, 5, dtype=torch.int32)}, "columns"),
        ({"columns": torch.zeros(2, 4, dtype=torch.int64)}, "columns"),
        ({"tokens": torch.zeros(2, 32, 4, dtype=torch.int32)}, "4 beams of 32 drafts.*127 in all"),
        ({"parents": torch.zeros(2, 4, 2, dtype=torch.int32)}, "parents"),
        ({"log_probs": torch.zeros(2, 4, 3, dtype=torch.float16)}, "log_probs"),
        ({"reached": torch.zeros(3, dtype=torch.int32)}, "reached"),
        ({"num_beams": torch.zeros(2)}, "num_beams"),
        ({"lengths": torch.zeros(1, dtype=torch.int32)}, "lengths"),
        ({"next_rows": torch.zeros(3, 2, dtype=torch.int32)}, "next_rows"),
        ({"next_tokens": torch.zeros(6, dtype=torch.int32)}, "next_tokens"),
        ({"token_ids": torch.zeros(8, dtype=torch.int32)}, "token_ids"),
        ({"temperatures": torch.ones(3)}, "temperatures"),
        ({"temperatures": torch.ones(2, dtype=torch.float64)}, "temperatures"),
    ],
)
def test_bad_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    given = {**arguments(), **changed}
    with pytest.raises((ValueError, TypeError), match=message):
        ops.grow_beams(given.pop("scores"), given.pop("columns"), **given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"draft_tokens": torch.zeros(2, 11, dtype=torch.int32)}, "draft_tokens"),
        ({"draft_parents": torch.zeros(2, 12)}, "draft_parents"),
        ({"draft_nodes": torch.zeros(2, 11, dtype=torch.int32)}, "draft_nodes"),
        ({"counts": torch.zeros(3, dtype=torch.int32)}, "counts"),
        ({"tokens": torch.zeros(2, 4, 4, dtype=torch.int32)}, "parents"),
    ],
)
def test_bad_places_for_trees_are_refused(changed: dict[str, Any], message: str) -> None:
    beams = {name: arguments()[name] for name in ("tokens", "parents", "log_probs", "reached")}
    given = {
        **beams, "draft_tokens": torch.zeros(2, 12, dtype=torch.int32),
        "draft_parents": torch.zeros(2, 12, dtype=torch.int32),
        "counts": torch.zeros(2, dtype=torch.int32), **changed,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=message):
        ops.merge_beams(**given)

"""Beam search on the host and the prefix tree of its beams, against lists in double precision."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from reference.redrafter_reference import log_probabilities
from specdec_ext import _core_testing
from specdec_ext.config.limits import MAX_DRAFT_LEN


class Scorer:
    """Scores as a function of the path: every kind of row that a network could hand over."""

    def __init__(self, seed: int, vocab: int, kind: str) -> None:
        self.seed, self.vocab, self.kind = seed, vocab, kind
        self.made: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, path: Sequence[int]) -> np.ndarray:
        key = tuple(path)
        if key not in self.made:
            self.made[key] = self.row(np.random.default_rng([self.seed, *key]))
        return self.made[key]

    def doubles(self, path: Sequence[int]) -> list[float]:
        values: list[float] = self(path).astype(np.float64).tolist()
        return values

    def row(self, rng: np.random.Generator) -> np.ndarray:
        row = rng.normal(0, 3, self.vocab).astype(np.float32)
        if self.kind == "ties":
            row = np.round(row / 3)
        elif self.kind == "equal":
            row[:] = 1.5
        elif self.kind == "peaked":
            row[rng.integers(self.vocab)] = 60
        elif self.kind == "forbidden":
            row[rng.random(self.vocab) < 0.7] = -np.inf
        elif self.kind == "broken" and rng.random() < 0.3:
            row[rng.integers(self.vocab)] = rng.choice([np.nan, np.inf, -np.inf])
        elif self.kind == "broken" and rng.random() < 0.1:
            row[:] = -np.inf
        elif self.kind == "large":
            row *= 1e37
        return row.astype(np.float32)


KINDS = ("normal", "ties", "equal", "peaked", "forbidden", "broken", "large")


Path = tuple[int, ...]
LOWEST = float(np.finfo(np.float32).min)  # what is less likely has no sum


def nodes_of(search: Any, request: int, limit: int = MAX_DRAFT_LEN) -> dict[Path, float]:
    """Log-probability of each node of the tree by its path, in the order of the tree."""
    tokens, parents, depths, log_probs = (part.tolist() for part in search.tree(request, limit))
    paths: list[Path] = []
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        assert -1 <= parent < i
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert depths == [len(path) for path in paths] and len(set(paths)) == len(paths)
    return dict(zip(paths, log_probs, strict=True))


class Search:
    """A BeamSearch of several requests, fed by their scorers, each depth held against lists.

    What the search must choose follows from the sums that it said of the depth before; so a sum
    that rounds the other way changes nothing behind it.
    """

    def __init__(
        self,
        scorers: Sequence[Scorer],
        shapes: Sequence[tuple[int, int]],
        temperatures: Sequence[float] | None = None,
        token_ids: np.ndarray | None = None,
        keeps_laws: Sequence[bool] | None = None,
    ) -> None:
        self.scorers, self.shapes, self.ids = scorers, shapes, token_ids
        self.temperatures = temperatures or [1.0] * len(shapes)
        self.core = _core_testing.BeamSearch()
        sizes = (np.array(x, np.int32) for x in zip(*shapes, strict=True))
        self.core.start(*sizes, temperatures, keeps_laws)
        # Paths of columns, with their sums; of each request, the beams of its last depth.
        self.beams: list[dict[Path, float]] = [{(): 0.0} for _ in scorers]
        rows: list[tuple[int, Path]] = [(r, ()) for r in range(len(scorers))]
        assert self.core.row_tokens.tolist() == [-1] * len(scorers)
        while self.core.num_rows:
            assert self.core.num_rows == len(rows) == len(self.core.row_log_probs)
            self.core.advance(np.stack([scorers[r](path) for r, path in rows]), token_ids)
            grown = self._grown_rows(rows)
            for r in {r for r, _ in rows}:
                self._check_depth(r, [path for owner, path in grown if owner == r])
            rows = grown

    def named(self, path: Path) -> Path:
        return path if self.ids is None else tuple(int(self.ids[column]) for column in path)

    def _grown_rows(self, rows: Sequence[tuple[int, Path]]) -> list[tuple[int, Path]]:
        back = None if self.ids is None else {int(t): i for i, t in enumerate(self.ids)}
        grown = zip(self.core.row_parents.tolist(), self.core.row_tokens.tolist(), strict=True)
        return [(rows[p][0], (*rows[p][1], t if back is None else back[t])) for p, t in grown]

    def _check_depth(self, r: int, grown: Sequence[Path]) -> None:
        num_beams, length = self.shapes[r]
        before, scorer = self.beams[r], self.scorers[r]
        laws = {
            path: log_probabilities(scorer.doubles(path), self.temperatures[r]) for path in before
        }
        sums = {(*path, i): before[path] + logp for path in before for i, logp in laws[path]}
        sums = {path: value for path, value in sums.items() if value > LOWEST}
        named = {self.named(path): path for path in sums}
        depth = len(next(iter(before))) + 1
        nodes = nodes_of(self.core, r)
        found = {named[path]: value for path, value in nodes.items() if len(path) == depth}
        if not sums:
            assert not grown and not found
            return
        assert len(found) == min(num_beams, len(sums))
        assert list(found.values()) == pytest.approx([sums[p] for p in found], rel=1e-5, abs=1e-5)
        # Nothing better was left out; of a row the best scores, the smaller column first on ties.
        left_out = [value for path, value in sums.items() if path not in found]
        worst = min(found.values())
        assert all(value <= worst + 1e-5 * (1 + abs(worst)) for value in left_out)
        taken = {path: [p[-1] for p in found if p[:-1] == path] for path in before}
        for path, columns in taken.items():
            assert set(columns) == {i for i, _ in laws[path][: len(columns)]}
        # Where beams are equally good and are extended alike, the first has the more.
        for (a, x), (b, y) in itertools.pairwise(before.items()):
            if x == y and np.array_equal(scorer(a), scorer(b)):
                assert len(taken[a]) >= len(taken[b])
        # The tree: these beams and what leads to them, the likeliest first.
        assert set(nodes) == {self.named(path[:i]) for path in found for i in range(1, depth + 1)}
        order = [(-value, len(path)) for path, value in nodes.items()]
        assert order == sorted(order)
        if depth < length:  # they are the next rows, the best first
            assert set(grown) == set(found) and len(grown) == len(found)
            found = {path: found[path] for path in grown}
            assert list(found.values()) == sorted(found.values(), reverse=True)
        self.beams[r] = found


def same(a: Any, b: Any, requests: int) -> bool:
    return all(
        np.array_equal(x, y)
        for r in range(requests)
        for x, y in zip(a.tree(r), b.tree(r), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_depth_chooses_the_best_extensions(kind: str) -> None:
    """300 searches of 1 to 4 requests for each kind of row."""
    rng = random.Random(KINDS.index(kind))
    for case in range(300):
        vocab = rng.choice([1, 2, 3, 7, 49, 50, 51, 64, 65, 130])
        requests = rng.randint(1, 4)
        shapes, temperatures = [], []
        for _ in range(requests):
            beams = rng.choice([1, 1, 2, 3, 5, 8, 25])
            shapes.append((beams, rng.randint(1, min(6, MAX_DRAFT_LEN // beams))))
            temperatures.append(rng.choice([1.0, 1.0, 0.3, 2.5]))
        scorers = [Scorer(1000 * case + r, vocab, kind) for r in range(requests)]
        ids = None
        if rng.random() < 0.3:
            ids = np.sort(np.random.default_rng(case).permutation(3 * vocab)[:vocab])
            ids = ids.astype(np.int32)
        search = Search(scorers, shapes, temperatures, ids)
        for r in range(requests):
            whole = nodes_of(search.core, r)
            for limit in (0, 1, 2, len(whole) // 2, max(0, len(whole) - 1), len(whole)):
                cut = nodes_of(search.core, r, limit)
                assert list(cut.items()) == list(whole.items())[:limit]


def test_a_large_vocabulary_and_every_beam_count() -> None:
    """More scores than the search collects at once, sorted rising: the worst order for it."""
    for beams in (1, 2, 50, 63, 127):
        scorer = Scorer(beams, 9000, "normal")
        scorer.made[()] = np.sort(scorer(()))
        Search([scorer], [(beams, min(2, MAX_DRAFT_LEN // beams))])
    # More beams than a row has candidates: as many as there are.
    search = Search([Scorer(0, 9000, "normal")], [(127, 1)])
    assert len(nodes_of(search.core, 0)) == 50


HOSTILE_ROWS = {
    "normal": lambda rng, n: rng.normal(0, 3, n),
    "few different": lambda rng, n: rng.integers(0, 4, n),
    "zeros of both signs": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    "about zero": lambda rng, n: rng.choice([-1e-45, -0.0, 0.0, 1e-45, -1.0], n),
    "all equal": lambda rng, n: np.full(n, -7.0),
    "falling": lambda rng, n: np.sort(rng.normal(0, 1, n))[::-1],
    "rising": lambda rng, n: np.sort(rng.normal(0, 1, n)),
    "one block holds them": lambda rng, n: np.r_[np.linspace(5, 6, 40), rng.normal(-50, 1, n - 40)],
    "ties at the end": lambda rng, n: np.r_[rng.normal(-9, 1, n - 49), np.full(49, 3.0)],
    "few that count": lambda rng, n: np.where(rng.random(n) < 30 / n, rng.normal(0, 1, n), -np.inf),
    "as far apart as counts": lambda rng, n: rng.choice([-1e38, 1e38, 1e-38, -1e-38, -np.inf], n),
    "nothing": lambda rng, n: np.full(n, -np.inf),
}


@pytest.mark.parametrize("kind", HOSTILE_ROWS)
def test_the_best_of_long_rows_in_their_order(kind: str) -> None:
    """Rows with more blocks than are asked for: the 50 best, the smaller index first on ties."""
    for case in range(60):
        rng = np.random.default_rng([case, len(kind)])
        n = int(rng.choice([51, 1568, 1600, 1601, 1632, 1633, 4096, 8191, 20000]))
        row = HOSTILE_ROWS[kind](rng, n).astype(np.float32)
        search = _core_testing.BeamSearch()
        search.start([127], [1])
        search.advance(row[None])
        order = np.argsort(-row, kind="stable")[:50]
        expected = [int(i) for i in order if row[i] > -np.inf]
        assert search.tree(0)[0].tolist() == expected
        bad = row.copy()
        bad[rng.integers(n)] = rng.choice([np.nan, np.inf])
        search.start([127], [1])
        search.advance(bad[None])
        assert search.tree(0)[0].size == 0


def test_the_row_of_a_request_does_not_depend_on_the_others() -> None:
    scorers = [Scorer(seed, 40, "normal") for seed in range(6)]
    shapes = [(1 + r, 6 - r) for r in range(6)]
    together = Search(scorers, shapes).core
    for r in range(6):
        alone = Search(scorers[r : r + 1], shapes[r : r + 1]).core
        for a, b in zip(together.tree(r), alone.tree(0), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_result_does_not_depend_on_threads(threads: int) -> None:
    scorers = [Scorer(seed, 5000, "ties") for seed in range(9)]
    expected = Search(scorers, [(4, 3)] * 9).core
    try:
        _core_testing.set_num_threads(threads)
        search = Search(scorers, [(4, 3)] * 9).core
    finally:
        _core_testing.set_num_threads(1)
    assert same(search, expected, 9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.start([0], [1]), "0 beams of 1 drafts"),
        (lambda s: s.start([1], [0]), "1 beams of 0 drafts"),
        (lambda s: s.start([2, 64], [2, 2]), "request 1: 64 beams of 2 drafts: .* at most 127"),
        (lambda s: s.start([1], [1, 2]), "num_beams has 1 entries"),
        (lambda s: s.start([1], [1], [0.0]), "temperature = 0"),
        (lambda s: s.start([1], [1], [math.inf]), "temperature = inf"),
        (lambda s: s.start([1], [1], [math.nan]), "temperature = nan"),
        (lambda s: (s.start([1], [1]), s.advance(np.zeros((2, 3), np.float32))), "scores"),
        (lambda s: (s.start([1], [1]), s.advance(np.zeros((1, 3), np.float32),
                                                 np.zeros(2, np.int32))), "token_ids"),
        (lambda s: (s.start([1], [1]), s.tree(1)), "request = 1"),
        (lambda s: (s.start([1], [1]), s.tree(-1)), "request = -1"),
        (lambda s: (s.start([1], [1]), s.tree(0, -1)), "max_drafts = -1"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(_core_testing.BeamSearch())


def test_nothing_was_scored_yet() -> None:
    search = _core_testing.BeamSearch()
    search.start([3], [2])
    assert search.num_rows == 1
    assert [part.size for part in search.tree(0)] == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_laws_are_the_softmax_of_the_fifty_best(kind: str) -> None:
    """Each node's law is that of the row that it extends, whichever beams have ended meanwhile."""
    for case in range(40):
        rng = random.Random(case)
        vocab = rng.choice([1, 3, 49, 50, 51, 130])
        temperatures = [rng.choice([0.5, 1.0, 2.0]) for _ in range(3)]
        scorers = [Scorer(100 * case + r, vocab, kind) for r in range(3)]
        keeps = [True, case % 2 == 0, True]
        search = Search(scorers, [(4, 3), (1, 5), (3, 2)], temperatures, None, keeps).core
        for r in range(3):
            if not keeps[r]:
                with pytest.raises(ValueError, match="keeps no laws"):
                    search.tree_laws(r, 3, vocab)
                continue
            limit = rng.choice([2, 127])
            tokens, parents, _, _ = search.tree(r, limit)
            laws = search.tree_laws(r, limit, vocab)
            assert laws.shape == (len(tokens), vocab)
            paths: list[tuple[int, ...]] = []
            for i, parent in enumerate(parents.tolist()):
                before = paths[parent] if parent >= 0 else ()
                paths.append((*before, int(tokens[i])))
                scores = scorers[r].doubles(before)
                best = sorted((x for x in range(vocab) if scores[x] > -math.inf),
                              key=lambda x: (-scores[x], x))[:50]  # fmt: skip
                weights = {x: math.exp((scores[x] - scores[best[0]]) / temperatures[r])
                           for x in best}  # fmt: skip
                total = math.fsum(weights.values())
                expected = [weights.get(x, 0.0) / total for x in range(vocab)]
                assert laws[i].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-30)
    with pytest.raises(ValueError, match="keeps_laws has 1 entries, num_beams 2"):
        _core_testing.BeamSearch().start([1, 1], [1, 1], None, [True])

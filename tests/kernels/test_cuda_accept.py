"""accept_step on every backend: the paths and tokens that the host's executor finds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from accept_cases import (
    GREEDY,
    Drafted,
    accept,
    best_token,
    host_accepts,
    laws_on,
    random_request,
)
from cuda_calls import (
    BAD_LENGTH,
    BAD_TREE,
    CPU,
    NAN,
    ON_CUDA,
    ON_EMU_FAST,
    Target,
    checked,
    every_backend,
)
from kernel_calls import int32

from reference.acceptance_reference import Drafts, best_beam, deepest, expand, rejection
from reference.sampling_reference import Law
from specdec_ext import ops

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BAD_LAW, BAD_PROBS = 16, 32
all_fast = pytest.mark.parametrize("target", [pytest.param(CPU, id="cpu"), ON_EMU_FAST, ON_CUDA])


def compare(requests: list[Drafted], got: list[Any], ids: np.ndarray | None) -> int:
    """Everything that was decided against the host's decisions; returns accepted drafts."""
    accepted = 0
    for request, found in zip(requests, got, strict=True):
        path, token = host_accepts(request, ids)
        assert found.path == path
        drafts = [request.tokens[i] for i in path]
        assert found.emitted == (drafts if token < 0 else [*drafts, token])
        assert found.status == (NAN if token == -1 else 0)
        for node, after in zip([0, *path], [*drafts, token], strict=True):
            assert found.sampled[node] == after
        if request.law.temperature == 0:
            assert found.sampled == [best_token(row) for row in request.scores]
        accepted += len(path)
    return accepted


def check(target: Target, vocab: int, dtype: torch.dtype, count: int, seed: int, kind: str) -> None:
    rng = np.random.default_rng([vocab, count, seed])
    ids = rng.permutation(vocab)[: max(1, vocab // 3)] if kind == "reduced" else None
    requests = [
        random_request(rng, vocab, dtype, ids, kind != "chosen" and (i % 7 != 3))
        for i in range(count)
    ]
    workspace = ("least", "ours", "whole")[seed % 3]
    got = accept(target, requests, rng, dtype=dtype, ids=ids, workspace=workspace)
    assert compare(requests, got, ids) > 0
    for form in ("drafts", "own") if kind != "chosen" else ():
        assert accept(target, requests, rng, dtype=dtype, ids=ids, form=form) == got


@pytest.mark.parametrize("kind", ["chosen", "drawn", "reduced"])
@pytest.mark.parametrize("vocab", [5, 33, 64, 257, 300, 1025])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@all_fast
def test_decisions_are_the_hosts(target: Target, vocab: int, dtype: torch.dtype, kind: str) -> None:
    check(target, vocab, dtype, 48 if vocab <= 300 else 24, 1, kind)


@pytest.mark.parametrize("kind", ["chosen", "drawn", "reduced"])
@pytest.mark.parametrize(("vocab", "dtype"), [(6, F32), (300, BF16), (1024, F32)])
@checked
def test_decisions_under_the_checker(
    target: Target, vocab: int, dtype: torch.dtype, kind: str
) -> None:
    """Races, bounds; the workspace is the least it does with, and all it can use; both poisoned."""
    check(target, vocab, dtype, 9, 3, kind)
    check(target, vocab, dtype, 9, 2, kind)


@pytest.mark.parametrize("kind", ["chosen", "drawn"])
@all_fast
def test_rows_in_pieces(target: Target, kind: str) -> None:
    check(target, 5000, F32, 8, 4, kind)


LAWS = [Law(1.0), Law(0.4), Law(0.8, top_k=5), Law(1.0, top_p=0.8), Law(1.2, min_p=0.1)]
SHAPES = {
    "one": [-1],
    "chain": [-1, 0, 1, 2],
    "siblings": [-1, -1, -1],
    "tree": [-1, -1, 0, 0, 1, 2, 2],
}


def drawn(
    rng: np.random.Generator, shape: list[int], vocab: int, rule: str, law: Law, replacement: bool
) -> Drafted:
    n = len(shape) + 1
    scores = rng.normal(0, 2, (n, vocab)).astype(np.float32)
    noisy = scores + rng.normal(0, 0.7, scores.shape)
    rows = np.exp(noisy - noisy.max(1, keepdims=True))
    rows = (rows / rows.sum(1, keepdims=True)).astype(np.float32)
    tokens, probs = [0], np.zeros((n, vocab), np.float32)
    for i, parent in enumerate(shape):
        probs[i + 1] = rows[parent + 1]
        q = probs[i + 1].astype(np.float64)
        if not replacement:
            q[[tokens[j + 1] for j in range(i) if shape[j] == parent]] = 0.0
        tokens.append(int(rng.choice(vocab, p=q / q.sum())))
    numbers = (float(np.float32(0.2)), float(np.float32(0.6)), 0.25)
    return Drafted(
        tokens, [-1, *(p + 1 for p in shape)], scores, law, int(rng.integers(2**60)),
        int(rng.integers(1000)), rule, numbers, probs, replacement,
    )  # fmt: skip


def by_the_book(r: Drafted) -> tuple[list[int], int, float]:
    """Accepted rows, the token after them, and how close the nearest decision was."""
    assert r.probs is not None
    drafts = Drafts(r.tokens[1:], [p - 1 for p in r.parents[1:]], r.probs[1:], r.replacement)
    where = (drafts, r.scores, r.law, r.seed, r.position + 1)
    if r.rule == "rejection":
        path, token, margin = rejection(*where)
    elif r.rule == "best_beam":
        path, token, margin = best_beam(*where)
    elif r.rule == "typical":
        path, token, margin = deepest(*where, typical=r.numbers[:2])
    else:
        path, token, margin = deepest(*where, threshold=r.numbers[2])
    return [i + 1 for i in path], token, margin


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("rule", ["rejection", "typical", "threshold", "best_beam"])
@all_fast
def test_decisions_equal_the_definition(target: Target, rule: str, law: Law) -> None:
    """Against float64 by the book, through the operation itself."""
    rng = np.random.default_rng([LAWS.index(law), len(rule)])
    near = accepted = 0
    for vocab in (4, 30, 100):
        requests = [
            drawn(rng, shape, vocab, rule, law, bool(i % 2))
            for shape in SHAPES.values()
            for i in range(4)
        ]
        for request, found in zip(requests, accept(target, requests, rng), strict=True):
            path, token, margin = by_the_book(request)
            accepted += len(path)
            emitted = [*(request.tokens[i] for i in path), token]
            if (found.path, found.emitted) != (path, emitted):
                assert margin < 1e-5, (found, path, token)
                near += 1
    assert accepted > 0
    assert near <= 1


@every_backend
def test_a_reduced_vocabulary_is_zero_elsewhere(target: Target) -> None:
    rng = np.random.default_rng(8)
    vocab, ids = 40, np.random.default_rng(9).permutation(40)[:11]
    requests = [random_request(rng, vocab, F32, ids, True) for _ in range(12)]
    requests = [dataclasses.replace(r, rule="rejection", law=Law(1.0)) for r in requests]
    whole = []
    for r in requests:
        assert r.probs is not None
        probs = expand(r.probs, ids.tolist(), vocab).astype(np.float32)
        whole.append(dataclasses.replace(r, probs=probs))
    assert accept(target, requests, rng, ids=ids) == accept(target, whole, rng)


def plain(scores: np.ndarray, **changed: Any) -> Drafted:
    """A chain of the drafts 2, 2 at temperature 1."""
    uniform = np.full((3, scores.shape[1]), 1 / scores.shape[1], np.float32)
    request = Drafted(
        [0, 2, 2], [-1, 0, 1], scores, Law(1.0), 1, 0, "rejection", (0.09, 0.3, 1.0), uniform,
        False,
    )  # fmt: skip
    return dataclasses.replace(request, **changed)


@pytest.mark.parametrize("rule", ops.ACCEPTANCE_RULES)
@every_backend
def test_rows_that_cannot_be_drawn_from(target: Target, rule: str) -> None:
    """A bad row is flagged where it would decide; a bad row off the path does no harm."""
    rng = np.random.default_rng(1)
    good = np.zeros((3, 6), np.float32)
    good[:, 2] = 30.0
    for bad, code, flag in ((math.nan, -1, NAN), (-math.inf, -2, 0)):
        requests = []
        for row in range(3):
            scores = good.copy()
            scores[row] = bad
            requests.append(plain(scores, rule=rule))
        off = good.copy()
        off[0] = 0.0
        off[0, 4] = 30.0  # the first draft is not accepted
        off[1:] = bad
        requests.append(plain(off, rule=rule))
        got = accept(target, requests, rng)
        for row, found in enumerate(got[:3]):
            assert found.emitted == [2] * row
            assert found.sampled[row] == code
            assert found.status == flag
        assert got[3].emitted == [4]
        assert got[3].status == 0


@checked
def test_probabilities_that_are_none(target: Target) -> None:
    """The draft is not looked at, the token is drawn from the target's law, others go on."""
    rng = np.random.default_rng(2)
    scores = rng.normal(0, 1, (3, 6)).astype(np.float32)
    probs = np.full((3, 6), 1 / 6, np.float32)
    broken = []
    for column, value in [(0, math.nan), (5, math.inf), (1, -0.2), (3, 0.5), (2, 0.0)]:
        changed = probs.copy()
        changed[1, column] = value
        broken.append(plain(scores, probs=changed))
    for column, value in [(0, math.nan), (4, -0.1), (5, -math.inf)]:
        changed = np.full((3, 6), 0.2, np.float32)  # the others sum to 1
        changed[1, column] = value
        broken.append(plain(scores, probs=changed))
    requests = [r for pair in zip(broken, [plain(scores)] * len(broken), strict=True) for r in pair]
    got = accept(target, requests, rng)
    for found in got[::2]:
        assert found.path == []
        assert found.emitted == [host_accepts(plain(scores, rule="exact_match"), None)[1]]
        assert found.status == BAD_PROBS
    compare(requests[1::2], got[1::2], None)
    # A column that is not the draft's own.
    ids = np.array([5, 3, 1])
    reduced = np.full((3, 3), 1 / 3, np.float32)
    (found,) = accept(target, [plain(scores, probs=reduced)], rng, ids=ids)
    assert found.status == BAD_PROBS


@every_backend
def test_what_is_no_tree_is_left_out(target: Target) -> None:
    rng = np.random.default_rng(3)
    scores = rng.normal(0, 1, (3, 6)).astype(np.float32)
    broken = [
        plain(scores, parents=[-1, 0, 2]),
        plain(scores, parents=[-1, 2, 0]),
        plain(scores, parents=[0, 0, 0]),
        plain(scores, parents=[-1, -1, 0]),
        plain(scores, parents=[-1, 0, 2**31 - 1]),
        plain(scores, tokens=[0, 6, 2]),
        plain(scores, tokens=[0, 2, -1]),
        plain(
            np.zeros((129, 6), np.float32),
            tokens=[0] * 129,
            parents=[-1, *range(128)],
            probs=np.full((129, 6), 1 / 6, np.float32),
        ),
    ]
    requests = [r for pair in zip(broken, [plain(scores)] * len(broken), strict=True) for r in pair]
    got = accept(target, requests, rng)
    for found in got[::2]:
        assert (found.path, found.emitted, found.status) == ([], [], BAD_TREE)
    compare(requests[1::2], got[1::2], None)


@every_backend
def test_the_largest_tree_and_a_request_of_one_row(target: Target) -> None:
    rng = np.random.default_rng(4)
    n = 128
    scores = rng.normal(0, 1, (n, 8)).astype(np.float32)
    tokens = [0] + [best_token(scores[i]) for i in range(n - 1)]
    deep = Drafted(
        tokens, [-1, *range(n - 1)], scores, GREEDY, 1, 5, "exact_match", (0.1, 0.1, 0.1), None,
        False,
    )  # fmt: skip
    alone = Drafted([3], [-1], scores[:1], Law(1.0), 9, 5, "typical", (0.1, 0.1, 0.1), None, False)
    got = accept(target, [deep, alone], rng)
    assert got[0].path == list(range(1, n))
    assert len(got[0].emitted) == n
    compare([deep, alone], got, None)


def step_tensors(target: Target, rows: int = 4) -> dict[str, Any]:
    """Arguments of a call of two requests of two rows."""
    return {
        "scores": target.put(torch.zeros(rows, 6)),
        "cu_logits": target.put(int32([0, 2, 4])),
        "positions": target.put(int32([0] * rows)),
        "tokens": target.put(int32([1] * rows)),
        "parents": target.put(int32([-1, 0, -1, 0])),
        "laws": laws_on(target, [Law(1.0)] * 2, [1, 2]),
        "acceptance": target.put(torch.zeros(2, dtype=torch.uint8)),
    }


@checked
def test_rows_and_laws_that_only_a_device_can_read(target: Target) -> None:
    for changed, flag in [
        ({"cu_logits": int32([0, 2, 5])}, BAD_LENGTH),
        ({"cu_logits": int32([0, 2, 1])}, BAD_LENGTH),
        ({"laws": laws_on(target, [Law(1.0), Law(math.nan)], [1, 2])}, BAD_LAW),
        ({"acceptance": torch.tensor([0, 5], dtype=torch.uint8)}, BAD_LAW),
        ({"acceptance_threshold": torch.tensor([1.0, math.nan])}, BAD_LAW),
        ({"posterior_alpha": torch.tensor([1.0, 0.0])}, BAD_LAW),
    ]:
        given = step_tensors(target)
        for name, value in changed.items():
            given[name] = target.put(value) if isinstance(value, torch.Tensor) else value
        results = ops.make_accept_results(4, 2, target.device)
        status = target.put(torch.zeros(2, dtype=torch.int32))
        ops.accept_step(**given, results=results, backend=target.backend, status=status)
        assert status.tolist() == [0, flag]
        assert int(results.num_emitted[0]) >= 1
        assert int(results.num_emitted[1]) == int(results.path_len[1]) == 0


def test_the_plan_of_the_workspace() -> None:
    assert ops.accept_scratch_bytes(8, 128_000, False) == 0
    assert ops.accept_scratch_bytes(8, 128_000, True) == 8 * 4 * 128_000
    assert ops.accept_scratch_bytes(3, 1, True) == 3 * 256
    assert ops.accept_scratch_bytes(1, 65, True) == 512
    assert ops.accept_scratch_bytes(65_535, 2**20, True) == 65_535 * 2**22
    for requests, vocab, message in (
        (65_536, 8, r"num_requests = 65536: 0\.\.65535"),
        (-1, 8, "num_requests = -1"),
        (8, 2**31 - 1, "vocab_size = 2147483647"),
        (8, -1, "vocab_size = -1"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.accept_scratch_bytes(requests, vocab, True)

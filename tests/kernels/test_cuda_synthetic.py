"""Synthetic acceptance on every backend, against a reference in plain Python: integers, exactly."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from accept_cases import (
    GREEDY,
    LAWS,
    host_token,
    hostile_row,
    int64_bits,
    laws_on,
    random_tree,
    strided,
)
from cuda_calls import (
    BAD_LENGTH,
    BAD_TREE,
    CPU,
    NAN,
    ON_CUDA,
    ON_EMU,
    ON_EMU_FAST,
    Target,
    checked,
    every_backend,
)
from kernel_calls import int32
from ops_arguments import refused

from reference.acceptance_reference import uniform
from reference.sampling_reference import Law
from reference.synthetic_reference import SYNTHETIC, Kept, keep
from specdec_ext import ops

BAD_LAW = 16
UNTOUCHED = -7
all_backends = pytest.mark.parametrize(
    "target", [pytest.param(CPU, id="cpu"), ON_EMU, ON_EMU_FAST, ON_CUDA]
)
RATES: list[list[float]] = [
    [1.0, 0.75, 0.5, 0.25, 0.125],
    [0.0],
    [1.0] * 127,
    [0.6],
    [1.0, 1.0, 0.3],
    [1.0 - i / 130 for i in range(127)],
    [0.5, 0.5, 0.0, 0.0],
]


@dataclasses.dataclass
class Node:
    """One request: a tree, and what the target says after each of its rows."""

    tokens: list[int]
    parents: list[int]
    choices: list[int]
    seed: int
    position: int  # of the golden token


def random_node(rng: np.random.Generator, vocab: int) -> Node:
    """Trees of every shape up to 127 drafts; siblings may be equal, consecutive, or all tokens."""
    drafts = int(rng.choice([0, 1, 2, 5, 12, 40, 127], p=[0.1, 0.15, 0.15, 0.2, 0.2, 0.1, 0.1]))
    parents = random_tree(rng, drafts)
    tokens = rng.integers(vocab, size=drafts + 1)
    if rng.random() < 0.3:
        tokens = (np.arange(drafts + 1) + int(rng.integers(vocab))) % vocab
    choices = rng.integers(vocab, size=drafts + 1)
    for row in range(1, drafts + 1):
        if rng.random() < 0.5:  # a draft that real acceptance would keep
            choices[parents[row]] = tokens[row]
    if rng.random() < 0.2:
        choices[rng.integers(drafts + 1)] = -1
    tokens[0] = rng.choice([tokens[0], -5, 2**31 - 1])  # the golden token is not looked at
    seed = int(rng.integers(2**63)) * 2 + int(rng.integers(2))
    return Node(tokens.tolist(), parents, choices.tolist(), seed, int(rng.integers(2**20)))


def put_rates(target: Target, rates: list[float]) -> torch.Tensor:
    return target.put(torch.tensor(rates, dtype=torch.float64))


def packed(target: Target, nodes: list[Any]) -> dict[str, torch.Tensor]:
    firsts = np.concatenate([[0], np.cumsum([len(n.tokens) for n in nodes])])
    return {
        "cu_logits": target.put(int32(firsts.tolist())),
        # Only the golden token's position counts.
        "positions": target.put(
            int32([n.position if i == 0 else -5 for n in nodes for i in range(len(n.tokens))])
        ),
        "tokens": target.put(int32([token for n in nodes for token in n.tokens])),
        "parents": target.put(int32([parent for n in nodes for parent in n.parents])),
    }


def poisoned(target: Target, rows: int, requests: int) -> ops.AcceptResults:
    results = ops.make_accept_results(rows, requests, target.device)
    for tensor in vars(results).values():
        tensor.fill_(UNTOUCHED)
    return results


def run(
    target: Target, nodes: list[Node], rates: list[float], vocab: int
) -> tuple[ops.AcceptResults, list[int]]:
    given = packed(target, nodes)
    results = poisoned(target, len(given["tokens"]), len(nodes))
    results.sampled.copy_(int32([choice for n in nodes for choice in n.choices]))
    status = target.put(torch.zeros(len(nodes), dtype=torch.int32))
    ops.synthetic_step(
        **given,
        seed=target.put(torch.tensor([int64_bits(n.seed) for n in nodes], dtype=torch.int64)),
        synthetic_rates=put_rates(target, rates),
        vocab_size=vocab,
        results=results,
        backend=target.backend,
        status=status,
    )
    return results, status.tolist()


def compare(results: ops.AcceptResults, b: int, first: int, before: list[int], want: Kept) -> None:
    """Everything that is written of request b, and that nothing else is."""
    length, emitted = int(results.path_len[b]), int(results.num_emitted[b])
    assert results.path[b, :length].tolist() == want.path
    assert results.emitted[b, :emitted].tolist() == want.emitted
    assert bool((results.path[b, length:] == UNTOUCHED).all())
    assert bool((results.emitted[b, emitted:] == UNTOUCHED).all())
    sampled = [want.decided.get(row, value) for row, value in enumerate(before)]
    assert results.sampled[first : first + len(before)].tolist() == sampled


@pytest.mark.parametrize("vocab", [1, 2, 5, 130, 32_000])
@all_backends
def test_hostile_trees(target: Target, vocab: int) -> None:
    rng = np.random.default_rng([3, vocab])
    kept = 0
    for i, rates in enumerate(RATES):
        nodes = [random_node(rng, vocab) for _ in range(40 if target.backend == "cpu" else 9)]
        results, status = run(target, nodes, rates, vocab)
        first = 0
        for b, n in enumerate(nodes):
            want = keep(
                n.tokens, n.parents, rates, n.seed, n.position + 1,
                lambda row, _, n=n: n.choices[row], vocab,
            )  # fmt: skip
            compare(results, b, first, n.choices, want)
            assert status[b] == (NAN if len(want.emitted) == len(want.path) else 0), (i, b)
            first += len(n.tokens)
            kept += len(want.path)
    assert kept > 50


@every_backend
def test_a_rate_that_equals_the_number_is_not_reached(target: Target) -> None:
    chain = Node([3, 1, 2], [-1, 0, 1], [4, 4, 4], 2**63 + 11, 40)
    u = uniform(chain.seed, chain.position + 1, SYNTHETIC)
    for rates, kept in [
        ([u], 0),
        ([math.nextafter(u, 1.0)], 1),
        ([1.0, u, u], 1),
        ([math.nextafter(u, 1.0)] * 2, 2),
    ]:
        results, _ = run(target, [chain], rates, 6)
        assert results.path_len.tolist() == [kept]


@dataclasses.dataclass
class Scored(Node):
    scores: np.ndarray
    law: Law
    rule: str


def random_scored(rng: np.random.Generator, vocab: int, dtype: torch.dtype) -> Scored:
    node = random_node(rng, vocab)
    node.tokens[0] = 0
    n = len(node.tokens)
    scores = rng.normal(0, 2, (n, vocab)).astype(np.float32)
    for row in range(n):
        if rng.random() < 0.1:
            scores[row] = hostile_row(rng, vocab)
        elif node.choices[row] >= 0:
            scores[row, node.choices[row]] += 6
    scores = torch.from_numpy(scores).to(dtype).float().numpy()
    law = GREEDY if rng.random() < 0.4 else LAWS[rng.integers(len(LAWS))]
    return Scored(**vars(node), scores=scores, law=law, rule=str(rng.choice(ops.ACCEPTANCE_RULES)))


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(5, torch.float32), (300, torch.bfloat16), (1025, torch.float16)]
)
@all_backends
def test_where_scores_are_the_token_is_what_exact_match_draws(
    target: Target, vocab: int, dtype: torch.dtype
) -> None:
    """Greedy and sampled requests in one batch; rates stand above every rule."""
    rng = np.random.default_rng([8, vocab])
    kept = bad = 0
    for rates in RATES[:5] if target.backend == "cpu" else RATES[:3]:
        count = {"cpu": 24, "cuda-emu": 5}.get(target.backend, 10)
        nodes = [random_scored(rng, vocab, dtype) for _ in range(count)]
        nodes[0].scores[0, vocab - 1] = math.nan
        given = packed(target, nodes)
        scores = torch.cat([torch.from_numpy(n.scores) for n in nodes]).to(dtype)
        results = poisoned(target, len(scores), count)
        status = target.put(torch.zeros(count, dtype=torch.int32))
        rules = [ops.ACCEPTANCE_RULES.index(n.rule) for n in nodes]
        ops.accept_step(
            strided(target, scores, rng),
            **given,
            laws=laws_on(target, [n.law for n in nodes], [n.seed for n in nodes]),
            acceptance=target.put(torch.tensor(rules, dtype=torch.uint8)),
            synthetic_rates=put_rates(target, rates),
            results=results,
            backend=target.backend,
            status=status,
        )
        first = 0
        for b, n in enumerate(nodes):

            def choice(row: int, depth: int, n: Scored = n) -> int:
                return host_token(n.scores[row], n.law, n.seed, n.position + 1 + depth)

            want = keep(n.tokens, n.parents, rates, n.seed, n.position + 1, choice, vocab)
            best = [host_token(row, GREEDY, 0, 0) for row in n.scores]
            compare(results, b, first, best, want)
            last = want.decided[want.path[-1] if want.path else 0]
            assert int(status[b]) == (NAN if last == -1 else 0)
            first += len(n.tokens)
            kept += len(want.path)
            bad += last < 0
    assert kept > 10 and bad > 0


@every_backend
def test_what_is_no_tree_is_left_out(target: Target) -> None:
    def node(tokens: list[int], parents: list[int]) -> Node:
        return Node(tokens, parents, [1] * len(tokens), 5, 9)

    good = node([0, 1, 2], [-1, 0, 1])
    broken = [
        node([0, 1, 2], [-1, 0, 2]),
        node([0, 1, 2], [-1, 2, 0]),
        node([0, 1, 2], [0, 0, 0]),
        node([0, 1, 2], [-1, -1, 0]),
        node([0, 1, 2], [-1, 0, 2**31 - 1]),
        node([0, 6, 2], [-1, 0, 0]),
        node([0, 2, -1], [-1, 0, 0]),
        node([0] * 129, [-1, *range(128)]),
    ]
    nodes = [n for pair in zip(broken, [good] * len(broken), strict=True) for n in pair]
    results, status = run(target, nodes, [1.0, 1.0], 6)
    assert status == [BAD_TREE, 0] * len(broken)
    assert results.path_len.tolist() == [0, 2] * len(broken)
    assert results.num_emitted.tolist() == [0, 3] * len(broken)
    first = 0
    for b, n in enumerate(nodes):
        if b % 2 == 0:
            untouched = results.sampled[first : first + len(n.tokens)]
            assert untouched.tolist() == n.choices
        first += len(n.tokens)


@every_backend
def test_requests_without_rows_and_steps_without_requests(target: Target) -> None:
    """As in a padded bucket: whatever lies in the padding's rows."""
    nobody = Node([], [], [], 1, 0)
    chain = Node([3, 1, 2], [-1, 0, 1], [4, 4, 4], 7, 0)
    results, status = run(target, [nobody, chain, nobody, nobody], [1.0], 6)
    assert status == [0] * 4
    assert results.path_len.tolist() == [0, 1, 0, 0]
    assert results.num_emitted.tolist() == [0, 2, 0, 0]
    assert results.emitted[1, :2].tolist() == [1, 4]
    results, status = run(target, [], [1.0], 6)
    assert status == []


def arguments(target: Target) -> dict[str, Any]:
    """Two requests of two rows."""
    results = ops.make_accept_results(4, 2, target.device)
    return {
        "cu_logits": target.put(int32([0, 2, 4])),
        "positions": target.put(int32([0] * 4)),
        "tokens": target.put(int32([1] * 4)),
        "parents": target.put(int32([-1, 0, -1, 0])),
        "seed": target.put(torch.tensor([1, 2])),
        "synthetic_rates": put_rates(target, [1.0]),
        "results": results,
        "vocab_size": 6,
        "backend": target.backend,
    }


@checked
def test_rows_and_rates_that_only_a_device_can_read(target: Target) -> None:
    def flags(expected: list[int], **changed: torch.Tensor) -> None:
        given = arguments(target)
        given.update({name: target.put(value) for name, value in changed.items()})
        status = target.put(torch.zeros(2, dtype=torch.int32))
        ops.synthetic_step(**given, status=status)
        assert status.tolist() == expected
        results = given["results"]
        emitted = [0 if flag else 2 for flag in expected]
        assert results.num_emitted.tolist() == emitted
        assert [bool(n) for n in results.path_len] == [not flag for flag in expected]

    flags([0, 0])
    flags([0, BAD_LENGTH], cu_logits=int32([0, 2, 5]))
    flags([0, BAD_LENGTH], cu_logits=int32([0, 2, 1]))
    for rates in ([0.5, 0.6], [1.5], [-0.1], [math.nan], [1.0] * 100 + [math.nan]):
        wrong = torch.tensor(rates, dtype=torch.float64)
        flags([BAD_LAW, BAD_LAW], synthetic_rates=wrong)
        given = arguments(target)
        del given["seed"], given["vocab_size"]
        status = target.put(torch.zeros(2, dtype=torch.int32))
        given["synthetic_rates"] = target.put(wrong)
        ops.accept_step(
            target.put(torch.zeros(4, 6)),
            laws=laws_on(target, [Law(1.0), GREEDY], [1, 2]),
            acceptance=target.put(torch.zeros(2, dtype=torch.uint8)),
            status=status,
            **given,
        )
        assert status.tolist() == [BAD_LAW, BAD_LAW]
        assert given["results"].num_emitted.tolist() == [0, 0]


REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "tokens is a list: give a tensor", {"tokens": [1]}),
    (ValueError, "cu_logits has 0 entries", {"cu_logits": int32([])}),
    (ValueError, "cu_logits[0] = 1: it begins with 0", {"cu_logits": int32([1, 2, 4])}),
    (ValueError, "cu_logits[2] = 5: it never decreases and ends within the 4 rows of tokens",
     {"cu_logits": int32([0, 2, 5])}),
    (TypeError, "cu_logits has dtype int64", {"cu_logits": torch.tensor([0, 2, 4])}),
    (ValueError, "positions has shape [3]: expected [R] = [4]", {"positions": int32([1] * 3)}),
    (TypeError, "parents has dtype int64", {"parents": torch.zeros(4).long()}),
    (ValueError, "seed has shape [3]: expected [B] = [2]", {"seed": torch.tensor([1, 2, 3])}),
    (TypeError, "seed has dtype int32: expected int64", {"seed": int32([1, 2])}),
    (ValueError, "vocab_size = 0: give 1..", {"vocab_size": 0}),
    (TypeError, "synthetic_rates has dtype torch.float32: expected torch.float64",
     {"synthetic_rates": torch.ones(2)}),
    (ValueError, "synthetic_rates has 0 entries: give 1..127",
     {"synthetic_rates": torch.ones(0).double()}),
    (ValueError, "synthetic_rates has 128 entries: give 1..127",
     {"synthetic_rates": torch.ones(128).double()}),
    (ValueError, "synthetic_rates[1] = 0.75: numbers in [0, 1] that do not rise",
     {"synthetic_rates": torch.tensor([0.5, 0.75]).double()}),
    (ValueError, "synthetic_rates[0] = nan", {"synthetic_rates": torch.tensor([np.nan])}),
    (ValueError, "status has shape [3]: expected [B] = [2]", {"status": int32([0, 0, 0])}),
    (ValueError, "sampled has shape [3]: expected [R] = [4]",
     {"results": ops.make_accept_results(3, 2)}),
    (ValueError, "path has shape [1, 128]: expected [B, 128] = [2, 128]",
     {"results": ops.make_accept_results(4, 1)}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "changed"), REFUSED, ids=[r[1][:40] for r in REFUSED])
def test_refusals(kind: type[Exception], text: str, changed: dict[str, Any]) -> None:
    given = {**arguments(CPU), **changed}
    rates = given["synthetic_rates"]
    if torch.isnan(rates).any():
        given["synthetic_rates"] = rates.double()
    before = given["results"].path_len.clone()
    refused(kind, text, lambda: ops.synthetic_step(**given))
    assert torch.equal(given["results"].path_len, before)
    if "synthetic_rates" in changed:  # accept_step says the same
        del given["seed"], given["vocab_size"]
        refused(
            kind,
            text,
            lambda: ops.accept_step(
                torch.zeros(4, 6),
                laws=laws_on(CPU, [GREEDY] * 2, [1, 2]),
                acceptance=torch.zeros(2, dtype=torch.uint8),
                **given,
            ),
        )

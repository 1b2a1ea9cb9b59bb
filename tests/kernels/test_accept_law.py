"""The joint law of several tokens, drawn through the operations themselves: chi-square.

A step of drafts for thousands of requests in one call of accept_step, then sample_rows until every
request has three tokens. Target and drafter are tables over the last two tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accept_cases import laws_on
from cuda_calls import CPU, ON_CUDA, Target, fast

from reference.sampling_reference import Law
from specdec_ext import ops

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from drawn_drafts import DraftShape, TableDrafter
from table_target import chi_square, joint_law

VOCAB, TOKENS, PROMPT = 5, 3, (1, 3)
SHAPES = {
    "chain": DraftShape((-1, 0, 1)),
    "siblings": DraftShape((-1, -1, -1, 0)),
    "replacement": DraftShape((-1, -1, -1, 0), replacement=True),
    "tree": DraftShape((-1, -1, 0, 0, 1)),
    "reduced": DraftShape((-1, -1, 0), ids=(0, 2, 3)),
    "one-hot": DraftShape((-1, -1, 0), kind="argmax"),
}
LAWS = {"plain": Law(0.8), "cut": Law(1.1, top_k=4, top_p=0.9), "min_p": Law(1.5, min_p=0.15)}
DRAWS = 20_000


class World:
    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.scores = rng.normal(0, 1.2, (VOCAB, VOCAB, VOCAB)).astype(np.float32)
        noise = rng.normal(0, 0.8, self.scores.shape)
        self.drafts = np.exp(self.scores + noise)


def int32(target: Target, values: np.ndarray) -> torch.Tensor:
    return target.put(torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)))


def texts(
    target: Target, world: World, shape: DraftShape, law: Law, rule: str, draws: int
) -> tuple[np.ndarray, int]:
    """[draws, TOKENS] tokens, and how many drafts were accepted."""
    n = len(shape.parents) + 1
    seeds = list(range(1, draws + 1))
    laws = laws_on(target, [law] * draws, seeds)
    start = np.tile(np.array(PROMPT), (draws, 1))
    drafted, rows = TableDrafter(world.drafts, shape, 7).draw(start)
    tokens = np.concatenate([start[:, 1:], drafted], 1)  # [draws, n]
    parents = np.array([-1, *(p + 1 for p in shape.parents)])
    before = tokens[:, parents]  # the token before each row; the root's is the prompt's
    before[:, 0] = PROMPT[0]
    scores = world.scores[before, tokens].reshape(draws * n, VOCAB)
    given = None
    if shape.kind == "drawn":
        probs = np.zeros((draws, n, rows.shape[2]), np.float32)
        probs[:, 1:] = rows
        columns = place = None
        if shape.ids is not None:
            place = int32(target, np.array(shape.ids))
            lookup = np.full(VOCAB, -1)
            lookup[list(shape.ids)] = range(len(shape.ids))
            columns = int32(target, lookup[tokens].reshape(-1))
        given = ops.DraftProbs(
            target.put(torch.from_numpy(probs.reshape(draws * n, -1))),
            vocab_ids=place,
            draft_columns=columns,
            replacement=target.put(torch.full((draws,), int(shape.replacement), dtype=torch.uint8)),
        )
    results = ops.make_accept_results(draws * n, draws, target.device)
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    ops.accept_step(
        target.put(torch.from_numpy(scores)),
        int32(target, np.arange(draws + 1) * n),
        int32(target, np.tile(np.array(depth) + 10, draws)),
        int32(target, tokens.reshape(-1)),
        int32(target, np.tile(parents, draws)),
        laws,
        target.put(torch.full((draws,), ops.ACCEPTANCE_RULES.index(rule), dtype=torch.uint8)),
        results=results,
        draft_probs=given,
        backend=target.backend,
    )
    counts = results.num_emitted.cpu().numpy()
    text = np.full((draws, 2 + TOKENS + n), -1)
    text[:, :2] = PROMPT
    text[:, 2 : 2 + n] = results.emitted.cpu().numpy()[:, :n]
    everyone = np.arange(draws)
    for i in range(TOKENS):  # token by token where the step brought no more
        row = world.scores[text[everyone, i], text[everyone, i + 1]]
        out = target.put(torch.zeros(draws, dtype=torch.int32))
        ops.sample_rows(
            target.put(torch.from_numpy(row)),
            int32(target, np.arange(draws + 1)),
            int32(target, np.full(draws, 10 + i)),
            laws,
            out=out,
            backend=target.backend,
        )
        text[:, 2 + i] = np.where(i < counts, text[:, 2 + i], out.cpu().numpy())
    return text[:, 2 : 2 + TOKENS], int(results.path_len.sum())


def counts_of(text: np.ndarray) -> np.ndarray:
    cells = text @ VOCAB ** np.arange(TOKENS)[::-1]
    return np.bincount(cells, minlength=VOCAB**TOKENS)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", [pytest.param(CPU, id="cpu"), ON_CUDA])
def test_the_joint_law_is_the_targets(target: Target, shape: str, law: str) -> None:
    world = World(3)
    text, accepted = texts(target, world, SHAPES[shape], LAWS[law], "rejection", DRAWS)
    assert accepted > DRAWS // 4
    joint = joint_law(world.scores, PROMPT, TOKENS, LAWS[law])
    statistic, bound = chi_square(counts_of(text), joint)
    assert statistic < bound


@pytest.mark.parametrize("shape", SHAPES)
@fast
def test_texts_are_the_cpus(target: Target, shape: str) -> None:
    """So the law is: too few draws for a statistic."""
    world = World(3)
    for i, law in enumerate(LAWS.values()):
        given = (world, SHAPES[shape], law, "rejection", 12 + i)
        assert np.array_equal(texts(target, *given)[0], texts(CPU, *given)[0])


@pytest.mark.parametrize("rule", ["typical", "threshold"])
def test_the_statistic_notices_a_lossy_rule(rule: str) -> None:
    world = World(3)
    text, _ = texts(CPU, world, SHAPES["chain"], LAWS["plain"], rule, DRAWS)
    joint = joint_law(world.scores, PROMPT, TOKENS, LAWS["plain"])
    statistic, bound = chi_square(counts_of(text), joint)
    assert statistic > bound

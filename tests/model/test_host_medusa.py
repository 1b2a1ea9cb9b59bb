"""Medusa on the CPU: the heads in C++ against torch's module, and their drafts over many steps
against the plain definition (reference/medusa_reference.py)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from host_weights import head_weights
from reference import medusa_reference as ref
from specdec_ext import MedusaDecodingConfig, _core, ops
from specdec_ext.config.medusa_tuner import likelihood
from specdec_ext.config.methods import published_trees
from specdec_ext.drafters import DraftInputs, make_drafter
from specdec_ext.drafters.medusa.heads import MedusaHeads, MedusaHeadsConfig, save_medusa_heads
from specdec_ext.drafters.medusa.packed_heads import PackedHeads
from specdec_ext.models.place import CPU

HIDDEN, VOCAB, SLOTS, HEADS = 40, 90, 5, 4
LAYOUT = ops.SlotLayout(method="proposed", max_seq_len=512)
KINDS: dict[str, dict[str, Any]] = {
    "own": {},
    "two layers": {"layers": 2},
    "no bias": {"layers": 3, "bias": False},
    "no layer": {"layers": 0},
    "shared": {"lm_head": "shared"},
    "the target's": {"lm_head": "target"},
    "reduced": {"ids": list(range(80, 10, -3))},
    "reduced, the target's": {"lm_head": "target", "ids": list(range(89, 3, -2)), "layers": 2},
}
PRIOR = [[0.4, 0.2, 0.1], [0.5, 0.1], [0.3, 0.3], [0.2]]


class Target:
    """A target of which the heads need the output head alone."""

    hidden_size, vocab_size, place, kv_dtype = HIDDEN, VOCAB, CPU, torch.float32

    def __init__(self) -> None:
        self.rows = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows[ids.long()]


def make(*, lm_head: str = "own", ids: Any = None, layers: int = 1, bias: bool = True) -> Any:
    config = MedusaHeadsConfig(
        HIDDEN, VOCAB, HEADS, num_medusa_layers=layers, lm_head=lm_head, has_bias=bias,
        draft_vocab_size=None if ids is None else len(ids), training={"guess_rates": PRIOR},
    )  # fmt: skip
    heads = MedusaHeads(config, None if ids is None else torch.tensor(ids))
    generator = torch.Generator().manual_seed(layers)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return heads.requires_grad_(False)


def target_rows(heads: MedusaHeads, target: Target) -> torch.Tensor:
    return target.rows if heads.token_ids is None else target.rows[heads.token_ids.long()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_modules_within_twice_its_error(kind: str, dtype: str) -> None:
    heads, target = make(**KINDS[kind]), Target()
    packed = PackedHeads(head_weights(heads), target, num_heads=3, dtype=dtype)
    hidden = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(3))
    rows = target_rows(heads, target)
    exact = heads.double()(hidden.double(), rows.double())[:3]
    lower = getattr(torch, dtype)
    theirs = heads.to(lower)(hidden.to(lower), rows.to(lower)).double()[:3]
    ours = torch.from_numpy(packed.core.scores(hidden.numpy(), 3)).double()
    largest = float(exact.abs().max())
    error = float((theirs - exact).abs().max())
    assert float((ours - exact).abs().max()) <= 2 * error + 1e-7 * largest


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_depend_on_nothing_else(kind: str) -> None:
    heads, target = make(**KINDS[kind]), Target()
    core = PackedHeads(head_weights(heads), target, num_heads=HEADS, dtype="bfloat16").core
    hidden = np.random.default_rng(1).standard_normal((9, HIDDEN), dtype=np.float32)
    threads = ops.num_threads()
    try:
        ops.set_num_threads(1)
        alone = [core.scores(hidden[r : r + 1], 2) for r in range(9)]
        for count in (1, 2, 3):
            ops.set_num_threads(count)
            together = core.scores(hidden, HEADS)
            for r, row in enumerate(alone):
                assert np.array_equal(together[:2, r : r + 1], row)
    finally:
        ops.set_num_threads(threads)


def test_the_best_guesses() -> None:
    """Lower ids first on ties; none of a row without a largest score; only what is finite."""
    rows = np.zeros((70, 3), dtype=np.float32)
    rows[:, 0] = [0.5] * 3 + [2.0, 2.0] + [1.0] * 65
    heads = _core.MedusaHeads(
        hidden_size=3, num_heads=1, num_scores=70, first=None, deeper=[[]],
        lm_heads=[_core.PackedLinear(rows)], token_ids=np.arange(170, 100, -1, dtype=np.int32),
    )  # fmt: skip
    hidden = np.array([[1, 0, 0], [-1, 0, 0], [np.nan, 0, 0], [np.inf, 1, 1]], dtype=np.float32)
    found = heads.best(hidden, 1, 4)[:, 0].tolist()
    assert found == [[167, 166, 165, 164], [170, 169, 168, 165], [-1] * 4, [-1] * 4]
    assert len(set(heads.best(hidden[:1], 1, 64)[0, 0].tolist())) == 64
    for rows_given, num_heads, top_k, message in (
        (hidden[:0], 1, 1, "no rows"),
        (hidden, 2, 1, r"num_heads = 2: give 1\.\.1"),
        (hidden, 1, 65, r"top_k = 65: give 1\.\.64"),
        (hidden[:, :2], 1, 1, r"expected \[B, H\]|hidden"),
    ):
        with pytest.raises(ValueError, match=message):
            heads.best(np.ascontiguousarray(rows_given), num_heads, top_k)


class World:
    """Slots whose requests grow step by step, through the operations that an engine uses."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.slots = ops.make_slots(LAYOUT, SLOTS)
        self.arrays = self.slots.numpy()
        self.hidden = np.zeros((SLOTS, HIDDEN), dtype=np.float32)

    def enter(self, slot: int) -> None:
        prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 9))]
        ops.enter_slot(self.slots, slot, LAYOUT.request_bytes(prompt, max_tokens=400))
        self._commit([slot], torch.tensor([0, 1]), [self.rng.randrange(VOCAB)])

    def text(self, slot: int) -> list[int]:
        words = self.arrays[slot].view(np.int32)
        first = LAYOUT.history_offset // 4
        return [int(token) for token in words[first : first + int(words[0])]]

    def proposed(self, slot: int) -> tuple[list[int], list[int], np.ndarray]:
        """(tokens, parents, estimates) in a slot: cpp/algo/proposed_draft.h."""
        words = self.arrays[slot].view(np.int32)
        block = words[len(words) - 384 :]
        count = int(block[1]) if int(block[0]) == int(words[0]) else 0
        return (
            block[2 : 2 + count].tolist(),
            block[129 : 129 + count].tolist(),
            block[256 : 256 + count].view(np.float32).copy(),
        )

    def step(self, slots: list[int], most: list[int]) -> None:
        """Verify what was proposed: a target that agrees with it often."""
        ids = torch.tensor(slots, dtype=torch.int32)
        rows = 128 * len(slots)
        tokens, parents = (torch.zeros(rows, dtype=torch.int32) for _ in range(2))
        cu_rows = torch.zeros(len(slots) + 1, dtype=torch.int32)
        ops.draft_step(
            LAYOUT, self.slots, ids, tokens=tokens, parents=parents, cu_rows=cu_rows,
            kv_len=torch.zeros(len(slots), dtype=torch.int32),
            max_drafts=torch.tensor(most, dtype=torch.int32),
        )  # fmt: skip
        sampled = []
        for b in range(len(slots)):
            first, end = int(cu_rows[b]), int(cu_rows[b + 1])
            for node in range(end - first):
                below = [int(tokens[i]) for i in range(first + 1, end) if int(parents[i]) == node]
                likes = below and self.rng.random() < 0.7
                sampled.append(self.rng.choice(below) if likes else self.rng.randrange(VOCAB))
        self._commit(slots, cu_rows, sampled)

    def _commit(self, slots: list[int], cu_logits: torch.Tensor, sampled: list[int]) -> None:
        results, path, path_len = ops.make_results(LAYOUT, len(slots))
        ops.commit_step(
            LAYOUT, self.slots, torch.tensor(slots, dtype=torch.int32), cu_logits.int(),
            torch.tensor(sampled, dtype=torch.int32), results=results, path=path,
            path_len=path_len,
        )  # fmt: skip

    def inputs(self, slots: list[int], most: list[int]) -> DraftInputs:
        unused: Any = None
        ids, limits = (np.array(values, dtype=np.int32) for values in (slots, most))
        return DraftInputs(
            LAYOUT, self.arrays, ids, limits, unused, unused, False, np.zeros_like(ids),
            self.hidden, max(1, *most), 100,
        )  # fmt: skip


def best_of(heads: MedusaHeads, target: Target, hidden: np.ndarray) -> list[list[int]]:
    """Guesses of each head for one hidden state, in float64 and by sorting."""
    rows = target_rows(heads, target).double()
    scores = heads.double()(torch.from_numpy(hidden).double()[None], rows)[:, 0]
    order = scores.argsort(dim=-1, descending=True)
    chosen: Any = order if heads.token_ids is None else heads.token_ids[order]
    return chosen.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_over_many_steps_are_the_definitions(tmp_path: Path, kind: str) -> None:
    """Requests that come and go with trees of their own, some adaptive; padding; steps in which
    some may draft little or nothing. Tokens, parents and what is learnt are the reference's."""
    heads, target, rng = make(**KINDS[kind]), Target(), random.Random(kind)
    save_medusa_heads(tmp_path, heads, dtype="float32")
    largest = [[i] for i in range(22)] + [[i, j] for i in range(22) for j in range(4)]
    drafter: Any = make_drafter(MedusaDecodingConfig(tmp_path, largest), target, max_requests=SLOTS)
    prior = drafter._rates.tolist()
    world, measured = World(rng), ref.Rates([[0.0] * 64] * HEADS, 0.0, float("inf"))
    requests: dict[int, ref.Request | None] = {}
    drafts = 0
    for _ in range(150):
        for slot in range(SLOTS):
            if slot in requests and (len(world.text(slot)) < 380 and rng.random() > 0.01):
                continue
            world.enter(slot)
            tree = ref.random_tree(rng, 110, 4, 8) if rng.random() < 0.9 else []
            adaptive = rng.random() < 0.6
            requests[slot] = ref.Request(tree, adaptive, prior) if tree else None
            options = {"medusa_choices": tuple(tree), "adaptive": adaptive}
            drafter.enter(slot, options if tree else {})
        step = rng.sample([*range(SLOTS), -1, -1], rng.randrange(1, SLOTS + 1))
        most = [rng.choice([0, 1, 3, 20, 110]) if slot >= 0 else 0 for slot in step]
        world.hidden[:] = np.random.default_rng(rng.randrange(1 << 30)).standard_normal(
            (SLOTS, HIDDEN), dtype=np.float32
        )
        drafter.draft(world.inputs(step, most))
        for slot, limit in zip(step, most, strict=True):
            request = requests[slot] if slot >= 0 else None
            if request is None or limit == 0:
                assert slot < 0 or world.proposed(slot)[0] == []
                continue
            text = world.text(slot)
            request.learn(text, measured)
            top = best_of(heads, target, world.hidden[slot])
            nodes, tokens, estimates = request.draft(text, limit, top, min(10, len(top[0])))
            found, parents, chances = world.proposed(slot)
            assert found == tokens
            assert [nodes[p] if p >= 0 else () for p in parents] == [n[:-1] for n in nodes]
            np.testing.assert_allclose(chances, estimates, rtol=1e-6)
            drafts += len(nodes)
        slots = [slot for slot in step if slot >= 0]
        world.step(slots, [limit for slot, limit in zip(step, most, strict=True) if slot >= 0])
    assert drafts > 2000
    rates, trials = drafter.measured_rates()
    assert trials == measured.trials and min(trials[:2]) > 20
    ranks = min(10, drafter._heads.num_scores)
    wanted = [[h / t for h in row[:ranks]] for row, t in zip(measured.hits, trials, strict=True)]
    np.testing.assert_allclose(rates, wanted, rtol=1e-12)
    stats = drafter.stats()
    assert stats["mean_nodes"] * stats["num_proposals"] == pytest.approx(drafts)


def test_orders_are_trees_of_falling_worth() -> None:
    rng = random.Random(3)
    rates = np.array(
        [[rng.choice([0.0, 1.0, 1 / 3, rng.random()]) for _ in range(10)] for _ in range(9)]
    )
    trees = list(published_trees().values())
    trees += [tuple(ref.random_tree(rng, 127, 9, 10)) for _ in range(200)]
    table = tuple(map(tuple, rates.tolist()))
    for tree in trees:
        for likeliest in (False, True):
            heads, ranks, parents, worth = _core.guess_tree(tree, rates, likeliest)
            order: list[ref.Path] = []
            for rank, parent in zip(ranks.tolist(), parents.tolist(), strict=True):
                assert parent < len(order)
                order.append((*(order[parent] if parent >= 0 else ()), rank))
            assert heads.tolist() == [len(node) - 1 for node in order]
            expected = sorted(tree, key=lambda n: -likelihood(n, table)) if likeliest else tree
            assert order == list(expected)
            assert worth.tolist() == [likelihood(node, table) for node in order]
    for choices, message in (
        ([[0], [1, 0]], r"choices\[1\]: its parent does not stand before it"),
        ([[0] * 10], r"choices\[0\] has 10 ranks: give 1\.\.9"),
        ([[10]], r"choices\[0\] has rank 10: ranks are 0\.\.9"),
    ):
        with pytest.raises(ValueError, match=message):
            _core.guess_tree(choices, rates, True)

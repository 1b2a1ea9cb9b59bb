"""Drafts proposed on the stream: whatever a drafter says, the tokens are the target's.

The drafter guesses from the last two tokens, as hash_target's function mostly goes on, and adds
siblings, entries that are no drafts and whole steps of nonsense. Its trees are checked against
what the executor verified; the hidden states that it is given against the tokens that they chose.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from driver import Job
from guesser import NODES, PROPOSED, Guesser
from stream_driver import FakeRecorder, StreamEngine, stream_hash_engine

from hash_target import HashFunction, HashModel
from specdec_ext import _core, ops
from specdec_ext.drafters import DraftInputs


def test_good_drafts_save_steps_at_every_depth() -> None:
    function = HashFunction(vocab=30, surprise=10**6, alphabet=4, seed=5)
    for depth in (0, 1, 2):
        drafter = Guesser(function, 1, hostile=False)
        engine = stream_hash_engine(
            function, max_batch_size=2, max_seq_len=200, max_num_tokens=64, depth=depth,
            drafter=drafter, adaptive=False, **PROPOSED,
        )  # fmt: skip
        (got,) = engine.run([Job([1, 2, 3], 120)])
        assert got.tokens == function.reference([1, 2, 3], 120)
        assert got.num_accepted > 60
        assert drafter.widest == NODES
        assert drafter.seen["steps"] < 100


def test_drafts_that_never_come_true_are_made_ever_more_rarely() -> None:
    """With T(rows) known, a hopeless drafter is asked in few steps, but never given up."""
    function = HashFunction(vocab=30, surprise=1, seed=5)
    drafter = Guesser(function, 1, hostile=False)
    engine = stream_hash_engine(
        function, max_batch_size=1, max_seq_len=700, max_num_tokens=64, depth=1, drafter=drafter,
        adaptive=True, **PROPOSED,
    )  # fmt: skip
    engine.executor.set_step_cost([1, 2, 4, 8, 16], [1.0, 1.2, 1.6, 2.4, 4.0])
    engine.executor.set_draft_cost(0.2)
    (got,) = engine.run([Job([1, 2, 3], 600)])
    assert got.tokens == function.reference([1, 2, 3], 600)
    assert 3 <= drafter.seen["steps"] < 120
    rate = drafter.seen["steps"]
    drafter.seen.clear()
    # What one request showed is where the next begins.
    (again,) = engine.run([Job([4, 5], 600)])
    assert len(again.tokens) == 600
    assert drafter.seen["steps"] <= rate


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_short_requests_find_out_together_that_drafts_pay_again(depth: int) -> None:
    """No request is long enough to try what lost the salt so much; the salt's requests are."""
    function = HashFunction(vocab=30, surprise=1, seed=5)
    drafter = Guesser(function, 1, hostile=False)
    engine = stream_hash_engine(
        function, max_batch_size=1, max_seq_len=64, max_num_tokens=64, depth=depth,
        drafter=drafter, adaptive=True, **PROPOSED,
    )  # fmt: skip
    # A try is due after some 60 steps.
    engine.executor.set_step_cost([1, 2, 17], [1.0, 1.6, 1.76])

    def drafts_of(requests: int) -> list[int]:
        found = []
        for i in range(requests):
            (got,) = engine.run([Job([1, 2, i % 30], 20)])
            assert got.tokens == function.reference([1, 2, i % 30], 20)
            found.append(got.num_drafts)
        return found

    hopeless = drafts_of(60)
    assert 0 < sum(count > 0 for count in hopeless[-30:]) < 15
    function.surprise = 10**9
    drafts_of(60)
    assert all(count > 0 for count in drafts_of(5))


@pytest.mark.parametrize("method", ["external", "lookahead"])
def test_what_drafting_takes_is_weighed_against_what_it_brings(method: str) -> None:
    """Rows cost next to nothing, a plain step one second: each draft 0 s, 0.2 s or 1e6 s."""
    function = HashFunction(vocab=30, surprise=8, alphabet=4, seed=4)
    drafts: list[int] = []
    for seconds in (0.0, 0.2, 1e6):
        external = method == "external"
        engine = stream_hash_engine(
            function, max_batch_size=1, max_seq_len=200, max_num_tokens=64, depth=1, stub=3,
            drafter=Guesser(function, 1, hostile=False) if external else None,
            **(PROPOSED if external else {"method": "lookahead", "lookahead": (4, 3, 4)}),
        )  # fmt: skip
        engine.executor.set_step_cost([1, 128], [1.0, 1.01])
        engine.executor.set_draft_cost(0.0, seconds)
        (got,) = engine.run([Job([1, 2, 3], 150)])
        assert got.tokens == function.reference([1, 2, 3], 150)
        drafts.append(got.num_drafts)
    free, dear, hopeless = drafts
    assert free > 100
    assert 0 < dear < free
    assert hopeless == 0


@pytest.mark.parametrize("graphs", [False, True])
def test_what_drafting_takes_is_measured_with_marks_on_the_stream(graphs: bool) -> None:
    """On the stub stream every operation takes one unit; on the CPU each step tells it."""
    function = HashFunction(vocab=30, seed=4)
    drafter = Guesser(function, 1, hostile=False)
    sizes = {"max_batch_size": 2, "max_seq_len": 60, "max_num_tokens": 64, "depth": 1}
    engine = stream_hash_engine(
        function, stub=3, recorder=FakeRecorder() if graphs else None, drafter=drafter, **sizes,
        **PROPOSED,
    )  # fmt: skip
    engine.submit([1, 2], max_tokens=5)
    engine.drain()
    steps = drafter.seen["steps"]
    staged = engine.pipeline.buffers.staged.clone()
    assert engine.pipeline.measure_drafting() == 1.0
    assert drafter.seen["steps"] > steps + 5
    assert torch.equal(engine.pipeline.buffers.staged, staged)
    engine.submit([1, 2], max_tokens=20)
    assert sum(len(out.tokens) for out in engine.drain()) == 20
    immediate = stream_hash_engine(function, drafter=drafter, **sizes, **PROPOSED)
    assert immediate.pipeline.measure_drafting() is None


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_drafting_takes_is_told_for_a_step_or_for_a_draft(one_by_one: bool) -> None:
    function = HashFunction(vocab=30, seed=4)

    class Slow(Guesser):
        drafts_one_by_one = one_by_one

        def draft(self, inputs: DraftInputs) -> None:
            time.sleep(0.001 * inputs.max_width if one_by_one else 0.004)
            super().draft(inputs)

    engine = stream_hash_engine(
        function, max_batch_size=1, max_seq_len=60, max_num_tokens=64, depth=0,
        drafter=Slow(function, 1, hostile=False), adaptive=False, **PROPOSED,
    )  # fmt: skip
    told: list[tuple[float, ...]] = []
    engine.pipeline.executor = Told(engine.executor, told)
    engine.submit([1, 2], max_tokens=30, max_draft_len=8)
    while engine.pipeline.executor.num_unfinished:
        engine.pipeline.step()
    fixed, each = zip(*told, strict=True)
    assert set(fixed if one_by_one else each) == {0.0}
    assert min(each if one_by_one else fixed) > (0.001 if one_by_one else 0.004)


def test_where_nobody_drafts_a_drafter_that_reads_every_step_is_asked_for_one_draft() -> None:
    function = HashFunction(vocab=30, seed=4)

    class Reader(Guesser):
        reads_every_step = True

        def draft(self, inputs: DraftInputs) -> None:
            self.seen[f"width {inputs.max_width}"] += 1
            super().draft(inputs)

    drafter = Reader(function, 1, hostile=False)
    engine = stream_hash_engine(
        function, max_batch_size=1, max_seq_len=60, max_num_tokens=64, depth=1, drafter=drafter,
        adaptive=False, **PROPOSED,
    )  # fmt: skip
    (plain,) = engine.run([Job([1, 2], 10, {"max_draft_len": 0})])
    assert plain.tokens == function.reference([1, 2], 10)
    assert set(drafter.seen) == {"width 1", "steps"}
    engine.run([Job([1, 2], 30)])
    assert drafter.seen[f"width {NODES}"] > 0


class Told:
    """An executor that notes what it is told of drafting."""

    def __init__(self, executor: Any, told: list[tuple[float, ...]]) -> None:
        self._executor, self._told = executor, told

    def set_draft_cost(self, *cost: float) -> None:
        self._told.append(cost)
        self._executor.set_draft_cost(*cost)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class HiddenModel(HashModel):
    """Says as a hidden state which token it chose, and from what."""

    hidden_size = 3

    def forward(self, plan: Any, hidden: torch.Tensor | None = None) -> torch.Tensor:
        ids = super().forward(plan)
        assert hidden is not None
        assert hidden.shape == (plan.num_logit_rows, 3)
        rows = torch.tensor(plan.logit_rows[: plan.num_logit_rows]).long()
        hidden[:, 0] = ids if ids.dim() == 1 else ids.argmax(dim=1)
        hidden[:, 1] = torch.tensor(plan.positions)[rows]
        hidden[:, 2] = torch.tensor(plan.tokens)[rows]
        return ids


class Checker(Guesser):
    """Finds the row that decided each golden token in what was kept for its slot."""

    needs_hidden = True

    def draft(self, inputs: DraftInputs) -> None:
        assert inputs.hidden is not None
        count = inputs.num_requests
        last = torch.zeros(count, 2, dtype=torch.int32)
        lens = torch.zeros(count, dtype=torch.int32)
        ops.recent_tokens(inputs.layout, inputs.slots, inputs.slot_ids, tokens=last, lens=lens)
        for slot, (before, golden), length in zip(
            inputs.slot_ids.tolist(), last.tolist(), lens.tolist(), strict=True
        ):
            if length:
                assert inputs.hidden[slot].tolist() == [golden, length - 2, before]
                self.seen["checked"] += 1
        super().draft(inputs)


@pytest.mark.parametrize("depth", [0, 2])
def test_the_hidden_state_is_that_of_the_row_that_chose_the_golden_token(depth: int) -> None:
    function = HashFunction(vocab=30, surprise=9, alphabet=4, seed=8)
    drafter = Checker(function, 3)
    model = HiddenModel(function, 200, 4)
    engine = StreamEngine(
        model, model.k_pages, model.v_pages, max_batch_size=3, max_seq_len=120, max_num_tokens=60,
        depth=depth, drafter=drafter, **PROPOSED,
    )  # fmt: skip
    rng = random.Random(4)
    jobs = [
        Job([rng.randrange(30) for _ in range(rng.choice([1, 2, 9, 30]))], rng.choice([2, 17, 40]))
        for _ in range(60)
    ]
    for job, got in zip(jobs, engine.run(jobs), strict=True):
        assert got.tokens == function.reference(job.prompt, job.max_tokens)
    assert drafter.seen["checked"] > 40
    assert engine.pipeline.draft_failures == drafter.seen["raised"]


def test_a_request_brings_its_options_to_its_slot() -> None:
    function = HashFunction(vocab=30, seed=4)
    drafter = Guesser(function, 1)
    engine = stream_hash_engine(
        function, max_batch_size=2, max_seq_len=60, max_num_tokens=64, depth=1, drafter=drafter,
        **PROPOSED,
    )  # fmt: skip
    asked: list[int] = []

    def options(request_id: int) -> dict[str, int]:
        asked.append(request_id)
        return {"request": request_id}

    engine.pipeline.draft_options = options
    ids = [engine.submit([1, 2], max_tokens=5) for _ in range(2)]
    engine.drain()
    assert asked == ids
    assert sorted(o["request"] for o in drafter.options.values()) == ids


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"proposed_max_draft_len": 0}, r"proposed_max_draft_len = 0: give 1\.\.127"),
        ({"proposed_max_draft_len": 128}, "proposed_max_draft_len = 128"),
        ({"proposed_max_path": 13}, r"proposed_max_path = 13: give 1\.\.12"),
        ({"proposed_max_path": 0}, "proposed_max_path = 0"),
    ],
)
def test_bounds_of_drafts_are_checked(changed: dict[str, int], message: str) -> None:
    sizes = {"vocab_size": 50, "max_batch_size": 2, "max_seq_len": 64, "max_num_tokens": 64,
             "num_pages": 90, "page_size": 4}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        _core.Executor(**{**sizes, **PROPOSED, **changed})
    executor = _core.Executor(**sizes, **PROPOSED)
    with pytest.raises(ValueError, match=r"max_draft_len = 13 is outside 0\.\.12"):
        executor.submit([1], max_tokens=4, max_draft_len=13)
    with pytest.raises(ValueError, match="0 or more"):
        executor.set_draft_cost(-1.0)

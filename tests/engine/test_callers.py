"""What callers do to an engine: callbacks that raise or call back, owners that go, forks, exits."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_loop_cases import FUNCTION, NGRAM, PROMPTS, assert_idle, make_engine, run

from specdec_ext.config.methods import UserDrafterConfig
from specdec_ext.engine.loop import EngineLoop
from specdec_ext.engine.request_group import RequestGroup
from specdec_ext.engine.user_drafting import UserDrafting
from specdec_ext.errors import EngineError
from specdec_ext.request.sampling_params import SamplingParams
from specdec_ext.text.progress import Progress

ENGINES = [None, 0, 2]  # overlap_depth


@pytest.mark.parametrize("ahead", ENGINES)
def test_an_update_callback_that_raises_harms_nobody(ahead: int | None) -> None:
    engine = make_engine(NGRAM, overlap_depth=ahead)
    calls: list[int] = []

    def on_update(state: Any) -> None:
        calls.append(state.version)
        raise RuntimeError("a client's own trouble")

    params = SamplingParams(max_tokens=12)
    states = [
        engine.submit(engine.resolve(p, params), on_update=on_update if i == 1 else None)
        for i, p in enumerate(PROMPTS)
    ]
    engine.run(states)
    assert [s.token_ids for s in states] == [FUNCTION.reference(p, 12) for p in PROMPTS]
    assert len(calls) > 1  # it is called again
    assert_idle(engine)


@pytest.mark.parametrize("ahead", ENGINES)
def test_a_processor_with_a_gradient_works(ahead: int | None) -> None:
    weight = torch.nn.Parameter(torch.tensor(1.0))
    engine = make_engine(NGRAM, overlap_depth=ahead)
    params = SamplingParams(max_tokens=9, logits_processors=[lambda _, scores: scores * weight])
    states = [
        engine.submit(engine.resolve(PROMPTS[0], params)),
        engine.submit(engine.resolve(PROMPTS[2], SamplingParams())),
    ]
    engine.run(states)
    assert states[0].token_ids == FUNCTION.reference(PROMPTS[0], 9)
    assert states[1].token_ids == FUNCTION.reference(PROMPTS[2], 16)


def test_a_processor_that_raises_on_a_rejected_branch_ends_nothing() -> None:
    prompt, count = PROMPTS[0], 40
    wanted = FUNCTION.reference(prompt, count)
    whole = prompt + wanted
    off_path: list[int] = []

    def automaton(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        if tokens != whole[: len(tokens)]:  # a grammar has no state for this text
            off_path.append(len(tokens))
            raise KeyError("no such state")
        return scores

    engine = make_engine(NGRAM)
    [output] = run(
        engine, [prompt], SamplingParams(max_tokens=count, logits_processors=[automaton])
    )
    assert output.outputs[0].token_ids == wanted
    assert off_path  # it was asked about drafts that were rejected

    def strict(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        if len(tokens) >= len(prompt) + 20:
            raise KeyError("the text ends here")
        return scores

    [output] = run(engine, [prompt], SamplingParams(max_tokens=count, logits_processors=[strict]))
    out = output.outputs[0]
    assert (out.finish_reason, out.token_ids) == ("error", wanted[:20])
    assert "the text ends here" in (out.error or "")
    assert_idle(engine)


@pytest.mark.parametrize("ahead", ENGINES)
def test_steps_from_inside_a_step_are_refused(ahead: int | None) -> None:
    engine = make_engine(NGRAM, overlap_depth=ahead)
    refused: list[str] = []

    def call_back(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        other = engine.submit(engine.resolve([3], SamplingParams(max_tokens=2)))  # does not wait
        assert engine.cancel(other)
        for call in (lambda: engine.run([state]), engine.close):
            with pytest.raises(EngineError, match="from inside a step") as error:
                call()
            refused.append(str(error.value))
        return scores

    params = SamplingParams(max_tokens=3, logits_processors=[call_back])
    state = engine.submit(engine.resolve(PROMPTS[0], params))
    engine.run([state])
    assert state.token_ids == FUNCTION.reference(PROMPTS[0], 3)
    assert len(refused) >= 6
    assert_idle(engine)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("ahead", ENGINES)
def test_requests_whose_owner_is_gone_are_cancelled(ahead: int | None, started: bool) -> None:
    engine = make_engine(NGRAM, overlap_depth=ahead)
    groups = [
        RequestGroup(engine, engine.resolve(PROMPTS[i % 4], SamplingParams())) for i in range(50)
    ]
    states = [state for group in groups for state in group.states]
    if started:
        engine.step()
    del groups
    gc.collect()
    assert engine.num_unfinished == 0
    assert {s.finish_reason for s in states} == {"cancelled"}
    [output] = run(engine, [PROMPTS[0]], SamplingParams())
    assert output.outputs[0].token_ids == FUNCTION.reference(PROMPTS[0], 16)
    assert_idle(engine)


def test_another_thread_cancels_the_same_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of one thread's round another one does all of it: a server's submitting threads
    and its stepping thread do."""
    engine = make_engine(NGRAM)
    groups = [RequestGroup(engine, engine.resolve(p, SamplingParams())) for p in PROMPTS]
    states = [state for group in groups for state in group.states]
    del groups
    gc.collect()
    cancel, rooms = engine.cancel, []

    def cancel_after_the_other(state: Any) -> bool:
        if not rooms:
            rooms.append(threading.Thread(target=engine.require_room, args=(1,)))
            rooms[0].start()
            rooms[0].join()
        return cancel(state)

    monkeypatch.setattr(engine, "cancel", cancel_after_the_other)
    engine.require_room(1)
    assert rooms
    assert {s.finish_reason for s in states} == {"cancelled"}
    assert_idle(engine)


def test_abandoning_an_engine_cancels_what_runs() -> None:
    engine = make_engine(NGRAM)
    states = [engine.submit(engine.resolve(p, SamplingParams())) for p in PROMPTS]
    engine.abandon()
    assert engine.step() is False
    assert {s.finish_reason for s in states} == {"cancelled"}
    assert_idle(engine)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ([1, 2, 64, 3], ([1, 2], None)),
        ([1, -1], ([1], None)),
        ([1, 2, None], ([1, 2], None)),
        (([1, 2, 3], [-1, 0, 2]), ([1, 2], [-1, 0])),
        (([1, 2, 3], [-1, 0]), ([1, 2], [-1, 0])),
        ([64, 1], None),
        ("text", None),
    ],
)
def test_the_valid_prefix_of_a_users_drafts_is_kept(answer: Any, wanted: Any) -> None:
    class Mine:
        def propose(self, history: list[int], budget: int) -> Any:
            return answer

    class Executor:
        overlap_depth = 0

        def __init__(self) -> None:
            self.handed: list[Any] = []

        def draft_len_limit(self) -> int:
            return 127

        def propose(self, request_id: int, tokens: Any, parents: Any) -> None:
            self.handed.append((tokens, parents))

    executor = Executor()
    drafting = UserDrafting(
        UserDrafterConfig(drafter=Mine(), max_draft_len=8), executor, vocab_size=64, max_seq_len=50
    )
    drafting.start(1, [5], {"max_tokens": 40, "max_draft_len": 8, "temperature": 0.0}, {})
    out = SimpleNamespace(request_id=1, tokens=[6], finish_reason=None, sequence=1)
    drafting.observe([out])
    drafting.propose()
    assert executor.handed == ([] if wanted is None else [wanted])
    assert drafting.stats()["failures"] == (wanted is None)


class Bar:
    """A progress bar that raises in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, **options: Any) -> Bar:
        self._do("make")
        return self

    def _do(self, what: str) -> None:
        if what == self.where:
            raise RuntimeError("no terminal")

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self._do("update")

    def update(self, count: int) -> None:
        self._do("update")

    def close(self) -> None:
        self._do("close")


@pytest.mark.parametrize("where", ["make", "update", "close"])
def test_a_progress_bar_that_raises_stops_nothing(where: str) -> None:
    engine = make_engine(NGRAM)
    states = [engine.submit(engine.resolve(p, SamplingParams())) for p in PROMPTS]
    progress = Progress(states, Bar(where))
    engine.run(states, on_step=progress.update)
    progress.close()
    assert [s.token_ids for s in states] == [FUNCTION.reference(p, 16) for p in PROMPTS]


PROGRAM = """
import asyncio, os, sys, time
from engine_loop_cases import NGRAM, PROMPTS, make_engine
from specdec_ext.engine.background import AsyncRequest, BackgroundStepper
from specdec_ext.errors import EngineError
from specdec_ext.request.sampling_params import SamplingParams

engine = make_engine(NGRAM)
engine.model.delay_s = 0.002
stepper = BackgroundStepper(engine)
params = SamplingParams(max_tokens=200)
requests = [AsyncRequest(engine, stepper, engine.resolve(p, params), None) for p in PROMPTS]
time.sleep(0.02)
for _ in range(8):
    child = os.fork()
    if child == 0:
        try:
            engine.submit(engine.resolve([1], SamplingParams()))
        except EngineError as error:
            engine.close()
            requests[0].cancel()
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert not requests[0].finished
print("leaving", flush=True)
"""


def test_forks_are_refused_and_an_exit_with_requests_in_flight_is_clean() -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": f"{here}:{here.parent}", "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "leaving"), done.stderr


def adaptive_rows(engine: EngineLoop, salt: str, prompts: list[list[int]]) -> list[int]:
    params = SamplingParams(max_tokens=40, cache_salt=salt)
    return [output.metrics["num_rows"] for output in run(engine, prompts, params)]


@pytest.mark.parametrize("ahead", ENGINES)
def test_rows_of_a_salt_do_not_depend_on_another_salts_past(ahead: int | None) -> None:
    import dataclasses

    config = dataclasses.replace(NGRAM, adaptive=True)

    def make() -> EngineLoop:
        engine = make_engine(config, overlap_depth=ahead)
        engine.executor.set_step_cost([1, 2, 4, 8, 16, 32], [1.0, 1.2, 1.5, 2.1, 3.4, 6.0])
        return engine

    alone, shared = make(), make()
    wanted = [adaptive_rows(alone, "b", [p]) for p in PROMPTS]
    past = [[i % 5, i % 3] * 10 for i in range(12)]
    for prompt in past:
        adaptive_rows(shared, "a", [prompt])
    assert [adaptive_rows(shared, "b", [p]) for p in PROMPTS] == wanted
    # The same past under one's own salt is seen.
    for prompt in past:
        adaptive_rows(alone, "c", [prompt])
    assert [adaptive_rows(alone, "c", [p]) for p in PROMPTS] != wanted

"""Requests that nobody watches: the executor holds their outputs, and nothing else differs."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from engine_loop_cases import FUNCTION, METHODS, PROMPTS, assert_idle, make_engine

from specdec_ext.engine.request_group import RequestGroup
from specdec_ext.engine.request_state import OUTPUTS_AT_ONCE
from specdec_ext.request.sampling_params import SamplingParams

LENGTHS = (3 * OUTPUTS_AT_ONCE + 5, 1, 2, OUTPUTS_AT_ONCE + 1)
NO_TIMES = {
    "queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms",
    "tokens_per_second",
}  # fmt: skip


def submit(engine: Any, watched: bool) -> list[Any]:
    return [
        engine.submit(engine.resolve(prompt, SamplingParams(max_tokens=count)), watched=watched)
        for prompt, count in zip(PROMPTS, LENGTHS, strict=True)
    ]


def result(state: Any) -> Any:
    output = state.snapshot()
    out = output.outputs[0]
    metrics = {k: v for k, v in output.metrics.items() if k not in NO_TIMES}
    assert all(output.metrics[name] is not None for name in NO_TIMES)
    return out.token_ids, out.text, out.token_from_draft, out.finish_reason, metrics


@pytest.mark.parametrize("ahead", [None, 0, 2])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("looks", [0, 1, 5])
def test_what_is_held_is_what_is_delivered(method: str, ahead: int | None, looks: int) -> None:
    """looks: somebody looks at one of the requests after every so many steps; 0: nobody does."""
    engine = make_engine(METHODS[method], overlap_depth=ahead)
    watched = submit(engine, True)
    engine.run(watched)
    draw = random.Random(looks)
    states = submit(engine, False)
    steps, seen = 0, [0] * len(states)

    def look() -> None:
        nonlocal steps
        steps += 1
        if looks and steps % looks == 0:
            i = draw.randrange(len(states))
            count = len(states[i].token_ids)
            assert seen[i] <= count == states[i].counter.num_tokens
            assert states[i].token_ids == FUNCTION.reference(PROMPTS[i], LENGTHS[i])[:count]
            seen[i] = count

    engine.run(states, on_step=look)
    assert [result(s) for s in states] == [result(s) for s in watched]
    assert not looks or max(seen) > 1
    assert_idle(engine)
    assert all(engine.executor.held(s.rid, -1) is None for s in states)
    metrics = engine.get_metrics()
    assert metrics["generation_tokens"] == 2 * sum(LENGTHS)
    engine.close()


def test_few_outputs_come_and_a_look_takes_nothing_away() -> None:
    engine = make_engine(METHODS["ngram"])
    executor, commit = engine.executor, engine.executor.commit
    came: list[Any] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(executor, name)

        def commit(self, *args: Any, **words: Any) -> Any:
            came.extend(outputs := commit(*args, **words))
            return outputs

    engine.executor = Counted()
    (state, *_) = states = submit(engine, False)
    while not state.finished and (out := executor.held(state.rid, -1)) is None:
        engine.step()
    assert out is not None
    assert out.sequence == executor.held(state.rid, -1).sequence  # it stays
    assert executor.held(state.rid, out.sequence) is None
    first = state.token_ids
    assert len(first) == state.counter.num_tokens > 1
    engine.run(states)
    mine = [out for out in came if out.request_id == state.rid]
    # The prompt and the first token by themselves, the rest together, the last with the end.
    assert len(mine) <= 2 + state.counter.num_steps // OUTPUTS_AT_ONCE + 1
    tokens = [token for out in mine for token in out.tokens]
    assert tokens == FUNCTION.reference(PROMPTS[0], LENGTHS[0])
    last = mine[-1]
    assert sum(step[4] for step in last.steps) == len(last.tokens) > 1
    assert sum(step[2] for step in last.steps) == last.num_drafts
    cut = last.since(last.sequence - 1)
    assert cut.sequence == last.sequence and len(cut.steps) == 1
    assert last.tokens[-len(cut.tokens) :] == cut.tokens
    assert last.since(last.sequence) is None and last.since(0) is last


def test_a_cancelled_request_has_what_was_delivered() -> None:
    engine = make_engine()
    (state, *_) = submit(engine, False)
    for _ in range(9):
        engine.step()
    assert engine.cancel(state)
    assert state.finish_reason == "cancelled"
    assert state.token_ids == FUNCTION.reference(PROMPTS[0], LENGTHS[0])[: len(state.token_ids)]
    assert len(state.token_ids) == 9
    assert engine.executor.held(state.rid, -1) is None
    engine.close()


def test_a_step_that_fails_keeps_what_came_before() -> None:
    engine = make_engine(fails_at={7: RuntimeError("broken")})
    (state, *_) = states = submit(engine, False)
    engine.run(states)
    assert state.finish_reason == "error" and "broken" in state.error
    assert state.token_ids == FUNCTION.reference(PROMPTS[0], LENGTHS[0])[:7]
    assert_idle(engine)


def test_another_thread_may_look() -> None:
    engine = make_engine(METHODS["lookahead"], max_seq_len=2048, num_pages=512)
    request = engine.resolve(PROMPTS[0], SamplingParams(max_tokens=900))
    group = RequestGroup(engine, request, watched=False)
    done = threading.Event()
    wrong: list[Any] = []
    wanted = FUNCTION.reference(PROMPTS[0], 900)

    def look() -> None:
        while not done.is_set():
            found = group.snapshot().outputs[0].token_ids
            if found != wanted[: len(found)]:
                wrong.append(found)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        engine.run(group.states)
    finally:
        done.set()
        thread.join()
    assert not wrong
    assert group.states[0].token_ids == wanted
    engine.close()


@pytest.mark.parametrize(
    "asked",
    [{"logprobs": 1}, {"prompt_logprobs": 0}, {"return_drafts": True}, {"return_logits": True}],
)
def test_what_is_each_steps_own_is_not_held(asked: dict[str, Any]) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="outputs_at_once = 2: give 1 or more, and 1 where"):
        engine.executor.submit([1], max_tokens=2, outputs_at_once=2, **asked)
    with pytest.raises(ValueError, match="outputs_at_once = 0"):
        engine.executor.submit([1], max_tokens=2, outputs_at_once=0)
    assert_idle(engine)

"""A failing, cancelled or refused request leaves the others and the engine untouched, wherever its
steps run: on the host, or on a stream with steps in flight."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import pytest
from engine_loop_cases import (
    FUNCTION,
    METHODS,
    NGRAM,
    PROMPTS,
    VOCAB,
    assert_idle,
    make_engine,
    run,
    text_of,
)

from specdec_ext.errors import CapacityError, EngineError, RequestError
from specdec_ext.request.sampling_params import SamplingParams

DEPTHS = [None, 0, 1, 2]  # None: the host runs the steps
depths = pytest.mark.parametrize("depth", DEPTHS)


@pytest.mark.parametrize("depth", DEPTHS[1:])
@pytest.mark.parametrize("method", METHODS)
def test_stop_strings_end_a_text_where_they_do_on_the_host(method: str, depth: int) -> None:
    """Tokens, text, reason and usage: what steps in flight brought after the end is not there."""
    text = text_of(FUNCTION.reference(PROMPTS[0], 40))
    stops = [s for i in range(2, len(text) - 3, 5) if "�" not in (s := text[i : i + 3])]
    assert len(stops) > 4
    late = 0
    for stop in stops:
        params = SamplingParams(max_tokens=40, stop=stop, include_stop_str_in_output=True)
        host, ahead = (
            make_engine(METHODS[method]),
            make_engine(METHODS[method], overlap_depth=depth),
        )
        for wanted, got in zip(
            run(host, PROMPTS, params), run(ahead, PROMPTS, params), strict=True
        ):
            a, b = wanted.outputs[0], got.outputs[0]
            assert (b.token_ids, b.text, b.finish_reason, b.stop_reason) == (
                a.token_ids, a.text, a.finish_reason, a.stop_reason,
            )  # fmt: skip
            for key in ("num_generated_tokens", "num_prompt_tokens"):
                assert got.metrics.get(key) == wanted.metrics.get(key)
        assert ahead.get_metrics()["generation_tokens"] == host.get_metrics()["generation_tokens"]
        late += ahead.executor.stats()["late_results"]
        assert_idle(ahead)
    assert (late > 0) == (depth > 0)


@depths
@pytest.mark.parametrize("method", METHODS)
def test_a_failing_forward_fails_its_step_only(method: str, depth: int | None) -> None:
    engine = make_engine(
        METHODS[method],
        max_batch_size=2,
        overlap_depth=depth,
        fails_at={3: RuntimeError("boom 17")},
    )
    states = [engine.submit(engine.resolve(p, SamplingParams(max_tokens=30))) for p in PROMPTS]
    engine.run(states)
    assert [s.finish_reason for s in states].count("error") == 2  # the two of that step
    for prompt, state in zip(PROMPTS, states, strict=True):
        expected = FUNCTION.reference(prompt, 30)
        if state.finish_reason == "error":
            assert "boom 17" in (state.error or "")
            # The three steps before it were read, whatever the depth.
            assert len(state.token_ids) >= 3
            assert state.token_ids == expected[: len(state.token_ids)]
        else:
            assert state.token_ids == expected
    assert engine.get_metrics()["request_success"] == {"error": 2, "length": 2}
    [after] = run(engine, [PROMPTS[0]], SamplingParams(max_tokens=30))
    assert after.outputs[0].token_ids == FUNCTION.reference(PROMPTS[0], 30)
    assert_idle(engine)


@pytest.mark.parametrize("depth", [None, 1])
@pytest.mark.parametrize(
    ("result", "message"),
    [(lambda ids: ids[:0], "0 rows"), (lambda ids: ids + VOCAB, "token ids are 0..63")],
)
def test_a_wrong_result_of_the_model_fails_the_step(
    result: Any, message: str, depth: int | None
) -> None:
    engine = make_engine(overlap_depth=depth)
    good = engine.model.forward
    engine.model.forward = lambda plan: result(good(plan))
    state = engine.submit(engine.resolve([1, 2], SamplingParams()))
    engine.run([state])
    assert state.finish_reason == "error"
    assert message in (state.error or "")
    engine.model.forward = good
    [after] = run(engine, [[1, 2]], SamplingParams())
    assert after.outputs[0].token_ids == FUNCTION.reference([1, 2], 16)
    assert_idle(engine)


@depths
def test_a_step_that_cannot_be_planned_stops_the_engine(depth: int | None) -> None:
    """Part of it is planned: nobody can tell what, so no step may follow it."""
    engine = make_engine(NGRAM, max_batch_size=2, overlap_depth=depth)
    states = [engine.submit(engine.resolve(p, SamplingParams(max_tokens=30))) for p in PROMPTS]
    for _ in range(4):
        engine.step()
    assert not any(state.finished for state in states)

    class Executor:
        """The engine's, out of memory."""

        def __init__(self, executor: Any) -> None:
            self._executor = executor

        def __getattr__(self, name: str) -> Any:
            return getattr(self._executor, name)

        def plan(self) -> Any:
            raise MemoryError("no room")

        stage = plan

    whose = engine if depth is None else engine._pipeline
    whose.executor = Executor(whose.executor)
    stopped = "the engine stopped: MemoryError: no room; make a new LLM"
    engine.run(states)
    for prompt, state in zip(PROMPTS, states, strict=True):
        assert state.finish_reason == "error"
        assert state.error == stopped
        assert state.token_ids == FUNCTION.reference(prompt, 30)[: len(state.token_ids)]
    with pytest.raises(EngineError, match=f"^{stopped}$"):
        engine.resolve(PROMPTS[0], SamplingParams(max_tokens=2))
    engine.close()


@pytest.mark.parametrize("go_on", [False, True])
def test_ctrl_c_keeps_partial_output_and_the_engine(go_on: bool) -> None:
    engine = make_engine(NGRAM, fails_at={4: KeyboardInterrupt()})
    state = engine.submit(engine.resolve(PROMPTS[0], SamplingParams(max_tokens=50)))
    with pytest.raises(KeyboardInterrupt):
        engine.run([state])
    assert not state.finished
    assert state.token_ids == FUNCTION.reference(PROMPTS[0], len(state.token_ids))
    assert len(state.token_ids) >= 4
    if go_on:
        engine.run([state])
        assert state.token_ids == FUNCTION.reference(PROMPTS[0], 50)
    else:
        engine.cancel(state)
        assert state.finish_reason == "cancelled"
    [after] = run(engine, [PROMPTS[1]], SamplingParams())
    assert after.outputs[0].token_ids == FUNCTION.reference(PROMPTS[1], 16)
    assert_idle(engine)


@depths
def test_ctrl_c_in_a_pass_leaves_the_step_whole(depth: int | None) -> None:
    """It strikes while a step runs or is enqueued; whoever steps next finds the step whole."""
    engine = make_engine(NGRAM, overlap_depth=depth)
    forward = engine.model.forward

    struck: list[bool] = []

    def strike(plan: Any) -> Any:
        if engine.model.count == 4 and not struck:
            struck.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return forward(plan)

    engine.model.forward = strike
    state = engine.submit(engine.resolve(PROMPTS[0], SamplingParams(max_tokens=50)))
    with pytest.raises(KeyboardInterrupt):
        engine.run([state])
    assert not state.finished
    engine.run([state])
    assert state.token_ids == FUNCTION.reference(PROMPTS[0], 50)
    [after] = run(engine, [PROMPTS[1]], SamplingParams())
    assert after.outputs[0].token_ids == FUNCTION.reference(PROMPTS[1], 16)
    assert_idle(engine)


@pytest.mark.parametrize(("depth", "stage"), list(itertools.product(DEPTHS, range(8))))
def test_cancel_at_every_stage(depth: int | None, stage: int) -> None:
    engine = make_engine(NGRAM, max_batch_size=2, overlap_depth=depth)
    states = [engine.submit(engine.resolve(p, SamplingParams(max_tokens=25))) for p in PROMPTS]
    for _ in range(stage):
        engine.step()
    victim = states[stage % 3]
    ended = victim.finished
    assert engine.cancel(victim) is not ended
    assert engine.cancel(victim) is False
    delivered = list(victim.token_ids)
    engine.run(states)
    assert victim.finish_reason == ("length" if ended else "cancelled")
    assert victim.token_ids == delivered
    for prompt, state in zip(PROMPTS, states, strict=True):
        if state is not victim:
            assert state.token_ids == FUNCTION.reference(prompt, 25)
    assert_idle(engine)


def test_a_broken_device_ends_everybody() -> None:
    engine = make_engine(overlap_depth=1)
    states = [engine.submit(engine.resolve(p, SamplingParams())) for p in PROMPTS]
    engine.step()

    class Gone:
        def wait(self) -> None:
            raise RuntimeError("CUDA error: device-side assert")

    engine._pipeline._events[0] = (Gone(), None)  # type: ignore[attr-defined]
    engine.run(states)
    assert {s.finish_reason for s in states} == {"error"}
    assert all("device-side assert" in (s.error or "") for s in states)
    with pytest.raises(
        EngineError, match=r"the engine stopped: .*device-side assert; make a new LLM"
    ):
        engine.submit(engine.resolve([1], SamplingParams()))
    engine.close()


def test_refusals_leave_the_engine_clean() -> None:
    engine = make_engine(NGRAM, num_pages=8)
    for prompt, params, error in (
        ([], SamplingParams(), RequestError),
        ([VOCAB], SamplingParams(), RequestError),
        ([1] * 300, SamplingParams(), CapacityError),
        ([1] * 40, SamplingParams(max_tokens=30), CapacityError),  # 70 + 6 drafts > 64 slots
    ):
        with pytest.raises(error):
            engine.submit(engine.resolve(prompt, params))
    assert_idle(engine)
    no_text = make_engine(with_tokenizer=False)
    with pytest.raises(RequestError, match="need a tokenizer"):
        no_text.submit(no_text.resolve([1], SamplingParams(stop="x")))
    [output] = run(no_text, [[1]], SamplingParams())
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 16


@depths
def test_closed_engine(depth: int | None) -> None:
    engine = make_engine(overlap_depth=depth)
    state = engine.submit(engine.resolve([1], SamplingParams()))
    engine.step()
    engine.close()
    engine.close()
    assert state.finish_reason == "cancelled"
    stats = engine.executor.stats()
    assert stats["free_pages"] == stats["total_pages"]
    for call in (engine.step, lambda: engine.submit(engine.resolve([1], SamplingParams()))):
        with pytest.raises(EngineError, match="closed"):
            call()

"""A failing, cancelled or refused request leaves the others and the engine untouched."""

from __future__ import annotations

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
)

from specdec_ext.errors import CapacityError, EngineError, RequestError
from specdec_ext.request.sampling_params import SamplingParams


@pytest.mark.parametrize("method", METHODS)
def test_a_failing_forward_fails_its_step_only(method: str) -> None:
    engine = make_engine(METHODS[method], max_batch_size=2, fails_at={3: RuntimeError("boom 17")})
    states = [engine.submit(engine.resolve(p, SamplingParams(max_tokens=30))) for p in PROMPTS]
    engine.run(states)
    reasons = [s.finish_reason for s in states]
    assert reasons.count("error") == 2  # the two of that step; the waiting ones go on
    for prompt, state in zip(PROMPTS, states, strict=True):
        out = state.snapshot().outputs[0]
        expected = FUNCTION.reference(prompt, 30)
        if out.finish_reason == "error":
            assert "boom 17" in (out.error or "")
            assert out.token_ids == expected[: len(out.token_ids)]
        else:
            assert out.token_ids == expected
    assert engine.get_metrics()["request_success"] == {"error": 2, "length": 2}
    [after] = run(engine, [PROMPTS[0]], SamplingParams(max_tokens=30))
    assert after.outputs[0].token_ids == FUNCTION.reference(PROMPTS[0], 30)
    assert_idle(engine)


def test_a_wrong_result_of_the_model_fails_the_step() -> None:
    engine = make_engine()
    good = engine.model.forward
    engine.model.forward = lambda plan: good(plan)[:0]
    state = engine.submit(engine.resolve([1, 2], SamplingParams()))
    engine.run([state])
    assert state.finish_reason == "error"
    assert "0 rows" in (state.error or "")
    engine.model.forward = good
    [after] = run(engine, [[1, 2]], SamplingParams())
    assert after.outputs[0].token_ids == FUNCTION.reference([1, 2], 16)
    assert_idle(engine)


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


@pytest.mark.parametrize("stage", range(8))
def test_cancel_at_every_stage(stage: int) -> None:
    engine = make_engine(NGRAM, max_batch_size=2)
    states = [engine.submit(engine.resolve(p, SamplingParams(max_tokens=25))) for p in PROMPTS]
    for _ in range(stage):
        engine.step()
    victim = states[stage % 3]
    ended = victim.finished
    assert engine.cancel(victim) is not ended
    assert engine.cancel(victim) is False  # twice
    delivered = list(victim.token_ids)
    engine.run(states)
    assert victim.finish_reason == ("length" if ended else "cancelled")
    assert victim.token_ids == delivered
    for prompt, state in zip(PROMPTS, states, strict=True):
        if state is not victim:
            assert state.token_ids == FUNCTION.reference(prompt, 25)
    assert_idle(engine)


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


def test_closed_engine() -> None:
    engine = make_engine()
    state = engine.submit(engine.resolve([1], SamplingParams()))
    engine.close()
    engine.close()
    assert state.finish_reason == "cancelled"
    for call in (engine.step, lambda: engine.submit(engine.resolve([1], SamplingParams()))):
        with pytest.raises(EngineError, match="closed"):
            call()

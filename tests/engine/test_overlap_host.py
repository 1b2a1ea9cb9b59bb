"""Requests whose tokens the host chooses (score processors, logprobs) beside others that run ahead.

Texts of random requests of both kinds are compared in test_schedules.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from engine_loop_cases import FUNCTION, PROMPTS, VOCAB, assert_idle, make_engine
from engine_loop_cases import METHODS as LOOP_METHODS
from stream_driver import stream_hash_engine

from hash_target import HashFunction
from specdec_ext.request.sampling_params import SamplingParams

DEPTHS = [0, 1, 2]


@pytest.mark.parametrize("depth", DEPTHS)
def test_others_run_ahead_meanwhile(depth: int) -> None:
    """A plain request takes as many steps as without the other, which waits for its own alone."""
    function = HashFunction(vocab=30, seed=4)
    engine = stream_hash_engine(
        function, max_batch_size=2, max_seq_len=200, max_num_tokens=100, depth=depth,
        stub=7, method="none",
    )  # fmt: skip
    plain = engine.submit([1, 2, 3], max_tokens=60)
    slow = engine.submit([4, 5], max_tokens=60, repetition_penalty=1.2)
    steps: dict[int, list[int]] = {plain: [], slow: []}
    tokens = {plain: 0, slow: 0}
    count = 0
    while (outputs := engine.step()) is not None:
        if tokens[plain] < 60:
            count += 1
        for out in outputs:
            steps[out.request_id].append(count)
            tokens[out.request_id] += len(out.tokens)
    assert tokens == {plain: 60, slow: 60}
    assert len(steps[plain]) == 60 and count == 60 + depth  # one token each step
    while_both = [at for at in steps[slow] if at <= 60]
    apart = {b - a for a, b in itertools.pairwise(while_both)}
    assert apart == {depth + 1}
    engine.assert_idle()


def reversing(text: list[int], scores: torch.Tensor) -> torch.Tensor:
    """The worst token, so that a draft is never right; depends on the whole text."""
    return -scores + torch.roll(scores, sum(text) % VOCAB) * 0.25


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("method", LOOP_METHODS)
def test_a_python_processor_says_the_same(method: str, depth: int) -> None:
    params = [
        SamplingParams(max_tokens=25, logits_processors=[reversing]),
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=25, logits_processors=[reversing], logprobs=2, temperature=0.3,
                       seed=5, repetition_penalty=1.1),
        SamplingParams(max_tokens=30, stop=["\x00never"], min_tokens=3),
    ]  # fmt: skip
    answers = []
    for ahead in (None, depth):
        engine = make_engine(LOOP_METHODS[method], overlap_depth=ahead)
        states = [engine.submit(engine.resolve(p, s)) for p, s in zip(PROMPTS, params, strict=True)]
        engine.run(states)
        outputs = [s.snapshot().outputs[0] for s in states]
        answers.append([(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in outputs])
        assert_idle(engine)
    assert answers[0] == answers[1]
    assert answers[0][1][0] == FUNCTION.reference(PROMPTS[1], 40)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_failing_processor_ends_its_request_alone(depth: int) -> None:
    def fails(text: list[int], scores: torch.Tensor) -> torch.Tensor:
        if len(text) > 12:
            raise KeyError("tired")
        return scores

    engine = make_engine(LOOP_METHODS["ngram"], overlap_depth=depth)
    bad = engine.submit(
        engine.resolve(PROMPTS[0], SamplingParams(max_tokens=30, logits_processors=[fails]))
    )
    good = engine.submit(engine.resolve(PROMPTS[2], SamplingParams(max_tokens=30)))
    engine.run([bad, good])
    assert bad.finish_reason == "error" and "KeyError: 'tired'" in (bad.error or "")
    assert bad.token_ids == FUNCTION.reference(PROMPTS[0], 30)[: 13 - len(PROMPTS[0])]
    assert good.token_ids == FUNCTION.reference(PROMPTS[2], 30)
    assert_idle(engine)


@pytest.mark.parametrize("depth", DEPTHS)
def test_ctrl_c_in_a_processor_keeps_the_engine(depth: int) -> None:
    struck: list[bool] = []

    def interrupts(text: list[int], scores: torch.Tensor) -> torch.Tensor:
        if len(text) > 12 and not struck:
            struck.append(True)
            raise KeyboardInterrupt
        return scores

    engine = make_engine(overlap_depth=depth)
    state = engine.submit(
        engine.resolve(PROMPTS[0], SamplingParams(max_tokens=30, logits_processors=[interrupts]))
    )
    other = engine.submit(engine.resolve(PROMPTS[1], SamplingParams(max_tokens=30)))
    with pytest.raises(KeyboardInterrupt):
        engine.run([state, other])
    engine.run([state, other])  # the step goes on where it was interrupted
    assert struck and state.token_ids == FUNCTION.reference(PROMPTS[0], 30)
    assert other.token_ids == FUNCTION.reference(PROMPTS[1], 30)
    assert_idle(engine)


@pytest.mark.parametrize("depth", DEPTHS)
def test_cancelled_while_its_scores_are_in_flight(depth: int) -> None:
    for stage in range(6):
        engine = make_engine(overlap_depth=depth)
        params = SamplingParams(max_tokens=30, logits_processors=[reversing])
        victim, other = (engine.submit(engine.resolve(p, params)) for p in PROMPTS[:2])
        for _ in range(stage):
            engine.step()
        assert engine.cancel(victim)
        engine.run([other])
        assert len(other.token_ids) == 30
        assert_idle(engine)

"""SchedulerConfig.max_queued_requests: the queue has an end, and room comes back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from engine_loop_cases import make_engine

from specdec_ext import LLM, SamplingParams
from specdec_ext.engine.request_group import RequestGroup
from specdec_ext.errors import QueueFullError, RequestError
from tiny_models import save_tiny

PARAMS = SamplingParams(max_tokens=3)
FULL = r"1 more requests with 5 unfinished exceed SchedulerConfig.max_queued_requests = 5; wait"


def test_one_request_too_many_is_refused_and_the_others_go_on() -> None:
    engine = make_engine()
    engine.limits = dataclasses.replace(engine.limits, max_queued_requests=5)
    states = [engine.submit(engine.resolve([1, 2, 3], PARAMS)) for _ in range(5)]
    for _ in range(100):
        with pytest.raises(QueueFullError, match=FULL):
            engine.submit(engine.resolve([1, 2, 3], PARAMS))
    assert engine.num_unfinished == 5
    engine.cancel(states[0])
    engine.submit(engine.resolve([1, 2, 3], PARAMS))  # room came back
    engine.run(states)
    assert [len(s.snapshot().outputs[0].token_ids) for s in states] == [0, 3, 3, 3, 3]


def test_a_place_that_another_thread_takes_in_between_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    engine.limits = dataclasses.replace(engine.limits, max_queued_requests=1)
    require_room, others = engine.require_room, []

    def look_and_lose(count: int, reserved: int = 0) -> None:
        require_room(count, reserved)
        if not others:
            others.append(None)
            others.append(engine.submit(engine.resolve([1, 2, 3], PARAMS)))

    monkeypatch.setattr(engine, "require_room", look_and_lose)
    with pytest.raises(QueueFullError, match="1 more requests with 1 unfinished"):
        engine.submit(engine.resolve([3, 2, 1], PARAMS))
    assert engine.num_unfinished == 1
    engine.run([others[1]])
    assert len(others[1].token_ids) == 3


def test_the_outputs_of_one_prompt_are_refused_together() -> None:
    engine = make_engine()
    engine.limits = dataclasses.replace(engine.limits, max_queued_requests=5)
    with pytest.raises(QueueFullError, match="6 more requests with 0 unfinished"):
        RequestGroup(
            engine, engine.resolve([1, 2], SamplingParams(n=6, max_tokens=2, temperature=1.0))
        )
    assert engine.num_unfinished == 0


def test_a_list_of_prompts_is_refused_whole(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    config = {"max_queued_requests": 3, "max_seq_len": 64}
    with LLM(folder, kv_cache_config={"max_tokens": 512}, scheduler_config=config) as llm:
        with pytest.raises(QueueFullError, match="4 more requests with 0 unfinished"):
            llm.generate([[1, 2]] * 4, PARAMS)
        assert llm.engine.num_unfinished == 0
        assert len(llm.generate([[1, 2]] * 3, PARAMS)) == 3
        assert issubclass(QueueFullError, RequestError)

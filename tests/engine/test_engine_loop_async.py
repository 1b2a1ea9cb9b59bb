"""The asynchronous front of the engine loop: many clients, one stepping thread."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import time
from typing import Any

import pytest
from engine_loop_cases import (
    FUNCTION,
    NGRAM,
    PROMPTS,
    VOCAB,
    assert_idle,
    make_engine,
    run,
    text_of,
)

from specdec_ext.config.methods import UserDrafterConfig
from specdec_ext.engine.background import AsyncRequest, BackgroundStepper
from specdec_ext.engine.loop import EngineLoop
from specdec_ext.engine.user_drafting import UserDrafting
from specdec_ext.errors import RequestError
from specdec_ext.request.sampling_params import SamplingParams


def start(engine: EngineLoop, prompt: list[int], params: SamplingParams) -> AsyncRequest:
    stepper = engine.__dict__.setdefault("stepper", BackgroundStepper(engine))
    return AsyncRequest(engine, stepper, engine.resolve(prompt, params), None)


def wait_until(condition: Any) -> None:
    """As long as it takes; pytest's `faulthandler_timeout` says where a run hangs."""
    while not condition():
        time.sleep(0.005)


def test_await_and_iterate_together() -> None:
    engine = make_engine(NGRAM)

    async def iterate(prompt: list[int]) -> list[int]:
        ids: list[int] = []
        text = ""
        last = None
        async for last in start(engine, prompt, SamplingParams(max_tokens=50)):
            ids += last.outputs[0].delta_token_ids
            text += last.outputs[0].delta_text
            assert last.outputs[0].token_ids == ids
        assert last is not None and last.finished and last.metrics["numerics"] == "exact"
        assert text == text_of(ids)
        return ids

    async def main() -> None:
        awaited = [start(engine, p, SamplingParams(max_tokens=50)) for p in PROMPTS]
        streams = await asyncio.gather(*(iterate(p) for p in PROMPTS))
        finals = await asyncio.gather(*awaited)
        for prompt, ids, final in zip(PROMPTS, streams, finals, strict=True):
            assert ids == final.outputs[0].token_ids == FUNCTION.reference(prompt, 50)

    asyncio.run(main())
    wait_until(lambda: engine.stepper._thread is None)  # type: ignore[attr-defined]
    assert_idle(engine)
    asyncio.run(main())  # the thread starts again


def test_clients_that_go_away_are_cancelled() -> None:
    engine = make_engine()
    engine.model.delay_s = 0.005
    long = SamplingParams(max_tokens=200)

    async def leave_the_loop() -> None:
        async for _ in start(engine, PROMPTS[0], long):
            break

    async def time_out() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(start(engine, PROMPTS[1], long)._final(), 0.03)

    async def drop() -> None:
        request = start(engine, PROMPTS[2], long)
        del request
        gc.collect()

    async def cancel() -> None:
        request = start(engine, PROMPTS[3], long)
        await asyncio.sleep(0.02)
        assert request.cancel()
        output = await request
        assert output.outputs[0].finish_reason == "cancelled"

    async def main() -> None:
        await asyncio.gather(leave_the_loop(), time_out(), drop(), cancel())

    asyncio.run(main())
    wait_until(lambda: engine.num_unfinished == 0)
    wait_until(lambda: engine.stepper._thread is None)  # type: ignore[attr-defined]
    assert engine.get_metrics()["request_success"] == {"cancelled": 4}
    assert_idle(engine)


def test_errors_reach_asynchronous_clients() -> None:
    engine = make_engine(fails_at={2: RuntimeError("boom")})

    async def main() -> None:
        with pytest.raises(RequestError):
            start(engine, [], SamplingParams())
        output = await start(engine, PROMPTS[0], SamplingParams())
        assert output.outputs[0].finish_reason == "error"
        again = await start(engine, PROMPTS[0], SamplingParams())
        assert again.outputs[0].token_ids == FUNCTION.reference(PROMPTS[0], 16)

    asyncio.run(main())


def test_many_threads_share_one_engine() -> None:
    engine = make_engine(NGRAM)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for i in range(5):
            prompt = [(seed * 7 + i) % VOCAB, seed % VOCAB, 3]
            [output] = run(engine, [prompt], SamplingParams(max_tokens=20))
            if output.outputs[0].token_ids != FUNCTION.reference(prompt, 20):
                wrong.append((prompt, output))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert engine.get_metrics()["generation_tokens"] == 6 * 5 * 20
    assert_idle(engine)


def test_a_request_is_registered_before_a_step_can_plan_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may step between submit()'s call of the executor and its return: what steps
    ask of the request is there then, and nothing of one that the executor refuses."""
    engine = make_engine()
    submit, seen = engine.executor.submit, []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(executor, name)

        def submit(self, *arguments: Any, **options: Any) -> int:
            seen.append(options["id"] in engine._states)
            return int(submit(*arguments, **options))

    executor = engine.executor
    monkeypatch.setattr(engine, "executor", Watched())
    params = SamplingParams(max_tokens=4)
    states = [engine.submit(engine.resolve(prompt, params)) for prompt in PROMPTS[:3]]
    assert seen == [True] * 3 and [state.rid for state in states] == [1, 2, 3]
    with pytest.raises(RequestError, match="max_tokens"):
        resolved = engine.resolve(PROMPTS[0], params)
        resolved.submit_kwargs["max_tokens"] = 0
        engine.submit(resolved)
    assert set(engine._states) == {1, 2, 3}
    engine.run(states)
    for prompt, state in zip(PROMPTS, states, strict=False):
        assert state.token_ids == FUNCTION.reference(prompt, 4)
    assert_idle(engine)


def test_ids_are_reserved_in_order() -> None:
    executor = make_engine().executor
    first, second = executor.reserve(), executor.reserve()
    assert executor.submit([1, 2], max_tokens=1, id=second) == second
    for wrong in (first, second, second + 1, -1):
        with pytest.raises(ValueError, match=rf"id = {wrong}: expected one that reserve\(\) gave"):
            executor.submit([1, 2], max_tokens=1, id=wrong)
    assert executor.submit([1, 2], max_tokens=1) == second + 1


def test_a_request_that_is_cancelled_while_its_text_is_read_costs_nobody_anything() -> None:
    class Nothing:
        def propose(self, history: list[int], budget: int) -> list[int]:
            return []

    config = UserDrafterConfig(Nothing())
    engine = make_engine(
        overlap_depth=1, method="proposed", proposed_by_host=True, adaptive=False
    )  # fmt: skip
    engine.limits = dataclasses.replace(engine.limits, speculative_config=config)
    executor = engine.executor

    class Racing:
        victim = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(executor, name)

        def decoding(self, rid: int) -> bool:
            found = bool(executor.decoding(rid))
            if found and rid == self.victim:  # another thread cancels the request here
                self.victim = 0
                engine.cancel(engine._states[rid])
            return found

    racing = Racing()
    engine._drafting = UserDrafting(config, racing, vocab_size=VOCAB, max_seq_len=256)
    params = SamplingParams(max_tokens=30)
    states = [engine.submit(engine.resolve(prompt, params)) for prompt in PROMPTS[:3]]
    racing.victim = states[1].rid
    engine.run(states)
    assert racing.victim == 0 and states[1].finish_reason == "cancelled"
    for i in (0, 2):
        assert states[i].token_ids == FUNCTION.reference(PROMPTS[i], 30)
    assert_idle(engine)

"""Ctrl-C at every place of a step: nothing that others wait for differs, and the LLM goes on."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from engine_loop_cases import (
    FUNCTION,
    LOOKAHEAD,
    NGRAM,
    PROMPTS,
    assert_idle,
    make_engine,
    text_of,
)
from interrupts import Interrupter

from specdec_ext.engine.loop import EngineLoop
from specdec_ext.engine.request_group import RequestGroup
from specdec_ext.request.sampling_params import SamplingParams

FILES = (
    "engine/loop.py", "engine/ledger.py", "engine/request_state.py", "engine/step_lock.py",
    "engine/request_group.py", "engine/request_table.py", "engine/delivered.py",
    "engine/token_scores.py", "engine/logits_processing.py", "engine/overlap/loop.py",
    "engine/overlap/pipeline.py", "engine/overlap/recorded_steps.py", "engine/overlap/worker.py",
    "engine/user_drafting.py",
)  # fmt: skip

ENGINES: dict[str, Callable[[], EngineLoop]] = {
    "plain": make_engine,
    "ngram": lambda: make_engine(NGRAM),
    "lookahead": lambda: make_engine(LOOKAHEAD),
    "run-ahead 0": lambda: make_engine(NGRAM, overlap_depth=0),
    "run-ahead 2": lambda: make_engine(NGRAM, overlap_depth=2),
}


def keep(tokens: list[int], scores: Any) -> Any:
    return scores


class Others:
    """Requests of other callers, one of each kind, which no interrupt of ours may touch."""

    def __init__(self, engine: EngineLoop, ahead: bool) -> None:
        text = text_of(FUNCTION.reference(PROMPTS[2], 9))
        self.engine = engine
        self.news: list[int | None] = [0, 0, 0, 0, None]
        logits = {} if ahead else {"return_generation_logits": True}
        self.params = [
            SamplingParams(max_tokens=9),
            SamplingParams(max_tokens=9, logprobs=1, logits_processors=[keep]),
            SamplingParams(max_tokens=40, stop=text[-4:-1]),
            SamplingParams(max_tokens=6, **logits),  # type: ignore[arg-type]
        ]
        self.states = [
            engine.submit(engine.resolve(prompt, params), on_update=self.callback(i))
            for i, (prompt, params) in enumerate(zip(PROMPTS, self.params, strict=True))
        ]
        # One whose outputs the executor holds until somebody looks, as generate() does.
        held = engine.resolve(PROMPTS[0][::-1], SamplingParams(max_tokens=11))
        self.states.append(engine.submit(held, watched=False))

    def callback(self, index: int) -> Callable[[Any], None]:
        def on_update(state: Any) -> None:
            self.news[index] = state.version

        return on_update

    def check(self, wanted: list[Any]) -> None:
        self.engine.run(self.states)
        told = zip(self.news, self.states, strict=True)
        assert all(news in (None, s.version) for news, s in told)  # each of its last change
        assert results(self.states) == wanted


def results(states: list[Any]) -> list[Any]:
    found = []
    for state in states:
        output = state.snapshot()
        out = output.outputs[0]
        logits = None if out.generation_logits is None else out.generation_logits.tolist()
        spec = output.metrics["speculative_decoding"]
        usage = (output.metrics["num_generated_tokens"], spec["num_accepted_draft_tokens"])
        found.append(
            (out.token_ids, out.text, out.finish_reason, out.error, out.logprobs, logits,
             out.token_from_draft, usage)
        )  # fmt: skip
    return found


def decode_ours(engine: EngineLoop) -> None:
    """What LLM.generate does."""
    groups: list[RequestGroup] = []
    try:
        for prompt in PROMPTS[:2]:
            request = engine.resolve(prompt, SamplingParams(max_tokens=7))
            groups.append(RequestGroup(engine, request, watched=False))
        engine.run([state for group in groups for state in group.states])
    except BaseException:
        for group in groups:
            group.cancel()
        raise


def scenario(make: Callable[[], EngineLoop], ahead: bool, at: int | None) -> Interrupter:
    """Interrupt our generate() beside the others at one place; then everybody goes on."""
    engine = make()
    others = Others(engine, ahead)
    interrupter = Interrupter(FILES, at)
    if at is None:
        interrupter.run(lambda: decode_ours(engine))
    else:
        with pytest.raises(KeyboardInterrupt):
            interrupter.run(lambda: decode_ours(engine))
    # Texts and logprobs are those of requests that are alone; drafts are theirs as well.
    others.check(solo(make, ahead))
    decode_ours(engine)
    metrics = engine.get_metrics()
    tokens = sum(len(s.token_ids) for s in others.states)
    assert metrics["generation_tokens"] >= tokens + 14
    assert sum(metrics["request_success"].values()) <= 9
    assert metrics["request_success"]["length"] >= 5
    assert "error" not in metrics["request_success"]
    assert_idle(engine)
    engine.close()
    return interrupter


_SOLO: dict[Any, list[Any]] = {}


def solo(make: Callable[[], EngineLoop], ahead: bool) -> list[Any]:
    if make not in _SOLO:
        found = []
        for i in range(len(PROMPTS) + 1):
            engine = make()
            others = Others(engine, ahead)
            for state in others.states[:i] + others.states[i + 1 :]:
                engine.cancel(state)
            engine.run(others.states)
            found.append(results(others.states)[i])
        assert [r[0] for r in found[:2]] == [FUNCTION.reference(p, 9) for p in PROMPTS[:2]]
        assert found[2][2] == "stop"
        _SOLO[make] = found
    return _SOLO[make]


def places_of(name: str) -> list[int]:
    """Every place once, when it comes first."""
    counted = scenario(ENGINES[name], "ahead" in name, None)
    assert len(counted.seen) > 100
    return sorted(counted.seen.values())


def strike(name: str, at: int) -> None:
    struck = scenario(ENGINES[name], "ahead" in name, at)
    assert struck.where is not None, "the interrupt never came"


# Each way of stepping; what the two methods add is in C++, where no signal is raised.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("ngram", "lookahead") else ())
        for name in ENGINES
    ],
)
def test_interrupts_at_every_place_of_the_text(name: str) -> None:
    for at in places_of(name):
        strike(name, at)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_interrupts_at_every_moment(name: str) -> None:
    counted = scenario(ENGINES[name], "ahead" in name, None)
    for at in range(counted.count):
        strike(name, at)


def signals(name: str, count: int, seed: int) -> int:
    """SIGINTs at random times while we decode beside others; how many struck."""
    draw = random.Random(seed)
    make = ENGINES[name]
    wanted = solo(make, "ahead" in name)
    engine = make()
    main = threading.main_thread().ident
    assert main is not None
    struck = 0
    others = Others(engine, "ahead" in name)
    for _ in range(count):
        sent = threading.Event()

        def send(sent: threading.Event, delay: float) -> None:
            time.sleep(delay)
            sent.set()
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=send, args=(sent, draw.random() * 0.01))
        try:
            thread.start()
            while not sent.is_set():
                decode_ours(engine)
            thread.join()
            time.sleep(0.1)  # it is raised here at the latest
        except KeyboardInterrupt:
            struck += 1
        thread.join()
        if all(state.finished for state in others.states):
            others.check(wanted)
            others = Others(engine, "ahead" in name)
    others.check(wanted)
    decode_ours(engine)
    assert "error" not in engine.get_metrics()["request_success"]
    assert_idle(engine)
    return struck


# Python drops an exception that is raised in a weak reference's callback (threading has some).
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "count", [60, pytest.param(2000, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("name", ENGINES)
def test_signals_at_random_times(name: str, count: int) -> None:
    assert signals(name, count, 1) >= 0.9 * count

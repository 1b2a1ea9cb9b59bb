"""The loop around the executor, on a target whose tokens are a hash of all it sees.

Text, stop strings, limits and counts must come out as if the tokens had been decoded one by one,
whatever the drafter delivers in one step; a failing, cancelled or interrupted request must leave
the others untouched.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import threading
import time
from typing import Any

import pytest
from hash_target import HashFunction, HashModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec_ext import _core
from specdec_ext.config import LookaheadDecodingConfig, NGramDecodingConfig, SpeculativeConfig
from specdec_ext.engine_loop import EngineLoop
from specdec_ext.errors import CapacityError, EngineError, RequestError
from specdec_ext.llm_async import AsyncRequest, BackgroundStepper
from specdec_ext.memory_plan import plan_memory
from specdec_ext.request_check import EngineLimits
from specdec_ext.sampling_params import SamplingParams

VOCAB = 64
FUNCTION = HashFunction(vocab=VOCAB)
NGRAM = NGramDecodingConfig(max_draft_len=6, max_matching_ngram_size=3, adaptive=False)
LOOKAHEAD = LookaheadDecodingConfig(4, 3, 4, adaptive=False)
METHODS: dict[str, SpeculativeConfig | None] = {
    "plain": None, "ngram": NGRAM, "lookahead": LOOKAHEAD,
}  # fmt: skip
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], [9, 8, 9, 8, 9], list(range(40))]


@functools.cache
def tokenizer() -> Any:
    """64 tokens: ASCII letters, and bytes of multi-byte characters that join at random."""
    alphabet = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c.isascii()][30:60]
    wide = ["ã", "ģ", "Ĥ", "Ġ", "â", "Ħ", "č", "ĊĊ"]
    words = alphabet + wide
    words += [a + b for a in alphabet[:5] for b in alphabet[:6]]
    core = Tokenizer(models.BPE({w: i for i, w in enumerate(words[:VOCAB])}, []))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def text_of(ids: list[int]) -> str:
    text: str = tokenizer().decode(ids, clean_up_tokenization_spaces=False)
    return text


class Broken(HashModel):
    """Raises in the forward passes named by `fails_at` (counted from 0)."""

    fails_at: dict[int, BaseException]
    count = 0
    delay_s = 0.0

    def forward(self, plan: Any) -> Any:
        self.count += 1
        time.sleep(self.delay_s)
        error = self.fails_at.get(self.count - 1)
        if error is not None:
            raise error
        return super().forward(plan)


def make_engine(
    config: SpeculativeConfig | None = None,
    *,
    num_pages: int = 64,
    page_size: int = 8,
    max_batch_size: int = 4,
    fails_at: dict[int, BaseException] | None = None,
    eos: tuple[int, ...] = (),
    calibrate: Any = None,
    with_tokenizer: bool = True,
) -> EngineLoop:
    model = Broken(FUNCTION, num_pages, page_size)
    model.fails_at = fails_at or {}
    how: dict[str, Any] = {"method": "none"}
    if isinstance(config, LookaheadDecodingConfig):
        how = {"method": "lookahead", "lookahead": config.wng}
    elif config is not None:
        ngram = config.to_dict()
        del ngram["method"], ngram["adaptive"]
        how = {"method": "ngram", "ngram": ngram}
    executor = _core.Executor(
        model.k_pages, model.v_pages, vocab_size=VOCAB, max_batch_size=max_batch_size,
        max_seq_len=256, max_num_tokens=128, check_integrity=True,
        adaptive=config.adaptive if config is not None else False, **how,
    )  # fmt: skip
    limits = EngineLimits(
        vocab_size=VOCAB, max_seq_len=256, eos_token_ids=eos, speculative_config=config,
        num_pages=num_pages, tokens_per_block=page_size,
    )  # fmt: skip
    return EngineLoop(
        executor, model, limits=limits, tokenizer=tokenizer() if with_tokenizer else None,
        calibrate=calibrate,
    )  # fmt: skip


def run(engine: EngineLoop, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    states = [engine.submit(p, params) for p in prompts]
    engine.run(states)
    return [s.snapshot() for s in states]


def assert_idle(engine: EngineLoop) -> None:
    """Nothing runs, every page is free."""
    assert engine.num_unfinished == 0
    stats = engine.executor.stats()
    assert (stats["running"], stats["waiting"], stats["promised_pages"]) == (0, 0, 0)
    assert stats["free_pages"] == stats["total_pages"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 100])
def test_tokens_text_and_counts(method: str, max_tokens: int) -> None:
    engine = make_engine(METHODS[method])
    outputs = run(engine, PROMPTS, SamplingParams(max_tokens=max_tokens))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        out = output.outputs[0]
        assert out.token_ids == FUNCTION.reference(prompt, max_tokens)
        assert out.text == text_of(out.token_ids)
        assert (out.finish_reason, out.stop_reason, output.finished) == ("length", None, True)
        metrics = output.metrics
        spec = metrics["speculative_decoding"]
        assert metrics["num_generated_tokens"] == max_tokens
        assert metrics["num_prompt_tokens"] == len(prompt)
        assert spec["num_accepted_draft_tokens"] == sum(out.token_from_draft)
        assert spec["num_accepted_draft_tokens"] == sum(spec["per_step_accepted"])
        assert spec["num_draft_tokens"] == sum(spec["per_step_drafted"])
        assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
        assert len(spec["acceptance_histogram"]) == spec["num_spec_tokens"] + 1
        # Tokens are drafts that were confirmed, plus one per delivering pass.
        passes = len(out.token_ids) - sum(out.token_from_draft)
        assert passes <= metrics["num_forward_passes"]
        if method == "plain":
            assert spec["num_spec_steps"] == 0
        elif max_tokens == 100:
            assert spec["num_accepted_draft_tokens"] > 0
    total = engine.get_metrics()
    assert total["generation_tokens"] == max_tokens * len(PROMPTS)
    assert total["prompt_tokens"] == sum(map(len, PROMPTS))
    assert total["request_success"] == {"length": len(PROMPTS)}
    assert_idle(engine)


def first_stop(prompt: list[int], num: int, stop: str, min_tokens: int) -> tuple[int, str] | None:
    """By definition: decode token by token, look at the whole text. (tokens, text up to stop)."""
    ids = FUNCTION.reference(prompt, num)
    from specdec_ext.detokenizer import DetokenizerFactory

    decoder = DetokenizerFactory(tokenizer()).make()
    text = ""
    for count, token in enumerate(ids, 1):
        piece = decoder.push(token)
        for i in range(len(piece)):
            if (text + piece[: i + 1]).endswith(stop) and count >= min_tokens:
                return count, text + piece[: i + 1]
        text += piece
    return None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 9])
def test_stop_strings_at_every_place(method: str, include: bool, min_tokens: int) -> None:
    engine = make_engine(METHODS[method])
    prompt, num = PROMPTS[0], 40
    text = text_of(FUNCTION.reference(prompt, num))
    stops = {text[i : i + n] for i in range(0, len(text), 3) for n in (1, 2, 3, 7)} - {""}
    checked = 0
    for stop in sorted(stops):
        if "\ufffd" in stop:
            continue
        expected = first_stop(prompt, num, stop, min_tokens)
        params = SamplingParams(
            max_tokens=num, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens
        )
        [output] = run(engine, [prompt], params)
        out = output.outputs[0]
        if expected is None:
            assert (out.finish_reason, len(out.token_ids)) == ("length", num)
            assert out.text == text
            continue
        count, upto = expected
        checked += 1
        assert (out.finish_reason, out.stop_reason) == ("stop", stop)
        assert out.token_ids == FUNCTION.reference(prompt, count)
        assert out.text == (upto if include else upto[: -len(stop)])
        spec = output.metrics["speculative_decoding"]
        assert output.metrics["num_generated_tokens"] == count
        assert spec["num_accepted_draft_tokens"] == sum(out.token_from_draft)
    assert checked > 20
    assert_idle(engine)


@pytest.mark.parametrize("method", METHODS)
def test_stop_token_and_end_token_at_every_offset(method: str) -> None:
    num = 24
    expected = FUNCTION.reference(PROMPTS[0], num)
    for offset in range(num):
        token = expected[offset]
        length = expected.index(token) + 1
        engine = make_engine(METHODS[method], eos=(token,))
        [output] = run(engine, [PROMPTS[0]], SamplingParams(max_tokens=num))
        out = output.outputs[0]
        assert (out.finish_reason, out.stop_reason) == ("stop", None)
        assert out.token_ids == expected[:length]
        assert out.text == text_of(expected[: length - 1])  # the end token is no text
        engine = make_engine(METHODS[method], eos=(token,))
        both = SamplingParams(max_tokens=num, ignore_eos=True, stop_token_ids=[token])
        [output] = run(engine, [PROMPTS[0]], both)
        assert output.outputs[0].stop_reason == token
        assert output.outputs[0].token_ids == expected[:length]
        assert_idle(engine)


@pytest.mark.parametrize("method", METHODS)
def test_streams_add_up(method: str) -> None:
    engine = make_engine(METHODS[method])
    params = SamplingParams(max_tokens=60, stop=["\x00never"])
    state = engine.submit(PROMPTS[0], params)
    text, ids, segments = "", [], []
    while not state.finished:
        engine.step()
        out = state.snapshot().outputs[0]
        text += out.delta_text
        ids += out.delta_token_ids
        segments += out.delta_segments
        assert out.text == text
        assert out.token_ids == ids
        assert "".join(s for s, _ in segments) == text
    assert ids == FUNCTION.reference(PROMPTS[0], 60)
    assert text == text_of(ids)


def test_a_stream_never_shows_what_a_stop_cuts_away() -> None:
    engine = make_engine(NGRAM)
    text = text_of(FUNCTION.reference(PROMPTS[0], 60))
    stop = text[20:26]
    state = engine.submit(PROMPTS[0], SamplingParams(max_tokens=60, stop=stop))
    shown = ""
    while not state.finished:
        engine.step()
        shown += state.snapshot().outputs[0].delta_text
        assert text[: text.index(stop)].startswith(shown)
    assert shown == text[: text.index(stop)]


@pytest.mark.parametrize("method", METHODS)
def test_a_failing_forward_fails_its_step_only(method: str) -> None:
    engine = make_engine(METHODS[method], max_batch_size=2, fails_at={3: RuntimeError("boom 17")})
    states = [engine.submit(p, SamplingParams(max_tokens=30)) for p in PROMPTS]
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
    state = engine.submit([1, 2], SamplingParams())
    engine.run([state])
    assert state.finish_reason == "error"
    assert "0 rows" in (state.error or "")
    engine.model.forward = good
    [after] = run(engine, [[1, 2]], SamplingParams())
    assert after.outputs[0].token_ids == FUNCTION.reference([1, 2], 16)
    assert_idle(engine)


def test_ctrl_c_keeps_partial_output_and_the_engine() -> None:
    engine = make_engine(NGRAM, fails_at={4: KeyboardInterrupt()})
    state = engine.submit(PROMPTS[0], SamplingParams(max_tokens=50))
    with pytest.raises(KeyboardInterrupt):
        engine.run([state])
    assert state.finish_reason == "error"
    assert state.token_ids == FUNCTION.reference(PROMPTS[0], len(state.token_ids))
    assert len(state.token_ids) >= 4
    [after] = run(engine, [PROMPTS[1]], SamplingParams())
    assert after.outputs[0].token_ids == FUNCTION.reference(PROMPTS[1], 16)
    assert_idle(engine)


@pytest.mark.parametrize("stage", range(8))
def test_cancel_at_every_stage(stage: int) -> None:
    engine = make_engine(NGRAM, max_batch_size=2)
    states = [engine.submit(p, SamplingParams(max_tokens=25)) for p in PROMPTS]
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
            engine.submit(prompt, params)
    assert_idle(engine)
    no_text = make_engine(with_tokenizer=False)
    with pytest.raises(RequestError, match="need a tokenizer"):
        no_text.submit([1], SamplingParams(stop="x"))
    [output] = run(no_text, [[1]], SamplingParams())
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 16


def test_closed_engine() -> None:
    engine = make_engine()
    state = engine.submit([1], SamplingParams())
    engine.close()
    engine.close()
    assert state.finish_reason == "cancelled"
    for call in (engine.step, lambda: engine.submit([1], SamplingParams())):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_calibration_runs_once_before_the_first_adaptive_request() -> None:
    calls: list[int] = []
    config = dataclasses.replace(NGRAM, adaptive=True)

    def calibrate() -> None:
        calls.append(engine.executor.stats()["running"])
        engine.executor.set_step_cost([1, 8], [1.0, 1.1])

    engine = make_engine(config, calibrate=calibrate)
    run(engine, PROMPTS, SamplingParams(max_tokens=4, speculative=False))
    run(engine, PROMPTS, SamplingParams(max_tokens=4, adaptive=False))
    assert calls == []
    plain = engine.submit(PROMPTS[0], SamplingParams(max_tokens=40, speculative=False))
    engine.step()
    late = engine.submit(PROMPTS[1], SamplingParams(max_tokens=8))
    engine.run([late])
    assert calls == []  # pages were in use
    engine.run([plain])
    run(engine, PROMPTS, SamplingParams(max_tokens=8))
    run(engine, PROMPTS, SamplingParams(max_tokens=8))
    assert calls == [0]


def test_a_failing_calibration_is_not_fatal() -> None:
    def calibrate() -> None:
        raise RuntimeError("no clock")

    engine = make_engine(dataclasses.replace(NGRAM, adaptive=True), calibrate=calibrate)
    [output] = run(engine, [PROMPTS[0]], SamplingParams(max_tokens=30))
    assert output.outputs[0].token_ids == FUNCTION.reference(PROMPTS[0], 30)


def test_logprobs_cover_exactly_the_delivered_tokens() -> None:
    engine = make_engine(NGRAM)
    text = text_of(FUNCTION.reference(PROMPTS[0], 40))
    params = SamplingParams(max_tokens=40, logprobs=2, stop=text[15:18])
    [output] = run(engine, [PROMPTS[0]], params)
    out = output.outputs[0]
    assert out.finish_reason == "stop"
    assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids)
    for token, row in zip(out.token_ids, out.logprobs, strict=True):
        assert row[token].rank == 1
        assert len(row) == 2
        assert row[token].logprob == max(v.logprob for v in row.values())
    assert out.cumulative_logprob == pytest.approx(
        sum(row[t].logprob for t, row in zip(out.token_ids, out.logprobs, strict=True))
    )


# -- asynchronous ---------------------------------------------------------------------------------


def start(engine: EngineLoop, prompt: list[int], params: SamplingParams) -> AsyncRequest:
    stepper = engine.__dict__.setdefault("stepper", BackgroundStepper(engine))
    return AsyncRequest(engine, stepper, prompt, params, None)


def wait_until(condition: Any, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
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
        thread.join(timeout=60)
    assert not any(t.is_alive() for t in threads)
    assert wrong == []
    assert engine.get_metrics()["generation_tokens"] == 6 * 5 * 20
    assert_idle(engine)


def test_memory_plan_is_shown() -> None:
    from specdec_ext.config import KvCacheConfig, SchedulerConfig

    memory = plan_memory(
        num_layers=2, num_kv_heads=1, head_dim=8, kv_bytes=4, max_position=100, draft_len=15,
        kv_cache=KvCacheConfig(tokens_per_block=16), scheduler=SchedulerConfig(max_batch_size=3),
        free_bytes=1 << 30,
    )  # fmt: skip
    assert memory.num_pages == 3 * 8  # 115 slots of a sequence are 8 pages
    assert memory.pool_bytes == 24 * 16 * 2 * 2 * 8 * 4

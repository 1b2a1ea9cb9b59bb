"""The loop around the executor, on a target whose tokens are a hash of all it sees.

Text, stop strings, limits and counts must come out as if the tokens had been decoded one by one,
whatever the drafter delivers in one step; a failing, cancelled or interrupted request must leave
the others untouched.
"""

from __future__ import annotations

import dataclasses

import pytest
from engine_loop_cases import (
    FUNCTION,
    METHODS,
    NGRAM,
    PROMPTS,
    assert_idle,
    make_engine,
    run,
    text_of,
    tokenizer,
)

from specdec_ext.engine.memory_plan import plan_memory
from specdec_ext.request.sampling_params import SamplingParams


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
    from specdec_ext.text.detokenizer import DetokenizerFactory

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


@pytest.mark.parametrize("depth", [None, 0, 1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_streams_add_up(method: str, depth: int | None) -> None:
    engine = make_engine(METHODS[method], overlap_depth=depth)
    params = SamplingParams(max_tokens=60, stop=["\x00never"])
    state = engine.submit(engine.resolve(PROMPTS[0], params))
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
    state = engine.submit(engine.resolve(PROMPTS[0], SamplingParams(max_tokens=60, stop=stop)))
    shown = ""
    while not state.finished:
        engine.step()
        shown += state.snapshot().outputs[0].delta_text
        assert text[: text.index(stop)].startswith(shown)
    assert shown == text[: text.index(stop)]


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
    plain = engine.submit(
        engine.resolve(PROMPTS[0], SamplingParams(max_tokens=40, speculative=False))
    )
    engine.step()
    late = engine.submit(engine.resolve(PROMPTS[1], SamplingParams(max_tokens=8)))
    engine.run([late, plain])
    run(engine, PROMPTS, SamplingParams(max_tokens=8))
    run(engine, PROMPTS, SamplingParams(max_tokens=8))
    assert calls == [1]  # others may run: it writes into no pages


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


def test_memory_plan_is_shown() -> None:
    from specdec_ext.config.engine import KvCacheConfig, SchedulerConfig

    memory = plan_memory(
        bytes_per_token=2 * 2 * 8 * 4, max_position=100, draft_len=15,
        kv_cache=KvCacheConfig(tokens_per_block=16), scheduler=SchedulerConfig(max_batch_size=3),
        free_bytes=1 << 30,
    )  # fmt: skip
    assert memory.num_pages == 3 * 8  # 115 slots of a sequence are 8 pages
    assert memory.pool_bytes == 24 * 16 * 2 * 2 * 8 * 4

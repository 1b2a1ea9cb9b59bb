"""Steps that are planned before earlier ones were read: counts, failures, refusals, graphs.

Texts are compared by random programs (test_schedules.py). The stub stream runs enqueued work as
late or as early as is legal. The bookkeeping alone, and mistakes in it, are the subject of
tests/cpp/test_overlap.cc.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from driver import Job, hash_engine
from schedule_machine import METHODS
from stream_driver import FakeRecorder, stream_hash_engine

from hash_target import HashFunction
from specdec_ext import _core


@pytest.mark.parametrize("method", ["none", "lookahead", "lookahead-7", "ngram"])
def test_steps_and_counts_are_those_of_the_host_executor(method: str) -> None:
    """Alone in a batch with room for all drafts, a request takes the same steps either way."""
    rng = random.Random(7)
    function = HashFunction(vocab=40, surprise=9, alphabet=4, seed=3)
    for index in range(6):
        prompt = [rng.randrange(40) for _ in range(rng.choice([1, 5, 40]))]
        job = Job(prompt, 80, {"seed": 1000 + index})
        sizes = {"max_batch_size": 2, "max_seq_len": 200, "max_num_tokens": 256}
        host = hash_engine(function, adaptive=False, **sizes, **METHODS[method])
        (plain,) = host.run([job])
        for depth in (0, 1, 2):
            engine = stream_hash_engine(
                function, depth=depth, stub=index if depth else None, **sizes, **METHODS[method]
            )
            (got,) = engine.run([job])
            assert (got.tokens, got.forwards) == (plain.tokens, plain.forwards)
            assert (got.num_drafts, got.num_accepted) == (plain.num_drafts, plain.num_accepted)
            stats, wanted = engine.stats(), host.ex.stats()
            for key in ("rows", "prefill_rows", "num_draft_tokens", "num_accepted_tokens",
                        "num_drafts", "generated_tokens", "finished"):  # fmt: skip
                assert stats[key] == wanted[key], key
            assert stats["steps"] - stats["empty_steps"] == wanted["steps"]
            assert stats["empty_steps"] <= depth


# -- failures -------------------------------------------------------------------------------------


def test_a_failed_pass_ends_its_requests_and_nobody_else() -> None:
    function = HashFunction(vocab=30, seed=4)
    engine = stream_hash_engine(
        function, max_batch_size=2, max_seq_len=120, max_num_tokens=60, depth=1,
        **METHODS["lookahead"],
    )  # fmt: skip
    forward, calls = engine.model.forward, iter(range(10_000))

    def fails_once(plan: Any) -> torch.Tensor:
        if next(calls) == 5:
            raise RuntimeError("out of luck")
        return forward(plan)

    engine.model.forward = fails_once
    jobs = [Job([i, 2, 3], 30) for i in range(5)]
    got = engine.run(jobs)
    failed = [d for d in got if d.finish_reason == "error"]
    assert len(failed) == 2
    assert all("out of luck" in str(d.error) for d in failed)
    for job, d in zip(jobs, got, strict=True):
        text = function.reference(job.prompt, 30)
        assert d.tokens == (text if d.finish_reason == "length" else text[: len(d.tokens)])


def test_a_nan_ends_the_request_alone() -> None:
    function = HashFunction(vocab=30, seed=4)
    engine = stream_hash_engine(
        function, max_batch_size=3, max_seq_len=120, max_num_tokens=90, depth=2, stub=3,
        **METHODS["none"],
    )  # fmt: skip
    forward = engine.model.forward

    def spoilt(plan: Any) -> torch.Tensor:
        ids = forward(plan)
        for b in range(plan.num_requests):
            if plan.kv_len[b] == 2:  # of these requests only the first is ever that short
                ids[plan.cu_logits[b] : plan.cu_logits[b + 1]] = -1
        return ids

    engine.model.forward = spoilt
    jobs = [Job([7], 30), Job([1, 2, 3, 4], 30), Job([5] * 12, 30)]
    victim = function.reference(jobs[0].prompt, 30)
    got = engine.run(jobs)
    assert (got[0].finish_reason, got[0].tokens) == ("error", victim[:2])
    assert "NaN" in str(got[0].error)
    for job, d in list(zip(jobs, got, strict=True))[1:]:
        assert (d.tokens, d.finish_reason) == (function.reference(job.prompt, 30), "length")


@pytest.mark.parametrize(("word", "value"), [(0, 77), (0, 0), (0, -1), (3, 9), (-2, 4)])
def test_a_result_that_cannot_be_ends_its_request_alone(word: int, value: int) -> None:
    """num_tokens, the reason of the end, or a request's flags are not what a device may write."""
    function = HashFunction(vocab=30, seed=4)
    engine = stream_hash_engine(
        function, max_batch_size=2, max_seq_len=120, max_num_tokens=90, depth=1, **METHODS["none"]
    )
    jobs = [[7, 8], [1, 2, 3]]
    ids = [engine.submit(prompt, max_tokens=20) for prompt in jobs]
    assert engine.step() == []
    ring = engine.pipeline.buffers.result_ring
    ring[0, word] = value  # of the first request, before it is read
    outputs = engine.drain()
    first = [out for out in outputs if out.request_id == ids[0]]
    assert [out.finish_reason for out in first] == ["error"]
    assert "please report" in str(first[0].error)
    assert first[0].tokens == []
    others = [token for out in outputs if out.request_id == ids[1] for token in out.tokens]
    assert others == function.reference(jobs[1], 20)
    engine.assert_idle()


@pytest.mark.parametrize(("value", "message"), [(np.nan, "hold a NaN"), (-np.inf, "all -infinity")])
def test_a_row_without_a_law_ends_its_request_alone(value: float, message: str) -> None:
    function = HashFunction(vocab=30, seed=4)
    engine = stream_hash_engine(
        function, max_batch_size=3, max_seq_len=120, max_num_tokens=90, depth=2, stub=3,
        **METHODS["none"],
    )  # fmt: skip
    forward = engine.model.forward

    def spoilt(plan: Any) -> torch.Tensor:
        scores = forward(plan)
        assert plan.needs_logits
        for b in range(plan.num_requests):
            if plan.kv_len[b] == 2:  # of these requests only the first is ever that short
                scores[plan.cu_logits[b] : plan.cu_logits[b + 1]] = value
        return scores

    engine.model.forward = spoilt
    asked = {"temperature": 0.5, "seed": 3}
    jobs = [Job([7], 30, asked), Job([1, 2, 3, 4], 30, asked), Job([5] * 12, 30, asked)]
    wanted = [hash_engine(function, max_batch_size=1).run([job])[0] for job in jobs]
    got = engine.run(jobs)
    assert (got[0].finish_reason, got[0].tokens) == ("error", wanted[0].tokens[:2])
    assert message in str(got[0].error)
    for d, other in zip(got[1:], wanted[1:], strict=True):
        assert (d.tokens, d.finish_reason) == (other.tokens, "length")


def test_scores_of_a_wrong_shape_end_the_step() -> None:
    function = HashFunction(vocab=30, seed=4)
    engine = stream_hash_engine(
        function, max_batch_size=1, max_seq_len=120, max_num_tokens=90, depth=1, **METHODS["none"]
    )
    forward = engine.model.forward
    engine.model.forward = lambda plan: forward(plan)[:, :-1]
    (got,) = engine.run([Job([7, 8], 30, {"temperature": 0.5})])
    assert got.finish_reason == "error"
    assert "scores of shape [1, 29], [1, 30] were asked for" in str(got.error)


def make(**changed: Any) -> Any:
    sizes = {"vocab_size": 50, "max_batch_size": 2, "max_seq_len": 64, "max_num_tokens": 64,
             "num_pages": 40, "page_size": 4}  # fmt: skip
    return _core.Executor(**{**sizes, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"overlap_depth": 3}, r"overlap_depth = 3: give 0\.\.2"),
        ({"overlap_depth": -1}, "overlap_depth = -1"),
        ({"max_num_tokens": 1}, "raise max_num_tokens or lower max_batch_size"),
        ({"page_size": 3}, "a power of two"),
        ({"num_pages": 0}, "num_pages = 0"),
    ],
)
def test_what_cannot_run_ahead_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.5, "top_p": 2.0}, "top_p = 2"),
        (
            {"stop_token_ids": list(range(48)) * 5, "eos_token_ids": list(range(20))},
            "260 end and stop",
        ),
        ({"temperature": -1.0}, "temperature = -1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p = 0"),
        ({"temperature": 1.0, "top_k": -1}, "top_k = -1"),
        ({"temperature": 1.0, "min_p": 1.5}, "min_p = 1.5"),
        ({"acceptance": "typical", "posterior_alpha": 0.0}, "posterior_alpha = 0"),
        ({"acceptance": "threshold", "acceptance_threshold": 2.0}, "acceptance_threshold = 2"),
        ({"acceptance": "luck"}, "acceptance = 'luck'"),
        ({"stop_token_ids": [50]}, "stop_token_ids holds token id 50"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"lookahead": (5, 3, 4)}, r"\(5, 3, 4\) exceeds the engine's \(4, 3, 4\)"),
        ({"max_draft_len": 2}, "not built for prompt lookup"),
        ({"prompt": []}, "prompt_token_ids is empty"),
        ({"prompt": [50]}, "prompt_token_ids holds token id 50"),
        ({"prompt": [1] * 64}, "the prompt has 64 tokens, max_seq_len is 64"),
    ],
)
def test_a_request_that_cannot_run_ahead_is_refused(options: dict[str, Any], message: str) -> None:
    executor = make(**METHODS["lookahead"])
    given = {"prompt": [1, 2], "max_tokens": 4, **options}
    with pytest.raises(ValueError, match=message):
        executor.submit(given.pop("prompt"), **given)
    assert executor.num_unfinished == 0


def test_a_vocabulary_too_large_to_draw_from_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 1048576 tokens can be drawn from"):
        make(vocab_size=(1 << 20) + 1)


def test_a_request_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="the whole pool has 8: lower max_tokens"):
        make(num_pages=8).submit([1, 2], max_tokens=60)


def test_calls_out_of_order_are_refused() -> None:
    executor = make(overlap_depth=1)
    with pytest.raises(ValueError, match="needs bind_rings"):
        executor.stage()
    with pytest.raises(ValueError, match="no step is in flight"):
        executor.deliver()
    words = executor.staging_layout.words
    rings = {
        "staging": torch.zeros(executor.ring_size, words, dtype=torch.int32),
        "entries": torch.zeros(executor.ring_size, executor.entry_bytes, dtype=torch.uint8),
        "results": torch.zeros(executor.ring_size, executor.result_words, dtype=torch.int32),
        "scores": torch.zeros(executor.ring_size, executor.max_host_rows, 50),
        "trees": torch.zeros(executor.ring_size, 2, executor.tree_words, dtype=torch.int32),
    }
    for name in rings:
        with pytest.raises(ValueError, match=name):
            executor.bind_rings(**{**rings, name: rings[name][:1]})
    executor.bind_rings(**rings)
    executor.submit([1, 2, 3], max_tokens=9)
    assert executor.stage() is not None
    with pytest.raises(ValueError, match="step 7 is not in flight"):
        executor.fail_step(7, "why")
    executor.submit([1, 2, 3], max_tokens=9)
    assert executor.stage() is not None
    with pytest.raises(ValueError, match="plan\\(\\) with 2 steps unread"):
        executor.stage()


# -- graphs ----------------------------------------------------------------------------------------


def test_steps_with_prompts_run_without_a_graph() -> None:
    function = HashFunction(vocab=30, seed=1)
    recorder = FakeRecorder()
    engine = stream_hash_engine(
        function, max_batch_size=2, max_seq_len=100, max_num_tokens=50, depth=0, recorder=recorder
    )
    engine.submit([1] * 90, max_tokens=1)
    engine.drain()
    assert engine.stats()["steps"] == 2 and recorder.replayed == 0
    engine.submit([1] * 40, max_tokens=5)
    engine.drain()
    assert recorder.replayed == 4
    assert recorder.recorded == 1


def test_recording_changes_nothing_of_the_step_that_needs_it() -> None:
    """The first step of a bucket records it: a step without any request runs in between."""
    function = HashFunction(vocab=30, seed=1)
    recorder = FakeRecorder()
    engine = stream_hash_engine(
        function, max_batch_size=4, max_seq_len=100, max_num_tokens=90, depth=1, stub=5,
        recorder=recorder, **METHODS["lookahead"],
    )  # fmt: skip
    rid = engine.submit([1, 2, 3], max_tokens=60)
    outputs = [out for _ in range(6) for out in engine.step() or []]
    engine.submit([4, 5], max_tokens=9)  # another bucket, while a step is in flight
    outputs += engine.drain()
    tokens = [t for out in outputs if out.request_id == rid for t in out.tokens]
    assert tokens == function.reference([1, 2, 3], 60)
    assert 1 < recorder.recorded < recorder.replayed

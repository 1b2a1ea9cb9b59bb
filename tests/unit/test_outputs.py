"""Counting, timing, JSON lines."""

from __future__ import annotations

import json

import pytest

from specdec_ext.text.metrics import RequestTimer, SpecCounter
from specdec_ext.text.outputs import CompletionOutput, Logprob, RequestOutput


def test_counter_definitions() -> None:
    counter = SpecCounter(num_spec_tokens=3)
    counter.count(drafts=0, accepted=0, rows=5, tokens=1)  # prefill
    counter.count(drafts=3, accepted=3, rows=4, tokens=4)
    counter.count(drafts=3, accepted=0, rows=4, tokens=1)
    counter.count(drafts=2, accepted=1, rows=3, tokens=1)  # a stop cut the bonus token
    counter.count(drafts=0, accepted=0, rows=1, tokens=1)  # nothing to draft
    report = counter.to_dict()
    assert report["num_spec_steps"] == 3
    assert report["num_draft_tokens"] == 8
    assert report["num_accepted_draft_tokens"] == 4
    assert report["mean_acceptance_length"] == pytest.approx(1 + 4 / 3)
    assert report["draft_acceptance_rate"] == pytest.approx(4 / 8)
    assert report["path_acceptance_rate"] == pytest.approx(4 / 9)
    assert report["acceptance_histogram"] == [1, 1, 0, 1]
    assert sum(report["acceptance_histogram"]) == report["num_spec_steps"]
    assert len(report["acceptance_histogram"]) == report["num_spec_tokens"] + 1
    assert report["per_step_accepted"] == [3, 0, 1]
    assert report["per_step_drafted"] == [3, 3, 2]
    assert (counter.num_steps, counter.num_tokens, counter.num_rows) == (5, 8, 17)


def test_empty_counter_divides_by_nothing() -> None:
    report = SpecCounter(0).to_dict()
    assert report["mean_acceptance_length"] == 1.0
    assert report["draft_acceptance_rate"] == 0.0
    assert report["acceptance_histogram"] == [0]


def test_counters_of_different_depth_add_up() -> None:
    deep, shallow, total = SpecCounter(6), SpecCounter(2), SpecCounter(0, keep_steps=False)
    deep.count(drafts=6, accepted=5, rows=7, tokens=6)
    shallow.count(drafts=2, accepted=2, rows=3, tokens=3)
    total.add(shallow)
    total.add(deep)
    assert total.histogram == [0, 0, 1, 0, 0, 1, 0]
    assert (total.num_spec_tokens, total.num_accepted, total.num_tokens) == (6, 7, 9)
    assert "per_step_accepted" not in total.to_dict()


def test_timer() -> None:
    timer = RequestTimer(arrival=1.0, scheduled=1.5, first_token=2.0, last_token=4.0)
    report = timer.to_dict(num_tokens=5)
    assert report == {
        "queue_time_ms": 500.0,
        "time_to_first_token_ms": 1000.0,
        "generation_time_ms": 2500.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 2.0,
    }
    assert set(RequestTimer(arrival=1.0).to_dict(0).values()) == {None}


def test_json_line() -> None:
    completion = CompletionOutput(
        index=0, text="x", token_ids=[5], finish_reason="length",
        logprobs=[{5: Logprob(-0.5, 1, "x")}],
    )  # fmt: skip
    line = RequestOutput("0", "p", [1], [completion], True, {"numerics": "exact"}).to_json_dict()
    assert json.loads(json.dumps(line)) == {
        "prompt": "p",
        "token_ids": [5],
        "text": "x",
        "finish_reason": "length",
        "stop_reason": None,
        "metrics": {"numerics": "exact"},
        "logprobs": [{"5": {"logprob": -0.5, "rank": 1}}],
    }


def test_a_printed_result_is_short() -> None:
    """What a snapshot repeats of the output, and the counts of metrics, are not in its repr."""
    out = CompletionOutput(
        0, "ab", [1, 2], finish_reason="stop", delta_text="ab", delta_token_ids=[1, 2],
        delta_segments=[("ab", None)], token_from_draft=[False, True], spec_decode_metrics={"x": 1},
    )  # fmt: skip
    text = repr(RequestOutput("0", "p", [3], [out], True, metrics={"y": 2}))
    assert "text='ab', token_ids=[1, 2]" in text and "finish_reason='stop'" in text
    assert "delta" not in text and "metrics" not in text and "from_draft" not in text

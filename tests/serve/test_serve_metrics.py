"""Acceptance numbers in answers and for Prometheus: vLLM's names, the engine's values."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import make_app, make_llm
from sse_reader import chunks
from starlette.testclient import TestClient

from specdec_ext import LLM, SamplingParams

BODY: dict[str, Any] = {"prompt": "abab" * 10, "max_tokens": 60, "temperature": 0}
# What AIPerf and GuideLLM look for.
VLLM_KEYS = {
    "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps",
    "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens",
}  # fmt: skip


def samples(client: TestClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Value of every sample of /metrics, by name and labels but the model's."""
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            assert sample.labels["model_name"] == "tiny"
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def test_metrics_of_an_answer(client: TestClient, llm: LLM) -> None:
    want = llm.generate(BODY["prompt"], SamplingParams(max_tokens=60), use_tqdm=False)[0].metrics
    whole = client.post("/v1/completions", json=BODY).json()["metrics"]
    streamed = client.post(
        "/v1/completions",
        json={**BODY, "stream": True, "stream_options": {"include_usage": True}},
    )
    last = chunks(streamed.text)[-1]["metrics"]
    for got in (whole, last):
        spec = got["speculative_decoding"]
        assert spec.keys() >= VLLM_KEYS and not any(key.startswith("per_step") for key in spec)
        assert spec == {k: want["speculative_decoding"][k] for k in spec}
        assert len(spec["acceptance_histogram"]) == spec["num_spec_tokens"] + 1
        assert spec["num_accepted_draft_tokens"] > 0
        assert got["time_to_first_token_ms"] > 0
    several = client.post("/v1/completions", json={**BODY, "prompt": ["a", "b"]}).json()
    assert several["metrics"] is None


@pytest.mark.parametrize("detail", ["none", "detailed"])
def test_how_much_an_answer_tells(llm: LLM, detail: str) -> None:
    client = TestClient(make_app(llm, per_request_metrics=detail))
    answer = client.post("/v1/completions", json=BODY).json()
    if detail == "none":
        assert answer["metrics"] is None
    else:
        spec = answer["metrics"]["speculative_decoding"]
        assert sum(spec["per_step_accepted"]) == spec["num_accepted_draft_tokens"]
    assert "completion_tokens_details" not in answer["usage"]  # of requests with a prediction


def test_prometheus_has_the_engines_sums(tiny_path: Any) -> None:
    with make_llm(tiny_path) as llm:
        client = TestClient(make_app(llm), raise_server_exceptions=False)
        before = samples(client)
        assert before["vllm:spec_decode_num_drafts_total", ()] == 0
        for prompt in (BODY["prompt"], "x", BODY["prompt"]):
            client.post("/v1/completions", json={**BODY, "prompt": prompt})
        client.post("/v1/completions", json={**BODY, "nonsense": 1})
        found, have = samples(client), llm.get_metrics()
        spec, executor = have["speculative_decoding"], have["executor"]
        assert spec["num_accepted_draft_tokens"] > 0
        for name, value in {
            "vllm:spec_decode_num_drafts_total": spec["num_spec_steps"],
            "vllm:spec_decode_num_draft_tokens_total": spec["num_draft_tokens"],
            "vllm:spec_decode_num_accepted_tokens_total": spec["num_accepted_draft_tokens"],
            "vllm:prompt_tokens_total": have["prompt_tokens"],
            "vllm:generation_tokens_total": have["generation_tokens"],
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": 0,
            "specdec_steps_total": have["num_forward_passes"],
            "specdec_step_seconds_total": have["time"]["step_s"],
            "specdec_forward_seconds_total": have["time"]["forward_s"],
            "specdec_kv_pages_free": executor["free_pages"],
            "specdec_kv_pages_cached": executor["cached_pages"],
            "specdec_prefix_hits_total": 1,
            "specdec_cached_tokens_total": executor["cached_tokens"],
        }.items():
            assert found[name, ()] == value, name
        ngram = (("source", "ngram"),)
        assert before["specdec_source_accepted_tokens_total", ngram] == 0
        counted = have["draft_sources"]["ngram"]
        assert found["specdec_source_draft_tokens_total", ngram] == counted["drafts"]
        assert found["specdec_source_accepted_tokens_total", ngram] == counted["accepted"] > 0
        per_position = [
            found["vllm:spec_decode_num_accepted_tokens_per_pos_total", (("position", str(i)),)]
            for i in range(4)
        ]
        assert sum(per_position) == spec["num_accepted_draft_tokens"]
        assert per_position == sorted(per_position, reverse=True)
        reasons = {labels[0][1]: value for (name, labels), value in found.items()
                   if name == "vllm:request_success_total"}  # fmt: skip
        assert reasons == have["request_success"]
        for name in ("time_to_first_token", "time_per_output_token", "request_queue_time"):
            assert found[f"specdec_{name}_seconds_count", ()] == 3
        assert found["specdec_request_generation_tokens_sum", ()] == have["generation_tokens"]

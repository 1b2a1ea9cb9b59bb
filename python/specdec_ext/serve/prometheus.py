"""GET /metrics: the engine's sums in vLLM's names and ours, and histograms of finished requests.

Counters and gauges are read from the engine when somebody asks; only histograms are kept here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..config.sources import CompositeDecodingConfig
from ..llm import LLM
from ..request.sampling_params import SamplingParams
from ..request.speculation import resolve_speculation
from ..text.outputs import RequestOutput

__all__ = ["ServerMetrics"]

# vLLM's buckets, so that its dashboards fit.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5,
)  # fmt: skip
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


class ServerMetrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, llm: LLM, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineSums(llm, model_name))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            made = Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(model_name)

        seconds = {
            "time_to_first_token_ms": ("time_to_first_token", TTFT_BUCKETS),
            "mean_itl_ms": ("time_per_output_token", TOKEN_BUCKETS),
            "queue_time_ms": ("request_queue_time", REQUEST_BUCKETS),
            "generation_time_ms": ("request_inference_time", REQUEST_BUCKETS),
        }
        self._times = {
            key: histogram(f"specdec_{name}_seconds", f"{key} of requests, in seconds", buckets)
            for key, (name, buckets) in seconds.items()
        }
        counts = {
            "num_prompt_tokens": "request_prompt_tokens",
            "num_generated_tokens": "request_generation_tokens",
            "tokens_per_forward_pass": "request_tokens_per_step",
        }
        self._counts = {
            key: histogram(f"specdec_{name}", f"{key} of requests", LENGTH_BUCKETS)
            for key, name in counts.items()
        }

    def observe(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        for key, histogram in self._times.items():
            value = output.metrics.get(key)
            if value is not None:
                histogram.observe(value / 1e3)
        if output.metrics.get("num_generated_tokens"):
            for key, histogram in self._counts.items():
                histogram.observe(output.metrics[key])

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


# Name -> (key of get_metrics()["executor"], what it is).
EXECUTOR_GAUGES = {
    "vllm:num_requests_running": ("running", "requests in the batch"),
    "vllm:num_requests_waiting": ("waiting", "requests that have no pages yet"),
    "specdec_queue_requests": ("waiting", "requests that have no pages yet"),
    "specdec_kv_pages_free": ("free_pages", "K/V pages that no running request holds"),
    "specdec_kv_pages_cached": ("cached_pages", "of the free pages those with reusable K/V"),
    "specdec_host_pages_free": ("host_free_pages", "free pages of the host's pool"),
    "specdec_draft_len_limit": ("draft_len_limit", "drafts per request allowed now"),
}
EXECUTOR_COUNTERS = {
    "vllm:num_preemptions": ("preemptions", "requests that gave their pages back for a while"),
    "specdec_swapped_out": ("swapped_out", "of these, those whose K/V was copied to the host"),
    "specdec_swapped_in": ("swapped_in", "of those, how many were copied back"),
    "specdec_swapped_out_bytes": ("swapped_out_bytes", "bytes copied to the host"),
    "specdec_swapped_in_bytes": ("swapped_in_bytes", "bytes copied back"),
    "specdec_host_pool_full": ("host_pool_full", "preemptions that found no room on the host"),
    "specdec_prefix_queries": ("reuse_queries", "requests that looked for cached pages"),
    "specdec_prefix_hits": ("reuse_hits", "requests that found some"),
    "specdec_cached_tokens": ("cached_tokens", "prompt tokens that were not computed"),
    "specdec_kv_pages_evicted": ("evicted_pages", "cached pages given up for room"),
    "specdec_budget_weighed": ("budget_weighed", "steps in which drafts were weighed"),
    "specdec_budget_refused": ("budget_refused", "of these, steps in which none paid"),
}


class _EngineSums(Collector):
    def __init__(self, llm: LLM, model_name: str) -> None:
        self._llm = llm
        self._labels = {"model_name": model_name}
        # Positions are there from the start: a counter that appears later has no value before it,
        # so that who takes differences (AIPerf) would miss all it counted until then.
        config = llm.speculative_config
        self._num_positions = resolve_speculation(SamplingParams(), config)[1]
        self._own_sources: list[str] = []
        if isinstance(config, CompositeDecodingConfig):
            self._own_sources = [source.method for source in config.sources]
        elif config is not None:
            self._own_sources = [config.method]

    def describe(self) -> list[Metric]:
        return []  # registering must not ask the engine

    def collect(self) -> Iterator[Metric]:
        values = self._llm.get_metrics()
        spec, executor = values["speculative_decoding"], values["executor"]
        histogram = spec["acceptance_histogram"]

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            return family

        yield counter(
            "vllm:spec_decode_num_drafts", "steps of requests that verified drafts",
            spec["num_spec_steps"],
        )  # fmt: skip
        yield counter(
            "vllm:spec_decode_num_draft_tokens", "drafts that were verified",
            spec["num_draft_tokens"],
        )  # fmt: skip
        yield counter(
            "vllm:spec_decode_num_accepted_tokens", "drafts that were accepted",
            spec["num_accepted_draft_tokens"],
        )  # fmt: skip
        positions = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "steps that accepted a draft at this place of the path",
            labels=[*self._labels, "position"],
        )
        for position in range(max(self._num_positions, len(histogram) - 1)):
            kept = sum(histogram[position + 1 :])
            positions.add_metric([*self._labels.values(), str(position)], kept)
        yield positions
        yield from self._sources(values["draft_sources"])
        yield counter("vllm:prompt_tokens", "prompt tokens of all requests",
                      values["prompt_tokens"])  # fmt: skip
        yield counter("vllm:generation_tokens", "tokens delivered", values["generation_tokens"])
        reasons = CounterMetricFamily(
            "vllm:request_success", "requests that ended, by reason",
            labels=[*self._labels, "finished_reason"],
        )  # fmt: skip
        for reason, count in sorted(values["request_success"].items()):
            reasons.add_metric([*self._labels.values(), reason], count)
        yield reasons
        yield counter("specdec_steps", "forward passes", values["num_forward_passes"])
        for part, seconds in values["time"].items():
            name = f"specdec_{part.removesuffix('_s')}_seconds"
            yield counter(name, f"{part} of all steps", seconds)
        for name, (key, text) in EXECUTOR_COUNTERS.items():
            if key in executor:
                yield counter(name, text, executor[key])
        for name, (key, text) in EXECUTOR_GAUGES.items():
            if key in executor:
                yield self._gauge(name, text, executor[key])
        used = 1.0 - executor["free_pages"] / max(1, executor["total_pages"])
        yield self._gauge("vllm:kv_cache_usage_perc", "share of the K/V pages in use", used)

    def _sources(self, counts: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
        """Drafts and accepted drafts by who has proposed them; the engine's own sources from the
        start."""
        names = sorted({*self._own_sources, *counts})
        for key, name, text in (
            ("drafts", "specdec_source_draft_tokens", "drafts of a source that were verified"),
            ("accepted", "specdec_source_accepted_tokens", "of these, drafts that were accepted"),
        ):
            family = CounterMetricFamily(name, text, labels=[*self._labels, "source"])
            for source in names:
                count = counts.get(source, {}).get(key, 0)
                family.add_metric([*self._labels.values(), source], count)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

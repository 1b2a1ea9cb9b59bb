"""Results of the kinds that no file in benchmarks/results has."""

from __future__ import annotations

from typing import Any

MACHINE = {"device": "cpu", "cpu": "some", "threads": 2, "date": "2026-11-22T00:00:00",
           "commit": "abc1234"}  # fmt: skip
CLOCKS = {"before": {"load_average": [0.5, 1, 1]}, "after": {"load_average": [0.75, 1, 1]}}


def side(scale: float) -> dict[str, Any]:
    return {
        "latencies": [scale, 2 * scale, 1.5 * scale],
        "output_tokens_per_second": 100 / scale,
        "tokens_per_forward_pass": 2.0 / scale,
        "rows_per_forward_pass": 5.0,
        "time_s": {"forward": scale, "draft": 0.1, "host": 0.2},
        "ttfts_ms": [3.0, 4.0],
        "tpots_ms": [1.0, 2.0],
    }


PAIR = {
    "benchmark": "latency", "model": "tiny", "method": "ngram", "numerics": "exact",
    "dtype": "float32", "speedup": 2.0, "identical_to_plain": True, "synthetic_acceptance": None,
    "speculative_decoding": {"acceptance_histogram": [1, 2, 1]},
    **side(1.0), "plain": side(2.0), "machine": MACHINE, "clocks": CLOCKS,
}  # fmt: skip


def row(batch: int, draft: Any, speedup: float) -> dict[str, Any]:
    return {"batch_size": batch, "draft": draft, "speedup": speedup, "latencies": [1.0, 2.0],
            "tokens_per_forward_pass": 1 + speedup}  # fmt: skip


SWEEP = {
    "benchmark": "sweep", "model": "tiny", "method": "ngram", "machine": MACHINE,
    "rows": [row(b, d, 1 + 0.1 * b) for b in (1, 4) for d in ("adaptive", 2)],
}  # fmt: skip


def served(server: str, at_once: int, tokens: float, length: float | None) -> dict[str, Any]:
    spread = {"mean": 3.5, "p50": 3.0, "p90": 4.0, "p99": 4.0}
    return {"server": server, "concurrency": at_once, "ttft_ms": spread, "tpot_ms": spread,
            "output_tokens_per_second": tokens, "ttfts_ms": [3.0, 4.0], "tpots_ms": [3.0, 4.0],
            "speculative_decoding": length and {"mean_acceptance_length": length}}  # fmt: skip


SERVE = {
    "benchmark": "serve", "model": "tiny", "method": "suffix", "tool": "aiperf 0.13.0",
    "machine": MACHINE, "clocks": CLOCKS,
    "servers": [{"name": "suffix"}, {"name": "127.0.0.1:8001"}],
    "rows": [served("suffix", 1, 90.0, 2.5), served("127.0.0.1:8001", 1, 60.0, None),
             served("suffix", 4, 120.0, 2.0), served("127.0.0.1:8001", 4, 110.0, None)],
}  # fmt: skip


def candidate(k: int, m: int, speedup: float) -> dict[str, Any]:
    return {"max_draft": k, "ngram": m, "max_draft_len": k, "tokens_per_step": speedup,
            "rows_per_step": 1.0 + k, "mean_acceptance_length": speedup, "num_draft_tokens": 9,
            "num_accepted_draft_tokens": 3, "predicted_speedup": speedup,
            "search": "coarse"}  # fmt: skip


TUNE = {
    "benchmark": "tune", "model": "tiny", "method": "ngram", "machine": MACHINE,
    "step_cost": {"1": 0.001, "8": 0.002, "32": 0.004},
    "candidates": [candidate(k, m, 1 + k / 10 + m / 100) for k in (2, 4) for m in (1, 2)],
}  # fmt: skip


def summary(tokens: float, length: float | None) -> dict[str, Any]:
    return {"rouge": {"rouge1": 30.0, "rougeL": 20.0}, "tokens_per_second": tokens,
            "acceptance_length": length}  # fmt: skip


SUMMARIZE = {
    "benchmark": "summarize", "articles": ["a", "b"], "identical": 2,
    "sides": {"plain": summary(10, 1.0), "speculative": summary(15, 1.6)},
}  # fmt: skip


def model_cell(requests: int, rows: int, us: float, numerics: str = "fast") -> dict[str, Any]:
    return {"status": "ok", "requests": requests, "rows": rows, "numerics": numerics, "us": us,
            "floor_us": us / 2}  # fmt: skip


def attention_cell(us: float) -> dict[str, Any]:
    return {"status": "ok", "floor_us": us / 2,
            "programs": {"exact": {"us": us}, "fast": {"us": us}, "a peer": {"us": 2 * us},
                         "absent": {"status": "absent"}}}  # fmt: skip


GPU = {
    "benchmark": "gpu", "emulated": False,
    "environment": {"device": "NVIDIA H200", "cpu": "some", "date": "2026-11-22T00:00:00",
                    "commit": "abc1234"},
    "stages": {
        "bench-kernel": {"cells": {
            "attn-b8-m64-g4-ctx4096": attention_cell(20.0),
            "attn-b8-m64-g4-ctx16384": attention_cell(60.0),
            "attn-b1-m1-g4-ctx4096": attention_cell(5.0),
            "attn-b1-m2-g4-ctx4096": {"status": "failed"},
        }},
        "bench-step": {"cells": {
            "model-b1-m1": model_cell(1, 1, 5000.0),
            "model-b1-m84": model_cell(1, 84, 5500.0),
            "model-b1-m84-exact": model_cell(1, 84, 5600.0, "exact"),
            "spec-lookahead-b1": {
                "status": "ok", "kind": "spec", "tokens_per_s": 400.0, "requests": 1,
                "accepted_tokens_per_step": 2.5,
                "step_times": {"decode": {"steps": 10, "draft": 0.01, "verify": 0.05,
                                          "accept": 0.002}},
            },
        }},
    },
}  # fmt: skip


def step(number: int, tokens: str, drafts: list[Any], is_prefill: bool = False) -> dict[str, Any]:
    accepted = sum(draft["accepted"] for draft in drafts)
    return {
        "begin_ms": 10.0 * number, "end_ms": 10.0 * number + 8, "is_prefill": is_prefill,
        "num_rows": 9 if is_prefill else 1 + len(drafts), "drafts": drafts,
        "tokens": [{"id": ord(c), "text": c, "from_draft": i < accepted}
                   for i, c in enumerate(tokens)],
    }  # fmt: skip


def draft(text: str, parent: int, accepted: bool, *sources: str) -> dict[str, Any]:
    return {"id": ord(text), "text": text, "parent": parent, "accepted": accepted,
            "sources": list(sources)}  # fmt: skip


TRACE = {
    "benchmark": "trace", "model": "tiny", "method": "suffix", "machine": MACHINE, "error": None,
    "prompt": "abc", "text": "a<b>\ncd", "finish_reason": "length",
    "metrics": {
        "num_generated_tokens": 7, "num_forward_passes": 3, "tokens_per_forward_pass": 7 / 3,
        "speculative_decoding": {"num_accepted_draft_tokens": 4, "num_draft_tokens": 6},
    },
    "steps": [
        step(0, "a", [], is_prefill=True),
        step(1, "<b>", [draft("<", -1, True, "suffix"), draft("x", -1, False, "suffix"),
                        draft("b", 0, True, "suffix", "prediction")]),
        step(2, "\ncd", [draft("\n", -1, True, "prediction"), draft("c", 0, True, "suffix"),
                         draft("y", 1, False, "suffix")]),
    ],
}  # fmt: skip

TRAINING = {
    "benchmark": "training", "model": "tiny", "method": "medusa", "environment": MACHINE,
    "losses": [3.0 - i / 500 for i in range(1000)], "learning_rate": [1e-3] * 1000,
    "evaluations": [
        [500, {"accuracy": [0.3, 0.1], "accuracy_by_category": {"chat": 0.2, "code": 0.4}}],
        [1000, {"accuracy": [0.5, 0.2], "accuracy_by_category": {"chat": 0.4, "code": 0.6}}],
    ],
    "measured": {
        "prompts": 8, "speedup": 1.5, "tokens_per_pass": 2.25,
        "tokens_per_second": {"plain": 20.0, "drafted": 30.0},
    },
}  # fmt: skip

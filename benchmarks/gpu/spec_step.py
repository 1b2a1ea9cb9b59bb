"""Speculation through the engine, steps recorded as graphs: what it brings at a known acceptance,
and where a step's time goes.

Drafts are real, acceptance is synthetic (given rates), so that the figure says how fast the engine
is and not how good a model's drafts are.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu.cells import SpeculationCell
from benchmarks.gpu.model_step import engine_of
from benchmarks.gpu.run import Target


def measure(cell: SpeculationCell, target: Target) -> dict[str, Any]:
    """Returns the record: microseconds of a step, tokens per second, and the step's parts from a
    run of their own (marks cut a recorded step into three)."""
    from specdec_ext import LookaheadDecodingConfig

    config = LookaheadDecodingConfig(
        *cell.lookahead, adaptive=False, synthetic_acceptance_length=cell.mean_tokens
    )
    if config.max_draft_len + 1 != cell.rows:
        raise ValueError(f"lookahead {cell.lookahead} has {config.max_draft_len + 1} rows")
    record: dict[str, Any] = {**cell.describe(), "synthetic": True, "status": "ok", "us": None}
    with engine_of(cell, target, config) as engine:
        plain = decode(cell, engine)
        engine.time_steps()
        decode(cell, engine)
        times = engine.get_metrics()["run_ahead"]["step_times"]
    record["accepted_tokens_per_step"] = round(plain["tokens_per_step"], 3)
    if target.emulated:
        return record
    record["us"] = round(plain["seconds"] / plain["steps"] * 1e6, 1)
    record["tokens_per_s"] = round(plain["tokens"] / plain["seconds"], 1)
    record["step_times"] = times
    return record


def decode(cell: SpeculationCell, engine: Any) -> dict[str, float]:
    """Steps of the requests from their first token to the end of the first that ends."""
    from specdec_ext import SamplingParams

    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(cell.vocab, (cell.requests, cell.context), generator=generator)
    params = SamplingParams(max_tokens=cell.new_tokens, ignore_eos=True)
    states = [engine.submit(prompt, params) for prompt in prompts.tolist()]
    while any(not state.token_ids for state in states):  # their prompts
        engine.step()
    before = engine.get_metrics()["num_forward_passes"]
    first = sum(len(state.token_ids) for state in states)
    start = time.perf_counter()
    while not any(state.finished for state in states):
        engine.step()
    seconds = time.perf_counter() - start
    tokens = sum(len(state.token_ids) for state in states) - first
    steps = engine.get_metrics()["num_forward_passes"] - before
    engine.run(states)
    if (error := next((s.error for s in states if s.error), None)) is not None:
        raise ArithmeticError(error)
    return {
        "seconds": seconds,
        "tokens": float(tokens),
        "steps": float(steps),
        "tokens_per_step": tokens / steps / cell.requests,
    }

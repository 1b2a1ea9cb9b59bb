"""Speculation through the engine, steps recorded as graphs: what it brings at a known acceptance,
and where a step's time goes.

Drafts are real, acceptance is synthetic (given rates), so that the figure says how fast the engine
is and not how good a model's drafts are.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.engine_cells import SpeculationCell
from benchmarks.gpu.model_step import engine_of, warm_up
from benchmarks.gpu.run import Target


def measure(cell: SpeculationCell, target: Target) -> dict[str, Any]:
    """Returns the record: microseconds of a step, tokens per second, and the step's parts from a
    run of their own (marks cut a recorded step into three)."""
    record: dict[str, Any] = {**cell.describe(), "synthetic": True, "status": "ok", "us": None}
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(cell, Path(folder))
        if config.max_draft_len + 1 != cell.rows:
            raise ValueError(f"{config} has {config.max_draft_len + 1} rows")
        with engine_of(cell, target, config) as engine:
            return record | run(cell, target, engine)


def config_of(cell: SpeculationCell, folder: Path) -> Any:
    """The method; heads of random weights, with the target's LM head, are written to `folder`."""
    import specdec_ext

    how: dict[str, Any] = {
        "adaptive": False, "synthetic_acceptance_length": cell.mean_tokens
    }  # fmt: skip
    if cell.method == "lookahead":
        return specdec_ext.LookaheadDecodingConfig(*cell.lookahead, **how)
    torch.manual_seed(1)
    if cell.method == "medusa":
        from specdec_ext.drafters.medusa.heads import (
            MedusaHeads,
            MedusaHeadsConfig,
            save_medusa_heads,
        )

        shape = MedusaHeadsConfig(cell.hidden, cell.vocab, 4, lm_head="target")
        save_medusa_heads(folder, MedusaHeads(shape), dtype="bfloat16")
        return specdec_ext.MedusaDecodingConfig(str(folder), medusa_choices="mc_sim_7b_63", **how)
    if cell.method == "eagle3":
        _save_eagle3(cell, folder)
        return specdec_ext.Eagle3DecodingConfig(
            str(folder), max_draft_len=cell.rows - 1, top_k=4, max_draft_depth=4, **how
        )
    from specdec_ext.drafters.redrafter.model import Redrafter, RedrafterShape, save_redrafter

    network = Redrafter(
        RedrafterShape(cell.vocab, cell.hidden, cell.hidden, 2, rnn=True, tie_lm_head=True)
    )
    save_redrafter(network, folder, dtype=torch.bfloat16)
    return specdec_ext.ReDrafterDecodingConfig(
        str(folder), num_beams=5, draft_len_per_beam=5, **how
    )


def _save_eagle3(cell: SpeculationCell, folder: Path) -> None:
    from specdec_ext.drafters.eagle3.model import Eagle3, save_eagle3
    from specdec_ext.drafters.eagle3.shape import Eagle3Shape

    rope = SimpleNamespace(
        model_type="eagle3",
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        max_position_embeddings=8192,
        head_dim=cell.head_dim,
    )
    shape = Eagle3Shape(
        vocab_size=cell.vocab,
        hidden_size=cell.hidden,
        target_hidden_size=cell.hidden,
        intermediate_size=cell.intermediate,
        num_heads=cell.num_heads,
        num_kv_heads=cell.num_kv_heads,
        head_dim=cell.head_dim,
        draft_vocab_size=min(cell.vocab, 32000),
        rms_norm_eps=1e-5,
        rope=rope,
    )
    save_eagle3(Eagle3(shape, range(shape.draft_vocab_size), 64), folder)


def run(cell: SpeculationCell, target: Target, engine: Any) -> dict[str, Any]:
    """What is measured, and the step's parts; those of a drafter's network are in `draft`."""
    record: dict[str, Any] = {}
    warm_up(cell, engine)
    plain = decode(cell, engine)
    engine.time_steps()
    decode(cell, engine)  # all its steps are recorded in parts now
    engine.time_steps()
    decode(cell, engine)
    times = engine.get_metrics()["overlap"]["step_times"]
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
    states = [engine.submit(engine.resolve(prompt, params)) for prompt in prompts.tolist()]
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

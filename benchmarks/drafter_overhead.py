"""What a drafter's step costs outside the model and the drafter's own layers: the common part.

A near-empty Llama (2 layers x 64, fp32), a 512-token prompt, one thread. Processor time of the
stepping thread, so that neighbours do not count. Used by medusa_overhead and redrafter_overhead.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from benchmarks import common, models

PROMPT = 512
SHAPE = "tiny"


class Stopwatch:
    """Processor seconds of the calling thread inside the watched methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return inner(*args)
            finally:
                self.seconds += time.thread_time() - begin

        setattr(owner, name, timed)


def randomize(module: Any) -> None:
    """Random weights, the same in every run."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1


def measure(
    config: Any,
    batch: int,
    rounds: int,
    tokens: int,
    layer_clock: Callable[[Any], Callable[[], float]],
    step_seconds: dict[int, float] | None = None,
) -> dict[str, Any]:
    """Microseconds per step: the least of the rounds.

    layer_clock   of a drafter: what reads the processor seconds inside its own layers so far
    step_seconds  what the drafter is told of T(rows), in place of a calibration
    """
    import specdec_ext
    from specdec_ext._core import StepCost

    vocab = models.SHAPES[SHAPE].vocab
    prompts = [models.random_prompt(vocab, PROMPT, seed) for seed in range(batch)]
    llm = specdec_ext.LLM(
        models.make(SHAPE),
        dtype="float32",
        speculative_config=config,
        scheduler_config={"max_batch_size": batch, "max_seq_len": PROMPT + tokens + 8},
    )
    drafting: Any = llm.engine._drafting
    if step_seconds is not None:
        columns = StepCost(step_seconds).columns
        llm.engine._calibrate = lambda: llm.engine.executor.set_step_cost(*columns)
    params = specdec_ext.SamplingParams(max_tokens=tokens, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)  # warm-up
    model, layer_seconds = Stopwatch(), layer_clock(drafting.drafter)
    model.watch(llm.model, "forward")
    best: dict[str, Any] = {}
    for _ in range(rounds):
        groups = llm._submit_all([(None, p) for p in prompts], params)
        while any(len(g.states[0].token_ids) == 0 for g in groups):
            llm.engine.step()  # prompts do not count
        model.seconds, layers = 0.0, -layer_seconds()
        steps, begin = llm.engine._num_steps, time.thread_time()
        while not all(group.finished for group in groups):
            llm.engine.step()
        steps = llm.engine._num_steps - steps
        total = time.thread_time() - begin
        layers += layer_seconds()
        figures = {
            "overhead_us": (total - model.seconds - layers) / steps * 1e6,
            "model_us": model.seconds / steps * 1e6,
            "layers_us": layers / steps * 1e6,
            "steps": steps,
        }
        if not best or figures["overhead_us"] < best["overhead_us"]:
            best = figures
    metrics = llm.get_metrics()
    llm.close()
    spec = metrics["speculative_decoding"]
    return {
        **best,
        "mean_nodes": spec["num_draft_tokens"] / max(1, spec["num_spec_steps"]),
        "failures": metrics["drafter"]["failures"],
    }


def report(
    name: str, doc: str, cases: Callable[[int, int], dict[str, dict[str, Any]]], **about: Any
) -> int:
    """Parse the options, run cases(rounds, tokens), print the table, write the result."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 64 tokens; no file")
    args = parser.parse_args()
    common.set_threads(1)
    environment = common.environment(1)
    results = cases(*((2, 64) if args.quick else (args.rounds, 256)))
    keys = ("overhead_us", "model_us", "layers_us", "mean_nodes", "steps")
    table = common.markdown(
        [
            "case",
            "us/step outside both",
            "model",
            "layers",
            "drafts",
            "steps",
        ],
        [[case, *(figures[key] for key in keys)] for case, figures in results.items()],
    )
    print(table)
    if not args.quick:
        result = {
            "benchmark": name,
            "environment": environment,
            "dtype": "float32",
            "prompt_tokens": PROMPT,
            "clock": "processor time of the stepping thread",
            **about,
            "results": results,
        }
        common.write_result(name, result, [table])
    return 0

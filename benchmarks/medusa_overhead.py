"""What does a Medusa step cost outside the model and the heads?

A near-empty Llama (2 layers x 64, fp32), four random heads, the 63-node tree mc_sim_7b_63, a
512-token prompt, one thread. Processor time of the stepping thread, so that neighbours do not
count: a whole step less the model's forward and less the heads (their layers and top-k). "whole
tree" verifies all nodes; "adaptive" chooses its nodes in every step, on a table of step times that
makes about a third of them pay.

    python -m benchmarks.medusa_overhead [--quick]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import common, models

PROMPT = 512
TREE = "mc_sim_7b_63"
STEP_SECONDS = {1: 1e-3, 64: 1.1e-3, 128: 1.2e-3}


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


def random_heads(folder: str) -> str:
    """Four heads with LM heads of their own, for the tiny shape."""
    import torch

    from specdec_ext.drafters.medusa_heads import (
        MedusaHeads,
        MedusaHeadsConfig,
        save_medusa_heads,
    )

    shape = models.SHAPES["tiny"]
    heads = MedusaHeads(MedusaHeadsConfig(shape.hidden, shape.vocab, 4))
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return str(save_medusa_heads(folder, heads, dtype="float32"))


def measure(heads: str, batch: int, adaptive: bool, rounds: int, tokens: int) -> dict[str, Any]:
    """Microseconds per step: the least of the rounds."""
    import specdec_ext

    shape = models.SHAPES["tiny"]
    prompts = [models.random_prompt(shape.vocab, PROMPT, seed) for seed in range(batch)]
    llm = specdec_ext.LLM(
        models.make("tiny"),
        dtype="float32",
        speculative_config=specdec_ext.MedusaDecodingConfig(heads, TREE, adaptive=adaptive),
        scheduler_config={"max_batch_size": batch, "max_seq_len": PROMPT + tokens + 8},
    )
    drafting: Any = llm.engine._drafting
    llm.engine._calibrate = lambda: drafting.set_step_cost(STEP_SECONDS)
    params = specdec_ext.SamplingParams(max_tokens=tokens, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)  # warm-up
    model, head = Stopwatch(), Stopwatch()
    model.watch(llm.model, "forward")
    head.watch(drafting.drafter.heads, "top")
    best: dict[str, Any] = {}
    for _ in range(rounds):
        groups = llm._submit_all([(None, p) for p in prompts], params)
        while any(len(g.states[0].token_ids) == 0 for g in groups):
            llm.engine.step()  # prompts do not count
        model.seconds = head.seconds = 0.0
        steps, begin = llm.engine._num_steps, time.thread_time()
        while not all(group.finished for group in groups):
            llm.engine.step()
        steps = llm.engine._num_steps - steps
        total = time.thread_time() - begin
        figures = {
            "overhead_us": (total - model.seconds - head.seconds) / steps * 1e6,
            "model_us": model.seconds / steps * 1e6,
            "heads_us": head.seconds / steps * 1e6,
            "steps": steps,
        }
        if not best or figures["overhead_us"] < best["overhead_us"]:
            best = figures
    stats = llm.get_metrics()["drafter"]
    llm.close()
    return {**best, "mean_nodes": stats["mean_nodes"], "failures": stats["failures"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 64 tokens; no file")
    args = parser.parse_args()
    common.set_threads(1)
    environment = common.environment(1)
    rounds, tokens = (2, 64) if args.quick else (args.rounds, 256)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        heads = random_heads(folder)
        for batch in (1, 8):
            for adaptive in (False, True):
                name = f"{'adaptive' if adaptive else 'whole tree'}, batch {batch}"
                results[name] = measure(heads, batch, adaptive, rounds, tokens)
    table = common.markdown(
        ["case", "us/step outside model and heads", "model", "heads", "nodes", "steps"],
        [
            [n, r["overhead_us"], r["model_us"], r["heads_us"], r["mean_nodes"], r["steps"]]
            for n, r in results.items()
        ],
    )
    print(table)
    if not args.quick:
        result = {
            "benchmark": "medusa_overhead",
            "environment": environment,
            "tree": TREE,
            "dtype": "float32",
            "prompt_tokens": PROMPT,
            "clock": "processor time of the stepping thread",
            "results": results,
        }
        common.write_result("medusa_overhead", result, [table])
    return 0


if __name__ == "__main__":
    sys.exit(main())

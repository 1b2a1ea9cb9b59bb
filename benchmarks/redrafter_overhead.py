"""What does a ReDrafter step cost outside the model and the drafter's layers?

A near-empty Llama (2 layers x 64, fp32), a random drafter with a head of its own, a 512-token
prompt, one thread. Processor time of the stepping thread, so that neighbours do not count: a whole
step less the model's forward and less the drafter's network. What is left is beam search, merging,
the executor and the loop. The whole tree is verified.

    python -m benchmarks.redrafter_overhead [--quick]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from typing import Any

from benchmarks import common, models
from benchmarks.medusa_overhead import PROMPT, Stopwatch

# (beams, drafts of each): what fits a CPU, TensorRT-LLM's default, 63 drafts.
SETTINGS = ((2, 4), (5, 5), (21, 3))


def random_drafter(folder: str) -> str:
    """exit_dim = hidden size, one block, over the whole vocabulary."""
    import torch

    from specdec_ext.drafters.redrafter_model import Redrafter, RedrafterShape, save_redrafter

    shape = models.SHAPES["tiny"]
    drafter = Redrafter(RedrafterShape(shape.vocab, shape.hidden, shape.hidden, 1, True))
    generator = torch.Generator().manual_seed(1)
    for parameter in drafter.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    save_redrafter(drafter, folder, dtype=torch.float32)
    return folder


def measure(
    drafter: str, beams: int, length: int, batch: int, rounds: int, tokens: int
) -> dict[str, Any]:
    """Microseconds per step: the least of the rounds."""
    import specdec_ext

    shape = models.SHAPES["tiny"]
    prompts = [models.random_prompt(shape.vocab, PROMPT, seed) for seed in range(batch)]
    llm = specdec_ext.LLM(
        models.make("tiny"),
        dtype="float32",
        speculative_config=specdec_ext.ReDrafterDecodingConfig(
            drafter, beams, length, adaptive=False
        ),
        scheduler_config={"max_batch_size": batch, "max_seq_len": PROMPT + tokens + 8},
    )
    drafting: Any = llm.engine._drafting
    params = specdec_ext.SamplingParams(max_tokens=tokens, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)  # warm-up
    model, network = Stopwatch(), Stopwatch()
    model.watch(llm.model, "forward")
    network.watch(drafting.drafter._network, "next_state")
    network.watch(drafting.drafter._network, "scores")
    best: dict[str, Any] = {}
    for _ in range(rounds):
        groups = llm._submit_all([(None, p) for p in prompts], params)
        while any(len(g.states[0].token_ids) == 0 for g in groups):
            llm.engine.step()  # prompts do not count
        model.seconds = network.seconds = 0.0
        steps, begin = llm.engine._num_steps, time.thread_time()
        while not all(group.finished for group in groups):
            llm.engine.step()
        steps = llm.engine._num_steps - steps
        total = time.thread_time() - begin
        figures = {
            "overhead_us": (total - model.seconds - network.seconds) / steps * 1e6,
            "model_us": model.seconds / steps * 1e6,
            "network_us": network.seconds / steps * 1e6,
            "steps": steps,
        }
        if not best or figures["overhead_us"] < best["overhead_us"]:
            best = figures
    metrics = llm.get_metrics()
    llm.close()
    spec = metrics["speculative_decoding"]
    nodes = spec["num_draft_tokens"] / max(1, spec["num_spec_steps"])
    return {**best, "mean_nodes": nodes, "failures": metrics["drafter"]["failures"]}


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
        drafter = random_drafter(folder)
        for batch in (1, 8):
            for beams, length in SETTINGS:
                name = f"{beams} beams x {length}, batch {batch}"
                results[name] = measure(drafter, beams, length, batch, rounds, tokens)
    table = common.markdown(
        ["case", "us/step outside model and network", "model", "network", "drafts", "steps"],
        [
            [n, r["overhead_us"], r["model_us"], r["network_us"], r["mean_nodes"], r["steps"]]
            for n, r in results.items()
        ],
    )
    print(table)
    if not args.quick:
        result = {
            "benchmark": "redrafter_overhead",
            "environment": environment,
            "dtype": "float32",
            "prompt_tokens": PROMPT,
            "adaptive": False,
            "clock": "processor time of the stepping thread",
            "results": results,
        }
        common.write_result("redrafter_overhead", result, [table])
    return 0


if __name__ == "__main__":
    sys.exit(main())

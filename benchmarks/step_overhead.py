"""What does a speculative step cost outside the model, and what is that worth end to end?

A near-empty Llama (2 layers x 64) and one of 56M parameters, fp32, a 512-token prompt, one thread,
draft length 10: time of a step less the time inside the model's forward (the head and its argmax
belong to the forward); the same for the whole call, request handling included, which is what can be
measured of transformers' prompt lookup in the same run; and tokens/s of both. Then all methods
against an earlier commit of this package: step_versions.py.

    python -m benchmarks.step_overhead [--quick] [--base PYTHON]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks import common, models, runners, step_versions

DRAFT = 10
PROMPT = 512


def measure(name: str, rounds: int, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Returns overheads and speeds of both programs on one model."""
    import specdec_ext

    folder = models.make(name)
    vocab = models.SHAPES[name].vocab
    prompts = [models.random_prompt(vocab, PROMPT, seed) for seed in range(num_prompts)]
    config = specdec_ext.NGramDecodingConfig(
        max_draft_len=DRAFT, max_matching_ngram_size=2, adaptive=False
    )
    scheduler = {"max_batch_size": 1, "max_seq_len": PROMPT + max_tokens + 8}
    ours = runners.Ours(folder, "float32", config, scheduler_config=scheduler)
    peer = runners.Peer(folder, "float32")
    runners.warm_up(ours, peer)
    programs = {
        "ours": lambda: ours.generate(prompts, max_tokens, ignore_eos=True),
        "ours_plain": lambda: ours.generate(prompts, max_tokens, ignore_eos=True, plain=True),
        "peer": lambda: peer.generate(prompts, max_tokens, lookup=DRAFT, ignore_eos=True),
    }
    results = common.interleave(programs, rounds, name)
    texts = {key: runs[0].tokens for key, runs in results.items()}
    if texts["ours"] != texts["ours_plain"]:
        raise SystemExit(f"{name}: speculative and plain decoding differ")
    figures: dict[str, Any] = {"same_text_as_peer": texts["ours"] == texts["peer"]}
    for key, runs in results.items():
        figures[key] = {
            # The least of the rounds: anything above it is the machine, not the program.
            "call_overhead_us": min(run.overhead_s for run in runs) * 1e6,
            "step_overhead_us": min(run.step_overhead_s for run in runs) * 1e6,
            "tokens_per_second": common.spread([run.tokens_per_second for run in runs]),
            "tokens_per_forward": runs[0].tokens_per_forward,
            "forwards": runs[0].forwards,
        }
    figures["tokens_per_second_ratio"] = common.spread(
        [
            a.tokens_per_second / b.tokens_per_second
            for a, b in zip(results["ours"], results["peer"], strict=True)
        ]
    )
    ours.close()
    peer.close()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="1 round, 64 tokens; no file")
    step_versions.add_options(parser)
    args = parser.parse_args()
    common.set_threads(1)
    runners.quiet_peers()
    environment = common.environment(1)
    results = {}
    for name in ("tiny", "56m"):
        if args.quick:
            results[name] = measure(name, 1, 1, 64)
        else:
            results[name] = measure(name, args.rounds, 4, 256 if name == "tiny" else 128)
    rows = [
        [
            name,
            r["ours"]["step_overhead_us"],
            r["ours"]["call_overhead_us"],
            r["peer"]["call_overhead_us"],
            r["ours"]["tokens_per_second"]["median"],
            r["peer"]["tokens_per_second"]["median"],
            r["tokens_per_second_ratio"]["median"],
            r["ours"]["tokens_per_forward"],
            r["peer"]["tokens_per_forward"],
        ]
        for name, r in results.items()
    ]
    table = common.markdown(
        [
            "model",
            "us/step outside the model",
            "whole call",
            "transformers",
            "tokens/s",
            "transformers",
            "ratio",
            "tokens/forward",
            "transformers",
        ],
        rows,
    )
    print(table)
    if not args.quick:
        result = {
            "benchmark": "step_overhead",
            "environment": environment,
            "dtype": "float32",
            "draft_length": DRAFT,
            "prompt_tokens": PROMPT,
            "adaptive": False,
            "results": results,
        }
        common.write_result("step_overhead", result, [table])
    print(step_versions.run(args.base, step_versions.ROUNDS, args.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())

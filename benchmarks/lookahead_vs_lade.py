"""Is our lookahead faster than its authors' program on the same weights, and as good a guesser?

Lookahead (7,7,7), 256 tokens, fp32, one thread, greedy: this package against lade 0.0.2 in its own
environment (benchmarks/peers/lade), on the near-empty and the 56M-parameter Llama. lade runs as a
subprocess between our rounds; its model is loaded and warm before it takes the time. Texts must be
equal; `steps` are forward passes.

    python -m benchmarks.lookahead_vs_lade [--quick]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common, models, runners
from benchmarks.peers.lade import environment as lade

TRIPLE = (7, 7, 7)
PROMPT = 128


def run_lade(folder: Path, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Returns one run of lade over the prompts (see peers/lade/runner.py) and its versions."""
    w, n, g = TRIPLE
    request = {
        "model": str(folder),
        "prompts": prompts,
        "window": w,
        "ngram": n,
        "guesses": g,
        "max_tokens": max_tokens,
        "threads": 1,
        "repeats": 1,
        "plain": False,
    }
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "request.json"
        path.write_text(json.dumps(request))
        runner = str(Path(lade.HERE) / "runner.py")
        command = [str(lade.PYTHON), "-W", "ignore", runner, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"lade failed:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return {**answer["runs"][0], "versions": answer["versions"]}


def measure(name: str, rounds: int, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Returns speeds, steps and agreement of both programs on one model."""
    import specdec_ext

    folder = models.make(name)
    vocab = models.SHAPES[name].vocab
    prompts = [models.random_prompt(vocab, PROMPT, seed) for seed in range(num_prompts)]
    w, n, g = TRIPLE
    config = specdec_ext.LookaheadDecodingConfig(
        max_window_size=w, max_ngram_size=n, max_verification_set_size=g, adaptive=False
    )
    scheduler = {"max_batch_size": 1, "max_seq_len": PROMPT + max_tokens + 8}
    ours = runners.Ours(folder, "float32", config, scheduler_config=scheduler)
    runners.warm_up(ours)
    programs: dict[str, Any] = {
        "ours": lambda: ours.generate(prompts, max_tokens, ignore_eos=True),
        "lade": lambda: run_lade(folder, prompts, max_tokens),
    }
    results = common.interleave(programs, rounds, name)
    run, peer = results["ours"][0], results["lade"][0]
    if run.tokens != peer["tokens"]:
        raise SystemExit(f"{name}: the texts of the two programs differ")
    speeds = [r.tokens_per_second for r in results["ours"]]
    peer_speeds = [run.num_tokens / sum(r["seconds"]) for r in results["lade"]]
    ours.close()
    return {
        "steps": {"ours": run.forwards, "lade": sum(peer["steps"])},
        "tokens": run.num_tokens,
        "tokens_per_second": {"ours": common.spread(speeds), "lade": common.spread(peer_speeds)},
        "ratio": common.spread([a / b for a, b in zip(speeds, peer_speeds, strict=True)]),
        "same_text": True,
        "peer_versions": peer["versions"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1 round, 48 tokens; no file")
    args = parser.parse_args()
    if not lade.is_ready():
        raise SystemExit(
            "lade's environment is missing: python -m benchmarks.peers.lade.environment"
        )
    common.set_threads(1)
    environment = common.environment(1)
    results = {}
    for name in ("tiny", "56m"):
        quick = (1, 1, 48)
        full = (args.rounds, 4 if name == "tiny" else 2, 256)
        results[name] = measure(name, *(quick if args.quick else full))
    rows = [
        [
            name,
            r["tokens_per_second"]["ours"]["median"],
            r["tokens_per_second"]["lade"]["median"],
            r["ratio"]["median"],
            r["steps"]["ours"],
            r["steps"]["lade"],
        ]
        for name, r in results.items()
    ]
    table = common.markdown(["model", "tokens/s", "lade", "ratio", "steps", "lade steps"], rows)
    print(table)
    if not args.quick:
        result = {
            "benchmark": "lookahead_vs_lade",
            "environment": environment,
            "triple": list(TRIPLE),
            "dtype": "float32",
            "prompt_tokens": PROMPT,
            "results": results,
        }
        common.write_result("lookahead_vs_lade", result, [table])
    return 0


if __name__ == "__main__":
    sys.exit(main())

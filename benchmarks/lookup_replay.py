"""Tokens and rows per forward pass of the methods that look drafts up in the text, by replay.

The default model's greedy texts on the five sets are decoded once; then the executor decodes each
of them again per configuration, with an oracle that answers what the text says. Greedy output does
not depend on the drafts, so the counts are those of real decoding, and cost seconds instead of an
hour: what a method drafts can be studied on more prompts than a machine could decode. Counts depend
neither on the machine nor on its load, except where T(rows) chooses the drafts: that table is given
with the result.

    python -m benchmarks.lookup_replay [--quick] [--prompts 16] [--tokens 128] [--texts FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, datasets, runners

MAX_PROMPT = 1200
VOCAB = 1 << 17
# The README's "Cost of rows", bfloat16: rows of a pass, milliseconds.
STEP_COST = ([1, 2, 4, 8, 11, 16, 32, 64, 84],
             [7.60, 8.14, 8.39, 8.76, 9.33, 13.23, 25.97, 51.43, 67.47])  # fmt: skip

Texts = dict[str, list[tuple[list[int], list[int]]]]


def methods() -> dict[str, tuple[dict[str, Any], bool]]:
    """Configuration of the executor, and whether T(rows) chooses its drafts."""
    from specdec_ext import NGramDecodingConfig, SuffixDecodingConfig
    from specdec_ext.engine.drafting_arguments import drafting_arguments

    lookup = drafting_arguments(NGramDecodingConfig(10, 2))
    suffix = drafting_arguments(SuffixDecodingConfig())
    short = drafting_arguments(SuffixDecodingConfig(max_draft_len=10))
    return {
        "prompt lookup (10,2)": (lookup, False),
        "suffix": (suffix, False),
        "prompt lookup (10,2), adaptive": (lookup, True),
        "suffix, adaptive": (suffix, True),
        "suffix with 10 drafts, adaptive": (short, True),
    }


def decode(args: argparse.Namespace) -> Texts:
    """(prompt, greedy output) of every set."""
    import specdec_ext

    folder, tokenizer = runners.default_model(args.threads)
    spec = specdec_ext.SuffixDecodingConfig()
    scheduler = {"max_batch_size": 8, "max_seq_len": MAX_PROMPT + args.tokens}
    params = specdec_ext.SamplingParams(max_tokens=args.tokens, detokenize=False)
    texts: Texts = {}
    with specdec_ext.LLM(
        folder, dtype=args.dtype, speculative_config=spec, scheduler_config=scheduler
    ) as llm:
        for name in datasets.SETS:
            loaded = datasets.load_ids(tokenizer, name, args.prompts, MAX_PROMPT)
            prompts = [list(ids) for _, ids in loaded]
            inputs = [{"prompt_token_ids": ids} for ids in prompts]
            outputs = llm.generate(inputs, params, use_tqdm=False)
            written = [list(output.outputs[0].token_ids) for output in outputs]
            texts[name] = list(zip(prompts, written, strict=True))
    return texts


def make_executor(longest: int, options: dict[str, Any], cost: Any) -> Any:
    """An executor for texts of so many tokens, one at a time. cost: T(rows), which chooses drafts;
    None: all are verified."""
    from specdec_ext import _core

    pages = torch.zeros(1, longest // 16 + 9, 1, 16, 8)
    executor = _core.Executor(
        pages, pages.clone(), vocab_size=VOCAB, max_batch_size=1, max_seq_len=longest,
        max_num_tokens=longest + 200, adaptive=cost is not None, **options,
    )  # fmt: skip
    if cost is not None:
        executor.set_step_cost(*cost)
    return executor


def replay(
    executor: Any, text: tuple[list[int], list[int]], prediction: Sequence[int] = ()
) -> tuple[int, list[int]]:
    """Drafts that were verified with the prompt, and the rows of each step behind it."""
    prompt, output = text
    tokens = [*prompt, *output, 0]
    executor.submit(prompt, max_tokens=len(output), prediction=list(prediction))
    written: list[int] = []
    steps: list[int] = []
    while (plan := executor.plan()) is not None:
        following = [tokens[min(int(plan.positions[row]) + 1, len(tokens) - 1)]
                     for row in plan.logit_rows.tolist()]  # fmt: skip
        steps.append(len(plan.tokens))
        for out in executor.commit(plan, torch.tensor(following, dtype=torch.int32)):
            written += out.tokens
    if written != output:
        raise SystemExit("the executor has changed the text")
    return steps[0] - len(prompt), steps[1:]


def measure(texts: Texts, options: dict[str, Any], adaptive: bool) -> dict[str, dict[str, float]]:
    """Per set: tokens, rows (with the last decided token) and accepted drafts of a decode pass."""
    results = {}
    for name, pairs in texts.items():
        steps = rows = accepted = 0
        for prompt, output in pairs:
            executor = make_executor(
                len(prompt) + len(output), options, STEP_COST if adaptive else None
            )
            _, counts = replay(executor, (prompt, output))
            steps, rows = steps + len(counts), rows + sum(counts)
            accepted += executor.stats()["num_accepted_tokens"]
        tokens = sum(len(output) - 1 for _, output in pairs)
        results[name] = {
            "tokens_per_forward": tokens / steps,
            "rows_per_forward": rows / steps,
            "draft_acceptance_rate": accepted / max(1, rows - steps),
        }
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16, help="prompts per set")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens per prompt")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--texts", type=Path, help="JSON {set: [[prompt ids, output ids]]}: read it, or write it"
    )
    parser.add_argument("--quick", action="store_true", help="2 prompts of 32 tokens; no file")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens = 2, 32
    environment = common.environment(args.threads)
    if args.texts is not None and args.texts.exists():
        texts: Texts = json.loads(args.texts.read_text())
    else:
        texts = decode(args)
        if args.texts is not None:
            args.texts.write_text(json.dumps(texts))
    results = {name: measure(texts, *how) for name, how in methods().items()}
    tables = [
        common.markdown(
            [title, *texts], [[m, *(sets[s][key] for s in texts)] for m, sets in results.items()]
        )
        for title, key in (
            ("tokens per forward", "tokens_per_forward"),
            ("rows per forward", "rows_per_forward"),
        )
    ]
    print("\n\n".join(tables))
    if not args.quick:
        result = {
            "benchmark": "lookup_replay",
            "environment": environment,
            "model": "SmolLM2-135M-Instruct",
            "dtype": args.dtype,
            "prompts_per_set": {name: len(pairs) for name, pairs in texts.items()},
            "max_tokens": args.tokens,
            "step_cost_ms": STEP_COST,
            "results": results,
        }
        common.write_result("lookup_replay", result, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How many tokens does one forward pass give, per method and kind of text?

Acceptance length on the five sets with the default model: decode passes only, drafts of fixed
length (adaptive off), so that the figure says what the method finds, not what the budget allows. It
does not depend on the machine, its load or the batch: in exact mode neither does the text.

    python -m benchmarks.acceptance [--quick] [--prompts 16] [--tokens 128] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from benchmarks import common, datasets, runners

MAX_PROMPT = 1200

METHODS: dict[str, dict[str, Any]] = {
    "lookahead (4,3,4)": {"triple": (4, 3, 4)},
    "lookahead (7,7,7)": {"triple": (7, 7, 7)},
    "prompt lookup (4,2)": {"ngram": (4, 2)},
    "prompt lookup (10,2)": {"ngram": (10, 2)},
    "suffix (10)": {"suffix": 10},
    "medusa (63 nodes)": {"medusa": "mc_sim_7b_63"},
    "redrafter (5 x 5)": {"redrafter": (5, 5)},
}


def config_of(method: dict[str, Any]) -> Any:
    """Returns the speculative configuration with fixed draft lengths."""
    import specdec_ext

    if "triple" in method:
        w, n, g = method["triple"]
        return specdec_ext.LookaheadDecodingConfig(
            max_window_size=w, max_ngram_size=n, max_verification_set_size=g, adaptive=False
        )
    if "medusa" in method:
        return specdec_ext.MedusaDecodingConfig(medusa_choices=method["medusa"], adaptive=False)
    if "redrafter" in method:
        beams, length = method["redrafter"]
        return specdec_ext.ReDrafterDecodingConfig(
            num_beams=beams, draft_len_per_beam=length, adaptive=False
        )
    if "suffix" in method:
        return specdec_ext.SuffixDecodingConfig(max_draft_len=method["suffix"], adaptive=False)
    length, size = method["ngram"]
    return specdec_ext.NGramDecodingConfig(
        max_draft_len=length, max_matching_ngram_size=size, adaptive=False
    )


def measure_set(ours: runners.Ours, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Decodes the prompts and counts, per request, decode steps, drafts and accepted drafts."""
    import specdec_ext

    params = specdec_ext.SamplingParams(max_tokens=max_tokens, detokenize=False)
    outputs = ours.llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
    )
    tokens = steps = accepted = drafts = spec_steps = 0
    texts = []
    for output in outputs:
        ids = list(output.outputs[0].token_ids)
        metrics = output.metrics["speculative_decoding"]
        texts.append(ids)
        # Whole prompts are read in one pass (max_num_tokens below), which gives the first token.
        tokens += len(ids) - 1
        steps += output.metrics["num_forward_passes"] - 1
        accepted += metrics["num_accepted_draft_tokens"]
        drafts += metrics["num_draft_tokens"]
        spec_steps += metrics["num_spec_steps"]
    return {
        "tokens_per_forward": tokens / max(1, steps),
        "decode_tokens": tokens,
        "decode_forwards": steps,
        "draft_acceptance_rate": accepted / max(1, drafts),
        "drafts_per_forward": drafts / max(1, steps),
        "speculative_steps_share": spec_steps / max(1, steps),
        "texts": texts,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16, help="prompts per set")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens per prompt")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sets", nargs="+", default=list(datasets.SETS), choices=datasets.SETS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--quick", action="store_true", help="2 prompts of 32 tokens; no file")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens = 2, 32

    folder, tokenizer = runners.default_model(args.threads)
    environment = common.environment(args.threads)
    prompts = {
        name: [ids for _, ids in datasets.load_ids(tokenizer, name, args.prompts, MAX_PROMPT)]
        for name in args.sets
    }
    scheduler = {
        "max_batch_size": args.batch,
        "max_seq_len": MAX_PROMPT + args.tokens,
        "max_num_tokens": args.batch * MAX_PROMPT,
    }
    results: dict[str, dict[str, Any]] = {}
    texts: dict[str, list[list[int]]] = {}
    for method in args.methods:
        description = METHODS[method]
        ours = runners.Ours(
            folder, args.dtype, config_of(description), scheduler_config=dict(scheduler)
        )
        for name in args.sets:
            started = time.perf_counter()
            figures = measure_set(ours, prompts[name], args.tokens)
            # Exactness is asserted here too: every method must have written the same texts.
            written = figures.pop("texts")
            if texts.setdefault(name, written) != written:
                raise SystemExit(f"{method} on {name}: text differs from another method's")
            results.setdefault(method, {})[name] = figures
            print(
                f"{method:22s} {name:10s} {figures['tokens_per_forward']:.2f} tokens/forward "
                f"({time.perf_counter() - started:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
        numerics = ours.llm.model.numerics
        ours.close()
    table = common.markdown(
        ["tokens per forward", *args.sets],
        [
            [m, *(results[m][name]["tokens_per_forward"] for name in args.sets)]
            for m in args.methods
        ],
    )
    rows = common.markdown(
        ["rows per forward", *args.sets],
        [
            [m, *(1.0 + results[m][name]["drafts_per_forward"] for name in args.sets)]
            for m in args.methods
        ],
    )
    print(table, rows, sep="\n\n")
    if not args.quick:
        result = {
            "benchmark": "acceptance",
            "environment": environment,
            "model": "SmolLM2-135M-Instruct",
            "dtype": args.dtype,
            "numerics": numerics,
            "prompts_per_set": args.prompts,
            "max_tokens": args.tokens,
            "adaptive": False,
            "identical_texts_across_methods": True,
            "results": results,
        }
        common.write_result("acceptance", result, [table, rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())

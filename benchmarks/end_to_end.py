"""Is it faster? The default model against plain decoding and transformers, per kind of text.

Ratios in one run, 2 threads: prompt lookup and lookahead with the adaptive budget against this
package's own plain decoding, transformers' plain decoding and transformers' prompt lookup, on the
same prompts; then eight requests at once against transformers' one after another. Wall clock of the
whole call, prompt included; `decode` beside it leaves the prompt out. Answers end where the model
ends them.

    python -m benchmarks.end_to_end [--quick] [--dtypes float32 bfloat16] [--prompts 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import common, datasets, runners

PEER_DRAFT = 10
BATCH = 8
# Our program first, then what it is compared with; figures are ours divided by theirs.
COMPARISONS = {
    "prompt lookup / plain": ("prompt_lookup", "plain"),
    "lookahead / plain": ("lookahead", "plain"),
    "plain / transformers plain": ("plain", "peer_plain"),
    "prompt lookup / transformers plain": ("prompt_lookup", "peer_plain"),
    "prompt lookup / transformers prompt lookup": ("prompt_lookup", "peer_lookup"),
}


def agreement(a: list[list[int]], b: list[list[int]]) -> str:
    """Returns 'k/n': how many of the answers are the same tokens."""
    return f"{sum(x == y for x, y in zip(a, b, strict=True))}/{len(a)}"


def compare_rounds(rounds: dict[str, list[runners.Run]]) -> dict[str, Any]:
    """Returns per comparison the ratios (median, min, max of rounds) and how many texts agree."""
    result: dict[str, Any] = {}
    for name, (ours, theirs) in COMPARISONS.items():
        if ours not in rounds or theirs not in rounds:
            continue
        pairs = list(zip(rounds[ours], rounds[theirs], strict=True))
        result[name] = {
            "total": common.spread([a.tokens_per_second / b.tokens_per_second for a, b in pairs]),
            "decode": common.spread(
                [a.decode_tokens_per_second / b.decode_tokens_per_second for a, b in pairs]
            ),
            "same_text": agreement(pairs[0][0].tokens, pairs[0][1].tokens),
        }
    return result


def check_exact(rounds: dict[str, list[runners.Run]], where: str) -> None:
    """Our programs must all have written the same tokens, in every round."""
    texts = [run.tokens for name in ("plain", "prompt_lookup", "lookahead") for run in rounds[name]]
    if any(text != texts[0] for text in texts):
        raise SystemExit(f"{where}: speculative and plain decoding differ")


def measure(
    folder: Path, tokenizer: Any, dtype: str, args: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """Returns the figures of one data type, per set and for the batch, and the numerics mode."""
    import specdec_ext

    # Prompts of the sets are up to 1200 tokens; eight of them must fit at once.
    options = {"scheduler_config": {"max_batch_size": BATCH, "max_seq_len": 1200 + args.tokens}}
    lookup = runners.Ours(
        folder,
        dtype,
        specdec_ext.NGramDecodingConfig(max_draft_len=10, max_matching_ngram_size=3),
        **options,
    )
    w, n, g = args.triple
    lookahead = runners.Ours(
        folder,
        dtype,
        specdec_ext.LookaheadDecodingConfig(
            max_window_size=w, max_ngram_size=n, max_verification_set_size=g
        ),
        **options,
    )
    peer = runners.Peer(folder, dtype)
    runners.warm_up(lookup, lookahead, peer)
    numerics = lookup.llm.model.numerics

    figures: dict[str, Any] = {}
    for name in args.sets:
        prompts = [ids for _, ids in datasets.load_ids(tokenizer, name, args.prompts, 1200)]
        programs = {
            "plain": lambda p=prompts: lookup.generate(p, args.tokens, plain=True),
            "prompt_lookup": lambda p=prompts: lookup.generate(p, args.tokens),
            "lookahead": lambda p=prompts: lookahead.generate(p, args.tokens),
            "peer_plain": lambda p=prompts: peer.generate(p, args.tokens),
            "peer_lookup": lambda p=prompts: peer.generate(p, args.tokens, lookup=PEER_DRAFT),
        }
        rounds = common.interleave(programs, args.rounds, f"{dtype} {name}")
        check_exact(rounds, f"{dtype} {name}")
        figures[name] = {
            "prompt_tokens": [len(ids) for ids in prompts],
            "programs": {k: [run.summary() for run in v] for k, v in rounds.items()},
            "ratios": compare_rounds(rounds),
        }

    mixed = [
        ids
        for name in args.sets
        for _, ids in datasets.load_ids(tokenizer, name, -(-BATCH // len(args.sets)), 1200)
    ][:BATCH]
    programs = {
        "ours_batch": lambda: lookup.generate(mixed, args.tokens, batched=True),
        "ours_batch_plain": lambda: lookup.generate(mixed, args.tokens, batched=True, plain=True),
        "peer_lookup": lambda: peer.generate(mixed, args.tokens, lookup=PEER_DRAFT),
    }
    rounds = common.interleave(programs, args.rounds, f"{dtype} batch {BATCH}")
    if rounds["ours_batch"][0].tokens != rounds["ours_batch_plain"][0].tokens:
        raise SystemExit(f"{dtype} batch: speculative and plain decoding differ")

    def ratio(program: str) -> dict[str, float]:
        pairs = zip(rounds[program], rounds["peer_lookup"], strict=True)
        return common.spread([a.tokens_per_second / b.tokens_per_second for a, b in pairs])

    figures[f"batch {BATCH}"] = {
        "prompt_tokens": [len(ids) for ids in mixed],
        "tokens_per_second": {
            k: common.spread([run.tokens_per_second for run in v]) for k, v in rounds.items()
        },
        "ratios": {
            "prompt lookup / transformers one after another": ratio("ours_batch"),
            "plain / transformers one after another": ratio("ours_batch_plain"),
        },
    }
    for program in (lookup, lookahead, peer):
        program.close()
    return figures, numerics


def table_of(dtype: str, figures: dict[str, Any], sets: list[str]) -> str:
    """Returns the markdown table of one data type: wall-clock ratios, medians over rounds."""
    header = [f"{dtype}: wall-clock ratio", *sets]
    rows: list[list[Any]] = []
    for comparison in COMPARISONS:
        values = [figures[name]["ratios"][comparison]["total"]["median"] for name in sets]
        rows.append([comparison, *values])
    rows.append(
        [
            "prompt lookup / plain, decode only",
            *(
                figures[name]["ratios"]["prompt lookup / plain"]["decode"]["median"]
                for name in sets
            ),
        ]
    )
    for program in ("prompt_lookup", "lookahead"):
        values = [figures[name]["programs"][program][0]["tokens_per_forward"] for name in sets]
        rows.append([f"{program.replace('_', ' ')}: tokens per forward", *values])
    for program in ("plain", "prompt_lookup", "peer_plain", "peer_lookup"):
        values = []
        for name in sets:
            runs = figures[name]["programs"][program]
            values.append(common.median([run["tokens_per_second"] for run in runs]))
        rows.append([f"{program.replace('_', ' ')}: tokens/s", *values])
    table = common.markdown(header, rows)
    batch = figures[f"batch {BATCH}"]["ratios"]
    for name, ratio in batch.items():
        table += f"\n\nBatch {BATCH}, {name}: {ratio['median']:.2f}"
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sets", nargs="+", default=list(datasets.SETS), choices=datasets.SETS)
    parser.add_argument("--prompts", type=int, default=4, help="prompts per set")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens per prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--triple", type=int, nargs=3, default=(4, 3, 4), metavar=("W", "N", "G"))
    parser.add_argument("--quick", action="store_true", help="1 prompt, 1 round; no file")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens, args.rounds = 1, 32, 1

    folder, tokenizer = runners.default_model(args.threads)
    environment = common.environment(args.threads)
    figures, tables, numerics = {}, [], {}
    for dtype in args.dtypes:
        figures[dtype], numerics[dtype] = measure(folder, tokenizer, dtype, args)
        tables.append(table_of(dtype, figures[dtype], args.sets))
        print(tables[-1], flush=True)
    if not args.quick:
        result = {
            "benchmark": "end_to_end",
            "environment": environment,
            "model": "SmolLM2-135M-Instruct",
            "numerics": numerics,
            "adaptive": True,
            "prompts_per_set": args.prompts,
            "max_tokens": args.tokens,
            "rounds": args.rounds,
            "peer_prompt_lookup_num_tokens": PEER_DRAFT,
            "lookahead_triple": list(args.triple),
            "results": figures,
        }
        common.write_result("end_to_end", result, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Is it faster? The default model against plain decoding and transformers, per kind of text.

Ratios in one run, 2 threads: prompt lookup and lookahead with the adaptive budget against this
package's own plain decoding, transformers' plain decoding and transformers' prompt lookup, on the
same prompts; then eight requests at once against transformers' one after another. Wall clock of the
whole call, prompt included; `decode` beside it leaves the prompt out. Answers end where the model
ends them.

    python -m benchmarks.end_to_end [--quick] [--dtypes float32 bfloat16] [--prompts 4] [--rounds 3]

With --base the three programs of commit cebcf29 take part in the same rounds (step_versions.py
tells how that commit is built). --without-transformers leaves the slowest programs out, which
take most of the time.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common, datasets, runners
from benchmarks.peers.base import environment

PEER_DRAFT = 10
BATCH = 8
# Our program first, then what it is compared with; figures are ours divided by theirs.
OURS = ("plain", "prompt_lookup", "lookahead")
COMPARISONS = {
    "prompt lookup / plain": ("prompt_lookup", "plain"),
    "lookahead / plain": ("lookahead", "plain"),
    "plain / transformers plain": ("plain", "peer_plain"),
    "prompt lookup / transformers plain": ("prompt_lookup", "peer_plain"),
    "prompt lookup / transformers prompt lookup": ("prompt_lookup", "peer_lookup"),
    f"plain / {environment.COMMIT}": ("plain", "base_plain"),
    f"prompt lookup / {environment.COMMIT}": ("prompt_lookup", "base_prompt_lookup"),
    f"lookahead / {environment.COMMIT}": ("lookahead", "base_lookahead"),
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


def check_exact(rounds: dict[str, list[runners.Run]], where: str, programs: list[str]) -> None:
    """These programs must all have written the same tokens, in every round."""
    texts = [run.tokens for name in programs for run in rounds.get(name, [])]
    if any(text != texts[0] for text in texts):
        raise SystemExit(f"{where}: speculative and plain decoding differ")


def measure(
    folder: Path, tokenizer: Any, dtype: str, args: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """Returns the figures of one data type, per set and for the batch, and the numerics mode."""
    # Prompts of the sets are up to 1200 tokens; eight of them must fit at once.
    options = {"scheduler_config": {"max_batch_size": BATCH, "max_seq_len": 1200 + args.tokens}}
    # In the dict form, which every version reads.
    w, n, g = args.triple
    lookup_config = {"method": "ngram", "max_draft_len": 10, "max_matching_ngram_size": 3}
    lookahead_config = {
        "method": "lookahead", "max_window_size": w, "max_ngram_size": n,
        "max_verification_set_size": g,
    }  # fmt: skip
    lookup = runners.Ours(folder, dtype, lookup_config, **options)
    lookahead = runners.Ours(folder, dtype, lookahead_config, **options)
    peer = None if args.without_transformers else runners.Peer(folder, dtype)
    base = {
        name: runners.Elsewhere(args.base, folder, dtype, config, args.threads, **options)
        for name, config in (("lookup", lookup_config), ("lookahead", lookahead_config))
        if args.base
    }
    taking_part = [lookup, lookahead, *([] if peer is None else [peer]), *base.values()]
    runners.warm_up(*taking_part)
    numerics = lookup.llm.model.numerics

    figures: dict[str, Any] = {}
    for name in args.sets:
        prompts = [ids for _, ids in datasets.load_ids(tokenizer, name, args.prompts, 1200)]
        programs = {}
        for of, side in (("", {"lookup": lookup, "lookahead": lookahead}), ("base_", base)):
            if not side:
                continue
            programs[f"{of}plain"] = partial(
                side["lookup"].generate, prompts, args.tokens, plain=True
            )
            programs[f"{of}prompt_lookup"] = partial(side["lookup"].generate, prompts, args.tokens)
            programs[f"{of}lookahead"] = partial(side["lookahead"].generate, prompts, args.tokens)
        # What is compared runs one after the other.
        programs = {
            k: programs[k] for name in OURS for k in (name, f"base_{name}") if k in programs
        }
        if peer is not None:
            ask = partial(peer.generate, prompts, args.tokens)
            programs |= {"peer_plain": ask, "peer_lookup": partial(ask, lookup=PEER_DRAFT)}
        rounds = common.interleave(programs, args.rounds, f"{dtype} {name}")
        # The two commits' rotary tables differ in last bits, so their texts may (tests/corpus).
        for of in ("", "base_"):
            check_exact(rounds, f"{dtype} {name}", [of + program for program in OURS])
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
    }
    if peer is not None:
        programs["peer_lookup"] = partial(peer.generate, mixed, args.tokens, lookup=PEER_DRAFT)
    if base:
        programs |= {
            "base_batch": lambda: base["lookup"].generate(mixed, args.tokens, batched=True),
            "base_batch_plain": lambda: base["lookup"].generate(
                mixed, args.tokens, batched=True, plain=True
            ),
        }
    rounds = common.interleave(programs, args.rounds, f"{dtype} batch {BATCH}")
    for of in ("ours", "base"):
        check_exact(rounds, f"{dtype} batch", [f"{of}_batch", f"{of}_batch_plain"])

    def ratio(ours: str, theirs: str) -> dict[str, float]:
        pairs = zip(rounds[ours], rounds[theirs], strict=True)
        return common.spread([a.tokens_per_second / b.tokens_per_second for a, b in pairs])

    compared = {
        "prompt lookup / transformers one after another": ("ours_batch", "peer_lookup"),
        "plain / transformers one after another": ("ours_batch_plain", "peer_lookup"),
        f"prompt lookup / {environment.COMMIT}": ("ours_batch", "base_batch"),
        f"plain / {environment.COMMIT}": ("ours_batch_plain", "base_batch_plain"),
    }

    figures[f"batch {BATCH}"] = {
        "prompt_tokens": [len(ids) for ids in mixed],
        "tokens_per_second": {
            k: common.spread([run.tokens_per_second for run in v]) for k, v in rounds.items()
        },
        "ratios": {
            name: ratio(*pair) for name, pair in compared.items() if rounds.keys() >= set(pair)
        },
    }
    for program in taking_part:
        program.close()
    return figures, numerics


def table_of(dtype: str, figures: dict[str, Any], sets: list[str]) -> str:
    """Returns the markdown table of one data type: wall-clock ratios, medians over rounds."""
    header = [f"{dtype}: wall-clock ratio", *sets]
    rows: list[list[Any]] = []
    for comparison in figures[sets[0]]["ratios"]:
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
        if program not in figures[sets[0]]["programs"]:
            continue
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
    parser.add_argument(
        "--base", action="store_true", help=f"with commit {environment.COMMIT} in the same run"
    )
    parser.add_argument(
        "--without-transformers", action="store_true", help="only this package's programs"
    )
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens, args.rounds = 1, 32, 1

    args.base = environment.ready() if args.base else None
    folder, tokenizer = runners.default_model(args.threads)
    about = common.environment(args.threads)
    figures, tables, numerics = {}, [], {}
    for dtype in args.dtypes:
        figures[dtype], numerics[dtype] = measure(folder, tokenizer, dtype, args)
        tables.append(table_of(dtype, figures[dtype], args.sets))
        print(tables[-1], flush=True)
    if not args.quick:
        result = {
            "benchmark": "end_to_end",
            "environment": about,
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

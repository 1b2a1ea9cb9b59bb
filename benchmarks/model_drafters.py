"""Do the shipped drafters pay? Draft model, Medusa and ReDrafter on the default model.

Per set and temperature, in one run: each method at the defaults that a user gets (adaptive) against
this package's plain decoding, and transformers' assisted generation with the same draft model
against transformers' plain decoding. transformers cannot score a reduced vocabulary: its copy of
the drafter has the target's whole head. Greedy texts must be equal; sampled ones have a fixed seed.
Then the same methods with their whole tree or longest chain at every step: tokens per pass.

    python -m benchmarks.model_drafters [--quick] [--dtypes float32] [--sets humaneval mtbench]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import common, datasets, runners

METHODS = ("draft_target", "medusa", "redrafter")
TEMPERATURES = (0.0, 1.0)


def configs(adaptive: bool) -> dict[str, Any]:
    """The shipped files, as `specdec generate --draft-target | --medusa | --redrafter` use them."""
    import specdec_ext
    from specdec_ext.models.default_drafter import default_drafter

    return {
        "draft_target": specdec_ext.DraftTargetDecodingConfig(
            str(default_drafter()), adaptive=adaptive
        ),
        "medusa": specdec_ext.MedusaDecodingConfig(adaptive=adaptive),
        "redrafter": specdec_ext.ReDrafterDecodingConfig(adaptive=adaptive),
    }


def assistant_model(target: Any, dtype: str) -> Any:
    """The shipped draft model for transformers: its layers, the target's embeddings and head."""
    import torch
    from transformers import LlamaForCausalLM

    from specdec_ext.models.default_drafter import SHIPPED_DRAFTER
    from specdec_ext.models.drafter_files import read_drafter

    shape, weights, _, _ = read_drafter(SHIPPED_DRAFTER)
    model = LlamaForCausalLM(shape.hf_config())
    table = target.get_input_embeddings().weight.detach().clone()
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    state |= {"model.embed_tokens.weight": table, "lm_head.weight": table}
    model.load_state_dict(state)
    # generate() compares these with the target's.
    model.generation_config.eos_token_id = target.generation_config.eos_token_id
    model.generation_config.pad_token_id = 0
    return model.to(getattr(torch, dtype)).eval()


def measure(
    folder: Path, tokenizer: Any, dtype: str, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Figures per set and temperature."""
    options = {"scheduler_config": {"max_batch_size": 1, "max_seq_len": 1200 + args.tokens}}
    ours = {m: runners.Ours(folder, dtype, c, **options) for m, c in configs(True).items()}
    whole = {m: runners.Ours(folder, dtype, c, **options) for m, c in configs(False).items()}
    peer = runners.Peer(folder, dtype)
    assistant = assistant_model(peer.model, dtype)
    runners.warm_up(*ours.values(), *whole.values(), peer)
    figures: dict[str, dict[str, Any]] = {}
    for name in args.sets:
        prompts = [ids for _, ids in datasets.load_ids(tokenizer, name, args.prompts, 1200)]
        for temperature in TEMPERATURES:
            how = {"temperature": temperature}
            programs: dict[str, Any] = {
                "plain": lambda p=prompts, h=how: ours["medusa"].generate(
                    p, args.tokens, plain=True, **h
                ),
                **{
                    m: lambda p=prompts, h=how, m=m: ours[m].generate(p, args.tokens, **h)
                    for m in METHODS
                },
                "peer_plain": lambda p=prompts, h=how: peer.generate(p, args.tokens, **h),
                "peer_assisted": lambda p=prompts, h=how: peer.generate(
                    p, args.tokens, assistant=assistant, **h
                ),
            }
            where = f"{name}, temperature {temperature:g}"
            rounds = common.interleave(programs, args.rounds, f"{dtype} {where}")
            full = {m: whole[m].generate(prompts, args.tokens, **how) for m in METHODS}
            expected = rounds["plain"][0].tokens
            for method in METHODS:
                texts = [run.tokens for run in (*rounds[method], full[method])]
                if temperature == 0.0 and any(text != expected for text in texts):
                    raise SystemExit(f"{dtype} {where}: {method} and plain decoding differ")
            figures[where] = {
                "prompt_tokens": [len(ids) for ids in prompts],
                "programs": {k: [run.summary() for run in v] for k, v in rounds.items()},
                "whole_tree": {m: run.summary() for m, run in full.items()},
            }
    for program in (*ours.values(), *whole.values(), peer):
        program.close()
    return figures


def table_of(dtype: str, figures: dict[str, dict[str, Any]], rates: bool = True) -> str:
    """The markdown of one data type; `rates`: tokens per second too."""

    def ratio(cell: dict[str, Any], ours: str, theirs: str) -> float:
        pairs = zip(cell["programs"][ours], cell["programs"][theirs], strict=True)
        return common.median([a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs])

    def rate(cell: dict[str, Any], program: str, key: str) -> float:
        return common.median([run[key] for run in cell["programs"][program]])

    cells = figures.values()
    rows: list[list[Any]] = []
    for method in METHODS:
        words = method.replace("_", "-")
        rows.append([f"{words} / plain, wall clock", *(ratio(c, method, "plain") for c in cells)])
        rows.append(
            [f"{words}: tokens per pass", *(rate(c, method, "tokens_per_forward") for c in cells)]
        )
        full = [c["whole_tree"][method]["tokens_per_forward"] for c in cells]
        rows.append([f"{words}, all drafts: tokens per pass", *full])
    rows.append(
        [
            "transformers assisted / its plain",
            *(ratio(c, "peer_assisted", "peer_plain") for c in cells),
        ]
    )
    rows.append(
        [
            "transformers assisted: tokens per pass",
            *(rate(c, "peer_assisted", "tokens_per_forward") for c in cells),
        ]
    )
    rows.append(
        [
            "draft-target / transformers assisted",
            *(ratio(c, "draft_target", "peer_assisted") for c in cells),
        ]
    )
    programs = ("plain", *METHODS, "peer_plain", "peer_assisted") if rates else ()
    for program in programs:
        words = program.replace("_", "-") + ": tokens/s"
        rows.append([words, *(rate(c, program, "tokens_per_second") for c in cells)])
    return common.markdown([dtype, *figures], rows)


def make_parser(description: str, tokens: int) -> argparse.ArgumentParser:
    """What the benchmarks of the shipped drafters share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--sets", nargs="+", default=["humaneval", "mtbench"], choices=datasets.SETS
    )
    parser.add_argument("--prompts", type=int, default=4, help="prompts per set")
    parser.add_argument("--tokens", type=int, default=tokens, help="most tokens per prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="1 prompt, 1 round; no file")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.tokens, args.rounds = 1, 24, 1
    return args


def write(
    name: str,
    environment: Any,
    args: argparse.Namespace,
    figures: Any,
    tables: list[str],
    drafters: str = "shipped",
) -> None:
    """The result file, unless the run was a quick one. drafters: where they are from"""
    if args.quick:
        return
    result = {
        "benchmark": name,
        "environment": environment,
        "model": "SmolLM2-135M-Instruct",
        "drafters": drafters,
        "prompts_per_set": args.prompts,
        "max_tokens": args.tokens,
        "rounds": args.rounds,
        "seed": runners.SEED,
        "results": figures,
    }
    common.write_result(name, result, tables)


def main() -> int:
    parser = make_parser(__doc__.splitlines()[0], tokens=96)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    args = parse(parser)
    folder, tokenizer = runners.default_model(args.threads)
    environment = common.environment(args.threads)
    figures, tables = {}, []
    for dtype in args.dtypes:
        figures[dtype] = measure(folder, tokenizer, dtype, args)
        tables.append(table_of(dtype, figures[dtype]))
        print(tables[-1], flush=True)
    write("model_drafters", environment, args, figures, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`specdec tree`: show a Medusa tree, or find the best one for measured guess rates."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .common import add_llm_arguments, make_llm, medusa_model, usage_error
from .output import check_outputs, write_file
from .prompts import encode_prompt, read_prompts
from .tune import read_cost

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group(
        "tree (give --medusa-choices, --rates, or --medusa-model, whose config.json has rates)"
    )
    what.add_argument(
        "--rates", metavar="FILE",
        help="JSON [[rate of rank 0, 1, ...] per head]: how often a head's guess is right",
    )  # fmt: skip
    what.add_argument(
        "--measure", action="store_true",
        help="measure the rates: decode --input-file with --medusa-model",
    )  # fmt: skip
    what.add_argument(
        "--input-file",
        metavar="FILE",
        help="prompts for --measure, as 'specdec generate' reads them",
    )
    what.add_argument(
        "--max-output-len", type=int, default=128, metavar="N",
        help="tokens per prompt of --measure (default: 128)",
    )  # fmt: skip
    what.add_argument(
        "--max-nodes", type=int, default=63, metavar="N", help="nodes at most (default: 63)"
    )
    what.add_argument("--nodes", type=int, metavar="N", help="exactly N nodes, not the best number")
    what.add_argument(
        "--step-cost", metavar="FILE",
        help='JSON {"rows": seconds}: T(rows), by which the number of nodes is chosen; default: '
        "measured with --measure, else all --max-nodes are taken",
    )  # fmt: skip

    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object")
    output.add_argument(
        "--output", metavar="FILE", help="write the choices (and rates) as JSON, for "
        "--medusa-choices",
    )  # fmt: skip
    output.add_argument("--draw", metavar="FILE", help="draw the tree: .svg, or .png (matplotlib)")
    add_llm_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ..config.medusa_choices import medusa_tree, parse_choices
    from ..config.medusa_tuner import best_tree, likelihood, tune_size
    from ..config.validate import check_int
    from ..engine.step_cost import StepCost
    from ..errors import ConfigError

    if args.draw is not None and Path(args.draw).suffix.lower() not in (".svg", ".png"):
        usage_error(args, f"--draw {args.draw!r}: expected a file name in .svg or .png")
    inputs = (args.input_file, args.rates, args.step_cost)
    check_outputs(args, {"--output": args.output, "--draw": args.draw}, inputs)
    for flag in ("max_nodes", "nodes"):
        if getattr(args, flag) is not None:
            name = "--" + flag.replace("_", "-")
            check_int(name, getattr(args, flag), ConfigError, low=1, high=127)
    cost = None if args.step_cost is None else read_cost(args.step_cost)
    draft_seconds = 0.0
    rates = None
    if args.measure:
        rates, measured, draft_seconds = _measure(args)
        cost = cost or measured
    elif args.rates is not None or args.medusa_choices is None:
        rates = _read_rates(args)
    sizes = []
    if args.medusa_choices is not None:
        choices = parse_choices(args.medusa_choices, "--medusa-choices", ConfigError)
    else:
        assert rates is not None
        ranked = best_tree(rates, args.nodes or args.max_nodes)
        if not ranked:
            raise ConfigError("all rates are 0: no tree is better than plain decoding")
        sizes = [] if cost is None else tune_size(ranked, StepCost(cost), draft_seconds)
        count = len(ranked)
        if sizes and args.nodes is None:
            count = max(1, max(sizes, key=lambda size: size.gain).nodes)
        choices = tuple(choice for choice, _ in ranked[:count])
    probability = {} if rates is None else {c: likelihood(c, rates) for c in choices}
    report: dict[str, Any] = {
        "nodes": len(choices),
        "step_tokens": len(choices) + 1,
        "paths": len(medusa_tree(choices).paths),
        "depth": medusa_tree(choices).depth,
        "top_k": list(medusa_tree(choices).top_k),
        "expected_tokens": 1.0 + sum(probability.values()) if rates is not None else None,
        "medusa_choices": [list(choice) for choice in choices],
        "guess_rates": rates,
        "sizes": [
            {"nodes": s.nodes, "tokens": s.tokens, "cost": s.cost, "gain": s.gain} for s in sizes
        ],
    }
    _write(args, report, choices, probability)
    return 0


def _read_rates(args: argparse.Namespace) -> Any:
    from ..config.medusa_tuner import read_rates

    source = args.rates or medusa_model(args)
    if source is None:
        usage_error(args, "no tree; give --medusa-choices, --rates, --medusa-model or --medusa")
    return read_rates(source)


def _measure(args: argparse.Namespace) -> tuple[Any, dict[int, float], float]:
    """(rates, T(rows), seconds of the heads per step), from decoding the prompts."""
    from ..engine.step_cost import measure_step_cost
    from ..errors import ConfigError
    from ..request.sampling_params import SamplingParams

    if args.input_file is None:
        usage_error(args, "--measure needs --input-file, one prompt per line")
    prompts = read_prompts(args)
    args.chat, args.chat_template, args.system_prompt = True, None, None
    # A chain asks every head in every step; its ranks do not limit what is counted.
    choices, args.medusa_choices, args.no_adaptive = args.medusa_choices, None, True
    with make_llm(args) as llm:
        depth = llm.speculative_config.num_medusa_heads
        params = SamplingParams(
            max_tokens=args.max_output_len,
            speculative_config={"medusa_choices": [[0] * n for n in range(1, depth + 1)]},
        )
        items = [encode_prompt(llm, prompt, args) for prompt in prompts]
        llm._decode(items, params, False)
        drafter = llm.engine._drafting.drafter
        rates, trials = drafter.measured_rates()
        rows, seconds = measure_step_cost(
            llm.model, num_pages=llm.memory.num_pages, page_size=llm.memory.tokens_per_block
        )
        draft_seconds = drafter.head_seconds_per_step
    args.medusa_choices = choices
    if min(trials) < 1:
        raise ConfigError(
            f"--measure: only {trials} guesses of the heads could be compared with the text; give "
            "more prompts or a larger --max-output-len"
        )
    return rates, dict(zip(rows, seconds, strict=True)), draft_seconds


def _write(
    args: argparse.Namespace, report: dict[str, Any], choices: Any, probability: Any
) -> None:
    from ..config.medusa_drawing import draw_png, tree_svg, tree_text

    if args.output is not None:
        kept = {k: report[k] for k in ("medusa_choices", "guess_rates", "expected_tokens")}
        write_file(args, args.output, json.dumps(kept) + "\n")
    if args.draw is not None and args.draw.lower().endswith(".png"):
        write_file(args, args.draw, draw_png(choices, probability))
    elif args.draw is not None:
        write_file(args, args.draw, tree_svg(choices, probability))
    if args.json:
        print(json.dumps(report))
        return
    print(tree_text(choices, probability))
    tokens = report["expected_tokens"]
    print(
        f"{report['nodes']} nodes, {report['step_tokens']} step tokens, {report['paths']} paths, "
        f"depth {report['depth']}, top-k per head {report['top_k']}"
        + (f", {tokens:.3f} tokens per step expected" if tokens is not None else "")
    )
    if report["sizes"]:
        print(f"{'nodes':>6} {'tokens':>7} {'T/T(1)':>7} {'gain':>6}")
        best = max(report["sizes"], key=lambda size: size["gain"])["nodes"]
        for size in report["sizes"]:
            mark = "  <- best" if size["nodes"] == best else ""
            print(
                f"{size['nodes']:>6} {size['tokens']:>7.3f} {size['cost']:>7.3f} "
                f"{size['gain']:>6.3f}{mark}"
            )
        if best == 0:
            print("no tree of these rates pays at these step times: plain decoding is faster")

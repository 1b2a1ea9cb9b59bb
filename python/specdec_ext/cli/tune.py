"""`specdec tune lookahead | ngram`: the configuration that pays most on this model and prompts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..extras import require
from .common import add_llm_arguments, make_llm, usage_error
from .output import check_outputs, write_file
from .prompts import add_prompt_arguments, encode_prompt, read_prompts
from .speculation import named_speculation

__all__ = ["add_arguments", "read_cost", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tuned_method", choices=("lookahead", "ngram"), metavar="METHOD",
        help="lookahead: W, N, G; ngram: draft length K and pattern length M of prompt lookup",
    )  # fmt: skip
    work = parser.add_argument_group("search")
    work.add_argument("--input-text", "--prompt", nargs="+", metavar="TEXT", help="prompts")
    add_prompt_arguments(work)
    work.add_argument(
        "--max-output-len", "--output-len", type=int, default=128, metavar="N",
        help="output tokens per prompt (default: 128)",
    )  # fmt: skip
    work.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default: greedy")
    work.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling")
    work.add_argument(
        "--batch-size", type=int, default=1, metavar="N",
        help="requests that will run together: the speed-up is that of such steps (default: 1)",
    )  # fmt: skip
    work.add_argument(
        "--max-seconds", type=float, default=300.0, metavar="S",
        help="begin no candidate that would not end in time (default: 300)",
    )  # fmt: skip
    work.add_argument(
        "--limit-draft-len", type=int, default=127, metavar="D",
        help="no configuration with more drafts per step (default: 127)",
    )  # fmt: skip
    work.add_argument(
        "--step-cost", metavar="FILE",
        help='T(rows) from a JSON file, {"1": seconds, "8": seconds, ...}, instead of measuring',
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="JSON on stdout instead of tables")
    output.add_argument("--output-json", metavar="FILE", help="write the whole report there too")
    output.add_argument(
        "--output", metavar="FILE", help="write the best configuration there, as the flags take it"
    )
    output.add_argument("--png", metavar="FILE", help="draw the heat maps (needs matplotlib)")
    output.add_argument("--disable-tqdm", action="store_true", help="no progress on stderr")
    add_llm_arguments(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    from ..bench.search_space import SPACES
    from ..bench.tune import tune
    from ..bench.tune_report import draw_png, print_tuning, to_dict
    from ..request.sampling_params import SamplingParams

    if args.png is not None:
        require("matplotlib", "--png")
    params = SamplingParams(max_tokens=args.max_output_len, temperature=args.temperature,
                            seed=args.seed, detokenize=False)  # fmt: skip
    table = None if args.step_cost is None else read_cost(args.step_cost)
    prompts = read_prompts(args)
    space, limit = SPACES[args.tuned_method], args.limit_draft_len
    within = [p for p in space.all_points() if space.draft_len(p) <= limit]
    if not space.coarse_points(limit):
        usage_error(args, f"--limit-draft-len {limit}: no configuration has so few drafts; the "
                    f"smallest of the first search has {space.draft_len(space.coarse_points()[0])}"
                    )  # fmt: skip
    # The engine is planned for the longest drafts; every candidate fits into it.
    widest = space.config(max(within, key=space.draft_len), adaptive=False)
    with make_llm(args, speculative_config=widest) as llm:
        from ..bench.machine import about_engine, about_machine, clocks

        items = [encode_prompt(llm, prompt, args)[1] for prompt in prompts]
        before = clocks(llm.device)
        if table is None:
            table = _measure_cost(llm)
        result = tune(
            llm._builder.engine_for,
            space,
            items,
            params,
            table,
            batch_size=args.batch_size,
            max_seconds=args.max_seconds,
            limit=limit,
            on_candidate=_progress(args, space.names),
        )
        about = {
            **about_engine(llm),
            "speculative_config": None,
            "workload": {
                "num_prompts": len(items),
                "input_len": [min(map(len, items)), max(map(len, items))],
                "max_output_len": args.max_output_len,
                "temperature": args.temperature,
                "seed": args.seed,
                "batch_size": args.batch_size,
                "step_cost": "measured" if args.step_cost is None else "given",
            },
            "clocks": {"before": before, "after": clocks(llm.device)},
            "machine": about_machine(llm.device),
        }
    report = to_dict(result, table, about)
    for path, content in ((args.output_json, report), (args.output, report["best"])):
        if path is not None:
            text = json.dumps(content, indent=2, allow_nan=False)
            write_file(args, path, text + "\n")
    if args.png is not None:
        write_file(args, args.png, draw_png(result))
    if args.json:
        print(json.dumps(report, indent=2, allow_nan=False))
    else:
        print_tuning(result, args.batch_size, sys.stdout)
    if not result.identical and report["numerics"] == "exact":
        print("the tokens differ from those of plain decoding", file=sys.stderr)
        return 1
    return 0


def _check(args: argparse.Namespace) -> None:
    from ..config.validate import check_float, check_int
    from ..errors import ConfigError

    if named_speculation(args) is not None:
        usage_error(args, "tune chooses the configuration itself: remove the flags of methods")
    check_int("--batch-size", args.batch_size, ConfigError, low=1, high=4096)
    check_int("--limit-draft-len", args.limit_draft_len, ConfigError, low=1, high=127)
    check_float("--max-seconds", args.max_seconds, ConfigError, above=0.0)
    outputs = {"--output-json": args.output_json, "--output": args.output, "--png": args.png}
    check_outputs(args, outputs, [args.input_file, args.step_cost])


def read_cost(path: str) -> dict[int, float]:
    """{rows: seconds} of a JSON file."""
    from ..config.validate import check_float, check_int
    from ..errors import ConfigError

    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8-sig"))
        pairs = {int(rows): seconds for rows, seconds in content.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f'--step-cost {path!r}: expected a JSON file such as {{"1": 0.02, "8": 0.03}} ({error})'
        ) from None
    table = {
        check_int(f"--step-cost {path!r}: rows", rows, ConfigError, low=1): check_float(
            f"--step-cost {path!r}: seconds of {rows} rows", seconds, ConfigError, above=0.0
        )
        for rows, seconds in pairs.items()
    }
    if 1 not in table or len(table) < 2:
        raise ConfigError(f"--step-cost {path!r}: at least two row counts are needed, 1 among them")
    return table


def _measure_cost(llm: Any) -> dict[int, float]:
    from ..engine.step_cost import measure_step_cost
    from ..errors import ConfigError

    rows, seconds = measure_step_cost(
        llm.model, num_pages=llm.memory.num_pages, page_size=llm.memory.tokens_per_block
    )
    if len(rows) < 2:
        raise ConfigError(
            "T(rows) could not be measured: the KV pages hold too few tokens; raise "
            "--max-tokens-in-paged-kv-cache, or give --step-cost"
        )
    return dict(zip(rows, seconds, strict=True))


def _progress(args: argparse.Namespace, names: tuple[str, ...]) -> Any:
    """What shows the search on a terminal; None elsewhere."""
    if args.disable_tqdm or not sys.stderr.isatty():
        return None

    def show(candidate: Any, count: int) -> None:
        point = ", ".join(f"{n}={v}" for n, v in zip(names, candidate.point, strict=True))
        print(f"{count:>3}  {point:<20} {candidate.speedup:.2f}x", file=sys.stderr)

    return show

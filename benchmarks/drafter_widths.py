"""What a drafter's network loses in fewer bits, and what its time is there.

The default model in bfloat16 with each shipped network, whose layers are kept in bfloat16, Q8_0 and
Q4_1 (drafters/packed_layer.py chooses one of the last two): tokens per pass of five sets, greedy,
with fixed drafts, and the seconds that drafting took of all.

    python -m benchmarks.drafter_widths [--threads N] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any
from unittest import mock

from benchmarks import common, datasets, runners
from benchmarks.never_slower import groups_of, open_program, params_of
from benchmarks.turns import take_turns

METHODS = ("redrafter", "medusa", "eagle3")
WIDTHS = {"bfloat16": None, "q8_0": "q8_0", "q4_1": "q4_1"}
# Where each method asks for the width.
ASKED_IN = {
    "redrafter": "specdec_ext.drafters.redrafter.packed_model.drafter_format",
    "medusa": "specdec_ext.drafters.medusa.open_heads.drafter_format",
    "eagle3": "specdec_ext.drafters.eagle3.packed_head.drafter_format",
}


def measure(method: str, format: str | None, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per pass by set, and seconds."""
    folder, tokenizer = runners.default_model(args.threads)
    length = args.prompt_tokens + args.tokens + 8
    config = {"method": method, "adaptive": False}
    with mock.patch(ASKED_IN[method], lambda target: format):
        program = open_program(folder, "bfloat16", config, 1, length)
    found = {}
    for name in args.sets:
        runs = [
            take_turns({"": program.run(group, params_of(args.tokens, 0.0))})[""]
            for group in groups_of(tokenizer, name, 1, args)
        ]
        found[name] = sum(run.decoded for run in runs) / sum(run.passes for run in runs)
    metrics = program.llm.get_metrics()
    width = common.width_of(program.llm.model)
    program.close()
    return {
        "dtype": width,
        "tokens_per_pass": found,
        "drafting_s": metrics["drafter"]["seconds"],
        "steps_s": metrics["time"]["step_s"],
        "network_bytes": metrics["drafter"]["memory_bytes"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4, help="of each set")
    parser.add_argument("--prompt-tokens", type=int, default=1200, help="of the longest prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--quick", action="store_true", help="one prompt of one set; no file")
    args = parser.parse_args()
    args.sets = list(datasets.SETS)
    if args.quick:
        args.sets, args.prompts, args.tokens = args.sets[:1], 1, 32
    common.set_threads(args.threads)
    environment = common.environment(args.threads)
    results = {
        method: {width: measure(method, format, args) for width, format in WIDTHS.items()}
        for method in METHODS
    }
    rows = [
        [
            method,
            width,
            f"{statistics.mean(one['tokens_per_pass'].values()):.3f}",
            f"{one['drafting_s']:.2f}",
            f"{one['network_bytes'] / 1e6:.1f}",
        ]
        for method, widths in results.items()
        for width, one in widths.items()
    ]
    head = ["method", "layers", "tokens per pass, mean of sets", "drafting, s", "network, MB"]
    table = common.markdown(head, rows)
    print(table)
    if not args.quick:
        content = {"benchmark": "drafter_widths", "environment": environment, "results": results}
        common.write_result("drafter_widths", content, [table])
    return 0


if __name__ == "__main__":
    sys.exit(main())

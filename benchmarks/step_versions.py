"""What does a step cost here, against the ordinary executor of commit cebcf29 in the same run?

Processor and wall time per step, of the whole call and outside the target's forward pass, for each
method alone and in a batch of 8, on a near-empty Llama and on one of 56M parameters (fp32, one
thread, greedy, fixed draft lengths, prompts of 64 tokens). Each round starts a process per
commit and gives every case to both, one after the other, in turned order. The ratio is taken within
a round; the median over the rounds must not exceed 1.03. Texts must be equal.

    python -m benchmarks.step_versions [--quick] [--rounds 7] [--base PYTHON]

`benchmarks.step_overhead` runs it too. The other commit is built below build/base on first use
(peers/base/environment.py); --base names the Python of an environment that has it already.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common, models
from benchmarks.peers.base import environment
from benchmarks.peers.base.side import Side

LIMIT = 1.03
ROUNDS = 7
PROMPT = 64
FIGURES = ("step_cpu_us", "host_cpu_us", "step_wall_us", "host_wall_us")
# Model -> tokens of each answer and calls of which the least counts.
SIZES = {"tiny": (192, 3), "56m": (32, 1)}
QUICK = {"tiny": (12, 1)}


def methods(name: str) -> dict[str, dict[str, Any] | None]:
    """Configurations in the dict form, which every version reads."""
    fixed = {"adaptive": False}
    return {
        "plain": None,
        "prompt lookup": {
            "method": "ngram", "max_draft_len": 10, "max_matching_ngram_size": 2, **fixed,
        },
        "lookahead": {
            "method": "lookahead", "max_window_size": 4, "max_ngram_size": 3,
            "max_verification_set_size": 4, **fixed,
        },
        "Medusa": {"method": "medusa", "model": str(models.make_medusa(name)),
                   "medusa_choices": "mc_sim_7b_63", **fixed},
        "ReDrafter": {"method": "redrafter", "model": str(models.make_redrafter(name)),
                      "num_beams": 5, "draft_len_per_beam": 5, **fixed},
        "draft-target": {"method": "draft_target", "model": str(models.make(f"{name}-draft")),
                         "max_draft_len": 4, **fixed},
    }  # fmt: skip


def cases(sizes: dict[str, tuple[int, int]]) -> Iterator[tuple[tuple[str, str, int], Any]]:
    """((model, method, batch), what the worker is told)"""
    for name, (tokens, repeats) in sizes.items():
        folder, vocab = str(models.make(name)), models.SHAPES[name].vocab
        for method, spec in methods(name).items():
            for batch in (1, 8):
                prompts = [models.random_prompt(vocab, PROMPT, seed) for seed in range(batch)]
                yield (name, method, batch), {
                    "model": folder, "spec": spec, "prompts": prompts, "tokens": tokens,
                    "repeats": repeats,
                }  # fmt: skip


def run_round(
    pythons: dict[str, Path], sizes: dict[str, tuple[int, int]], number: int
) -> dict[tuple[str, str, int], dict[str, dict[str, Any]]]:
    """Every case on both sides: {case: {"this": figures, "base": figures}}."""
    sides = {name: Side(python) for name, python in pythons.items()}
    packages = {side.about["package"] for side in sides.values()}
    if len(packages) < len({*pythons.values()}):
        raise SystemExit(f"both sides import the package of {packages.pop()}")
    order = list(sides)
    results = {}
    for i, (key, case) in enumerate(cases(sizes)):
        turned = order if (i + number) % 2 == 0 else order[::-1]
        results[key] = {name: sides[name].ask(case) for name in turned}
        if len({figures["digest"] for figures in results[key].values()}) > 1:
            raise SystemExit(f"{key}: the two commits' texts differ")
    for side in sides.values():
        side.close()
    return results


def summary(rounds: list[dict[Any, Any]]) -> list[dict[str, Any]]:
    """Per case: ratios and medians of the rounds, and every round."""
    table = []
    for model, method, batch in rounds[0]:
        runs = [result[model, method, batch] for result in rounds]
        row: dict[str, Any] = {"model": model, "method": method, "batch": batch}
        row["steps"] = {side: runs[0][side]["steps"] for side in ("this", "base")}
        row["tokens"] = runs[0]["this"]["tokens"]
        row["forward_clock"] = {side: runs[0][side]["forward_clock"] for side in ("this", "base")}
        for name in FIGURES:
            row[name] = {
                side: common.median([run[side][name] for run in runs]) for side in ("this", "base")
            }
            row[name]["ratio"] = common.spread(
                [run["this"][name] / run["base"][name] for run in runs]
            )
        row["rounds"] = [
            {side: {name: run[side][name] for name in FIGURES} for side in run} for run in runs
        ]
        table.append(row)
    return table


def table_of(rows: list[dict[str, Any]]) -> str:
    """Microseconds per step here and there, and the median ratios, held against the limit."""
    lines = []
    for row in rows:
        cells: list[Any] = [row["model"], f"{row['method']}, B = {row['batch']}"]
        cells.append("{this} / {base}".format(**row["steps"]))
        for name in FIGURES[:2]:
            cells += [f"{row[name]['this']:.0f} / {row[name]['base']:.0f}"]
            cells += [f"{row[name]['ratio']['median']:.3f}"]
        cells += [f"{row[name]['ratio']['median']:.3f}" for name in FIGURES[2:]]
        kept = all(row[name]["ratio"]["median"] <= LIMIT for name in FIGURES[:2])
        cells.append("yes" if kept else "no")
        lines.append(cells)
    header = [
        "model", "method", "steps", "us CPU per step", "ratio", "of them outside the model",
        "ratio", "wall, ratio", "outside, ratio", f"CPU <= {LIMIT}",
    ]  # fmt: skip
    return common.markdown(header, lines)


def run(base: Path | None, rounds: int, quick: bool) -> str:
    """Measure, write the result file (not with `quick`), return the table."""
    about = common.environment(1)
    pythons = {"this": Path(sys.executable), "base": base or environment.ready()}
    results = []
    for number in range(1 if quick else rounds):
        print(f"  step_versions round {number + 1}", file=sys.stderr, flush=True)
        results.append(run_round(pythons, QUICK if quick else SIZES, number))
    rows = summary(results)
    table = table_of(rows)
    if not quick:
        result = {
            "benchmark": "step_versions",
            "environment": about,
            "base_commit": environment.COMMIT,
            "dtype": "float32",
            "prompt_tokens": PROMPT,
            "adaptive": False,
            "limit": LIMIT,
            "results": rows,
        }
        common.write_result("step_versions", result, [table])
    return table


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base", type=Path, help=f"Python of an environment with {environment.COMMIT}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="1 round, 12 tokens, tiny; no file")
    add_options(parser)
    args = parser.parse_args()
    print(run(args.base, args.rounds, args.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""When do the shipped drafters pay? Every term of a step, measured.

A step of plain decoding takes F0 (the model) + H0 (everything else). One that drafts takes F for
its rows, D for making the drafts, H for everything else, and brings tau tokens. So decoding is
faster by tau / tau*, with the break-even point

    tau* = (F + D + H) / (F0 + H0)

tokens a step: drafting pays where tau is larger. Prompts are left out, but for what a draft model
takes to read them, which is in D. Each method with fixed numbers of drafts and as it is by default
(adaptive); greedy and at temperature 1. --eagle3 takes part with a head that is not shipped.

    python -m benchmarks.break_even [--quick] [--sets humaneval mtbench] [--eagle3 DIR]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common, datasets, runners
from benchmarks.model_drafters import TEMPERATURES, configs, make_parser, parse, write

# Drafts of a step; None: adaptive, the default.
LENGTHS: dict[str, tuple[int | None, ...]] = {
    "draft_target": (1, 2, 4, None),
    "medusa": (1, 2, 4, 10, None),
    "redrafter": (1, 2, 5, 25, None),
    "eagle3": (1, 2, 4, 8, None),  # 8: the most that its configuration has by default
}


@dataclass
class Terms:
    """Sums over the steps that decode, seconds."""

    tokens: int = 0
    steps: int = 0
    wall: float = 0.0
    model: float = 0.0
    drafting: float = 0.0

    def per_step(self) -> dict[str, float]:
        """Milliseconds a step, tokens a step."""
        each = 1e3 / self.steps
        return {
            "tau": self.tokens / self.steps,
            "model_ms": self.model * each,
            "draft_ms": self.drafting * each,
            "other_ms": (self.wall - self.model - self.drafting) * each,
            "step_ms": self.wall * each,
        }


def decode(llm: Any, prompts: list[list[int]], params: Any) -> Terms:
    """The prompts one after another, from their first tokens on."""
    sums = Terms()
    for ids in prompts:
        engine = llm.engine
        state = engine.submit(engine.resolve(ids, params))
        while not state.token_ids:
            engine.step()
        before = engine.get_metrics()
        first, start = len(state.token_ids), time.perf_counter()
        engine.run([state])
        sums.wall += time.perf_counter() - start
        after = engine.get_metrics()
        sums.tokens += len(state.token_ids) - first
        sums.steps += after["num_forward_passes"] - before["num_forward_passes"]
        sums.model += after["time"]["forward_s"] - before["time"]["forward_s"]
        sums.drafting += after["drafter"]["seconds"] - before["drafter"]["seconds"]
    return sums


def measure(folder: Any, tokenizer: Any, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Per set and temperature, per method and number of drafts: the median round of each term."""
    import specdec_ext

    drafters = configs(True)
    if args.eagle3 is not None:
        drafters["eagle3"] = specdec_ext.Eagle3DecodingConfig(args.eagle3)
    llms = {
        method: specdec_ext.LLM(
            folder,
            dtype=dtype,
            speculative_config=config,
            scheduler_config={"max_batch_size": 1, "max_seq_len": 1200 + args.tokens},
            kv_cache_config={"max_tokens": 4096},
        )
        for method, config in drafters.items()
    }

    def params(temperature: float, **more: Any) -> Any:
        return specdec_ext.SamplingParams(
            max_tokens=args.tokens,
            temperature=temperature,
            seed=runners.SEED if temperature else None,
            detokenize=False,
            **more,
        )

    figures: dict[str, Any] = {}
    for name in args.sets:
        prompts = [ids for _, ids in datasets.load_ids(tokenizer, name, args.prompts, 1200)]
        for llm in llms.values():  # calibrated, and its pages in memory
            decode(llm, prompts[:1], params(0.0))
        for temperature in TEMPERATURES:
            where = f"{name}, temperature {temperature:g}"
            figures[where] = {}
            for method, llm in llms.items():
                programs: dict[str, Any] = {
                    "plain": lambda llm=llm, t=temperature, p=prompts: decode(
                        llm, p, params(t, speculative=False)
                    )
                }
                for length in LENGTHS[method]:
                    how = {} if length is None else {"max_draft_len": length, "adaptive": False}
                    programs["adaptive" if length is None else str(length)] = (
                        lambda llm=llm, t=temperature, p=prompts, h=how: decode(
                            llm, p, params(t, **h)
                        )
                    )
                rounds = common.interleave(programs, args.rounds, f"{dtype} {where} {method}")
                figures[where][method] = {
                    key: {
                        term: common.median([run.per_step()[term] for run in runs])
                        for term in runs[0].per_step()
                    }
                    for key, runs in rounds.items()
                }
    for llm in llms.values():
        llm.close()
    return figures


def tables_of(figures: dict[str, Any]) -> list[str]:
    tables = []
    head = ["drafts", "tau", "model / plain's", "drafting", "other", "break-even tau*",
            "speed of decoding"]  # fmt: skip
    for where, methods in figures.items():
        rows: list[list[Any]] = []
        for method, programs in methods.items():
            plain = programs["plain"]
            whole = plain["step_ms"]
            for key, terms in programs.items():
                if key == "plain":
                    continue
                even = terms["step_ms"] / whole
                rows.append(
                    [
                        f"{method.replace('_', '-')}, {key}",
                        terms["tau"],
                        terms["model_ms"] / plain["model_ms"],
                        terms["draft_ms"] / whole,
                        (terms["other_ms"] - plain["other_ms"]) / whole,
                        even,
                        terms["tau"] / even,
                    ]
                )
        tables.append(common.markdown([where, *head[1:]], rows))
    return tables


def main() -> int:
    parser = make_parser(__doc__.splitlines()[0], tokens=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eagle3", metavar="DIR", help="the folder of a head, measured too")
    args = parse(parser)
    folder, tokenizer = runners.default_model(args.threads)
    environment = common.environment(args.threads)
    figures = measure(folder, tokenizer, args.dtype, args)
    tables = tables_of(figures)
    print("\n\n".join(tables), flush=True)
    drafters = "shipped" if args.eagle3 is None else f"shipped, and {Path(args.eagle3).name}"
    write("break_even", environment, args, {args.dtype: figures}, tables, drafters)
    return 0


if __name__ == "__main__":
    sys.exit(main())

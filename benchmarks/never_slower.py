"""Is the default ever slower than plain decoding, and several sources than the best of them?

`LLM()` against `LLM(speculative_config=None)`: five sets of prompts, B requests at once, greedy and
sampled, in bfloat16 and from the default model's Q4 file. Every group of B prompts is decoded by
all programs, which take turns step by step, so that whatever else the machine does meets all alike;
texts must be equal. A ratio is plain's time over the program's, of the steps that decode (`decode`)
and of all steps (`total`), in wall-clock time and in processor time, which other programs on the
machine change less.

    python -m benchmarks.never_slower [--sets ...] [--batches 1 8 32] [--temperatures 0 1]
        [--models bfloat16 q4] [--sources suffix suffix+medusa ...] [--rounds 5] [--tokens 128]

With --sources the programs are those instead of "auto", each an engine of its own: the sources of a
composite and the composite.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import common, datasets, runners

SEED = 1
SLOWEST = 0.98  # what a cell may not fall below
KINDS = ("decode", "total")


@dataclass
class Timed:
    """One program on one group of prompts: seconds of wall clock and of processor, by kind of step
    ("decode": no prompt was read; "total": all)."""

    wall: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    cpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    tokens: list[list[int]] = field(default_factory=list)
    passes: int = 0  # forward passes that decode, and the tokens that they brought
    decoded: int = 0
    rows: int = 0


class Program:
    """An engine of its own; every step is timed, those that read prompts apart."""

    def __init__(self, model: Any, dtype: str, config: Any, batch: int, length: int) -> None:
        from specdec_ext import LLM

        pages = {"max_tokens": batch * (length + 128)}
        scheduler = {"max_batch_size": batch, "max_seq_len": length}
        self.llm = LLM(
            model, dtype=dtype, kv_cache_config=pages, scheduler_config=scheduler,
            speculative_config=config,
        )  # fmt: skip
        self._reads_prompt = False
        forward = self.llm.model.forward

        def watched(plan: Any, *rest: Any) -> Any:
            self._reads_prompt = plan.num_prefill_rows > 0
            return forward(plan, *rest)

        self.llm.model.forward = watched

    def run(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float
    ) -> Generator[None, None, Timed]:
        """A step at a time, so that programs can take turns."""
        from specdec_ext import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=SEED if temperature else None,
            ignore_eos=True, detokenize=False,
        )  # fmt: skip
        engine, timed = self.llm.engine, Timed()
        states = [engine.submit(engine.resolve(list(prompt), params)) for prompt in prompts]
        while not all(state.finished for state in states):
            wall, cpu = time.perf_counter(), time.process_time()
            engine.step()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            for kind in KINDS if not self._reads_prompt else KINDS[1:]:
                timed.wall[kind] += wall
                timed.cpu[kind] += cpu
            timed.passes += not self._reads_prompt
            yield
        timed.tokens = [list(state.token_ids) for state in states]
        timed.decoded = sum(len(ids) - 1 for ids in timed.tokens)
        timed.rows = sum(s.counter.num_rows for s in states) - sum(map(len, prompts))
        return timed

    def close(self) -> None:
        self.llm.close()


def take_turns(runs: dict[str, Generator[None, None, Timed]]) -> dict[str, Timed]:
    """Runs all of them, each a step at a time: what else the machine does meets all alike."""
    results: dict[str, Timed] = {}
    while len(results) < len(runs):
        for name, run in runs.items():
            try:
                if name not in results:
                    next(run)
            except StopIteration as end:
                results[name] = end.value
    return results


def config_of(name: str) -> Any:
    """ "suffix+medusa" as a list of sources; the shipped networks."""
    from specdec_ext.models.default_drafter import default_drafter

    draft_target = {"method": "draft_target", "model": str(default_drafter())}
    known = {"draft_target": draft_target}
    sources = [known.get(source, source) for source in name.split("+")]
    return sources if len(sources) > 1 else sources[0]


def groups_of(tokenizer: Any, name: str, batch: int, args: argparse.Namespace) -> list[Any]:
    """Groups of B prompts, at least args.prompts of them in all; a set with fewer repeats some."""
    count = max(batch, args.prompts)
    ids = [ids for _, ids in datasets.load_ids(tokenizer, name, count, args.prompt_tokens)]
    if not ids:
        raise SystemExit(f"{name}: no prompt has at most {args.prompt_tokens} tokens")
    ids = [ids[i % len(ids)] for i in range(-(-count // batch) * batch)]
    return [ids[i : i + batch] for i in range(0, len(ids), batch)]


def cell_of(programs: dict[str, Program], groups: list[Any], temperature: float,
            args: argparse.Namespace, where: str) -> dict[str, Any]:  # fmt: skip
    """The ratios of a cell, round by round: sums over its groups, each decoded by all in turns."""
    rounds: list[dict[str, list[Timed]]] = []
    for turn in range(args.rounds):
        runs: dict[str, list[Timed]] = {name: [] for name in programs}
        for i, group in enumerate(groups):
            names = list(programs)[:: 1 if (turn + i) % 2 == 0 else -1]
            each = {name: programs[name].run(group, args.tokens, temperature) for name in names}
            for name, timed in take_turns(each).items():
                runs[name].append(timed)
            texts = [run[-1].tokens for run in runs.values()]
            if any(text != texts[0] for text in texts):
                raise SystemExit(f"{where}: a program's text is not plain decoding's")
        rounds.append(runs)
    result: dict[str, Any] = {}
    for name in programs:
        if name == "plain":
            continue
        ratios: dict[str, Any] = {}
        for clock in ("wall", "cpu"):
            for kind in KINDS:
                each = [
                    sum(getattr(r, clock)[kind] for r in runs["plain"])
                    / sum(getattr(r, clock)[kind] for r in runs[name])
                    for runs in rounds
                ]
                ratios[f"{clock} {kind}"] = common.spread(each)
        last = rounds[-1][name]
        batch = len(groups[0])
        ratios["tokens_per_pass"] = (
            sum(r.decoded for r in last) / batch / sum(r.passes for r in last)
        )
        ratios["rows_per_token"] = sum(r.rows for r in last) / sum(r.decoded for r in last)
        result[name] = ratios
        figures = ", ".join(f"{k} {v['median']:.3f}" for k, v in ratios.items() if " " in k)
        print(f"{where}, {name}: {figures}, {ratios['tokens_per_pass']:.2f} tokens per pass, "
              f"{ratios['rows_per_token']:.2f} rows per token", flush=True)  # fmt: skip
    return result


def table_of(cells: dict[str, dict[str, Any]], names: Sequence[str], clock: str) -> str:
    """The markdown: a line for each cell, the ratios of decoding and of all, by program."""
    header = ["cell", *(f"{name}, {kind}" for name in names for kind in KINDS)]
    rows = [
        [where, *(f"{cell[name][f'{clock} {kind}']['median']:.3f}"
                  for name in names for kind in KINDS)]
        for where, cell in cells.items()
    ]  # fmt: skip
    return f"Plain decoding's time over the program's, {clock} clock\n\n" + common.markdown(
        header, rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sets", nargs="+", default=list(datasets.SETS), choices=datasets.SETS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--models", nargs="+", default=["bfloat16", "q4"])
    parser.add_argument("--sources", nargs="+", help='in place of "auto", joined by +')
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a cell, at least B")
    parser.add_argument("--prompt-tokens", type=int, default=1200, help="of the longest prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", action="store_true", help="say that others use the machine")
    parser.add_argument("--quick", action="store_true", help="one small cell; no file")
    args = parser.parse_args()
    if args.quick:
        args.sets, args.batches, args.temperatures = args.sets[:1], [1], [0.0]
        args.models, args.prompts, args.tokens, args.rounds = ["bfloat16"], 1, 16, 1

    from specdec_ext.models.default import find_default_gguf

    folder, tokenizer = runners.default_model(args.threads)
    models = {"bfloat16": (folder, "bfloat16"), "q4": (find_default_gguf(), "auto")}
    environment = common.environment(args.threads)
    names = args.sources or ["auto"]
    cells: dict[str, dict[str, Any]] = {}
    length = args.prompt_tokens + args.tokens + 8
    for model in args.models:
        path, dtype = models[model]
        for batch in args.batches:
            configs = {"plain": None, **{name: config_of(name) for name in names}}
            programs = {
                name: Program(path, dtype, config, batch, length)
                for name, config in configs.items()
            }
            for program in programs.values():  # page faults, T(rows), tables
                take_turns({"": program.run([[1, 2, 3, 4, 5, 6, 7, 8] * 4] * batch, 24, 0.0)})
            for name in args.sets:
                groups = groups_of(tokenizer, name, batch, args)
                for temperature in args.temperatures:
                    where = f"{model}, B = {batch}, {name}, temperature {temperature:g}"
                    cells[where] = cell_of(programs, groups, temperature, args, where)
            for program in programs.values():
                program.close()
    tables = [table_of(cells, names, clock) for clock in ("wall", "cpu")]
    print("\n\n".join(tables))
    worst = {
        (clock, kind): min(
            (cell[name][f"{clock} {kind}"]["median"], where)
            for where, cell in cells.items() for name in names
        )
        for clock in ("wall", "cpu") for kind in KINDS
    }  # fmt: skip
    for (clock, kind), (ratio, where) in worst.items():
        print(f"worst by {clock} clock, {kind}: {ratio:.3f} ({where}); limit {SLOWEST}")
    if not args.quick:
        result = {
            "benchmark": "never_slower",
            "environment": environment,
            "machine": "busy: others computed on it" if args.busy else "quiet",
            "programs": names,
            "prompts": args.prompts,
            "prompt_tokens": args.prompt_tokens,
            "max_tokens": args.tokens,
            "rounds": args.rounds,
            "results": cells,
        }
        common.write_result("never_slower", result, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Is the default ever slower than plain decoding, and several sources than the best of them?

`LLM()` against `LLM(speculative_config=None)`: five sets of prompts, B requests at once, greedy and
sampled, in bfloat16 and from the default model's Q4 file. Every group of B prompts is decoded by
all programs, which take turns step by step, so that whatever else the machine does meets all alike;
texts must be equal. A ratio is plain's time over the program's: of the steps that decode
(`decode`), of all steps until the last request ends (`total`), and of a request from its submission
to its end, the mean over all (`request`). Drafts make some requests of a group end before others,
which `total` sees only where the last one is among them. It is taken in wall-clock time and in
processor time, which other programs on the machine change less.

    python -m benchmarks.never_slower [--sets ...] [--batches 1 8 32] [--temperatures 0 1]
        [--models bfloat16 q4] [--sources suffix suffix+medusa ...] [--rounds 5] [--tokens 128]
        [--cells 'q4:8:*:0' ...] [--minutes 5]

All cells take hours. `--cells` names some of them by model:B:set:temperature, where * and ? stand
for anything; `--minutes` ends a call in time, and the same command goes on with the rounds that are
missing (parts.py). Each B has a result file of its own (never_slower, never_slower_8, ...), with
every cell that was measured at this commit with these settings.

With --sources the programs are those instead of "auto", each an engine of its own: the sources of a
composite and the composite, which is also compared with the faster of its members in each round
(`of best`). The result files are then called sources, sources_8, ...
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import common, datasets, parts, runners
from benchmarks.parts import Parts
from benchmarks.turns import CLOCKS, KINDS, Program, Timed, take_turns

SEED = 1
SLOWEST = 0.98  # what a cell may not fall below
Cell = tuple[str, int, str, float]  # model, B, set, temperature


def open_program(model: Any, dtype: str, config: Any, batch: int, length: int) -> Program:
    """An engine for `batch` requests of `length` tokens."""
    from specdec_ext import LLM

    pages = {"max_tokens": batch * (length + 128)}
    scheduler = {"max_batch_size": batch, "max_seq_len": length}
    llm = LLM(
        model, dtype=dtype, kv_cache_config=pages, scheduler_config=scheduler,
        speculative_config=config,
    )  # fmt: skip
    return Program(llm)


def params_of(max_tokens: int, temperature: float) -> Any:
    """Answers of this length."""
    from specdec_ext import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=SEED if temperature else None,
        ignore_eos=True, detokenize=False,
    )  # fmt: skip


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


def round_of(programs: dict[str, Program], groups: list[Any], temperature: float,
             args: argparse.Namespace, turn: int) -> dict[str, dict[str, float]]:  # fmt: skip
    """A cell's ratios, sums over its groups, each decoded by all programs in turns."""
    runs: dict[str, list[Timed]] = {name: [] for name in programs}
    params = params_of(args.tokens, temperature)
    for i, group in enumerate(groups):
        names = list(programs)[:: 1 if (turn + i) % 2 == 0 else -1]
        each = {name: programs[name].run(group, params) for name in names}
        for name, timed in take_turns(each).items():
            runs[name].append(timed)
        texts = [run[-1].tokens for run in runs.values()]
        if any(text != texts[0] for text in texts):
            raise SystemExit("a program's text is not plain decoding's")
    result: dict[str, dict[str, float]] = {}
    for name, mine in runs.items():
        if name == "plain":
            continue
        ratios = {
            f"{clock} {kind}": sum(getattr(r, clock)[kind] for r in runs["plain"])
            / sum(getattr(r, clock)[kind] for r in mine)
            for clock in CLOCKS for kind in KINDS
        }  # fmt: skip
        decoded = sum(r.decoded for r in mine)
        ratios["tokens_per_pass"] = decoded / len(groups[0]) / sum(r.passes for r in mine)
        ratios["rows_per_token"] = sum(r.rows for r in mine) / decoded
        result[name] = ratios
    for name, ratios in result.items():
        members = [result[member] for member in name.split("+") if member in result]
        if len(members) < 2:
            continue
        for clock, kind in itertools.product(CLOCKS, KINDS):
            best = max(member[f"{clock} {kind}"] for member in members)
            ratios[f"{clock} {kind} of best"] = ratios[f"{clock} {kind}"] / best
    return result


def cell_of(rounds: list[dict[str, dict[str, float]]], where: str) -> dict[str, Any]:
    """Median, least and most of a cell's rounds, by program."""
    result: dict[str, Any] = {}
    for name, last in rounds[-1].items():
        result[name] = ratios = {
            what: common.spread([each[name][what] for each in rounds]) if " " in what else value
            for what, value in last.items()
        }
        figures = ", ".join(f"{k} {v['median']:.3f}" for k, v in ratios.items() if " " in k)
        print(f"{where}, {name}: {figures}, {ratios['tokens_per_pass']:.2f} tokens per pass, "
              f"{ratios['rows_per_token']:.2f} rows per token", flush=True)  # fmt: skip
    return result


def all_cells(args: argparse.Namespace) -> list[Cell]:
    """Those of one engine together."""
    return list(itertools.product(args.models, args.batches, args.sets, args.temperatures))


def chosen_cells(args: argparse.Namespace) -> list[Cell]:
    """Those of all_cells() that --cells names."""
    cells = all_cells(args)
    names = [f"{model}:{batch}:{name}:{t:g}" for model, batch, name, t in cells]
    patterns = args.cells or ["*"]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SystemExit(f"--cells {pattern}: none of {names[0]}, ..., {names[-1]}")
    return [
        cell
        for cell, name in zip(cells, names, strict=True)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def words_of(cell: Cell) -> str:
    model, batch, name, temperature = cell
    return f"{model}, B = {batch}, {name}, temperature {temperature:g}"


def measure(
    cells: list[Cell], names: Sequence[str], parts: Parts, args: argparse.Namespace
) -> None:
    """The rounds that are missing, as many as there is time for."""
    from specdec_ext.models.default import find_default_gguf

    folder, tokenizer = runners.default_model(args.threads)
    models = {"bfloat16": (folder, "bfloat16"), "q4": (find_default_gguf(), "auto")}
    length = args.prompt_tokens + args.tokens + 8
    missing = [
        (cell, turn)
        for cell in cells for turn in range(args.rounds)
        if parts.get(f"{words_of(cell)}, round {turn}") is None
    ]  # fmt: skip
    for (model, batch), pieces in itertools.groupby(missing, lambda piece: piece[0][:2]):
        if not parts.begin():
            return
        path, dtype = models[model]
        configs = {"plain": None, **{name: config_of(name) for name in names}}
        programs = {
            name: open_program(path, dtype, config, batch, length)
            for name, config in configs.items()
        }
        for program in programs.values():  # page faults, T(rows), tables
            warm = program.run([[1, 2, 3, 4, 5, 6, 7, 8] * 4] * batch, params_of(24, 0.0))
            take_turns({"": warm})
        for cell, turn in pieces:
            groups = groups_of(tokenizer, cell[2], batch, args)
            if not parts.begin():
                return
            figures = round_of(programs, groups, cell[3], args, turn)
            parts.put(f"{words_of(cell)}, round {turn}", figures)
        for program in programs.values():
            program.close()


def table_of(cells: dict[str, dict[str, Any]], names: Sequence[str], clock: str) -> str:
    """The markdown: a line for each cell, the ratios of decoding and of all, by program."""
    first = next(iter(cells.values()))
    columns = [
        (name, what.removeprefix(f"{clock} "))
        for name in names for what in first[name] if what.startswith(clock)
    ]  # fmt: skip
    header = ["cell", *(f"{name}, {kind}" for name, kind in columns)]
    rows = [
        [where, *(f"{cell[name][f'{clock} {kind}']['median']:.3f}" for name, kind in columns)]
        for where, cell in cells.items()
    ]
    return f"Plain decoding's time over the program's, {clock} clock\n\n" + common.markdown(
        header, rows
    )


def write_results(
    cells: dict[str, Any], loads: dict[str, list[float]], names: list[str], result: dict[str, Any]
) -> None:
    """A file for each B.

    loads  behind each cell's rounds: near 1 says that a thread was missing
    """
    batch_of = {where: where.split(", ")[1].removeprefix("B = ") for where in cells}
    family = "never_slower" if names == ["auto"] else "sources"
    for batch in dict.fromkeys(batch_of.values()):
        mine = {where: cell for where, cell in cells.items() if batch_of[where] == batch}
        benchmark = family if batch == "1" else f"{family}_{batch}"
        tables = [table_of(mine, names, clock) for clock in CLOCKS]
        behind = [load for where in mine for load in loads[where]]
        content = {"benchmark": benchmark, **result, "load_behind_rounds": behind, "results": mine}
        common.write_result(benchmark, content, tables)


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
    parser.add_argument("--cells", nargs="+", metavar="PATTERN", help="only these, as q4:8:*:0")
    parts.add_options(parser)
    parser.add_argument("--busy", action="store_true", help="say that others use the machine")
    parser.add_argument("--quick", action="store_true", help="one small cell; no file")
    args = parser.parse_args()
    if args.quick:
        args.sets, args.batches, args.temperatures = args.sets[:1], [1], [0.0]
        args.models, args.prompts, args.tokens, args.rounds = ["bfloat16"], 1, 16, 1

    common.set_threads(args.threads)
    environment = common.environment(args.threads)
    names = args.sources or ["auto"]
    chosen = chosen_cells(args)
    settings = {
        name: getattr(args, name) for name in ("prompts", "prompt_tokens", "tokens", "threads")
    }
    kept = Parts("never_slower", {**settings, "programs": names}, args.minutes)
    measure(chosen, names, kept, args)
    cells, loads, missing = {}, {}, 0
    for cell in all_cells(args):  # of earlier calls, too
        rounds = [kept.get(f"{words_of(cell)}, round {turn}") for turn in range(args.rounds)]
        measured = [figures for figures in rounds if figures is not None]
        missing += len(rounds) - len(measured) if cell in chosen else 0
        if measured:
            cells[words_of(cell)] = cell_of(measured, words_of(cell))
            loads[words_of(cell)] = [
                kept.load_behind(f"{words_of(cell)}, round {turn}")
                for turn, figures in enumerate(rounds) if figures is not None
            ]  # fmt: skip
    if missing:
        print(f"{missing} rounds are missing: the same command goes on with them")
    if not cells:
        return 0
    tables = [table_of(cells, names, clock) for clock in CLOCKS]
    print("\n\n".join(tables))
    worst = {
        (clock, kind): min(
            (cell[name][f"{clock} {kind}"]["median"], where)
            for where, cell in cells.items() for name in names
        )
        for clock in CLOCKS for kind in KINDS
    }  # fmt: skip
    for (clock, kind), (ratio, where) in worst.items():
        print(f"worst by {clock} clock, {kind}: {ratio:.3f} ({where}); limit {SLOWEST}")
    if not args.quick:
        result = {
            "environment": environment,
            "machine": "busy: others computed on it" if args.busy else "quiet",
            "programs": names,
            "prompts": args.prompts,
            "prompt_tokens": args.prompt_tokens,
            "max_tokens": args.tokens,
            "rounds": args.rounds,
        }
        write_results(cells, loads, names, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

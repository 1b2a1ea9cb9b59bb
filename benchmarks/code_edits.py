"""Editing code with the old text as `prediction`, against plain decoding and suffix decoding.

The default model answers the tasks of code_edit_cases.py, greedy. The programs, each an engine of
its own, take turns step by step. Texts have to be those of plain decoding. Cases differ in how much
of the plain answer lies in the prediction: the share of its tokens in common runs of three and
more, in order. Also a prediction that has nothing to do with the answer, and suffix decoding where
the prompt does not hold the code.

Beside them stands a ceiling: how much faster than plain decoding one would be who knew the answer,
drafted whatever of it stands somewhere in the prediction, and nothing else, by T(rows) as measured
at the start. No prediction reaches it: where an answer goes on after an edit is not known.

    python -m benchmarks.code_edits [--quick] [--threads N] [--rounds N] [--minutes M] [--dtype D]

All cases take half an hour. `--minutes` ends a call in time; the same command goes on with the
cases that are missing (parts.py), and a result file is written when none is.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import common
from benchmarks.code_edit_cases import CodeEdit, code_edits, digest
from benchmarks.parts import Parts, add_options
from benchmarks.turns import Program, Steps, Timed, take_turns

ENGINES: dict[str, Any] = {"plain": None, "suffix": {"method": "suffix"}}
# Program -> (engine, whose text is the prediction, the prompt holds the code)
PROGRAMS: dict[str, tuple[str, str | None, bool]] = {
    "plain": ("plain", None, True),
    "prediction": ("plain", "own", True),
    "prediction and suffix": ("suffix", "own", True),
    "suffix": ("suffix", None, True),
    "useless prediction": ("plain", "other", True),
    "plain, code not in the prompt": ("plain", None, False),
    "suffix, code not in the prompt": ("suffix", None, False),
}
PREDICTING = ("prediction", "prediction and suffix", "useless prediction")
SHARE = 0.8  # of the answer, from which on a prediction is held to be good
USELESS = "Seven grey herons crossed the estuary before dawn; nobody had counted them until then. "
MAX_TOKENS = 320
MAX_STEP_ROWS = 128


def share_of(answer: Sequence[int], prediction: Sequence[int]) -> float:
    """The share of the answer's tokens in common runs of at least three."""
    matcher = difflib.SequenceMatcher(None, list(answer), list(prediction), autojunk=False)
    runs = [block.size for block in matcher.get_matching_blocks() if block.size >= 3]
    return sum(runs) / max(len(answer), 1)


def ceiling(
    answer: Sequence[int], prediction: Sequence[int], seconds: Callable[[int], float]
) -> float:
    """Plain decoding's time over the least one behind the first token in which steps can decide
    the answer, where drafts are consecutive tokens of the prediction and all of them right.

    seconds  of a step with so many rows
    """
    longest = [0] * (len(answer) + 1)  # of what stands at a place, in the prediction
    after = [0] * (len(prediction) + 1)
    for i in reversed(range(len(answer))):
        equal = [0] * (len(prediction) + 1)
        for j in reversed(range(len(prediction))):
            equal[j] = after[j + 1] + 1 if answer[i] == prediction[j] else 0
        longest[i], after = max(equal), equal
    least = [0.0] * (len(answer) + 1)
    for i in reversed(range(len(answer))):
        # A step brings a token besides its drafts.
        most = min(longest[i], len(answer) - i - 1, MAX_STEP_ROWS - 1)
        least[i] = min(seconds(1 + k) + least[i + 1 + k] for k in range(most + 1))
    if len(answer) < 2:
        return 1.0
    return (len(answer) - 1) * seconds(1) / least[1]


def begin(
    program: Program, edit: CodeEdit, predicted: str | None, with_code: bool, most: int
) -> Steps:
    """One answer, step by step."""
    from specdec_ext import SamplingParams

    texts = {None: None, "own": edit.source, "other": USELESS * (len(edit.source) // 80)}
    params = SamplingParams(max_tokens=most, prediction=texts[predicted])
    content = edit.message if with_code else f"{edit.task} Answer with the whole code only."
    llm = program.llm
    _, ids = llm.prompts.read_chat([{"role": "user", "content": content}])
    return program.run([ids], params)


def figures_of(timed: Timed) -> dict[str, Any]:
    """Speeds behind the first token, by both clocks, and over the whole answer."""
    [tokens] = timed.tokens
    return {
        "tokens": tokens,
        "tokens_per_s": timed.decoded / max(timed.wall["decode"], 1e-9),
        "tokens_per_cpu_s": timed.decoded / max(timed.cpu["decode"], 1e-9),
        "with_prompt_per_s": len(tokens) / timed.wall["total"],
        "tokens_per_pass": timed.decoded / max(timed.passes, 1),
        "rows_per_pass": timed.rows / max(timed.passes, 1),
    }


def measure(
    programs: dict[str, Program], edits: dict[int, CodeEdit], rounds: int, most: int, parts: Parts
) -> list[Any]:
    """Per case: what each program gave, round by round, and how predictable the answer is. None of
    a case that there was no time for."""
    llm = programs["plain"].llm
    cost = llm.measure_step_cost()
    for number, edit in edits.items():
        if parts.get(str(number)) is not None:
            continue
        if not parts.begin():
            break
        given: dict[str, list[Any]] = {name: [] for name in programs}
        for turn in range(rounds):
            names = list(programs)[:: 1 if turn % 2 == 0 else -1]
            runs = {name: begin(programs[name], edit, *PROGRAMS[name][1:], most) for name in names}
            for name, timed in take_turns(runs).items():
                given[name].append(figures_of(timed))
        for name, results in given.items():
            same = "plain" if PROGRAMS[name][2] else "plain, code not in the prompt"
            if any(result["tokens"] != given[same][0]["tokens"] for result in results):
                raise SystemExit(f"case {number}, {name}: the text is not plain decoding's")
        answer = given["plain"][0]["tokens"]
        code = llm.tokenizer.encode(edit.source, add_special_tokens=False)
        figures = {
            "kind": edit.kind, "name": edit.name, "answer_tokens": len(answer),
            "share": share_of(answer, code), "ceiling": ceiling(answer, code, cost),
            "programs": given,
        }  # fmt: skip
        parts.put(str(number), figures)
    return [parts.get(str(number)) for number in edits]


def ratio(case: Any, program: str, base: str, what: str = "tokens_per_s") -> float:
    """Median over rounds of the speeds' ratio inside a round."""
    pairs = zip(case["programs"][program], case["programs"][base], strict=True)
    return common.median([a[what] / b[what] for a, b in pairs])


def tables_of(cases: list[Any]) -> tuple[list[str], dict[str, Any]]:
    """For people, and the same figures over the cases that are predictable and the others."""
    header = [
        "case", "answer", "share", "plain tok/s", *(f"{p}, of plain" for p in PREDICTING),
        "suffix, of plain", "ceiling, of plain", "rows per pass, with suffix",
    ]  # fmt: skip
    rows = [
        [
            f"{case['kind']} {case['name']}", case["answer_tokens"], case["share"],
            common.median([r["tokens_per_s"] for r in case["programs"]["plain"]]),
            *(ratio(case, p, "plain") for p in (*PREDICTING, "suffix")), case["ceiling"],
            case["programs"]["prediction and suffix"][0]["rows_per_pass"],
        ]
        for case in cases
    ]  # fmt: skip
    without = "suffix, code not in the prompt"
    columns = {
        "of plain": ("prediction", "plain", "tokens_per_s"),
        "of plain, prompt counted": ("prediction", "plain", "with_prompt_per_s"),
        "beside suffix, of plain": ("prediction and suffix", "plain", "tokens_per_s"),
        "of suffix": ("prediction", "suffix", "tokens_per_s"),
        "beside suffix, of suffix": ("prediction and suffix", "suffix", "tokens_per_s"),
        "of suffix without the code": ("prediction", without, "tokens_per_s"),
        "tokens per pass, of plain": ("prediction", "plain", "tokens_per_pass"),
        "useless, of plain": ("useless prediction", "plain", "tokens_per_s"),
        "useless, of plain, processor time": ("useless prediction", "plain", "tokens_per_cpu_s"),
    }
    groups = {
        f"{SHARE:.0%} and more in the prediction": [c for c in cases if c["share"] >= SHARE],
        "less": [c for c in cases if c["share"] < SHARE],
    }
    summary: dict[str, Any] = {}
    for name, group in groups.items():
        values = {c: [ratio(case, *how) for case in group] for c, how in columns.items()}
        values["ceiling, of plain"] = [case["ceiling"] for case in group]
        summary[name] = {c: common.spread(v) if v else None for c, v in values.items()}
        summary[name]["cases"] = len(group)

    tables = [
        common.markdown(header, rows),
        "Speed with the prediction, median over the cases (least):\n\n" + summary_table(summary),
    ]
    return tables, summary


def summary_table(summary: dict[str, Any]) -> str:
    """Markdown of what `tables_of` sums up: medians over the cases, in brackets the least."""

    def cell(values: dict[str, float] | None) -> str:
        return f"{values['median']:.2f} ({values['min']:.2f})" if values else "-"

    shown = [column for column in next(iter(summary.values())) if column != "cases"]
    lines = [
        [name, about["cases"], *(cell(about[column]) for column in shown)]
        for name, about in summary.items()
    ]
    return common.markdown(["answer", "cases", *shown], lines)


def main() -> int:
    from specdec_ext import LLM

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three cases, one round; no file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", help="of the weights, as LLM(dtype=...); default: Q4_1")
    add_options(parser)
    parser.add_argument("--cases", type=int, nargs="*", metavar="N", help="only these; no file")
    args = parser.parse_args()
    common.set_threads(args.threads)
    environment = common.environment(args.threads)
    edits = code_edits()
    chosen = args.cases or (range(0, len(edits), 7) if args.quick else range(len(edits)))
    width: Any = {} if args.dtype is None else {"dtype": args.dtype}
    options: dict[str, Any] = {"scheduler_config": {"max_seq_len": 2048}, **width}
    options["kv_cache_config"] = {"max_tokens": 2048 + 128}
    programs = {
        name: Program(LLM(speculative_config=ENGINES[engine], **options))
        for name, (engine, *_) in PROGRAMS.items()
    }
    rounds, most = (1, 64) if args.quick else (args.rounds, MAX_TOKENS)
    for program in programs.values():  # warm: pages, T(rows)
        take_turns({"": begin(program, edits[0], "own", True, 16)})
    settings = {
        "cases": digest(edits), "rounds": rounds, "tokens": most, "threads": args.threads,
        "width": common.width_of(programs["plain"].llm.model),
    }  # fmt: skip
    parts = Parts("code_edits", settings, args.minutes)
    found = measure(programs, {i: edits[i] for i in chosen}, rounds, most, parts)
    cases = [case for case in found if case is not None]
    if len(cases) < len(found):
        print(f"{len(found) - len(cases)} cases are missing: the same command goes on with them")
        if not cases:
            return 0
    tables, summary = tables_of(cases)
    tables.append(
        f"Load of the machine at the start: {environment['load_average_start'][0]} on "
        f"{environment['cores']} cores, at the end {common.load_average()[0]}."
    )
    print("\n\n".join(tables))
    if not args.quick and not args.cases and len(cases) == len(edits):
        for times in (run for case in cases for runs in case["programs"].values() for run in runs):
            times["tokens"] = len(times["tokens"])  # they were compared
        result = {
            "benchmark": "code_edits", "environment": environment, "cases_sha256": digest(edits),
            "width": settings["width"], "summary": summary, "cases": cases,
        }  # fmt: skip
        name = "code_edits" if args.dtype is None else f"code_edits_{args.dtype}"
        common.write_result(name, result, tables)
    for program in programs.values():
        program.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

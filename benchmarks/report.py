"""Turns the newest result file of every benchmark into tables: all of them in docs/results.md,
and in the README those that say whether it is faster, and than what.

python -m benchmarks.report            prints all of them
python -m benchmarks.report --write    puts them between the results markers of both files
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import (
    code_edits,
    common,
    model_drafters,
    peers_cpu_tables,
    report_brief,
    sampling_rows,
    serve_tables,
    step_cost,
)

Result = report_brief.Result
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
SETS = ("humaneval", "mtbench", "gsm8k", "squad", "news")


def results_of(name: str) -> list[Result]:
    """Returns a benchmark's result files, the newest first by the date inside them."""
    found = [(path, json.loads(path.read_text())) for path in common.RESULTS.glob(f"{name}-*.json")]
    return sorted(found, key=lambda item: item[1]["environment"]["date"], reverse=True)


def processor(result: dict[str, Any]) -> str:
    """Its name, which may be that of several generations, and the instruction sets used."""
    env = result["environment"]
    isa = env.get("build", {}).get("cpu_isa")
    return f"{env['cpu']} with {isa}" if isa else str(env["cpu"])


def caption(path: Path, result: dict[str, Any], title: str, folder: str) -> str:
    """Title, machine and source. folder: of the result files, as the page's links name it."""
    env = result["environment"]
    start, end = env["load_average_start"][0], env["load_average_end"][0]
    if behind := result.get("load_behind_rounds"):  # the last call of several may measure nothing
        start, end = min(behind), max(behind)
    prompts = (
        f"{result['prompts_per_set']} prompts per set, " if "prompts_per_set" in result else ""
    )
    return (
        f"**{title}** ({prompts}{processor(result)}, {env['threads']} of {env['cores']} cores, "
        f"{env['date'][:10]}, "
        f"load {start:.1f} to {end:.1f}; [{path.stem}]({folder}/{path.name}))"
    )


def acceptance(result: dict[str, Any]) -> str:
    sets = [s for s in SETS if s in next(iter(result["results"].values()))]
    rows = [
        [method, *(figures[s]["tokens_per_forward"] for s in sets)]
        for method, figures in result["results"].items()
    ]
    return common.markdown(["tokens per forward pass", *sets], rows)


def end_to_end(result: dict[str, Any]) -> str:
    tables = []
    for dtype, figures in result["results"].items():
        sets = [s for s in SETS if s in figures]
        names = list(figures[sets[0]]["ratios"])
        rows: list[list[Any]] = [
            [name, *(figures[s]["ratios"][name]["total"]["median"] for s in sets)] for name in names
        ]
        table = common.markdown([f"{dtype}: speed ratio", *sets], rows)
        batch = next(key for key in figures if key.startswith("batch "))
        lines = [
            f"{batch.capitalize()}, {name}: {ratio['median']:.2f}"
            for name, ratio in figures[batch]["ratios"].items()
        ]
        tables.append(table + "\n\n" + "; ".join(lines) + ".")
    return "\n\n".join(tables)


def step_overhead(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            r["ours"]["step_overhead_us"],
            r["ours"]["call_overhead_us"],
            r["peer"]["call_overhead_us"],
            r["tokens_per_second_ratio"]["median"],
        ]
        for name, r in result["results"].items()
    ]
    header = ["model", "us per step outside the model", "whole call", "transformers, whole call"]
    return common.markdown([*header, "tokens/s ratio"], rows)


def lookahead_vs_lade(result: dict[str, Any]) -> str:
    rows = [
        [name, r["ratio"]["median"], r["steps"]["ours"], r["steps"]["lade"]]
        for name, r in result["results"].items()
    ]
    return common.markdown(["model", "tokens/s, ours / lade", "steps", "steps of lade"], rows)


def draft_lookup(result: dict[str, Any]) -> str:
    rows = [
        [length, r["us_per_request"], r["transformers_us"]]
        for length, r in result["results"].items()
    ]
    return common.markdown(["tokens of history", "us per request", "transformers, us"], rows)


def drafters(result: dict[str, Any]) -> str:
    tables = (
        model_drafters.table_of(d, cells, rates=False) for d, cells in result["results"].items()
    )
    return "\n\n".join(tables)


def peers_cpu(result: dict[str, Any]) -> str:
    return "\n\n".join(peers_cpu_tables.tables_of(result))


def never_slower(result: dict[str, Any]) -> str:
    """One line for each width, batch and temperature: decoding alone / prompts included / a request
    from its submission to its end, where that was measured."""
    lines: dict[str, dict[str, str]] = {}
    for name, programs in result["results"].items():
        *batch, data, temperature = name.split(", ")
        auto, kinds = programs["auto"], ("decode", "total", "request")
        wall = [auto[f"wall {kind}"]["median"] for kind in kinds if f"wall {kind}" in auto]
        line = lines.setdefault(", ".join([*batch, temperature]), {})
        line[data] = " / ".join(f"{ratio:.2f}" for ratio in wall)
    rows = [[name, *(line.get(data, "") for data in SETS)] for name, line in sorted(lines.items())]
    return common.markdown(["decode / with prompts / a request", *SETS], rows)


def sources(result: dict[str, Any]) -> str:
    """Decoding alone, greedy: a line for each width and program; for a composite one more, with
    what it has of the faster of its members."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for name, programs in result["results"].items():
        width, _, data, temperature = name.split(", ")
        if temperature != "temperature 0":
            continue
        for program, figures in programs.items():
            for what, title in (("wall decode", ""), ("wall decode of best", " / its best member")):
                if what in figures:
                    line = lines.setdefault((width, program + title), {})
                    line[data] = f"{figures[what]['median']:.2f}"
    rows = [[*key, *(line.get(data, "") for data in SETS)] for key, line in sorted(lines.items())]
    return common.markdown(["width", "sources", *SETS], rows)


def edits(result: dict[str, Any]) -> str:
    return code_edits.summary_table(result["summary"])


def serve_peers(result: dict[str, Any]) -> str:
    return "\n\n".join(
        [serve_tables.peers_headline(result["rows"]), serve_tables.peers(result["rows"])]
    )


def serve_latency(result: dict[str, Any]) -> str:
    return serve_tables.latency(result["rows"])


SECTIONS = {
    "peers_cpu": ("Against other programs on this CPU, tokens per second", peers_cpu),
    "never_slower": (
        'Plain decoding\'s time over that of `speculative_config="auto"`, the default',
        never_slower,
    ),
    "never_slower_8": ("The same of 8 requests at once", never_slower),
    "never_slower_32": ("The same of 32 requests at once", never_slower),
    "sources": ("Sources alone and together, one request, greedy: plain decoding's time", sources),
    "code_edits": ("Code edits, the code as predicted output: median over cases (least)", edits),
    "code_edits_bfloat16": ("The same in bfloat16", edits),
    "serve_peers": (
        "The server with the default against itself without speculation and llama.cpp's server, "
        "the same file, under AIPerf's load",
        serve_peers,
    ),
    "serve_latency": (
        "How much later than the engine a client of the server has a token (without speculation)",
        serve_latency,
    ),
    "acceptance": ("Tokens per forward pass, fixed draft lengths", acceptance),
    "end_to_end": (
        "Speed on the default model in float32 and bfloat16 "
        "(`LLM()` alone runs its 4-bit file), adaptive draft lengths",
        end_to_end,
    ),
    "model_drafters": ("The shipped drafters, adaptive unless all drafts are said", drafters),
    "step_cost": ("Cost of rows", lambda result: step_cost.table_of(result["results"])),
    "step_overhead": ("Time of a step outside the model", step_overhead),
    "lookahead_vs_lade": ("Lookahead (7,7,7) against lade", lookahead_vs_lade),
    "draft_lookup": ("Drafting by prompt lookup, batch 32", draft_lookup),
    "sampling_rows": ("Drawing a token from a row of scores, one thread", sampling_rows.table_of),
}


# A call of these may measure some cells alone: what the newest file lacks is an earlier one's.
BY_CELL = ("never_slower", "never_slower_8", "never_slower_32")
# These are shown for every processor that they were measured on.
BY_PROCESSOR = ("peers_cpu", *BY_CELL, "code_edits", "code_edits_bfloat16")


def results_page(folder: str) -> str:
    """Returns the markdown of every section that has a result."""
    parts = []
    for name, (title, table) in SECTIONS.items():
        groups: dict[str, list[Result]] = {}
        for path, result in results_of(name):
            key = processor(result) if name in BY_PROCESSOR else ""
            groups.setdefault(key, []).append((path, result))
        for found in groups.values():
            result, more = merged(found) if name in BY_CELL else (found[0][1], [])
            heading = caption(found[0][0], result, title, folder)
            if more:
                heading += f"; other cells: {report_brief.sources(more, folder)}"
            parts.append(f"{heading}\n\n{table(result)}")
    return "\n\n".join(parts)


def merged(found: list[Result]) -> tuple[dict[str, Any], list[Result]]:
    """The newest of these results with the cells that it lacks, and the files these came from."""
    result, sources = found[0][1], []
    for path, other in found[1:]:
        have = result["results"]
        batches = {cell.split(", ")[1] for cell in have}  # the first files had all in one
        more = {
            cell: figures
            for cell, figures in other["results"].items()
            if cell not in have and cell.split(", ")[1] in batches
        }
        if more:
            result = {**result, "results": {**more, **have}}
            sources.append((path, other))
    return result, sources


def readme(folder: str) -> str:
    """Returns the markdown of the tables that say whether it is faster, and than what."""
    peers = report_brief.newest(results_of("peers_cpu"))
    served = results_of("serve_peers")[0]
    auto, files = {}, []
    for name in BY_CELL:
        groups: dict[str, list[Result]] = {}
        for path, result in results_of(name):
            groups.setdefault(report_brief.brand(result), []).append((path, result))
        for column, found in sorted(groups.items()):
            result, more = merged(found)
            auto.setdefault(column, {}).update(result["results"])
            files += [found[0], *more]
    return "\n\n".join(
        [
            "**Tokens per second over those of other programs: the same file, two threads of the "
            f"same CPU** ({report_brief.sources(peers.values(), folder)})",
            report_brief.peers_cpu(peers),
            "**Plain decoding's time over that of the default, "
            '`speculative_config="auto"`, prompts included**, of B requests at once '
            f"({report_brief.sources(files, folder)})",
            report_brief.never_slower(auto),
            caption(*served, SECTIONS["serve_peers"][0], folder),
            serve_tables.peers_headline(served[1]["rows"]),
        ]
    )


PAGES = {
    "README.md": (readme, "benchmarks/results"),
    "docs/results.md": (results_page, "../benchmarks/results"),
}


def report(page: str) -> str:
    """Returns what stands between the markers of the page."""
    tables, folder = PAGES[page]
    return tables(folder)


def write(page: str) -> None:
    """Replaces what is between the markers of the page."""
    path = common.ROOT / page
    head, _, rest = path.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    if not tail:
        raise SystemExit(f"{page} has no {BEGIN} ... {END}")
    path.write_text(f"{head}{BEGIN}\n{report(page)}\n{END}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write", action="store_true", help=f"write them into {' and '.join(PAGES)}"
    )
    args = parser.parse_args()
    if args.write:
        for page in PAGES:
            write(page)
    else:
        print(report("docs/results.md"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

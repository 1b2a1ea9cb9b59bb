"""Reports for people: tables on a stream, a heat map for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "heat_map",
    "print_notes",
    "print_pair",
    "print_serve",
    "print_sweep",
    "shade",
    "wide_console",
]

# From slow to fast, as 256-colour backgrounds that black text can be read on.
_COLORS = (203, 209, 215, 221, 227, 191, 155, 119, 84)


def wide_console(stream: IO[str]) -> Console:
    """A console that colours a terminal, and writes plain lines into a file or pipe."""
    from rich.console import Console

    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=stream, width=160, no_color=True, highlight=False)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def print_pair(report: Mapping[str, Any], stream: IO[str]) -> None:
    """latency and throughput: with speculation next to plain decoding."""
    from rich.table import Table

    plain = report["plain"]
    table = Table(title=f"{report['benchmark']}: {report['model']}, method {report['method']}")
    table.add_column("")
    table.add_column(report["method"] if plain else "plain", justify="right")
    if plain:
        table.add_column("plain", justify="right")
    keys = [
        ("elapsed_time", "median time of all requests, s", 3),
        ("median_latency", "median latency of a batch, s", 3),
        ("requests_per_second", "requests/s", 2),
        ("output_tokens_per_second", "output tokens/s", 1),
        ("median_ttft_ms", "time to first token, ms", 1),
        ("median_tpot_ms", "time per further token, ms", 2),
        ("tokens_per_forward_pass", "tokens per forward pass", 2),
        ("rows_per_forward_pass", "rows per forward pass", 1),
    ]
    if report["benchmark"] == "throughput":
        keys = [entry for entry in keys if entry[0] != "median_latency"]
    for key, words, digits in keys:
        if key in report:
            cells = [_number(report[key], digits)]
            table.add_row(words, *cells, *([_number(plain[key], digits)] if plain else []))
    wide_console(stream).print(table)
    print_notes(report, stream)


def print_notes(report: Mapping[str, Any], stream: IO[str]) -> None:
    """What the figures stand on, in a few lines."""
    lines = []
    if report.get("speedup") is not None:
        low, high = report["speedup_range"]
        lines.append(
            f"speed-up over plain decoding {report['speedup']:.2f}x ({low:.2f} .. {high:.2f}), "
            f"acceptance length {report['speculative_decoding']['mean_acceptance_length']:.2f}"
        )
    if report.get("step_times") is not None:
        decode = report["step_times"]["decode"]
        parts = ", ".join(f"{p} {decode[p + '_ms']:.2f}" for p in ("draft", "verify", "accept"))
        lines.append(f"a step in ms: {parts}; the host {decode['host_ms']:.2f}")
    machine = report["machine"]
    load = report["clocks"]["after"]["load_average"][0]
    lines.append(
        f"{machine['device']}, {machine['cpu']}, {machine['threads']} threads, load {load}, "
        f"{report['numerics']} numerics, {report['dtype']}, version {machine['version']}"
        + (f" ({machine['commit']})" if machine["commit"] else "")
    )
    if report["synthetic_acceptance"] is not None:
        lines.append(
            "SYNTHETIC ACCEPTANCE: drafts were kept at given rates, the text is not the model's"
        )
    elif report["identical_to_plain"] is not None:
        same = "equal" if report["identical_to_plain"] else "NOT equal"
        lines.append(f"tokens {same} to those of plain decoding")
    if report["failed_requests"]:
        lines.append(f"{report['failed_requests']} requests FAILED")
    console = wide_console(stream)
    for line in lines:
        console.print(line, soft_wrap=True)


def shade(value: float, low: float, high: float) -> str:
    """The colour of a value between low and high, as rich writes it."""
    at = 0.0 if high <= low else (value - low) / (high - low)
    return f"black on color({_COLORS[min(int(at * len(_COLORS)), len(_COLORS) - 1)]})"


def print_sweep(report: Mapping[str, Any], stream: IO[str]) -> None:
    """One row per cell, then the speed-ups as a map of batch sizes by draft lengths."""
    from rich.table import Table

    table = Table(title=f"sweep: {report['model']}, method {report['method']}")
    for name in ("batch", "draft", "tokens/s", "plain tokens/s", "speed-up", "accept len",
                 "tokens/pass", "rows/pass"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in report["rows"]:
        table.add_row(
            str(row["batch_size"]),
            _label(row["draft"]),
            _number(row["output_tokens_per_second"], 1),
            _number(row["plain_output_tokens_per_second"], 1),
            _number(row["speedup"]),
            _number(row["mean_acceptance_length"]),
            _number(row["tokens_per_forward_pass"]),
            _number(row["rows_per_forward_pass"], 1),
        )
    wide_console(stream).print(table)
    batches = list(dict.fromkeys(row["batch_size"] for row in report["rows"]))
    drafts = list(dict.fromkeys(_label(row["draft"]) for row in report["rows"]))
    if len(batches) > 1 and len(drafts) > 1:
        values = {
            (row["batch_size"], _label(row["draft"])): row["speedup"] for row in report["rows"]
        }
        heat_map("speed-up", "batch", batches, "draft", drafts, values, stream)
    if "machine" in report:
        print_notes(report, stream)


def print_serve(report: Mapping[str, Any], stream: IO[str]) -> None:
    """A row per concurrency and server, then the first server against each other one."""
    from rich.table import Table

    table = Table(title=f"serve: {report['model']}, by {report['tool']}")
    table.add_column("at a time", justify="right")
    table.add_column("server")
    for name in ("first token ms, p50", "p99", "ms/token, p50", "p99", "tokens/s", "requests/s",
                 "accept len", "accepted/drafts", "failed"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in report["rows"]:
        spec, length, accepted = row["speculative_decoding"], None, "-"
        if spec and spec["num_spec_steps"]:
            length = spec["mean_acceptance_length"]
            accepted = f"{spec['num_accepted_draft_tokens']}/{spec['num_draft_tokens']}"
        table.add_row(
            str(row["concurrency"]), row["server"],
            *(_number(row[key][point], digits) for key, digits in (("ttft_ms", 1), ("tpot_ms", 2))
              for point in ("p50", "p99")),
            _number(row["output_tokens_per_second"], 1), _number(row["requests_per_second"]),
            _number(length), accepted,
            str(row["failed_requests"]),
        )  # fmt: skip
    console = wide_console(stream)
    console.print(table)
    speed = {(r["server"], r["concurrency"]): r["output_tokens_per_second"] for r in report["rows"]}
    first, *others = [server["name"] for server in report["servers"]]
    levels = list(dict.fromkeys(row["concurrency"] for row in report["rows"]))
    for other in others:
        times = ", ".join(
            f"{speed[first, level] / speed[other, level]:.2f} at {level}"
            for level in levels
            if speed[other, level]
        )
        console.print(f"{first} against {other}, tokens/s: {times}", soft_wrap=True)
    for row in report["rows"]:
        for error, count in row["errors"].items():
            console.print(
                f"{row['server']}, {row['concurrency']} at a time: {count} FAILED: {error}",
                soft_wrap=True, markup=False,
            )  # fmt: skip
    machine, load = report["machine"], report["clocks"]["after"]["load_average"][0]
    work = report["workload"]
    console.print(
        f"{work['prompts']} ({work['distinct_prompts']} prompts), {work['output_len']} tokens "
        f"each; {machine['device']}, {machine['cpu']}, load {load}, version {machine['version']}"
        + (f" ({machine['commit']})" if machine["commit"] else ""),
        soft_wrap=True,
    )


def _label(draft: Any) -> str:
    return ",".join(map(str, draft)) if isinstance(draft, (list, tuple)) else str(draft)


def heat_map(
    title: str,
    row_name: str,
    rows: Sequence[Any],
    column_name: str,
    columns: Sequence[Any],
    values: Mapping[tuple[Any, Any], float],
    stream: IO[str],
    best: tuple[Any, Any] | None = None,
) -> None:
    """values[(row, column)] as a coloured map; the best cell has a star. Missing cells: a dot."""
    from rich.table import Table
    from rich.text import Text

    known = list(values.values())
    if not known:
        return
    low, high = min(known), max(known)
    best = max(values, key=lambda cell: values[cell]) if best is None else best
    table = Table(padding=(0, 0))
    table.add_column(row_name, justify="right")
    for column in columns:
        table.add_column(str(column), justify="right")
    for row in rows:
        cells = []
        for column in columns:
            value = values.get((row, column))
            if value is None:
                cells.append(Text(". "))
                continue
            star = "*" if (row, column) == best else " "
            cells.append(Text(f" {star}{value:.2f} ", style=shade(value, low, high)))
        table.add_row(str(row), *cells)
    console = wide_console(stream)
    console.print(f"{title} ({row_name} down, {column_name} across, * best)", soft_wrap=True)
    console.print(table)

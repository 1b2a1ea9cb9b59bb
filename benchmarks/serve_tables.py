"""Tables of what benchmarks of the server have measured; nothing here needs a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import common

AUTO, PLAIN, LLAMA = "auto", "plain", "llama.cpp"


def latency(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of serve_latency. Those from before 2026-11-24 do not say when an event had arrived
    in the client's socket."""
    both = all("arrived_ms" in row for row in rows)
    header = ["streams", "tokens", "late p50, ms", "p90", "p99", "max", "step, ms", "step / alone",
              "processor time per event, us"]  # fmt: skip
    if both:
        header[2:3] = ["at the client's socket p50, ms", "p90", "p99", "max", "read by it p50, ms"]
        header.append("the client's")
    cells = [
        [row["streams"], row["tokens"], *(row["arrived_ms"].values() if both else ()),
         *row["late_ms"].values(), row["step_ms"]["median"], row["step_over_alone"]["median"],
         row["event_us"]["median"], *((row["client_us"]["median"],) if both else ())]
        for row in rows
    ]  # fmt: skip
    return common.markdown(header, cells)


def peers(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of serve_peers: every side at every concurrency."""
    speed = {(r["server"], r["concurrency"]): r["output_tokens_per_second"] for r in rows}
    cells = []
    for row in rows:
        spec = row["speculative_decoding"]
        cells.append([
            row["concurrency"], row["server"], row["ttft_ms"]["p50"], row["ttft_ms"]["p99"],
            row["tpot_ms"]["p50"], row["tpot_ms"]["p99"], row["output_tokens_per_second"],
            row["requests_per_second"],
            spec["mean_acceptance_length"] if spec and row["server"] == AUTO else "",
            speed[AUTO, row["concurrency"]] / row["output_tokens_per_second"],
        ])  # fmt: skip
    header = ("at a time", "server", "first token p50, ms", "p99", "per token p50, ms", "p99",
              "tokens/s", "requests/s", "tokens per step", "auto / this, tokens/s")  # fmt: skip
    return common.markdown(header, cells)


def peers_headline(rows: Sequence[dict[str, Any]]) -> str:
    """What serve_peers shows: how much better the default is than each other side; below 1 it
    loses."""
    found = {(row["server"], row["concurrency"]): row for row in rows}
    counts = sorted({row["concurrency"] for row in rows})
    lines = []
    for other in (LLAMA, PLAIN):
        if (other, counts[0]) not in found:
            continue
        pairs = [(found[AUTO, count], found[other, count]) for count in counts]
        of = "llama.cpp's server" if other == LLAMA else "without speculation"
        lines += [
            [f"tokens/s, auto / {of}",
             *(a["output_tokens_per_second"] / b["output_tokens_per_second"] for a, b in pairs)],
            [f"time to the first token, {of} / auto",
             *(b["ttft_ms"]["p50"] / a["ttft_ms"]["p50"] for a, b in pairs)],
            [f"time per token, {of} / auto",
             *(b["tpot_ms"]["p50"] / a["tpot_ms"]["p50"] for a, b in pairs)],
        ]  # fmt: skip
    return common.markdown(["above 1: auto wins", *(f"{n} at a time" for n in counts)], lines)

"""The README's tables from results whose answer is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import report, report_brief


def result(date: str, cpu: str, isa: str, results: dict[str, Any]) -> report_brief.Result:
    environment = {"date": date, "cpu": cpu, "build": {"cpu_isa": isa}}
    return Path(f"{date}.json"), {"environment": environment, "results": results}


def ratios(**medians: float) -> dict[str, Any]:
    names = {"llama": "plain / llama_cpp plain, decode", "prefill": "prefill / best peer"}
    return {"ratios": {names[key]: {"median": value} for key, value in medians.items()}}


def test_a_processor_has_its_newest_file_whatever_its_generation() -> None:
    found = [
        result("2026-03-03", "AMD EPYC, family 25, model 17", "avx512_bf16", {"new": 1}),
        result("2026-02-02", "Intel(R) Xeon(R) Processor", "amx", {"tiles": 1}),
        result("2026-01-01", "AMD EPYC", "avx512_bf16", {"old": 1}),
        result("2026-01-01", "AMD EPYC", "avx2", {"narrow": 1}),
    ]
    columns = report_brief.newest(found)
    assert {name: next(iter(r["results"])) for name, (_, r) in columns.items()} == {
        "AMD EPYC (avx2)": "narrow", "AMD EPYC (avx512_bf16)": "new", "Intel Xeon (amx)": "tiles",
    }  # fmt: skip
    assert list(columns) == sorted(columns)
    assert report_brief.sources([found[0]], "x") == "2026-03-03 [2026-03-03](x/2026-03-03.json)"


def test_peers_have_a_column_for_each_processor_and_width() -> None:
    columns = {
        "A": result(
            "d",
            "a",
            "x",
            {"F32": ratios(llama=9.0), "Q4_0": ratios(), "BF16": ratios(llama=1.5, prefill=1.0)},
        ),
        "B": result("d", "b", "x", {"Q4_0": ratios(llama=0.5)}),
    }
    assert report_brief.peers_cpu(columns).splitlines() == [
        "| ours / theirs, median | A, BF16 | A, Q4_0 | B, Q4_0 |",
        "|---|---|---|---|",
        "| plain / llama.cpp plain, decode | 1.50 |  | 0.50 |",
        "| prompts / best peer | 1.00 |  |  |",
    ]


def test_the_default_has_a_line_for_each_batch_and_the_mean_of_the_sets() -> None:
    def cells(*medians: float) -> dict[str, Any]:
        names = [f"q4, B = {b}, {data}, temperature 0" for b in (32, 8) for data in ("x", "y")]
        pairs = zip(names, medians, strict=False)
        return {name: {"auto": {"wall total": {"median": m}}} for name, m in pairs}

    assert report_brief.never_slower({"A": cells(1.0, 4.0, 0.5), "B": cells(2.0)}).splitlines() == [
        "| mean of five sets (least to most) | A | B |",
        "|---|---|---|",
        "| B = 8, temperature 0, q4 | 0.50 (0.50 to 0.50) |  |",
        "| B = 32, temperature 0, q4 | 2.00 (1.00 to 4.00) | 2.00 (2.00 to 2.00) |",
    ]


@pytest.mark.parametrize("newest", [["q4, B = 8, x, t"], ["q4, B = 8, x, t", "q4, B = 8, y, t"]])
def test_cells_that_the_newest_file_lacks_are_an_earlier_ones(newest: list[str]) -> None:
    older = ["q4, B = 8, x, t", "q4, B = 8, y, t", "q4, B = 1, x, t"]
    found = [
        result("2026-02-02", "a", "x", dict.fromkeys(newest, "new")),
        result("2026-01-01", "a", "x", dict.fromkeys(older, "old")),
    ]
    merged, more = report.merged(found)
    assert merged["results"] == {**dict.fromkeys(older[:2], "old"), **dict.fromkeys(newest, "new")}
    assert more == ([found[1]] if len(newest) == 1 else [])

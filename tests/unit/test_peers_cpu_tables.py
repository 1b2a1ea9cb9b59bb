"""Figures of benchmarks.peers_cpu from cells whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import peers_cpu, peers_cpu_tables

SETS = ["humaneval", "news"]


def cell(seconds: float, tokens: list[list[int]] | None = None, **more: Any) -> dict[str, Any]:
    """Two prompts of 5 tokens: `seconds` each, of which the prompt takes one."""
    return {
        "version": "1", "load_s": 1.0, "first_token_s": 2.0, "rss_mb": 3.0, "load_average": 0.0,
        "prompt_s": [1.0, 1.0], "total_s": [seconds, seconds], "wall_s": 9.0,
        "tokens": tokens or [[1] * 5, [2] * 5], "prefill_s": [1.0, 2.0, 64.0], **more,
    }  # fmt: skip


def test_rates_leave_out_the_prompt_where_they_say_so():
    found = peers_cpu_tables.figures(cell(3.0, batch_s=4.0, batch_tokens=20), SETS)
    assert found["decode"] == pytest.approx(8 / 4)
    assert found["end_to_end"] == pytest.approx(10 / 6)
    assert found["prefill"] == 256.0  # the median of three
    assert found["batch"] == 5.0
    assert found["by_set"] == pytest.approx({"humaneval": 5 / 3, "news": 5 / 3})


def test_ratios_are_taken_within_a_round_against_the_best_peer():
    other = [[1] * 5, [3] * 5]
    cells = {
        "Q4_0/ours plain/0": cell(3.0),
        "Q4_0/ours plain/1": cell(5.0),
        "Q4_0/ours default/0": cell(2.0),
        "Q4_0/ours fast_default/0": cell(1.6),
        "Q4_0/llama_cpp plain/0": cell(5.0, other),
        "Q4_0/llama_cpp plain/1": cell(5.0, other),
        "Q4_0/llama_cpp lookup/0": cell(4.0),
        "Q4_0/llama_cpp plain beside nice 0/0": cell(1.5),
        "Q4_0/openvino plain/0": {"failed": "no such type", "load_average": 0.0, "wall_s": 1.0},
    }
    found = peers_cpu_tables.summarise(cells, SETS)["Q4_0"]
    ratio = found["ratios"]["plain / llama_cpp plain, decode"]
    assert ratio == pytest.approx({"median": 1.5, "min": 1.0, "max": 2.0})
    assert found["ratios"]["default / best peer, end to end"]["median"] == pytest.approx(2.0)
    assert found["ratios"]["fast default / best peer, end to end"]["median"] == pytest.approx(2.5)
    assert "fast prefill / best peer" not in found["ratios"], "no plain program in fast numerics"
    programs = found["programs"]
    assert programs["ours plain"]["same_text_as_llama_cpp"] == "1/2"
    assert programs["llama_cpp lookup"]["same_text_as_plain"] == "1/2"
    assert programs["ours fast_default"]["same_text_as_plain"] == ""
    assert programs["openvino plain"] == {"failed": "no such type"}
    tables = peers_cpu_tables.tables_of({"results": {"Q4_0": found}, "not_installed": ["vllm"]})
    assert "failed: no such type" in tables[0] and tables[2] == "Not installed: vllm."


def test_equal_lengths_compare_the_same_number_of_tokens():
    short, long = cell(3.0, [[1] * 5, [2] * 5]), cell(5.0, [[1] * 9, [2] * 9])
    assert peers_cpu_tables.seconds_until(long, 0, 1) == 1.0, "the prompt"
    assert peers_cpu_tables.seconds_until(long, 0, 5) == 3.0
    assert peers_cpu_tables.seconds_until(long, 0, 9) == 5.0
    assert peers_cpu_tables.seconds_until(cell(3.0, [[1], [2]]), 0, 1) == 1.0
    # As fast behind the prompt, though 9 tokens in 5 seconds look faster than 5 in 3.
    assert peers_cpu_tables.equal_lengths(short, long, [0, 1]) == pytest.approx(1.0)
    assert peers_cpu_tables.equal_lengths(long, short, [0]) == pytest.approx(1.0)
    assert peers_cpu_tables.equal_lengths(short, cell(5.0), [0, 1]) == pytest.approx(5 / 3)
    assert peers_cpu_tables.equal_lengths(short, cell(1.0, [[1] * 5, []]), [0, 1]) is None
    cells = {
        "Q4_0/ours default/0": short, "Q4_0/ours default/1": {"failed": "", "load_average": 0.0},
        "Q4_0/openvino plain/0": long, "Q4_0/openvino plain/1": long,
        "Q4_0/openvino lookup/0": cell(4.0), "Q4_0/llama_cpp plain/0": {"failed": "", **long},
        "Q4_0/llama_cpp plain beside nice 0/0": cell(0.5),
    }  # fmt: skip
    ratios = peers_cpu_tables.summarise(cells, SETS)["Q4_0"]["ratios"]
    same = {"median": 1.0, "min": 1.0, "max": 1.0}
    assert ratios["default / best peer, news, equal lengths"] == pytest.approx(same)
    assert "default / best peer, squad, equal lengths" not in ratios, "no such prompts"


def test_settings_of_another_run_are_refused(tmp_path):
    path = tmp_path / "cells.json"
    path.write_text('{"settings": {"rounds": 1}, "cells": {"a": 1}}')
    assert peers_cpu.read_state(path, {"rounds": 1}, fresh=False)["cells"] == {"a": 1}
    with pytest.raises(SystemExit, match="--fresh"):
        peers_cpu.read_state(path, {"rounds": 2}, fresh=False)
    assert peers_cpu.read_state(path, {"rounds": 2}, fresh=True)["cells"] == {}

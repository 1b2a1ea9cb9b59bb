"""`specdec bench` on a tiny model: what it reports, and that it can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec_ext.cli import main
from tiny_models import save_tiny

VLLM_LATENCY = {"avg_latency", "latencies", "percentiles"}
VLLM_THROUGHPUT = {
    "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny") / "m"))


def bench(capsys: Any, *argv: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["bench", *argv, "--json", "--num_iters_warmup", "1"]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.usefixtures("on_stream")
def test_latency_of_steps_that_run_ahead(folder: str, capsys: Any) -> None:
    """The parts of a step, in a call of its own: its drafts are not among those of the rounds."""
    argv = ["latency", "--model", folder, "--batch_size", "2", "--output_len", "9",
            "--prompt_lookup_config", "[4,2]", "--no_adaptive"]  # fmt: skip
    report = bench(capsys, *argv, "--run_ahead", "1")
    times = report["step_times"]
    assert set(times) == {"decode", "prefill"}
    for kind in times.values():
        assert set(kind) == {"steps", "draft_ms", "verify_ms", "accept_ms", "host_ms"}
        assert all(value > 0 for value in kind.values())
    assert times["prefill"]["steps"] == 1  # of the second call alone
    assert 3 <= times["decode"]["steps"] <= 9
    capsys.readouterr()
    assert main(["bench", *argv, "--run_ahead", "1", "--num_iters_warmup", "0"]) == 0
    assert "a step in ms: draft " in capsys.readouterr().out
    without = bench(capsys, *argv)
    assert without["step_times"] is None
    for key in ("num_draft_tokens", "num_accepted_draft_tokens"):
        assert report["speculative_decoding"][key] == without["speculative_decoding"][key]


def test_latency(folder: str, tmp_path: Path, capsys: Any) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabcabc\nxyxyxy\n")
    out = tmp_path / "out.json"
    report = bench(
        capsys, "latency", "--model", folder, "--batch_size", "3", "--output_len", "24",
        "--input_file", str(prompts), "--prompt_lookup_config", "[6,2]", "--no_adaptive",
        "--output_json", str(out),
    )  # fmt: skip
    assert json.loads(out.read_text()) == report
    assert report.keys() >= VLLM_LATENCY and report["plain"].keys() >= VLLM_LATENCY
    assert report["benchmark"] == "latency"
    assert len(report["latencies"]) == len(report["plain"]["latencies"]) == 5
    assert report["median_latency"] == sorted(report["latencies"])[2]
    work = report["workload"]
    assert (work["batch_size"], work["output_len"], work["prompts"]) == (3, 24, "prompts.txt")
    assert work["input_len"] == [6, 9]
    assert (work["num_iters"], work["num_iters_warmup"]) == (5, 1)
    assert report["identical_to_plain"] is True and report["lossless"] is True
    assert report["failed_requests"] == 0
    spec = report["speculative_decoding"]
    assert spec["num_draft_tokens"] > 0
    # 3 requests of 24 tokens in 5 rounds: prompts are one pass, each pass a token and its drafts.
    tokens = 5 * 3 * 24
    steps = tokens / report["tokens_per_forward_pass"]
    assert tokens - steps == pytest.approx(spec["num_accepted_draft_tokens"])
    assert report["plain"]["tokens_per_forward_pass"] == 1.0
    ratios = sorted(
        p / s for s, p in zip(report["latencies"], report["plain"]["latencies"], strict=True)
    )
    assert report["speedup"] == pytest.approx(ratios[2])
    assert report["speculative_config"]["max_draft_len"] == 6
    assert report["machine"]["version"] and report["machine"]["device"] == "cpu"
    assert report["clocks"]["before"]["load_average"]
    assert report["numerics"] == "exact"
    assert str(Path(folder).parent) not in json.dumps({**report, "machine": None})


def test_throughput(folder: str, capsys: Any) -> None:
    report = bench(
        capsys, "throughput", "--model", folder, "--num_prompts", "5", "--input_len", "7",
        "--output_len", "9", "--max_batch_size", "2", "--lookahead_config", "[3,3,3]",
    )  # fmt: skip
    assert report.keys() >= VLLM_THROUGHPUT and report["plain"].keys() >= VLLM_THROUGHPUT
    assert report["num_requests"] == 5
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (35, 45)
    assert report["total_num_tokens"] == 80
    assert report["tokens_per_second"] == pytest.approx(80 / report["elapsed_time"])
    assert report["max_batch_size"] == 2
    assert report["workload"]["prompts"] == "random tokens"


def test_without_speculation_plain_decoding_is_measured(folder: str, capsys: Any) -> None:
    flags = ("--no_speculation", "--output_len", "4", "--batch_size", "1")
    report = bench(capsys, "latency", "--model", folder, *flags)
    assert report["plain"] is report["speedup"] is report["identical_to_plain"] is None
    assert report["method"] == "none" and report["speculative_config"] is None
    assert report["speculative_decoding"]["num_draft_tokens"] == 0


def test_without_a_method_auto_is_measured(folder: str, capsys: Any) -> None:
    flags = ("--output_len", "4", "--batch_size", "1")
    report = bench(capsys, "latency", "--model", folder, *flags)
    assert (
        report["method"] == "suffix" and report["identical_to_plain"]
    )  # nothing is shipped for it


@pytest.mark.parametrize("method", ["ngram", "lookahead"])
def test_sweep(folder: str, tmp_path: Path, capsys: Any, method: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabcabcabcabc\nxyxyxyxyxyxyx\n")
    flags = {
        "ngram": ["--prompt_lookup_config", "[4,2]", "--draft_lens", "2", "4"],
        "lookahead": ["--lookahead_config", "[3,3,3]", "--triples", "[2,3,1]", "[3,3,3]"],
    }[method]
    report = bench(
        capsys,
        "sweep",
        "--model",
        folder,
        "--batch_sizes",
        "1",
        "3",
        "--output_len",
        "60",
        "--input_file",
        str(prompts),
        *flags,
    )
    cells = [(row["batch_size"], row["draft"]) for row in report["rows"]]
    drafts: list[Any] = [2, 4] if method == "ngram" else [[2, 3, 1], [3, 3, 3]]
    assert cells == [(b, d) for b in (1, 3) for d in ["adaptive", *drafts]]
    assert all(row["identical_to_plain"] for row in report["rows"])
    fixed = [row for row in report["rows"] if row["draft"] != "adaptive"]
    assert all(row["rows_per_forward_pass"] > 1 for row in fixed)
    rows = [row["rows_per_forward_pass"] for row in fixed]
    assert rows[0] < rows[1] and rows[2] < rows[3], "the length or triple is the request's own"
    assert set(report["best_draft_by_batch_size"]) == {"1", "3"}


def test_tables_are_data_and_synthetic_acceptance_is_marked(folder: str, capsys: Any) -> None:
    capsys.readouterr()
    argv = ["bench", "sweep", "--model", folder, "--batch_sizes", "1", "2", "--output_len", "20",
            "--prompt_lookup_config", "[4,2]", "--no_adaptive", "--synthetic_acceptance_length",
            "2", "--num_iters_warmup", "0"]  # fmt: skip
    assert main(argv) == 0  # other tokens than the model's are what was asked for
    captured = capsys.readouterr()
    assert "SYNTHETIC ACCEPTANCE" in captured.out
    assert "speed-up" in captured.out and "batch" in captured.out
    assert "NOT the model's" in captured.err


def test_a_difference_and_a_failure_are_exit_code_1(
    folder: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_ext.bench import measure

    argv = ["latency", "--model", folder, "--batch_size", "1", "--output_len", "8",
            "--prompt_lookup_config", "[4,2]"]  # fmt: skip
    real = measure.one_call

    def spoiled(llm: Any, prompts: Any, params: Any) -> Any:
        call = real(llm, prompts, params)
        if params.speculative_config is not False:
            call.token_ids[0][-1] ^= 1
        return call

    monkeypatch.setattr(measure, "one_call", spoiled)
    report = bench(capsys, *argv, code=1)
    assert report["identical_to_plain"] is False

    def failing(llm: Any, prompts: Any, params: Any) -> Any:
        call = real(llm, prompts, params)
        call.errors.append("boom")
        return call

    monkeypatch.setattr(measure, "one_call", failing)
    assert bench(capsys, *argv, code=1)["failed_requests"] == 10


def test_requests_that_cannot_fit_are_refused_before_any_work(folder: str, capsys: Any) -> None:
    capsys.readouterr()
    argv = ["bench", "latency", "--model", folder, "--input_len", "500", "--output_len", "100"]
    assert main(argv) == 1
    assert "max_seq_len" in capsys.readouterr().err

"""`specdec bench serve`: reports of the tools as they are, our own counting, and the tools live.

`recorded/` holds what AIPerf 0.13.0 and GuideLLM 0.8.1 wrote of a server that refused some of
twelve requests; fields that are not read were taken out. Live tests need the tools on PATH.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from servers import LiveServer, make_app, make_llm, wait_until

from specdec_ext import LLM, SamplingParams
from specdec_ext.bench.load_tools import TOOLS, Load, LoadToolError, acceptance
from specdec_ext.bench.server_facts import acceptance_between, base_url, counters, served_model
from specdec_ext.bench.tables import print_serve
from specdec_ext.cli import main
from specdec_ext.cli.bench_serve import TOOL_NAMES, random_texts
from specdec_ext.errors import ConfigError
from specdec_ext.report.read import read_result

RECORDED = Path(__file__).parent / "recorded"
Capture = pytest.CaptureFixture[str]
needs = {
    name: pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")
    for name in TOOLS
}
live_tools = [pytest.param(name, marks=mark) for name, mark in needs.items()]


# -- reports that are recorded --------------------------------------------------------------------


def test_a_report_of_aiperf() -> None:
    measured = TOOLS["aiperf"]("aiperf")._read(RECORDED / "aiperf")
    assert (measured["requests"], measured["failed_requests"]) == (4, 8)
    assert sorted(measured["errors"].values()) == [3, 5]
    assert all("the queue is full" in told for told in measured["errors"])
    spec = measured["speculative_decoding"]
    assert (spec["num_accepted_draft_tokens"], spec["num_draft_tokens"]) == (7, 312)
    assert len(measured["ttfts_ms"]) == len(measured["tpots_ms"]) == 4
    check_measured(measured)


def test_a_report_of_guidellm() -> None:
    measured = TOOLS["guidellm"]("guidellm")._read(RECORDED / "guidellm")
    assert (measured["requests"], measured["failed_requests"]) == (3, 9)
    assert sum(measured["errors"].values()) == 9
    spec = measured["speculative_decoding"]
    assert (spec["num_accepted_draft_tokens"], spec["num_draft_tokens"]) == (2, 202)
    assert len(measured["ttfts_ms"]) == len(measured["tpots_ms"]) == 3
    check_measured(measured)


def check_measured(measured: dict[str, Any]) -> None:
    spec = measured["speculative_decoding"]
    bins = spec["acceptance_histogram"]
    assert sum(bins) == spec["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(bins)) == spec["num_accepted_draft_tokens"]
    length = 1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]
    assert spec["mean_acceptance_length"] == pytest.approx(length)
    assert measured["mean_output_tokens"] == 60
    for name, values in (("ttft_ms", "ttfts_ms"), ("tpot_ms", "tpots_ms")):
        spread, every = measured[name], measured[values]
        assert min(every) <= spread["p50"] <= spread["p90"] <= spread["p99"] <= max(every)
        assert spread["mean"] == pytest.approx(sum(every) / len(every))
    # All in one unit, whatever the clock said: a first token and 59 more.
    parts = measured["ttft_ms"]["mean"] + 59 * measured["tpot_ms"]["mean"]
    assert measured["latency_ms"]["mean"] == pytest.approx(parts, rel=0.05)
    rate = measured["output_tokens_per_second"] / measured["requests_per_second"]
    assert rate == pytest.approx(60, rel=0.05)


def copied(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(RECORDED / name, folder / name))


def test_a_run_without_an_answer_says_what_the_server_said(tmp_path: Path) -> None:
    """Both tools then end with a report of nothing, or none."""
    folder = copied("aiperf", tmp_path)
    records = (folder / "profile_export.jsonl").read_text().splitlines()
    failed = [line for line in records if json.loads(line)["error"]]
    assert 0 < len(failed) < len(records)
    (folder / "profile_export.jsonl").write_text("\n".join(failed))
    (folder / "profile_export_aiperf.json").unlink()
    with pytest.raises(ValueError, match=r"none of 8 requests was answered.*the queue is full"):
        TOOLS["aiperf"]("aiperf")._read(folder)
    folder = copied("guidellm", tmp_path)
    report = json.loads((folder / "report.json").read_text())
    [run] = report["benchmarks"]
    run["requests"]["successful"] = []
    (folder / "report.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match=r"none of 12 requests was answered.*429"):
        TOOLS["guidellm"]("guidellm")._read(folder)


def test_answers_that_tell_nothing_have_no_acceptance(tmp_path: Path) -> None:
    """A server without speculation, or without these keys."""
    folder = copied("guidellm", tmp_path)
    report = json.loads((folder / "report.json").read_text())
    for answer, told in zip(report["benchmarks"][0]["requests"]["successful"],
                            (None, {}, {"speculative_decoding": None}), strict=True):  # fmt: skip
        answer["response_metrics"] = told
    (folder / "report.json").write_text(json.dumps(report))
    assert TOOLS["guidellm"]("guidellm")._read(folder)["speculative_decoding"] is None
    folder = copied("aiperf", tmp_path)
    path = folder / "profile_export_aiperf.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in whole.items() if "spec_decode" not in k}))
    assert TOOLS["aiperf"]("aiperf")._read(folder)["speculative_decoding"] is None


@pytest.mark.parametrize("name", TOOLS)
def test_a_program_that_leaves_no_report(name: str, tmp_path: Path) -> None:
    """Its exit code and the end of its log are in the error."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nfor i in 1 2 3; do echo line $i; done; exit 7\n")
    program.chmod(0o755)
    load = Load("http://127.0.0.1:1", "m", ["a", "b"], 1, 4, api_key="secret-key")
    with pytest.raises(LoadToolError, match=rf"{name} ended with 7 .*\n(.*\n)*line 3") as caught:
        TOOLS[name](str(program)).measure(load, tmp_path / "run")
    assert "secret-key" not in str(caught.value)


@pytest.mark.slow  # waits for processes without a limit
def test_an_interrupt_ends_the_tool_and_what_it_started(tmp_path: Path) -> None:
    code = f"""
import signal, subprocess
from pathlib import Path
from specdec_ext.bench.load_tools import _run
signal.signal(signal.SIGINT, signal.default_int_handler)
folder = Path({str(tmp_path)!r})
wait = subprocess.Popen.wait
def waiting(*given):
    (folder / "waiting").write_text("now")
    return wait(*given)
subprocess.Popen.wait = waiting
_run(["sh", "-c", "sleep 1000 & echo $! > child; echo $$ > parent; wait"], folder,
     folder / "log", {{"PATH": "/usr/bin:/bin"}})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    files = [tmp_path / "child", tmp_path / "parent"]
    marks = [*files, tmp_path / "waiting"]
    wait_until(lambda: all(file.exists() and file.read_text().strip() for file in marks))
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate()[1]
    for file in files:
        wait_until(lambda file=file: not running(int(file.read_text())))


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_the_option_names_the_tools() -> None:
    assert set(TOOL_NAMES) == set(TOOLS)


# -- what is counted here -------------------------------------------------------------------------


def test_acceptance_from_metrics_is_the_engines(tiny_path: Path) -> None:
    with make_llm(tiny_path) as llm, LiveServer(make_app(llm)) as live:
        before = counters(live.url, None)
        assert before is not None and before.is_ours and before.steps == 0
        assert list(before.positions) == [0, 1, 2, 3]  # there from the start
        told = []
        for prompt in ("abab" * 10, "x", "one two one two"):
            body = {"prompt": prompt, "max_tokens": 60, "temperature": 0}
            answer = httpx2.post(live.url + "/v1/completions", json=body).json()
            told.append(answer["metrics"]["speculative_decoding"])
        found = acceptance_between(before, counters(live.url, None))
        have = llm.get_metrics()["speculative_decoding"]
        assert found is not None and found["num_accepted_draft_tokens"] > 0
        for key in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens",
                    "acceptance_histogram", "mean_acceptance_length"):  # fmt: skip
            assert found[key] == have[key]
        assert found["num_draft_tokens"] == sum(spec["num_draft_tokens"] for spec in told)
        assert served_model(live.url, None) == "tiny"
    assert acceptance_between(None, before) is None
    empty = acceptance_between(before, before)
    assert empty is not None and empty["num_spec_steps"] == 0
    assert acceptance(steps=3, drafts=9, accepted=2, histogram=[2, 0, 1])["num_spec_tokens"] == 2


def test_servers_that_are_none_of_ours(llm: LLM, live: LiveServer) -> None:
    address = "http://127.0.0.1:1"
    assert base_url(address + "/v1/") == base_url(address) == address
    for wrong in ("127.0.0.1:1", "ftp://127.0.0.1", "http://", address + " x", ""):
        with pytest.raises(ConfigError, match="no address of a server"):
            base_url(wrong)
    assert counters(live.url + "/nothing", None) is None
    with pytest.raises(ConfigError, match="answers 404"):
        served_model(live.url + "/nothing", None)
    with LiveServer(make_app(llm, api_keys=["a-key-of-ours"])) as keyed:
        assert counters(keyed.url, None) is None
        with pytest.raises(ConfigError, match=r"answers 401.*none of the server's keys"):
            served_model(keyed.url, "another-key")
        assert served_model(keyed.url, "a-key-of-ours") == "tiny"


def test_random_texts_follow_from_the_seed() -> None:
    texts = random_texts(3, 20, 1)
    assert texts == random_texts(3, 20, 1) != random_texts(3, 20, 2)
    assert [len(text.split()) for text in texts] == [20] * 3 and len(set(texts)) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "nonsense"], "no address of a server"),
        (["--url", "http://127.0.0.1:1"], "does not answer"),
        (
            ["--url", "http://127.0.0.1", "--suffix"],
            "--suffix is an option of the server",
        ),
        (["--url", "http://127.0.0.1", "--model", "m"], "leave it out"),
        (["--compare", "plain", "plain"], "named twice"),
        (["--url", "http://127.0.0.1", "--compare", "http://127.0.0.1/v1"], "named twice"),
        (["--num-prompts", "3"], "fewer requests than are sent at a time"),
        (["--concurrency", "0"], r"--concurrency\[0\]"),
        (["--batch-size", "2"], "belongs to 'bench latency', not to 'bench serve'"),
        (["--system-prompt", "x"], "--system-prompt is not sent"),
        (["--tool-path", "/no/such/file"], "no program that can be run"),
        (["--input-file", "/no/such/file"], "cannot be read"),
    ],
)
def test_refusals(options: list[str], words: str, capsys: Capture) -> None:
    tool = [] if "--tool-path" in options else ["--tool-path", sys.executable]
    assert main(["bench", "serve", *tool, *options]) in (2, 4)
    assert re.search(words, capsys.readouterr().err)


def test_a_missing_tool_is_named_with_its_extra(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name in TOOLS:
        assert main(["bench", "serve", "--tool", name]) == 4
        said = capsys.readouterr().err
        assert f"needs {name}, which is not installed" in said
        assert "pip install 'specdec_ext[bench]'" in said and "--tool-path" in said


def test_options_of_serve_are_of_serve_alone(capsys: Capture) -> None:
    assert main(["bench", "latency", "--concurrency", "2"]) == 2
    assert "--concurrency belongs to 'bench serve'" in capsys.readouterr().err


# -- the tools, live ------------------------------------------------------------------------------


def prompts_file(folder: Path) -> tuple[str, list[str]]:
    texts = [f"abcabcabc {i} abcabc" for i in range(4)]
    path = folder / "prompts.txt"
    path.write_text("\n".join(texts))
    return str(path), texts


@pytest.mark.parametrize("tool", live_tools)
def test_a_server_of_ours_with_and_without_speculation(
    tool: str, llm: LLM, tiny_path: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The tool's report holds our acceptance numbers: those of the same prompts in process."""
    file, texts = prompts_file(tmp_path)
    result, artifacts = tmp_path / "result.json", tmp_path / "artifacts"
    code = main(
        ["bench", "serve", "--model", str(tiny_path), "--speculative-config",
         '{"method": "ngram", "max_draft_len": 4, "adaptive": false}', "--input-file", file,
         "--concurrency", "2", "--num-prompts", "4", "--output-len", "40", "--tool", tool,
         "--output-json", str(result), "--artifact-dir", str(artifacts)]
    )  # fmt: skip
    shown = capsys.readouterr()
    assert code == 0, shown.err
    report = json.loads(result.read_text())
    ours, plain = report["rows"]
    assert [row["server"] for row in (ours, plain)] == ["ngram", "plain"]
    assert report["tool"].startswith(tool + " ") and "ngram against plain, tokens/s" in shown.out
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    total: dict[str, int] = {}
    for output in llm.generate(texts, params, use_tqdm=False):
        spec = output.metrics["speculative_decoding"]
        for key in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
            total[key] = total.get(key, 0) + spec[key]
    assert total["num_accepted_draft_tokens"] > 0
    told = ours["speculative_decoding"]
    assert {key: told[key] for key in total} == total
    assert sum(told["acceptance_histogram"]) == total["num_spec_steps"]
    assert ours["acceptance_from"] == "answers"
    assert not (plain["speculative_decoding"] or {}).get("num_spec_steps")
    for row in (ours, plain):
        assert (row["requests"], row["failed_requests"], row["mean_output_tokens"]) == (4, 0, 40)
        assert len(row["ttfts_ms"]) == 4 and min(row["ttfts_ms"]) > 0
    if tool == "aiperf":  # it also reads /metrics by itself, first before the first request
        scraped = json.loads((artifacts / "2-0" / "server_metrics_export.json").read_text())
        check_scraped(scraped["metrics"], total)
    # What it wrote can be drawn, and shown again.
    assert next(figure.slug for figure in read_result(result).figures) == "speed"
    again = io.StringIO()
    print_serve(report, again)
    assert again.getvalue() in shown.out


def check_scraped(metrics: dict[str, Any], total: dict[str, int]) -> None:
    def value(name: str) -> float:
        return sum(float(series["stats"]["total"]) for series in metrics[name]["series"])

    assert value("vllm:spec_decode_num_drafts") == total["num_spec_steps"]
    assert value("vllm:spec_decode_num_draft_tokens") == total["num_draft_tokens"]
    accepted = total["num_accepted_draft_tokens"]
    assert value("vllm:spec_decode_num_accepted_tokens") == accepted
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos") == accepted


class Statuses:
    """Notes how POST requests are answered."""

    def __init__(self, app: Any, seen: list[int]) -> None:
        self._app, self._seen = app, seen

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start" and scope["method"] == "POST":
                self._seen.append(message["status"])
            await send(message)

        await self._app(scope, receive, sending)


@pytest.mark.parametrize("tool", live_tools)
def test_a_server_that_refuses_some(
    tool: str, tiny_path: Path, tmp_path: Path, capsys: Capture
) -> None:
    """By its address, through the chat endpoint, with a key: what failed is counted, exit code 1.
    A forward pass waits until requests have been refused."""
    file, _ = prompts_file(tmp_path)
    key = "a-key-of-ours"
    with make_llm(tiny_path, max_queued_requests=2) as llm:
        app = make_app(llm, api_keys=[key])
        statuses: list[int] = []
        app.add_middleware(Statuses, seen=statuses)
        forward: Any = llm.engine.model.forward

        def held(*given: Any) -> Any:
            if statuses:  # the warm-up has been answered
                wait_until(lambda: 429 in statuses)
            return forward(*given)

        llm.engine.model.forward = held  # type: ignore[method-assign]
        with LiveServer(app) as live:
            code = main(
                ["bench", "serve", "--url", live.url + "/v1", "--api-key", key, "--chat",
                 "--input-file", file, "--concurrency", "4", "--num-prompts", "8",
                 "--output-len", "20", "--tool", tool, "--json"]
            )  # fmt: skip
        shown = capsys.readouterr()
        assert code == 1, shown.err
        [row] = json.loads(shown.out)["rows"]
        assert row["failed_requests"] > 0 and row["requests"] > 0
        assert row["requests"] + row["failed_requests"] == 8
        assert sum(row["errors"].values()) == row["failed_requests"]
        assert row["server"] == live.url.removeprefix("http://")
        assert row["speculative_decoding"]["num_spec_steps"] > 0

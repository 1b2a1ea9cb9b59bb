"""specdec trace: what steps did, by the engine's own counts; as text, page and picture."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import result_files as files

from specdec_ext import LLM, ExternalDraftTokensConfig, RequestError, SamplingParams
from specdec_ext.cli import main
from specdec_ext.report.trace_page import trace_page
from specdec_ext.report.trace_text import print_trace, trace_svg
from tiny_models import save_tiny

Capture = pytest.CaptureFixture[str]
PROMPT = "abcabcabcabc"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


CONFIGS: dict[str, Any] = {
    "none": None,
    "ngram": {"method": "ngram", "max_draft_len": 6, "adaptive": False},
    "adaptive": {"method": "ngram", "max_draft_len": 6},
    "suffix": {"method": "suffix", "adaptive": False},
    "lookahead": {"method": "lookahead", "adaptive": False},
    "draft_target": {"method": "draft_target", "max_draft_len": 3, "adaptive": False},
}


def open_tiny(tiny: Path, method: str) -> LLM:
    config = CONFIGS[method]
    if method == "draft_target":
        config = {**config, "model": str(tiny)}
    return LLM(str(tiny), speculative_config=config, max_seq_len=256)


@pytest.mark.parametrize("method", CONFIGS)
def test_records_agree_with_the_counts(tiny: Path, method: str) -> None:
    """Tokens, rows, drafts and accepted drafts of all steps are those of the metrics; an accepted
    draft is the token that was delivered in its place; and nobody decodes otherwise for it."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, return_steps=True)
    with open_tiny(tiny, method) as llm:
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
        plain = dataclasses.replace(params, return_steps=False)
        [other] = llm.generate([PROMPT], plain, use_tqdm=False)
    one, spec = output.outputs[0], output.metrics["speculative_decoding"]
    assert other.outputs[0].steps is None and other.outputs[0].token_ids == one.token_ids
    assert one.steps is not None
    assert [token for step in one.steps for token in step.token_ids] == one.token_ids
    assert len(one.steps) == output.metrics["num_forward_passes"]
    assert sum(step.num_rows for step in one.steps) == output.metrics["num_rows"]
    drafted = [step for step in one.steps if step.drafts]
    assert [len(step.drafts) for step in drafted] == spec["per_step_drafted"]
    assert [step.num_accepted for step in drafted] == spec["per_step_accepted"]
    assert (method == "none") == (not drafted)
    for step in one.steps:
        path, at = [], -1
        for i, draft in enumerate(step.drafts):
            assert -1 <= draft.parent < i
            assert draft.sources == ("ngram" if method == "adaptive" else method,)
            if draft.accepted:
                assert draft.parent == at
                path.append(draft.token_id)
                at = i
        assert tuple(path) == step.token_ids[: step.num_accepted]
        assert step.num_accepted == len(path)
    times = [mark for step in one.steps for mark in (step.begin_ms, step.end_ms)]
    assert times == sorted(times) and times[0] >= 0


def test_sources_of_one_step(tiny: Path) -> None:
    """A prediction and lookup are named; drafts that came along are the request's."""
    with open_tiny(tiny, "adaptive") as llm:
        base = SamplingParams(max_tokens=30, ignore_eos=True, return_steps=True)
        [text] = llm.generate([PROMPT], base, use_tqdm=False)
        tokens = text.outputs[0].token_ids
        [output] = llm.generate(
            [PROMPT], dataclasses.replace(base, prediction=tokens), use_tqdm=False
        )
        steps = output.outputs[0].steps or []
        named = {source for step in steps for draft in step.drafts for source in draft.sources}
        assert "prediction" in named <= {"prediction", "ngram"}
        spec = output.metrics
        kept = sum(d.accepted for s in steps for d in s.drafts if "prediction" in d.sources)
        assert kept == spec["accepted_prediction_tokens"] > 0
        brought = ExternalDraftTokensConfig([*tokens[:2], 0], continue_decoding=True)
        [output] = llm.generate(
            [PROMPT], dataclasses.replace(base, external_draft=brought), use_tqdm=False
        )
        first = (output.outputs[0].steps or [])[0]
        assert [d.sources for d in first.drafts] == [("request",)] * 3
        assert [d.accepted for d in first.drafts] == [True, True, tokens[2] == 0]


def test_a_stop_string_cuts_the_record_too(tiny: Path) -> None:
    with open_tiny(tiny, "ngram") as llm:
        base = SamplingParams(max_tokens=40, ignore_eos=True, return_steps=True)
        [whole] = llm.generate([PROMPT], base, use_tqdm=False)
        text = whole.outputs[0].text
        params = dataclasses.replace(base, stop=[text[-3:]])
        [cut] = llm.generate([PROMPT], params, use_tqdm=False)
    one = cut.outputs[0]
    steps = one.steps or []
    assert one.finish_reason == "stop"
    assert [token for step in steps for token in step.token_ids] == one.token_ids
    accepted = [sum(draft.accepted for draft in step.drafts) for step in steps]
    assert accepted == [step.num_accepted for step in steps]
    assert sum(accepted) == cut.metrics["speculative_decoding"]["num_accepted_draft_tokens"]


def test_the_field_is_checked() -> None:
    with pytest.raises(RequestError, match=r"SamplingParams.return_steps = 1"):
        SamplingParams(return_steps=1)


def test_the_command(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    made = {name: tmp_path / f"t.{name}" for name in ("json", "html", "svg")}
    command = [
        "trace", "--model", str(tiny), "--input-text", PROMPT, "--max-output-len", "24",
        "--ignore-eos", "--prompt-lookup-config", "[6,2]", "--max-seq-len", "256",
        "--output-json", str(made["json"]), "--html", str(made["html"]), "--svg", str(made["svg"]),
    ]  # fmt: skip
    assert main(command) == 0
    said, aside = capsys.readouterr()
    assert "adaptive drafting: drafts paid in " in aside  # and why a step may have none
    data = json.loads(made["json"].read_text())
    assert data["benchmark"] == "trace" and data["method"] == "ngram"
    assert sum(len(step["tokens"]) for step in data["steps"]) == 24
    lines = said.splitlines()
    assert lines[0].split()[:5] == ["pass", "ms", "rows", "drafts", "source"]
    assert f"24 tokens in {len(data['steps'])} passes" in lines[-1]
    assert "\x1b" not in said
    assert main([*command, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["text"] == data["text"]
    assert main(["report", str(made["json"]), "-o", str(tmp_path / "r.html")]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prompt-lookup-style", "v1", "--prompt-lookup-config", "[4,2]"], 2, "use v2"),
        (["--max-output-len", "0"], 2, "max_tokens"),
    ],
)
def test_refusals(arguments: list[str], code: int, words: str, capsys: Capture) -> None:
    assert main(["trace", "--input-text", "x", *arguments]) == code
    assert words in capsys.readouterr().err


def test_where_it_goes_is_checked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("specdec_ext.cli.trace.make_llm", pytest.fail)
    for flag in ("--html", "--svg", "--output-json"):
        target = tmp_path / "nowhere" / "x"
        assert main(["trace", "--input-text", "x", flag, str(target)]) == 2
        assert f"{flag} '{target}': no such folder" in capsys.readouterr().err


def test_two_prompts_are_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "two.txt").write_text("a\nb\n")
    assert main(["trace", "--input-file", str(tmp_path / "two.txt")]) == 2
    assert "2 prompts: a trace shows one request" in capsys.readouterr().err


def test_text_in_colour_and_without() -> None:
    colored, plain = io.StringIO(), io.StringIO()
    print_trace(files.TRACE, colored, color=True)
    print_trace(files.TRACE, plain, color=False)
    assert re.sub(r"\x1b\[[\d;]*m", "", colored.getvalue()) != colored.getvalue()
    lines = plain.getvalue().splitlines()
    second = ["2", "8.0", "4", "2/3", "suffix", "prediction", "<b", "|", "x", "<b>"]
    assert lines[2].split() == second
    assert lines[3].split()[-4:] == ["\\nc", "|", "y", "\\ncd"]
    assert (
        "7 tokens in 3 passes (2.33 a pass), 28 ms; 4 of 6 drafts accepted; finish reason: length"
        in lines[-1]
    )


def test_the_picture_asks_for_nothing() -> None:
    svg = trace_svg(files.TRACE, "a <title>")
    addresses = re.findall(r"https?://[\w./]+", svg)
    assert all("w3.org" in a or "textualize" in a for a in addresses), addresses
    assert ("@font-face" not in svg and "a&#160;&lt;title&gt;" in svg) or "a &lt;title&gt;" in svg


def test_the_page_in_a_browser(browser: Any, tmp_path: Path) -> None:
    target = tmp_path / "trace.html"
    target.write_text(trace_page(files.TRACE, "trace"), encoding="utf-8")
    page = browser.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text))
    page.goto(target.as_uri())
    assert page.evaluate("document.getElementById('text').textContent") == files.TRACE["text"]
    marked = "[...document.querySelectorAll('#text .draft')].map(n => n.textContent)"
    assert page.evaluate(marked) == ["<", "b", "\n", "c"]
    rows = page.evaluate("document.querySelectorAll('#steps tbody tr').length")
    assert rows == 3
    assert page.evaluate("document.querySelectorAll('#steps li.yes').length") == 4
    assert page.evaluate("document.querySelectorAll('#steps li.no').length") == 2
    nested = "document.querySelector('#steps li.yes li.yes code').textContent"
    assert page.evaluate(nested) == "b"
    assert problems == []
    page.close()

"""specdec summarize: articles, prompts, scores, and what it says of them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import ConfigError, ModelError
from specdec_ext.cli import main
from specdec_ext.text.tokenizer import load_tokenizer
from specdec_ext.workflow import articles as articles_module
from specdec_ext.workflow import fetched_file, summarize
from specdec_ext.workflow.articles import Article, read_articles
from specdec_ext.workflow.summarize import prompts_of, rouge

Capture = pytest.CaptureFixture[str]
ROWS = [
    {"article": "One two three. One two three. One two three.", "highlights": "One two three."},
    {"article": "The river runs down to the sea, to the sea.", "highlights": "The sea."},
    {"article": "abcabcabcabcabc", "highlights": "abc"},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "data.jsonl", ROWS)


def test_fields_by_any_of_their_names(tmp_path: Path) -> None:
    rows = [
        {"article": "a", "highlights": "b"},
        {"document": "a", "summary": "b"},
        {"text": "a", "summary": "b", "id": 7},
    ]
    found = read_articles(write(tmp_path / "x.jsonl", rows), 10)
    assert [(a.text, a.summary) for a in found] == [("a", "b")] * 3
    assert len(read_articles(tmp_path / "x.jsonl", 2)) == 2


def test_of_a_folder_the_test_part_is_read(tmp_path: Path) -> None:
    write(tmp_path / "set" / "train.jsonl", ROWS[:1])
    write(tmp_path / "set" / "dataset_info.json", [{"features": {}}])
    assert len(read_articles(tmp_path / "set", 10)) == 1
    write(tmp_path / "set" / "data" / "test-00000.jsonl", ROWS)
    assert len(read_articles(tmp_path / "set", 10)) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"article": "a"}', r":2: field 'highlights' is missing \(there are article\)"),
        ('{"highlights": "a"}', ":2: field 'article' is missing"),
        ('{"article": "", "highlights": "a"}', ":2: article = '': expected text"),
        ('{"article": ["a"], "highlights": "a"}', ":2: article = .*expected text"),
        ('["a"]', ":2: .*expected an object"),
        ('{"article": ', ":2: not JSON"),
        ("{}", r"there are none"),
    ],
)
def test_bad_lines_are_named(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=words):
        read_articles(path, 10)


@pytest.mark.parametrize(("make", "words"), [("nothing", "no such"), ("empty file", "no article"),
                                             ("empty folder", "no .jsonl or .json")])  # fmt: skip
def test_no_articles(make: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if make == "empty file":
        path.write_text("\n")
    elif make == "empty folder":
        path.mkdir()
    with pytest.raises(ConfigError, match=words):
        read_articles(path, 10)


def test_papers_that_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched_file, "cache_root", lambda: tmp_path)
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no matching distribution")
    monkeypatch.setattr(fetched_file.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(ModelError, match=r"no matching distribution.*--dataset_dir"):
        read_articles(None, 1)
    other = tmp_path / "datasets" / "aclsum-0.1.2" / articles_module._PAPERS.file
    write(other, [{"id": "x"}])
    with pytest.raises(ModelError, match=r"sha256 is .*, expected 491ee57a.*delete the folder"):
        read_articles(None, 1)


def test_a_paper_is_abstract_introduction_and_conclusion() -> None:
    row = {
        "id": "P1",
        "sentences": {"abstract": ["A one .", "A two ."], "conclusion": ["C ."]},
        "summary": {"challenge": "Hard .", "outcome": "Good ."},
    }
    paper = articles_module._paper(("place:1", row))
    assert paper == Article("P1", "A one . A two .\n\nC .", "Hard .\nGood .")


def test_a_long_article_loses_its_end_alone(long_tiny: Path) -> None:
    tokenizer = load_tokenizer(None, long_tiny)
    ending = tokenizer.encode(" TL;DR:", add_special_tokens=False)
    [short, long] = prompts_of(
        [Article("a", "He did n't.", ""), Article("b", "x" * 100, "")], tokenizer, 30
    )
    assert short == [*tokenizer.encode("He didn't."), *ending]
    assert len(long) == 30 and long[-len(ending) :] == ending
    with pytest.raises(ConfigError, match="max_input_length = 3"):
        prompts_of([Article("a", "b", "")], tokenizer, 3)


def test_scores_by_hand() -> None:
    articles = [Article("", "", "the cat sat"), Article("", "", "a dog")]
    found = rouge(["the cat ran", "a dog"], articles)
    # 2 of 3 words, 1 of 2 pairs, a common subsequence of 2; then all of them.
    assert found["rouge1"] == pytest.approx(100 * (2 / 3 + 1) / 2)
    assert found["rouge2"] == pytest.approx(100 * (1 / 2 + 1) / 2)
    assert found["rougeL"] == pytest.approx(100 * (2 / 3 + 1) / 2)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "method", ["--prompt_lookup_config=[4,2]", "--lookahead_config=[4,3,4]", "--suffix"]
)
def test_both_sides_and_their_scores(
    method: str, batch: int, long_tiny: Path, data: Path, tmp_path: Path, capsys: Capture
) -> None:
    target = tmp_path / "report.json"
    command = ["summarize", "--test_hf", "--test_specdec", f"--hf_model_dir={long_tiny}"]
    command += [f"--dataset_dir={data}", f"--batch_size={batch}", "--output_len=24", method]
    assert main([*command, f"--output_json={target}"]) == 0
    report = json.loads(target.read_text())
    sides = report["sides"]
    assert list(sides) == ["transformers", "plain", "speculative"]
    assert report["identical"] == len(ROWS) == len(report["articles"])
    if batch == 1:  # padded rows of transformers differ in last bits
        assert sides["transformers"]["token_ids"] == sides["plain"]["token_ids"]
    assert sides["plain"]["rouge"] == sides["speculative"]["rouge"]
    assert sides["speculative"]["acceptance_length"] >= 1
    assert "identical: 3 of 3" in capsys.readouterr().out


def test_max_ite_counts_batches(long_tiny: Path, data: Path, capsys: Capture) -> None:
    command = ["summarize", "--test_trt_llm", f"--model={long_tiny}", f"--dataset_dir={data}"]
    assert main([*command, "--batch_size=2", "--max_ite=1", "--output_len=4", "--json",
                 "--no-speculation"]) == 0  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert len(report["articles"]) == 2 and list(report["sides"]) == ["plain"]
    assert report["identical"] is None


def test_tokens_that_differ_are_a_failure(
    long_tiny: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run = summarize.run_ours

    def wrong(*args: Any, **how: Any) -> Any:
        side = run(*args, **how)
        if how["speculative"]:
            side.token_ids[1][-1] += 1
        return side

    monkeypatch.setattr(summarize, "run_ours", wrong)
    command = ["summarize", "--test_trt_llm", f"--model={long_tiny}", f"--dataset_dir={data}"]
    assert main([*command, "--prompt_lookup_config=[4,2]", "--output_len=8"]) == 1
    said = capsys.readouterr()
    assert "identical: 2 of 3" in said.out
    assert "data.jsonl:2: speculative tokens differ from plain ones" in said.err


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ([], 2, "nothing to do"),
        (["--test_hf", "--check_accuracy"], 2, "--check_accuracy needs --test_trt_llm"),
        (["--test_hf", "--batch_size=0"], 2, "--batch_size = 0"),
        (["--test_trt_llm", "--eval_task=code_completion"], 3, "use --eval_task=summarize"),
        (["--test_trt_llm", "--dataset_dir=/no/such"], 4, "no such file"),
        (["--test_trt_llm", "--data_type=fp7"], 4, "fp7"),
    ],
)
def test_bad_commands(
    flags: list[str], code: int, words: str, long_tiny: Path, capsys: Capture
) -> None:
    assert main(["summarize", f"--model={long_tiny}", *flags]) == code
    assert words in capsys.readouterr().err


def test_chat_wraps_what_is_not_wrapped(tmp_path: Path, capsys: Capture) -> None:
    """By the built-in template: the tiny tokenizer knows its marks."""
    from tiny_models import save_tiny

    folder = save_tiny(tmp_path / "tiny")

    def prompt(text: str) -> tuple[str, str]:
        command = ["generate", f"--model={folder}", "--input_text", text, "--chat", "--json"]
        assert main([*command, "--max_output_len=2"]) == 0
        said = capsys.readouterr()
        return json.loads(said.out)["prompt"], said.err

    wrapped, said = prompt("Hi")
    assert wrapped == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert "not wrapped again" not in said
    command = ["generate", f"--model={folder}", "--input_text", "Hi", "Ho", "--chat"]
    assert main([*command, "--max_output_len=2"]) == 0
    said_out = capsys.readouterr().out
    assert "=== 1/2: Hi\n" in said_out and "=== 2/2: Ho\n" in said_out
    again, said = prompt(wrapped)
    assert again == wrapped and "not wrapped again" in said
    command = ["generate", f"--model={folder}", "--input_text", wrapped, "--system_prompt", "Be."]
    assert main(command) == 2
    assert "write the system message into the prompt" in capsys.readouterr().err


def test_where_the_report_goes_is_checked_first(
    long_tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("specdec_ext.cli.summarize.make_llm", pytest.fail)
    sealed = tmp_path / "sealed.json"
    sealed.write_text("{}")
    monkeypatch.setattr("specdec_ext.cli.output.os.access", lambda path, how: path != sealed)
    for path, words in (
        (tmp_path / "nowhere" / "x.json", "no such folder .*make it first"),
        (tmp_path, "is a folder"),
        (sealed, "cannot be written"),
    ):
        command = ["summarize", "--test_specdec", f"--model={long_tiny}", f"--dataset_dir={data}"]
        assert main([*command, f"--output_json={path}"]) == 2
        assert re.search(f"--output_json '{path}'.*{words}", capsys.readouterr().err)

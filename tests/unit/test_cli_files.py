"""The files that commands read prompts from and write to."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import (
    ConfigError,
)
from specdec_ext.cli import main
from specdec_ext.cli.chat import _lines
from specdec_ext.cli.form import structured_outputs
from specdec_ext.cli.prompts import read_prompts
from specdec_ext.cli.tune import read_cost
from specdec_ext.config.medusa_choices import parse_choices, published_trees
from specdec_ext.config.medusa_tuner import read_rates
from specdec_ext.config.read_text import read_text
from specdec_ext.text.chat_template import _choose
from specdec_ext.training.overlap import read_texts
from specdec_ext.workflow.articles import _rows


def prompts(tmp_path: Path, name: str, text: str) -> list[Any]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_prompts(
        argparse.Namespace(input_text=None, input_file=str(path), command="generate")
    )


def test_prompt_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prompts(tmp_path, "p.txt", "one\n\n  two\nthré\n") == ["one", "  two", "thré"]
    lines = '"one"\n{"prompt": "two"}\n{"prompt_token_ids": [1, 2]}\n\n{"messages": []}\n'
    assert prompts(tmp_path, "p.jsonl", lines) == [
        "one", "two", {"prompt_token_ids": [1, 2]}, {"messages": []},
    ]  # fmt: skip
    for text, message in (("", "no prompt"), ("{", ":1: not JSON"), ('"a"\n5\n', ":2: expected")):
        with pytest.raises(SystemExit) as done:
            prompts(tmp_path, "bad.jsonl", text)
        assert done.value.code == 2
        assert message in capsys.readouterr().err
    array = '["one", {"prompt": "two\\n"},\n {"prompt_token_ids": [1, 2]}]'
    assert prompts(tmp_path, "p.json", array) == ["one", "two\n", {"prompt_token_ids": [1, 2]}]
    for text, message in (
        ("[]", "expected a JSON array"), ('{"prompt": "a"}', "expected a JSON array"),
        ('["a", 5]', "bad.json[1]: expected a string"), ('"a"\n"b"\n', "not JSON"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as done:
            prompts(tmp_path, "bad.json", text)
        assert done.value.code == 2
        assert message in capsys.readouterr().err


def test_a_byte_order_mark_is_part_of_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def marked(name: str, text: str) -> str:
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        return str(tmp_path / name)

    assert prompts(tmp_path, "p.txt", "\ufeffone\ntwo\n") == ["one", "two"]
    assert prompts(tmp_path, "p.jsonl", '\ufeff"one"\n') == ["one"]
    assert prompts(tmp_path, "p.json", '\ufeff["one"]') == ["one"]
    for name, wanted in ((None, ["one\ntwo"]), ("-", ["one", "two"])):
        monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffone\ntwo\n"))
        args = argparse.Namespace(input_text=None, input_file=name, command="generate")
        assert read_prompts(args) == wanted
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffone\ntwo\n"))
    assert list(_lines()) == ["one", "two"]
    form = argparse.Namespace(json_schema=marked("s.json", "{}"), command="generate")
    assert structured_outputs(form) == {"json": "{}"}
    assert read_text(marked("c.json", '{"method": "ngram"}')) == {"method": "ngram"}
    assert read_text(marked("c.yaml", "method: ngram")) == {"method": "ngram"}
    assert read_rates(marked("rates.json", "[[0.5]]")) == ((0.5,),)
    assert read_cost(marked("cost.json", '{"1": 1, "8": 2}')) == {1: 1.0, 8: 2.0}
    tree = parse_choices(marked("tree.txt", "mc_sim_7b_63"), "tree", ConfigError)
    assert tree == published_trees()["mc_sim_7b_63"]
    assert _choose(None, marked("own.jinja", "{{ messages }}")) == "{{ messages }}"
    assert list(read_texts(marked("e.json", '["one"]'))) == ["one"]
    rows = _rows(Path(marked("articles.jsonl", '{"article": "a"}\n')), 9)
    assert [row for _, row in rows] == [{"article": "a"}]


def test_a_line_of_json_ends_where_the_line_does(tmp_path: Path) -> None:
    """Other separators than a newline may stand in a JSON text as they are."""
    text = "one\u2028two\x85three"
    line = json.dumps(text, ensure_ascii=False)
    assert prompts(tmp_path, "p.jsonl", f"{line}\n{line}\r\n") == [text, text]
    (tmp_path / "e.jsonl").write_text(line + "\n", encoding="utf-8")
    assert list(read_texts(tmp_path / "e.jsonl")) == [text]


def test_stdin_that_is_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    with pytest.raises(SystemExit):
        read_prompts(argparse.Namespace(input_text=None, input_file="-", command="generate"))
    assert "stdin cannot be read: 'utf-8' codec" in capsys.readouterr().err


TREE = ["tree", "--medusa-choices", "{0,0},{1}", "--output"]


def test_a_file_is_replaced_whole_and_beside_it_nothing(tmp_path: Path) -> None:
    """Links stay links, permissions stay, and a file of the user's beside it is not touched."""
    real, link, beside = tmp_path / "real", tmp_path / "link", tmp_path / "real.new"
    link.symlink_to(real)
    beside.write_text("mine")
    for mode in (None, 0o604):
        if mode is not None:
            real.chmod(mode)
        mask = os.umask(0o027)
        try:
            assert main([*TREE, str(link)]) == 0
        finally:
            os.umask(mask)
        assert json.loads(real.read_text())["medusa_choices"] == [[0], [1], [0, 0]]
        assert real.stat().st_mode & 0o777 == (0o640 if mode is None else mode)
    assert link.is_symlink() and beside.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["link", "real", "real.new"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main([*TREE, str(pipe)]) == 0
        assert json.loads(os.read(reader, 1 << 16))["medusa_choices"]
    finally:
        os.close(reader)
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("old")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert main([*TREE, str(kept)]) == 2
    assert "cannot be written: No space left" in capsys.readouterr().err
    assert kept.read_text() == "old" and os.listdir(tmp_path) == ["kept"]


def test_outputs_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    circle, rates, same = tmp_path / "circle", tmp_path / "rates.json", tmp_path / "same.svg"
    circle.symlink_to(circle)
    rates.write_text("[[0.5]]")
    command = ["tree", "--rates", str(rates), "--output"]
    for more, words in (
        ([str(circle)], "cannot be written"),
        ([str(rates)], "a file that the command reads; give another"),
        ([str(same), "--draw", str(same)], "--output and --draw both name .*; give two files"),
        ([str(tmp_path / "no" / "x")], "no such folder"),
        ([str(tmp_path)], "is a folder"),
    ):
        assert main([*command, *more]) == 2
        assert re.search(words, capsys.readouterr().err)
    assert rates.read_text() == "[[0.5]]" and circle.is_symlink() and not same.exists()

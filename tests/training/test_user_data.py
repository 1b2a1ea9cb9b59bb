"""The user's files: every format, and what is wrong with them, by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from workshop import Workshop

from specdec_ext.errors import ConfigError
from specdec_ext.training.texts import Frame, example_tasks
from specdec_ext.training.user_data import Example, read_examples

USER, REPLY = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}
MORE = [{"role": "user", "content": "More"}, {"role": "assistant", "content": "Enough"}]


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
    return path


def said(examples: list[Example]) -> list[tuple[list[str], str | None]]:
    return [([m["content"] for m in e.messages], e.answer) for e in examples]


TURNS = [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "Hi?"},
         {"from": "gpt", "value": "Yes."}]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "with_answer", "as_prompt"),
    [
        ({"messages": [USER, REPLY]}, [(["Hi?"], "Yes.")], [(["Hi?"], None)]),
        (
            {"messages": [USER, REPLY, *MORE], "id": 7},
            [(["Hi?"], "Yes."), (["Hi?", "Yes.", "More"], "Enough")],
            [(["Hi?", "Yes.", "More"], None)],
        ),
        (
            {"conversations": TURNS},
            [(["Be kind.", "Hi?"], "Yes.")],
            [(["Be kind.", "Hi?"], None)],
        ),
        (
            {"instruction": "Add.", "input": "1 2", "output": "3"},
            [(["Add.\n\n1 2"], "3")],
            [(["Add.\n\n1 2"], None)],
        ),
        (
            {"instruction": "Add.", "input": "", "output": "3"},
            [(["Add."], "3")],
            [(["Add."], None)],
        ),
        ({"prompt": "p", "completion": "c"}, [(["p"], "c")], [(["p"], None)]),
        ({"prompt": "p", "response": "c"}, [(["p"], "c")], [(["p"], None)]),
        ({"text": "A text."}, [([], "A text.")], [(["A text."], None)]),
    ],
)
def test_every_format(record: Any, with_answer: Any, as_prompt: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", record, "", record)
    assert said(read_examples([path], prompts=False)) == 2 * with_answer
    assert said(read_examples([path], prompts=True)) == 2 * as_prompt
    whole = tmp_path / "a.json"
    whole.write_text(json.dumps([record]))
    assert said(read_examples([whole, path], prompts=False)) == 3 * with_answer
    assert read_examples([path], prompts=True)[-1].place == f"{path}, line 3"


def test_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\ufeffOne line.\n\nAnother line.\n")
    assert said(read_examples([path], prompts=False)) == [([], "One line.\n\nAnother line.\n")]
    assert said(read_examples([path], prompts=True)) == [
        (["One line."], None),
        (["Another line."], None),
    ]


def test_prompts_need_no_answer(tmp_path: Path) -> None:
    for record in (
        {"messages": [USER]}, {"instruction": "Hi?"}, {"prompt": "Hi?"},
        {"conversations": TURNS[1:2]},
    ):  # fmt: skip
        path = lines(tmp_path / "a.jsonl", record)
        assert said(read_examples([path], prompts=True)) == [(["Hi?"], None)]
        with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: "):
            read_examples([path], prompts=False)


GOOD = {"messages": [USER, REPLY]}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", r"a\.jsonl, line 2: not JSON"),
        ("[1]", r"line 2: a list in the place of an object; expected 'messages'"),
        ({"question": "x"}, r"line 2: its keys are 'question'; expected 'messages'"),
        ({}, r"line 2: its keys are none"),
        ({"text": "x"}, r"line 2: a record of format 'text', those .* are 'messages'; .*split"),
        ({"messages": [USER]}, r"line 2: a conversation without an answer; .*--prompts"),
        ({"messages": [REPLY]}, r"line 2: a conversation without an answer"),
        ({"messages": [USER, {**REPLY, "content": " "}]}, r"line 2: a conversation without"),
        ({"messages": []}, r"line 2: messages has 0 entries"),
        ({"messages": "Hi?"}, r"line 2: messages = 'Hi\?'"),
        ({"messages": [{"role": "user"}]}, r"line 2: messages\[0\].content"),
        ({"messages": [{"role": "bot", "content": "x"}]}, r"line 2: messages\[0\].role = 'bot'"),
        ({"messages": [USER, {**REPLY, "content": "\ud800"}]}, r"line 2: messages\[1\].content"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(bad: Any, message: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", GOOD, bad, GOOD)
    with pytest.raises(ConfigError, match=message):
        read_examples([path], prompts=False)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"instruction": "x"}, "'output' is missing: expected text; fill it in or remove"),
        ({"instruction": "", "output": "x"}, "'instruction' is empty"),
        ({"instruction": "x", "input": 3, "output": "y"}, "'input' = 3: expected text"),
        ({"prompt": ["x"], "completion": "y"}, "'prompt' = .*: expected text"),
        ({"text": None}, "'text' is missing"),
        ({"conversations": 3}, "'conversations' is a int"),
        ({"conversations": [{"from": "eve", "value": "x"}]}, r"conversations\[0\].from = 'eve'"),
        ({"conversations": [{"from": "human", "value": 1}]}, r"messages\[0\].content = 1"),
    ],
)
def test_missing_fields_are_named(record: Any, message: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", record)
    with pytest.raises(ConfigError, match=rf"a\.jsonl, line 1: .*{message}"):
        read_examples([path], prompts=False)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    (tmp_path / "one.json").write_text('{"text": "x"}')
    (tmp_path / "x.csv").write_text("a,b\n")
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("empty.jsonl", "holds no record"),
        ("empty.txt", "holds no record"),
        ("latin.jsonl", "cannot be read as UTF-8"),
        ("one.json", "holds a list of records"),
        ("x.csv", "not a data file"),
        ("folder", "not a data file"),
        ("missing.jsonl", "no such file"),
    ):
        with pytest.raises(ConfigError, match=rf"{name}.*{message}"):
            read_examples([tmp_path / name], prompts=False)


def test_parquet_and_saved_data_sets(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(5)])
    expected = [([f"p{i}"], f"c{i}") for i in range(5)]
    (tmp_path / "rows").mkdir()
    pq.write_table(table, tmp_path / "rows" / "part-0.parquet")
    assert said(read_examples([tmp_path / "rows"], prompts=False)) == expected
    assert said(read_examples([tmp_path / "rows" / "part-0.parquet"], prompts=False)) == expected
    saved = tmp_path / "saved" / "train"  # as datasets.save_to_disk lays it out
    saved.mkdir(parents=True)
    for i, part in enumerate((table.slice(0, 3), table.slice(3))):
        with (
            pa.OSFile(str(saved / f"data-{i}.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as stream,
        ):
            stream.write_table(part)
    names = [{"filename": f"data-{i}.arrow"} for i in range(2)]
    (saved / "state.json").write_text(json.dumps({"_data_files": names}))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for folder in (saved, saved.parent):
        assert said(read_examples([folder], prompts=False)) == expected
    with pytest.raises(ConfigError, match=r"data-1\.arrow, row 2: .*'completion' is empty"):
        bad = table.slice(0, 2).to_pylist()
        bad[1]["completion"] = ""
        with (
            pa.OSFile(str(saved / "data-1.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as stream,
        ):
            stream.write_table(pa.Table.from_pylist(bad))
        read_examples([saved], prompts=False)
    (saved / "data-1.arrow").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"data-1\.arrow: cannot be read"):
        read_examples([saved], prompts=False)
    (saved / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"state\.json: cannot be read"):
        read_examples([saved], prompts=False)


def test_without_pyarrow_the_extra_is_named(monkeypatch: Any, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"pip install 'specdec_ext\[data\]'"):
        read_examples([tmp_path / "x.parquet"], prompts=False)


# -- as tokens ------------------------------------------------------------------------------------


def frame_tasks(workshop: Workshop, examples: list[Example], frame: Frame | None = None) -> Any:
    frame = frame or workshop.frame
    return example_tasks(examples, frame, max_prompt_len=30, max_new_tokens=8, seed=1)


def test_a_conversation_is_wrapped_and_ends_as_the_template_ends_it(workshop: Workshop) -> None:
    [task] = frame_tasks(workshop, [Example((USER,), "Yes.", "messages", "x")])
    decode = workshop.tokenizer.decode
    assert decode(list(task.ids)).endswith("Hi?<|im_end|>\n<|im_start|>assistant\n")
    assert decode(list(task.answer)) == "Yes.<|im_end|>"
    [long] = frame_tasks(workshop, [Example((USER,), "A longer answer", "messages", "x")])
    assert decode(list(long.answer)) == "A longer" and long.ids == task.ids


def test_without_a_template(workshop: Workshop) -> None:
    raw = Frame(workshop.tokenizer, "none", workshop.config.eos_token_ids)
    example = Example((USER, REPLY, MORE[0]), "No.", "messages", "x")
    [task] = frame_tasks(workshop, [example], raw)
    assert workshop.tokenizer.decode(list(task.ids)) == "Hi?\n\nYes.\n\nMore"
    assert task.answer[-1] == workshop.config.eos_token_ids[0]


def test_a_document_is_read_in_stretches(workshop: Workshop) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    tasks = frame_tasks(workshop, [Example((), text, "text", "x")])
    decode = workshop.tokenizer.decode
    assert (
        "".join(decode(list(t.answer)) for t in tasks) == text[1:-1]
    )  # one token is nothing to learn
    assert [decode(list(t.ids)) for t in tasks] == ["a", text[:9], text[:17], text[:25]][
        : len(tasks)
    ]


def test_equal_texts_are_one_and_a_prompt_draws_alike_wherever_it_stands(
    workshop: Workshop,
) -> None:
    asked = [
        Example(({"role": "user", "content": f"q{i % 40}"},), None, "m", "x") for i in range(60)
    ]
    tasks = frame_tasks(workshop, asked)
    assert len(tasks) == 40
    assert {t.key for t in frame_tasks(workshop, asked[::-1])} == {t.key for t in tasks}
    hot = [t for t in tasks if t.temperature]
    assert 0 < len(hot) < 40 and len({t.seed for t in tasks}) == 40


def test_what_a_template_refuses_names_its_place(workshop: Workshop) -> None:
    picky = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0].content }}!"  # noqa: E501
    frame = Frame(workshop.tokenizer, picky, workshop.config.eos_token_ids)
    system = {"role": "system", "content": "Be kind."}
    with pytest.raises(ConfigError, match=r"mine\.jsonl, line 4: .*--chat-template none"):
        frame_tasks(workshop, [Example((system, USER), "x y", "m", "mine.jsonl, line 4")], frame)

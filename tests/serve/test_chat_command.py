"""`specdec chat`: in process and against a server the same words; Ctrl-C ends an answer."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.control import strip_control_codes
from servers import LiveServer, all_returned

from specdec_ext import LLM, SamplingParams
from specdec_ext.cli import main
from specdec_ext.cli.chat import DEFAULT_MAX_TOKENS, _Local, _Remote

QUESTION = "abcabcabcabc"
LOCAL = ["--prompt-lookup-config", "[4,2]", "--no-adaptive"]


def answer(llm: LLM, *turns: str, system: str | None = None, tokens: int = 40) -> str:
    messages = [{"role": "system", "content": system}] if system else []
    for i, text in enumerate(turns):
        messages.append({"role": ("user", "assistant")[i % 2], "content": text})
    params = SamplingParams(max_tokens=tokens)
    return llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text


def shown_as(text: str) -> str:
    """rich writes no control characters."""
    return strip_control_codes(text) + "\n"


@pytest.fixture(params=["local", "remote"])
def where(request: pytest.FixtureRequest, tiny_path: Path, live: LiveServer) -> list[str]:
    if request.param == "local":
        return ["--model", str(tiny_path), *LOCAL]
    return ["--url", live.url]


def test_one_question(llm: LLM, where: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-tokens", "40", "--stats", *where]
    assert main(["chat", QUESTION, *options]) == 0
    shown = capsys.readouterr()
    assert shown.out == shown_as(answer(llm, QUESTION))
    assert re.search(r"in \d+ passes .*[1-9]\d* of \d+ drafts", shown.err.replace("\n", " "))
    assert main(["chat", QUESTION, "--color", "always", *options]) == 0
    colored = capsys.readouterr().out
    assert "\x1b[32m" in colored
    plain = re.sub(r"\x1b\[\d*m", "", colored)
    assert plain == shown_as(answer(llm, QUESTION))


def test_a_conversation(
    llm: LLM, where: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    lines = [QUESTION, "again", "/method off", "/stats", "/system Be brief.", QUESTION, "/stats",
             "/new", "/nonsense", "/quit", "not asked"]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", "--max-tokens", "40", *where]) == 0
    shown = capsys.readouterr()
    first = answer(llm, QUESTION)
    wanted = [first, answer(llm, QUESTION, first, "again"),
              answer(llm, QUESTION, system="Be brief.")]  # fmt: skip
    assert shown.out == "".join(map(shown_as, wanted))
    told = shown.err.replace("\n", " ")
    assert " 0 of 0 drafts" in told and "/method on|off" in told
    assert "answers are decoded plainly" in told
    assert "there is no command '/nonsense'; there are" in told
    assert "(cut: the answer reached --max-tokens" in told


def test_an_answer_has_what_a_server_has_room_for(
    llm: LLM, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --max-tokens: the default may be more than a short context has room for."""
    room = llm.memory.max_seq_len - len(llm.prompts.read_chat([
        {"role": "user", "content": QUESTION}
    ])[1])  # fmt: skip
    assert room < DEFAULT_MAX_TOKENS
    assert main(["chat", QUESTION, *where]) == 0
    assert capsys.readouterr().out == shown_as(answer(llm, QUESTION, tokens=room))


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_ctrl_c_ends_the_answer_and_nothing_else(
    llm: LLM, live: LiveServer, tiny_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, kind: str,
) -> None:  # fmt: skip
    source = _Local if kind == "local" else _Remote
    real = source.answer
    asked: list[list[dict[str, str]]] = []

    def interrupted(self: Any, messages: list[dict[str, str]], speculate: bool) -> Iterator[Any]:
        asked.append(list(messages))
        for i, piece in enumerate(real(self, messages, speculate)):
            yield piece
            if i == 2 and len(asked) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(source, "answer", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\nand now?\n"))
    where = ["--model", str(tiny_path), *LOCAL] if kind == "local" else ["--url", live.url]
    with all_returned(llm):
        assert main(["chat", "--max-tokens", "300", *where]) == 0
    begun = capsys.readouterr().out.split("\n")[0]
    whole = answer(llm, QUESTION, tokens=300)
    # What was written is part of the conversation.
    question, written, next_one = [turn["content"] for turn in asked[1]]
    assert (question, next_one) == (QUESTION, "and now?")
    assert 0 < len(written) < len(whole) and whole.startswith(written)
    assert shown_as(written).startswith(begun)


def test_mistakes(
    tiny_path: Path, live: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    assert main(["chat", "x", "--url", live.url, "--model", str(tiny_path)]) == 2
    assert "is an option of the server" in capsys.readouterr().err
    assert main(["chat", "x", "--url", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
    assert main(["chat", "x" * 600, "--url", live.url]) == 1
    assert "max_seq_len" in capsys.readouterr().err
    assert main(["chat", "x", "--url", live.url.partition("://")[2]]) == 4
    assert "is no address of a server; give one such as http://" in capsys.readouterr().err
    # In a conversation a refused question is told, and not kept.
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 600 + "\nhi\n"))
    assert main(["chat", "--max-tokens", "5", "--url", live.url]) == 0
    shown = capsys.readouterr()
    assert "error:" in shown.err and shown.out.count("\n") >= 1

"""Chat templates: built-in ones against prompts written by hand; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specdec_ext.chat_template import render_chat
from specdec_ext.errors import ConfigError, RequestError

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]


def make(extra: tuple[str, ...] = (), template: str | None = None) -> Any:
    vocab = {w: i for i, w in enumerate(("<s>", "</s>", "<unk>", *extra))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def test_vicuna() -> None:
    assert render_chat(make(), CONVERSATION, chat_template="vicuna") == (
        "Be brief. USER: Hi ASSISTANT: Hello.</s> USER: Bye ASSISTANT:"
    )
    alone = render_chat(make(), CONVERSATION[1:2], chat_template="vicuna")
    assert alone == (
        "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. USER: Hi ASSISTANT:"
    )


def test_llama2() -> None:
    assert render_chat(make(), CONVERSATION, chat_template="llama2") == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Bye [/INST]"
    )


def test_chatml_by_name_and_by_vocabulary() -> None:
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CONVERSATION)
    by_name = render_chat(make(), CONVERSATION, chat_template="chatml")
    assert by_name == expected + "<|im_start|>assistant\n"
    assert render_chat(make(("<|im_start|>",)), CONVERSATION) == by_name
    assert (
        render_chat(make(), CONVERSATION, chat_template="chatml", add_generation_prompt=False)
        == expected
    )


def test_own_template_file_and_text(tmp_path: Path) -> None:
    own = make(template="own:{{ messages[0].content }}")
    assert render_chat(own, CONVERSATION) == "own:Be brief."
    path = tmp_path / "t.jinja"
    path.write_text("file:{{ messages | length }}")
    assert render_chat(own, CONVERSATION, chat_template=str(path)) == "file:4"
    assert render_chat(own, CONVERSATION, chat_template="{{ 7 }}") == "7"


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        render_chat(make(), CONVERSATION)
    with pytest.raises(ConfigError, match="vicunna"):
        render_chat(make(), CONVERSATION, chat_template="vicunna")
    with pytest.raises(RequestError, match=r"refused them.*no way"):
        render_chat(make(template="{{ raise_exception('no way') }}"), CONVERSATION)


@pytest.mark.parametrize("messages", [
    "hi", [], [{"role": "user"}], [{"role": "pope", "content": "x"}], ["hi"], {"role": "user"},
    [{"role": "user", "content": ["x"]}], [{"role": "user", "content": None}],
])  # fmt: skip
def test_bad_messages(messages: Any) -> None:
    with pytest.raises(RequestError, match="messages"):
        render_chat(make(), messages, chat_template="chatml")

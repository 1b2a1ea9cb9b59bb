"""Chat templates: built-in ones against prompts written by hand; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specdec_ext.errors import ConfigError, RequestError
from specdec_ext.text import chat_template
from specdec_ext.text.chat_template import TEMPLATES, carries_markers, render_chat

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


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "input_text", "text": "i"}]
    turns = [{"role": "user", "content": parts}]
    whole = render_chat(make(), [{"role": "user", "content": "Hi"}], chat_template="chatml")
    assert render_chat(make(), turns, chat_template="chatml") == whole
    for bad, said in (
        ({"type": "image_url", "image_url": {}}, "only parts of type 'text'.*image_url"),
        ("text", "only parts of type 'text'"),
        ({"type": "text"}, r"content\[1\] has no text"),
        ({"type": "text", "text": "x", "image_url": "u"}, r"\[1\]\.image_url: only text"),
    ):
        turns = [{"role": "user", "content": [parts[0], bad]}]
        with pytest.raises(RequestError, match=said):
            render_chat(make(), turns, chat_template="chatml")


def test_variables_for_the_template() -> None:
    own = make(template="{{ self_ }}|{{ enable_thinking }}|{{ thoughts | length }}")
    given = {"enable_thinking": False, "thoughts": [1, 2], "self_": "x", "self": 1}
    assert render_chat(own, CONVERSATION, template_kwargs=given) == "x|False|2"
    assert render_chat(own, CONVERSATION) == "||0"
    for bad, said in (
        (["a"], r"chat_template_kwargs = \['a'\]: expected an object"),
        ({1: 2}, "expected an object whose keys are names"),
        ({"messages": []}, "has 'messages', which the conversation"),
        ({"bos_token": "x"}, "has 'bos_token'"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"x": object()}, "cannot be rendered"),
    ):
        with pytest.raises(RequestError, match=said):
            render_chat(own, CONVERSATION, template_kwargs=bad)  # type: ignore[arg-type]


# What real templates use of Jinja and of transformers' additions to it.
FEATURES = [
    "{% for m in messages %}\n  {%- if loop.first %}\n{{ bos_token }}{% endif %}\n"
    "  {{ m['role'] | title }}: {{ m.content.strip() }}\n{% endfor %}",
    "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ {'b': 1, 'a': '<'}|tojson }}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% macro show(m) %}<{{ m.role }}>{% endmacro %}{{ show(messages[0]) }}{{ tools is none }}",
    "{{ strftime_now('%Y') | length }}{{ messages[0].items() | list }}{{ dict(a=1) }}",
    "{% if add_generation_prompt %}{{ eos_token }}{% endif %}{{ messages[-1]['content'][:2] }}",
]  # fmt: skip


@pytest.mark.parametrize("template", [*FEATURES, *TEMPLATES.values()])
@pytest.mark.parametrize("add", [False, True])
def test_renders_what_transformers_renders(template: str, add: bool) -> None:
    tokenizer = make(template=template)
    theirs = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=add)
    assert render_chat(tokenizer, CONVERSATION, add_generation_prompt=add) == theirs


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
         "processor time"),
        ("{% set ns = namespace(s='x' * 99) %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
         "{% endfor %}", "MemoryError|more memory"),
        ("{{ 'x' * 10**12 }}", "MemoryError|more memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception('only once') }}", "refused them: only once$"),
        ("{{ 'x' * 2000 }}", "has 2000 characters, limit 1000"),
        ("{% if %}", r"failed on them \(TemplateSyntaxError"),
        ("{{ messages[9].content }}", r"failed on them \(UndefinedError: .* has no element 9\)"),
    ],
)  # fmt: skip
def test_a_hostile_template_ends(
    template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within its limits, and the next conversation is served."""
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 1)
    with pytest.raises(RequestError, match=message):
        render_chat(make(), CONVERSATION, chat_template=template, max_chars=1000)
    assert render_chat(make(), CONVERSATION, chat_template="{{ messages[0].role }}") == "system"


def test_messages_that_are_no_json() -> None:
    message = {"role": "user", "content": "x", "extra": object()}
    with pytest.raises(RequestError, match=r"messages: they cannot be rendered .* JSON"):
        render_chat(make(), [message], chat_template="chatml")


def test_an_interrupted_render_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next caller never gets the text of a conversation whose caller went away."""

    class Interrupted:
        def __init__(self, real: Any) -> None:
            self.real = real

        def readline(self) -> str:
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    worker = chat_template._worker
    process = worker._running()
    monkeypatch.setattr(process, "stdout", Interrupted(process.stdout))
    with pytest.raises(KeyboardInterrupt):
        render_chat(make(), CONVERSATION, chat_template="{{ 'first' }}")
    assert process.poll() is not None
    assert render_chat(make(), CONVERSATION, chat_template="{{ 'second' }}") == "second"


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_text_in_its_template_is_known(name: str) -> None:
    tokenizer = make()
    wrapped = render_chat(tokenizer, CONVERSATION, chat_template=name)
    assert carries_markers(tokenizer, wrapped, name)
    assert carries_markers(tokenizer, wrapped.removeprefix("<s>"), name)
    for plain in ("Hi", "", "USER", "He wrote [/INST] before ASSISTANT: and <|im_end|>."):
        assert not carries_markers(tokenizer, plain, name)

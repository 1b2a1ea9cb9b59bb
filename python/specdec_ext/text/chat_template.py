"""Chat messages to prompt text: the tokenizer's own template, or a built-in one by name.

The built-in templates are for base checkpoints that ship none: "vicuna" (v1.1), "llama2", "chatml".
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.validate import check_text, show
from ..errors import ConfigError, RequestError

__all__ = [
    "TEMPLATES",
    "carries_markers",
    "check_messages",
    "check_template_kwargs",
    "render_chat",
    "text_of",
]

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 4096
TEMPLATE_SECONDS = 2  # of processor time, for one conversation
TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA = (
    "image_url", "input_audio", "audio_url", "video_url", "file", "file_id", "file_url",
    "file_data", "filename", "detail",
)  # fmt: skip
# Variables of a template that are not the caller's to set: render_chat() does, or the tokenizer.
RESERVED = (
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
    "tokenize", "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
    "mask_token", "additional_special_tokens",
)  # fmt: skip

TEMPLATES = {
    "vicuna": (
        "{% set ns = namespace(system='A chat between a curious user and an artificial "
        "intelligence assistant. The assistant gives helpful, detailed, and polite answers to the "
        "user\\'s questions.') %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}"
        "{% endif %}{% endfor %}"
        "{{ ns.system }}"
        "{% for m in messages %}"
        "{% if m.role == 'user' %}{{ ' USER: ' + m.content | trim }}"
        "{% elif m.role == 'assistant' %}{{ ' ASSISTANT: ' + m.content | trim + '</s>' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
    ),
    "llama2": (
        "{% set ns = namespace(system='') %}"
        "{% for m in messages %}"
        "{% if m.role == 'system' %}"
        "{% set ns.system = '<<SYS>>\\n' + m.content | trim + '\\n<</SYS>>\\n\\n' %}"
        "{% elif m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + ns.system + m.content | trim + ' [/INST]' }}"
        "{% set ns.system = '' %}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "chatml": (
        "{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}


def text_of(content: object, where: str) -> str:
    """The text of a turn's content: a text, or a list of parts {"type": "text", "text": ...}, which
    are joined. Raises RequestError, which calls the content `where`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(
            f"{where} = {show(content)}: expected text, got {type(content).__name__}; only text "
            "content is supported"
        )
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else part
        if not isinstance(kind, str) or kind not in TEXT_PARTS or part is kind:
            raise RequestError(
                f"{where}[{i}]: only parts of type 'text' are supported, got {show(kind)}"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{i}] has no text")
        for other in MEDIA:
            if part.get(other) is not None:
                raise RequestError(f"{where}[{i}].{other}: only text is supported; leave it out")
        texts.append(part["text"])
    return "".join(texts)


def check_template_kwargs(given: object) -> dict[str, Any]:
    """Variables for a template, {"enable_thinking": False}; None: none. Raises RequestError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise RequestError(
            f"chat_template_kwargs = {show(given)}: expected an object whose keys are names of the "
            'template\'s variables, such as {"enable_thinking": false}'
        )
    for key in given:
        if key in RESERVED:
            raise RequestError(
                f"chat_template_kwargs has {show(key)}, which the conversation or the tokenizer "
                "sets; leave it out"
            )
    return dict(given)


def check_messages(messages: object) -> list[dict[str, str]]:
    """One conversation: a list of {"role": ..., "content": text or parts of text}; the contents
    come back as texts. Raises RequestError."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages = {show(messages)}: expected a list of "
            '{"role": ..., "content": ...}; for a plain prompt use generate()'
        )
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise RequestError(
            f"messages has {len(messages)} entries, allowed 1..{MAX_MESSAGES}; "
            "give at least one user message"
        )
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{i}] = {show(message)}: expected an object with role and content"
            )
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(
                f"messages[{i}].role = {show(role)}: expected one of {', '.join(ROLES)}"
            )
        content = text_of(message.get("content"), f"messages[{i}].content")
        check_text(f"messages[{i}].content", content, RequestError)
        rest = {key: value for key, value in message.items() if value is not None}
        checked.append({**rest, "role": role, "content": content})
    return checked


def _choose(tokenizer: Any, chat_template: str | None) -> str | None:
    """The template to render with; None means the tokenizer's own."""
    if chat_template is not None:
        if chat_template in TEMPLATES:
            return TEMPLATES[chat_template]
        if "{" in chat_template:
            return chat_template
        path = Path(chat_template).expanduser()
        if path.is_file():
            return path.read_text(encoding="utf-8-sig")
        raise ConfigError(
            f"chat_template = {show(chat_template)}: neither a built-in name "
            f"({', '.join(TEMPLATES)}), nor a Jinja template, nor a file; give one of them"
        )
    if getattr(tokenizer, "chat_template", None):
        return None
    if tokenizer.convert_tokens_to_ids("<|im_start|>") not in (None, tokenizer.unk_token_id):
        return TEMPLATES["chatml"]
    raise ConfigError(
        "the tokenizer has no chat template; pass chat_template= one of "
        f"{', '.join(TEMPLATES)}, a Jinja template or its file, or use generate()"
    )


class _Worker:
    """The process that renders templates: started at the first one, again after one that failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def render(self, template: str, variables: Mapping[str, Any], max_chars: int) -> str:
        """Raises RequestError for what the template refuses, or takes more than it may."""
        request = json.dumps(
            {
                "template": template,
                "variables": variables,
                "seconds": TEMPLATE_SECONDS,
                "max_chars": max_chars,
            }
        )
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(request + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            except BaseException:  # an interrupt: the answer on its way is nobody's
                self.stop()
                raise
            if not line:
                self.stop()
                raise RequestError(
                    f"messages: the chat template took more than {TEMPLATE_SECONDS} s of processor "
                    "time, or more memory than it may have; give another one with chat_template="
                )
        answer: dict[str, str] = json.loads(line)
        if "refused" in answer:  # in the template's own words
            raise RequestError(f"messages: the chat template refused them: {answer['refused']}")
        if "error" in answer:
            raise RequestError(
                f"messages: the chat template failed on them ({answer['error']}); give turns that "
                "it knows, or another template with chat_template="
            )
        return answer["text"]

    def _running(self) -> subprocess.Popen[str]:
        if self._owner != os.getpid():  # a forked child leaves its parent's alone
            self._process, self._owner = None, os.getpid()
        if self._process is None:
            paths = json.dumps([path for path in sys.path if path])
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__).with_name("chat_worker.py")), paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # a terminal's Ctrl-C is not for it
            )
        return self._process

    def stop(self) -> None:
        """End the process; the next template starts another."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.communicate()


_worker = _Worker()
atexit.register(_worker.stop)


def render_chat(
    tokenizer: Any,
    messages: object,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_chars: int = 1 << 24,
) -> str:
    """The prompt text of one conversation, special tokens written out.

    tools            functions that the template may list, as OpenAI's `tools`
    template_kwargs  more variables for the template, {"enable_thinking": False}

    Tokenize it without adding special tokens. The template runs in a process of its own, within
    limits of time and memory. Raises RequestError for bad messages, what the template refuses, and
    more than `max_chars` characters; ConfigError for a missing template.
    """
    more = check_template_kwargs(template_kwargs)
    conversation = check_messages(messages)
    length = sum(len(message["content"]) for message in conversation)
    if length > max_chars:
        raise RequestError(
            f"messages hold {length} characters, limit {max_chars}: more than max_seq_len tokens "
            "can be; shorten them"
        )
    template = _choose(tokenizer, chat_template)
    try:
        if template is None:
            template = tokenizer.get_chat_template()
        variables = {
            **tokenizer.special_tokens_map,
            "messages": conversation,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **more,
        }
        return _worker.render(template, variables, max_chars)
    except RequestError:
        raise
    except (TypeError, ValueError, RecursionError) as error:  # several templates, or no JSON
        raise RequestError(
            f"messages: they cannot be rendered ({error}); give plain values"
        ) from None


_PROBE = "specdecprobe"


def carries_markers(tokenizer: Any, text: str, chat_template: str | None = None) -> bool:
    """Is `text` written in the template already? Then it holds what the template puts right before
    a user's message ("<|im_start|>user", "[INST]", "USER:") and, behind it, what it puts right
    after one. Raises as render_chat()."""
    frame = render_chat(
        tokenizer, [{"role": "user", "content": _PROBE}], chat_template=chat_template
    )
    before, _, after = frame.partition(_PROBE)
    bos = getattr(tokenizer, "bos_token", None)
    head, tail = before.split(), after.split()
    if not head or not tail:
        return False
    # Who writes the markers by hand leaves out the begin-of-text token.
    first = head[-1].removeprefix(bos) if bos and head[-1] != bos else head[-1]
    _, found, rest = text.partition(first)
    return bool(found) and tail[0] in rest

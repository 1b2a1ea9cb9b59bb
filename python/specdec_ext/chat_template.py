"""Chat messages to prompt text: the tokenizer's own template, or a built-in one by name.

The built-in templates are for base checkpoints that ship none: "vicuna" (v1.1), "llama2", "chatml".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError, RequestError
from .validate import show

__all__ = ["TEMPLATES", "check_messages", "render_chat"]

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 4096

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


def check_messages(messages: object) -> list[dict[str, str]]:
    """One conversation: a list of {"role": ..., "content": text}. Raises RequestError."""
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
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError(
                f"messages[{i}].role = {show(role)}: expected one of {', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            raise RequestError(
                f"messages[{i}].content = {show(content)}: expected text, got "
                f"{type(content).__name__}; only text content is supported"
            )
        checked.append({**message, "role": role, "content": content})
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
            return path.read_text(encoding="utf-8")
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


def render_chat(
    tokenizer: Any,
    messages: object,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt text of one conversation, special tokens written out.

    Tokenize it without adding special tokens. Raises RequestError for bad messages or what the
    template refuses, ConfigError for a missing template.
    """
    conversation = check_messages(messages)
    template = _choose(tokenizer, chat_template)
    try:
        text: str = tokenizer.apply_chat_template(
            conversation,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # jinja2's own and whatever the template raises
        raise RequestError(
            f"messages: the chat template refused them ({type(error).__name__}: {error}); "
            "check the order of roles"
        ) from None
    return text

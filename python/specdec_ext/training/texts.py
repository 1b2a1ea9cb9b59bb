"""Prompts and the user's examples as token ids: what the collector works on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, RequestError
from ..text.chat_template import render_chat
from .prompts import SAMPLED_SHARE, SAMPLED_TEMPERATURE, TrainingPrompt
from .user_data import Example

__all__ = ["NO_TEMPLATE", "Frame", "Task", "example_tasks", "prompt_tasks"]

NO_TEMPLATE = "none"
_PROBE = "\u2063text of the user\u2063", "\u2063text of the answer\u2063"


@dataclass(frozen=True)
class Task:
    """One text to collect.

    key          sha256 of everything that decides the text: equal keys are one text
    ids          of the prompt; of a self-written one what stands before the user's first word
    answer       ids that follow; None: the target writes them
    temperature, seed
                 of what the target writes
    self_written the target writes the user's turn first
    """

    key: str
    category: str
    ids: tuple[int, ...]
    answer: tuple[int, ...] | None = None
    temperature: float = 0.0
    seed: int = 0
    self_written: bool = False


class Frame:
    """Token ids of conversations, by a chat template or without one.

    template  a built-in name, a Jinja text or file; "none": turns with blank lines between them;
              None: the tokenizer's own, or none where it has none
    eos       ids that end a text: which of them ends an answer is read from the template
    """

    def __init__(self, tokenizer: Any, template: str | None, eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.is_raw = template == NO_TEMPLATE
        if template is None:
            try:
                self._render([{"role": "user", "content": _PROBE[0]}], True)
            except ConfigError:
                self.is_raw = True
        self.end = eos[0] if eos else None
        if self.is_raw:
            return
        asked = [{"role": "user", "content": _PROBE[0]}]
        text = self._render(asked, True)
        self._before, _, self._after = text.partition(_PROBE[0])
        if not self._after:
            raise ConfigError(
                "the chat template does not repeat the user's message; give another with "
                f"--chat-template, or --chat-template {NO_TEMPLATE}"
            )
        answered = [*asked, {"role": "assistant", "content": _PROBE[1]}]
        behind = self._encode(self._render(answered, False).partition(_PROBE[1])[2])
        self.end = next((token for token in behind if token in eos), self.end)

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Everything before the answer. Raises RequestError for what the template refuses."""
        if self.is_raw:
            return self.document("\n\n".join(m["content"] for m in messages))
        if len(messages) == 1 and messages[0]["role"] == "user":
            return self._encode(self._before + messages[0]["content"] + self._after)
        return self._encode(self._render(messages, True))

    def wrap(self, text: str) -> list[int]:
        """The prompt of one user's message."""
        return self.prompt([{"role": "user", "content": text}])

    def opening(self) -> list[int]:
        """Everything before the user's first word."""
        if not self.is_raw:
            return self._encode(self._before)
        bos = self._tokenizer.bos_token_id
        return [bos] if bos is not None else self._encode("\n")

    def answer(self, text: str) -> list[int]:
        """What the target would have written, its end included."""
        return self._encode(text) + ([] if self.end is None else [self.end])

    def document(self, text: str) -> list[int]:
        """A plain text, as generate() reads one."""
        return [int(i) for i in self._tokenizer(text)["input_ids"]]

    def _render(self, messages: Sequence[Mapping[str, str]], prompts: bool) -> str:
        return render_chat(
            self._tokenizer,
            list(messages),
            chat_template=self._template,
            add_generation_prompt=prompts,
        )

    def _encode(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]


def prompt_tasks(
    prompts: Sequence[TrainingPrompt], frame: Frame, *, max_prompt_len: int, max_new_tokens: int
) -> list[Task]:
    """The built-in prompts, which the target answers."""
    tasks = []
    for prompt in prompts:
        own = prompt.category == "self"
        ids = frame.opening() if own else frame.wrap(prompt.text)
        tasks.append(
            _task(
                prompt.category,
                ids[-max_prompt_len:],
                None,
                max_new_tokens,
                prompt.temperature,
                prompt.seed,
                own,
            )
        )
    return tasks


def example_tasks(
    examples: Sequence[Example],
    frame: Frame,
    *,
    max_prompt_len: int,
    max_new_tokens: int,
    seed: int,
) -> list[Task]:
    """The user's texts; equal ones once. Raises ConfigError that names the place of a bad one."""
    tasks: dict[str, Task] = {}
    for example in examples:
        try:
            for ids, answer in _parts(example, frame, max_prompt_len, max_new_tokens):
                temperature, draw = (0.0, 0) if answer is not None else _drawn(ids, seed)
                task = _task(example.category, ids, answer, max_new_tokens, temperature, draw)
                tasks.setdefault(task.key, task)
        except RequestError as error:
            raise ConfigError(f"{example.place}: {error}; or use --chat-template none") from None
    return list(tasks.values())


def _parts(
    example: Example, frame: Frame, max_prompt_len: int, max_new_tokens: int
) -> Iterator[tuple[list[int], list[int] | None]]:
    if example.messages:
        ids = frame.prompt(example.messages)
        if not ids:
            raise ConfigError(f"{example.place}: the prompt has no token; remove it")
        answer = None
        if example.answer is not None:
            answer = frame.answer(example.answer)[:max_new_tokens]
            if len(answer) < 2:
                return  # nothing after its first token to learn
        yield ids[-max_prompt_len:], answer
        return
    assert example.answer is not None
    ids = frame.document(example.answer)
    for at in range(1, len(ids) - 1, max_new_tokens):
        yield ids[max(0, at - max_prompt_len) : at], ids[at : at + max_new_tokens]


def _drawn(ids: Sequence[int], seed: int) -> tuple[float, int]:
    """Temperature and seed of a prompt: a function of its text, wherever it stands in a file."""
    digest = hashlib.sha256(json.dumps([seed, list(ids)]).encode()).digest()
    share = int.from_bytes(digest[:4], "little") / 2**32
    return (
        SAMPLED_TEMPERATURE if share < SAMPLED_SHARE else 0.0,
        int.from_bytes(digest[4:10], "little"),
    )


def _task(
    category: str,
    ids: Sequence[int],
    answer: Sequence[int] | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    self_written: bool = False,
) -> Task:
    what = [list(ids), None if answer is None else list(answer), max_new_tokens,
            temperature, seed, self_written]  # fmt: skip
    return Task(
        key=hashlib.sha256(json.dumps(what).encode()).hexdigest(),
        category=category,
        ids=tuple(ids),
        answer=None if answer is None else tuple(answer),
        temperature=temperature,
        seed=seed,
        self_written=self_written,
    )

"""Prompts in all forms to token ids. Sizes are checked before anything is copied or encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..config.validate import check_text, show
from ..errors import CapacityError, RequestError
from ..request.longer_texts import how_to_fit
from ..request.resolve import check_prompt_len
from .chat_template import render_chat

__all__ = ["Prompt", "PromptReader", "TokenizedPrompt"]

Prompt = str | Sequence[int] | Mapping[str, Any]
TokenizedPrompt = tuple[str | None, list[int]]  # the text, if there is one


class PromptReader:
    """Reads prompts for one engine.

    tokenizer    of the model; None: prompts are token ids
    max_seq_len  tokens of a request
    max_position as many as the model has positions; None: they are not known
    """

    def __init__(self, tokenizer: Any, max_seq_len: int, max_position: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_seq_len, self._max_position = max_seq_len, max_position

    @cached_property
    def max_chars(self) -> int:
        """Characters that max_seq_len tokens can be: as many as the vocabulary's longest has."""
        vocab: Mapping[str, int] = getattr(self._tokenizer, "get_vocab", dict)()
        return self._max_seq_len * max(map(len, vocab), default=256)

    def read(self, prompt: Prompt, *, add_special_tokens: bool = True) -> TokenizedPrompt:
        """One prompt: text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or both.

        add_special_tokens  False: a text is read without what the tokenizer puts around it

        Raises RequestError, CapacityError for one that is too long.
        """
        text: str | None = None
        given: Any = prompt
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if not keys <= {"prompt", "prompt_token_ids"} or not keys:
                raise RequestError(
                    f"prompt with keys {sorted(map(str, keys))}: expected {{'prompt': text}} or "
                    "{'prompt_token_ids': ids}"
                )
            text = prompt.get("prompt") if "prompt_token_ids" in keys else None
            given = prompt["prompt_token_ids" if "prompt_token_ids" in keys else "prompt"]
        if isinstance(given, str):
            return given, self._encode("prompt", given, add_special_tokens=add_special_tokens)
        if hasattr(given, "tolist"):  # a NumPy array or a torch tensor of ids
            if getattr(given, "ndim", 1) == 1:
                check_prompt_len(len(given), self._max_seq_len, self._max_position)
            given = given.tolist()
        if isinstance(given, (bytes, bytearray)) or not isinstance(given, Sequence):
            raise RequestError(
                f"prompt = {show(given)}: expected text or a list of token ids, got "
                f"{type(given).__name__}"
            )
        if given and not isinstance(prompt, Mapping) and isinstance(given[0], (str, Mapping, list)):
            raise RequestError(
                f"prompt = {show(given)}: a list of {len(given)} prompts where one is expected; "
                "pass one text or one list of token ids, or give the list to generate()"
            )
        check_prompt_len(len(given), self._max_seq_len, self._max_position)
        return text, list(given)

    def read_chat(
        self,
        messages: Any,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenizedPrompt:
        """One conversation, rendered by the template (render_chat)."""
        if self._tokenizer is None:
            raise RequestError(
                "messages: the model folder has no tokenizer; pass LLM(tokenizer=...)"
            )
        text = render_chat(
            self._tokenizer,
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_kwargs=template_kwargs,
            max_chars=self.max_chars,
        )
        return text, self._encode("messages", text, add_special_tokens=False)

    def read_all(self, prompts: Prompt | Sequence[Prompt]) -> list[TokenizedPrompt]:
        """One prompt or several; a list of integers is one prompt."""
        given: Any = prompts
        if hasattr(given, "tolist") and getattr(given, "ndim", 1) != 1:
            given = list(given)  # rows
        one = isinstance(given, (str, Mapping)) or hasattr(given, "tolist")
        if not one and not isinstance(given, Sequence):
            raise RequestError(
                f"prompts = {show(given)}: expected text, token ids or a list of them, got "
                f"{type(given).__name__}"
            )
        if not one and len(given) > 0:
            first = given[0]
            one = not isinstance(first, (str, Mapping, Sequence)) and not hasattr(first, "tolist")
        return [self.read(given)] if one else [self.read(prompt) for prompt in given]

    def _encode(self, field: str, text: str, **how: bool) -> list[int]:
        if self._tokenizer is None:
            raise RequestError(
                f"{field} = {show(text)}: the model folder has no tokenizer; pass token ids "
                "or LLM(tokenizer=...)"
            )
        if len(text) > self._max_seq_len and len(text) > self.max_chars:
            raise CapacityError(
                f"{field} has {len(text)} characters, limit {self.max_chars}: max_seq_len = "
                f"{self._max_seq_len} tokens cannot be more; shorten it"
                + how_to_fit(self._max_seq_len, self._max_position)
            )
        check_text(field, text, RequestError)
        return list(self._tokenizer(text, **how)["input_ids"])

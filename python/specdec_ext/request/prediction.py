"""What a request says its output will be: `SamplingParams.prediction`, as text or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config.validate import check_text, show
from ..errors import CapacityError, RequestError
from .longer_texts import how_to_fit
from .sampling_lists import MAX_ID_LIST, check_ids

__all__ = ["check_prediction", "prediction_ids"]

FIELD = "SamplingParams.prediction"
# Longer texts are refused before they are tokenised.
MAX_CHARS_PER_TOKEN = 256
# Tokens of the prompt's end that the prediction is tokenised after.
_CONTEXT_TOKENS = 8


def check_prediction(value: Any) -> str | tuple[int, ...] | None:
    """Text or token ids; OpenAI's {"type": "content", "content": text or parts} is text.

    None where there is nothing to expect. Raises RequestError.
    """
    if isinstance(value, Mapping):
        value = _content(value)
    if value is None or isinstance(value, str):
        return check_text(FIELD, value, RequestError) if value else None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (bytes, bytearray)) or not isinstance(value, Sequence):
        raise RequestError(
            f"{FIELD} = {show(value)}: expected the text or its token ids, got "
            f"{type(value).__name__}"
        )
    return tuple(check_ids("prediction", value, max_count=MAX_ID_LIST)) or None


def _content(value: Mapping[Any, Any]) -> str:
    if set(value) != {"type", "content"} or value["type"] != "content":
        raise RequestError(
            f'{FIELD} = {show(dict(value))}: expected {{"type": "content", "content": text}}'
        )
    content = value["content"]
    parts = [content] if isinstance(content, str) else content
    texts: list[str] = []
    for part in parts if isinstance(parts, (list, tuple)) else [parts]:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        text = part["text"] if is_text and set(part) == {"type", "text"} else part
        if not isinstance(text, str):
            raise RequestError(
                f'{FIELD}.content holds {show(part)}: expected text or {{"type": "text", "text": '
                "...}"
            )
        texts.append(text)
    return "".join(texts)


def prediction_ids(
    prediction: str | tuple[int, ...],
    prompt_token_ids: list[int],
    tokenizer: Any,
    vocab_size: int,
    max_seq_len: int,
    max_position: int | None = None,
) -> list[int]:
    """Token ids of what is expected after the prompt.

    Text is tokenised as it would be after the prompt's last tokens, so that what a tokenizer puts
    before a text (a space) is not there. Raises RequestError, CapacityError before any work.
    """
    if not isinstance(prediction, str):
        for i, token in enumerate(prediction):
            if token >= vocab_size:
                raise RequestError(
                    f"{FIELD}[{i}] = {token}: out of range, allowed 0..{vocab_size - 1}; the "
                    f"model's vocabulary has {vocab_size} tokens"
                )
        ids = list(prediction)
    else:
        if tokenizer is None:
            raise RequestError(
                f"{FIELD} = {show(prediction)}: text needs a tokenizer; pass token ids, or load "
                "the model with its tokenizer"
            )
        if len(prediction) > MAX_CHARS_PER_TOKEN * max_seq_len:
            raise CapacityError(
                f"{FIELD} has {len(prediction)} characters, limit "
                f"{MAX_CHARS_PER_TOKEN * max_seq_len} for max_seq_len = {max_seq_len}; shorten it"
            )
        ids = _encode_behind(prediction, prompt_token_ids[-_CONTEXT_TOKENS:], tokenizer)
    if len(ids) > max_seq_len:
        raise CapacityError(
            f"{FIELD} has {len(ids)} tokens, max_seq_len = {max_seq_len}: no output can be that "
            "long; shorten it" + how_to_fit(max_seq_len, max_position)
        )
    return ids


def _encode_behind(text: str, context: list[int], tokenizer: Any) -> list[int]:
    """The tokens of `text` after those of `context`; by itself where the two would merge."""

    def encode(piece: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(piece, add_special_tokens=False)]

    before = tokenizer.decode(context, skip_special_tokens=False)
    alone, joined = encode(before), encode(before + text)
    if joined[: len(alone)] == alone:
        return joined[len(alone) :]
    return encode(text)

"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ...text.prompts import PromptReader, TokenizedPrompt
from ..chat_prompt import chat_prompt
from ..errors import ApiError
from ..schema.tokens import DetokenizeRequest, TokenizeRequest
from ..serving import serving_of

__all__ = ["router"]

router = APIRouter()


def _require_tokenizer(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise ApiError(400, "the model has no tokenizer; it takes and gives token ids")
    return tokenizer


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Token ids of a text or a conversation, as a completion would read it."""
    serving = serving_of(request)
    serving.model_name(body.model)
    body.check()
    tokenizer = _require_tokenizer(serving.llm.tokenizer)

    chat = None
    if body.messages is not None:
        chat = await chat_prompt(
            serving,
            body.messages,
            tools=body.tools,
            tool_choice=body.tool_choice,
            add_generation_prompt=body.add_generation_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
        )

    def read(reader: PromptReader) -> TokenizedPrompt:
        if chat is not None:
            return chat.read(reader)
        special = body.add_special_tokens is not False
        return reader.read(body.prompt or "", add_special_tokens=special)

    _, ids = await serving.bridge.in_thread(read, serving.llm.prompts)
    result = {
        "count": len(ids),
        "max_model_len": serving.llm.memory.max_seq_len,
        "tokens": ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        result["token_strs"] = await serving.bridge.in_thread(tokenizer.convert_ids_to_tokens, ids)
    return result


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """The text of token ids."""
    serving = serving_of(request)
    serving.model_name(body.model)
    tokenizer = _require_tokenizer(serving.llm.tokenizer)
    size = serving.llm.engine.limits.vocab_size
    for i, token in enumerate(body.tokens):
        if not 0 <= token < size:
            raise ApiError(
                400, f"tokens.{i} = {token}: the vocabulary has the ids 0..{size - 1}",
                param="tokens",
            )  # fmt: skip
    text = await serving.bridge.in_thread(tokenizer.decode, body.tokens)
    return {"prompt": text}

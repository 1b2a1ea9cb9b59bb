"""What endpoints add to a request's line in the access log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from ...text.outputs import RequestOutput
from ..replies import usage
from ..serving import serving_of

__all__ = ["log_answer", "log_prompt"]


def log_prompt(request: Request, prompt: Any) -> None:
    """The prompt itself, where the operator wants it there."""
    if serving_of(request).settings.log_prompts:
        request.state.log["prompt"] = prompt


def log_answer(request: Request, outputs: Sequence[RequestOutput]) -> None:
    """Counts and how the request ended."""
    counts = usage(outputs)
    request.state.log.update(
        prompt_tokens=counts["prompt_tokens"],
        completion_tokens=counts["completion_tokens"],
        finish_reasons=[choice.finish_reason for output in outputs for choice in output.outputs],
    )
    if serving_of(request).settings.log_prompts:
        texts = [choice.text for output in outputs for choice in output.outputs]
        request.state.log["answer"] = texts

"""One request's steps as a JSON-ready record, which `specdec trace` shows and `report` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["trace_record"]


def trace_record(
    output: Any, tokenizer: Any, about: Mapping[str, Any], *, prompt: str | None
) -> dict[str, Any]:
    """The record of a finished request with SamplingParams.return_steps.

    output     its RequestOutput
    tokenizer  None: tokens have no text
    about      model, method and machine
    """
    one = output.outputs[0]

    def text(token: int) -> str:
        return f"<{token}>" if tokenizer is None else str(tokenizer.decode([token]))

    return {
        "benchmark": "trace",
        **about,
        "prompt": prompt,
        "text": one.text,
        "finish_reason": one.finish_reason,
        "error": one.error,
        "metrics": output.metrics,
        "steps": [step.to_json_dict(text) for step in one.steps],
    }

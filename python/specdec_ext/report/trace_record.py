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
    return {
        "benchmark": "trace",
        **about,
        "prompt": prompt,
        "text": one.text,
        "finish_reason": one.finish_reason,
        "error": one.error,
        "metrics": output.metrics,
        "steps": [_step(step, tokenizer) for step in one.steps],
    }


def _step(step: Any, tokenizer: Any) -> dict[str, Any]:
    return {
        "begin_ms": step.begin_ms,
        "end_ms": step.end_ms,
        "is_prefill": step.is_prefill,
        "num_rows": step.num_rows,
        "tokens": [
            {"id": token, "text": _text(token, tokenizer), "from_draft": i < step.num_accepted}
            for i, token in enumerate(step.token_ids)
        ],
        "drafts": [
            {
                "id": draft.token_id,
                "text": _text(draft.token_id, tokenizer),
                "parent": draft.parent,
                "accepted": draft.accepted,
                "sources": list(draft.sources),
            }
            for draft in step.drafts
        ],
    }


def _text(token: int, tokenizer: Any) -> str:
    return f"<{token}>" if tokenizer is None else str(tokenizer.decode([token]))

"""Users' logits processors: Python callables that change scores between forward and commit.

A processor sees every node of a draft tree as plain decoding would have seen it: the prompt, the
output so far and the drafts on that node's own path. It is called for drafts that will be rejected,
too, so it has to be a function of its arguments; what it raises there ends nothing. Its scores then
go through the request's other processors (allowed ids, bad words, min_tokens, bias, penalties).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .request_state import RequestState

__all__ = ["process_rows", "process_scores"]


def process_scores(
    plan: Any, scores: torch.Tensor, states: Mapping[int, RequestState]
) -> tuple[torch.Tensor, dict[int, str]]:
    """(scores for commit, error message by request id); `scores` [L, V] itself is not changed.

    states: the plan's requests that have processors, by executor id.
    """
    changed = scores
    errors: dict[int, str] = {}
    cu_rows, cu_logits = plan.cu_rows.tolist(), plan.cu_logits.tolist()
    for b, rid in enumerate(plan.request_ids.tolist()):
        state = states.get(rid)
        if state is None:
            continue
        texts = _texts(plan, state, b, cu_rows[b], cu_rows[b + 1])
        if not texts:
            continue  # a chunk of the prompt before the last one
        if changed is scores:
            changed = scores.clone()
        first = cu_logits[b + 1] - len(texts)
        for i, text in enumerate(texts):
            error = _apply(state, text, scores[first + i], changed[first + i])
            if error is not None and i == 0:
                errors[rid] = error
    return changed, errors


def process_rows(
    ids: Sequence[int], scores: torch.Tensor, states: Mapping[int, RequestState]
) -> tuple[torch.Tensor | None, dict[int, str]]:
    """As process_scores, where row i decides the next token of request ids[i] (0: of nobody).

    None: nothing has processors.
    """
    changed: torch.Tensor | None = None
    errors: dict[int, str] = {}
    for i, rid in enumerate(ids):
        state = states.get(rid)
        if state is None or not state.params.logits_processors:
            continue
        if changed is None:
            changed = scores.clone()
        text = [*state.prompt_token_ids, *state.token_ids]
        error = _apply(state, text, scores[i], changed[i])
        if error is not None:
            errors[rid] = error
    return changed, errors


def _texts(plan: Any, state: RequestState, b: int, first: int, end: int) -> list[list[int]]:
    """The tokens in front of each row whose scores decide something."""
    history = [*state.prompt_token_ids, *state.token_ids]
    drafts = int(plan.kv_len[b]) + end - first - len(history)
    if drafts < 0:
        return []
    root = end - 1 - drafts  # the row of the last decided token
    tokens, parents = plan.tokens[root:end].tolist(), plan.parents[root:end].tolist()
    texts = [history]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        texts.append([*texts[parent - (root - first)], token])
    return texts


def _apply(state: RequestState, text: list[int], row: torch.Tensor, to: torch.Tensor) -> str | None:
    """Write to `to` what the request's processors make of `row`, or NaN and return why.

    From a row of NaN no token is chosen. Where that is a draft's the step ends in front of it, and
    the next one has the row at its root, if it is ever reached.
    """
    processors: Sequence[Any] = state.params.logits_processors or ()
    try:
        for i, processor in enumerate(processors):
            answer = processor(list(text), row.clone())
            if not isinstance(answer, torch.Tensor) or answer.shape != row.shape:
                shape = list(answer.shape) if isinstance(answer, torch.Tensor) else None
                got = f"a tensor of shape {shape}" if shape is not None else type(answer).__name__
                raise TypeError(
                    f"logits_processors[{i}] returned {got}: expected scores of shape "
                    f"{list(row.shape)}"
                )
            row = answer.detach()
        to.copy_(row)
    except Exception as error:
        to.fill_(float("nan"))
        return f"logits processor failed: {type(error).__name__}: {error}"
    return None

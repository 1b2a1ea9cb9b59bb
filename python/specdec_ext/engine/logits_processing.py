"""Users' logits processors: Python callables that change scores between forward and commit.

A processor sees every node of a draft tree as plain decoding would have seen it: the prompt, the
output so far and the drafts on that node's own path. It is called for drafts that will be rejected,
too, so it has to be a function of its arguments; what it raises there ends nothing. Its scores then
go through the request's other processors (allowed ids, bad words, min_tokens, bias, penalties).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..models.host_arrays import as_torch

if TYPE_CHECKING:
    import torch

__all__ = ["process_scores"]


def process_scores(
    trees: Iterable[Any],
    scores: Any,
    processors: Mapping[int, Sequence[Any]],
) -> tuple[torch.Tensor, dict[int, str]]:
    """(scores to choose from, error message by request id); `scores` [L, V] itself is not changed.

    scores      a tensor, or the native decoder's array
    trees       _core.ChoiceTrees of the step
    processors  by request id
    """
    scores = as_torch(scores)
    changed = scores
    errors: dict[int, str] = {}
    for tree in trees:
        rid = tree.request_id
        if not processors.get(rid):
            continue
        if changed is scores:
            changed = scores.clone()
        texts: list[list[int]] = [tree.history]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            texts.append([*texts[parent], token])
        for i, text in enumerate(texts):
            row = tree.first + i
            error = _apply(processors[rid], text, scores[row], changed[row])
            if error is not None and i == 0:
                errors[rid] = error
    return changed, errors


def _apply(
    processors: Sequence[Any], text: list[int], row: torch.Tensor, to: torch.Tensor
) -> str | None:
    """Write to `to` what the processors make of `row`, or NaN and return why.

    From a row of NaN no token is chosen. Where that is a draft's the step ends before it, and
    the next one has the row at its root, if it is ever reached.
    """
    import torch

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

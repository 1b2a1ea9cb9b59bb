"""What the drafts that come with a request were drawn from."""

from __future__ import annotations

from typing import Any

from ..errors import RequestError
from ..extras import require
from ..request.external_draft import ExternalDraftTokensConfig

__all__ = ["draft_probs"]


def draft_probs(draft: ExternalDraftTokensConfig | None, greedy: bool) -> Any:
    """What the request's own drafts were drawn from, float32 [drafts, vocabulary] on the CPU.

    None without logits, and for a greedy request: it compares tokens. Raises RequestError.
    """
    if draft is None or draft.logits is None or greedy:
        return None
    require("torch", "ExternalDraftTokensConfig.logits")
    import torch

    try:
        scores = torch.as_tensor(draft.logits).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"ExternalDraftTokensConfig.logits cannot be read as numbers ({error}); give a float "
            "tensor [number of drafts, vocabulary]"
        ) from None
    probs = scores.softmax(dim=-1)
    for i, row in enumerate(probs):
        if not bool(row.isfinite().all()):
            raise RequestError(
                f"ExternalDraftTokensConfig.logits[{i}] holds a NaN or +inf, or only -inf: its "
                "softmax is no distribution; give the draft model's finite scores"
            )
    return probs.float()

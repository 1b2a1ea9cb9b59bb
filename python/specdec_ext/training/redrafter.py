"""A recurrent drafter over the target's own output head, as a product of the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..drafters.redrafter.model import Redrafter, RedrafterShape, save_redrafter
from .data import Batch, TrainingData
from .loss import DTYPES, FrozenHead, Precision, soft_cross_entropy
from .measure import RankCounter, held_out_batches

__all__ = ["RedrafterProduct"]

# One row in this many of a batch begins a draft of `draft_len` steps.
_STRIDE = 3


class RedrafterProduct:
    """See Product.

    embedding  float32 [V, hidden_size], the target's input embeddings
    draft_len  steps that the recurrence is trained over
    """

    name = "redrafter"

    def __init__(
        self,
        data: TrainingData,
        head: FrozenHead,
        embedding: torch.Tensor,
        *,
        num_layers: int = 2,
        draft_len: int = 5,
        soft_share: float = 0.5,
        model_sha256: str = "",
        dtype: str = "float16",
        seed: int = 0,
        device: torch.device | None = None,
        precision: Precision = Precision.BF16,
    ) -> None:
        self.shape = RedrafterShape(
            vocab_size=data.vocab_size,
            hidden_size=data.hidden_size,
            exit_dim=data.hidden_size,
            num_draft_layers=num_layers,
            rnn=True,
            tie_lm_head=True,
            draft_vocab_size=len(data.token_ids),
        )
        self.module = Redrafter(self.shape, data.token_ids)
        _initialize(self.module, seed)
        if device is not None:
            self.module.to(device)
        self._embedding = embedding if device is None else embedding.to(device)
        self._head = head
        self._draft_len = draft_len
        self._soft_share = soft_share
        self._precision = precision
        self._model_sha256 = model_sha256
        self._dtype = dtype

    def _unroll(
        self, batch: Batch, rows: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Per step d (0-based): (begin rows still inside their text, their target rows d + 1
        further on, features). The recurrence reads the target's own tokens."""
        module = self.module
        steps = []
        context = batch.hidden[rows]
        state = module.initial_state(len(rows))
        for d in range(self._draft_len):
            inside = (rows + d + 1 < batch.end[rows]).nonzero().squeeze(1)
            rows, context, state = rows[inside], context[inside], state[inside]
            state = module.next_state(state, self._embedding[batch.tokens[rows + d]])
            steps.append((rows, rows + d + 1, module.features(context, state)))
        return steps

    def _rows(self, batch: Batch) -> torch.Tensor:
        """Where drafts begin."""
        return batch.every(torch.arange(len(batch.tokens), device=batch.tokens.device), _STRIDE)

    def counts(self, batch: Batch) -> list[int]:
        """See Product."""
        rows, counts = self._rows(batch), []
        for d in range(1, self._draft_len + 1):
            rows = rows[rows + d < batch.end[rows]]
            counts.append(int((batch.labels[rows + d] >= 0).sum()))
        return counts

    def loss(self, batch: Batch, counts: Sequence[float]) -> torch.Tensor:
        """See Product."""
        head = self._head.for_step(batch.step_labels, batch.seed)
        teacher = head.probabilities(batch.hidden)
        with self._precision.autocast(batch.hidden.device):
            steps = self._unroll(batch, self._rows(batch))
        total = batch.hidden.new_zeros(())
        for d, (_, later, features) in enumerate(steps):
            known = (batch.labels[later] >= 0).nonzero().squeeze(1)
            if len(known):
                total = total + soft_cross_entropy(
                    features[known].float(),
                    head, teacher, later[known], batch.labels[later[known]],
                    self._soft_share, counts[d],
                )  # fmt: skip
        return total / self._draft_len

    @torch.no_grad()
    def evaluate(self, data: TrainingData) -> dict[str, Any]:
        """See Product; as for Medusa, with steps in place of heads."""
        device = self._head.weight.device
        counter = RankCounter(self._draft_len)
        for batch in held_out_batches(data, device):
            rows = torch.arange(len(batch.tokens), device=device)
            for d, (begin, later, features) in enumerate(self._unroll(batch, rows)):
                scores = self._head.scores(features)
                counter.add(d, scores, batch.labels[later], batch, begin)
        return counter.measures()

    def describe(self) -> dict[str, Any]:
        """See Product."""
        return {
            "name": self.name,
            **self.shape.__dict__,
            "draft_len": self._draft_len,
            "dtype": self._dtype,
        }

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """See Product."""
        extra = {"model_sha256": self._model_sha256, "training": notes}
        save_redrafter(self.module, folder, dtype=DTYPES[self._dtype], extra=extra)


def _initialize(module: Redrafter, seed: int) -> None:
    """Seeded; the network begins near the target's own hidden state: input_proj passes the context
    on, the blocks add nothing yet."""
    generator = torch.Generator().manual_seed(seed)
    hidden = module.shape.hidden_size
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias") or name.startswith("lm_head."):
                parameter.zero_()
            else:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (0.5 / parameter.shape[1] ** 0.5))
        if module.shape.has_input_proj:
            module.input_proj.weight[:, :hidden] = torch.eye(module.shape.exit_dim, hidden)

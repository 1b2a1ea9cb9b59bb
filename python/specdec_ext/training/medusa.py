"""Medusa heads over the target's own output head, as a product of the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..drafters.medusa.heads import MedusaHeads, MedusaHeadsConfig, save_medusa_heads
from .data import Batch, TrainingData
from .loss import FrozenHead, Precision, depth_weights, soft_cross_entropy
from .measure import RankCounter, held_out_batches

__all__ = ["MedusaProduct"]


class MedusaProduct:
    """`num_heads` heads of `num_layers` residual blocks; see Product."""

    name = "medusa"

    def __init__(
        self,
        data: TrainingData,
        head: FrozenHead,
        *,
        num_heads: int = 4,
        num_layers: int = 2,
        soft_share: float = 0.5,
        model_name: str = "",
        model_sha256: str = "",
        dtype: str = "float16",
        device: torch.device | None = None,
        precision: Precision = Precision.BF16,
    ) -> None:
        self.config = MedusaHeadsConfig(
            hidden_size=data.hidden_size,
            vocab_size=data.vocab_size,
            num_medusa_heads=num_heads,
            num_medusa_layers=num_layers,
            lm_head="target",
            draft_vocab_size=len(data.token_ids),
            base_model_name_or_path=model_name,
            model_sha256=model_sha256,
        )
        self.module: MedusaHeads = MedusaHeads(self.config, data.token_ids)
        if device is not None:
            self.module.to(device)
        self._head = head
        self._soft_share = soft_share
        self._precision = precision
        self._dtype = dtype

    def _pairs(self, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Rows of each head and the rows of their targets; a deeper head sees fewer: every second,
        every third, ..."""
        pairs = []
        for h in range(self.config.num_medusa_heads):
            rows = batch.every(batch.pairs(h + 1)[0], h + 1)
            pairs.append((rows, rows + h + 1))
        return pairs

    def counts(self, batch: Batch) -> list[int]:
        """See Product."""
        return [len(rows) for rows, _ in self._pairs(batch)]

    def loss(self, batch: Batch, counts: Sequence[float]) -> torch.Tensor:
        """See Product."""
        head = self._head.for_step(batch.step_labels, batch.seed)
        teacher = head.probabilities(batch.hidden)
        total = batch.hidden.new_zeros(())
        weights = depth_weights(len(counts))
        for h, (rows, later) in enumerate(self._pairs(batch)):
            if not len(rows):
                continue
            with self._precision.autocast(batch.hidden.device):
                features = batch.hidden[rows]
                for block in self.module.blocks[h].children():
                    features = block(features)
            total = total + weights[h] * soft_cross_entropy(
                features.float(), head, teacher, later, batch.labels[later], self._soft_share,
                counts[h],
            )  # fmt: skip
        return total

    @torch.no_grad()
    def evaluate(self, data: TrainingData) -> dict[str, Any]:
        """See Product. Also "rank_accuracy": [head][rank], the share of held-out tokens that a head
        has at exactly that rank, and "accuracy_by_category"."""
        device = self._head.weight.device
        counter = RankCounter(self.config.num_medusa_heads)
        for batch in held_out_batches(data, device):
            features = self.module.features(batch.hidden)
            for h in range(self.config.num_medusa_heads):
                rows = torch.arange(len(batch.tokens), device=device)
                rows = rows[rows + h + 1 < batch.end[rows]]
                labels = batch.labels[rows + h + 1]
                counter.add(h, self._head.scores(features[h][rows]), labels, batch, rows)
        return counter.measures()

    def describe(self) -> dict[str, Any]:
        """See Product."""
        return {"name": self.name, **self.config.to_dict(), "dtype": self._dtype}

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """See Product."""
        config = MedusaHeadsConfig(
            **{
                **{f: getattr(self.config, f) for f in self.config.__dataclass_fields__},
                "training": notes,
            }
        )
        heads = MedusaHeads(config, self.module.token_ids)
        heads.load_state_dict(self.module.state_dict())
        save_medusa_heads(folder, heads, dtype=self._dtype)

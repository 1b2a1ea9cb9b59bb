"""An EAGLE-3 head over the target's own output head, as a product of the training loop.

It is trained as it drafts (training-time test): a first step reads the text beside the target's
states, each later one a token further beside what the step before made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..drafters.eagle3.model import Eagle3, save_eagle3
from ..drafters.eagle3.shape import Eagle3Shape, default_taps
from ..errors import ModelError
from ..models.config_reader import ModelConfig
from ..models.host_arrays import as_torch
from ..models.native_config import NotNativeError, native_shape
from ..models.open_checkpoint import open_checkpoint
from ..models.rope import max_position, rope_parameters
from .data import TRAINED_PROMPT, Batch, TrainingData
from .loss import DTYPES, FrozenHead, Precision, depth_weights, soft_cross_entropy
from .measure import RankCounter, held_out_batches
from .taps import TargetTaps

__all__ = ["Eagle3Product", "eagle3_shape"]


def eagle3_shape(
    target: ModelConfig, *, intermediate_size: int, draft_vocab_size: int
) -> Eagle3Shape:
    """A head's shape for this target: its heads and widths. Raises ModelError for a target whose
    layers the native decoder cannot tap, or whose scores have a soft cap."""
    try:
        shape = native_shape(target)
    except NotNativeError as error:
        raise ModelError(
            f"{target.path}: an EAGLE-3 head taps a target that the native decoder runs, and "
            f"{error}; train Medusa heads or a ReDrafter for it"
        ) from error
    if shape.final_softcap:
        raise ModelError(
            f"{target.path}: final_logit_softcapping = {shape.final_softcap:g}: an EAGLE-3 head is "
            "a linear layer without one; train Medusa heads or a ReDrafter for it"
        )
    theta = rope_parameters(target.hf).get("rope_theta")
    positions = max_position(target.hf)
    return Eagle3Shape(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=shape.rms_norm_eps,
        taps=default_taps(target.num_layers),
        rope=SimpleNamespace(
            model_type="eagle3",
            rope_parameters={
                "rope_type": "default",
                "rope_theta": float(theta if isinstance(theta, (int, float)) else 10000.0),
            },
            max_position_embeddings=positions,
            head_dim=shape.head_dim,
        ),
    )


@dataclass(frozen=True)
class _Places:
    """Where a step's rows stand: in the padded texts, and in the batch what they are to say."""

    text: torch.Tensor
    row: torch.Tensor
    wanted: torch.Tensor


class Eagle3Product:
    """See Product.

    embedding  float32 [V, hidden_size], the target's input embeddings
    steps      that the head is unrolled over
    """

    name = "eagle3"

    def __init__(
        self,
        data: TrainingData,
        head: FrozenHead,
        embedding: torch.Tensor,
        target: ModelConfig,
        shape: Eagle3Shape,
        *,
        steps: int = 5,
        soft_share: float = 0.5,
        model_sha256: str = "",
        dtype: str = "float16",
        seed: int = 0,
        device: torch.device | None = None,
        precision: Precision = Precision.BF16,
    ) -> None:
        self.shape = shape
        longest = max(len(r.tokens) for r in (*data.train, *data.held_out))
        self.module = Eagle3(shape, data.token_ids.tolist(), longest + steps)
        _initialize(self.module, head, target, seed)
        if device is not None:
            self.module.to(device)
        self._embedding = embedding if device is None else embedding.to(device)
        assert shape.taps is not None
        self._taps = TargetTaps(target, shape.taps)
        self._head = head
        self._steps = steps
        self._soft_share = soft_share
        self._precision = precision
        self._model_sha256 = model_sha256
        self._dtype = dtype

    def _cuts(self, batch: Batch) -> list[int]:
        """Tokens of each text that are left out in front."""
        return [max(0, text.prompt_len - TRAINED_PROMPT) for text in batch.texts]

    def _places(self, batch: Batch, step: int) -> _Places:
        """Row i of a text reads token i + 1 + step and says token i + 2 + step, where that is one
        of the continuation; its teacher is the batch's row that decided the same token."""
        texts, rows, wanted = [], [], []
        begin = 0
        for index, (text, cut) in enumerate(zip(batch.texts, self._cuts(batch), strict=True)):
            count = len(text.continuation)
            first = text.prompt_len - cut  # place of the first token that is said
            row = torch.arange(max(first - 2 - step, 0), first + count - 2 - step)
            texts.append(torch.full_like(row, index))
            rows.append(row)
            wanted.append(begin + row + 2 + step - first)
            begin += count
        device = batch.tokens.device
        parts = (torch.cat(part).to(device) for part in (texts, rows, wanted))
        return _Places(*parts)

    def _unroll(self, batch: Batch) -> list[torch.Tensor]:
        """What the output head reads in each step, [texts, rows, hidden_size]."""
        device = self._embedding.device
        cuts = self._cuts(batch)
        tokens = [t.tokens[cut:].to(torch.int64) for t, cut in zip(batch.texts, cuts, strict=True)]
        rows = max(len(each) for each in tokens) - 1
        ids = torch.zeros(len(tokens), rows + self._steps - 1, dtype=torch.int64)
        width = self.module.fc.in_features
        taps = torch.zeros(len(tokens), rows, width)
        # Padding stands after a text, where its rows do not look.
        for i, (each, text, cut) in enumerate(zip(tokens, batch.texts, cuts, strict=True)):
            ids[i, : len(each) - 1] = each[1:]
            taps[i, : len(each) - 1] = self._taps.of(text, cut).float()
        embedded = self._embedding[ids.to(device)]
        return self.module.unrolled(embedded, taps.to(device), self._steps)

    def counts(self, batch: Batch) -> list[int]:
        """See Product."""
        counts = []
        for step in range(self._steps):
            counts.append(int((batch.labels[self._places(batch, step).wanted] >= 0).sum()))
        return counts

    def loss(self, batch: Batch, counts: Sequence[float]) -> torch.Tensor:
        """See Product."""
        head = self._head.for_step(batch.step_labels, batch.seed)
        teacher = head.probabilities(batch.hidden)
        with self._precision.autocast(batch.hidden.device):
            steps = self._unroll(batch)
        total = batch.hidden.new_zeros(())
        weights = depth_weights(self._steps)
        for step, features in enumerate(steps):
            places = self._places(batch, step)
            known = (batch.labels[places.wanted] >= 0).nonzero().squeeze(1)
            if not len(known):
                continue
            wanted = places.wanted[known]
            total = total + weights[step] * soft_cross_entropy(
                features[places.text[known], places.row[known]].float(),
                head, teacher, wanted, batch.labels[wanted], self._soft_share, counts[step],
            )  # fmt: skip
        return total

    @torch.no_grad()
    def evaluate(self, data: TrainingData) -> dict[str, Any]:
        """See Product; as for Medusa, with steps in place of heads. A step reads the text's own
        tokens."""
        counter = RankCounter(self._steps)
        for batch in held_out_batches(data, self._head.weight.device):
            for step, features in enumerate(self._unroll(batch)):
                places = self._places(batch, step)
                scores = self._head.scores(features[places.text, places.row])
                counter.add(step, scores, batch.labels[places.wanted], batch, places.wanted)
        return counter.measures()

    def describe(self) -> dict[str, Any]:
        """See Product."""
        shape = {k: v for k, v in self.shape.__dict__.items() if k != "rope"}
        shape["taps"] = list(self.shape.taps or ())
        return {"name": self.name, **shape, "steps": self._steps, "dtype": self._dtype}

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """See Product."""
        extra = {"model_sha256": self._model_sha256, "training": notes}
        save_eagle3(self.module, folder, dtype=DTYPES[self._dtype], extra=extra)


def _initialize(module: Eagle3, head: FrozenHead, target: ModelConfig, seed: int) -> None:
    """Seeded; the head begins near the target's own last states: fc passes the highest tap on, the
    layer adds little, norm and output head are the target's. The latter is not trained."""
    generator = torch.Generator().manual_seed(seed)
    size = module.shape.hidden_size
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2 and not name.startswith("lm_head."):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * (0.5 / parameter.shape[1] ** 0.5))
        module.fc.weight[:, -size:] += torch.eye(size)
        module.lm_head.weight.copy_(head.weight.cpu())
        with open_checkpoint(target) as checkpoint:
            norm = as_torch(checkpoint.load("model.norm.weight", "float32"))
        module.norm.weight.copy_(norm + native_shape(target).norm_offset)
    module.lm_head.requires_grad_(False)

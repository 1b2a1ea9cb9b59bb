"""A small model of the target's family that drafts for it, as a product of the training loop.

Its input embeddings and its output head are the target's own (the head restricted to the reduced
vocabulary): they are neither trained nor stored. What is trained is a few decoder layers, cut out
of the target's: some of its layers, with the strongest of their MLP neurons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, ModelError
from ..models.config_reader import ModelConfig
from ..models.drafter_files import DrafterShape, cut_decoder, save_drafter
from ..models.host_arrays import as_torch
from ..models.open_checkpoint import open_checkpoint
from .data import TRAINED_PROMPT, Batch, TrainingData
from .loss import FrozenHead, Precision, soft_cross_entropy
from .measure import RankCounter, held_out_batches

__all__ = ["DrafterProduct", "drafter_shape"]


def drafter_shape(
    target: ModelConfig, *, num_layers: int, intermediate_size: int, draft_vocab_size: int
) -> DrafterShape:
    """The drafter's configuration, from the target's config.json. ConfigError, ModelError."""
    has = (target.num_layers, int(getattr(target.hf, "intermediate_size", None) or 0))
    if num_layers > has[0] or (intermediate_size > has[1] > 0):
        raise ConfigError(
            f"drafter: num_layers = {num_layers}, intermediate_size = {intermediate_size}: the "
            f"target has {has[0]} and {has[1]}; choose at most these"
        )
    last = target.num_layers - 1
    layers = [round(i * last / max(1, num_layers - 1)) for i in range(num_layers)]
    shape = cut_decoder(target, layers, intermediate_size)
    return dataclasses.replace(shape, draft_vocab_size=draft_vocab_size)


class DrafterProduct:
    """See Product.

    embedding  float32 [V, hidden_size], the target's input embeddings
    """

    name = "drafter"

    def __init__(
        self,
        data: TrainingData,
        head: FrozenHead,
        embedding: torch.Tensor,
        target: ModelConfig,
        shape: DrafterShape,
        *,
        soft_share: float = 0.5,
        model_sha256: str = "",
        dtype: str = "float16",
        device: torch.device | None = None,
        precision: Precision = Precision.BF16,
    ) -> None:
        from transformers import AutoModel

        self.shape = shape
        self.module: Any
        # The vocabulary of the module is never read: inputs are embeddings.
        make: Any = AutoModel.from_config
        self.module = make(shape.hf_config(vocab_size=1), dtype=torch.float32)
        with open_checkpoint(target) as checkpoint:
            missing, unknown = self.module.load_state_dict(_cut(checkpoint, shape), strict=False)
        if unknown or any(not name.startswith("embed_tokens.") for name in missing):
            raise ModelError(f"{target.path}: its layers have {unknown or missing} besides")
        nn.init.zeros_(self.module.embed_tokens.weight)
        self.module.embed_tokens.requires_grad_(False)
        if device is not None:
            self.module.to(device)
        self._embedding = embedding if device is None else embedding.to(device)
        self._scale = shape.hidden_size**0.5 if shape.native().scales_embedding else 1.0
        self._precision = precision
        self._token_ids = data.token_ids
        self._head = head
        self._soft_share = soft_share
        self._model_sha256 = model_sha256
        self._dtype = dtype

    def _features(self, batch: Batch, max_prompt: int | None = None) -> torch.Tensor:
        """[R, hidden_size]: for each row of the batch, what the head reads there.

        A text's row j stands where its continuation token j is decided: at the token before it.
        max_prompt  how many of the prompt's last tokens are read; None: all
        """
        device = self._embedding.device
        cuts = [max(0, t.prompt_len - (max_prompt or t.prompt_len)) for t in batch.texts]
        inputs = [
            t.tokens[cut:-1].to(torch.int64) for t, cut in zip(batch.texts, cuts, strict=True)
        ]
        longest = max(len(x) for x in inputs)
        ids = torch.zeros(len(inputs), longest, dtype=torch.int64)
        wanted = torch.zeros(len(inputs), longest, dtype=torch.bool)
        for i, (text, cut) in enumerate(zip(batch.texts, cuts, strict=True)):
            ids[i, : len(inputs[i])] = inputs[i]
            wanted[i, text.prompt_len - cut - 1 : len(inputs[i])] = True
        # Padding stands after the text, where a causal model does not look.
        embedded = self._embedding[ids.to(device)] * self._scale
        out = self.module(inputs_embeds=embedded, use_cache=False)
        result: torch.Tensor = out.last_hidden_state[wanted.to(device)]
        return result

    def counts(self, batch: Batch) -> list[int]:
        """See Product."""
        return [int((batch.labels >= 0).sum())]

    def loss(self, batch: Batch, counts: Sequence[float]) -> torch.Tensor:
        """See Product."""
        head = self._head.for_step(batch.step_labels, batch.seed)
        teacher = head.probabilities(batch.hidden)
        with self._precision.autocast(batch.hidden.device):
            features = self._features(batch, TRAINED_PROMPT)
        rows = (batch.labels >= 0).nonzero().squeeze(1)
        return soft_cross_entropy(
            features[rows].float(), head, teacher, rows, batch.labels[rows], self._soft_share,
            counts[0],
        )  # fmt: skip

    @torch.no_grad()
    def evaluate(self, data: TrainingData) -> dict[str, Any]:
        """See Product. Also "chain": [d] the share of held-out rows where the next d + 1 guesses
        are all the target's own tokens: what a chain of that depth would have had accepted."""
        device = self._head.weight.device
        counter = RankCounter(1)
        depth = 5
        whole = torch.zeros(depth)
        total = torch.zeros(depth)
        for batch in held_out_batches(data, device):
            scores = self._head.scores(self._features(batch))
            rows = torch.arange(len(batch.tokens), device=device)
            counter.add(0, scores, batch.labels, batch, rows)
            right = (scores.argmax(dim=-1) == batch.labels).to(torch.float32).cpu()
            end = batch.end.cpu()
            for d in range(depth):
                starts = torch.arange(len(right))
                starts = starts[starts + d < end]
                run = torch.stack([right[starts + k] for k in range(d + 1)]).prod(dim=0)
                whole[d] += run.sum()
                total[d] += len(starts)
        chain = [round(float(x), 4) for x in whole / total.clamp_min(1)]
        return {**counter.measures(), "chain": chain}

    def describe(self) -> dict[str, Any]:
        """See Product."""
        return {
            "name": self.name,
            "decoder": dict(self.shape.decoder),
            "draft_vocab_size": self.shape.draft_vocab_size,
            "cut_from_layers": list(self.shape.cut_from_layers),
            "dtype": self._dtype,
        }

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """See Product."""
        weights = {
            name: value
            for name, value in self.module.state_dict().items()
            if not name.startswith("embed_tokens.")
        }
        save_drafter(
            folder,
            self.shape,
            weights,
            self._token_ids,
            dtype=self._dtype,
            model_sha256=self._model_sha256,
            notes=notes,
        )


def _cut(checkpoint: Any, shape: DrafterShape) -> dict[str, torch.Tensor]:
    """Weights of the chosen layers of the target, their MLPs reduced to the strongest neurons."""
    strongest: dict[int, torch.Tensor] = {}

    def load(name: str) -> torch.Tensor:
        return as_torch(checkpoint.load(name, "float32"))

    def neurons(layer: int) -> torch.Tensor:
        if layer not in strongest:
            gate, up, down = (
                load(f"model.layers.{layer}.mlp.{name}_proj.weight")
                for name in ("gate", "up", "down")
            )
            strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
            size = int(shape.decoder["intermediate_size"])
            strongest[layer] = strength.topk(size).indices.sort().values
        return strongest[layer]

    weights = {}
    for name in shape.expected_weights():
        if not name.startswith("layers."):
            weights[name] = load("model." + name).clone()
            continue
        _, at, part = name.split(".", 2)
        layer = shape.cut_from_layers[int(at)]
        value = load(f"model.layers.{layer}.{part}")
        if part.startswith(("mlp.gate_proj.", "mlp.up_proj.")):
            value = value[neurons(layer)]
        elif part == "mlp.down_proj.weight":
            value = value[:, neurons(layer)]
        weights[name] = value.clone()
    return weights

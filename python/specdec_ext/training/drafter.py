"""A small model of the Llama shape that drafts for the target, as a product of the training loop.

Its input embeddings and its output head are the target's own (the head restricted to the reduced
vocabulary): they are neither trained nor stored. What is trained is a few decoder layers, cut out
of the target's: some of its layers, with the strongest of their MLP neurons.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, ModelError
from ..models.config_reader import ModelConfig
from ..models.drafter_files import DrafterShape, save_drafter
from ..models.host_arrays import as_torch
from ..models.weights import Checkpoint
from .data import Batch, TrainingData
from .loss import FrozenHead, soft_cross_entropy
from .measure import RankCounter, held_out_batches

__all__ = ["DrafterProduct", "drafter_shape"]

# Tokens of a prompt that training reads: most of the time would go into long prompts otherwise.
_TRAINED_PROMPT = 96


def drafter_shape(
    target: ModelConfig, *, num_layers: int, intermediate_size: int, draft_vocab_size: int
) -> DrafterShape:
    """The drafter's configuration, from the target's config.json. ConfigError, ModelError."""
    hf = target.hf
    if getattr(hf, "model_type", "") != "llama":
        raise ModelError(
            f"{target.path}: model_type {target.model_type!r}: a drafter can be cut out of a "
            "target of type 'llama'"
        )
    if intermediate_size > hf.intermediate_size or num_layers > hf.num_hidden_layers:
        raise ConfigError(
            f"drafter: num_layers = {num_layers}, intermediate_size = {intermediate_size}: the "
            f"target has {hf.num_hidden_layers} and {hf.intermediate_size}; choose at most these"
        )
    rope = dict(hf.rope_parameters or {})
    if rope.get("rope_type", "default") != "default":
        raise ModelError(
            f"{target.path}: rope_type {rope['rope_type']!r}: a drafter can be cut out of a target "
            "with plain rotary positions"
        )
    last = hf.num_hidden_layers - 1
    layers = [round(i * last / max(1, num_layers - 1)) for i in range(num_layers)]
    return DrafterShape(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=target.head_dim,
        rms_norm_eps=float(hf.rms_norm_eps),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        max_position=int(hf.max_position_embeddings),
        draft_vocab_size=draft_vocab_size,
        cut_from_layers=tuple(layers),
    )


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
    ) -> None:
        from transformers import LlamaModel

        self.shape = shape
        self.module: Any
        self.module = LlamaModel(shape.hf_config(vocab_size=1))
        with Checkpoint(target.path) as checkpoint:
            self.module.load_state_dict(_cut(checkpoint, shape), strict=False)
        nn.init.zeros_(self.module.embed_tokens.weight)  # never read: inputs are embeddings
        self.module.embed_tokens.requires_grad_(False)
        if device is not None:
            self.module.to(device)
        self._embedding = embedding if device is None else embedding.to(device)
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
        # Padding stands behind the text, where a causal model does not look.
        out = self.module(inputs_embeds=self._embedding[ids.to(device)], use_cache=False)
        result: torch.Tensor = out.last_hidden_state[wanted.to(device)]
        return result

    def loss(self, batch: Batch) -> torch.Tensor:
        """See Product."""
        head = self._head.for_step(batch.labels, batch.seed)
        teacher = head.probabilities(batch.hidden)
        with torch.autocast(batch.hidden.device.type, dtype=torch.bfloat16):
            features = self._features(batch, _TRAINED_PROMPT)
        rows = (batch.labels >= 0).nonzero().squeeze(1)
        return soft_cross_entropy(
            features[rows].float(), head, teacher, rows, batch.labels[rows], self._soft_share
        )

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
        return {"name": self.name, **self.shape.__dict__, "dtype": self._dtype}

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


def _cut(checkpoint: Checkpoint, shape: DrafterShape) -> dict[str, torch.Tensor]:
    """Weights of the chosen layers of the target, their MLPs reduced to the strongest neurons."""
    weights = {"norm.weight": as_torch(checkpoint.load("model.norm.weight", "float32"))}
    for at, layer in enumerate(shape.cut_from_layers):
        prefix, ours = f"model.layers.{layer}.", f"layers.{at}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = f"self_attn.{name}.weight"
            weights[ours + name] = as_torch(checkpoint.load(prefix + name, "float32"))
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            weights[ours + name] = as_torch(checkpoint.load(prefix + name, "float32"))
        gate, up, down = (
            as_torch(checkpoint.load(f"{prefix}mlp.{name}_proj.weight", "float32"))
            for name in ("gate", "up", "down")
        )
        strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        kept = strength.topk(shape.intermediate_size).indices.sort().values
        weights[ours + "mlp.gate_proj.weight"] = gate[kept]
        weights[ours + "mlp.up_proj.weight"] = up[kept]
        weights[ours + "mlp.down_proj.weight"] = down[:, kept]
    return weights

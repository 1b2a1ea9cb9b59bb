"""An EAGLE-3 head as a torch module: what trainers train, and how it is written to a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from ...models.host_arrays import as_torch, converted
from ...models.rope import rope_tables
from .checkpoint import Eagle3Weights
from .shape import ARCHITECTURE, NUM_TAPS, Eagle3Shape

__all__ = ["Eagle3", "save_eagle3"]


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps))


class _Attention(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        wide, bias = 2 * shape.hidden_size, shape.attention_bias
        self.q_proj = nn.Linear(wide, shape.num_heads * shape.head_dim, bias)
        self.k_proj = nn.Linear(wide, shape.num_kv_heads * shape.head_dim, bias)
        self.v_proj = nn.Linear(wide, shape.num_kv_heads * shape.head_dim, bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias)


class _Mlp(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return gated


class _Layer(nn.Module):
    """Its parts, by SpecForge's names; Eagle3 runs them."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.input_layernorm = _Norm(size, eps)
        self.hidden_norm = _Norm(size, eps)
        self.post_attention_layernorm = _Norm(size, eps)


class Eagle3(nn.Module):
    """A head that is trained over a few steps of its own drafts.

    shape         of the head
    token_ids     int [draft_vocab_size], increasing: the target's token of each score
    max_position  positions of a training text, with the steps after it
    """

    token_ids: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: Eagle3Shape, token_ids: Sequence[int], max_position: int) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(NUM_TAPS * shape.target_hidden_size, shape.hidden_size, False)
        self.midlayer = _Layer(shape)
        self.norm = _Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, False)
        ids = torch.as_tensor(np.asarray(token_ids, dtype=np.int64))
        self.register_buffer("token_ids", ids, persistent=False)
        cos, sin = rope_tables(shape.rope, max_position)
        self.register_buffer("cos", torch.from_numpy(cos), persistent=False)
        self.register_buffer("sin", torch.from_numpy(sin), persistent=False)

    @staticmethod
    def of_weights(weights: Eagle3Weights, max_position: int) -> Eagle3:
        head = Eagle3(weights.shape, weights.token_ids.tolist(), max_position)
        tensors = {n: as_torch(converted(t, "float32")) for n, t in weights.tensors.items()}
        head.load_state_dict(tensors)
        return head

    def unrolled(
        self, embedded: torch.Tensor, taps: torch.Tensor, steps: int
    ) -> list[torch.Tensor]:
        """What lm_head reads in each of `steps` steps, [texts, rows, hidden_size].

        embedded  [texts, rows + steps - 1, hidden_size]: row i of step s reads embedding i + s
        taps      [texts, rows, 3 * target_hidden_size]: of the position before each row

        Row i of the first step reads the text; in the next it reads a draft after it, beside what
        the step before made of row i, and sees the first step's rows up to i and its own later
        ones: as the head drafts.
        """
        feature = self.fc(taps)
        rows = feature.shape[1]
        causal = torch.ones(rows, rows, dtype=torch.bool, device=feature.device).tril()
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        result = []
        for step in range(steps):
            feature = self._run(embedded[:, step : step + rows], feature, keys, values, causal)
            result.append(self.norm(feature))
        return result

    def _run(
        self,
        embedded: torch.Tensor,
        feature: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        causal: torch.Tensor,
    ) -> torch.Tensor:
        layer, shape, step = self.midlayer, self.shape, len(keys)
        normed = layer.hidden_norm(feature)
        x = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        attention, group = layer.self_attn, shape.num_heads // shape.num_kv_heads
        query = self._turned(_heads(attention.q_proj(x), shape.head_dim), step)
        key = self._turned(_heads(attention.k_proj(x), shape.head_dim), step)
        keys.append(key.repeat_interleave(group, dim=1))
        values.append(_heads(attention.v_proj(x), shape.head_dim).repeat_interleave(group, dim=1))
        scores = query @ keys[0].transpose(-1, -2)
        scores = scores.masked_fill(~causal, -torch.inf)
        own = [(query * later).sum(-1, keepdim=True) for later in keys[1:]]
        weights = (torch.cat([scores, *own], dim=-1) * shape.head_dim**-0.5).softmax(-1)
        rows = scores.shape[-1]
        out = weights[..., :rows] @ values[0]
        for i, later in enumerate(values[1:]):
            out = out + weights[..., rows + i : rows + i + 1] * later
        out = attention.o_proj(out.transpose(1, 2).flatten(2))
        stream = (normed if shape.norm_before_residual else feature) + out
        mixed: torch.Tensor = stream + layer.mlp(layer.post_attention_layernorm(stream))
        return mixed

    def _turned(self, x: torch.Tensor, step: int) -> torch.Tensor:
        rows = x.shape[2]
        cos, sin = self.cos[step : step + rows], self.sin[step : step + rows]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _heads(x: torch.Tensor, size: int) -> torch.Tensor:
    """[texts, rows, heads * size] -> [texts, heads, rows, size]."""
    return x.view(*x.shape[:2], -1, size).transpose(1, 2)


def save_eagle3(
    head: Eagle3,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    taps: Sequence[int] | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """config.json and model.safetensors in SpecForge's layout.

    taps   the target's layers whose input the head reads; None: shape.taps
    extra  entries of config.json besides
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shape = head.shape if taps is None else replace(head.shape, taps=tuple(taps))
    tensors = {n: t.detach().to(dtype).contiguous() for n, t in head.state_dict().items()}
    ids: torch.Tensor = head.token_ids.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    known = torch.zeros(shape.vocab_size, dtype=torch.bool)
    known[ids] = True
    tensors["t2d"] = known
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**_config(shape), "torch_dtype": str(dtype).removeprefix("torch."), **(extra or {})}
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def _config(shape: Eagle3Shape) -> dict[str, Any]:
    rope = dict(shape.rope.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope["rope_type"]
    own: dict[str, Any] = {"use_aux_hidden_state": True}
    if shape.taps is not None:  # SpecForge counts the layers that the states leave
        own["eagle_aux_hidden_state_layer_ids"] = [tap - 1 for tap in shape.taps]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.target_hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": shape.attention_bias,
        "norm_before_residual": shape.norm_before_residual,
        "max_position_embeddings": shape.rope.max_position_embeddings,
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else rope,
        "eagle_config": own,
    }

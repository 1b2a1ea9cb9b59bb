"""Medusa heads as a module: what trainers train, converters write and devices take weights from.

The network and its files are described in weights.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config.validate import show
from ...errors import ModelError
from ...models.host_arrays import as_torch, from_torch
from .checkpoint import read_heads
from .weights import (
    HEADS_FILE,
    HeadWeights,
    MedusaHeadsConfig,
    check_token_ids,
)

__all__ = [
    "MedusaHeads",
    "MedusaHeadsConfig",
    "load_heads",
    "save_medusa_heads",
]

SAVE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b); starts as the identity."""

    def __init__(self, hidden_size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=bias)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + nn.functional.silu(self.linear(x))
        return result


class MedusaHeads(nn.Module):
    """The heads; made with identity blocks and zero LM heads, to be trained or loaded.

    token_ids  int32 [V'] of distinct ids, exactly when config.draft_vocab_size is set
    """

    blocks: nn.ModuleList
    lm_heads: nn.ModuleList  # one per head ("own"), one ("shared"), none ("target")
    token_ids: torch.Tensor | None

    def __init__(self, config: MedusaHeadsConfig, token_ids: torch.Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                ResidualBlock(size, config.has_bias) for _ in range(config.num_medusa_layers)
            )
            for _ in range(config.num_medusa_heads)
        )
        count = {"own": config.num_medusa_heads, "shared": 1, "target": 0}[config.lm_head]
        lm_heads = [nn.Linear(size, config.head_rows, bias=False) for _ in range(count)]
        for head in lm_heads:
            nn.init.zeros_(head.weight)
        self.lm_heads = nn.ModuleList(lm_heads)
        ids = check_token_ids(config, None if token_ids is None else from_torch(token_ids))
        self.register_buffer("token_ids", None if ids is None else as_torch(ids), persistent=False)

    @classmethod
    def of_weights(cls, weights: HeadWeights) -> MedusaHeads:
        """The module in float32, for inference."""
        ids = weights.token_ids
        heads = cls(weights.config, None if ids is None else as_torch(ids))
        with torch.no_grad():
            for name, parameter in heads.weights():
                if name != "token_ids":
                    parameter.copy_(as_torch(weights.tensors[name]))
        return heads.requires_grad_(False)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the LM heads read: [num_heads, ..., hidden_size] for hidden [..., hidden_size]."""
        return torch.stack([self._run_blocks(blocks, hidden) for blocks in self.blocks])

    def forward(
        self, hidden: torch.Tensor, target_head: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores [num_heads, ..., V'] for hidden states [..., hidden_size].

        target_head  [V', hidden_size], with lm_head "target": the target's output weight, its rows
                     `token_ids` if there are such
        """
        features = self.features(hidden)
        if self.config.lm_head == "target":
            if target_head is None:
                raise ValueError("these heads use the target's LM head: give target_head")
            return features @ target_head.T
        if self.config.lm_head == "shared":
            shared: torch.Tensor = self.lm_heads[0](features)
            return shared
        return torch.stack([head(x) for head, x in zip(self.lm_heads, features, strict=True)])

    def block_linears(self) -> list[list[nn.Linear]]:
        """The residual blocks' layers: [num_heads][num_layers]."""
        linears: list[list[nn.Linear]] = []
        for blocks in self.blocks:
            assert isinstance(blocks, nn.ModuleList)
            linears.append([block.linear for block in blocks if isinstance(block, ResidualBlock)])
        return linears

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the file, tensor) of everything that is stored."""
        layers = self.config.num_medusa_layers
        for h, linears in enumerate(self.block_linears()):
            for number, linear in enumerate(linears):
                yield f"{h}.{number}.linear.weight", linear.weight
                if linear.bias is not None:
                    yield f"{h}.{number}.linear.bias", linear.bias
        for h, head in enumerate(self.lm_heads):
            assert isinstance(head, nn.Linear)
            name = "lm_head.weight" if self.config.lm_head == "shared" else f"{h}.{layers}.weight"
            yield name, head.weight
        if self.token_ids is not None:
            yield "token_ids", self.token_ids

    @staticmethod
    def _run_blocks(blocks: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for block in blocks.children():
            x = block(x)
        return x


def save_medusa_heads(folder: str | Path, heads: MedusaHeads, *, dtype: str = "float16") -> Path:
    """Write config.json and medusa_lm_head.safetensors; returns the folder.

    dtype  of the matrices: "float32", "float16", "bfloat16", or "int8" with a scale per row.
           Biases are float32 with int8, of the same dtype otherwise.
    """
    from safetensors.torch import save_file

    if dtype not in SAVE_DTYPES:
        raise ModelError(f"dtype = {show(dtype)}: expected one of {', '.join(SAVE_DTYPES)}")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in heads.weights():
        value = tensor.detach().cpu()
        if name == "token_ids":
            tensors[name] = value.contiguous()
        elif dtype != "int8":
            tensors[name] = value.to(SAVE_DTYPES[dtype]).contiguous()
        elif name.endswith("weight"):
            tensors[name], tensors[name + "_scale"] = quantize_rows(value)
        else:
            tensors[name] = value.float().contiguous()
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(target / HEADS_FILE), metadata={"format": "pt"})
    text = json.dumps(heads.config.to_dict(), indent=2, sort_keys=True)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
    return target


def load_heads(path: str | Path, *, model: Any = None, allow_pickle: bool = False) -> MedusaHeads:
    """The heads of a folder or file in any spelling, in float32; see checkpoint.read_heads()."""
    return MedusaHeads.of_weights(read_heads(path, model=model, allow_pickle=allow_pickle))


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K], float32 scale [N]) with weight ~ int8 * scale, symmetric per row."""
    values = weight.float()
    scale = values.abs().amax(dim=1).clamp_min(1e-12) / 127.0
    return (values / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale

"""The recurrent drafter of ReDrafter: a torch module, and its checkpoints.

With c the target's last hidden state (the head's input of the row that decided the last token) and
a state s that starts at zero and takes in one token after the other, both of `hidden_size` H:

    s <- SiLU(W_w e(t) + W_u s + b)      (rnn; otherwise s <- s + e(t))
    x <- [c, s]                          (2H), and if 2H != exit_dim: x <- W x + b
    x <- x + SiLU(W_i x + b_i)           for each of num_draft_layers blocks
    scores <- head(x)

e(t) is the row of the target's input embedding table. The head is the drafter's own, or the
target's (`tie_lm_head`, exit_dim = H); either over the whole vocabulary or over the tokens
`token_ids` (`draft_vocab_size` of them).

Folders are read by checkpoint.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...errors import ModelError
from ...models.host_arrays import as_torch, from_torch
from ...models.weights import SINGLE
from .checkpoint import (
    MODEL_TYPE,
    TOKEN_IDS,
    RedrafterShape,
    RedrafterWeights,
    check_token_ids,
    read_redrafter,
)

__all__ = [
    "Redrafter",
    "RedrafterShape",
    "load_redrafter",
    "save_redrafter",
]


class _Block(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.linear(x))


class Redrafter(nn.Module):
    """The network above; parameters are named as in the checkpoint.

    token_ids  int32 [draft_vocab_size], increasing: the target's token of each score; None where
               every token has one
    """

    token_ids: torch.Tensor | None

    def __init__(self, shape: RedrafterShape, token_ids: torch.Tensor | None = None) -> None:
        super().__init__()
        if (token_ids is None) != (shape.draft_vocab_size is None):
            raise ModelError(
                "redrafter: draft_vocab_size and token_ids go together; give both or neither"
            )
        if token_ids is not None:
            token_ids = as_torch(check_token_ids(from_torch(token_ids), shape, "redrafter"))
        self.shape = shape
        hidden, exit_dim = shape.hidden_size, shape.exit_dim
        if shape.has_input_proj:
            self.input_proj = nn.Linear(2 * hidden, exit_dim)
        self.lm_head = nn.ModuleList([_Block(exit_dim) for _ in range(shape.num_draft_layers)])
        if not shape.tie_lm_head:
            scored = shape.draft_vocab_size or shape.vocab_size
            self.lm_head.append(nn.Linear(exit_dim, scored, bias=False))
        if shape.rnn:
            self.rnn_u = nn.Linear(hidden, hidden)
            self.rnn_w = nn.Linear(hidden, hidden, bias=False)
        self.register_buffer(TOKEN_IDS, token_ids)

    @classmethod
    def of_weights(cls, weights: RedrafterWeights) -> Redrafter:
        """The module in float32, in evaluation mode."""
        ids = weights.token_ids
        model = cls(weights.shape, None if ids is None else as_torch(ids))
        tensors = {name: as_torch(value) for name, value in weights.tensors.items()}
        if ids is not None:
            tensors[TOKEN_IDS] = as_torch(ids)
        model.load_state_dict(tensors)
        return model.eval().requires_grad_(False)

    def blocks(self) -> list[_Block]:
        """The residual blocks before the head."""
        return [block for block in self.lm_head if isinstance(block, _Block)]

    def own_head(self) -> nn.Linear:
        """The drafter's own head; only without tie_lm_head."""
        head = self.lm_head[-1]
        assert isinstance(head, nn.Linear)
        return head

    def initial_state(self, *lead: int) -> torch.Tensor:
        """Zeros [*lead, H]: the state before the golden token."""
        some = next(self.parameters())
        return torch.zeros(*lead, self.shape.hidden_size, dtype=some.dtype, device=some.device)

    def next_state(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """The state [.., H] after a token with this embedding [.., H]."""
        if not self.shape.rnn:
            return state + embedding
        return functional.silu(self.rnn_w(embedding) + self.rnn_u(state))

    def features(self, context: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """What the head reads [.., exit_dim], of hidden states [.., H] and states [.., H]."""
        x = torch.cat((context, state), dim=-1)
        if self.shape.has_input_proj:
            x = self.input_proj(x)
        for block in self.blocks():
            x = block(x)
        return x

    def scores(
        self, features: torch.Tensor, target_head: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores [.., V'] of features [.., exit_dim].

        target_head  [V', exit_dim], with tie_lm_head alone: the rows of the target's head that
                     belong to `token_ids`, or all of them
        """
        if not self.shape.tie_lm_head:
            result: torch.Tensor = self.own_head()(features)
            return result
        if target_head is None:
            raise ValueError("tie_lm_head: scores() needs the target's head")
        return functional.linear(features, target_head)


def save_redrafter(
    model: Redrafter,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float16,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and model.safetensors; `extra` are more fields of config.json.

    Raises ModelError for a value that is not finite in `dtype`.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value = value.detach().to(device="cpu", dtype=dtype)
            if not torch.isfinite(value).all():
                raise ModelError(
                    f"redrafter: tensor {name!r} holds values that are not finite in {dtype}; "
                    "nothing was written"
                )
        tensors[name] = value.cpu().contiguous()
    config: dict[str, Any] = {"model_type": MODEL_TYPE, **asdict(model.shape)}
    if model.shape.draft_vocab_size is None:
        del config["draft_vocab_size"]
    if not model.shape.tie_lm_head:
        del config["tie_lm_head"]
    config["num_lookback_tokens"] = 0
    clash = set(config) & set(extra or {}) - {"num_lookback_tokens"}
    if clash:
        raise ModelError(f"redrafter: extra field {sorted(clash)[0]!r} is the drafter's own")
    config.update(extra or {})
    config["dtype"] = str(dtype).removeprefix("torch.")
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def load_redrafter(
    folder: str | Path, dtype: torch.dtype = torch.float32, *, allow_pickle: bool = False
) -> Redrafter:
    """The drafter of a folder, in evaluation mode; raises as checkpoint.read_redrafter()."""
    return Redrafter.of_weights(read_redrafter(folder, allow_pickle=allow_pickle)).to(dtype)

"""Rotary tables: cos and sin of every position, computed as transformers computes them.

A row of the table is a function of its position alone. For types default, linear, llama3 and yarn
that is what transformers does. For `dynamic` (NTK) transformers recomputes the frequencies from
the longest sequence of the batch, so its result for a token depends on who shares the batch; here
row p always uses the frequencies of a sequence of p + 1 tokens, which is what transformers uses
when it decodes token p alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

__all__ = ["ROPE_TYPES", "max_position", "rope_parameters", "rope_tables"]

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_parameters(hf: Any, layer_type: str | None = None) -> dict[str, Any]:
    """The rotary parameters of `hf` (of one layer type where they differ by type)."""
    parameters = getattr(hf, "rope_parameters", None) or {}
    if layer_type is not None and layer_type in parameters:
        parameters = parameters[layer_type]
    return dict(parameters or {})


def _is_nested(hf: Any) -> bool:
    parameters = getattr(hf, "rope_parameters", None) or {}
    return any(isinstance(value, dict) for value in parameters.values())


def max_position(hf: Any) -> int:
    """Positions that the model serves, rotary scaling included.

    `linear` and `dynamic` multiply max_position_embeddings; `yarn` reaches
    original_max_position_embeddings * factor. `llama3` configurations, and those with one
    dictionary per layer type (Gemma3), already state the extended length. The rule is vLLM's.
    """
    stated = getattr(hf, "max_position_embeddings", None)
    if not isinstance(stated, int) or stated < 1:
        raise ModelError(
            f"max_position_embeddings = {stated!r}: the configuration of this {hf.model_type!r} "
            "model does not state its context length; add it to config.json"
        )
    if _is_nested(hf):
        return stated
    parameters = rope_parameters(hf)
    factor = float(parameters.get("factor") or 1.0)
    kind = parameters.get("rope_type", "default")
    if kind in ("linear", "dynamic"):
        return max(stated, int(stated * factor))
    if kind == "yarn":
        original = parameters.get("original_max_position_embeddings") or stated
        return max(stated, int(original * factor))
    return stated


def rope_tables(
    hf: Any, num_positions: int, layer_type: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [num_positions, head_dim / 2] each, attention scaling folded in.

    layer_type  for configurations with one set of parameters per layer type, else None.
    Raises UnsupportedModelError for a rotary type outside ROPE_TYPES.
    """
    import torch

    per_type = layer_type if _is_nested(hf) else None
    parameters = rope_parameters(hf, per_type)
    kind = str(parameters.get("rope_type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope_type = {kind!r}: the native decoder has {', '.join(ROPE_TYPES)}"
        )
    if kind == "dynamic":
        return _dynamic_tables(hf, num_positions, per_type)
    inv_freq, scaling = _inverse_frequencies(hf, kind, parameters, per_type)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inv_freq
    return angles.cos() * scaling, angles.sin() * scaling


def _inverse_frequencies(
    hf: Any, kind: str, parameters: dict[str, Any], layer_type: str | None
) -> tuple[torch.Tensor, float]:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind != "default":
        extra = {"layer_type": layer_type} if layer_type is not None else {}
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), **extra)
        return inv_freq.float(), float(scaling)
    base = parameters["rope_theta"]
    dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float) / dim
    return 1.0 / (base**exponents), 1.0


def _dynamic_tables(
    hf: Any, num_positions: int, layer_type: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    extra = {"layer_type": layer_type} if layer_type is not None else {}
    compute = ROPE_INIT_FUNCTIONS["dynamic"]
    cpu = torch.device("cpu")
    original = int(hf.max_position_embeddings)
    inv_freq, scaling = compute(hf, cpu, **extra)
    rows = [inv_freq.float().expand(min(original, num_positions), -1)]
    for position in range(original, num_positions):
        # A tensor, as in transformers' own update: the power is then taken in float32.
        inv_freq, scaling = compute(hf, cpu, seq_len=torch.tensor(position + 1), **extra)
        rows.append(inv_freq.float()[None])
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * torch.cat(rows)
    return angles.cos() * float(scaling), angles.sin() * float(scaling)

"""Rotary tables as commit cebcf29 made them: torch's own cos and sin, whatever bits those are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def torch_rope_tables(
    hf: Any, num_positions: int, layer_type: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) float32 [num_positions, head_dim / 2] of the default rotary type."""
    parameters = hf.rope_parameters
    assert layer_type is None and parameters["rope_type"] == "default"
    exponents = torch.arange(0, hf.head_dim, 2, dtype=torch.int64).to(torch.float) / hf.head_dim
    frequencies = 1.0 / (parameters["rope_theta"] ** exponents)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos().numpy(), angles.sin().numpy()

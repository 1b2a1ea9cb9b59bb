"""The residual stream of a transformers model, tapped where it enters layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedModelError

__all__ = ["AdapterTaps"]


class AdapterTaps:
    """Hooks on a model's decoder layers.

    layers      whose input is tapped; num_layers stands for what leaves the last
    max_rows    of a pass

    rows  float32 [max_rows, len(layers) * hidden_size]: of the last pass

    Raises UnsupportedModelError where the model keeps its layers in no list.
    """

    def __init__(
        self, model: Any, layers: Sequence[int], max_rows: int, hidden_size: int, num_layers: int
    ) -> None:
        self.rows = np.zeros((max_rows, len(layers) * hidden_size), dtype=np.float32)
        self._to = torch.from_numpy(self.rows)
        lists = [
            module for module in model.modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
        ]  # fmt: skip
        if not lists:
            raise UnsupportedModelError(
                f"{type(model).__name__}: its {num_layers} decoder layers are in no ModuleList, so "
                "a head has no hidden states to read; use another method"
            )
        for i, layer in enumerate(layers):
            place = slice(i * hidden_size, (i + 1) * hidden_size)
            if layer < num_layers:
                hook = self._entering(place)
                lists[0][layer].register_forward_pre_hook(hook, with_kwargs=True)
            else:
                lists[0][num_layers - 1].register_forward_hook(self._leaving(place))

    def _entering(self, place: slice) -> Any:
        def keep(_module: Any, args: tuple[Any, ...], words: dict[str, Any]) -> None:
            self._keep(place, args[0] if args else words["hidden_states"])

        return keep

    def _leaving(self, place: slice) -> Any:
        def keep(_module: Any, _args: tuple[Any, ...], output: Any) -> None:
            self._keep(place, output[0] if isinstance(output, tuple) else output)

        return keep

    def _keep(self, place: slice, states: torch.Tensor) -> None:
        flat = states.reshape(-1, states.shape[-1])
        self._to[: len(flat), place].copy_(flat)

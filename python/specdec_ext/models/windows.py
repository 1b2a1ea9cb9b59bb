"""Attention windows: what each layer of a model sees, and what of a text its pages must hold.

A layer has the smaller of its own window and the one that KvCacheConfig asks for. Layers with a
window see the first `sink_token_length` tokens of a text besides. Pages are shared by all layers,
so a page can go when the layer with the widest window is past it (docs/attention_windows.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, UnsupportedConfigError
from .config_reader import ModelConfig
from .native_config import NotNativeError, native_shape
from .place import Place

__all__ = ["AttentionSpan", "config_windows", "limited_windows", "refuse_sinks", "span_of"]


@dataclass(frozen=True)
class AttentionSpan:
    """What a row of any layer sees at most: `window` tokens up to its own (0: all) and the first
    `sink_tokens`."""

    window: int = 0
    sink_tokens: int = 0

    @classmethod
    def of(cls, windows: Sequence[int], sink_tokens: int) -> AttentionSpan:
        """windows  by layer, 0 for a layer that sees everything"""
        if not windows or not all(windows):
            return cls()
        return cls(max(windows), sink_tokens)


def limited_windows(
    own: Sequence[int], limit: Sequence[int], sink_tokens: int, owner: str
) -> tuple[int, ...]:
    """The window of each layer, 0 for none.

    own    the model's own, by layer
    limit  one for all layers, or a pattern that layer after layer is repeated; empty: none
    owner  names the model in messages

    Raises ConfigError for more windows than layers, and for sink tokens that no layer asks for.
    """
    if len(limit) > len(own):
        raise ConfigError(
            f"KvCacheConfig.max_attention_window has {len(limit)} entries, {owner} has {len(own)} "
            "layers; give one window for all layers, or at most one per layer"
        )
    windows = tuple(own)
    if limit:
        wanted = [limit[layer % len(limit)] for layer in range(len(own))]
        windows = tuple(min(a, b) if a else b for a, b in zip(own, wanted, strict=True))
    if sink_tokens and not any(windows):
        raise ConfigError(
            f"KvCacheConfig.sink_token_length = {sink_tokens}: no layer of {owner} has a window, "
            "so every row sees the first tokens anyway; give max_attention_window, too, or leave "
            "it 0"
        )
    return windows


def refuse_sinks(place: Place, sink_tokens: int) -> None:
    """Raises UnsupportedConfigError for sink tokens on a device."""
    if sink_tokens and not place.is_cpu:
        raise UnsupportedConfigError(
            f"KvCacheConfig.sink_token_length = {sink_tokens}: the kernels of {place.name} have "
            "windows but no sink tokens; use device='cpu', or leave it 0"
        )


def config_windows(config: ModelConfig) -> tuple[int, ...]:
    """The model's own windows, by layer, before it is loaded."""
    try:
        return native_shape(config).sliding_window
    except NotNativeError:
        from .config_reader import transformers_config
        from .transformers_adapter import expected_windows

        return expected_windows(dataclasses.replace(config, hf=transformers_config(config)))


def span_of(model: Any) -> AttentionSpan:
    """Of a loaded model: `layer_windows` and `sink_tokens`, if it has them; else everything."""
    windows = getattr(model, "layer_windows", ())
    return AttentionSpan.of(windows, int(getattr(model, "sink_tokens", 0)))

"""Attention windows: what each layer of a model sees, and what of a text its pages must hold.

A layer has the smaller of its own window and the one that KvCacheConfig asks for. Layers with a
window see the first `sink_token_length` tokens of a text besides. Pages are shared by all layers,
so a page can go when the layer with the widest window is past it; the others' parts of it go
before (docs/attention_windows.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, UnsupportedModelError
from .config_reader import ModelConfig, transformers_config
from .native_config import NotNativeError, native_shape

__all__ = [
    "AttentionSpan",
    "asked_windows",
    "config_windows",
    "limited_windows",
    "narrow_windows",
    "span_of",
]


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


def narrow_windows(windows: Sequence[int], span: AttentionSpan) -> tuple[int, ...]:
    """By layer, the windows that are narrower than the span of all layers, 0 for others; empty
    where no layer has such a one."""
    narrow = tuple(w if w and (not span.window or w < span.window) else 0 for w in windows)
    return narrow if any(narrow) else ()


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


def config_windows(config: ModelConfig) -> tuple[int, ...]:
    """The model's own windows, by layer, before it is loaded."""
    try:
        return native_shape(config).sliding_window
    except NotNativeError:
        return asked_windows(dataclasses.replace(config, hf=transformers_config(config)))


def asked_windows(config: ModelConfig) -> tuple[int, ...]:
    """The window that each layer of transformers' class should ask the attention function for."""
    hf = config.hf
    window = int(getattr(hf, "sliding_window", None) or 0)
    if getattr(hf, "use_sliding_window", True) is False:
        window = 0
    types = getattr(hf, "layer_types", None)
    if types is None:
        return (window,) * config.num_layers
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            name = config.architecture or config.model_type
            raise UnsupportedModelError(
                f"{config.path}: {name} (model_type {config.model_type!r}) cannot be run "
                f"faithfully: layer type {kind!r} is not full or sliding-window attention; see "
                "docs/models.md for the families that are supported"
            )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def span_of(model: Any) -> AttentionSpan:
    """What a loaded model's rows see, by its `layer_windows` and `sink_tokens`; without them
    everything."""
    windows = getattr(model, "layer_windows", ())
    return AttentionSpan.of(windows, int(getattr(model, "sink_tokens", 0)))

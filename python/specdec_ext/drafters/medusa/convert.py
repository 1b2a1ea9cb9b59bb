"""Medusa heads written in another project's spelling (read by checkpoint.py)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...config.validate import check_choice
from ...errors import ConfigError, UnsupportedModelError
from ...models.host_arrays import from_torch
from .heads import SAVE_DTYPES, MedusaHeads, save_medusa_heads
from .weights import HEADS_FILE, MedusaHeadsConfig, check_weights

__all__ = ["SPELLINGS", "first_heads", "write_heads"]

SPELLINGS = ("specdec", "fasterdecoding", "vllm")


def first_heads(heads: MedusaHeads, number: int) -> MedusaHeads:
    """The first `number` of the heads. Raises ConfigError when there are fewer."""
    have = heads.config.num_medusa_heads
    if not 1 <= number <= have:
        raise ConfigError(
            f"num_medusa_heads = {number}: the file has {have} heads; choose 1..{have}"
        )
    config = dataclasses.replace(heads.config, num_medusa_heads=number)
    kept = {
        name: from_torch(tensor)
        for name, tensor in heads.weights()
        if not name.split(".")[0].isdigit() or int(name.split(".")[0]) < number
    }
    return MedusaHeads.of_weights(check_weights(config, kept, source="these heads"))


def write_heads(
    folder: str | Path, heads: MedusaHeads, spelling: str, *, dtype: str = "float16",
    model: Any = None,
) -> Path:  # fmt: skip
    """Write config.json and the tensors; returns the folder.

    spelling  "specdec", "fasterdecoding" or "vllm"
    dtype     "float32", "float16", "bfloat16"; "specdec" also "int8"
    model     the target (a StepModel): its LM head is written out where the spelling cannot say
              "the target's"

    Raises UnsupportedModelError for heads that the spelling cannot express.
    """
    spelling = check_choice("spelling", spelling, SPELLINGS, ConfigError)
    dtypes = [name for name in SAVE_DTYPES if name != "int8" or spelling == "specdec"]
    dtype = check_choice("dtype", dtype, dtypes, ConfigError)
    if spelling == "specdec":
        return save_medusa_heads(folder, heads, dtype=dtype)
    tensors = {n: t.detach().cpu() for n, t in heads.weights()}
    if spelling == "vllm":
        tensors, config = _vllm(heads.config, tensors, model)
    else:
        tensors, config = _fasterdecoding(heads.config, tensors)
    floats = {
        name: (t.to(SAVE_DTYPES[dtype]) if t.is_floating_point() else t).contiguous()
        for name, t in tensors.items()
    }
    from safetensors.torch import save_file

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    file = "model.safetensors" if spelling == "vllm" else HEADS_FILE
    save_file(floats, str(target / file), metadata={"format": "pt"})
    text = json.dumps({**config, "torch_dtype": dtype}, indent=2, sort_keys=True)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
    return target


def _fasterdecoding(
    config: MedusaHeadsConfig, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    if config.draft_vocab_size is not None:
        raise UnsupportedModelError(
            f"heads over {config.draft_vocab_size} of {config.vocab_size} tokens: FasterDecoding's "
            "files have no map of token ids; use the spelling 'specdec' or 'vllm'"
        )
    result = dict(tensors)
    shared = result.pop("lm_head.weight", None)
    if shared is not None:
        for head in range(config.num_medusa_heads):
            result[f"{head}.{config.num_medusa_layers}.weight"] = shared.clone()
    return result, {
        "model_type": "medusa",
        "medusa_num_heads": config.num_medusa_heads,
        "medusa_num_layers": config.num_medusa_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "base_model_name_or_path": config.base_model_name_or_path,
        "version": "2",
    }


def _vllm(
    config: MedusaHeadsConfig, tensors: Mapping[str, torch.Tensor], model: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    layers, result = config.num_medusa_layers, {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if name == "token_ids":
            result["token_map"] = tensor.to(torch.int64)
        elif name == "lm_head.weight":
            result[name] = tensor
        elif parts[2] == "linear":
            result[f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}"] = tensor
        else:
            result[f"lm_heads.{parts[0]}.weight"] = tensor
    if config.lm_head == "target":
        if model is None:
            raise UnsupportedModelError(
                "these heads use the target's LM head, which vLLM's files contain; name the target "
                "(--model), whose head is then written out"
            )
        ids = tensors.get("token_ids")
        every = torch.arange(config.vocab_size, dtype=torch.int32)
        result["lm_head.weight"] = model.head_rows(every if ids is None else ids)
    return result, {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.num_medusa_heads,
        "num_hidden_layers": layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.head_rows,
        "medusa_fc_bias": config.has_bias,
        "original_lm_head": config.lm_head != "own",
    }

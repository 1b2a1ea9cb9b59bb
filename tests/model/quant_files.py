"""Small checkpoints as AutoAWQ, AutoGPTQ, compressed-tensors, ModelOpt and HF write them, packed
here element by element from the published layouts; and what their weights are as floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tiny_models import as_phi3, save_llama

HIDDEN, INNER, VOCAB = 128, 256, 48
Tensors = dict[str, torch.Tensor]


def save_floats(folder: Path) -> Path:
    return save_llama(
        folder, 5, VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, head_dim=32,
        initializer_range=0.15, dtype="bfloat16",
    )  # fmt: skip


def words_of(numbers: np.ndarray) -> torch.Tensor:
    """int32 words of 8 numbers each, [..., 8] -> [...], least significant first."""
    words = np.zeros(numbers.shape[:-1], dtype=np.uint64)
    for lane in range(8):
        words |= numbers[..., lane].astype(np.uint64) << np.uint64(4 * lane)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def four_bits(rng: np.random.Generator, n: int, k: int, group: int, symmetric: bool) -> Any:
    """Numbers [N, K], zeros and float16 scales [N, K / group], and the matrix float32."""
    numbers = rng.integers(0, 16, (n, k))
    count = k // group
    zeros = np.full((n, count), 8) if symmetric else rng.integers(1, 16, (n, count))
    scales = (rng.random((n, count)) * 0.02 + 0.005).astype(np.float16)
    wide = (numbers - np.repeat(zeros, group, 1)).astype(np.float32)
    return numbers, zeros, scales, wide * np.repeat(scales.astype(np.float32), group, 1)


def awq(rng: Any, n: int, k: int, group: int, symmetric: bool) -> tuple[Tensors, np.ndarray]:
    numbers, zeros, scales, matrix = four_bits(rng, n, k, group, symmetric)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # column of lane i
    tensors = {
        "qweight": words_of(numbers.T.reshape(k, n // 8, 8)[..., order]),
        "qzeros": words_of(zeros.T.reshape(-1, n // 8, 8)[..., order]),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return tensors, matrix


def gptq(
    rng: Any, n: int, k: int, group: int, symmetric: bool, plus: int = 1
) -> tuple[Tensors, np.ndarray]:
    numbers, zeros, scales, matrix = four_bits(rng, n, k, group, symmetric)
    tensors = {
        "qweight": words_of(numbers.T.reshape(k // 8, 8, n).transpose(0, 2, 1)),
        "qzeros": words_of((zeros - plus).T.reshape(-1, n // 8, 8)),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.arange(k, dtype=torch.int32) // group,
    }
    return tensors, matrix


def packed(rng: Any, n: int, k: int, group: int, symmetric: bool) -> tuple[Tensors, np.ndarray]:
    numbers, zeros, scales, matrix = four_bits(rng, n, k, group, symmetric)
    tensors = {
        "weight_packed": words_of(numbers.reshape(n, k // 8, 8)),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        lanes = zeros.reshape(n // 8, 8, -1).transpose(0, 2, 1)
        tensors["weight_zero_point"] = words_of(lanes)
    return tensors, matrix


def int8(rng: Any, n: int, k: int, per_row: bool) -> tuple[Tensors, np.ndarray]:
    numbers = rng.integers(-128, 128, (n, k))
    scales = (rng.random((n if per_row else 1, 1)) * 0.002 + 0.0005).astype(np.float32)
    tensors = {
        "weight": torch.from_numpy(numbers.astype(np.int8)),
        "weight_scale": torch.from_numpy(scales if per_row else scales.reshape(1)),
    }
    return tensors, numbers.astype(np.float32) * scales


def fp8(rng: Any, n: int, k: int, kind: str, name: str = "weight_scale", width: int = 48) -> Any:
    """kind: tensor, scalar, channel, or block of 64 x `width`"""
    codes = torch.from_numpy(rng.standard_normal((n, k)).astype(np.float32)).to(torch.float8_e4m3fn)
    shapes = {
        "tensor": (1,),
        "scalar": (),
        "channel": (n, 1),
        "block": (-(-n // 64), -(-k // width)),
    }
    drawn = np.asarray(rng.random(shapes[kind]) * 0.1 + 0.05, dtype=np.float32)
    scales = torch.tensor(drawn)
    wide = scales.reshape(-1, 1) if kind in ("tensor", "scalar") else scales
    if kind == "block":
        wide = scales.repeat_interleave(64, 0)[:n].repeat_interleave(width, 1)[:, :k]
    tensors = {"weight": codes, name: scales}
    return tensors, (codes.float() * wide).numpy()


def compressed(layout: str, weights: dict[str, Any], acts: Any = None, **more: Any) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": acts,
             "output_activations": None}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
            "config_groups": {"group_0": group}, **more}  # fmt: skip


DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
# name -> quantization_config, and how a matrix is packed.
FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
             "version": "gemm"}, lambda r, n, k: awq(r, n, k, 128, False)),
    "awq-32": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
               lambda r, n, k: awq(r, n, k, 32, True)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
             lambda r, n, k: gptq(r, n, k, 128, True)),
    "gptq-asymmetric": ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False},
                        lambda r, n, k: gptq(r, n, k, k, False)),
    "gptq_v2": ({"quant_method": "gptq", "bits": 4, "group_size": 64,
                 "checkpoint_format": "gptq_v2"}, lambda r, n, k: gptq(r, n, k, 64, False, 0)),
    "pack-quantized": (compressed("pack-quantized", {**_PACKED, "symmetric": True}),
                       lambda r, n, k: packed(r, n, k, 64, True)),
    "pack-asymmetric": (compressed("pack-quantized", {**_PACKED, "symmetric": False}),
                        lambda r, n, k: packed(r, n, k, 64, False)),
    "int-quantized": (
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel",
                                     "symmetric": True},
                   {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}),
        lambda r, n, k: int8(r, n, k, True)),
    "int-tensor": (
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor",
                                     "symmetric": True}),
        lambda r, n, k: int8(r, n, k, False)),
    "float-channel": (compressed("float-quantized", {**_FLOAT, "strategy": "channel"}, DYNAMIC),
                      lambda r, n, k: fp8(r, n, k, "channel")),
    "float-tensor": (compressed("float-quantized", {**_FLOAT, "strategy": "tensor"}),
                     lambda r, n, k: fp8(r, n, k, "tensor")),
    "float-block": (compressed("float-quantized", {**_FLOAT, "strategy": "block",
                                                   "block_structure": [64, 48]}),
                    lambda r, n, k: fp8(r, n, k, "block")),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"},
            lambda r, n, k: fp8(r, n, k, "tensor")),
    "fp8-block": ({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                   "weight_block_size": [64, 128]},
                  lambda r, n, k: fp8(r, n, k, "block", "weight_scale_inv", 128)),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
                 lambda r, n, k: fp8(r, n, k, "scalar")),
}  # fmt: skip


def save_quantised(
    root: Path, name: str, *, fused: bool = False
) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """(the checkpoint, the same in float32, its matrices) in `root`; fused: of the family phi3."""
    config, pack = FORMATS[name]
    folder, floats = save_floats(root / "quantised"), save_floats(root / "floats")
    if fused:
        folder, floats = as_phi3(folder), as_phi3(floats)
    tensors = load_file(folder / "model.safetensors")
    wide = {key: value.float() for key, value in tensors.items()}
    rng = np.random.default_rng(3)
    matrices = {}
    for key in sorted(tensors):
        if not key.endswith("_proj.weight"):
            continue
        n, k = tensors.pop(key).shape
        parts, matrices[key] = pack(rng, n, k)
        module = key.removesuffix(".weight")
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
        if name == "modelopt":
            tensors[f"{module}.input_scale"] = torch.tensor(0.5)
        wide[key] = torch.from_numpy(matrices[key].copy())
    save_file(tensors, folder / "model.safetensors")
    save_file(wide, floats / "model.safetensors")
    edit(folder, quantization_config=config, dtype="bfloat16")
    edit(floats, dtype="float32")
    return folder, floats, matrices


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

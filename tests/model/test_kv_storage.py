"""Scales of fp8 K/V that a checkpoint brings, under the names that writers give them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_ext import _core
from specdec_ext.errors import ModelError
from specdec_ext.models import load_model
from tiny_models import save_llama

LAYERS, HEADS, DIM, PAGE = 2, 2, 16, 8
IDS = [5, 9, 2, 31, 7]
NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "autofp8": ("kv_scale", "kv_scale"),
}


def save(folder: Path, writer: str, k: torch.Tensor, v: torch.Tensor) -> Path:
    """A tiny model with scales k[layer] and v[layer]."""
    save_llama(folder, 3, 48, head_dim=DIM)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        for name, values in zip(NAMES[writer], (k, v), strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = values[layer].clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


def pages_of(folder: Path, impl: str, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V pages [layers, 1, G, S, K] after one prompt."""
    model = load_model(folder, model_impl=impl, kv_cache_dtype=kind)
    dtype = torch.float32 if kind == "auto" else torch.float8_e4m3fn
    pages = [torch.zeros(LAYERS, 1, HEADS, PAGE, DIM, dtype=dtype) for _ in range(2)]
    model.bind_cache(*pages)
    model.forward(_core.make_step_plan([IDS], kv_len=[0], page_table=[[0]]))
    return pages[0], pages[1]


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("writer", NAMES)
@pytest.mark.parametrize("size", [1, HEADS])
def test_pages_hold_k_and_v_divided_by_the_scales(
    tmp_path: Path, impl: str, writer: str, size: int
) -> None:
    torch.manual_seed(size)
    k = torch.rand(LAYERS, size) * 0.05 + 0.02  # 448 times that is more than any number
    v = k if writer == "autofp8" else torch.rand(LAYERS, size) + 0.02
    folder = save(tmp_path / "model", writer, k, v)
    wide = pages_of(folder, impl, "auto")
    stored = pages_of(folder, impl, "fp8")
    for part, narrow, scale in zip(wide, stored, (k, v), strict=True):
        first = part[0, 0, :, : len(IDS)]  # the first layer reads no K/V of another
        divided = first / scale[0].expand(HEADS)[:, None, None]
        expected = divided.clamp(-448, 448).to(torch.float8_e4m3fn)
        got = narrow[0, 0, :, : len(IDS)]
        assert torch.equal(got.view(torch.int8), expected.view(torch.int8))
        # The second layer reads the first one's: near what float32 pages give.
        second = narrow[1, 0, :, : len(IDS)].float() * scale[1].expand(HEADS)[:, None, None]
        wanted = part[1, 0, :, : len(IDS)]
        assert float((second - wanted).norm() / wanted.norm()) < 0.15


def test_scales_say_nothing_to_k_and_v_in_floats(tmp_path: Path) -> None:
    one = torch.ones(LAYERS, 1)
    with_scales = save(tmp_path / "scaled", "modelopt", one, one)
    plain = save_llama(tmp_path / "plain", 3, 48, head_dim=DIM)
    for impl in ("native", "transformers"):
        for a, b in zip(pages_of(with_scales, impl, "auto"), pages_of(plain, impl, "auto"),
                        strict=True):  # fmt: skip
            assert torch.equal(a, b)


@pytest.mark.parametrize(("bad", "text"), [
    (torch.tensor([float("nan")]), r"tensor 'model.layers.1.self_attn.v_scale' = \[nan\]"),
    (torch.tensor([0.0]), r"'model.layers.1.self_attn.v_scale' = \[0.0\]: .* above 0"),
    (torch.tensor([-1.0]), r"v_scale' = \[-1.0\]"),
    (torch.tensor([float("inf")]), r"v_scale' = \[inf\]"),
    (torch.ones(3), r"v_scale' has shape \[3\]: .* each of the 2 K/V heads"),
    (torch.ones(1, dtype=torch.int32), "v_scale' has dtype I32"),
    (None, "tensor 'model.layers.1.self_attn.v_scale' is missing"),
])  # fmt: skip
def test_bad_scales_are_refused_by_name(
    tmp_path: Path, bad: torch.Tensor | None, text: str
) -> None:
    one = torch.ones(LAYERS, 1)
    folder = save(tmp_path / "model", "compressed-tensors", one, one)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.v_scale"
    if bad is None:
        del tensors[name]
    else:
        tensors[name] = bad
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=text):
        load_model(folder, kv_cache_dtype="fp8")

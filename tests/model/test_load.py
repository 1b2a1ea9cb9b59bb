"""load_model: which implementation, which dtype, and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from model_zoo import edit_json, make_model, save_model
from plan_builder import Driver, hf_greedy, prompt_ids

from specdec_ext.errors import ConfigError, ModelError, UnsupportedModelError
from specdec_ext.models import ModelInfo, StepModel, load_model


def test_auto_is_native_where_everything_is_understood(saved):
    model = load_model(saved("llama").folder)
    assert isinstance(model, StepModel) and isinstance(model.info, ModelInfo)
    assert (model.impl, model.info.impl) == ("native", "native")
    assert "every field is understood" in model.info.impl_reason


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("olmo2", {}, "not one of the native families"),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("llama", {"hidden_act": "relu"}, "activation 'relu'"),
    ],
)
def test_auto_falls_back_to_the_adapter_and_says_why(saved, family, overrides, reason):
    reference = saved(family, **overrides)
    model = load_model(reference.folder)
    assert model.impl == "transformers" and reason in model.info.impl_reason
    prompt = prompt_ids(7, 1)
    assert Driver(model).greedy([prompt], 16) == [hf_greedy(reference.model, prompt, 16)]
    with pytest.raises(UnsupportedModelError, match=r"model_impl = 'native' cannot run.*" + reason):
        load_model(reference.folder, model_impl="native")


def test_both_implementations_decode_the_same(saved):
    folder = saved("qwen3").folder
    prompt = prompt_ids(11, 4)
    texts = [
        Driver(load_model(folder, model_impl=impl)).greedy([prompt], 32)
        for impl in ("native", "transformers")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_auto_is_that_of_the_checkpoint(tmp_path, stored):
    save_model(make_model("llama"), tmp_path, stored)
    assert load_model(tmp_path).kv_dtype == stored
    assert load_model(tmp_path, dtype="fp32").kv_dtype == torch.float32
    # Not in config.json: the files say it.
    edit_json(tmp_path / "config.json", dtype=None)
    assert load_model(tmp_path).kv_dtype == stored
    assert load_model(tmp_path, model_impl="transformers").kv_dtype == stored


def test_float64_checkpoint_is_served_in_float32(tmp_path):
    save_model(make_model("llama"), tmp_path, torch.float64)
    edit_json(tmp_path / "config.json", dtype=None)
    assert load_model(tmp_path).kv_dtype == torch.float32


def test_bad_arguments(saved, tmp_path):
    folder = saved("llama").folder
    with pytest.raises(ConfigError, match="model_impl = 'vllm': expected one of auto, native"):
        load_model(folder, model_impl="vllm")
    with pytest.raises(ConfigError, match="dtype"):
        load_model(folder, dtype="float64")
    with pytest.raises(ConfigError, match="quantization='fp8'"):
        load_model(folder, dtype="fp8")
    with pytest.raises(ModelError, match="does not exist"):
        load_model(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        (tmp_path / "empty").mkdir()
        make_model("llama").config.save_pretrained(tmp_path / "empty")
        load_model(tmp_path / "empty")


def test_pickle_checkpoint_needs_the_flag(saved, tmp_path):
    reference = saved("llama")
    reference.model.config.save_pretrained(tmp_path)
    torch.save(reference.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*allow_pickle=True"):
        load_model(tmp_path)
    prompt = prompt_ids(7, 1)
    expected = [hf_greedy(reference.model, prompt, 16)]
    model = load_model(tmp_path, allow_pickle=True)
    assert model.impl == "native" and Driver(model).greedy([prompt], 16) == expected


def test_old_vicuna_files_carry_derived_tensors(saved, tmp_path):
    reference = saved("llama")
    reference.model.config.save_pretrained(tmp_path)
    state = dict(reference.model.state_dict())
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert load_model(tmp_path, allow_pickle=True).impl == "native"


def test_info_is_plain_data(saved):
    for impl in ("native", "transformers"):
        info = load_model(saved("gemma3").folder, model_impl=impl).info
        values = json.loads(json.dumps(info.to_dict()))
        assert values["impl"] == impl and values["sliding_window"] == 6
        assert values["rope_types"] and values["weight_bytes"] > 0 and values["attention"]


def test_naming_the_package_imports_no_torch():
    code = (
        "import sys, specdec_ext.models as m; m.default_model; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

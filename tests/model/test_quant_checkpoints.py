"""Checkpoints that others have quantised, against the floats that their layouts stand for."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quant_files import FORMATS, VOCAB, edit, save_floats, save_quantised
from safetensors.torch import load_file, save_file

from specdec_ext import LLM, SamplingParams, _core
from specdec_ext.errors import ModelError, UnsupportedModelError
from specdec_ext.models import load_model
from specdec_ext.models.config_reader import read_config
from specdec_ext.models.open_checkpoint import open_checkpoint

E4M3_INPUTS = {"float-channel", "fp8", "modelopt"}
EIGHT_BYTES = {"int-quantized", "int-tensor"}
Q = "model.layers.0.self_attn.q_proj"


def scores(folder: Path, **how: Any) -> np.ndarray:
    model = load_model(folder, **how)
    pages = [torch.zeros(2, 4, 2, 16, 32, dtype=model.kv_dtype) for _ in range(2)]
    model.bind_cache(*pages)
    ids = [(7 * i + 3) % VOCAB for i in range(24)]
    plan = _core.make_step_plan([ids], kv_len=[0], page_table=[[0, 1]], logits_for_all_rows=True)
    return np.asarray(model.forward(plan)).copy()


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_are_what_the_layout_says(tmp_path: Path, name: str) -> None:
    folder, _, matrices = save_quantised(tmp_path, name)
    with open_checkpoint(read_config(folder)) as checkpoint:
        for key, expected in matrices.items():
            assert np.array_equal(np.asarray(checkpoint.load(key)), expected), key
            weight = checkpoint.weight(key)  # type: ignore[union-attr]
            if not isinstance(weight, tuple):
                assert name == "float-block"  # 48 columns share a scale
                continue
            format = weight[1]
            assert (format == "f8_a8") == (name in E4M3_INPUTS)
            assert (format == "f8_g") == (name in ("float-tensor", "fp8-block"))
            assert (format == "q8_g") == (name in EIGHT_BYTES)
            values = np.empty(expected.shape, dtype=np.float32)
            _core.dequantize(weight, values)
            assert np.array_equal(values, expected), (key, format)
            if name in ("awq-32", "gptq", "pack-quantized"):  # zero points of 8
                assert format == "q4_0"


@pytest.mark.parametrize("name", FORMATS)
def test_scores_are_near_those_of_the_floats(tmp_path: Path, name: str) -> None:
    folder, floats, _ = save_quantised(tmp_path, name)
    expected = scores(floats)
    got = scores(folder, dtype="float32")
    assert float(np.abs(got - expected).max()) <= 1e-4 * float(np.abs(expected).max())
    own = scores(folder)  # activations in 8 bits, e4m3 or bfloat16
    error = np.linalg.norm(own - expected) / np.linalg.norm(expected)
    # e4m3 has four bits: a product of rounded activations is off by some 3 %.
    assert error < (0.12 if name in E4M3_INPUTS else 0.06), error
    info = load_model(folder).info
    assert info.dtype.split()[0] == FORMATS[name][0]["quant_method"]
    noted = any("activations" in note for note in info.warnings)
    assert noted == (name in ("int-quantized", "fp8-block", "modelopt"))


@pytest.mark.parametrize("name", FORMATS)
def test_projections_that_lie_in_one_matrix(tmp_path: Path, name: str) -> None:
    """Rows of its blocks: the matrix's own numbers, and the model of its floats."""
    folder, floats, matrices = save_quantised(tmp_path, name, fused=True)
    places = {"qkv_proj": {"q_proj": (0, 128), "k_proj": (128, 192), "v_proj": (192, 256)},
              "gate_up_proj": {"gate_proj": (0, 256), "up_proj": (256, 512)}}  # fmt: skip
    with open_checkpoint(read_config(folder)) as checkpoint:
        for whole, parts in places.items():
            [key] = [key for key in matrices if f"layers.1.{'self_attn' if 'q' in whole else 'mlp'}"
                     f".{whole}" in key]  # fmt: skip
            for part, (first, last) in parts.items():
                own = key.replace(whole, part)
                loaded = np.asarray(checkpoint.load(own, "float32"))
                assert np.array_equal(loaded, matrices[key][first:last]), own
                some = np.asarray(checkpoint.load(own, "float32", slice(32, 64)))
                assert np.array_equal(some, matrices[key][first + 32 : first + 64]), own
                weight = checkpoint.weight(own)  # type: ignore[union-attr]
                if isinstance(weight, tuple):
                    values = np.empty(loaded.shape, dtype=np.float32)
                    _core.dequantize(weight, values)
                    assert np.array_equal(values, loaded), own
                else:
                    assert name == "float-block"
    expected = scores(floats)
    assert float(np.abs(scores(folder, dtype="float32") - expected).max()) <= 1e-4 * float(
        np.abs(expected).max()
    )
    error = np.linalg.norm(scores(folder) - expected) / np.linalg.norm(expected)
    assert error < (0.16 if name in E4M3_INPUTS else 0.06), error


@pytest.mark.parametrize("name", ["awq", "gptq", "int-quantized", "float-tensor", "fp8-block"])
def test_speculative_text_is_plain(tmp_path: Path, name: str) -> None:
    folder, _, _ = save_quantised(tmp_path, name)
    prompts = [[5, 9, 2, 9, 2, 9, 2], list(range(40, 4, -1)), [3, 1, 4, 3, 1, 4, 3, 1]]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    texts = []
    for spec in (None, {"method": "lookahead", "adaptive": False}, {"method": "ngram"}):
        with LLM(folder, device="cpu", speculative_config=spec, max_batch_size=2) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([list(out.outputs[0].token_ids) for out in outputs])
    assert texts[1] == texts[0] and texts[2] == texts[0]


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder, _, matrices = save_quantised(tmp_path, "modelopt")
    edit(folder, quantization_config=None)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    content = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for part in "kv":
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"] = torch.tensor(0.1)
    save_file(tensors, folder / "model.safetensors")
    model = load_model(folder)
    assert model.kv_storage.dtype == "float8_e4m3fn"  # type: ignore[attr-defined]
    assert model.kv_storage.k_scale.tolist() == [[np.float32(0.1)] * 2] * 2  # type: ignore[attr-defined]
    with open_checkpoint(read_config(folder)) as checkpoint:
        assert np.array_equal(np.asarray(checkpoint.load(Q + ".weight")), matrices[Q + ".weight"])


def test_an_e4m3_value_that_is_nan_is_refused(tmp_path: Path) -> None:
    folder, _, _ = save_quantised(tmp_path, "fp8")
    tensors = load_file(folder / "model.safetensors")
    codes = tensors[f"{Q}.weight"].view(torch.uint8)
    codes[9, 5] = 0x7F
    tensors[f"{Q}.weight"] = codes.view(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj.*row 9 holds a scale or a value in f8_a8"):
        load_model(folder)
    with pytest.raises(ModelError, match=r"q_proj.weight' holds 1 e4m3 values that are NaN"):
        load_model(folder, dtype="bfloat16")


@pytest.mark.parametrize("name", ["fp8", "modelopt"])
def test_activations_are_rounded_where_the_checkpoint_says_so(tmp_path: Path, name: str) -> None:
    folder, _, matrices = save_quantised(tmp_path, name)
    with open_checkpoint(read_config(folder)) as checkpoint:
        blocks, format = checkpoint.weight(f"{Q}.weight")  # type: ignore[union-attr, misc]
    assert format == "f8_a8"
    weight = matrices[f"{Q}.weight"]
    x = torch.randn(7, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    out = np.empty((7, len(weight)), np.float32)
    _core.PackedLinear((blocks, format)).run(x, out)
    scale = x.float().abs().amax(1, keepdim=True) / 448
    rounded = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
    exact = rounded.double().numpy() @ weight.T.astype(np.float64)
    plain = x.double().numpy() @ weight.T.astype(np.float64)
    assert np.abs(out - exact).max() < 1e-5 * np.abs(exact).max()
    assert np.abs(out - plain).max() > 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8"])
def test_biases_of_zeros_without_a_place_are_dropped(tmp_path: Path, name: str) -> None:
    """AutoGPTQ writes them; any other bias is a parameter, which is never ignored."""
    folder, _, matrices = save_quantised(tmp_path, name)
    expected = scores(folder)
    tensors = load_file(folder / "model.safetensors")
    for key, matrix in matrices.items():
        bias = key.removesuffix("weight") + "bias"
        tensors[bias] = torch.zeros(len(matrix), dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors")
    assert np.array_equal(scores(folder), expected)
    tensors[f"{Q}.bias"][3] = 1e-4
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj.bias' \[128\] .* has no place"):
        load_model(folder)


@pytest.mark.parametrize("name", ["gptq", "awq", "pack-quantized", "float-channel"])
def test_a_quantised_head_of_a_tied_configuration_is_the_head(tmp_path: Path, name: str) -> None:
    folder, floats, _ = save_quantised(tmp_path, name)
    parts, matrix = FORMATS[name][1](np.random.default_rng(5), VOCAB, 128)
    tensors, wide = (load_file(path / "model.safetensors") for path in (folder, floats))
    tensors.pop("lm_head.weight", None)
    tensors |= {f"lm_head.{part}": value.contiguous() for part, value in parts.items()}
    wide["lm_head.weight"] = torch.from_numpy(matrix.copy())
    for path, content in ((folder, tensors), (floats, wide)):
        save_file(content, path / "model.safetensors")
        edit(path, tie_word_embeddings=True)
    expected = scores(floats)
    got = scores(folder, dtype="float32")
    assert float(np.abs(got - expected).max()) <= 1e-4 * float(np.abs(expected).max())
    assert not load_model(folder).info.tie_word_embeddings


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize(("name", "part", "value", "text"), [
    ("pack-asymmetric", "weight_zero_point", None, "q_proj.weight_zero_point' is missing"),
    ("modelopt", "input_scale", None, "q_proj.input_scale' is missing"),
    ("modelopt", "input_scale", torch.tensor(float("nan")), "q_proj.input_scale' holds 1 scales"),
    ("modelopt", "input_scale", torch.tensor(0.0), "q_proj.input_scale' holds 1 scales"),
    ("modelopt", "input_scale", torch.ones(3, 5), r"input_scale' has shape \[3, 5\], expected one"),
    ("pack-quantized", "weight_shape", torch.tensor([7, 7]),
     r"weight_shape' holds \[7, 7\], the words of .* are of \[128, 128\]"),
])  # fmt: skip
def test_tensors_that_no_product_needs_are_looked_at(
    tmp_path: Path, name: str, part: str, value: Any, text: str, dtype: str
) -> None:
    folder, _, _ = save_quantised(tmp_path, name)
    tensors = load_file(folder / "model.safetensors")
    if value is None:
        del tensors[f"{Q}.{part}"]
    else:
        tensors[f"{Q}.{part}"] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=text):
        load_model(folder, dtype=dtype)


def test_float_neighbours_of_a_stack_are_floats(tmp_path: Path) -> None:
    """A module that the checkpoint leaves out: the projections that share its input follow it."""
    folder, floats, _ = save_quantised(tmp_path, "gptq")
    tensors, wide = (load_file(path / "model.safetensors") for path in (folder, floats))
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{Q}.{part}"]
    tensors[f"{Q}.weight"] = wide[f"{Q}.weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors")
    wide[f"{Q}.weight"] = tensors[f"{Q}.weight"].float()
    save_file(wide, floats / "model.safetensors")
    expected, own = scores(floats), scores(folder)
    assert np.linalg.norm(own - expected) / np.linalg.norm(expected) < 0.06


@pytest.mark.parametrize(("name", "part", "value", "text"), [
    ("awq", "scales", float("nan"), r"q_proj.scales' holds 1 scales that are NaN"),
    ("gptq", "scales", 0.0, r"q_proj.scales' holds 1 scales that are NaN, infinite or zero"),
    ("pack-quantized", "weight_scale", float("inf"), "q_proj.weight_scale' holds 1"),
    ("int-quantized", "weight_scale", 0.0, "q_proj.weight_scale' holds 1"),
    ("fp8-block", "weight_scale_inv", float("nan"), "q_proj.weight_scale_inv' holds 1"),
    ("awq", "scales", None, "q_proj.scales' is missing"),
    ("gptq", "qzeros", None, "q_proj.qzeros' is missing"),
    ("awq", "scales", "cut", r"q_proj.scales' has shape \[1, 127\], expected \[1, 128\]"),
    ("gptq", "qzeros", "cut", r"q_proj.qzeros' has shape \[1, 15\], expected \[1, 16\]"),
    ("float-block", "weight_scale", "cut", r"weight_scale' has shape \[2, 2\]"),
    ("float-channel", "weight_scale", "cut", r"q_proj.weight_scale' has shape"),
    ("gptq", "g_idx", "reversed", "q_proj.g_idx': act-order .* is not supported"),
])  # fmt: skip
def test_bad_tensors_are_refused_by_name(
    tmp_path: Path, name: str, part: str, value: Any, text: str
) -> None:
    folder, _, _ = save_quantised(tmp_path, name)
    tensors = load_file(folder / "model.safetensors")
    key = f"{Q}.{part}"
    if name == "gptq" and value == "reversed":
        edit(folder, quantization_config={**FORMATS["gptq"][0], "group_size": 64})
        tensors[key] = 1 - torch.arange(128, dtype=torch.int32) // 64
        for other in ("scales", "qzeros"):
            tensors[f"{Q}.{other}"] = tensors[f"{Q}.{other}"].repeat(2, 1)
    elif value is None:
        del tensors[key]
    elif value == "cut":
        cut = tensors[key][:-1] if name == "float-channel" else tensors[key][..., :-1]
        tensors[key] = cut.contiguous()
    else:
        tensors[key].reshape(-1)[0] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises((ModelError, UnsupportedModelError), match=text):
        load_model(folder)


@pytest.mark.parametrize(("change", "text"), [
    ({"quant_method": "bitsandbytes"}, "quant_method = 'bitsandbytes': supported are awq"),
    ({"quant_method": "awq", "bits": 8}, "bits = 8: supported is 4"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv'"),
    ({"quant_method": "gptq", "bits": 3}, "bits = 3"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 20}, "group_size = 20"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo = 'NVFP4'"),
    ({"quant_method": "fp8", "activation_scheme": "other"}, "activation_scheme = 'other'"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
      "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}}}, "format = 'nvfp4"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
    ({"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv"}, "checkpoint_format = 'gemv'"),
    ({"quant_method": "awq", "bits": 4, "new": True}, "quantization_config.new = True: not unders"),
    ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation = 'hadamard': not"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up_proj.*": {"bits": 8}}}, "dynamic = "),
    ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "pack_dtype = 'int16'"),
    ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "format = 'marlin'"),
    ({"quant_method": "fp8", "kv_cache_scheme": "dynamic"}, "kv_cache_scheme = 'dynamic'"),
    ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "pre_quant_scale": True}},
     "pre_quant_scale = True"),
    ({"quant_method": "modelopt", "quantization": 3}, "quantization = 3: expected an object"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": {"group_0": {
        "weights": {"num_bits": 4, "type": "float"}}}}, "config_groups.group_0.weights"),
    (7, "quantization_config = 7: expected an object"),
])  # fmt: skip
def test_other_schemes_are_refused_by_name(tmp_path: Path, change: Any, text: str) -> None:
    folder = save_floats(tmp_path / "model")
    edit(folder, quantization_config=change)
    with pytest.raises((ModelError, UnsupportedModelError), match=text):
        read_config(folder)


def test_whole_numbers_for_e4m3_weights_are_refused(tmp_path: Path) -> None:
    folder = save_floats(tmp_path / "model")
    config = copy.deepcopy(FORMATS["float-channel"][0])
    config["config_groups"]["group_0"]["input_activations"]["type"] = "int"
    edit(folder, quantization_config=config)
    with pytest.raises(UnsupportedModelError, match=r"input_activations.type = 'int'.*'float'"):
        read_config(folder)


@pytest.mark.parametrize(("path", "value", "text"), [
    (("weights", "actorder"), "group", "actorder = 'group'"),
    (("weights", "num_bits"), 3, "num_bits = 3"),
    (("weights", "strategy"), "tensor_group", "strategy = 'tensor_group'"),
    (("input_activations",), {"num_bits": 4}, "input_activations.num_bits = 4"),
    (("input_activations",), {"num_bits": 8, "dynamic": True, "strategy": "channel"},
     "input_activations.strategy = 'channel'"),
    (("output_activations",), {"num_bits": 8}, "output_activations"),
    (("weights", "is_mx"), True, "weights.is_mx = True: not understood"),
    (("input_activations",), {"num_bits": 8, "dynamic": "local"}, "dynamic = 'local'"),
    (("input_activations",), {"num_bits": 8, "rounding": 3}, "input_activations.rounding = 3"),
    (("pre_transform",), [1], "group_0.pre_transform"),
])  # fmt: skip
def test_other_compressed_schemes(tmp_path: Path, path: Any, value: Any, text: str) -> None:
    folder = save_floats(tmp_path / "model")
    config = copy.deepcopy(FORMATS["pack-quantized"][0])
    place = config["config_groups"]["group_0"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    edit(folder, quantization_config=config)
    with pytest.raises(UnsupportedModelError, match=text):
        read_config(folder)


@pytest.mark.parametrize(("key", "value"), [
    ("transform_config", {"config_groups": {"R4": {"type": "hadamard", "apply": []}}}),
    ("sparsity_config", {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}),
])  # fmt: skip
def test_what_compressed_tensors_adds_to_weights_is_refused(
    tmp_path: Path, key: str, value: Any
) -> None:
    folder = save_floats(tmp_path / "model")
    edit(folder, quantization_config={**FORMATS["pack-quantized"][0], key: value})
    with pytest.raises(UnsupportedModelError, match=f"_config.{key} = .*not understood"):
        read_config(folder)


def test_a_symmetric_flag_that_is_none(tmp_path: Path) -> None:
    folder = save_floats(tmp_path / "model")
    config = copy.deepcopy(FORMATS["pack-quantized"][0])
    config["config_groups"]["group_0"]["weights"]["symmetric"] = "no"
    edit(folder, quantization_config=config)
    with pytest.raises(ModelError, match=r"weights.symmetric = 'no': expected true or false"):
        read_config(folder)


@pytest.mark.parametrize(("name", "more"), [
    ("awq", {"modules_to_not_convert": ["lm_head"], "do_fuse": False, "version": "GEMM",
             "something_new": None, "other": [], "backend": "autoawq"}),
    ("gptq", {"damp_percent": 0.01, "true_sequential": True, "model_file_base_name": "model",
              "is_marlin_format": False, "pack_dtype": "int32", "meta": {"mse": 0.1},
              "dynamic": {"-:.*lm_head": {}}, "adapter": None, "checkpoint_format": "gptq"}),
    ("pack-quantized", {"transform_config": {}, "global_compression_ratio": 1.4,
                        "sparsity_config": {"format": "dense", "sparsity_structure": "2:4"},
                        "quantization_status": "compressed", "version": "0.12.2"}),
    ("fp8-block", {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}),
    ("modelopt", {"producer": {"name": "modelopt", "version": "0.33.0"}, "group_size": None,
                  "has_zero_point": False, "pre_quant_scale": False, "exclude_modules": ["lm_head"],
                  "config_groups": {"group_0": {
                      "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
                      "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                      "targets": ["Linear"]}}}),
])  # fmt: skip
def test_what_writers_add_changes_nothing(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    folder = save_floats(tmp_path / "model")
    edit(folder, quantization_config=FORMATS[name][0])
    plain = read_config(folder).quant
    edit(folder, quantization_config={**FORMATS[name][0], **more})
    assert read_config(folder).quant == plain


def test_modelopt_nests_it_and_autofp8_names_the_cache(tmp_path: Path) -> None:
    folder = save_floats(tmp_path / "model")
    edit(folder, quantization_config=FORMATS["modelopt"][0])
    plain = read_config(folder).quant
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    edit(folder, quantization_config={"quant_method": "modelopt", "quantization": inner})
    assert read_config(folder).quant == plain
    edit(folder, quantization_config={"quant_method": "fp8", "kv_cache_scheme": "static"})
    assert read_config(folder).fp8_kv

"""config.json: both generations of keys, and every way a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_zoo import NATIVE, REFUSED, edit_json, make_config, to_v4_keys

from specdec_ext.errors import ModelError, UnsupportedModelError
from specdec_ext.models.config_reader import read_config
from specdec_ext.models.native_config import NotNativeError, native_shape


def write(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    make_config(family, **overrides).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    content.setdefault("dtype", "float32")
    content["dtype"] = content["dtype"] or "float32"
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("family", sorted(NATIVE))
def test_v4_keys_mean_the_same_as_v5_keys(tmp_path, family):
    folder = write(tmp_path, family)
    if family == "gemma3":  # v4 wrote a pattern: its third layer can only be full by position
        edit_json(folder / "config.json", layer_types=None, sliding_window_pattern=3)
    new = read_config(folder)
    to_v4_keys(folder)
    if family.startswith("llama") and "head_dim" in NATIVE[family].extra:  # v4 wrote none
        edit_json(folder / "config.json", head_dim=NATIVE[family].extra["head_dim"])
    text = (folder / "config.json").read_text()
    assert "rope_parameters" not in text and '"dtype"' not in text
    old = read_config(folder)
    assert native_shape(old) == native_shape(new)
    assert old.dtype == new.dtype == "float32"
    assert old.hf.rope_parameters == new.hf.rope_parameters


def test_gemma3_reads_two_rotary_bases(tmp_path):
    folder = write(tmp_path, "gemma3")
    to_v4_keys(folder)
    edit_json(folder / "config.json", rope_theta=5e5, rope_local_base_freq=2e4)
    config = read_config(folder)
    shape = native_shape(config)
    assert shape.rope_layer_types == ("sliding_attention", "full_attention")
    assert shape.rope_index == (0, 0, 1, 0)
    assert shape.sliding_window == (6, 6, 0, 6)
    bases = {k: v["rope_theta"] for k, v in config.hf.rope_parameters.items()}
    assert bases == {"sliding_attention": 2e4, "full_attention": 5e5}


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("num_attention_heads", 0, "1..65536"),
        ("num_attention_heads", -4, "1..65536"),
        ("num_attention_heads", 4.0, "integer"),
        ("num_attention_heads", "4", "integer"),
        ("num_attention_heads", True, "integer"),
        ("num_key_value_heads", 3, "must divide num_attention_heads = 4"),
        ("num_key_value_heads", 0, "1..65536"),
        ("hidden_size", 0, "1..1048576"),
        ("hidden_size", 1 << 40, "1..1048576"),
        ("hidden_size", 66, "multiple of 4 heads"),
        ("num_hidden_layers", 10**9, "1..4096"),
        ("vocab_size", -1, "1..16777216"),
        ("intermediate_size", 0, "1..4194304"),
        ("max_position_embeddings", 0, "1..67108864"),
        ("max_position_embeddings", 1e9, "integer"),
        ("sliding_window", 0, "1..67108864"),
        ("rms_norm_eps", 0.0, "> 0"),
        ("rms_norm_eps", -1e-6, "> 0"),
        ("rms_norm_eps", "1e-6", "finite number"),
        ("rms_norm_eps", float("nan"), "finite number"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("rope_parameters", [1], "object"),
        ("rope_parameters", {"rope_type": "linear", "factor": "x"}, "finite number"),
        ("rope_parameters", {"rope_type": "linear", "factor": 0}, "> 0"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": float("inf")}, "finite"),
        ("architectures", "LlamaForCausalLM", "list"),
        ("layer_types", ["full_attention"], "1 entries for 3 layers"),
        ("layer_types", [1, 2, 3], "list of names"),
        ("eos_token_id", 10**6, "token ids 0..198"),
        ("eos_token_id", [2, -1], "token ids 0..198"),
    ],
)
def test_absurd_value_is_one_error(tmp_path, field, value, limit):
    folder = write(tmp_path, head_dim=None)
    edit_json(folder / "config.json", head_dim=None)
    edit_json(folder / "config.json", **{field: value})
    with pytest.raises(ModelError) as error:
        read_config(folder)
    message = str(error.value)
    assert str(folder / "config.json") in message
    assert field in message and limit in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON"),
        (b'{"model_type": "llama"', "not valid JSON"),
        (b"[1, 2]", "must be a JSON object"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"[" * 100000, "cannot be read"),
        (b"{}", "model_type is missing"),
        (b'{"model_type": 7}', "model_type is missing"),
    ],
)
def test_damaged_file(tmp_path, content, reason):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        read_config(tmp_path)


def test_missing_folder_and_file(tmp_path):
    with pytest.raises(ModelError, match=r"does not exist; give the path of a local"):
        read_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json: the model configuration is missing"):
        read_config(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        read_config(tmp_path / "file")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "no_such_model"}, "unknown to the installed transformers"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "c.C"}}, "never run"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quant_method = 'hqq': supported are awq",
        ),
        ({"dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn': supported are float32"),
        ({"dtype": "float64"}, "dtype = 'float64'"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_sound_but_unsupported(tmp_path, changes, reason):
    folder = write(tmp_path)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        read_config(folder)


def test_code_in_the_folder_never_runs(tmp_path):
    folder = write(tmp_path)
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit_json(folder / "config.json", auto_map={"AutoConfig": "evil.Config"})
    assert read_config(folder).model_type == "llama"


@pytest.mark.parametrize("family", ["mamba", "t5"])
def test_other_kinds_are_refused(tmp_path, family):
    REFUSED[family].config(**REFUSED[family].extra).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError):
        read_config(tmp_path)


def test_generation_config_wins_for_eos(tmp_path):
    folder = write(tmp_path)
    assert read_config(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5, 7]}')
    assert read_config(folder).eos_token_ids == (7, 5)
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert read_config(folder).eos_token_ids == (9,)
    (folder / "generation_config.json").write_text("{}")
    assert read_config(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": 500}')
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id = 500"):
        read_config(folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json.*not valid JSON"):
        read_config(folder)


def test_minus_one_is_no_special_token(tmp_path):
    folder = write(tmp_path)
    edit_json(folder / "config.json", pad_token_id=-1)
    assert read_config(folder).pad_token_id is None


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("llama", {"head_dim": 20}, "head_dim 20"),
        ("llama", {"head_dim": 264}, "head_dim 264"),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional"),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 12,
                        "long_factor": [2.0] * 12, "factor": 2.0,
                        "original_max_position_embeddings": 64,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "rope_type 'longrope' of one layer type",
        ),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                 "partial_rotary_factor": 0.45}},
            r"partial_rotary_factor 0\.45: 7 of 16 elements",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                 "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ("gpt2", {}, "not one of the native families"),
        ("olmo2", {}, "not one of the native families"),
    ],
)  # fmt: skip
def test_what_is_not_native_says_why(tmp_path, family, overrides, reason):
    with pytest.raises(NotNativeError, match=reason):
        native_shape(read_config(write(tmp_path, family, **overrides)))


def test_another_class_of_a_native_family_is_not_native(tmp_path):
    folder = write(tmp_path)
    edit_json(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(NotNativeError, match="LlamaForSequenceClassification"):
        native_shape(read_config(folder))


def test_a_field_of_a_future_version_is_not_ignored(tmp_path, monkeypatch):
    import dataclasses

    folder = write(tmp_path)
    edit_json(folder / "config.json", some_new_field=1)  # not known here: transformers reads it
    config = read_config(folder)
    fields = (*dataclasses.fields(config.hf), dataclasses.field(default=0.0))
    fields[-1].name = "new_logit_scale"
    monkeypatch.setattr(dataclasses, "fields", lambda _: fields)
    native_shape(config)  # absent or at its default: nothing to understand
    config.hf.new_logit_scale = 0.5
    with pytest.raises(NotNativeError, match=r"new_logit_scale = 0\.5 is not understood"):
        native_shape(config)


def test_qwen2_window_starts_at_max_window_layers(tmp_path):
    shape = native_shape(read_config(write(tmp_path, "qwen2_window")))
    assert shape.sliding_window == (0, 5, 5)
    off = tmp_path / "off"
    off.mkdir()
    folder = write(off, "qwen2_window", use_sliding_window=False)
    assert native_shape(read_config(folder)).sliding_window == (0, 0, 0)

"""config.json of the native families without transformers, against transformers itself."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_zoo import NATIVE, make_config
from transformers import CONFIG_MAPPING

from specdec_ext.errors import ModelError
from specdec_ext.models.config_reader import read_config, transformers_config
from specdec_ext.models.family_config import FamilyConfig, family_config

SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text")
LONG = {"short_factor": [1.0, 2] * 4, "long_factor": [3.0] * 8}
ROPE: dict[str, Any] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "old_name": {"type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
}  # fmt: skip


def reference(raw: dict[str, Any]) -> Any:
    """transformers' own object."""
    return CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))


def assert_same(raw: dict[str, Any]) -> None:
    before = copy.deepcopy(raw)
    ours = family_config(raw)
    assert ours is not None and raw == before
    theirs = reference(raw)
    for name, value in vars(ours).items():
        if name == "sliding_window_pattern":  # kept in a private attribute where it is a default
            continue
        assert getattr(theirs, name) == value, name
        assert type(getattr(theirs, name)) is type(value), name


@pytest.mark.parametrize("family", [*FAMILIES, "phi3"])
def test_defaults(family):
    assert_same({"model_type": family})
    assert_same({"model_type": family, **SMALL})


@pytest.mark.parametrize("entry", sorted(NATIVE))
def test_whole_files(entry):
    """What transformers writes, and the same with the keys of version 4."""
    raw = json.loads(make_config(entry).to_json_string(use_diff=False))
    assert_same(raw)
    raw = json.loads(make_config(entry).to_json_string())
    assert_same(raw)
    parameters = raw.pop("rope_parameters")
    if "full_attention" in parameters:
        raw["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    raw["rope_theta"] = 5e5
    raw["torch_dtype"] = raw.pop("dtype", "float32")
    assert_same(raw)


@pytest.mark.parametrize("rope", sorted(ROPE))
@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_parameters(family, rope):
    raw = {"model_type": family, **SMALL, "max_position_embeddings": 128}
    assert_same({**raw, "rope_scaling": dict(ROPE[rope]), "rope_theta": 2e4})
    if family != "gemma3_text":
        assert_same({**raw, "rope_parameters": {**ROPE[rope], "rope_theta": 3e4}})


def test_rotary_parameters_of_phi3():
    raw = {"model_type": "phi3", **SMALL, "max_position_embeddings": 128}
    assert_same({**raw, "partial_rotary_factor": 0.75, "rope_theta": 2e4})
    assert_same({**raw, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}})
    scaled = {**raw, "original_max_position_embeddings": 32}
    assert_same({**scaled, "rope_scaling": {"type": "longrope", **LONG}})
    assert_same({**scaled, "rope_parameters": {"rope_type": "longrope", "factor": 4.0, **LONG}})
    assert_same({**raw, "rope_scaling": {"type": "su", "original_max_position_embeddings": 4096,
                                         **LONG}})  # fmt: skip


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"num_key_value_heads": None, "head_dim": None}),
        ("llama", {"eos_token_id": [1, 2], "pad_token_id": None}),
        ("llama", {"attention_dropout": 0}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "head_dim": 16}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 9, "no_rope_layer_interval": 2}),
        ("smollm3", {"no_rope_layers": [0, 1, 0]}),
        ("phi3", {"sliding_window": 2047, "num_key_value_heads": 2, "head_dim": 8}),
        ("phi3", {"resid_pdrop": 0, "embd_pdrop": 0.1, "eos_token_id": [1, 2]}),
        ("gemma2", {"final_logit_softcapping": None, "tie_word_embeddings": False}),
        ("gemma3_text", {"sliding_window_pattern": 2, "sliding_window": 8}),
        ("gemma3_text", {"layer_types": ["full_attention"] * 3}),
        ("gemma3_text", {"rope_parameters": {"full_attention": None}}),
    ],
)
def test_fields_that_follow_from_others(family, change):
    assert_same({"model_type": family, **SMALL, **change})


ANY_VALUE = (None, False, True, 0, 7, 1.5, "x", [], [1], {}, {"a": [1]})
IGNORED = (
    "bad_words_ids", "begin_suppress_tokens", "cache_implementation", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "suppress_tokens", "temperature", "tf_legacy_loss", "top_k", "top_p", "torchscript",
    "typical_p", "use_bfloat16", "attn_implementation", "cls_token_id",
    "decoder_start_token_id", "finetuning_task", "is_llama_config", "mask_token_id",
    "model_max_length", "name_or_path", "prefix", "sep_token_id", "task_specific_params",
    "tokenizer_class", "transformers.js_config", "unk_token_id", "_commit_hash",
    "_flash_attn_2_enabled", "unsloth_fixed", "unsloth_version", "_attn_implementation",
    "_attn_implementation_autoset",
)  # fmt: skip
NO = ("rope_interleaved", "use_mrope", "tie_encoder_decoder", "add_cross_attention", "is_decoder")
# Key -> values with which it changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(IGNORED, ANY_VALUE),
    **dict.fromkeys(NO, (None, False)),
    "pruned_heads": (None, {}, []),
    "some_new_field": (None,),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", NEUTRAL)
def test_keys_that_change_nothing(family: str, key: str) -> None:
    """transformers makes the same decoder of the file without them."""
    raw = {"model_type": family, **SMALL}
    plain = family_config(raw)
    for value in NEUTRAL[key]:
        assert family_config({**raw, key: value}) == plain
        assert_same({**raw, key: value})


@pytest.mark.parametrize(("family", "key", "value"), [
    ("mistral", "pretraining_tp", 2), ("smollm3", "pretraining_tp", 2),
    ("smollm3", "max_window_layers", 28), ("gemma2", "hidden_act", "gelu"),
    ("gemma3_text", "hidden_act", "gelu_pytorch_tanh"),
])  # fmt: skip
def test_fields_of_other_families(family: str, key: str, value: Any) -> None:
    raw = {"model_type": family, **SMALL}
    assert family_config({**raw, key: value}) == family_config(raw)
    assert_same({**raw, key: value})


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"some_new_field": 1}),
        ("llama", {"num_labels": None}),
        ("llama", {"rope_interleaved": True}),
        ("llama", {"pruned_heads": {"0": [1]}}),
        ("qwen2", {"use_mrope": True}),
        ("qwen2", {"pretraining_tp": 2}),
        ("mistral", {"is_decoder": 0}),
        ("llama", {"hidden_act": 1}),
        ("llama", {"use_cache": "yes"}),
        ("llama", {"rms_norm_eps": 1}),
        ("llama", {"hidden_size": 66}),
        ("llama", {"head_dim": 5}),
        ("llama", {"rope_theta": None}),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"layer_types": ["full_attention"] * 3}),
        ("mistral", {"layer_types": ["full_attention"] * 3}),
        ("qwen3", {"head_dim": None}),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}),
        ("qwen2", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
        ("smollm3", {"no_rope_layers": [1]}),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("phi3", {"rope_scaling": {"rope_type": "longrope"}}),
        ("phi3", {"rope_scaling": {"rope_type": "longrope", **LONG, "short_factor": [1.0] * 7}}),
        ("phi3", {"partial_rotary_factor": "1"}),
        ("phi3", {"layer_types": ["full_attention"] * 3}),
        ("gemma2", {"query_pre_attn_scalar": 1.5}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}),
        ("gpt2", {}),
    ],
)
def test_what_is_not_understood_is_left_to_transformers(family, change):
    assert family_config({"model_type": family, **SMALL, **change}) is None


def test_refusals_of_transformers_stay(tmp_path):
    raw = {"model_type": "llama", **SMALL, "use_cache": "yes", "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="transformers refuses this llama configuration"):
        read_config(tmp_path)


def test_the_adapter_gets_transformers_own_object(tmp_path):
    make_config("qwen3").save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert isinstance(config.hf, FamilyConfig)
    assert type(transformers_config(config)).__name__ == "Qwen3Config"


def test_reading_imports_neither_torch_nor_transformers(tmp_path):
    make_config("llama").save_pretrained(tmp_path)
    script = (
        "import sys; from specdec_ext.models.config_reader import read_config\n"
        f"read_config({str(tmp_path)!r})\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent)

"""config.json of the native families, completed as transformers completes it.

transformers takes three seconds to import and is not needed to know what it would say of a file
that is well-formed. Whatever is not understood here, to the last key and type, is left to it: then
family_config() gives None. The tests hold every family against the installed transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

__all__ = ["FamilyConfig", "family_config"]


class FamilyConfig(SimpleNamespace):
    """The attributes of transformers' configuration object that a decoder depends on: the fields of
    its family, rope_parameters in the form of transformers 5, and model_type."""


_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA: dict[str, Any] = {
    **{key: value for key, value in _COMMON.items() if key != "hidden_act"},
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "use_bidirectional_attention": None,
}
# Field -> default, of each family.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pretraining_tp": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": None,
    },
    "mistral": {
        **_COMMON,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": 4096,
        "head_dim": None,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "smollm3": {
        **_COMMON,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "pad_token_id": 128004,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "layer_types": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    },
    "phi3": {
        **_COMMON,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_key_value_heads": None,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
        "sliding_window": None,
    },
    "gemma2": {
        **_GEMMA,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "sliding_window_pattern": 6,
    },
}
_THETA = {"smollm3": 2000000.0}
_GLOBAL_THETA, _LOCAL_THETA = 1000000.0, 10000.0  # of gemma3_text
# Keys without a meaning for the decoder, whatever their value.
_IGNORED = frozenset((
    "_name_or_path", "_sliding_window_pattern", "architectures", "auto_map",
    "chunk_size_feed_forward", "draft_vocab_size", "dtype", "id2label", "is_encoder_decoder",
    "label2id", "model_sha256",
    "model_type", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
    "torch_dtype", "transformers_version",
    # How to generate and to save, in files of version 4 and before.
    "bad_words_ids", "begin_suppress_tokens", "cache_implementation", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
    "temperature", "tf_legacy_loss", "top_k", "top_p", "torchscript", "typical_p", "use_bfloat16",
    # What is said of texts, of training, and to other programs.
    "attn_implementation", "cls_token_id", "decoder_start_token_id", "finetuning_task",
    "is_llama_config", "mask_token_id", "model_max_length", "name_or_path", "prefix",
    "sep_token_id", "task_specific_params", "tokenizer_class", "transformers.js_config",
    "unk_token_id", "_commit_hash", "_flash_attn_2_enabled",
))  # fmt: skip
# What the code that came with the family's first folders read, and its transformers class does not.
_UNREAD = {
    "phi3": frozenset(("attention_bias", "full_attn_mod", "interpolate_factor", "lm_head_bias",
                       "mlp_bias")),
}  # fmt: skip
_IGNORED_PREFIXES = ("unsloth_", "_attn_implementation")
# Keys without a meaning where they have such a value.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_decoder": (False,),
    "pruned_heads": ({}, []),
}
# Fields of other families that the class of this one does not read.
_OF_OTHERS: dict[str, dict[str, type]] = {
    "mistral": {"pretraining_tp": int},
    "smollm3": {"pretraining_tp": int, "max_window_layers": int},
    "gemma2": {"hidden_act": str},
    "gemma3_text": {"hidden_act": str},
}
_ROPE_KEYS = frozenset(("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"))
# Fields that may be null where their default is none.
_NULLABLE = {
    "num_key_value_heads": ("llama", "qwen2", "qwen3", "smollm3", "phi3"),
    "sliding_window": tuple(_FAMILIES),
    "final_logit_softcapping": ("gemma2", "gemma3_text"),
    "attn_logit_softcapping": ("gemma2", "gemma3_text"),
    "bos_token_id": tuple(_FAMILIES),
    "eos_token_id": tuple(_FAMILIES),
    "pad_token_id": tuple(_FAMILIES),
    "pretraining_tp": ("llama",),
}
_DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop")
_FLOATS = (*_DROPOUTS, "initializer_range", "rms_norm_eps",
           "final_logit_softcapping", "attn_logit_softcapping")  # fmt: skip
# What a rotary type needs besides its base.
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


class _LeftToTransformers(Exception):
    """Something that is not understood here."""


def family_config(raw: Mapping[str, Any]) -> FamilyConfig | None:
    """What transformers makes of `raw`, the content of a config.json; None: ask transformers."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        return None
    try:
        values = _fields(family, raw)
        _complete(family, values)
        values["rope_parameters"] = _rope(family, raw, values)
    except _LeftToTransformers:
        return None
    return FamilyConfig(model_type=family, **values)


def _fields(family: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the family: the file's value or the default."""
    defaults = _FAMILIES[family]
    values = copy.deepcopy(defaults)
    for key, value in raw.items():
        if key in _IGNORED or key in _ROPE_KEYS or key in _UNREAD.get(family, ()):
            continue
        if key == "partial_rotary_factor" and family == "phi3":
            continue  # goes into rope_parameters
        if key == "head_dim" and key not in defaults and value is not None:
            values[key] = _checked(family, key, value)  # not a field, but every class reads it
            continue
        if key not in defaults:
            if _says_nothing(family, key, value):
                continue
            raise _LeftToTransformers(key)
        values[key] = _checked(family, key, value)
    return values


def _says_nothing(family: str, key: str, value: Any) -> bool:
    """A key that is no field of the family changes nothing. A null is as if it were not there;
    num_labels alone must be a number."""
    if key.startswith(_IGNORED_PREFIXES) or (value is None and key != "num_labels"):
        return True
    if key in _NOTHING:
        return any(type(value) is type(none) and value == none for none in _NOTHING[key])
    return type(value) is _OF_OTHERS.get(family, {}).get(key)


def _checked(family: str, key: str, value: Any) -> Any:
    """A value whose type is the field's; numbers stay as they are written."""
    default = _FAMILIES[family].get(key)
    fits: bool
    if value is None:
        fits = default is None or family in _NULLABLE.get(key, ())
    elif key in ("layer_types", "no_rope_layers"):
        kind = str if key == "layer_types" else int
        fits = isinstance(value, list) and all(type(entry) is kind for entry in value)
        fits = fits and (kind is int or all(entry in _LAYER_TYPES for entry in value))
    elif key == "eos_token_id":
        fits = type(value) is int or (
            isinstance(value, list) and all(type(entry) is int for entry in value)
        )
    elif key in _FLOATS:
        # transformers refuses an integer where a field is a float alone.
        fits = type(value) is float or (key in _DROPOUTS and type(value) is int)
    elif key == "use_bidirectional_attention" or isinstance(default, bool):
        fits = type(value) is bool
    elif isinstance(default, str):
        fits = type(value) is str
    else:
        fits = type(value) is int
    if not fits:
        raise _LeftToTransformers(key)
    return copy.deepcopy(value)


def _complete(family: str, values: dict[str, Any]) -> None:
    """Fields that follow from others."""
    heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
    if heads < 1 or values["hidden_size"] % heads or values.get("use_bidirectional_attention"):
        raise _LeftToTransformers(family)
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if family in ("llama", "mistral") and values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // heads
    if (values.get("head_dim") or 2) % 2:
        raise _LeftToTransformers("head_dim")
    if family in ("qwen2", "qwen3") and not values["use_sliding_window"]:
        values["sliding_window"] = None
    if family == "smollm3":
        if values["no_rope_layers"] is None:
            every = values["no_rope_layer_interval"]
            values["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(layers)]
        elif len(values["no_rope_layers"]) != layers:
            raise _LeftToTransformers("no_rope_layers")
    if "layer_types" in values:
        if values["layer_types"] is None:
            values["layer_types"] = [
                _LAYER_TYPES[_has_window(family, values, i)] for i in range(layers)
            ]
        elif len(values["layer_types"]) != layers:
            raise _LeftToTransformers("layer_types")


def _has_window(family: str, values: Mapping[str, Any], layer: int) -> bool:
    """Does a layer have sliding attention, where the file does not say?"""
    has_window = values["sliding_window"] is not None
    if family in ("qwen2", "qwen3"):
        return has_window and layer >= values["max_window_layers"]
    if family == "smollm3":
        used = bool(values["use_sliding_window"]) and has_window
        return used and not values["no_rope_layers"][layer]
    return bool((layer + 1) % values.get("sliding_window_pattern", 2))


def _rope(family: str, raw: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    if family == "gemma3_text":
        return _gemma3_rope(raw, values)
    parameters = copy.deepcopy(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if "rope_local_base_freq" in raw or any(key in _LAYER_TYPES for key in parameters):
        raise _LeftToTransformers("rope_parameters")
    theta = raw.get("rope_theta", _THETA.get(family, 10000.0))
    if family == "phi3":
        return _phi3_rope(parameters, theta, raw, values)
    return _standard(parameters, theta, values["max_position_embeddings"])


def _phi3_rope(
    parameters: dict[str, Any], theta: Any, raw: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    parameters.setdefault("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    share = parameters["partial_rotary_factor"]
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if type(share) not in (int, float):
        raise _LeftToTransformers("partial_rotary_factor")
    if kind == "default":
        return _standard(parameters, theta, values["max_position_embeddings"])
    if kind in ("longrope", "su"):  # the older name
        parameters["original_max_position_embeddings"] = values["original_max_position_embeddings"]
        count = int(values["hidden_size"] // values["num_attention_heads"] * share) // 2
        for factors in (parameters.get("short_factor"), parameters.get("long_factor")):
            if (
                not isinstance(factors, list)
                or len(factors) != count
                or not all(type(factor) in (int, float) for factor in factors)
            ):
                raise _LeftToTransformers("short_factor")
        parameters["rope_type"] = "longrope"
        if type(parameters.setdefault("rope_theta", theta)) in (int, float):
            return parameters
    raise _LeftToTransformers("rope_parameters")


def _gemma3_rope(raw: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Two sets of parameters: of full attention and of sliding windows."""
    given = copy.deepcopy(raw.get("rope_parameters")) or {}
    if set(given) - set(_LAYER_TYPES) or not all(
        entry is None or isinstance(entry, dict) for entry in given.values()
    ):
        raise _LeftToTransformers("rope_parameters")
    theta = {
        "full_attention": raw.get("rope_theta", _GLOBAL_THETA),
        "sliding_attention": raw.get("rope_local_base_freq", _LOCAL_THETA),
    }
    rope: dict[str, Any] = {}
    for kind, base in theta.items():
        parameters = {"rope_type": "default"} if given.get(kind) is None else given[kind]
        if kind == "full_attention":
            parameters.update(raw.get("rope_scaling") or {})
        parameters.setdefault("rope_theta", base)
        if kind in values["layer_types"]:  # transformers completes what a layer uses, no more
            parameters = _standard(parameters, base, values["max_position_embeddings"])
        rope[kind] = parameters
    return rope


def _standard(parameters: dict[str, Any], theta: Any, length: int) -> dict[str, Any]:
    """Rotary parameters with what transformers adds to them."""
    parameters.setdefault("rope_theta", theta)
    kind = parameters.setdefault("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_NEEDS:
        raise _LeftToTransformers("rope_type")
    if kind in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", length)
    needed = [parameters.get(key) for key in ("rope_theta", *_ROPE_NEEDS[kind])]
    if not all(type(value) in (int, float) for value in needed):
        raise _LeftToTransformers("rope_parameters")
    return parameters

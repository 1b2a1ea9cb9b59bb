"""What a quantised checkpoint says of its weights: who wrote it, in which form, and of its K/V.

Read from quantization_config of config.json, or ModelOpt's hf_quant_config.json. What is not
understood is refused by name, to the last key that says something: nothing of it is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.validate import show
from ..errors import ModelError, UnsupportedModelError
from .json_file import read_json

__all__ = ["QuantConfig", "read_quantization"]

_GROUP = 32  # of the kernels: a scale covers whole ones
# Keys that say nothing of the weights or nothing that their tensors do not say: which modules are
# quantised, how the writer found its numbers, what a server may run them with.
_COMMON = frozenset((
    "quant_method", "modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules",
    "packed_modules_mapping", "version", "producer", "meta", "backend", "dataset", "tokenizer",
    "batch_size", "model_seqlen", "uri",
))  # fmt: skip
# Writers: AutoAWQ, and transformers' AwqConfig.
_AWQ = _COMMON | {
    "bits", "w_bit", "group_size", "q_group_size", "zero_point", "do_fuse", "fuse_max_seq_len",
    "modules_to_fuse", "exllama_config", "sym", "desc_act", "checkpoint_format", "format",
    "lm_head",
}  # fmt: skip
# AutoGPTQ, GPTQModel, AutoRound, and transformers' GPTQConfig.
_GPTQ = _COMMON | {
    "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "lm_head",
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "act_group_aware",
    "mse", "model_name_or_path", "model_file_base_name", "block_name_to_quantize",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "cache_block_outputs",
    "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length",
    "pad_token_id", "cache_examples_on_gpu", "quantizer", "autoround_version", "iters", "lr",
    "minmax_lr", "nsamples", "seqlen", "low_gpu_mem_usage", "enable_minmax_tuning",
    "enable_quanted_input", "scale_dtype", "gradient_accumulate_steps", "to_quant_block_names",
    "amp", "train_bs", "data_type", "packing_format",
}  # fmt: skip
_COMPRESSED = _COMMON | {
    "format", "config_groups", "kv_cache_scheme", "quantization_status",
    "global_compression_ratio",
}  # fmt: skip
_COMPRESSED_GROUP = frozenset(
    ("targets", "weights", "input_activations", "output_activations", "format")
)
# The types of scales and zero points are those of their tensors.
_SCHEME = frozenset((
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic",
    "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
))  # fmt: skip
_FP8 = _COMMON | {
    "activation_scheme", "fmt", "scale_fmt", "weight_block_size", "kv_cache_scheme",
}  # fmt: skip
_MODELOPT = _COMMON | {
    "quant_algo", "kv_cache_scheme", "kv_cache_quant_algo", "config_groups", "quantization",
    "group_size",
}  # fmt: skip


@dataclass(frozen=True)
class QuantConfig:
    """method      as the checkpoint names it
    form        "awq", "gptq", "packed": int32 words of 4-bit numbers as AutoAWQ, AutoGPTQ and
                compressed-tensors lay them out; "int8": whole numbers; "fp8": e4m3
    group_size  elements of a row that share a scale, of 4-bit forms; 0: the whole row
    block       rows and columns that share a scale, of fp8; None: whole rows, or all
    symmetric   zero points of 8 for all of "packed"; else the checkpoint has a tensor of them
    zero_plus   what a stored zero point of GPTQ lacks
    acts_fp8    products of e4m3 weights take activations in e4m3, too
    static_acts the checkpoint has a scale for the inputs of each module
    notes       what is honoured in another way than the checkpoint's own kernels would
    fp8_kv      K and V were calibrated to be stored as e4m3
    """

    method: str
    form: str
    group_size: int = 0
    block: tuple[int, int] | None = None
    symmetric: bool = True
    zero_plus: int = 0
    acts_fp8: bool = False
    static_acts: bool = False
    notes: tuple[str, ...] = ()
    fp8_kv: bool = False


def read_quantization(path: Path, raw: dict[str, Any]) -> QuantConfig | None:
    """Takes quantization_config out of `raw`, the content of the config.json at `path`.

    Raises ModelError for a damaged entry, UnsupportedModelError for a scheme that is not supported.
    """
    entry = raw.get("quantization_config")
    if entry is None:
        return _modelopt_file(path)
    where = f"{path}: quantization_config"
    if not isinstance(entry, dict):
        raise ModelError(f"{where} = {show(entry)}: expected an object")
    method = entry.get("quant_method")
    readers = {
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": _compressed,
        "fp8": _fp8,
        "modelopt": _modelopt,
    }
    if method not in readers:
        raise UnsupportedModelError(
            f"{where}.quant_method = {method!r}: supported are {', '.join(readers)}; give "
            "another checkpoint of the model, or one in float32, bfloat16 or float16"
        )
    config = readers[method](where, entry)
    del raw["quantization_config"]
    return config


def _refuse(where: str, field: str, value: object, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{where}.{field} = {show(value)}: supported is {supported}; give another checkpoint"
    )


def _says_something(value: object) -> bool:
    """Not null, false or empty, nor made of such alone."""
    if isinstance(value, dict):
        return any(_says_something(entry) for entry in value.values())
    return value not in (None, False, "", [])


def _only_known(where: str, entry: dict[str, Any], known: frozenset[str]) -> None:
    """Raises UnsupportedModelError for a key that may change what the weights stand for."""
    for key, value in entry.items():
        if key not in known and _says_something(value):
            raise UnsupportedModelError(
                f"{where}.{key} = {show(value)}: not understood, and it may change what the "
                "weights stand for; give another checkpoint of the model"
            )


def _group(where: str, value: object, field: str = "group_size") -> int:
    if value == -1:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % _GROUP:
        raise _refuse(where, field, value, f"a multiple of {_GROUP}, or -1 for whole rows")
    return value


def _awq(where: str, entry: dict[str, Any]) -> QuantConfig:
    _only_known(where, entry, _AWQ)
    bits = entry.get("bits", entry.get("w_bit"))
    if bits != 4:
        raise _refuse(where, "bits", bits, "4")
    for field in ("version", "checkpoint_format", "format"):
        layout = entry.get(field) or "gemm"
        if str(layout).lower() != "gemm":
            raise _refuse(where, field, layout, "'gemm'")
    group = _group(where, entry.get("group_size", entry.get("q_group_size", 128)))
    return QuantConfig("awq", "awq", group)


def _gptq(where: str, entry: dict[str, Any]) -> QuantConfig:
    dynamic = entry.get("dynamic")
    if isinstance(dynamic, dict) and all(str(key).startswith("-:") for key in dynamic):
        entry = {**entry, "dynamic": None}  # modules that are left out: they are floats
    if entry.get("pack_dtype", "int32") == "int32":
        entry = {**entry, "pack_dtype": None}
    _only_known(where, entry, _GPTQ)
    if entry.get("bits") != 4:
        raise _refuse(where, "bits", entry.get("bits"), "4")
    field = "checkpoint_format" if entry.get("checkpoint_format") else "format"
    layout = entry.get(field) or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise _refuse(where, field, layout, "'gptq' or 'gptq_v2'")
    # desc_act is looked at in g_idx, which says what the order really is.
    group = _group(where, entry.get("group_size", 128))
    return QuantConfig("gptq", "gptq", group, zero_plus=int(layout == "gptq"))


@dataclass(frozen=True)
class _Activations:
    """fp8: products take activations as e4m3, a scale for each row; static: the checkpoint has
    scales for them; notes: what is otherwise."""

    fp8: bool
    notes: tuple[str, ...] = ()
    static: bool = False


def _activations(where: str, acts: object, kind: str) -> _Activations:
    """What compressed-tensors says of the inputs of weights of a kind, "int" or "float".

    Raises ModelError, UnsupportedModelError.
    """
    field = "input_activations"
    if acts is None:
        return _Activations(fp8=False)
    if not isinstance(acts, dict):
        raise ModelError(f"{where}.{field} = {show(acts)}: expected an object or null")
    _only_known(f"{where}.{field}", acts, _SCHEME)
    if acts.get("num_bits") != 8:
        raise _refuse(where, f"{field}.num_bits", acts.get("num_bits"), "8, or no activations")
    if kind == "float" and acts.get("type", kind) != kind:
        raise _refuse(where, f"{field}.type", acts.get("type"), "'float', as of the weights")
    dynamic = acts.get("dynamic", False)
    if not isinstance(dynamic, bool):  # such as "local"
        raise _refuse(where, f"{field}.dynamic", dynamic, "true or false")
    strategy = acts.get("strategy")
    strategies = ("token", "group") if dynamic else ("tensor",)
    if strategy not in (*strategies, None) and strategy != "tensor":
        raise _refuse(where, f"{field}.strategy", strategy, " or ".join(strategies))
    if kind == "float":
        return _fp8_activations(dynamic, by_groups=strategy == "group")
    return _Activations(False, (_finer("dynamic" if dynamic else "static"),), static=not dynamic)


def _fp8_activations(dynamic: bool, by_groups: bool) -> _Activations:
    if by_groups:  # one scale for a whole row would be coarser than the checkpoint's
        return _Activations(False, (_finer("dynamic"),))
    if dynamic:
        return _Activations(fp8=True)
    note = "static e4m3 activations: each row has a scale of its own in place of input_scale"
    return _Activations(True, (note,), static=True)


def _finer(kind: str) -> str:
    what = "input_scale is not used: " if kind == "static" else ""
    return (
        f"{kind} 8-bit activations: {what}products take activations in more bits than the "
        "checkpoint's own kernels do"
    )


def _fp8_scheme(where: str, field: str, value: object) -> bool:
    """Whether a kv_cache_scheme asks for e4m3."""
    if value is None:
        return False
    ok = isinstance(value, dict) and value.get("num_bits") == 8 and value.get("type") == "float"
    if not ok or value.get("dynamic"):  # type: ignore[attr-defined]
        raise _refuse(where, field, value, "static 8-bit float, or none")
    return True


def _compressed(where: str, entry: dict[str, Any]) -> QuantConfig:
    sparsity = entry.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") == "dense":
        entry = {**entry, "sparsity_config": None}  # the zeros are stored as any number
    _only_known(where, entry, _COMPRESSED)
    groups = entry.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _refuse(where, "config_groups", groups, "one group")
    ((name, group),) = groups.items()
    at = f"{where}.config_groups.{name}"
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ModelError(f"{at}.weights = {show(weights)}: expected an object")
    _only_known(at, group, _COMPRESSED_GROUP)
    _only_known(f"{at}.weights", weights, _SCHEME)
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise ModelError(f"{at}.weights.symmetric = {show(symmetric)}: expected true or false")
    layout = group.get("format") or entry.get("format")
    kv = _fp8_scheme(where, "kv_cache_scheme", entry.get("kv_cache_scheme"))
    if group.get("output_activations") is not None:
        raise _refuse(at, "output_activations", group["output_activations"], "null")
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    acts = _activations(at, group.get("input_activations"), str(kind))
    notes = acts.notes
    if weights.get("actorder") not in (None, "weight", "static"):
        # The other kinds reorder the columns through weight_g_idx.
        raise _refuse(at, "weights.actorder", weights.get("actorder"), "null or 'weight'")
    if layout == "pack-quantized":
        if (bits, kind) != (4, "int"):
            raise _refuse(at, "weights.num_bits", bits, "4, of type 'int'")
        if strategy not in ("group", "channel"):
            raise _refuse(at, "weights.strategy", strategy, "'group' or 'channel'")
        size = _group(at, weights.get("group_size"), "weights.group_size") \
            if strategy == "group" else 0  # fmt: skip
        return QuantConfig(
            "compressed-tensors", "packed", size, symmetric=symmetric, notes=notes, fp8_kv=kv,
            static_acts=acts.static,
        )  # fmt: skip
    if layout == "int-quantized":
        if (bits, kind) != (8, "int") or not symmetric:
            raise _refuse(at, "weights", weights, "symmetric 8-bit 'int'")
        if strategy not in ("channel", "tensor"):
            raise _refuse(at, "weights.strategy", strategy, "'channel' or 'tensor'")
        return QuantConfig(
            "compressed-tensors", "int8", notes=notes, fp8_kv=kv, static_acts=acts.static
        )
    if layout == "float-quantized":
        if (bits, kind) != (8, "float"):
            raise _refuse(at, "weights.num_bits", bits, "8, of type 'float'")
        block = None
        if strategy == "block":
            block = _block(at, weights.get("block_structure"))
        elif strategy not in ("channel", "tensor"):
            raise _refuse(at, "weights.strategy", strategy, "'tensor', 'channel' or 'block'")
        return QuantConfig(
            "compressed-tensors", "fp8", block=block, acts_fp8=acts.fp8, notes=notes, fp8_kv=kv,
            static_acts=acts.static,
        )  # fmt: skip
    raise _refuse(where, "format", layout, "'float-', 'int-' or 'pack-quantized'")


def _block(where: str, value: object) -> tuple[int, int]:
    sizes = value if isinstance(value, (list, tuple)) else ()
    if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise _refuse(where, "weight_block_size", value, "two positive numbers, such as [128, 128]")
    return int(sizes[0]), int(sizes[1])


def _fp8(where: str, entry: dict[str, Any]) -> QuantConfig:
    _only_known(where, entry, _FP8)
    scheme = entry.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _refuse(where, "activation_scheme", scheme, "'dynamic' or 'static'")
    kind = entry.get("fmt", "e4m3")
    if kind not in (None, "e4m3"):
        raise _refuse(where, "fmt", kind, "'e4m3'")
    size = entry.get("weight_block_size")
    block = None if size is None else _block(where, size)
    acts = _fp8_activations(scheme == "dynamic", by_groups=block is not None)
    kv = entry.get("kv_cache_scheme")  # AutoFP8's word
    if kv not in (None, "static"):
        raise _refuse(where, "kv_cache_scheme", kv, "'static' or null")
    return QuantConfig(
        "fp8", "fp8", block=block, acts_fp8=acts.fp8, notes=acts.notes, fp8_kv=kv is not None,
        static_acts=scheme == "static",
    )  # fmt: skip


def _modelopt(where: str, entry: dict[str, Any]) -> QuantConfig:
    nested = entry.get("quantization")
    if nested is not None:  # as in hf_quant_config.json
        if not isinstance(nested, dict):
            raise ModelError(f"{where}.quantization = {show(nested)}: expected an object")
        own = {key: value for key, value in entry.items() if key != "quantization"}
        entry = {**own, **nested}
    _only_known(where, entry, _MODELOPT)
    _check_modelopt_groups(where, entry.get("config_groups"))
    algorithm = entry.get("quant_algo")
    if algorithm != "FP8":
        raise _refuse(where, "quant_algo", algorithm, "'FP8'")
    kv = _fp8_scheme(where, "kv_cache_scheme", entry.get("kv_cache_scheme"))
    named = entry.get("kv_cache_quant_algo")
    if named not in (None, "FP8"):
        raise _refuse(where, "kv_cache_quant_algo", named, "'FP8' or null")
    is_fp8_kv = kv or named == "FP8"
    acts = _fp8_activations(dynamic=False, by_groups=False)
    return QuantConfig(
        "modelopt", "fp8", acts_fp8=acts.fp8, notes=acts.notes, fp8_kv=is_fp8_kv, static_acts=True
    )


def _check_modelopt_groups(where: str, groups: object) -> None:
    """What quant_algo FP8 says, once more in the words of compressed-tensors."""
    for name, group in (groups if isinstance(groups, dict) else {}).items():
        for part in ("weights", "input_activations"):
            scheme = group.get(part) if isinstance(group, dict) else group
            said = scheme if isinstance(scheme, dict) else {}
            if (said.get("num_bits"), said.get("type"), said.get("dynamic")) not in (
                (8, "float", False), (8, "float", None),
            ):  # fmt: skip
                at = f"config_groups.{name}.{part}"
                raise _refuse(where, at, scheme, "static 8-bit float, as of quant_algo 'FP8'")


def _modelopt_file(config: Path) -> QuantConfig | None:
    path = config.with_name("hf_quant_config.json")
    if not path.is_file():
        return None
    entry = read_json(path, "ModelOpt's configuration").get("quantization")
    if not isinstance(entry, dict):
        raise ModelError(f"{path}: quantization = {show(entry)}: expected an object")
    return _modelopt(f"{path}: quantization", entry)

"""What a quantised checkpoint says of its weights: who wrote it, in which form, and of its K/V.

Read from quantization_config of config.json, or ModelOpt's hf_quant_config.json. What is not
understood is refused by name: nothing of it is guessed.
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


@dataclass(frozen=True)
class QuantConfig:
    """method      as the checkpoint names it
    form        "awq", "gptq", "packed": int32 words of 4-bit numbers as AutoAWQ, AutoGPTQ and
                compressed-tensors lay them out; "int8": whole numbers; "fp8": e4m3
    group_size  elements of a row that share a scale, of 4-bit forms; 0: the whole row
    block       rows and columns that share a scale, of fp8; None: whole rows, or all
    zero_plus   what a stored zero point of GPTQ lacks
    acts_fp8    products of e4m3 weights take activations in e4m3, too
    notes       what is honoured in another way than the checkpoint's own kernels would
    fp8_kv      K and V were calibrated to be stored as e4m3
    """

    method: str
    form: str
    group_size: int = 0
    block: tuple[int, int] | None = None
    zero_plus: int = 0
    acts_fp8: bool = False
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


def _group(where: str, value: object, field: str = "group_size") -> int:
    if value == -1:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % _GROUP:
        raise _refuse(where, field, value, f"a multiple of {_GROUP}, or -1 for whole rows")
    return value


def _awq(where: str, entry: dict[str, Any]) -> QuantConfig:
    bits = entry.get("bits", entry.get("w_bit"))
    if bits != 4:
        raise _refuse(where, "bits", bits, "4")
    version = entry.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise _refuse(where, "version", version, "'gemm'")
    group = _group(where, entry.get("group_size", entry.get("q_group_size", 128)))
    return QuantConfig("awq", "awq", group)


def _gptq(where: str, entry: dict[str, Any]) -> QuantConfig:
    if entry.get("bits") != 4:
        raise _refuse(where, "bits", entry.get("bits"), "4")
    layout = entry.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _refuse(where, "checkpoint_format", layout, "'gptq' or 'gptq_v2'")
    # desc_act is looked at in g_idx, which says what the order really is.
    group = _group(where, entry.get("group_size", 128))
    return QuantConfig("gptq", "gptq", group, zero_plus=int(layout == "gptq"))


@dataclass(frozen=True)
class _Activations:
    """fp8: products take activations as e4m3, a scale for each row; notes: what is otherwise."""

    fp8: bool
    notes: tuple[str, ...] = ()


def _activations(where: str, acts: object, kind: str) -> _Activations:
    """What compressed-tensors says of the inputs of weights of a kind, "int" or "float".

    Raises ModelError, UnsupportedModelError.
    """
    field = "input_activations"
    if acts is None:
        return _Activations(fp8=False)
    if not isinstance(acts, dict):
        raise ModelError(f"{where}.{field} = {show(acts)}: expected an object or null")
    if acts.get("num_bits") != 8:
        raise _refuse(where, f"{field}.num_bits", acts.get("num_bits"), "8, or no activations")
    if kind == "float" and acts.get("type", kind) != kind:
        raise _refuse(where, f"{field}.type", acts.get("type"), "'float', as of the weights")
    dynamic = bool(acts.get("dynamic", False))
    strategy = acts.get("strategy")
    strategies = ("token", "group") if dynamic else ("tensor",)
    if strategy not in (*strategies, None) and strategy != "tensor":
        raise _refuse(where, f"{field}.strategy", strategy, " or ".join(strategies))
    if kind == "float":
        return _fp8_activations(dynamic, by_groups=strategy == "group")
    return _Activations(False, (_finer("dynamic" if dynamic else "static"),))


def _fp8_activations(dynamic: bool, by_groups: bool) -> _Activations:
    if by_groups:  # one scale for a whole row would be coarser than the checkpoint's
        return _Activations(False, (_finer("dynamic"),))
    if dynamic:
        return _Activations(fp8=True)
    note = "static e4m3 activations: each row has a scale of its own in place of input_scale"
    return _Activations(True, (note,))


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
    groups = entry.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _refuse(where, "config_groups", groups, "one group")
    ((name, group),) = groups.items()
    at = f"{where}.config_groups.{name}"
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ModelError(f"{at}.weights = {show(weights)}: expected an object")
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
        return QuantConfig("compressed-tensors", "packed", size, notes=notes, fp8_kv=kv)
    if layout == "int-quantized":
        if (bits, kind) != (8, "int") or weights.get("symmetric", True) is not True:
            raise _refuse(at, "weights", weights, "symmetric 8-bit 'int'")
        if strategy not in ("channel", "tensor"):
            raise _refuse(at, "weights.strategy", strategy, "'channel' or 'tensor'")
        return QuantConfig("compressed-tensors", "int8", notes=notes, fp8_kv=kv)
    if layout == "float-quantized":
        if (bits, kind) != (8, "float"):
            raise _refuse(at, "weights.num_bits", bits, "8, of type 'float'")
        block = None
        if strategy == "block":
            block = _block(at, weights.get("block_structure"))
        elif strategy not in ("channel", "tensor"):
            raise _refuse(at, "weights.strategy", strategy, "'tensor', 'channel' or 'block'")
        return QuantConfig(
            "compressed-tensors", "fp8", block=block, acts_fp8=acts.fp8, notes=notes, fp8_kv=kv
        )
    raise _refuse(where, "format", layout, "'float-', 'int-' or 'pack-quantized'")


def _block(where: str, value: object) -> tuple[int, int]:
    sizes = value if isinstance(value, (list, tuple)) else ()
    if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise _refuse(where, "weight_block_size", value, "two positive numbers, such as [128, 128]")
    return int(sizes[0]), int(sizes[1])


def _fp8(where: str, entry: dict[str, Any]) -> QuantConfig:
    scheme = entry.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _refuse(where, "activation_scheme", scheme, "'dynamic' or 'static'")
    kind = entry.get("fmt", "e4m3")
    if kind not in (None, "e4m3"):
        raise _refuse(where, "fmt", kind, "'e4m3'")
    size = entry.get("weight_block_size")
    block = None if size is None else _block(where, size)
    acts = _fp8_activations(scheme == "dynamic", by_groups=block is not None)
    return QuantConfig("fp8", "fp8", block=block, acts_fp8=acts.fp8, notes=acts.notes)


def _modelopt(where: str, entry: dict[str, Any]) -> QuantConfig:
    algorithm = entry.get("quant_algo")
    if algorithm != "FP8":
        raise _refuse(where, "quant_algo", algorithm, "'FP8'")
    kv = _fp8_scheme(where, "kv_cache_scheme", entry.get("kv_cache_scheme"))
    named = entry.get("kv_cache_quant_algo")
    if named not in (None, "FP8"):
        raise _refuse(where, "kv_cache_quant_algo", named, "'FP8' or null")
    is_fp8_kv = kv or named == "FP8"
    acts = _fp8_activations(dynamic=False, by_groups=False)
    return QuantConfig("modelopt", "fp8", acts_fp8=acts.fp8, notes=acts.notes, fp8_kv=is_fp8_kv)


def _modelopt_file(config: Path) -> QuantConfig | None:
    path = config.with_name("hf_quant_config.json")
    if not path.is_file():
        return None
    entry = read_json(path, "ModelOpt's configuration").get("quantization")
    if not isinstance(entry, dict):
        raise ModelError(f"{path}: quantization = {show(entry)}: expected an object")
    return _modelopt(f"{path}: quantization", entry)

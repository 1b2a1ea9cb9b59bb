"""Names of data types, in the spellings that are accepted."""

from __future__ import annotations

from ..errors import ConfigError, UnsupportedConfigError
from .validate import check_choice

__all__ = ["DTYPES", "KV_DTYPES", "normalize_dtype", "normalize_kv_dtype"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
_DTYPE_ALIASES = {
    "fp32": "float32", "float": "float32", "f32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16", "half": "float16", "f16": "float16",
}  # fmt: skip


def normalize_dtype(field: str, value: object) -> str:
    """ "auto" or the canonical name of a data type; `torch.bfloat16` and "bf16" are accepted."""
    name = value if isinstance(value, str) else str(value)
    name = name.lower().removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name.startswith(("fp8", "float8", "e4m3", "e5m2", "int8", "int4", "nvfp4")):
        narrow = next((n for n in ("int8", "int4") if name.startswith(n)), "fp8")
        raise UnsupportedConfigError(
            f"{field} = {name!r}: models compute in one of {', '.join(DTYPES)}; for narrow weights "
            f"use quantization={narrow!r} (--quantization {narrow})"
        )
    return check_choice(field, name, DTYPES, ConfigError)


# What pages may hold besides a model's own type, and how vLLM and TensorRT-LLM spell it.
_KV_ALIASES = {
    "fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8", "float8_e4m3fn": "fp8", "float8_e4m3": "fp8",
    "e4m3": "fp8", "torch.float8_e4m3fn": "fp8", "torch.int8": "int8",
}  # fmt: skip
KV_DTYPES = (*DTYPES, "fp8", "int8")


def normalize_kv_dtype(field: str, value: object) -> str:
    """The canonical name of a type of K/V: of KV_DTYPES."""
    name = (value if isinstance(value, str) else str(value)).lower()
    name = _KV_ALIASES.get(name, name)
    if name in KV_DTYPES:
        return name
    if name.startswith(("fp8", "float8", "e5m2", "int4", "fp4", "nvfp4", "turboquant")):
        raise UnsupportedConfigError(
            f"{field} = {name!r}: not supported in this version; of the narrow types K and V may "
            "be 'fp8' (e4m3) or 'int8'"
        )
    name = _DTYPE_ALIASES.get(name.removeprefix("torch."), name.removeprefix("torch."))
    return check_choice(field, name, KV_DTYPES, ConfigError)

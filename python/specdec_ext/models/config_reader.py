"""config.json and generation_config.json of a model folder, or a GGUF file's metadata, checked and
normalised.

The JSON is checked here, field by field, before any library sees it: an absurd value gives one
error that names the file, the field, the value and the limit. It is then normalised, for both
generations of keys (v4: rope_theta, rope_scaling, rope_local_base_freq, torch_dtype; v5:
rope_parameters, dtype): of a native family by family_config.py, else by transformers. Code from the
folder never runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.limits import MAX_VOCAB_SIZE
from ..errors import ModelError, UnsupportedModelError
from ..extras import require
from ..gguf import GgufFile, is_gguf
from .block_config import read_blocks, read_fp8_kv
from .family_config import FamilyConfig, family_config
from .gguf_config import gguf_config
from .json_file import read_json
from .quant_config import QuantConfig, read_quantization
from .tied_head import has_own_head

if TYPE_CHECKING:
    from typing import TypeGuard

__all__ = ["DTYPES", "ModelConfig", "parse_config", "read_config", "transformers_config"]

DTYPES = ("float32", "bfloat16", "float16")

# Limits of integer fields, under every name that a decoder family uses. They are far above any
# model that exists; their use is to stop a damaged file before it asks for memory.
_INT_LIMITS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("vocab_size",), (1, MAX_VOCAB_SIZE)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), (1, 1 << 20)),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), (1, 1 << 22)),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, 4096)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), (1, 1 << 16)),
    **dict.fromkeys(("num_key_value_heads",), (1, 1 << 16)),
    **dict.fromkeys(("head_dim",), (1, 1 << 14)),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), (1, 1 << 26)),
    **dict.fromkeys(("sliding_window",), (1, 1 << 26)),
    **dict.fromkeys(("max_window_layers",), (0, 1 << 26)),
    **dict.fromkeys(("sliding_window_pattern", "no_rope_layer_interval"), (1, 4096)),
}
_NULLABLE = frozenset(
    ("num_key_value_heads", "head_dim", "sliding_window", "n_inner", "intermediate_size")
)
_POSITIVE = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "rope_local_base_freq",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip
_FLAGS = (
    "attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window",
    "is_encoder_decoder",
)  # fmt: skip
# Where a configuration of several models keeps its decoder.
_INNER_MODELS = ("text_config", "decoder", "generator")


@dataclass(frozen=True)
class ModelConfig:
    """What every decoder has in common.

    hf              a FamilyConfig, or transformers' own object: the same attributes
    path            a folder, or a GGUF file (is_gguf)
    dtype           of the checkpoint as the file states it; None when it does not. Of a GGUF file
                    that of K and V
    quant           of a checkpoint that others have quantised; None: it is in floats or blocks
    blocks          of a converted folder: tensor name -> format of the matrices that are in blocks
    fp8_kv          K and V were calibrated to be stored as e4m3
    tie_word_embeddings
                    the embeddings are the head; hf and raw say the same. False for a checkpoint
                    whose head is another matrix (tied_head.py), whatever its file says
    max_position    positions the model was made for, before any rotary scaling; None when the
                    configuration does not say
    eos_token_ids   of generation_config.json where it names them, else of config.json: the same
                    rule as transformers' generate
    """

    path: Path
    is_gguf: bool
    model_type: str
    architecture: str
    hf: Any = field(repr=False)
    raw: dict[str, Any] = field(repr=False)
    dtype: str | None
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    tie_word_embeddings: bool
    blocks: dict[str, str] = field(default_factory=dict, repr=False)
    quant: QuantConfig | None = None
    fp8_kv: bool = False


def read_config(folder: str | Path, *, role: str = "model") -> ModelConfig:
    """Read and check the configuration of a model folder, or of a GGUF file.

    role  names the model where it does not exist

    Raises ModelError for a missing or damaged file or an absurd value, UnsupportedModelError for a
    sound configuration of something that is not a decoder this package can run.
    """
    folder = Path(folder)
    if is_gguf(folder):
        with GgufFile(folder) as file:
            return _checked(folder, gguf_config(file), {}, folder)
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ModelError(
            f"{role} = {str(folder)!r} {kind}; give the path of a local Hugging Face folder "
            "(config.json, *.safetensors, tokenizer files) or of a GGUF file; nothing is downloaded"
        )
    path = folder / "config.json"
    if (folder / "engine.json").is_file() and not path.exists():
        raise ModelError(
            f"model = {str(folder)!r} is an engine folder with limits of its own; give it as "
            "--engine_dir, or to specdec_ext.workflow.engine_folder.EngineFolder.open"
        )
    raw = read_json(path, "the model configuration")
    blocks = read_blocks(path, raw)
    quant = read_quantization(path, raw)
    fp8_kv = read_fp8_kv(path, raw) or (quant is not None and quant.fp8_kv)
    generation = path.with_name("generation_config.json")
    has_generation = generation.exists()
    config = _checked(
        path,
        raw,
        read_json(generation, "the generation configuration") if has_generation else {},
        folder,
    )
    config = dataclasses.replace(config, blocks=blocks, quant=quant, fp8_kv=fp8_kv)
    return _untied(config) if config.tie_word_embeddings and has_own_head(folder) else config


def _untied(config: ModelConfig) -> ModelConfig:
    """The configuration of the checkpoint as it is, in every form that somebody goes by."""
    config.raw["tie_word_embeddings"] = config.hf.tie_word_embeddings = False
    return dataclasses.replace(config, tie_word_embeddings=False)


def parse_config(path: Path, raw: dict[str, Any]) -> ModelConfig:
    """As read_config(), of a decoder's configuration within the file `path`."""
    return _checked(path, raw, {}, path.parent)


def _checked(
    path: Path, raw: dict[str, Any], generation: dict[str, Any], model: Path
) -> ModelConfig:
    """`raw` and `generation`: config.json and generation_config.json; `path` is named in errors."""
    _check_fields(path, raw)
    _check_kind(path, raw)
    native = family_config(raw)
    hf, text = _by_transformers(path, raw) if native is None else (native, native)
    # A config of several towers (Gemma3 with images) keeps its decoder's values inside.
    if text is not hf:
        raise UnsupportedModelError(
            f"{path}: model_type = {hf.model_type!r} holds several models ({text.model_type!r} is "
            "one of them); save the text decoder as its own folder and give that"
        )
    return _build(path, raw, hf, generation, model)


def _refuse(path: Path, name: str, value: object, limit: str) -> ModelError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:80] + "..."
    return ModelError(
        f"{path}: {name} = {shown}: {limit}; the file is damaged or not a model configuration"
    )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_fields(path: Path, raw: dict[str, Any]) -> None:
    for name, (low, high) in _INT_LIMITS.items():
        value = raw.get(name)
        if name not in raw or (value is None and name in _NULLABLE):
            continue
        if not _is_int(value) or not low <= value <= high:
            raise _refuse(path, name, value, f"expected an integer {low}..{high}")
    for name in _POSITIVE:
        value = raw.get(name)
        if value is not None and (not _is_number(value) or value <= 0):
            raise _refuse(path, name, value, "expected a finite number > 0")
    for name in _FLAGS:
        if raw.get(name) is not None and not isinstance(raw[name], bool):
            raise _refuse(path, name, raw[name], "expected true or false")
    heads, kv_heads = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise _refuse(
            path, "num_key_value_heads", kv_heads, f"must divide num_attention_heads = {heads}"
        )
    hidden = raw.get("hidden_size")
    if hidden is not None and heads is not None and not raw.get("head_dim") and hidden % heads:
        raise _refuse(path, "hidden_size", hidden, f"must be a multiple of {heads} heads")
    for name in ("rope_scaling", "rope_parameters"):
        _check_rope(path, name, raw.get(name))
    for name in _INNER_MODELS:
        if raw.get(name) is not None and not isinstance(raw[name], dict):
            raise _refuse(path, name, raw[name], "expected an object")
    types = raw.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or not all(isinstance(t, str) for t in types):
            raise _refuse(path, "layer_types", types, "expected a list of names")
        layers = raw.get("num_hidden_layers")
        if layers is not None and len(types) != layers:
            raise _refuse(path, "layer_types", types, f"{len(types)} entries for {layers} layers")


_ROPE_NUMBERS = (
    "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings",
    "partial_rotary_factor",
)  # fmt: skip


def _check_rope(path: Path, name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, dict):
        raise _refuse(path, name, value, "expected an object")
    for key, entry in value.items():
        if isinstance(entry, dict):
            _check_rope(path, f"{name}.{key}", entry)
        elif (
            key in _ROPE_NUMBERS
            and entry is not None
            and (not _is_number(entry) or float(entry) < 0)
        ):
            raise _refuse(path, f"{name}.{key}", entry, "expected a finite number >= 0")
    for key in ("factor", "rope_theta", "original_max_position_embeddings"):
        if key in value and value[key] == 0:
            raise _refuse(path, f"{name}.{key}", 0, "expected a number > 0")


def _check_kind(path: Path, raw: dict[str, Any]) -> None:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(
            f"{path}: model_type is missing; it names the architecture (for example 'llama')"
        )
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{path}: model_type = {model_type!r} is an encoder-decoder; only decoder-only causal "
            "language models are supported"
        )
    architectures = raw.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(a, str) for a in architectures)
    ):
        raise _refuse(path, "architectures", architectures, "expected a list of class names")


def transformers_config(config: ModelConfig) -> Any:
    """transformers' own configuration object, for what runs or writes its models."""
    if not isinstance(config.hf, FamilyConfig):
        return config.hf
    return _by_transformers(config.path, config.raw)[0]


def _by_transformers(path: Path, raw: dict[str, Any]) -> tuple[Any, Any]:
    """transformers' configuration, and that of the decoder in it: as a rule the same."""
    who = f"{path}: model_type = {raw['model_type']!r} with these fields is not native and"
    require("transformers", who)
    from transformers import CONFIG_MAPPING

    from .quiet import quiet_transformers

    model_type = raw["model_type"]
    if model_type not in CONFIG_MAPPING:
        custom = " (it needs code from the folder, which is never run)" if "auto_map" in raw else ""
        raise UnsupportedModelError(
            f"{path}: model_type = {model_type!r} is unknown to the installed transformers"
            f"{custom}; supported are the decoder-only causal models of transformers, see "
            "docs/models.md"
        )
    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hf = CONFIG_MAPPING[model_type].from_dict(json.loads(json.dumps(raw)))
            return hf, hf.get_text_config(decoder=True)
    except Exception as error:  # validation inside transformers raises many types
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{path}: transformers refuses this {model_type} configuration: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _build(
    path: Path, raw: dict[str, Any], hf: Any, generation: dict[str, Any], model: Path
) -> ModelConfig:
    def positive(name: str) -> int:
        value = getattr(hf, name, None)
        if not _is_int(value) or value < 1:
            raise UnsupportedModelError(
                f"{path}: {name} = {value!r}: model_type {hf.model_type!r} does not describe a "
                "decoder with attention layers; only those are supported"
            )
        return int(value)

    vocab_size, hidden_size = positive("vocab_size"), positive("hidden_size")
    num_layers, num_heads = positive("num_hidden_layers"), positive("num_attention_heads")
    num_kv_heads = getattr(hf, "num_key_value_heads", None) or num_heads
    head_dim = getattr(hf, "head_dim", None) or hidden_size // num_heads
    if num_heads % num_kv_heads:
        raise _refuse(
            path,
            "num_key_value_heads",
            num_kv_heads,
            f"must divide num_attention_heads {num_heads}",
        )
    stated = getattr(hf, "max_position_embeddings", None)
    eos = generation.get("eos_token_id")
    eos_path = path if eos is None else path.with_name("generation_config.json")
    eos = getattr(hf, "eos_token_id", None) if eos is None else eos
    architectures = raw.get("architectures") or []
    return ModelConfig(
        path=model,
        is_gguf=path == model,
        model_type=str(hf.model_type),
        architecture=architectures[0] if architectures else "",
        hf=hf,
        raw=raw,
        dtype=_dtype(path, raw),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=stated if _is_int(stated) and stated > 0 else None,
        eos_token_ids=_token_ids(eos_path, "eos_token_id", eos, vocab_size),
        bos_token_id=_optional_id(getattr(hf, "bos_token_id", None), vocab_size),
        pad_token_id=_optional_id(getattr(hf, "pad_token_id", None), vocab_size),
        tie_word_embeddings=bool(getattr(hf, "tie_word_embeddings", False)),
    )


def _dtype(path: Path, raw: dict[str, Any]) -> str | None:
    value = raw.get("dtype", raw.get("torch_dtype"))
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"{path}: dtype = {value!r}: supported are {', '.join(DTYPES)}; convert the checkpoint"
        )
    return name


def _token_ids(path: Path, name: str, value: object, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for entry in ids:
        if not _is_int(entry) or not 0 <= entry < vocab_size:
            raise _refuse(path, name, entry, f"expected token ids 0..{vocab_size - 1}")
    return tuple(dict.fromkeys(ids))


def _optional_id(value: object, vocab_size: int) -> int | None:
    """A special id that nothing depends on: old files write -1 for `none`."""
    return value if isinstance(value, int) and 0 <= value < vocab_size else None

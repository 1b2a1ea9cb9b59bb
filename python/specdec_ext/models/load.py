"""load_model: a checkpoint folder becomes a StepModel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.dtypes import normalize_dtype
from ..config.quantization import Quantization
from ..errors import ConfigError, EngineError, ModelError, SpecdecError, UnsupportedModelError
from ..log import logger
from ..ops import plugin_path
from ..parallel.fingerprint import model_fingerprint
from .config_reader import ModelConfig, read_config
from .draft_vocab import DRAFT_VOCAB_FILE, read_draft_vocab, scored_rows
from .kv_storage import kv_storage
from .native_config import NotNativeError, native_shape
from .packed_model import PackedWeights, find_packed
from .place import CPU
from .rank_checkpoint import check_ranks, read_ranks
from .shard import Shard
from .weights import Checkpoint
from .windows import limited_windows

if TYPE_CHECKING:
    import numpy as np

    from ..parallel.team import Team
    from .base import StepModel
    from .native import NativeModel
    from .native_config import NativeShape
    from .packed_file import PackedFile
    from .place import Place

__all__ = ["MODEL_IMPLS", "load_model", "memory_errors", "native_weight_bytes"]

MODEL_IMPLS = ("auto", "native", "transformers")


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    model_impl: str = "auto",
    max_rows: int = 512,
    max_seq_len: int | None = None,
    allow_pickle: bool = False,
    draft: bool = False,
    head_ids: np.ndarray | None = None,
    place: Place | None = None,
    numerics: str = "auto",
    quantization: str | Mapping[str, Any] | Quantization | None = None,
    team: Team | None = None,
    kv_cache_dtype: str = "auto",
    max_attention_window: Sequence[int] = (),
    sink_token_length: int = 0,
) -> StepModel:
    """Load a local Hugging Face folder or GGUF file.

    dtype         "auto": as the checkpoint says, each weight of a GGUF file in its own width, on a
                  device where it has kernels for that; else "float32", "bfloat16" or "float16"
    model_impl    "native": the fused decoder (see NATIVE_FAMILIES); "transformers": the adapter;
                  "auto": native where every configuration field is understood, else the adapter
    max_rows      rows of the largest step; sizes the native decoder's buffers
    max_seq_len   positions that will be used; limits the rotary tables. None: all the model has
    allow_pickle  read pytorch_model.bin with weights_only=True
    draft         it only drafts, so its head may score a part of the vocabulary (draft_vocab.py)
    head_ids      of a draft model: int64 of the tokens that are to be scored, in this order
    place         where it runs (resolve_device); None: the CPU
    numerics      "exact": refused unless a row's bits do not depend on the step it is in; "fast":
                  they may, and ranks add up partial sums; "auto": exact on the CPU where it can be
                  had, fast on a device
    quantization  as LLM takes it: weights become blocks at load (quantize.py); native, on a device
                  in a 16-bit model
    team          the ranks that the model is spread over: this process loads its own shard of a
                  native model; None: it is alone. A model that was converted for several ranks
                  asks for as many
    kv_cache_dtype  what the pages hold, as KvCacheConfig.dtype
    max_attention_window, sink_token_length  see limited_windows(); the model has the result as
                  `layer_windows` and `sink_tokens`

    Raises ConfigError for a bad argument, ModelError for a folder or file that is missing, damaged
    or inconsistent, UnsupportedModelError for a sound model that cannot be run.
    """
    if model_impl not in MODEL_IMPLS:
        raise ConfigError(f"model_impl = {model_impl!r}: expected one of {', '.join(MODEL_IMPLS)}")
    wanted = normalize_dtype("dtype", dtype)
    config = read_config(path)
    check_ranks(config.path, 1 if team is None else team.size)
    of_file = read_draft_vocab(config.path, config.vocab_size)
    if of_file is not None and not draft:
        raise UnsupportedModelError(
            f"{config.path}: the head scores {len(of_file)} of {config.vocab_size} tokens "
            f"({DRAFT_VOCAB_FILE}): such a model can only draft; use it as a draft model"
        )
    narrowed = _checked_quantization(config, quantization, drafts=of_file is not None)
    scored = scored_rows(config.path, config.vocab_size, of_file, head_ids)
    chosen = _choose_dtype(config, wanted, allow_pickle)
    if narrowed is not None and place is not None and not place.is_cpu:
        _check_device_quantization(config, narrowed, chosen, place.name)
    rank = 0 if team is None else team.rank
    storage = kv_storage(config, kv_cache_dtype, chosen, place, allow_pickle, rank)
    reason = ""
    if model_impl != "transformers":
        try:
            shape = native_shape(config)
        except NotNativeError as error:
            reason = str(error)
            if model_impl == "native":
                raise UnsupportedModelError(
                    f"{config.path}: model_impl = 'native' cannot run this model: {reason}; use "
                    "model_impl='auto' or 'transformers'"
                ) from error
            logger.info("%s: adapter, because %s", config.path, reason)
        else:
            windows = limited_windows(
                shape.sliding_window, max_attention_window, sink_token_length, str(config.path)
            )
            shape = dataclasses.replace(
                shape, sliding_window=windows, sink_tokens=sink_token_length
            )
            has_width = config.is_gguf or bool(config.blocks) or config.quant is not None
            in_blocks = has_width and wanted == "auto"
            how: dict[str, Any] = {
                "impl_reason": (
                    "model_impl = 'native'"
                    if model_impl == "native"
                    else f"model_type {config.model_type!r} is native and every field is understood"
                ),
                "max_rows": max_rows,
                "max_seq_len": max_seq_len,
                "allow_pickle": allow_pickle,
                "scored": scored,
                "kv_storage": storage,
                "own_widths": in_blocks,
                "quantization": narrowed,
            }
            if team is not None:
                same = {
                    "dtype": wanted,
                    "kv_cache_dtype": kv_cache_dtype,
                    "max_attention_window": list(max_attention_window),
                    "sink_token_length": sink_token_length,
                    "numerics": numerics,
                }
                return _load_shard(config, shape, chosen, same, team, place or CPU, how)
            if place is not None and not place.is_cpu:
                from .device_model import DeviceModel

                return DeviceModel(config, shape, chosen, place, exact=numerics == "exact", **how)
            from .native import NativeModel

            def load() -> NativeModel:
                return NativeModel(config, shape, chosen, **{**how, "max_seq_len": None})

            packed = None
            if scored is None:
                wants = PackedWeights.of(chosen, in_blocks, narrowed, None)
                packed = find_packed(config, shape, wants, load)
            return NativeModel(config, shape, chosen, packed=packed, fast=numerics == "fast", **how)
    if of_file is not None:
        raise UnsupportedModelError(
            f"{config.path}: {DRAFT_VOCAB_FILE} needs the native decoder ({reason or model_impl}); "
            "use model_impl='auto' and a native architecture"
        )
    if config.is_gguf or config.blocks or config.quant or narrowed is not None:
        what = f"quantization = {narrowed.plain!r}" if narrowed is not None else ""
        what = "a GGUF file" if config.is_gguf else what
        what = "a folder of weights in blocks" if config.blocks else what
        what = f"a checkpoint by {config.quant.method}" if config.quant else what
        raise UnsupportedModelError(
            f"{config.path}: {what} needs the native decoder ({reason or model_impl})"
        )
    if team is not None:
        raise UnsupportedModelError(
            f"{config.path}: tensor_parallel_size = {team.size} needs the native decoder "
            f"({reason or model_impl}); use tensor_parallel_size = 1"
        )
    from .transformers_adapter import TransformersModel

    model = TransformersModel(
        config,
        chosen,
        impl_reason=reason or "model_impl = 'transformers'",
        kv_storage=storage,
        max_seq_len=max_seq_len,
        allow_pickle=allow_pickle,
        place=place,
        head_ids=head_ids,
        max_attention_window=max_attention_window,
        sink_token_length=sink_token_length,
    )
    if numerics == "exact" and model.numerics != "exact":
        raise UnsupportedModelError(
            f"{config.path}: numerics = 'exact': {model.info.numerics_reason}; use numerics='auto'"
        )
    return model


def _load_shard(
    config: ModelConfig,
    shape: NativeShape,
    chosen: str,
    wanted: dict[str, Any],
    team: Team,
    place: Place,
    how: dict[str, Any],
) -> StepModel:
    """This rank's part of a model; rank 0 asks the others for theirs."""
    from .shard import Shard

    # On a device products are torch's unless exact ones were asked for, so that is fast mode, too.
    sums = wanted["numerics"] == "fast" if place.is_cpu else wanted["numerics"] != "exact"
    shard = Shard.of(shape, team.rank, team.size, sums=sums)
    if shard.sums and read_ranks(config.path) > 1:
        raise UnsupportedModelError(
            f"{config.path}: numerics = {wanted['numerics']!r} on {place.name} splits projections "
            f"by input columns, and convert --tp_size={team.size} has cut them by output rows; use "
            "numerics = 'exact', or a checkpoint that was converted as a whole"
        )

    def make() -> StepModel:
        if not place.is_cpu:
            from .device_model import DeviceModel

            return DeviceModel(
                config, shape, chosen, place, exact=not sums, shard=shard, team=team, **how
            )
        packed = _packed_shard(config, shape, chosen, shard, how)
        if team.rank > 0:
            from .native import NativeModel

            return NativeModel(config, shape, chosen, shard=shard, packed=packed, **how)
        from .sharded_model import ShardedModel

        return ShardedModel(config, shape, chosen, shard=shard, team=team, packed=packed, **how)

    if team.rank > 0:
        return make()
    same = ("max_rows", "max_seq_len", "allow_pickle")
    narrowed = how["quantization"]
    path = config.path.resolve()
    team.load(
        {
            **wanted,
            "model_impl": "native",
            **{name: how[name] for name in same},
            "quantization": None if narrowed is None else narrowed.plain,
            "path": str(path),
            "fingerprint": model_fingerprint(path),
            "devices": list(team.devices) if not place.is_cpu else [],
            "plugin": None if place.is_cpu else plugin_path(place.backend),
        }
    )
    try:
        model = make()
    except EngineError:  # a rank is lost
        raise
    except BaseException:
        team.wait_loaded()
        raise
    team.wait_loaded()
    info = model.info
    model.info = dataclasses.replace(info, attention=f"{info.attention}, on {team.size} ranks")
    return model


def _packed_shard(
    config: ModelConfig, shape: NativeShape, chosen: str, shard: Shard, how: dict[str, Any]
) -> PackedFile | None:
    """The packed weights of one rank: cut by output rows, as exact mode has them."""
    if shard.sums:
        return None
    wants = PackedWeights.of(chosen, how["own_widths"], how["quantization"], shard)
    return find_packed(config, shape, wants)


def _check_device_quantization(
    config: ModelConfig, quantization: Quantization, dtype: str, where: str
) -> None:
    """Raises UnsupportedModelError for weights that devices have no kernels for."""
    if dtype == "float32":
        raise UnsupportedModelError(
            f"{config.path}: quantization = {quantization.plain!r}: {where} has kernels for "
            "blocks in 16-bit models; give dtype='bfloat16' or 'float16'"
        )


def _checked_quantization(
    config: ModelConfig, value: object, *, drafts: bool
) -> Quantization | None:
    """Raises ConfigError, and UnsupportedModelError where weights cannot become blocks."""
    if value is None:
        return None
    quantization = Quantization.of(value)
    said = f"{config.path}: quantization = {quantization.plain!r}"
    if drafts:
        raise UnsupportedModelError(
            f"{said}: a head of some tokens ({DRAFT_VOCAB_FILE}) stays in floats; leave it out"
        )
    if config.is_gguf or config.blocks or config.quant:
        what = "a GGUF file" if config.is_gguf else "this folder"
        raise UnsupportedModelError(
            f"{said}: the weights of {what} have a width already; leave it out, or give the model "
            "as a Hugging Face folder of floats"
        )
    return quantization


@contextmanager
def memory_errors(path: Path) -> Iterator[None]:
    """What asks for more memory than the machine has becomes a ModelError."""
    try:
        yield
    except SpecdecError:  # it says for itself what is wrong
        raise
    except (MemoryError, RuntimeError) as error:
        # torch's CPU allocator raises a plain RuntimeError, its CUDA allocator a subclass.
        text = " ".join(str(error).split())
        if not isinstance(error, MemoryError) and "memory" not in text.lower():
            raise
        raise ModelError(
            f"{path}: loading it takes more memory than there is ({text or 'out of memory'}); "
            "lower KvCacheConfig.max_tokens, choose dtype='bfloat16', or take a smaller model"
        ) from error


def native_weight_bytes(config: ModelConfig, element_size: int, ranks: int = 1) -> int:
    """Bytes of a native model's weights before they are read, on rank 0 of several; 0 for other
    models."""
    try:
        shape = native_shape(config)
    except NotNativeError:
        return 0
    shard = Shard.of(shape, 0, ranks) if ranks > 1 else None
    elements = 0
    for name, whole in shape.expected_weights().items():
        rows = None if shard is None else shard.rows(name)
        count = whole[0] if rows is None else rows.stop - rows.start
        elements += count * math.prod(whole[1:])
    return elements * element_size


def _choose_dtype(config: ModelConfig, wanted: str, allow_pickle: bool) -> str:
    if wanted != "auto":
        return wanted
    if config.dtype is not None:
        return config.dtype
    with Checkpoint(config.path, allow_pickle=allow_pickle) as checkpoint:
        stored = checkpoint.dtype()
    return "float32" if stored == "float64" else stored

"""The build-time place of the three where speculation is checked: LLM's own arguments."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UnsupportedConfigError
from .engine import KvCacheConfig, SchedulerConfig, bytes_of_gib
from .limits import MAX_DRAFT_LEN, MAX_THREADS
from .lookahead import LookaheadDecodingConfig
from .methods import DRAFTER_CONFIGS, DrafterConfig
from .names import canonical_method
from .ngram import NGramDecodingConfig
from .parse import SpeculativeConfig, parse_speculative_config
from .sources import AutoDecodingConfig
from .suffix import SuffixDecodingConfig
from .validate import check_bool, check_int, show, unknown_key

__all__ = [
    "check_build",
    "check_device",
    "check_model_path",
    "check_threads_variable",
    "refuse_unknown_arguments",
    "with_prefix_caching",
    "with_sizes",
    "with_swap_space",
]

_LLM_ARGUMENTS = (
    "model", "tokenizer", "speculative_config", "kv_cache_config", "scheduler_config", "dtype",
    "quantization", "model_impl", "max_draft_len", "speculative_decoding_mode",
    "tensor_parallel_size", "seed", "allow_pickle", "enable_prefix_caching", "device", "numerics",
    "max_batch_size", "max_seq_len", "max_num_tokens", "swap_space",
)  # fmt: skip
# Arguments of other projects' LLM classes: where the same thing is said here.
_ELSEWHERE = {
    "max_model_len": "max_seq_len=...",
    "max_num_seqs": "max_batch_size=...",
    "max_num_batched_tokens": "max_num_tokens=...",
    "block_size": "kv_cache_config={'tokens_per_block': ...}",
    "kv_cache_dtype": "kv_cache_config={'dtype': ...}",
    "gpu_memory_utilization": "kv_cache_config={'free_gpu_memory_fraction': ...}",
    "tokenizer_dir": "tokenizer=...",
}
_ONLY_ONE = ("pipeline_parallel_size", "data_parallel_size", "max_beam_width", "beam_width")
_UNSUPPORTED = ("trust_remote_code", "enable_lora")

_THREADS = "SPECDEC_NUM_THREADS"


def refuse_unknown_arguments(arguments: dict[str, Any]) -> None:
    """Raise for LLM arguments that do not exist; accept those that say "one" or "off"."""
    for name in _ONLY_ONE:
        if name in arguments and check_int(name, arguments[name], ConfigError, low=1) != 1:
            raise UnsupportedConfigError(
                f"{name} = {arguments[name]}: only 1 is supported in this version; use {name} = 1"
            )
    for name, value in arguments.items():
        if name in _ONLY_ONE or (name in _UNSUPPORTED and not value):
            continue
        if name in _UNSUPPORTED:
            raise UnsupportedConfigError(
                f"{name} = {show(value)}: not supported in this version; remove it"
            )
        if name in _ELSEWHERE:
            raise ConfigError(f"LLM: unknown argument {name!r}; write {_ELSEWHERE[name]}")
        raise unknown_key("LLM", name, _LLM_ARGUMENTS, ConfigError)


def check_model_path(model: object) -> str | Path:
    """The path of a model as it was given; whether it is one is only known once it is read.

    An empty text is refused, because as a path it would be the current folder.
    """
    if isinstance(model, (str, os.PathLike)) and os.fspath(model).strip():
        return model  # type: ignore[return-value]
    got = "an empty text" if isinstance(model, str) else type(model).__name__
    raise ConfigError(
        f"model = {show(model)}: expected the path of a local Hugging Face folder or GGUF file, "
        f"got {got}; give one, or leave model out for the built-in model"
    )


def check_threads_variable() -> None:
    """Raise ConfigError for an SPECDEC_NUM_THREADS that is no number of threads.

    The extension would leave such a value out, and use every CPU. An empty one is none.
    """
    text = os.environ.get(_THREADS, "")
    number = text.strip()
    if text and not (number.isascii() and number.isdigit() and 1 <= int(number) <= MAX_THREADS):
        raise ConfigError(
            f"environment variable {_THREADS} = {show(text)}: give a number of threads, "
            f"1..{MAX_THREADS}, or unset it"
        )


def check_device(device: object) -> str:
    """The text; whether such a device can be used is only known once torch is loaded."""
    if not isinstance(device, str) or not device:
        raise ConfigError(
            f"device = {show(device)}: expected 'auto', 'cpu', 'cuda' or 'cuda:N', got "
            f"{type(device).__name__}"
        )
    return device


def with_prefix_caching(
    kv_cache: KvCacheConfig, enable_prefix_caching: bool | None
) -> KvCacheConfig:
    """`kv_cache` with vLLM's argument of prefix reuse (None: not given).

    Raises ConfigError when the argument says off and the configuration says on.
    """
    if enable_prefix_caching is None:
        return kv_cache
    wanted = check_bool("enable_prefix_caching", enable_prefix_caching, ConfigError)
    if kv_cache.enable_block_reuse and not wanted:
        raise ConfigError(
            "enable_prefix_caching = False but kv_cache_config.enable_block_reuse = True; they are "
            "two names of one switch: give one of them"
        )
    return dataclasses.replace(kv_cache, enable_block_reuse=wanted)


def with_swap_space(kv_cache: KvCacheConfig, swap_space: float | None) -> KvCacheConfig:
    """`kv_cache` with vLLM's argument of host_cache_size, in GiB (None: not given).

    Raises ConfigError for no such number, and where the configuration has another size.
    """
    if swap_space is None:
        return kv_cache
    wanted = bytes_of_gib("swap_space", swap_space)
    if kv_cache.host_cache_size not in (0, wanted):
        raise ConfigError(
            f"swap_space = {swap_space:g} GiB ({wanted} bytes) but kv_cache_config.host_cache_size "
            f"= {kv_cache.host_cache_size}; they are two names of one size: give one of them"
        )
    return dataclasses.replace(kv_cache, host_cache_size=wanted)


def with_sizes(scheduler: SchedulerConfig, **sizes: int | None) -> SchedulerConfig:
    """`scheduler` with the sizes that LLM was given directly (None: not given).

    Raises ConfigError where the configuration has another number than its default.
    """
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    result = dataclasses.replace(scheduler, **given) if given else scheduler
    plain = SchedulerConfig()
    for name in given:
        value, other = getattr(result, name), getattr(scheduler, name)
        if other not in (value, getattr(plain, name)):
            raise ConfigError(
                f"{name} = {value} but scheduler_config.{name} = {other}; they are two names of "
                "one limit: give one of them"
            )
    return result


def check_build(
    speculative_config: Any,
    max_draft_len: int | None,
    speculative_decoding_mode: str | None,
    tensor_parallel_size: int = 1,
) -> SpeculativeConfig | None:
    """The speculation that the engine is built for, or None.

    `speculative_decoding_mode` and `max_draft_len` state what the buffers are sized for. Where
    speculative_config is None or "auto" the mode chooses the method and its defaults (lookahead
    (4,3,4); prompt lookup with K = max_draft_len); else they must agree with it. Raises ConfigError
    naming both numbers.
    """
    if max_draft_len is not None:
        max_draft_len = check_int("max_draft_len", max_draft_len, ConfigError, low=0,
                                  high=MAX_DRAFT_LEN)  # fmt: skip
    mode = None
    if speculative_decoding_mode is not None:
        mode = canonical_method(speculative_decoding_mode, "speculative_decoding_mode")
    # Only a list does not say its own method; any other disagreement is worded below.
    hint = mode if mode != "none" and isinstance(speculative_config, (list, tuple)) else None
    config = parse_speculative_config(speculative_config, hint, tensor_parallel_size)
    chosen = mode not in (None, "auto") or max_draft_len == 0
    if config == AutoDecodingConfig() and chosen:
        config = speculative_config = None  # the mode chooses
    elif isinstance(config, AutoDecodingConfig) and max_draft_len is not None and not chosen:
        config = dataclasses.replace(config, max_draft_len=max_draft_len)
    if config is None and speculative_config is None:
        if mode == "lookahead":
            config = LookaheadDecodingConfig()
        elif mode == "ngram":
            config = (
                NGramDecodingConfig()
                if max_draft_len is None
                else NGramDecodingConfig(max_draft_len=max_draft_len)
            )
        elif mode == "suffix":
            config = (
                SuffixDecodingConfig()
                if max_draft_len is None
                else SuffixDecodingConfig(max_draft_len=max_draft_len)
            )
        elif mode in DRAFTER_CONFIGS or mode == "auto":
            config = parse_speculative_config(mode)
    have = "none" if config is None else config.method
    if mode is not None and mode != have:
        raise ConfigError(
            f"speculative_decoding_mode = {speculative_decoding_mode!r} ({mode}) but "
            f"speculative_config is {have!r}; make the two agree or leave "
            "speculative_decoding_mode out"
        )
    if max_draft_len is not None:
        need = 0 if config is None else config.max_draft_len
        if need != max_draft_len:
            what = "no speculative_config"
            if isinstance(config, LookaheadDecodingConfig):
                what = f"lookahead (W,N,G) = {config.triple}"
            elif isinstance(config, DrafterConfig):
                what = f"{config.words} with max_draft_len = {need}"
            elif config is not None:
                names = {"suffix": "suffix decoding", "ngram": "prompt lookup"}
                name = names.get(config.method, "speculative_config")
                what = f"{name} with max_draft_len = {config.max_draft_len}"
            raise ConfigError(
                f"max_draft_len = {max_draft_len} but {what} needs max_draft_len = {need}; "
                f"use max_draft_len = {need} or leave it out"
            )
    return config

"""The parameters of a model's config.pbtxt, in the names of TensorRT-LLM's documents.

One table says what each means here. fill_template.py holds values against it when it writes them,
and a backend when it starts, so a value that cannot be had is refused in both places.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.engine import POLICIES
from ...config.validate import show
from ...errors import ConfigError, UnsupportedConfigError

__all__ = ["PARAMETERS", "Parameters", "check_value", "engine_arguments"]

ON = ("true", "1", "yes", "enable")
OFF = ("false", "0", "no", "disable")
PLACEHOLDER = re.compile(r"\$\{\w+\}")
# Modes of TensorRT-LLM that only say how tokens are drawn: the request says it, nothing drafts.
PLAIN_MODES = ("top_k", "top_p", "top_k_top_p")


def _switch(name: str, value: str) -> bool:
    if value.lower() in ON + OFF:
        return value.lower() in ON
    raise ConfigError(f"{name} = {show(value)}: expected true or false")


def _count(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < 1:
        raise ConfigError(f"{name} = {show(value)}: expected a whole number >= 1")
    return int(value)


def _fraction(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise ConfigError(f"{name} = {show(value)}: expected a number above 0, at most 1")
    return number


def _text(name: str, value: str) -> str:
    return value


def _folder(name: str, value: str) -> str:
    if not Path(value).expanduser().exists():
        raise ConfigError(f"{name} = {show(value)}: there is no such folder or file")
    return value


def _one_of(*choices: str) -> Callable[[str, str], str]:
    def read(name: str, value: str) -> str:
        if value not in choices:
            raise ConfigError(f"{name} = {show(value)}: expected one of {', '.join(choices)}")
        return value

    return read


def _device(name: str, value: str) -> int:
    ids = value.split(",")
    if len(ids) > 1:
        raise UnsupportedConfigError(
            f"{name} = {show(value)}: a model runs on one device here; give one number"
        )
    if not re.fullmatch(r"[0-9]{1,4}", ids[0]):
        raise ConfigError(f"{name} = {show(value)}: expected the number of a device")
    return int(ids[0])


def _windows(name: str, value: str) -> int | list[int]:
    numbers = [part.strip() for part in value.strip("[]").split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", number) and int(number) for number in numbers):
        raise ConfigError(
            f"{name} = {show(value)}: expected tokens >= 1, one number for all layers or one per "
            "layer: 256 or 256,1024"
        )
    windows = [int(number) for number in numbers]
    return windows if len(windows) > 1 else windows[0]


def _mode(name: str, value: str) -> str:
    if value == "beam_search":
        raise UnsupportedConfigError(
            f"{name} = 'beam_search': there are no beams; use top_k_top_p, or leave it empty"
        )
    return _one_of("auto", *PLAIN_MODES, "lookahead", "medusa", "redrafter")(name, value)


def _nothing_but(allowed: str, why: str) -> Callable[[str, str], str]:
    def read(name: str, value: str) -> str:
        if value.lower() != allowed:
            raise UnsupportedConfigError(
                f"{name} = {show(value)}: {why}; use {allowed}, or leave it empty"
            )
        return value

    return read


@dataclass(frozen=True)
class Parameter:
    """read  a value's meaning, or ConfigError; note  why a value has no effect, "" if it has one"""

    read: Callable[[str, str], Any]
    note: str = ""


PARAMETERS: Mapping[str, Parameter] = {
    # What the engine is.
    "engine_dir": Parameter(_folder),
    "tokenizer_dir": Parameter(_folder),
    "max_tokens_in_paged_kv_cache": Parameter(_count),
    "kv_cache_free_gpu_mem_fraction": Parameter(_fraction),
    "enable_kv_cache_reuse": Parameter(_switch),
    "batch_scheduler_policy": Parameter(_one_of(*POLICIES)),
    "enable_chunked_context": Parameter(_switch),
    "decoding_mode": Parameter(_mode),
    "lookahead_window_size": Parameter(_count),
    "lookahead_ngram_size": Parameter(_count),
    "lookahead_verification_set_size": Parameter(_count),
    "gpu_device_ids": Parameter(_device),
    "max_attention_window_size": Parameter(_windows),
    # How requests come and answers go.
    "decoupled_mode": Parameter(_switch),
    "triton_max_batch_size": Parameter(_count),
    "exclude_input_in_output": Parameter(_switch),
    "accumulate_tokens": Parameter(_switch),
    "add_special_tokens": Parameter(_switch),
    "skip_special_tokens": Parameter(_switch),
    "preprocessing_instance_count": Parameter(_count),
    "postprocessing_instance_count": Parameter(_count),
    "bls_instance_count": Parameter(_count),
    "bls_threads": Parameter(_count),
    "tensorrt_llm_model_name": Parameter(_text),
    "tensorrt_llm_draft_model_name": Parameter(_text),
    # What has one value here.
    "triton_backend": Parameter(
        _one_of("python", "tensorrtllm"), "the backend is Triton's Python backend"
    ),
    "batching_strategy": Parameter(
        _nothing_but("inflight_fused_batching", "requests are always batched in flight"),
        "requests are always batched in flight",
    ),
    "max_beam_width": Parameter(_nothing_but("1", "there are no beams"), "there are no beams"),
    "max_queue_delay_microseconds": Parameter(
        _text, "a request joins the next step, nothing waits for a batch"
    ),
    "normalize_log_probs": Parameter(_switch, "there are no beams to compare"),
    "tokenizer_type": Parameter(_text, "the tokenizer's own files say it"),
}


def check_value(name: str, value: str) -> str:
    """Why the value has no effect; "" if it has one. Raises ConfigError for one that cannot be had,
    and for a name that is no parameter."""
    parameter = PARAMETERS.get(name)
    if parameter is None:
        from ...config.validate import unknown_key

        raise unknown_key("config.pbtxt", name, PARAMETERS, ConfigError)
    if not value:
        return ""
    parameter.read(name, value)
    return parameter.note


class Parameters:
    """The parameters of one model, as Triton gives them to its backend.

    Those that are empty, or are still the template's ${name}, are as if they were not there.
    """

    def __init__(self, model_config: str) -> None:
        self.config: dict[str, Any] = json.loads(model_config)
        found = self.config.get("parameters", {})
        texts = {name: str(value.get("string_value", "")) for name, value in found.items()}
        self._values = {
            name: text for name, text in texts.items() if text and not PLACEHOLDER.search(text)
        }
        for name, text in self._values.items():
            check_value(name, text)

    @property
    def model_name(self) -> str:
        return str(self.config["name"])

    @property
    def decoupled(self) -> bool:
        """Answers may be in several parts."""
        return bool(self.config.get("model_transaction_policy", {}).get("decoupled", False))

    def get(self, name: str, default: Any = None) -> Any:
        """A parameter's meaning."""
        text = self._values.get(name)
        return default if text is None else PARAMETERS[name].read(name, text)

    def require(self, name: str) -> Any:
        if name not in self._values:
            raise ConfigError(
                f"{self.model_name}: the parameter {name} is empty; fill it in: "
                f"fill_template.py -i {self.model_name}/config.pbtxt {name}:VALUE"
            )
        return self.get(name)


def engine_arguments(parameters: Parameters) -> dict[str, Any]:
    """LLM's arguments besides the model."""

    def chosen(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    return chosen(
        tokenizer=parameters.get("tokenizer_dir"),
        kv_cache_config=chosen(
            max_tokens=parameters.get("max_tokens_in_paged_kv_cache"),
            free_gpu_memory_fraction=parameters.get("kv_cache_free_gpu_mem_fraction"),
            enable_block_reuse=parameters.get("enable_kv_cache_reuse"),
            max_attention_window=parameters.get("max_attention_window_size"),
        ),
        scheduler_config=chosen(
            policy=parameters.get("batch_scheduler_policy"),
            enable_chunked_prefill=parameters.get("enable_chunked_context"),
        ),
    )


def drafting(parameters: Parameters) -> Any:
    """What `decoding_mode` asks of LLM(speculative_config=...): "auto", None for plain decoding, or
    a method; "heads" for those that come with the engine."""
    mode = parameters.get("decoding_mode", "auto")
    if mode in PLAIN_MODES:
        return None
    if mode == "lookahead":
        names = ("window_size", "ngram_size", "verification_set_size")
        return [parameters.require(f"lookahead_{name}") for name in names]
    return "heads" if mode in ("medusa", "redrafter") else "auto"

"""A request's fields as SamplingParams: one table, and what a client may say about speculation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.validate import show
from ..request.sampling_params import SamplingParams
from ..request.structured_outputs import StructuredOutputs
from .errors import ApiError
from .schema.common import Sampled

__all__ = ["sampling_params", "speculative_config"]

# Fields of a request that SamplingParams has under the same name; null is the default there.
SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "ignore_eos",
    "stop_token_ids", "bad_words", "allowed_token_ids", "include_stop_str_in_output",
    "skip_special_tokens",
)  # fmt: skip
# Words in the names of what only the operator may choose: models, files, what requests share,
# measuring without the model.
OPERATORS_WORDS = ("model", "path", "dir", "file", "pool", "public", "share", "synth")
METHOD_KEYS = ("method", "decoding_type")
MAX_DEPTH = 4


def sampling_params(
    request: Sampled,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    cache_salt: str,
    default_temperature: float,
    prompt_logprobs: int | None = None,
    structured_outputs: StructuredOutputs | None = None,
) -> SamplingParams:
    """What the engine is asked for. Raises RequestError, ApiError.

    max_tokens  None: as many as fit
    logprobs    best tokens besides the chosen one at every place; None: none at all
    cache_salt  the engine's, not the client's (keys.py)
    structured_outputs  the form of the output (constraints.py)
    """
    given = {name: getattr(request, name, None) for name in SAME_NAME}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    values.setdefault("temperature", default_temperature)
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        cache_salt=cache_salt,
        prediction=getattr(request, "prediction", None),
        structured_outputs=structured_outputs,
        return_steps=bool(request.include_steps),
        speculative_config=speculative_config(request.speculative_config),
    )


def speculative_config(asked: Any) -> Any:
    """What a client may ask of speculation: on, off, a method's name, bounds as numbers.

    Raises ApiError for whatever names a model or a file, or chooses what requests share. Texts are
    refused wherever they are no method's name, because configurations are also read from files.
    """
    if asked is None or isinstance(asked, bool):
        return asked
    if isinstance(asked, str):
        return {"method": _method("speculative_config", asked)}
    if not isinstance(asked, Mapping):
        raise _refusal("speculative_config", asked, "expected true, false, a method or an object")
    for key, value in asked.items():
        name = f"speculative_config.{key}"[:120]
        if any(word in key.lower() for word in OPERATORS_WORDS):
            raise _refusal(name, value, "the operator's choice")
        if key in METHOD_KEYS:
            _method(name, value)
        else:
            _check_bounds(name, value)
    return dict(asked)


def _refusal(name: str, value: Any, why: str) -> ApiError:
    return ApiError(
        400, f"{name} = {show(value)}: {why}; a request may choose a method that the server has, "
        "and bounds as numbers", param=name,
    )  # fmt: skip


def _method(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.replace("_", "").replace("-", "").isalpha():
        raise _refusal(name, value, "not the name of a method")
    return value


def _check_bounds(name: str, value: Any, depth: int = 0) -> None:
    if value is None or isinstance(value, (bool, int, float)):
        return
    if not isinstance(value, list) or depth == MAX_DEPTH:
        raise _refusal(name, value, "expected numbers")
    for item in value:
        _check_bounds(name, item, depth + 1)

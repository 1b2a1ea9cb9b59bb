"""Requests as Triton's tensors, and back: one table of names for both directions.

The names are those of TensorRT-LLM's backend. A tensor has a leading dimension, the rows of a
batch, if the model's max_batch_size is not 0; a request has one row here, since the engine batches
requests in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...config.validate import show
from ...errors import RequestError, UnsupportedRequestError
from ...request.external_draft import ExternalDraftTokensConfig
from ...request.sampling_params import SamplingParams

__all__ = ["SAMPLING", "one_row", "read_params", "row", "selected", "texts", "write_params"]

Tensors = Mapping[str, np.ndarray]

# SamplingParams' field -> (the backend's tensor, its type). What requests for text call it is in
# TEXT_NAMES, where that differs.
SAMPLING: Mapping[str, tuple[str, Any]] = {
    "max_tokens": ("request_output_len", np.int32),
    "min_tokens": ("min_length", np.int32),
    "temperature": ("temperature", np.float32),
    "top_k": ("runtime_top_k", np.int32),
    "top_p": ("runtime_top_p", np.float32),
    "min_p": ("min_p", np.float32),
    "repetition_penalty": ("repetition_penalty", np.float32),
    "presence_penalty": ("presence_penalty", np.float32),
    "frequency_penalty": ("frequency_penalty", np.float32),
    "seed": ("random_seed", np.uint64),
    "ignore_eos": ("ignore_eos", np.bool_),
    "stop_token_ids": ("stop_token_ids", np.int32),
    "stop": ("stop_words", np.object_),
    "bad_words": ("bad_words", np.object_),
    "detokenize": ("detokenize", np.bool_),
    "return_generation_logits": ("return_generation_logits", np.bool_),
    "cache_salt": ("cache_salt", np.object_),
    "priority": ("priority", np.int32),
    "speculative_config": ("speculative", np.bool_),
}
LISTS = ("stop_token_ids", "stop", "bad_words")
# Requests for text (ensemble, BLS) call these tensors otherwise.
TEXT_NAMES = {
    "request_output_len": "max_tokens", "runtime_top_k": "top_k", "runtime_top_p": "top_p",
}  # fmt: skip
# What a request may say that has no field: beams, which there are none of.
ONE_BEAM = "beam_width"
END_ID = "end_id"


def texts(values: np.ndarray) -> list[str]:
    """Triton's strings; RequestError for bytes that are no UTF-8."""
    found = []
    for value in values.reshape(-1):
        try:
            found.append(value.decode("utf-8") if isinstance(value, bytes) else str(value))
        except UnicodeDecodeError as error:
            raise RequestError(f"a string is not UTF-8 ({error}); encode it so") from None
    return found


def one_row(name: str, tensor: np.ndarray, batched: bool) -> np.ndarray:
    """The only row of a batch, or the tensor itself where there is no batch."""
    if not batched:
        return tensor
    if tensor.shape[0] != 1:
        raise UnsupportedRequestError(
            f"{name} has {tensor.shape[0]} rows: a request has one prompt; send a request for "
            "each, the engine batches them in flight"
        )
    only: np.ndarray = tensor[0]
    return only


def row(value: Any, dtype: Any, batched: bool = True) -> np.ndarray:
    """A value or a list as a tensor, with the dimension of a batch if there is one."""
    made = np.atleast_1d(np.array(value, dtype=dtype))
    return made[None] if batched else made


def _scalar(name: str, tensor: np.ndarray) -> Any:
    if tensor.size != 1:
        raise RequestError(f"{name} has {tensor.size} values: expected one")
    return tensor.reshape(-1)[0].item() if tensor.dtype != np.object_ else texts(tensor)[0]


def read_params(
    tensors: Tensors, *, eos_token_ids: tuple[int, ...] = (), for_text: bool = False
) -> SamplingParams:
    """SamplingParams of a request's rows; what it does not say is the default.

    for_text  the names are those of requests for text

    Raises RequestError.
    """
    values: dict[str, Any] = {}
    for field, (name, _) in SAMPLING.items():
        key = TEXT_NAMES.get(name, name) if for_text else name
        tensor = tensors.get(key)
        if tensor is None:
            continue
        if field in LISTS:
            many = texts(tensor) if tensor.dtype == np.object_ else tensor.reshape(-1).tolist()
            # Clients of a batch fill shorter lists with empty strings.
            values[field] = [item for item in many if item != ""] or None
        else:
            values[field] = _scalar(key, tensor)
    if values.get("speculative_config") is True:
        del values["speculative_config"]  # as the engine
    if (beams := tensors.get(ONE_BEAM)) is not None and _scalar(ONE_BEAM, beams) != 1:
        raise UnsupportedRequestError(
            f"{ONE_BEAM} = {show(_scalar(ONE_BEAM, beams))}: there are no beams; use 1"
        )
    if (end := tensors.get(END_ID)) is not None:
        end_id = _scalar(END_ID, end)
        if end_id not in eos_token_ids:
            values["ignore_eos"] = True
            if end_id >= 0:
                values["stop_token_ids"] = [*(values.get("stop_token_ids") or ()), end_id]
    if (wanted := tensors.get("return_log_probs")) is not None and _scalar("", wanted):
        values["logprobs"] = 0
    drafts = tensors.get("draft_input_ids")
    if drafts is not None and drafts.size:
        values["external_draft"] = ExternalDraftTokensConfig(
            drafts.reshape(-1).tolist(),
            _logits(tensors.get("draft_logits")),
            None
            if (limit := tensors.get("draft_acceptance_threshold")) is None
            else _scalar("draft_acceptance_threshold", limit),
        )
    return SamplingParams(**values)


def _logits(tensor: np.ndarray | None) -> np.ndarray | None:
    """[drafts, vocabulary], without the dimension that stands for beams."""
    if tensor is None or tensor.size == 0:
        return None
    return tensor.reshape(tensor.shape[-2:])


def write_params(params: SamplingParams) -> dict[str, np.ndarray]:
    """The tensors, with the dimension of a batch, that read_params() reads as `params`.

    Raises UnsupportedRequestError for what the backend has no tensor for.
    """
    plain = SamplingParams(max_tokens=params.max_tokens)
    found: dict[str, np.ndarray] = {}
    for field in SamplingParams.__dataclass_fields__:
        value = getattr(params, field)
        if value == getattr(plain, field) and field != "max_tokens":
            continue
        if field in ("acceptance", "acceptance_threshold") and params.external_draft is not None:
            continue  # they follow from the drafts' logits and threshold
        if field == "external_draft":
            found["draft_input_ids"] = row(list(value.tokens), np.int32)
            if value.logits is not None:
                found["draft_logits"] = np.asarray(value.logits, np.float32)[None]
            if value.acceptance_threshold is not None:
                found["draft_acceptance_threshold"] = row(value.acceptance_threshold, np.float32)
        elif field == "logprobs" and value == 0:
            found["return_log_probs"] = row(True, np.bool_)
        elif field in SAMPLING and not (field == "speculative_config" and value is not False):
            if value is None:
                continue
            name, dtype = SAMPLING[field]
            if isinstance(value, tuple):
                value = list(value)
            found[name] = row(_encoded(value) if dtype == np.object_ else value, dtype)
        else:
            raise UnsupportedRequestError(
                f"SamplingParams.{field} = {show(value)}: the Triton backend has no tensor for it; "
                "leave it out, or use specdec serve"
            )
    return found


def _encoded(value: Any) -> list[bytes]:
    many = value if isinstance(value, list) else [value]
    for item in many:
        if not isinstance(item, str):
            raise UnsupportedRequestError(
                f"bad_words = {show(value)}: the Triton backend takes strings"
            )
    return [item.encode() for item in many]


def selected(read: Callable[[str], np.ndarray | None], batched: bool) -> dict[str, np.ndarray]:
    """The rows of all tensors that a request has; read(name) gives a tensor or None."""
    names = {name for name, _ in SAMPLING.values()} | set(TEXT_NAMES.values())
    names |= {ONE_BEAM, END_ID, "return_log_probs", "draft_input_ids", "draft_logits",
              "draft_acceptance_threshold", "input_ids", "input_lengths", "text_input", "describe",
              "streaming", "stream", "exclude_input_in_output", "num_draft_tokens",
              "use_draft_logits"}  # fmt: skip
    found = {name: tensor for name in names if (tensor := read(name)) is not None}
    return {name: one_row(name, tensor, batched) for name, tensor in found.items()}

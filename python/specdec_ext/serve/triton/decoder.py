"""The models `specdec` and `specdec_draft`: token ids in, token ids out, one LLM each.

Requests are batched in flight: execute() hands them to the engine and returns; each is answered by
a task of an event loop that runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ...errors import ConfigError, RequestError
from ...llm import LLM
from ...request.sampling_params import SamplingParams
from ...text.outputs import CompletionOutput, RequestOutput
from ...workflow.engine_folder import ENGINE_FILE, EngineFolder
from .backend import Answer, Backend
from .parameters import Parameters, drafting, engine_arguments
from .tensors import read_params, row

__all__ = ["DecoderBackend", "load_llm"]


def _device(parameters: Parameters) -> str:
    """The device of gpu_device_ids, where there are devices."""
    from ...errors import SpecdecError
    from ...models.place import resolve_device

    number = parameters.get("gpu_device_ids")
    if number is None:
        return "auto"
    try:
        resolve_device(f"cuda:{number}")
    except SpecdecError as error:
        pb_utils.Logger.log_info(
            f"{parameters.model_name}: gpu_device_ids = {number}: runs on the CPU ({error})"
        )
        return "auto"
    return f"cuda:{number}"


def load_llm(parameters: Parameters) -> LLM:
    """The LLM of a model's parameters: an engine of `specdec build`, a model folder, a GGUF file.

    Raises SpecdecError.
    """
    path = Path(parameters.require("engine_dir")).expanduser()
    arguments = engine_arguments(parameters)
    method, device = drafting(parameters), _device(parameters)
    if not (path / ENGINE_FILE).is_file():
        if method == "heads":
            raise ConfigError(
                f"decoding_mode = {parameters.get('decoding_mode')!r}: {path} is a model without "
                "heads; give an engine that specdec build has made with them"
            )
        return LLM(path, speculative_config=method, device=device, **arguments)
    engine = EngineFolder.open(path)
    if method is None and engine.speculation(None) is not None:
        raise ConfigError(
            f"decoding_mode = {parameters.get('decoding_mode')!r}: {path} was built with "
            f"speculative_decoding_mode = {engine.mode!r}; leave decoding_mode empty, or build the "
            "engine without"
        )
    asked = method if isinstance(method, list) else None
    return engine.load(asked, device=device, **arguments)


class DecoderBackend(Backend):
    def start(self) -> None:
        self.llm = load_llm(self.parameters)
        self._running: set[Future[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="specdec-triton", daemon=True
        )
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            answer = Answer(request)
            try:
                tensors = self.tensors(request)
                if "describe" in tensors:
                    answer.end(self._description())
                    continue
                ids = self._ids(tensors)
                params = read_params(tensors, eos_token_ids=self.llm.engine.limits.eos_token_ids)
                if "detokenize" not in tensors:
                    params = dataclasses.replace(params, detokenize=bool(params.stop))
            except Exception as error:
                answer.fail(error)
                continue
            whole = not (self.parameters.decoupled and _is_on(tensors, "streaming"))
            excluded = _is_on(
                tensors, "exclude_input_in_output", self.parameters.get("exclude_input_in_output")
            )
            task = self._serve(answer, ids, params, whole, [] if excluded else ids)
            # A loop alone does not keep its tasks alive.
            running = asyncio.run_coroutine_threadsafe(task, self._loop)
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    def finalize(self) -> None:
        self.llm.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    def _ids(tensors: dict[str, np.ndarray]) -> list[int]:
        if "input_ids" not in tensors or "request_output_len" not in tensors:
            raise RequestError("a request needs input_ids and request_output_len; give both")
        ids: list[int] = tensors["input_ids"].reshape(-1).tolist()
        if "input_lengths" in tensors:
            ids = ids[: int(tensors["input_lengths"].reshape(-1)[0])]  # the rest is padding
        return ids

    async def _serve(
        self, answer: Answer, ids: list[int], params: SamplingParams, whole: bool, head: list[int]
    ) -> None:
        """Answer one request; `head` are ids in front of the first part's."""
        try:
            request = self.llm.generate_async({"prompt_token_ids": ids}, params)
            async for output in request:
                if answer.is_cancelled:
                    request.cancel()
                if output.finished:
                    _raise_failure(output.outputs[0])
                    answer.end(self._tensors(output, head, whole))
                elif not whole:
                    answer.part(self._tensors(output, head, whole))
                    head = []
        except Exception as error:
            answer.fail(error)

    def _tensors(self, output: RequestOutput, head: list[int], whole: bool) -> dict[str, Any]:
        """One answer's tensors: all that was decoded, or what is new."""
        one = output.outputs[0]
        new = len(one.token_ids) if whole else len(one.delta_token_ids)
        first = len(one.token_ids) - new
        ids = [*head, *one.token_ids[first:]]
        logprobs = [
            line[token].logprob
            for line, token in zip(one.logprobs or (), one.token_ids, strict=False)
        ]
        found = {
            "output_ids": self._row([ids], np.int32),
            "sequence_length": self._row([len(ids)], np.int32),
            "cum_log_probs": self._row([one.cumulative_logprob or 0.0], np.float32),
            "output_log_probs": self._row([logprobs[first:]], np.float32),
            "token_from_draft": self._row([one.token_from_draft[first:]], np.bool_),
            "text_output": self._row((one.text if whole else one.delta_text).encode(), np.object_),
            "report": self._json(_facts(output) if output.finished else {}),
        }
        if one.generation_logits is not None:
            found["generation_logits"] = self._row(
                [np.asarray(one.generation_logits.cpu())[first:]], np.float32
            )
        return found

    def _row(self, value: Any, dtype: Any) -> np.ndarray:
        return row(value, dtype, self.batched)

    def _json(self, content: dict[str, Any]) -> np.ndarray:
        """What has no tensor in the documents, as one string."""
        return self._row(json.dumps(content).encode(), np.object_)

    def _description(self) -> dict[str, np.ndarray]:
        """What a client has to know to hold a request against this engine (remote.py)."""
        limits, llm = self.llm.engine.limits, self.llm
        names = ("vocab_size", "max_seq_len", "eos_token_ids", "num_pages", "tokens_per_block",
                 "seed", "max_queued_requests", "max_input_len", "max_position")  # fmt: skip
        return {
            "report": self._json(
                {
                    "limits": {name: getattr(limits, name) for name in names},
                    "enable_block_reuse": llm.kv_cache_config.enable_block_reuse,
                    "numerics": llm.engine.numerics,
                    "model_impl": getattr(llm.model, "impl", "unknown"),
                    "metrics": llm.get_metrics(),
                }
            )
        }


def _facts(output: RequestOutput) -> dict[str, Any]:
    one = output.outputs[0]
    facts: dict[str, Any] = {
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "metrics": output.metrics,
    }
    if one.logprobs is not None:
        facts["ranks"] = [
            line[token].rank for line, token in zip(one.logprobs, one.token_ids, strict=True)
        ]
    return facts


def _raise_failure(one: CompletionOutput) -> None:
    if one.finish_reason in ("error", "cancelled"):
        raise RuntimeError(one.error or "the request was cancelled")


def _is_on(tensors: dict[str, np.ndarray], name: str, default: Any = False) -> bool:
    tensor = tensors.get(name)
    return bool(default) if tensor is None else bool(tensor.reshape(-1)[0])

"""The model `specdec_bls`: text in, text out, by Business Logic Scripting.

The draft model proposes up to num_draft_tokens, the target verifies them in one pass and returns up
to one more; both find the K/V of what was decided in their prefix caches. The loop is
specdec_ext.orchestrate's, over two models of the same server.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ...errors import RequestError
from ...orchestrate import stream_draft_target
from ...request.sampling_params import SamplingParams
from ...text.outputs import RequestOutput
from .backend import Answer, Backend
from .remote import RemoteError, RemoteLLM, Transport
from .tensors import read_params, row, texts
from .text import tokenizer_of

__all__ = ["BlsBackend", "transport_to"]

# What a part of an answer of `specdec` is read for.
OUTPUTS = ("output_ids", "sequence_length", "cum_log_probs", "output_log_probs",
           "token_from_draft", "text_output", "report")  # fmt: skip
THREADS = 16


def transport_to(model_name: str) -> Transport:
    """Requests to another model of this server."""

    def send(tensors: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        outputs: tuple[str, ...] = ("report",) if "describe" in tensors else OUTPUTS
        if "return_generation_logits" in tensors:
            outputs += ("generation_logits",)
        request = pb_utils.InferenceRequest(
            model_name=model_name,
            requested_output_names=list(outputs),
            inputs=[pb_utils.Tensor(name, value) for name, value in tensors.items()],
        )
        for response in request.exec(decoupled=True):
            if response.has_error():
                raise RemoteError(f"{model_name}: {response.error().message()}")
            # The last one of a decoupled model may be empty.
            if response.output_tensors():
                yield {one.name(): one.as_numpy() for one in response.output_tensors()}

    return send


class BlsBackend(Backend):
    """Each request has a thread while it runs; the engines batch what the threads send."""

    def start(self) -> None:
        self.tokenizer = tokenizer_of(self.parameters)
        self._names = {
            "target": self.parameters.get("tensorrt_llm_model_name", "specdec"),
            "draft": self.parameters.get("tensorrt_llm_draft_model_name", "specdec_draft"),
        }
        self._accumulate = self.parameters.get("accumulate_tokens", False)
        self._models: dict[str, RemoteLLM] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(self.parameters.get("bls_threads", THREADS))

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            answer = Answer(request)
            try:
                tensors = self.tensors(request)
            except Exception as error:
                answer.fail(error)
            else:
                self._threads.submit(self._serve, answer, tensors)

    def finalize(self) -> None:
        self._threads.shutdown()

    def model(self, which: str) -> RemoteLLM:
        """The target or the draft model; asked for its limits when it is first needed, since
        models of a repository are loaded in no order."""
        with self._lock:
            if which not in self._models:
                send = transport_to(self._names[which])
                self._models[which] = RemoteLLM(send, self.tokenizer)
            return self._models[which]

    def _serve(self, answer: Answer, tensors: dict[str, np.ndarray]) -> None:
        try:
            prompt, params, count = self._read(tensors)
            outputs = self._speculative(prompt, params, count, tensors) if count else None
            parts = self._plain(prompt, params) if outputs is None else map(_part, outputs)
            self._answer(answer, parts, _is_on(tensors, "stream") and self.parameters.decoupled)
        except RemoteError as error:
            answer.fail(RequestError(str(error)))
        except Exception as error:
            answer.fail(error)

    def _read(self, tensors: dict[str, np.ndarray]) -> tuple[str, SamplingParams, int]:
        """Prompt, parameters, drafts of a round. Raises RequestError."""
        for name in ("text_input", "max_tokens"):
            if name not in tensors:
                raise RequestError(f"{name} is missing: a request needs text_input and max_tokens")
        found = texts(tensors["text_input"])
        if len(found) != 1:
            raise RequestError(f"text_input has {len(found)} strings: a request has one prompt")
        params = read_params(
            tensors, eos_token_ids=self.model("target").engine.limits.eos_token_ids, for_text=True
        )
        count = tensors.get("num_draft_tokens")
        return found[0], params, 0 if count is None else int(count.reshape(-1)[0])

    def _speculative(
        self, prompt: str, params: SamplingParams, count: int, tensors: dict[str, np.ndarray]
    ) -> Iterator[RequestOutput]:
        loop = stream_draft_target(
            self.model("target"), self.model("draft"), [prompt], params,
            num_draft_tokens=count, use_draft_logits=_is_on(tensors, "use_draft_logits"),
        )  # fmt: skip
        return (output for (output,) in loop)

    def _plain(self, prompt: str, params: SamplingParams) -> Iterator[dict[str, Any]]:
        """One request to the target, which has its own ways of drafting."""
        target = self.model("target")
        ((_, ids),) = target.prompts.read_all([prompt])
        target.engine.resolve(ids, params)
        request = target.request(ids, params)
        request |= {"detokenize": row(True, np.bool_), "streaming": row(True, np.bool_)}
        for part in transport_to(self._names["target"])(request):
            text, report = (part[name].reshape(-1)[0] for name in ("text_output", "report"))
            yield {
                "text": text.decode() if isinstance(text, bytes) else text,
                "ids": part["output_ids"].reshape(-1).tolist(),
                "log_probs": part["output_log_probs"].reshape(-1).tolist(),
                "report": report,
                "finished": bool(json.loads(report)),
            }

    def _answer(self, answer: Answer, parts: Iterator[dict[str, Any]], streaming: bool) -> None:
        """Send the parts as they come, or all at the end; nothing more if the client has gone."""
        text, ids, log_probs = "", [], []
        for part in parts:
            if answer.is_cancelled:
                raise RuntimeError("the request was cancelled")
            text += part["text"]
            ids += part["ids"]
            log_probs += part["log_probs"]
            if self._accumulate or not streaming:
                part["text"] = text
            if not part["finished"]:
                if streaming and (part["text"] or part["ids"]):
                    answer.part(self._tensors(part))
                continue
            if not streaming:
                part |= {"ids": ids, "log_probs": log_probs}
            answer.end(self._tensors(part | {"sum": sum(log_probs)}))
            return
        raise RuntimeError("the answer of the model has no end")

    def _tensors(self, part: dict[str, Any]) -> dict[str, np.ndarray]:
        def made(value: Any, dtype: Any) -> np.ndarray:
            return row(value, dtype, self.batched)

        return {
            "text_output": made(part["text"].encode(), np.object_),
            "output_ids": made(part["ids"], np.int32),
            "output_log_probs": made(part["log_probs"], np.float32),
            "cum_log_probs": made(part.get("sum", 0.0), np.float32),
            "report": made(part["report"], np.object_),
        }


def _part(output: RequestOutput) -> dict[str, Any]:
    """What a round of the loop has brought."""
    one = output.outputs[0]
    if one.error is not None:
        raise RemoteError(one.error)
    first = len(one.token_ids) - len(one.delta_token_ids)
    new = zip((one.logprobs or [])[first:], one.token_ids[first:], strict=False)
    facts = {"finish_reason": one.finish_reason, "stop_reason": one.stop_reason,
             "num_cached_tokens": output.num_cached_tokens, "metrics": output.metrics}  # fmt: skip
    return {
        "text": one.delta_text,
        "ids": list(one.delta_token_ids),
        "log_probs": [line[token].logprob for line, token in new],
        "report": json.dumps(facts if output.finished else {}).encode(),
        "finished": output.finished,
    }


def _is_on(tensors: dict[str, np.ndarray], name: str) -> bool:
    return name in tensors and bool(tensors[name].reshape(-1)[0])

"""Triton's Python backend in this process: enough of triton_python_backend_utils, and a repository
whose models are called as the server calls them. Requests and answers are held against
config.pbtxt: names, types, ranks, required inputs, the number of answers of a model that is not
decoupled."""

from __future__ import annotations

import importlib.util
import json
import queue
import re
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NUMPY = {
    "TYPE_STRING": np.object_, "TYPE_INT32": np.int32, "TYPE_UINT64": np.uint64,
    "TYPE_FP32": np.float32, "TYPE_BOOL": np.bool_,
}  # fmt: skip
FINAL = 1


class Tensor:
    def __init__(self, name: str, value: np.ndarray) -> None:
        assert isinstance(value, np.ndarray) and value.flags.c_contiguous
        # Strings cross as bytes.
        as_bytes = np.frompyfunc(lambda x: x if isinstance(x, bytes) else str(x).encode(), 1, 1)
        self._name = name
        self._value = np.atleast_1d(as_bytes(value)) if value.dtype == np.object_ else value.copy()

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._value


class TritonError(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE = "INTERNAL", "INVALID_ARG", "UNAVAILABLE"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        super().__init__(message)
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> str:
        return self._code


class InferenceResponse:
    def __init__(self, output_tensors: Any = (), error: TritonError | None = None) -> None:
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Sender:
    def __init__(self) -> None:
        self.parts: queue.Queue[tuple[InferenceResponse | None, int]] = queue.Queue()
        self.cancelled = False
        self._ended = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self._ended, "an answer after the last one"
        self._ended = flags == FINAL
        self.parts.put((response, flags))

    def is_cancelled(self) -> bool:
        return self.cancelled


class InferenceRequest:
    repository: Repository  # of the models that are loaded

    def __init__(
        self, model_name: str = "", requested_output_names: Any = (), inputs: Any = ()
    ) -> None:
        self._model, self._inputs = model_name, list(inputs)
        self._outputs = set(requested_output_names)
        self.sender = Sender()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def get_response_sender(self) -> Sender:
        return self.sender

    def exec(self, decoupled: bool = False) -> Iterator[InferenceResponse]:
        """Business Logic Scripting, as models call other models."""
        assert decoupled
        inputs = {tensor.name(): tensor.as_numpy() for tensor in self._inputs}
        sender = self.repository.submit(self._model, inputs)
        for response in self.repository.responses(self._model, sender):
            kept = [one for one in response.output_tensors() if one.name() in self._outputs]
            yield InferenceResponse(kept, response.error())


def read_pbtxt(text: str) -> dict[str, Any]:
    """A protobuf in text form; fields that repeat become lists."""
    words = re.findall(r'"[^"]*"|[\[\]{},:]|[^\s\[\]{},:"]+', text)
    at = 0

    def value() -> Any:
        nonlocal at
        word = words[at]
        at += 1
        if word == "{":
            return message("}")
        if word == "[":
            items = []
            while words[at] != "]":
                items.append(value())
                at += words[at] == ","
            at += 1
            return items
        if word.startswith('"'):
            return word[1:-1]
        return {"true": True, "false": False}.get(word, int(word) if word.lstrip("-").isdigit()
                                                  else word)  # fmt: skip

    def message(end: str | None) -> dict[str, Any]:
        nonlocal at
        found: dict[str, Any] = {}
        while at < len(words) and words[at] != end:
            name = words[at]
            at += 1
            at += words[at] == ":"
            item = value()
            if name in ("parameters", "input_map", "output_map"):
                found.setdefault(name, {})[item["key"]] = item["value"]
            else:
                found[name] = item
        at += 1
        return found

    return message(None)


class Repository:
    """Loads the models of a folder; infer() is what a client does. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.configs = {
            path.parent.name: read_pbtxt(path.read_text()) for path in folder.glob("*/config.pbtxt")
        }
        InferenceRequest.repository = self
        self._models: dict[str, Any] = {}
        self._lock = threading.Lock()
        for name, config in self.configs.items():
            assert config["name"] == name
            if config.get("platform") == "ensemble":
                continue
            spec = importlib.util.spec_from_file_location(
                f"triton_{name}", folder / name / "1" / "model.py"
            )
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            model = module.TritonPythonModel()
            model.initialize({"model_config": json.dumps(config), "model_name": name})
            self._models[name] = model

    def __enter__(self) -> Repository:
        return self

    def __exit__(self, *_: object) -> None:
        for model in self._models.values():
            if hasattr(model, "finalize"):
                model.finalize()

    def model(self, name: str) -> Any:
        return self._models[name]

    def submit(self, name: str, inputs: dict[str, np.ndarray]) -> Sender:
        config = self.configs[name]
        self._check(name, inputs, config["input"], "input")
        for wanted in config["input"]:
            if not wanted.get("optional") and wanted["name"] not in inputs:
                raise TritonError(f"{name}: expected input {wanted['name']}", "INVALID_ARG")
        request = InferenceRequest(
            name, inputs=[Tensor(key, np.ascontiguousarray(value)) for key, value in inputs.items()]
        )
        with self._lock:  # an instance gets one call at a time
            given = self._models[name].execute([request])
        if given is not None:
            (response,) = given
            request.sender.send(response, FINAL)
        return request.sender

    def responses(self, name: str, sender: Sender) -> Iterator[InferenceResponse]:
        config = self.configs[name]
        decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        for count in range(10**6):
            response, flags = sender.parts.get()
            assert decoupled or (count == 0 and flags == FINAL), "one answer, which is the last"
            if response is not None:
                outputs = {one.name(): one.as_numpy() for one in response.output_tensors()}
                self._check(name, outputs, config["output"], "output")
                yield response
            if flags == FINAL:
                return

    def infer(self, name: str, inputs: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """All parts of the answer. Raises TritonError."""
        if self.configs[name].get("platform") == "ensemble":
            return self._ensemble(name, inputs)
        return [self._outputs(one) for one in self.responses(name, self.submit(name, inputs))]

    def _outputs(self, response: InferenceResponse) -> dict[str, np.ndarray]:
        if response.has_error():
            error = response.error()
            assert error is not None
            raise error
        return {one.name(): one.as_numpy() for one in response.output_tensors()}

    def _ensemble(self, name: str, inputs: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Each part that a step gives goes through the steps behind it."""
        steps = self.configs[name]["ensemble_scheduling"]["step"]
        self._check(name, inputs, self.configs[name]["input"], "input")
        flows = [dict(inputs)]
        for step in steps:
            after = []
            for flow in flows:
                given = {key: flow[at] for key, at in step["input_map"].items() if at in flow}
                for part in self.infer(step["model_name"], given):
                    named = {
                        step["output_map"][key]: value
                        for key, value in part.items()
                        if key in step["output_map"]
                    }
                    after.append({**flow, **named})
            flows = after
        wanted = {one["name"] for one in self.configs[name]["output"]}
        return [{key: value for key, value in flow.items() if key in wanted} for flow in flows]

    def _check(self, model: str, tensors: dict[str, Any], declared: Any, what: str) -> None:
        by_name = {one["name"]: one for one in declared}
        batched = self.configs[model]["max_batch_size"] > 0
        for name, tensor in tensors.items():
            if name not in by_name:
                raise TritonError(f"{model}: unexpected {what} {name}", "INVALID_ARG")
            one = by_name[name]
            dims = ([-1] if batched else []) + one["dims"]
            same = len(dims) == tensor.ndim and all(
                dim in (-1, size) for dim, size in zip(dims, tensor.shape, strict=False)
            )
            if tensor.dtype != NUMPY[one["data_type"]] or not same:
                raise TritonError(
                    f"{model}: {what} {name} is {tensor.dtype}{tensor.shape}, expected "
                    f"{one['data_type']}{dims}", "INVALID_ARG",
                )  # fmt: skip


def install() -> list[str]:
    """The module of that name, for this process; what has been logged comes into the list."""
    logged: list[str] = []
    module: Any = types.ModuleType("triton_python_backend_utils")
    module.Tensor, module.TritonError = Tensor, TritonError
    module.InferenceRequest, module.InferenceResponse = InferenceRequest, InferenceResponse
    module.TritonModelException = type("TritonModelException", (Exception,), {})
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    module.Logger = types.SimpleNamespace(log_info=logged.append, log_error=logged.append)

    def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
        return next((one for one in request.inputs() if one.name() == name), None)

    module.get_input_tensor_by_name = get_input_tensor_by_name
    sys.modules[module.__name__] = module
    return logged

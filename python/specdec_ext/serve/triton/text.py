"""The models `preprocessing` and `postprocessing`: text to token ids and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ...errors import RequestError, SpecdecError
from ...text.detokenizer import DetokenizerFactory
from ...text.prompts import PromptReader
from ...text.tokenizer import load_tokenizer
from .backend import Backend, response_of, to_triton_error
from .parameters import Parameters
from .tensors import one_row, row, texts

__all__ = ["PostprocessingBackend", "PreprocessingBackend", "tokenizer_of"]

# A prompt's most. An engine has a limit of its own; this one bounds the tokenizer's time.
MAX_TOKENS = 2**20


def tokenizer_of(parameters: Parameters) -> Any:
    return load_tokenizer(folder := parameters.require("tokenizer_dir"), Path(folder))


class _TextBackend(Backend, ABC):
    def start(self) -> None:
        self.tokenizer = tokenizer_of(self.parameters)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            return response_of(self.convert(request))
        except SpecdecError as error:
            return pb_utils.InferenceResponse(error=to_triton_error(error))

    def read(self, request: Any, name: str) -> np.ndarray:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            raise RequestError(f"{name} is missing")
        return one_row(name, tensor.as_numpy(), self.batched)

    @abstractmethod
    def convert(self, request: Any) -> dict[str, np.ndarray]:
        """The answer's tensors. Raises SpecdecError."""


class PreprocessingBackend(_TextBackend):
    def start(self) -> None:
        super().start()
        self._reader = PromptReader(self.tokenizer, MAX_TOKENS)
        self._special = self.parameters.get("add_special_tokens", True)

    def convert(self, request: Any) -> dict[str, np.ndarray]:
        found = texts(self.read(request, "QUERY"))
        if len(found) != 1:
            raise RequestError(f"QUERY has {len(found)} strings: a request has one prompt")
        _, ids = self._reader.read(found[0], add_special_tokens=self._special)
        return {
            "INPUT_ID": row(ids, np.int32, self.batched),
            "REQUEST_INPUT_LEN": row(len(ids), np.int32, self.batched),
        }


class PostprocessingBackend(_TextBackend):
    def start(self) -> None:
        super().start()
        self._factory = DetokenizerFactory(self.tokenizer)
        self._skip = self.parameters.get("skip_special_tokens", True)

    def convert(self, request: Any) -> dict[str, np.ndarray]:
        ids = self.read(request, "TOKENS_BATCH").reshape(-1)
        count = int(self.read(request, "SEQUENCE_LENGTH").reshape(-1)[0])
        if not 0 <= count <= len(ids):
            raise RequestError(f"SEQUENCE_LENGTH = {count}: there are {len(ids)} tokens")
        made = self._factory.make(self._skip)
        text = "".join([made.push(token) for token in ids[:count].tolist()]) + made.finish()
        return {"OUTPUT": row(text.encode(), np.object_, self.batched)}

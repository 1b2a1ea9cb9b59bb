"""A Triton server over gRPC, from outside: models as functions of tensors."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...errors import ConfigError
from .remote import RemoteError, Transport

__all__ = ["TritonClient"]

TYPES = {"int32": "INT32", "int64": "INT64", "uint64": "UINT64", "float32": "FP32", "bool": "BOOL",
         "object": "BYTES"}  # fmt: skip


class TritonClient:
    """One connection, for one thread. Every request goes through the stream, so that answers of one
    part and of many are read alike. Use as a context manager.

    url  HOST:PORT of the server's gRPC service

    Raises ConfigError where tritonclient is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            import tritonclient.grpc as triton
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"a client of Triton needs {error.name}: pip install 'specdec_ext[triton]'"
            ) from None
        self._triton = triton
        self._client = triton.InferenceServerClient(url)
        self._answers: queue.Queue[Any] = queue.Queue()
        self._numbers = itertools.count(1)
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def __enter__(self) -> TritonClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def model(self, name: str) -> Transport:
        """Requests to a model of the server."""

        def send(tensors: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
            inputs = []
            for key, value in tensors.items():
                made = self._triton.InferInput(key, list(value.shape), TYPES[value.dtype.name])
                made.set_data_from_numpy(value)
                inputs.append(made)
            request_id = str(next(self._numbers))
            try:
                self._client.async_stream_infer(
                    name, inputs, request_id=request_id, enable_empty_final_response=True
                )
            except self._triton.InferenceServerException as error:  # the connection is gone
                raise RemoteError(f"{name}: {error.message()}") from None
            yield from self._parts(name, request_id)

        return send

    def _parts(self, name: str, request_id: str) -> Iterator[dict[str, np.ndarray]]:
        while True:
            result, error = self._answers.get()
            if error is not None:
                raise RemoteError(f"{name}: {error.message()}")
            response = result.get_response()
            if response.id != request_id:
                continue  # of a request that nobody reads any more
            tensors = {one.name: result.as_numpy(one.name) for one in response.outputs}
            if tensors:
                yield tensors
            if response.parameters["triton_final_response"].bool_param:
                return

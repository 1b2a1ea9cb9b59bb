"""What the backends share: how a request is read and answered, and how its errors are worded."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # the server's; only its stub has it

from ...errors import CapacityError, QueueFullError, SpecdecError
from .parameters import Parameters
from .tensors import selected

__all__ = ["Answer", "Backend", "to_triton_error"]


def to_triton_error(error: BaseException) -> Any:
    """INVALID_ARG for what the request's owner can mend, UNAVAILABLE for a full queue; others are
    the server's."""
    code = pb_utils.TritonError.INTERNAL
    if isinstance(error, QueueFullError):
        code = pb_utils.TritonError.UNAVAILABLE
    elif isinstance(error, (SpecdecError, CapacityError)):
        code = pb_utils.TritonError.INVALID_ARG
    words = str(error) if isinstance(error, SpecdecError) else f"{type(error).__name__}: {error}"
    return pb_utils.TritonError(words, code)


class Answer:
    """The answer to one request: parts, then the end, once."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._ended = False

    @property
    def is_cancelled(self) -> bool:
        """The client has gone, or has cancelled the request."""
        return bool(self._sender.is_cancelled())

    def part(self, tensors: dict[str, np.ndarray]) -> None:
        self._sender.send(response_of(tensors))

    def end(self, tensors: dict[str, np.ndarray]) -> None:
        """The last part."""
        self._last(response_of(tensors))

    def fail(self, error: BaseException) -> None:
        if not self._ended:
            if not isinstance(error, SpecdecError):
                pb_utils.Logger.log_error(f"{type(error).__name__}: {error}")
            self._last(pb_utils.InferenceResponse(error=to_triton_error(error)))

    def _last(self, response: Any) -> None:
        self._ended = True
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def response_of(tensors: dict[str, np.ndarray]) -> Any:
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, np.ascontiguousarray(tensor)) for name, tensor in tensors.items()]
    )


class Backend:
    """A model of the repository: its parameters, and whether tensors have rows of a batch."""

    def initialize(self, args: dict[str, str]) -> None:
        self.parameters = Parameters(args["model_config"])
        self.batched = int(self.parameters.config.get("max_batch_size", 0)) > 0
        try:
            self.start()
        except SpecdecError as error:
            raise pb_utils.TritonModelException(f"{self.parameters.model_name}: {error}") from None

    def start(self) -> None:
        """Load what the parameters name. Raises SpecdecError."""

    def tensors(self, request: Any) -> dict[str, np.ndarray]:
        """The request's only row."""

        def read(name: str) -> np.ndarray | None:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy()

        return selected(read, self.batched)

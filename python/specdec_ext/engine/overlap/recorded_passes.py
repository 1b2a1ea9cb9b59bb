"""Times of passes as recorded steps run them: launched as one graph, not by the host."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from specdec_ext.engine.overlap.graphs import CudaGraphRecorder

if TYPE_CHECKING:
    from specdec_ext.engine.overlap.streams import CudaStream
    from specdec_ext.models.device_model import DeviceModel

__all__ = ["RecordedPasses"]


class RecordedPasses:
    """Called with a step plan: the least time of a few replays of its pass, in seconds.

    model    a DeviceModel with bound pages, which the passes write
    stream   where they run; nothing else is on it
    repeats  replays of each plan
    """

    def __init__(self, model: DeviceModel, stream: CudaStream, repeats: int = 3) -> None:
        self._model, self._stream, self._repeats = model, stream, repeats

    def __call__(self, plan: Any) -> float:
        stream, decoder = self._stream, self._model.decoder
        step = self._model.stage(plan)
        stream.follow()  # the plan's copies to the device

        def run() -> None:
            decoder.greedy(decoder.forward_rows(step))

        stream.enqueue(run)  # kernels are loaded, scratch memory is there
        replay = CudaGraphRecorder(stream).record([run])
        stream.enqueue(replay)
        marks = [stream.mark()]
        for _ in range(self._repeats):
            stream.enqueue(replay)
            marks.append(stream.mark())
        stream.record().wait()
        return min(later.since(earlier) for earlier, later in itertools.pairwise(marks))

"""Steps of several ranks as graphs: each records its share of what rank 0 records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specdec_ext.parallel.team import RECORD, RECORDED, REPLAY

if TYPE_CHECKING:
    from specdec_ext.engine.overlap.graphs import GraphRecorder
    from specdec_ext.models.device_ranks import DeviceRanks

__all__ = ["RankedRecorder"]


class RankedRecorder:
    """Rank 0's GraphRecorder.

    What is between the ranks is recorded by all of them at once, as the link between their devices
    asks for it: so the packets of a step that is being recorded say that they are (RECORD, its
    number, in front of the first; RECORDED behind the last, 1 if it is kept), and a replay is a
    packet of its own (REPLAY). What has no packets, such as drafting, is rank 0's alone.
    """

    def __init__(self, recorder: GraphRecorder, ranks: DeviceRanks) -> None:
        self._recorder, self._ranks = recorder, ranks
        self._made = 0

    @property
    def memory_bytes(self) -> int:
        """See GraphRecorder: of rank 0's device, whose part is no smaller than the others'."""
        return self._recorder.memory_bytes

    def record(self, operations: Sequence[Callable[[], None]]) -> Callable[[], None]:
        """See GraphRecorder."""
        ranks, number = self._ranks, self._made
        shared = False

        def announce() -> None:
            nonlocal shared
            shared = True
            ranks.tell(RECORD, number)

        ranks.before_packet = announce
        try:
            replay = self._recorder.record(operations)
        except BaseException:
            if shared:
                ranks.tell(RECORDED, 0)
            raise
        finally:
            ranks.before_packet = None
        if not shared:
            return replay
        ranks.tell(RECORDED, 1)
        self._made += 1

        def replay_together() -> None:
            ranks.tell(REPLAY, number)
            replay()

        return replay_together

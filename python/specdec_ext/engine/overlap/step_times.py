"""Where the time of steps goes, from marks on their stream that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_ext.engine.overlap.streams import Mark

__all__ = ["PARTS", "StepTimes"]

# A step's parts in their order; a mark stands before the first and after each.
#   draft   copies to the device, drafts, geometry
#   verify  the model
#   accept  acceptance, stop rules, compaction, the copy of the results
PARTS = ("draft", "verify", "accept")


@dataclass
class _Sums:
    """Seconds. host: of the calling thread besides waiting, and besides the parts on a CPU."""

    steps: int = 0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    host: float = 0.0


@dataclass
class StepTimes:
    """Sums over steps, those that read prompts apart."""

    decode: _Sums = field(default_factory=_Sums)
    prefill: _Sums = field(default_factory=_Sums)

    def of(self, reads_prompts: bool) -> _Sums:
        return self.prefill if reads_prompts else self.decode

    def add_step(self, reads_prompts: bool, marks: Sequence[Mark]) -> None:
        """A step whose marks have all been reached."""
        sums = self.of(reads_prompts)
        sums.steps += 1
        for index, part in enumerate(PARTS):
            seconds = marks[index + 1].since(marks[index])
            setattr(sums, part, getattr(sums, part) + seconds)

    def add_host(self, reads_prompts: bool, seconds: float) -> None:
        self.of(reads_prompts).host += seconds

    def to_dict(self) -> dict[str, Any]:
        """{"decode": {"steps", "draft", "verify", "accept", "host"}, "prefill": ...}, seconds."""
        return asdict(self)

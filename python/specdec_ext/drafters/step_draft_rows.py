"""Which tokens a draft model reads in a step: of prompts, and before its first draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .step_draft_forward import ChainRows

if TYPE_CHECKING:
    from torch import Tensor

    from ..models.place import Place
    from .step_drafter import DraftInputs, PromptInputs

__all__ = ["DeviceReader", "FirstPass", "HostReader", "PromptPacker", "Reader"]


class PromptPacker:
    """The rows of prompts again, as far as the draft model has positions.

    max_rows, max_requests  of a step
    """

    def __init__(self, place: Place, *, max_rows: int, max_requests: int, max_len: int) -> None:
        how: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        self._is_cpu, self._max_len = place.is_cpu, max_len
        self._row = torch.arange(max_rows, **how)
        self._cu_rows = torch.zeros(max_requests + 1, **how)

    def pack(self, prompts: PromptInputs) -> tuple[ChainRows | None, Tensor]:
        """The rows, and [P] int32 where each piece ends; valid until the next call. On a device
        there are as many as the step has, padding included; on the CPU as many as are needed, and
        None where there are none."""
        first, kv_len = prompts.cu_rows[:-1], prompts.kv_len
        count = torch.minimum(prompts.cu_rows[1:] - first, (self._max_len - kv_len).clamp_min(0))
        requests = count.shape[0]
        cu_rows = self._cu_rows[: requests + 1]
        torch.cumsum(count, 0, dtype=torch.int32, out=cu_rows[1:])
        size = int(cu_rows[requests]) if self._is_cpu else prompts.tokens.shape[0]
        if size == 0:
            return None, kv_len + count
        row = self._row[:size]
        request = torch.searchsorted(cu_rows[1:], row, right=True)
        padding = request >= requests
        request = request.clamp_max(requests - 1)
        offset = (row - cu_rows.index_select(0, request)).masked_fill(padding, 0)
        source = (first.index_select(0, request) + offset).masked_fill(padding, 0)
        rows = ChainRows(
            tokens=prompts.tokens.index_select(0, source),
            positions=(kv_len.index_select(0, request) + offset).masked_fill(padding, 0),
            parents=offset - 1,
            cu_rows=cu_rows,
            kv_len=kv_len,
            max_rows=prompts.max_rows,
        )
        return rows, kv_len + count


@dataclass(frozen=True)
class FirstPass:
    """What the first pass of a step reads: the golden token, and what is missing in front of it.

    cu_logits   [D + 1] int32, first score of each request; logit_rows [L] int32 their rows
    places      [D] int64, each request's score; too large for one that has none
    limit       [D] int32 drafts of each request
    """

    rows: ChainRows
    cu_logits: Tensor
    logit_rows: Tensor
    places: Tensor
    limit: Tensor


class Reader(Protocol):
    """Finds the tokens whose K/V the draft model has not.

    first   None: there is nothing to read. last [D, 2] int32 the last tokens of each text, lens [D]
            int32 its length, 0: no drafts
    read    the first pass was made
    drafted [D, width] int32 the drafts of a step, -1: none; all but the last of each were read
    prompts slots [P] int32, -1: none; ends [P] int32: as far as their prompts were read
    """

    def first(
        self, inputs: DraftInputs, last: Tensor, lens: Tensor, width: int
    ) -> FirstPass | None: ...
    def read(self) -> None: ...
    def drafted(self, drafts: Tensor) -> None: ...
    def prompts(self, slots: Tensor, ends: Tensor) -> None: ...


class HostReader:
    """On the CPU: it is known of each slot how far its text was read, and which drafts behind that,
    so steps in which nobody drafts cost nothing. What they brought is read at once, as far as there
    are rows for it.

    max_rows  of one pass
    max_len   positions of the draft model
    """

    def __init__(self, *, max_rows: int, max_requests: int, max_len: int) -> None:
        self.max_rows = max_rows
        self._max_len = max_len
        self._end = [0] * max_requests
        self._tail: list[list[int]] = [[] for _ in range(max_requests)]
        self._step: list[tuple[int, int, int]] = []  # request, slot, end of what it reads

    def first(
        self, inputs: DraftInputs, last: Tensor, lens: Tensor, width: int
    ) -> FirstPass | None:
        del last
        requests = inputs.num_requests
        most = max(self.max_rows // requests, 1)
        begin = inputs.layout.history_offset // 4
        words = inputs.slots.view(torch.int32)
        slots, lengths = inputs.slot_ids.tolist(), lens.tolist()
        tokens: list[int] = []
        positions: list[int] = []
        parents: list[int] = []
        starts, limits, places = [0] * requests, [0] * requests, [requests] * requests
        logit_rows: list[int] = []
        cu_rows, cu_logits = [0], [0]
        self._step = []
        for b, (slot, length, drafts) in enumerate(
            zip(slots, lengths, inputs.max_drafts.tolist(), strict=True)
        ):
            if 0 < length <= self._max_len:
                start = min(self._end[slot], length - 1)
                text = words[slot, begin + start : begin + length].tolist()
                came_true = 0
                for draft in self._tail[slot]:
                    if came_true == len(text) - 1 or text[came_true] != draft:
                        break
                    came_true += 1
                start += came_true
                end = min(start + most, length)
                starts[b] = start
                tokens += text[came_true : came_true + end - start]
                positions += range(start, end)
                parents += range(-1, end - start - 1)
                self._step.append((b, slot, end))
                # A draft at position p comes of a pass that reads p - 1.
                limits[b] = min(drafts, width, self._max_len - length + 1) if end == length else 0
                if limits[b] > 0:
                    places[b] = len(logit_rows)
                    logit_rows.append(len(tokens) - 1)
            cu_rows.append(len(tokens))
            cu_logits.append(len(logit_rows))
        if not tokens:
            return None

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        rows = ChainRows(
            ints(tokens), ints(positions), ints(parents), ints(cu_rows), ints(starts), most
        )
        return FirstPass(
            rows, ints(cu_logits), ints(logit_rows), torch.tensor(places), ints(limits)
        )

    def read(self) -> None:
        for _, slot, end in self._step:
            self._end[slot], self._tail[slot] = end, []

    def drafted(self, drafts: Tensor) -> None:
        chains = drafts.tolist()
        for b, slot, _ in self._step:
            made = [token for token in chains[b] if token >= 0]
            self._tail[slot] = made[:-1]

    def prompts(self, slots: Tensor, ends: Tensor) -> None:
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            if slot >= 0:
                self._end[slot], self._tail[slot] = end, []


class DeviceReader:
    """On a device: the draft model reads the last two tokens of each text in every step, the golden
    one and the one before, which is new to it if all drafts were accepted."""

    ROWS = 2

    def __init__(self, place: Place, *, max_requests: int, max_len: int) -> None:
        how: dict[str, Any] = {"dtype": torch.int32, "device": place.device}
        self._max_len, self._max_requests = max_len, max_requests
        # Behind the rows there is room for what requests without rows would read.
        self._tokens = torch.zeros(max_requests + 1, 2, **how)
        self._positions = torch.zeros(max_requests + 1, 2, **how)
        self._cu_rows = torch.zeros(max_requests + 1, **how)
        self._cu_logits = torch.zeros(max_requests + 1, **how)
        self._last_rows = torch.arange(1, 2 * max_requests, 2, **how)
        self._steps = torch.arange(2, **how)

    def first(
        self, inputs: DraftInputs, last: Tensor, lens: Tensor, width: int
    ) -> FirstPass | None:
        requests = inputs.num_requests
        goes_on = (lens > 0) & (lens <= self._max_len)
        cu_logits = self._cu_logits[: requests + 1]
        torch.cumsum(goes_on, 0, dtype=torch.int32, out=cu_logits[1:])
        places = cu_logits[:-1].long().masked_fill(~goes_on, self._max_requests)
        kv_len = (lens - self.ROWS).clamp_min(0)
        self._tokens.index_copy_(0, places, last)
        self._positions.index_copy_(0, places, kv_len[:, None] + self._steps)
        limit = torch.minimum(inputs.max_drafts, self._max_len + 1 - lens).clamp_(0, width)
        rows = ChainRows(
            tokens=self._tokens.view(-1)[: self.ROWS * requests],
            positions=self._positions.view(-1)[: self.ROWS * requests],
            parents=None,
            cu_rows=torch.mul(cu_logits, self.ROWS, out=self._cu_rows[: requests + 1]),
            kv_len=kv_len,
            max_rows=self.ROWS,
        )
        return FirstPass(rows, cu_logits, self._last_rows[:requests], places, limit * goes_on)

    def read(self) -> None:
        """Nothing to keep."""

    def drafted(self, drafts: Tensor) -> None:
        """Nothing to keep."""

    def prompts(self, slots: Tensor, ends: Tensor) -> None:
        """Nothing to keep."""

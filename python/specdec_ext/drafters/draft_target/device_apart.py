"""A draft model on a device of its own: what goes to it and what comes back, and in which order.

A step's operations run on the target's stream, the draft model's passes on a stream of its device.
Only what the passes need crosses: the end of each text, lengths, pages, limits and laws; back come
drafts, what the draft model gave them and, where a request draws its drafts, what they were drawn
from. All of it crosses between the two devices; the host waits for nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ... import ops
from ...log import logger
from .pick import pick_of

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.place import Place
    from ..slot_drafter import DraftInputs, PromptInputs

__all__ = ["OwnDevice", "Parcel"]

_ALIGN = 4  # words: every tensor begins at a multiple of 16 bytes


class Queue(Protocol):
    """A device's stream (engine/overlap/streams.py)."""

    def enqueue(self, operation: Callable[[], object]) -> None: ...

    def copy(self, to: Tensor, source: Tensor) -> None: ...

    def wait_for(self, other: Any) -> None: ...


class Recorder(Protocol):
    """Makes graphs of what is enqueued on a stream (engine/overlap/graphs.py)."""

    def record(self, operations: Sequence[Callable[[], None]]) -> Callable[[], None]: ...

    @property
    def memory_bytes(self) -> int: ...


class Parcel:
    """Carries tensors from one device to another: packed into one, in one copy. The memory is kept
    and only ever grown; what arrived is valid until the next send()."""

    def __init__(self, home: Place, there: Place) -> None:
        self._packed = torch.zeros(0, dtype=torch.int32, device=home.device)
        self._arrived = torch.zeros(0, dtype=torch.int32, device=there.device)
        self._padding = torch.zeros(_ALIGN, dtype=torch.int32, device=home.device)

    @property
    def memory_bytes(self) -> int:
        """On both devices."""
        return self._packed.nbytes + self._arrived.nbytes

    @property
    def address(self) -> int:
        """Tensors of the same sizes arrive at the same places of it."""
        return self._arrived.data_ptr()

    def send(self, tensors: Sequence[Tensor], sender: Queue, receiver: Queue) -> list[Tensor]:
        """The tensors, whose bytes are whole words, on the receiver's device: what it is given from
        now on finds them. The sender may change its own at once."""
        words = [tensor.nbytes // 4 for tensor in tensors]
        begins, end = [], 0
        for count in words:
            begins.append(end)
            end += count + -count % _ALIGN
        sender.enqueue(partial(self._pack, tensors, end))
        receiver.enqueue(partial(self._make_room, end))
        packed, arrived = self._packed[:end], self._arrived[:end]
        receiver.wait_for(sender)
        # A copy between GPUs looks at the current streams of both.
        sender.enqueue(lambda: receiver.copy(arrived, packed))
        sender.wait_for(receiver)
        return [
            arrived[begin : begin + count].view(tensor.dtype).view(tensor.shape)
            for begin, count, tensor in zip(begins, words, tensors, strict=True)
        ]

    def _pack(self, tensors: Sequence[Tensor], count: int) -> None:
        if self._packed.numel() < count:
            self._packed = self._packed.new_zeros(2 * count)
        parts: list[Tensor] = []
        for tensor in tensors:
            part = tensor.reshape(-1).view(torch.int32)
            parts += (part, self._padding[: -len(part) % _ALIGN])
        torch.cat(parts, out=self._packed[:count])

    def _make_room(self, count: int) -> None:
        if self._arrived.numel() < count:
            self._arrived = self._arrived.new_zeros(2 * count)


class OwnDevice:
    """The border between the target's device and the draft model's.

    place   of the draft model
    home    of the target
    stream  of the draft model's device: all that it does runs there
    """

    def __init__(self, place: Place, home: Place, stream: Any) -> None:
        """stream  a Queue, which the engine also records events on"""
        self.place, self.home, self.stream = place, home, stream
        self._home_stream: Queue | None = None
        self._recorder: Recorder | None = None
        # By sizes and addresses: what enqueues recorded passes, and what they make; None: they have
        # run once, so that their kernels are loaded and scratch is there.
        self._recorded: dict[tuple[Any, ...], tuple[Callable[[], None], list[Tensor]] | None] = {}
        self._out, self._back = Parcel(home, place), Parcel(place, home)
        self._drawing: dict[int, bool] = {}  # by slot: the request draws its drafts
        self._probs: ops.DraftProbs | None = None  # on the target's device

    def follow(self, home_stream: Queue, recorder: Recorder | None = None) -> None:
        """Steps are enqueued on this stream from now on.

        recorder  of `stream`; None: passes are launched one by one
        """
        self._home_stream, self._recorder = home_stream, recorder
        self._recorded.clear()  # they were recorded over other pages

    def forget(self) -> int:
        """Drop what was recorded; the device's memory that it took."""
        taken = 0 if self._recorder is None else self._recorder.memory_bytes
        self._recorder = None
        self._recorded.clear()
        return taken

    @property
    def memory_bytes(self) -> int:
        """On both devices."""
        probs = self._probs
        kept = () if probs is None else (probs.probs, probs.draft_columns, probs.vocab_ids)
        held: int = sum(t.nbytes for t in kept if t is not None)
        return self._out.memory_bytes + self._back.memory_bytes + held

    def mirror(self, probs: ops.DraftProbs) -> None:
        """What drafts are drawn from is wanted on the target's device."""

        def at_home(tensor: Any) -> Any:
            return None if tensor is None else tensor.to(self.home.device, copy=True)

        self._probs = ops.DraftProbs(
            *(at_home(getattr(probs, field.name)) for field in dataclasses.fields(probs))
        )

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See SlotDrafter."""
        self._drawing[slot] = pick_of(options) == "own"

    def texts(
        self, inputs: DraftInputs, last: Tensor, lens: Tensor
    ) -> tuple[DraftInputs, Tensor, Tensor]:
        """A step's inputs on the draft model's device, without the slots, and what was read of
        them: the end of each text and its length."""
        laws = inputs.laws
        names = [field.name for field in dataclasses.fields(laws)] if inputs.samples else []
        there = self._send(
            inputs.slot_ids, inputs.max_drafts, inputs.page_table, last, lens,
            *(getattr(laws, name) for name in names),
        )  # fmt: skip
        slot_ids, max_drafts, page_table, last, lens, *rest = there
        if names:
            laws = ops.SamplingLaws(**dict(zip(names, rest, strict=True)))
        inputs = dataclasses.replace(
            inputs, slots=None, status=None, slot_ids=slot_ids, max_drafts=max_drafts,
            page_table=page_table, laws=laws,
        )  # fmt: skip
        return inputs, last, lens

    def prompts(self, prompts: PromptInputs) -> PromptInputs:
        """The same on the draft model's device, which reads them while the target goes on."""
        names = ("tokens", "slot_ids", "kv_len", "cu_rows", "page_table")
        there: list[Any] = self._send(*(getattr(prompts, name) for name in names))
        return dataclasses.replace(prompts, **dict(zip(names, there, strict=True)))

    def _send(self, *tensors: Tensor) -> list[Tensor]:
        assert self._home_stream is not None
        return self._out.send(tensors, self._home_stream, self.stream)

    def run(self, operation: Callable[[], object]) -> None:
        """On the draft model's device."""
        self.stream.enqueue(operation)

    def make(
        self, operation: Callable[[], list[Tensor]], sizes: tuple[Any, ...] | None
    ) -> list[Tensor]:
        """What `operation` makes on the draft model's device.

        sizes  all that its launches follow from: it is recorded when they come for the second time;
               None: it is launched one by one
        """
        key = None if sizes is None else (*sizes, self._out.address)
        if key is not None and self._recorder is not None:
            if key in self._recorded and self._recorded[key] is None:
                self._recorded[key] = self._make_graph(operation)
            if (graph := self._recorded.setdefault(key, None)) is not None:
                self.run(graph[0])
                return graph[1]
        made: list[Tensor] = []
        self.run(lambda: made.extend(operation()))
        return made

    def _make_graph(
        self, operation: Callable[[], list[Tensor]]
    ) -> tuple[Callable[[], None], list[Tensor]] | None:
        """None: there is no room, and nothing is recorded any more."""
        made: list[Tensor] = []

        def keep() -> None:
            made[:] = operation()

        assert self._recorder is not None
        try:
            return self._recorder.record((keep,)), made
        except torch.OutOfMemoryError as error:
            self._recorder = None
            logger.warning(
                "%s: no memory is left to record the draft model's passes (%s); they are launched "
                "one by one", self.place.name, error,
            )  # fmt: skip
            return None

    def bring(self, made: Sequence[Tensor], probs: ops.DraftProbs | None = None) -> list[Tensor]:
        """What was made for a step's requests, on the target's device.

        probs  what the drafts were drawn from; draft_probs() has it from now on. Its rows cross
               only while some request draws its drafts
        """
        home = self._home_stream
        assert home is not None
        if probs is None:
            return self._back.send(made, self.stream, home)
        requests, width = made[0].shape
        to, flags = self._probs, torch.empty(0)
        assert to is not None

        def whole_words() -> None:
            nonlocal flags
            flags = probs.has_probs[:requests].to(torch.int32)

        self.run(whole_words)
        extra = [flags] if to.draft_columns is None else [flags, probs.draft_columns[:requests]]
        there = self._back.send([*made, *extra], self.stream, home)
        kept = zip((to.has_probs, to.draft_columns), there[len(made) :], strict=False)
        for tensor, arrived in kept:
            home.enqueue(partial(tensor[:requests].copy_, arrived))
        if any(self._drawing.values()):
            rows = (slice(requests), slice(width))
            self.run(lambda: home.copy(to.probs[rows], probs.probs[rows]))
            self.stream.wait_for(home)
        return there[: len(made)]

    def draft_probs(self, num_requests: int) -> ops.DraftProbs:
        """See SlotDrafter."""
        assert self._probs is not None
        return self._probs.first(num_requests)

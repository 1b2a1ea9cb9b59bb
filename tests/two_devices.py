"""Two emulated devices in one process, each with a stream, and what watches that they stay apart.

Both keep their tensors in the host's memory, so nothing but this watch notices a kernel of one that
reads a tensor of the other, or one that does not wait for what it reads. Work runs when it is
enqueued; the watch knows what a GPU would be free to run at the same time (vector clocks).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from emulators import BUILD, LIBRARIES, load_emulators
from specdec_ext import _core, ops
from specdec_ext.drafters.draft_target.device_apart import OwnDevice
from specdec_ext.engine.overlap import Event, ImmediateStream, build
from specdec_ext.engine.overlap.streams import Mark
from specdec_ext.models.place import Place

FIRST, SECOND = "cuda-emu-fast", "cuda-emu-fast-1"


def load_second() -> None:
    """The emulation under a second name: another device."""
    if not load_emulators() and SECOND not in ops.backend_names():
        ops.load_backend(SECOND, str(BUILD / LIBRARIES[FIRST]))


@dataclass
class _Memory:
    """What the streams did to one piece of memory: their clocks then."""

    owner: str = ""
    kept: Any = None  # no address is used twice
    written: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)


class WatchedStream:
    """See engine/overlap/streams.py."""

    immediate = False

    def __init__(self, watch: Watch, device: str) -> None:
        self.watch, self.device = watch, device
        self.number = watch.count_stream()
        # How much of each stream's work comes before whatever is enqueued here next.
        self.behind: dict[int, int] = {self.number: 0}

    def enqueue(self, operation: Callable[[], object]) -> None:
        inside = self.watch.sees  # a mode is its thread's, and steps have one of their own
        with self.watch.on(self), contextlib.nullcontext() if inside else self.watch:
            operation()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.watch.copy(self, to, source)
        with self.watch.on(None):
            to.copy_(source)

    def record(self) -> Event:
        return ImmediateStream().record()

    def mark(self) -> Mark:
        return ImmediateStream().mark()

    def follow(self) -> None:
        return

    def wait_for(self, other: WatchedStream) -> None:
        for number, count in other.behind.items():
            self.behind[number] = max(self.behind.get(number, 0), count)


class Watch(TorchDispatchMode):
    """faults  what a GPU would do wrong, or could: at most one of a kind for each operation
    copies   (device, bytes) of each copy from one device to the other
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: set[str] = set()
        self.copies: list[tuple[str, int]] = []
        self._streams = 0
        self._now: WatchedStream | None = None
        self._memory: dict[int, _Memory] = {}

    @property
    def sees(self) -> bool:
        """An operation of a stream runs."""
        return self._now is not None

    def count_stream(self) -> int:
        self._streams += 1
        return self._streams

    @contextlib.contextmanager
    def on(self, stream: WatchedStream | None) -> Iterator[None]:
        before, self._now = self._now, stream
        try:
            yield
        finally:
            self._now = before

    # -- what operations touch ------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        stream = self._now
        if stream is None:
            return result
        schema = func._schema
        writes = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if views and not writes:
            return result
        self._begin(stream)
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        written = {a.name for a in writes}
        for name, value in given.items():
            for tensor in _tensors(value):
                self._touch(func.name(), tensor, write=name in written)
        for tensor in _tensors(result):
            self._touch(func.name(), tensor, write=True)
        return result

    def kernel(self, name: str, arguments: Any, backend: str | None) -> None:
        """An operation of this package; it may write all that it is given."""
        stream = self._now
        if stream is None:
            return
        self._begin(stream)
        if backend != stream.device:
            self.faults.add(f"{name} of {backend} on a stream of {stream.device}")
        for tensor in _tensors(arguments):
            self._touch(name, tensor, write=True)

    def copy(self, stream: WatchedStream, to: torch.Tensor, source: torch.Tensor) -> None:
        self._begin(stream)
        owners = [self._find(tensor).owner for tensor in (to, source)]  # of the host's: none
        if any(owners) and stream.device not in owners:
            self.faults.add(f"a copy from {owners[1]!r} to {owners[0]!r} on a stream of neither")
        if all(owners):
            self.copies.append((owners[0], to.nbytes))
        with self.on(stream):
            self._touch("copy", source, write=False, claim=False)
            self._touch("copy", to, write=True, claim=False)

    def claim(self, device: str, value: Any) -> None:
        """These tensors were made on the device, before any step."""
        for tensor in _tensors(value):
            self._find(tensor).owner = device

    # -- order ----------------------------------------------------------------------------------

    def _begin(self, stream: WatchedStream) -> None:
        stream.behind[stream.number] += 1

    def _find(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.setdefault(storage.data_ptr(), _Memory())
        if memory.kept is None:
            memory.kept = storage
        return memory

    def _touch(self, name: str, tensor: torch.Tensor, *, write: bool, claim: bool = True) -> None:
        stream = self._now
        if stream is None or tensor.numel() == 0:
            return
        memory = self._find(tensor)
        if claim:
            memory.owner = memory.owner or stream.device
            if memory.owner != stream.device:
                self.faults.add(f"{name} on {stream.device} touches a tensor of {memory.owner}")
        before = {**memory.read, **memory.written} if write else memory.written
        for number, count in before.items():
            if stream.behind.get(number, 0) < count:
                self.faults.add(f"{name} on {stream.device} does not wait for what it touches")
        mine = stream.behind[stream.number]
        if write:
            memory.written, memory.read = {stream.number: mine}, {}
        else:
            memory.read[stream.number] = mine


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif not isinstance(value, (str, int, float, np.ndarray)) and hasattr(value, "__dict__"):
        yield from _tensors(vars(value))  # a packed weight, laws


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """LLMs that are made and used inside run their steps on watched streams."""
    load_second()
    watch = Watch()

    def make_stream(place: Place, model: Any = None) -> WatchedStream:
        return WatchedStream(watch, place.backend)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "make_stream", make_stream)
        mirror = OwnDevice.mirror

        def claimed(self: OwnDevice, probs: ops.DraftProbs) -> None:
            mirror(self, probs)
            watch.claim(self.home.backend, self._probs)

        patched.setattr(OwnDevice, "mirror", claimed)
        for name in dir(_core):
            real = getattr(_core, name)
            if callable(real) and "backend" in (real.__doc__ or "") and name.islower():
                patched.setattr(_core, name, _seen(watch, name, real))
        yield watch


def _seen(watch: Watch, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "stream" in kwargs:  # others are questions
            watch.kernel(name, (args, kwargs), kwargs.get("backend"))
        return real(*args, **kwargs)

    return call

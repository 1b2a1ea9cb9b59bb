"""The engine of driver.py with steps that are enqueued on a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from driver import Engine, hash_engine
from stub_stream import StubStream

from hash_target import POISON, HashFunction, HashModel
from specdec_ext import _core
from specdec_ext.engine.overlap import HostForward, ImmediateStream, OverlapPipeline


class StreamEngine(Engine):
    """Pages that are given back are poisoned at once; the model must never read one of them.

    stub      None: operations run when they are enqueued; else the seed of a StubStream
    pipeline  what keeps the steps in flight
    recorder  a FakeRecorder: steps without prompts are recorded and replayed
    drafter   a SlotDrafter, with method="proposed"
    synthetic_acceptance_rates  as the host's executor takes them
    """

    def __init__(
        self,
        model: Any,
        k_pages: Any,
        v_pages: Any,
        *,
        stub: int | None = None,
        pipeline: type[OverlapPipeline] = OverlapPipeline,
        recorder: Any = None,
        drafter: Any = None,
        synthetic_acceptance_rates: Sequence[float] = (),
        depth: int = 1,
        **options: Any,
    ) -> None:
        self.model, self.num_pages = model, k_pages.shape[1]
        self.max_seq_len = options["max_seq_len"]
        self.pages = (k_pages, v_pages)
        self.reuses = bool(options.get("enable_block_reuse"))
        self.poison = POISON if isinstance(model, HashModel) else float("nan")
        self.executor = _core.Executor(
            vocab_size=model.vocab_size,
            num_pages=k_pages.shape[1],
            page_size=k_pages.shape[3],
            check_integrity=True,
            overlap_depth=depth,
            **options,
        )
        forward = HostForward(
            model,
            self.executor,
            page_size=k_pages.shape[3],
            num_pages=self.num_pages,
            keeps_hidden=drafter is not None and drafter.needs_hidden,
        )
        self.stream = ImmediateStream() if stub is None else StubStream(stub)
        self.pipeline = pipeline(
            self.executor,
            forward,
            k_pages,
            v_pages,
            stream=self.stream,
            backend="cpu",
            recorder=recorder,
            drafter=drafter,
            synthetic_rates=synthetic_acceptance_rates,
        )
        if recorder is not None:
            recorder.buffers = self.pipeline.buffers
        if isinstance(self.stream, StubStream):
            buffers = self.pipeline.buffers
            rings = (buffers.result_ring, buffers.score_ring, buffers.tree_ring)
            self.stream.host_memory = frozenset(r.untyped_storage().data_ptr() for r in rings)
        self.step_count = 0
        self.alive: set[int] = set()
        self.held: set[int] = set()
        self.ex = self  # what driver.Engine.run() calls

    def submit(self, prompt: list[int], **options: Any) -> int:
        rid = int(self.executor.submit(prompt, **options))
        self.alive.add(rid)
        return rid

    def cancel(self, rid: int) -> bool:
        known = bool(self.executor.cancel(rid))
        self.poison_returned()
        return known

    def stats(self) -> dict[str, Any]:
        return dict(self.executor.stats())

    @property
    def num_unfinished(self) -> int:
        return int(self.executor.num_unfinished)

    def step(self, before_forward: Any = None) -> list[Any] | None:
        outputs = self.pipeline.step()
        self.step_count += 1
        self.poison_returned()
        return outputs

    def poison_returned(self) -> None:
        held = {page for rid in self.alive for page in self.executor.pages(rid)}
        for page in self.held - held:
            # What is published stays there for others.
            for pages in () if self.reuses else self.pages:
                pages[:, page] = self.poison
        self.held = held

    def drain(self) -> list[Any]:
        """What is still in flight when every request has ended."""
        outputs: list[Any] = []
        while (more := self.step()) is not None:
            outputs += more
        return outputs

    def assert_idle(self) -> None:
        assert self.drain() == []
        super().assert_idle()
        stats = self.stats()
        assert stats["in_flight"] == stats["retiring"] == 0


class FakeRecorder:
    """Records what would be captured and runs it anew, the padding poisoned.

    Like a captured graph it gets nothing from the host but what lies in the tensors.
    """

    def __init__(self) -> None:
        self.buffers: Any = None
        self.memory_bytes = 0
        self.recorded = self.replayed = 0

    def record(self, operations: Sequence[Callable[[], object]]) -> Callable[[], None]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            layout = self.buffers.staging
            ids = self.buffers.staged_part(layout.slot_ids, layout.requests)
            table = self.buffers.staged_part(
                layout.page_table, layout.requests * layout.pages_per_request
            ).view(layout.requests, -1)
            table[ids < 0] = 1 << 30
            idle = torch.ones(layout.requests, dtype=torch.bool)
            idle[ids[ids >= 0].long()] = False
            for slot in idle.nonzero().flatten().tolist():
                if not self.buffers.slots[slot].any():  # never entered: any bytes will do
                    self.buffers.slots[slot] = 0x55
            for operation in operations:
                operation()

        return replay


def stream_hash_engine(function: HashFunction, **options: Any) -> StreamEngine:
    """As driver.hash_engine."""
    engine: StreamEngine = hash_engine(function, make=StreamEngine, **options)
    return engine


def stream_model_engine(
    model: Any, *, page_size: int = 16, max_batch_size: int, max_seq_len: int, **options: Any
) -> StreamEngine:
    """As driver.model_engine: a real step model, pages poisoned with NaN."""
    num_pages = max_batch_size * -(-(max_seq_len + 128) // page_size)
    shape = (model.num_layers, num_pages, model.num_kv_heads, page_size, model.head_dim)
    k_pages = torch.full(shape, float("nan"), dtype=model.kv_dtype)
    v_pages = torch.full(shape, float("nan"), dtype=model.kv_dtype)
    model.bind_cache(k_pages, v_pages)
    return StreamEngine(
        model, k_pages, v_pages, max_batch_size=max_batch_size, max_seq_len=max_seq_len, **options
    )

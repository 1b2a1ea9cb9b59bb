"""A step's operations in their order on a stream, and the loop that keeps a few steps in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specdec_ext import ops
from specdec_ext.log import logger
from specdec_ext.models.device_step import DeviceStep
from specdec_ext.run_ahead.buffers import StepBuffers, StepTensors
from specdec_ext.run_ahead.graphs import Bucket, choose_bucket, make_buckets

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_ext.run_ahead.graphs import GraphRecorder
    from specdec_ext.run_ahead.streams import Event, Stream

__all__ = ["RunAheadPipeline"]


@dataclass(frozen=True)
class _Geometry:
    """Sizes of a step: what its operations are launched with.

    prompts, decodes             requests; prompts come first
    prompt_rows, decode_rows     rows, of decoding an upper bound
    prompt_logits                choices of prompts
    max_rows, max_kv_len         of any one request, upper bounds
    needs_scores                 somebody samples, or the host chooses
    host_choices                 of the choices of prompts, those that the host makes
    """

    prompts: int
    decodes: int
    prompt_rows: int
    decode_rows: int
    prompt_logits: int
    max_rows: int
    max_kv_len: int
    needs_scores: bool
    host_choices: tuple[int, ...] = ()

    @classmethod
    def of(cls, planned: Any) -> _Geometry:
        """What the executor planned."""
        return cls(
            planned.num_prompts,
            planned.num_decodes,
            planned.num_prompt_rows,
            planned.max_decode_rows,
            planned.num_prompt_logits,
            planned.max_rows,
            planned.max_kv_len,
            planned.needs_scores,
            tuple(planned.host_choices),
        )


class RunAheadPipeline:
    """Enqueues steps and delivers what they brought, at most `executor.depth` steps later.

    executor  _core.RunAheadExecutor
    forward   a model: called on the stream with StepTensors, writes `sampled` or returns scores
    k_pages, v_pages  [layers, P, G, S, K], the model's
    backend   name of the operations' backend; None: by the pages' device
    recorder  steps without prompts are recorded and replayed; None: nothing is (enforce_eager)
    process   what callers make of the scores of requests whose tokens the host chooses: called
              with their ids (0: ended) and their rows [n, V], which stay as they are; returns
              others (None: the same) and error messages by id. None: nothing
    """

    process: Callable[[list[int], Tensor], tuple[Tensor | None, dict[int, str]]] | None = None

    def __init__(
        self,
        executor: Any,
        forward: Callable[[StepTensors], Tensor | None],
        k_pages: Tensor,
        v_pages: Tensor,
        *,
        stream: Stream,
        backend: str | None = None,
        recorder: GraphRecorder | None = None,
    ) -> None:
        self.executor = executor
        self.stream = stream
        self.buffers = StepBuffers(executor, k_pages.device)
        stream.follow()  # weights, pages and buffers are there when the first operation runs
        self.forward_s = 0.0  # time in `forward`; on a device that of its launches
        self.interrupted: BaseException | None = None
        self._forward = forward
        self._pages = (k_pages, v_pages)
        self._backend = backend
        self._events: deque[Event] = deque()
        self._recorder = recorder
        self._scores: Tensor | None = None  # of the step that was enqueued last
        self._replays: dict[tuple[Bucket, bool], Callable[[], None]] = {}
        self._chosen: dict[tuple[int, int], Bucket | None] = {}
        staging = self.buffers.staging
        self.buckets: tuple[Bucket, ...] = ()
        if recorder is not None:
            self.buckets = make_buckets(
                staging.requests, executor.max_rows_per_request, staging.rows
            )

    def record_graphs(self) -> None:
        """Record every bucket, while nothing is in flight. Else each is when it is first needed."""
        for bucket in self.buckets:
            for needs_scores in (False, True):
                self._graph(bucket, needs_scores)

    def step(self) -> list[Any] | None:
        """Enqueue a step if there is one, then read the one that is due.

        Returns StepOutputs, [] while nothing is due; None: nothing runs and nothing is in flight.
        An exception while a step is enqueued ends that step's requests; one that is no Exception
        is kept in `interrupted`, for the caller to raise when the outputs are where they belong.
        """
        planned = self.executor.plan() if len(self._events) <= self.executor.depth else None
        if planned is None and not self._events:
            return None
        outputs: list[Any] = []
        if planned is not None:
            try:
                self._enqueue(planned)
            except BaseException as error:
                # What earlier steps decided stands.
                while self._events:
                    outputs += self._deliver()
                outputs += self._fail(planned, error)
                if not isinstance(error, Exception):
                    self.interrupted = error
            self._events.append(self.stream.record())
        if planned is None or len(self._events) > self.executor.depth:
            outputs += self._deliver()
        return outputs

    def _deliver(self) -> list[Any]:
        self._events.popleft().wait()
        ids = self.executor.host_requests() if self.process is not None else []
        if not any(ids):
            return list(self.executor.deliver())
        assert self.process is not None
        rows = self.buffers.score_ring[self.executor.oldest_ring, : len(ids)]
        try:
            scores, errors = self.process(ids, rows)
        except BaseException as error:  # no Exception: those end their request alone
            self.interrupted = error
            scores, errors = None, dict.fromkeys(ids, f"interrupted: {type(error).__name__}")
        return list(self.executor.deliver(scores, errors))

    def drain(self) -> None:
        """Read the steps in flight of requests that have all ended: their pages return."""
        while self._events:
            self._deliver()

    def _fail(self, planned: Any, error: BaseException) -> list[Any]:
        message = f"forward pass failed: {type(error).__name__}: {error}"
        if isinstance(error, Exception):
            logger.error(message, exc_info=error)
        else:
            message = f"interrupted: {type(error).__name__}"
        return list(self.executor.fail(planned.index, message))

    def _enqueue(self, planned: Any) -> None:
        self._stage(planned)
        self._run(_Geometry.of(planned))
        self._read_back(planned)

    def _stage(self, planned: Any) -> None:
        stream, buffers = self.stream, self.buffers
        # What only prompts need lies at the end.
        words = buffers.staging.words if planned.num_prompts else buffers.staging.prompt_tokens
        stream.copy(buffers.staged[:words], buffers.staging_ring[planned.ring, :words])
        for entry in planned.entries:
            source = buffers.entry_ring[planned.ring, entry.offset : entry.offset + entry.bytes]
            stream.copy(buffers.slots[entry.slot, : entry.bytes], source)

    def _read_back(self, planned: Any) -> None:
        buffers, count = self.buffers, len(planned.host_choices)
        self.stream.copy(buffers.result_ring[planned.ring], buffers.result_block)
        if count:
            self.stream.copy(buffers.score_ring[planned.ring, :count], buffers.host_scores[:count])

    def _run(self, g: _Geometry) -> None:
        """Everything between the copies."""
        bucket = None
        if self.buckets and g.prompts == 0:
            size = (g.decodes, g.decode_rows)
            if size not in self._chosen:
                self._chosen[size] = choose_bucket(self.buckets, *size)
            bucket = self._chosen[size]
        if bucket is not None:
            self.stream.enqueue(self._graph(bucket, g.needs_scores))
            return
        for operation in self._operations(g):
            self.stream.enqueue(operation)

    def _graph(self, bucket: Bucket, needs_scores: bool) -> Callable[[], None]:
        """The recorded step of a bucket, one for greedy steps and one for steps that sample: its
        operations and their arguments depend on nothing else.

        It runs once before it is recorded, as a step of nobody, which changes no slot and no page.
        """
        key = (bucket, needs_scores)
        if key not in self._replays:
            assert self._recorder is not None
            staging = self.buffers.staging
            rows = min(bucket.rows, self.executor.max_rows_per_request)
            capacity = staging.pages_per_request * self._pages[0].shape[3]
            g = _Geometry(0, bucket.requests, 0, bucket.rows, 0, rows, capacity, needs_scores)
            operations = self._operations(g)
            staged, ids = self.buffers.staged, self.buffers.staged_part(staging.slot_ids, g.decodes)
            saved = torch.empty_like(staged)
            for operation in (
                lambda: saved.copy_(staged),
                lambda: ids.fill_(-1),
                *operations,
                lambda: staged.copy_(saved),
            ):
                self.stream.enqueue(operation)
            self._replays[key] = self._recorder.record(operations)
        return self._replays[key]

    def _operations(self, g: _Geometry) -> tuple[Callable[[], None], ...]:
        """What runs on the device: the same addresses for equal geometries."""
        tensors = self._tensors(g)
        return (
            lambda: self._draft(g, tensors),
            lambda: self._build(tensors),
            lambda: self._timed_forward(tensors),
            lambda: self._accept(g, tensors),
        )

    def _timed_forward(self, tensors: StepTensors) -> None:
        begin = time.perf_counter()
        self._scores = self._forward(tensors)
        self.forward_s += time.perf_counter() - begin

    def _tensors(self, g: _Geometry) -> StepTensors:
        b, layout = self.buffers, self.buffers.staging
        requests, rows = g.prompts + g.decodes, g.prompt_rows + g.decode_rows
        choices = g.prompt_logits + g.decode_rows
        pages = layout.pages_per_request
        step = DeviceStep(
            tokens=b.tokens[:rows],
            positions=b.positions[:rows],
            mask=b.mask[:rows],
            cu_rows=b.cu_rows[: requests + 1],
            kv_len=b.kv_len[:requests],
            is_tree=b.is_tree[:requests],
            page_table=b.staged_part(layout.page_table, requests * pages).view(requests, pages),
            logit_rows=b.staged_part(layout.logit_rows, choices) if g.prompts else None,
            status=b.status[:requests],
            max_rows=g.max_rows,
            max_kv_len=g.max_kv_len,
        )
        cu_logits = b.cu_logits if g.prompts else b.cu_rows
        return StepTensors(
            step,
            b.parents[:rows],
            cu_logits[: requests + 1],
            b.sampled[:choices],
            g.needs_scores,
        )

    def _draft(self, g: _Geometry, tensors: StepTensors) -> None:
        """Rows of prompts from what was staged, then those that the slots draft."""
        b, layout, step = self.buffers, self.buffers.staging, tensors.step
        b.status.zero_()
        first, rows = g.prompts, g.prompt_rows
        if first:
            for to, offset, count in (
                (b.tokens, layout.prompt_tokens, rows),
                (b.parents, layout.prompt_parents, rows),
                (b.kv_len, layout.kv_len, first),
                (b.cu_rows, layout.cu_rows, first + 1),
                (b.cu_logits, layout.cu_logits, first + 1),
            ):
                to[:count].copy_(b.staged_part(offset, count))
        if g.decodes == 0:
            return
        cu_rows = b.draft_rows[: g.decodes + 1] if first else step.cu_rows
        ops.draft_step(
            b.layout,
            b.slots,
            b.staged_part(layout.slot_ids + first, g.decodes),
            tokens=step.tokens[rows:],
            parents=tensors.parents[rows:],
            cu_rows=cu_rows,
            kv_len=step.kv_len[first:],
            max_drafts=b.staged_part(layout.max_drafts + first, g.decodes),
            window_rows=b.staged_part(layout.window_rows + first, g.decodes),
            guesses=b.staged_part(layout.guesses + first, g.decodes),
            backend=self._backend,
            status=tensors.status[first:],
        )
        if first:
            torch.add(cu_rows, rows, out=step.cu_rows[first:])
            torch.add(cu_rows, g.prompt_logits, out=tensors.cu_logits[first:])

    def _build(self, tensors: StepTensors) -> None:
        k_pages, step = self._pages[0], tensors.step
        ops.build_step(
            tensors.parents,
            step.page_table,
            step.kv_len,
            step.cu_rows,
            positions=step.positions,
            mask=step.mask,
            is_tree=step.is_tree,
            page_size=k_pages.shape[3],
            num_pages=k_pages.shape[1],
            max_rows=step.max_rows,
            backend=self._backend,
            status=tensors.status,
        )

    def _accept(self, g: _Geometry, tensors: StepTensors) -> None:
        """What the model's result decides, by each request's law and rule."""
        if not g.needs_scores:
            return self._commit(tensors, tensors.sampled, None)
        b, step, scores = self.buffers, tensors.step, self._scores
        if scores is None:
            raise ValueError("the model returned no scores for a step that samples")
        for i, choice in enumerate(g.host_choices):
            b.host_scores[i].copy_(scores[choice, : b.host_scores.shape[1]])
        requests, rows = len(step.kv_len), len(scores)
        tokens, positions, parents = step.tokens, step.positions, tensors.parents
        if g.prompts:
            assert step.logit_rows is not None
            needed = step.logit_rows[:rows]
            chosen = (b.choice_tokens[:rows], b.choice_positions[:rows], b.choice_parents[:rows])
            for values, to in zip((tokens, positions, parents), chosen, strict=True):
                torch.index_select(values, 0, needed, out=to)
            tokens, positions, parents = chosen
            parents[: g.prompt_logits].fill_(-1)  # a prompt's last row is a tree of its own
        rules = b.rules(requests)
        results = ops.accept_step(
            scores,
            tensors.cu_logits,
            positions[:rows],
            tokens[:rows],
            parents[:rows],
            b.laws(requests),
            rules["acceptance"],
            posterior_threshold=rules["posterior_threshold"],
            posterior_alpha=rules["posterior_alpha"],
            acceptance_threshold=rules["acceptance_threshold"],
            results=b.accept_results(rows, requests),
            backend=self._backend,
            status=tensors.status,
        )
        self._commit(tensors, results.sampled, results)

    def _commit(
        self, tensors: StepTensors, sampled: Tensor, accepted: ops.AcceptResults | None
    ) -> None:
        b, step = self.buffers, tensors.step
        requests = len(step.kv_len)
        path, path_len = b.path[:requests], b.path_len[:requests]
        ops.commit_step(
            b.layout,
            b.slots,
            b.staged_part(b.staging.slot_ids, requests),
            tensors.cu_logits,
            sampled,
            results=b.results[:requests],
            path=path,
            path_len=path_len,
            accepted=accepted,
            backend=self._backend,
            status=tensors.status,
        )
        ops.compact_kv(
            *self._pages,
            step.page_table,
            step.kv_len,
            step.cu_rows,
            path,
            path_len,
            num_rows=step.num_rows,
            max_kv_len=step.max_kv_len,
            backend=self._backend,
            status=tensors.status,
        )

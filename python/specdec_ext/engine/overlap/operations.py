"""A step's operations on its tensors: what is enqueued between the copies, in its order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specdec_ext import ops
from specdec_ext.drafters.slot_drafter import DraftInputs, PromptInputs, SlotDrafter
from specdec_ext.engine.overlap.buffers import StepBuffers, StepTensors
from specdec_ext.engine.overlap.host_side import HostSide
from specdec_ext.engine.overlap.step_sizes import StepSizes
from specdec_ext.log import logger
from specdec_ext.models.device_moves import KvMoves
from specdec_ext.models.device_step import DeviceStep

if TYPE_CHECKING:
    from torch import Tensor

    from specdec_ext.models.kv_storage import LayerPool

__all__ = ["Operations", "StepOperations"]

Operations = tuple[Callable[[], None], ...]


class StepForward(Protocol):
    """A model: called on the stream, it writes `sampled` or returns scores.

    hidden  rows of the step that it ran last, one for each choice; None: they are not kept
    """

    hidden: Tensor | None

    def __call__(self, tensors: StepTensors) -> Tensor | None: ...

    def make_hidden(self, rows: int) -> Tensor:
        """Zeroed rows as `hidden` has them."""
        ...

    def moved(self, moves: KvMoves) -> None:
        """On the stream: K/V is moved in the pages here; if there are others, it is there, too."""
        ...

    def copied(self, copies: Sequence[Any]) -> None:
        """Pages are copied to the host's pool or from it (ExecutorStep.page_orders)."""
        ...


class StepOperations:
    """Makes operations from sizes alone; they touch the device's tensors and read no value.

    forward   a model: called on the stream with StepTensors, writes `sampled` or returns scores
    k_pages, v_pages  [layers, P, G, S, K], the model's
    backend   name of the operations' backend; None: by the pages' device
    drafter   proposes the drafts of slots whose method is "proposed"
    narrow    the model's pools of narrow windows, in the order of the step's tables
    """

    def __init__(
        self,
        buffers: StepBuffers,
        forward: StepForward,
        k_pages: Tensor,
        v_pages: Tensor,
        backend: str | None,
        drafter: SlotDrafter | None = None,
        narrow: Sequence[LayerPool] = (),
    ) -> None:
        self.buffers = buffers
        # Time in `forward` and in the drafter; on a device that of their launches.
        self.forward_s = self.draft_s = 0.0
        self.draft_calls = self.draft_failures = 0
        self.drafter = drafter
        self._read_prompts: Any = getattr(drafter, "read_prompts", None)
        self._after_forward: Any = getattr(drafter, "after_forward", None)
        self._draft_probs: Any = getattr(drafter, "draft_probs", None)
        self._reads_every_step = bool(getattr(drafter, "reads_every_step", False))
        # Where its drafts are made; None: on the model's device.
        self._own_device: Any = getattr(drafter, "own_device", None)
        self._hidden: Tensor | None = None  # [num_slots, H]
        if drafter is not None and drafter.needs_hidden:
            self._hidden = forward.make_hidden(len(buffers.slots))
        self._forward = forward
        self._num_pages, self._page_size = k_pages.shape[1], k_pages.shape[3]
        # (K, V) pages, and which of a step's tables names them.
        pools = [(k_pages, v_pages, 0)]
        pools += [(pool.k, pool.v, table) for table, pool in enumerate(narrow, start=1)]
        if moved := getattr(drafter, "moved_pages", ()):
            pools.append((*moved, 0))
        self._pools = tuple(pools)
        self._backend = backend
        self._scores: Tensor | None = None  # of the step that was enqueued last
        self._host = HostSide(buffers, self._pools, backend)

    def _operations(self, g: StepSizes) -> tuple[Operations, tuple[Operations, ...]]:
        """What runs on the device, the same addresses for equal geometries: what is launched one by
        one in every step, since another device takes part, and then what comes after it, for each
        of PARTS."""
        tensors = self._tensors(g)
        moving: Operations = ()
        if g.moves:
            moving = (lambda: self._forward.moved(self._host.move_kv(tensors)),)
        kept = self._hidden
        if g.kept_rows and kept is not None:
            moving += (lambda: self._host.take_kept(g.kept_rows, kept),)
        drafting: Operations = ()
        if self._is_drafting(g):
            drafting = (lambda: self._propose_drafts(g, tensors),)
        reading: Operations = ()
        if self._read_prompts is not None and g.prompts:
            reading = (lambda: self._draft_prompts(g, tensors),)
        first = (self._clear_status, *moving, *drafting)
        apart = self._own_device is not None and bool(drafting)
        return first if apart else (), (
            (
                *(() if apart else first),
                lambda: self._draft(g, tensors),
                lambda: self._build(tensors),
            ),
            (lambda: self._timed_forward(tensors), *reading),
            (lambda: self._accept(g, tensors),),
        )

    def _is_drafting(self, g: StepSizes) -> bool:
        wanted = g.drafts or self._reads_every_step
        return self.drafter is not None and g.decodes > 0 and wanted

    def _clear_status(self) -> None:
        self.buffers.status.zero_()

    def _timed_forward(self, tensors: StepTensors) -> None:
        begin = time.perf_counter()
        self._scores = self._forward(tensors)
        self.forward_s += time.perf_counter() - begin
        if self._after_forward is not None:
            self._guarded(self._after_forward, tensors.step)

    def _tensors(self, g: StepSizes) -> StepTensors:
        b, layout = self.buffers, self.buffers.staging
        requests, rows = g.prompts + g.decodes, g.prompt_rows + g.decode_rows
        choices = g.prompt_logits + g.decode_rows
        step = DeviceStep(
            tokens=b.tokens[:rows],
            positions=b.positions[:rows],
            mask=b.mask[:rows],
            cu_rows=b.cu_rows[: requests + 1],
            kv_len=b.kv_len[:requests],
            is_tree=b.is_tree[:requests],
            page_table=b.staged_words.page_table(requests),
            narrow_tables=b.staged_words.narrow_tables(requests),
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

    def draft_inputs(self, g: StepSizes, tensors: StepTensors) -> DraftInputs:
        """What the drafter goes on from."""
        b, layout, first = self.buffers, self.buffers.staging, g.prompts
        return DraftInputs(
            layout=b.layout,
            slots=b.slots,
            slot_ids=b.staged_part(layout.slot_ids + first, g.decodes),
            max_drafts=b.staged_part(layout.max_drafts + first, g.decodes),
            page_table=tensors.step.page_table[first:],
            laws=b.staged_words.laws(g.decodes, first),
            samples=g.needs_scores,
            status=tensors.status[first:],
            hidden=self._hidden,
            max_width=max(g.max_rows - 1, 1) if g.drafts else 1,
            max_kv_len=g.max_kv_len,
            recorded=g.recorded,
        )

    def _propose_drafts(self, g: StepSizes, tensors: StepTensors) -> None:
        assert self.drafter is not None
        begin = time.perf_counter()
        # Where it raises, drafts of another history are left out: plain decoding.
        self._guarded(self.drafter.draft, self.draft_inputs(g, tensors))
        self.draft_s += time.perf_counter() - begin
        self.draft_calls += 1

    def _draft_prompts(self, g: StepSizes, tensors: StepTensors) -> None:
        """The drafter reads what the model has read of the prompts."""
        b, step, count = self.buffers, tensors.step, g.prompts
        inputs = PromptInputs(
            tokens=step.tokens[: g.prompt_rows],
            slot_ids=b.staged_part(b.staging.slot_ids, count),
            kv_len=step.kv_len[:count],
            cu_rows=step.cu_rows[: count + 1],
            page_table=step.page_table[:count],
            max_rows=g.max_rows,
            max_kv_len=g.max_kv_len,
        )
        self._guarded(self._read_prompts, inputs)

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        """An exception of the drafter costs drafts, nothing else."""
        try:
            call(*arguments)
        except Exception as error:
            self._drafter_raised(error)

    def _drafter_raised(self, error: Exception) -> None:
        assert self.drafter is not None
        self.draft_failures += 1
        if self.draft_failures == 1:
            logger.warning(
                "the drafter %r raised %s: %s; this step runs without drafts (further "
                "failures are only counted, see get_metrics()['drafter'])",
                self.drafter.name, type(error).__name__, error,
                exc_info=error,
            )  # fmt: skip

    def _keep_hidden(self, tensors: StepTensors) -> None:
        """Keep what each request's last token was chosen from, for the drafts of its next step."""
        if self._hidden is None:
            return
        hidden = self._forward.hidden
        assert hidden is not None  # make_hidden() was asked for
        b, requests = self.buffers, len(tensors.step.kv_len)
        ops.keep_hidden(
            b.layout,
            b.slots,
            b.staged_part(b.staging.commit_ids, requests),
            tensors.cu_logits,
            results=b.results[:requests],
            path=b.path[:requests],
            path_len=b.path_len[:requests],
            hidden=hidden,
            kept=self._hidden,
            backend=self._backend,
        )

    def _draft(self, g: StepSizes, tensors: StepTensors) -> None:
        """Rows of prompts from what was staged, then those that the slots draft."""
        b, layout, step = self.buffers, self.buffers.staging, tensors.step
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
        step = tensors.step
        ops.build_step(
            tensors.parents,
            step.page_table,
            step.kv_len,
            step.cu_rows,
            positions=step.positions,
            mask=step.mask,
            is_tree=step.is_tree,
            page_size=self._page_size,
            num_pages=self._num_pages,
            max_rows=step.max_rows,
            backend=self._backend,
            status=tensors.status,
        )

    def _accept(self, g: StepSizes, tensors: StepTensors) -> None:
        """What the model's result decides, by each request's law and rule."""
        b, step, scores = self.buffers, tensors.step, self._scores
        if not g.needs_scores:
            synthetic = b.synthetic_rates is not None
            accepted = self._accept_synthetic(g, tensors) if synthetic else None
            return self._commit(tensors, tensors.sampled, accepted, g.drafts)
        if scores is None:
            raise ValueError("the model returned no scores for a step that samples")
        if g.needs_host:
            hidden = None if self._hidden is None else self._forward.hidden
            self._host.show(g, tensors, scores, hidden)
        requests, rows = len(step.kv_len), len(scores)
        tokens, positions, parents = self._needed_nodes(g, tensors, rows)
        drawn = None
        if self._draft_probs is not None and self._is_drafting(g) and b.synthetic_rates is None:
            drawn = self._draft_probs(g.decodes)
        rules = b.staged_words.rules(requests)
        results = ops.accept_step(
            scores,
            tensors.cu_logits,
            positions,
            tokens,
            parents,
            b.staged_words.laws(requests),
            rules["acceptance"],
            posterior_threshold=rules["posterior_threshold"],
            posterior_alpha=rules["posterior_alpha"],
            acceptance_threshold=rules["acceptance_threshold"],
            synthetic_rates=b.synthetic_rates,
            draft_probs=drawn,
            results=b.accept_results(rows, requests),
            backend=self._backend,
            status=tensors.status,
        )
        self._commit(tensors, results.sampled, results, g.drafts)

    def _needed_nodes(
        self, g: StepSizes, tensors: StepTensors, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and parents of the first `rows` needed rows."""
        b, step = self.buffers, tensors.step
        tokens, positions, parents = step.tokens, step.positions, tensors.parents
        if g.prompts:
            assert step.logit_rows is not None
            needed = step.logit_rows[:rows]
            chosen = (b.choice_tokens[:rows], b.choice_positions[:rows], b.choice_parents[:rows])
            for values, to in zip((tokens, positions, parents), chosen, strict=True):
                torch.index_select(values, 0, needed, out=to)
            tokens, positions, parents = chosen
            # Counted from a prompt's first choice, which is a tree's root.
            staged = b.staged_part(b.staging.choice_parents, g.prompt_logits)
            parents[: g.prompt_logits].copy_(staged)
        return tokens[:rows], positions[:rows], parents[:rows]

    def _accept_synthetic(self, g: StepSizes, tensors: StepTensors) -> ops.AcceptResults:
        """As many drafts as the rates say; `sampled` holds the model's choices."""
        b, rows, requests = self.buffers, len(tensors.sampled), len(tensors.step.kv_len)
        assert b.synthetic_rates is not None
        tokens, positions, parents = self._needed_nodes(g, tensors, rows)
        return ops.synthetic_step(
            tensors.cu_logits,
            positions,
            tokens,
            parents,
            b.staged_words.laws(requests).seed,
            b.synthetic_rates,
            vocab_size=b.vocab_size,
            results=b.accept_results(rows, requests),
            backend=self._backend,
            status=tensors.status,
        )

    def _commit(
        self,
        tensors: StepTensors,
        sampled: Tensor,
        accepted: ops.AcceptResults | None,
        drafts: bool,
    ) -> None:
        b, step = self.buffers, tensors.step
        requests = len(step.kv_len)
        path, path_len = b.path[:requests], b.path_len[:requests]
        ops.commit_step(
            b.layout,
            b.slots,
            b.staged_part(b.staging.commit_ids, requests),
            tensors.cu_logits,
            sampled,
            results=b.results[:requests],
            path=path,
            path_len=path_len,
            accepted=accepted,
            backend=self._backend,
            status=tensors.status,
        )
        self._keep_hidden(tensors)
        moves = KvMoves.of_step(step, path, path_len)
        moves.run(self._pools, self._backend, tensors.status)
        if drafts:  # else every row is where it belongs
            self._forward.moved(moves)

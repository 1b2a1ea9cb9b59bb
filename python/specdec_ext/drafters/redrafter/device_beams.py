"""ReDrafter's beam search wholly on a device: nothing comes to the host, nothing is allocated.

Every request of a step has the same places for beams, and every depth the same rows; what a request
asked for is masked. A depth is a pass of the layers, the best scores of each row (torch.topk), and
``ops.grow_beams``; at the end ``ops.merge_beams`` makes the trees. All of it follows from the sizes
of a step, so it can be recorded in a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ... import _core, ops
from ..slot_drafter import DraftInputs
from .layers import RedrafterLayers
from .model import Redrafter

__all__ = ["DeviceBeams", "make_laws"]


def make_laws(shape: tuple[int, int, int], device: torch.device) -> ops.DraftProbs:
    """Room for what drafts were chosen from, [requests, drafts, scores of a row]; empty at first.
    The rule that asks for it holds every draft against its whole law: with replacement."""
    return ops.DraftProbs(
        torch.zeros(shape, device=device),
        torch.zeros(shape, dtype=torch.int32, device=device),
        None,
        torch.zeros(shape[0], dtype=torch.uint8, device=device),
        torch.ones(shape[0], dtype=torch.uint8, device=device),
    )


class DeviceBeams:
    """HostBeams' verbs on a device; trees are the host's, but for ties of rounded sums.

    max_requests       slots of the engine
    num_beams, length  of any one request, at most

    A step that may take n drafts of a request searches no more than n beams of n drafts.
    """

    def __init__(
        self,
        network: Redrafter,
        target: Any,
        *,
        vocab_size: int,
        max_requests: int,
        num_beams: int,
        length: int,
    ) -> None:
        layers = self._layers = RedrafterLayers(network, target)
        device, self._backend = layers.device, target.place.backend
        self._vocab_size = vocab_size
        self._num_beams, self._length = num_beams, length
        self._kept = min(_core.BEAM_SCORES, layers.num_scores)
        self._token_ids = None
        if network.token_ids is not None:
            self._token_ids = network.token_ids.to(device, torch.int32)
        beams, nodes = max_requests * num_beams, max_requests * num_beams * length
        rows = beams if length > 1 else max_requests  # of a pass
        self._rows = layers.make_rows(rows)

        def make(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # By slot: what its request asked for. 0: no drafts.
        self._beams_of, self._length_of = make(max_requests), make(max_requests)
        self._heat_of = torch.ones(max_requests, device=device)
        self._keeps_of = make(max_requests, dtype=torch.uint8)
        # By request of the step.
        self._ids, self._golden, self._lens = (make(max_requests) for _ in range(3))
        self._room, self._beams, self._lengths = (make(max_requests) for _ in range(3))
        self._reached, self._counts = make(max_requests), make(max_requests)
        self._heat = torch.ones(max_requests, device=device)
        self._context = make(max_requests, layers.hidden_size, dtype=layers.dtype)
        # By row.
        self._best = make(rows, self._kept, dtype=layers.score_dtype)
        self._best_floats = self._best
        if layers.score_dtype != torch.float32:
            self._best_floats = make(rows, self._kept, dtype=torch.float32)
        self._columns = make(rows, self._kept, dtype=torch.int64)
        self._next_rows, self._next_tokens = make(beams), make(beams)
        # By node.
        self._tokens, self._parents = make(nodes), make(nodes)
        self._log_probs = make(nodes, dtype=torch.float32)
        self._drafts, self._draft_parents = make(nodes), make(nodes)
        self._survival = make(nodes, dtype=torch.float32)
        self._sources, self._nodes = make(nodes), make(nodes, dtype=torch.int64)
        # What beams were extended by, [depth][request][beam]; and what the step's drafts were.
        self._row_probs = make(length, beams, self._kept, dtype=torch.float32)
        self._row_ids = make(length, beams, self._kept)
        self._laws = make_laws((max_requests, num_beams * length, self._kept), device)

    def scratch_bytes(self, max_requests: int) -> int:
        """Device memory that a step may take besides what exists from the start."""
        del max_requests
        return self._layers.choice_bytes(len(self._rows))

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        self._beams_of[slot].fill_(options.get("num_beams", 0))
        self._length_of[slot].fill_(options.get("length", 0))
        self._heat_of[slot].fill_(options.get("temperature", 1.0))
        self._keeps_of[slot].fill_(bool(options.get("keeps_laws")))

    @torch.inference_mode()
    def draft(self, inputs: DraftInputs) -> None:
        inputs = inputs.on_torch()  # on the CPU, for the adapter, they are arrays
        count = inputs.num_requests
        width = min(self._num_beams, inputs.max_width)
        length = min(self._length, inputs.max_width)
        self._begin(inputs)
        nodes = count * length * width
        beams = {
            "tokens": self._tokens[:nodes].view(count, length, width),
            "parents": self._parents[:nodes].view(count, length, width),
            "log_probs": self._log_probs[:nodes].view(count, length, width),
            "reached": self._reached[:count],
        }
        rows, tokens = self._rows.first(count), self._golden[:count]
        next_rows = self._next_rows[: count * width]
        next_tokens = self._next_tokens[: count * width]
        for depth in range(length):
            if depth:
                following = self._rows.first(count * width)
                torch.index_select(rows.state, 0, next_rows, out=following.old_state)
                if depth == 1:  # every beam of a request has its context
                    spread = following.context.view(count, width, -1)
                    spread.copy_(self._context[:count].view(count, 1, -1))
                rows, tokens = following, next_tokens
            best, columns = self._best_scores(self._layers.run(rows, tokens))
            if inputs.samples:
                self._keep_laws(depth, best, columns, count)
            ops.grow_beams(
                best,
                columns,
                **beams,
                depth=depth,
                num_scores=self._layers.num_scores,
                num_beams=self._beams[:count],
                lengths=self._lengths[:count],
                temperatures=self._heat[:count],
                next_rows=next_rows.view(count, width),
                next_tokens=next_tokens.view(count, width),
                token_ids=self._token_ids,
                backend=self._backend,
            )
        self._bring(inputs, beams, nodes)

    def draft_probs(self, num_requests: int) -> ops.DraftProbs:
        return self._laws.first(num_requests)

    def stats(self) -> dict[str, Any]:
        tensors = [*vars(self).values(), self._laws.probs, self._laws.vocab_ids]
        buffers = sum(t.numel() * t.element_size() for t in tensors if torch.is_tensor(t))
        rows = self._layers.row_bytes * len(self._rows)
        return {"memory_bytes": self._layers.weight_bytes + rows + buffers}

    def _begin(self, inputs: DraftInputs) -> None:
        """Set each request's starting state; a request that drafts nothing has length 0."""
        assert inputs.hidden is not None
        count = inputs.num_requests
        golden, room = self._golden[:count], self._room[:count]
        ops.recent_tokens(
            inputs.layout, inputs.slots, inputs.slot_ids, tokens=golden.view(count, 1),
            lens=self._lens[:count], room=room, max_drafts=inputs.max_drafts,
            backend=self._backend,
        )  # fmt: skip
        ids = torch.clamp(inputs.slot_ids, min=0, out=self._ids[:count])
        torch.index_select(self._beams_of, 0, ids, out=self._beams[:count])
        lengths = torch.index_select(self._length_of, 0, ids, out=self._lengths[:count])
        torch.minimum(lengths, room, out=lengths)
        torch.index_select(self._heat_of, 0, ids, out=self._heat[:count])
        context = torch.index_select(inputs.hidden, 0, ids, out=self._context[:count])
        rows = self._rows.first(count)
        rows.context.copy_(context)
        rows.old_state.zero_()

    def _best_scores(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores float32, columns int64) [R, k] of each row, best first."""
        count = len(scores)
        best, columns = self._best[:count], self._columns[:count]
        torch.topk(scores, self._kept, out=(best, columns))
        floats = self._best_floats[:count]
        return (best if floats.dtype == best.dtype else floats.copy_(best)), columns

    def _bring(
        self,
        inputs: DraftInputs,
        beams: Mapping[str, torch.Tensor],
        nodes: int,
    ) -> None:
        count = inputs.num_requests
        drafts, parents = (
            memory[:nodes].view(count, -1) for memory in (self._drafts, self._draft_parents)
        )
        sources, survival = (
            memory[:nodes].view(count, -1) for memory in (self._sources, self._survival)
        )
        counts = self._counts[:count]
        ops.merge_beams(
            **beams, draft_tokens=drafts, draft_parents=parents, draft_nodes=sources, counts=counts,
            backend=self._backend,
        )  # fmt: skip
        # Behind a tree any node will do: what it says is never read.
        node = self._nodes[:nodes].view(count, -1)
        torch.clamp(node.copy_(sources), 0, sources.shape[1] - 1, out=node)
        torch.gather(beams["log_probs"].view(count, -1), 1, node, out=survival).exp_()
        if inputs.samples:
            self._take_laws(inputs, beams["parents"], node)
        ops.propose_drafts(
            inputs.layout, inputs.slots, inputs.slot_ids, drafts, parents, survival=survival,
            counts=counts, vocab_size=self._vocab_size, backend=self._backend,
            status=inputs.status,
        )  # fmt: skip

    def _keep_laws(self, depth: int, best: torch.Tensor, columns: torch.Tensor, count: int) -> None:
        """What this depth's rows, [D * beams, k], extend their beams by."""
        rows = len(best)
        heat = self._heat[:count].repeat_interleave(rows // count)
        torch.softmax(best / heat[:, None], -1, out=self._row_probs[depth, :rows])
        ids = columns if self._token_ids is None else self._token_ids[columns]
        self._row_ids[depth, :rows].copy_(ids)

    def _take_laws(self, inputs: DraftInputs, parents: torch.Tensor, node: torch.Tensor) -> None:
        """Copies for each draft the law of its row; parents [D, length, width]."""
        count, _, width = parents.shape
        depth = node // width
        above = parents.view(count, -1).gather(1, node).clamp(min=0)
        request = torch.arange(count, device=node.device)[:, None]
        row = torch.where(depth == 0, request, request * width + above)
        source = (depth * self._row_probs.shape[1] + row).flatten()
        drafts = node.numel() // count
        laws, ids = self._laws, self._laws.vocab_ids
        assert ids is not None and laws.has_probs is not None
        for rows, to in ((self._row_probs, laws.probs), (self._row_ids, ids)):
            to[:count, :drafts].copy_(rows.flatten(0, 1)[source].view(count, drafts, -1))
        slots = self._ids[:count]
        torch.index_select(self._keeps_of, 0, slots, out=laws.has_probs[:count])

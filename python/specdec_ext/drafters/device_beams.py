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

from .. import ops
from .redrafter_layers import RedrafterLayers
from .redrafter_model import Redrafter
from .step_drafter import DraftInputs

__all__ = ["DeviceBeams"]

_KEPT = 50  # scores of a row that the search looks at (BeamSearch::kKept)


class DeviceBeams:
    """HostBeams' verbs on a device; trees are _core.BeamSearch's, but for ties of rounded sums.

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
        self._kept = min(_KEPT, layers.num_scores)
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
        # By request of the step.
        self._ids, self._golden, self._lens = (make(max_requests) for _ in range(3))
        self._room, self._beams, self._lengths = (make(max_requests) for _ in range(3))
        self._reached, self._counts = make(max_requests), make(max_requests)
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

    def scratch_bytes(self, max_requests: int) -> int:
        """Device memory that a step may take beside what is there from the start."""
        del max_requests
        return self._layers.choice_bytes(len(self._rows))

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        self._beams_of[slot].fill_(options.get("num_beams", 0))
        self._length_of[slot].fill_(options.get("length", 0))

    def draft(self, inputs: DraftInputs) -> None:
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
            ops.grow_beams(
                best,
                columns,
                **beams,
                depth=depth,
                num_scores=self._layers.num_scores,
                num_beams=self._beams[:count],
                lengths=self._lengths[:count],
                next_rows=next_rows.view(count, width),
                next_tokens=next_tokens.view(count, width),
                token_ids=self._token_ids,
                backend=self._backend,
            )
        self._bring(inputs, beams, self._drafts[:nodes], self._draft_parents[:nodes])

    def stats(self) -> dict[str, Any]:
        buffers = sum(
            t.numel() * t.element_size() for t in vars(self).values() if torch.is_tensor(t)
        )
        rows = self._layers.row_bytes * len(self._rows)
        return {"memory_bytes": self._layers.weight_bytes + rows + buffers}

    def _begin(self, inputs: DraftInputs) -> None:
        """What each request goes on from; who drafts nothing has length 0."""
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
        drafts: torch.Tensor,
        parents: torch.Tensor,
    ) -> None:
        count = inputs.num_requests
        drafts, parents = drafts.view(count, -1), parents.view(count, -1)
        counts = self._counts[:count]
        ops.merge_beams(
            **beams, draft_tokens=drafts, draft_parents=parents, counts=counts,
            backend=self._backend,
        )  # fmt: skip
        ops.bring_drafts(
            inputs.layout, inputs.slots, inputs.slot_ids, drafts, parents, counts=counts,
            vocab_size=self._vocab_size, backend=self._backend, status=inputs.status,
        )  # fmt: skip

"""The Llama shape and its relatives on a device: matrix products, and this package's kernels.

A pass is made from a DeviceStep and makes no decision that depends on what the device holds: no
copy to the host, no allocation that grows with the step, buffers at fixed addresses. So the host
may run ahead of it, and a pass can be captured as a CUDA graph.

Axis letters: R rows, L rows whose scores are needed, H query heads, G KV heads, K head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from ..errors import ModelError
from .device_blocks import Matrix
from .device_products import Products
from .device_ranks import DeviceRanks
from .device_scratch import Scratch
from .device_step import DeviceStep
from .device_weights import DeviceLayer, DeviceWeights
from .kv_storage import KvStorage, LayerPool
from .native_config import NativeShape
from .place import Place

if TYPE_CHECKING:
    from .._core import LinearSums

__all__ = ["EXACT_DRAFT_DEPTH", "DeviceDecoder"]

# In exact mode no draft lies deeper. Keys of that many places and a few more are added to a row one
# by one, whether they are drafts or not (docs/exactness.md): part of the arithmetic, and so the
# same for every method and without one.
EXACT_DRAFT_DEPTH = 24

# Scores of one product of the head: more rows are scored in several.
_SCORE_BYTES = 1 << 30


class DeviceDecoder:
    """Weights, buffers and the pass.

    max_rows  of one step; buffers are made for it, once
    exact     a row's bits do not depend on the step it is in: products by this package's kernel,
              attention that does not know which part of a row's path is a draft
    ranks     the model is spread over several, and the weights are this one's; rank 0 is asked, the
              others run the steps that it tells of
    """

    def __init__(
        self,
        shape: NativeShape,
        weights: DeviceWeights,
        place: Place,
        *,
        dtype: torch.dtype,
        max_rows: int,
        exact: bool = False,
        kv_storage: KvStorage | None = None,
        ranks: DeviceRanks | None = None,
    ) -> None:
        self.shape, self.weights, self.place, self.ranks = shape, weights, place, ranks
        self.dtype = dtype
        self.max_rows = max_rows
        self.num_scores = int(weights.head.shape[0])
        self._exact = exact
        # transformers rounds the root to the embedding's dtype; 0: the model does not scale.
        self._embedding_scale = (
            float(torch.tensor(shape.hidden_size**0.5).to(dtype)) if shape.scales_embedding else 0.0
        )
        # Query and K/V heads, and columns of the gated activation, that are computed here.
        self._heads, self._kv_heads = shape.num_heads, shape.num_kv_heads
        ffn, whole_q = shape.intermediate_size, shape.num_heads * shape.head_dim
        if ranks is not None:
            self._kv_heads = ranks.shard.num_kv_heads
            self._heads = shape.num_heads // shape.num_kv_heads * self._kv_heads
            ffn = ranks.ffn[ranks.rank + 1] - ranks.ffn[ranks.rank]
        q_width, kv_width = self._heads * shape.head_dim, self._kv_heads * shape.head_dim
        self._split = (q_width, q_width + kv_width, q_width + 2 * kv_width)

        def rows(width: int, count: int = max_rows) -> torch.Tensor:
            return torch.zeros(count, width, dtype=dtype, device=place.device)

        self._stream = rows(shape.hidden_size)  # the residual stream
        self._normed = rows(shape.hidden_size)
        self._qkv = rows(self._split[2])
        self._attended = rows(q_width)
        self._gate_up = rows(2 * ffn)
        self._gated = rows(ffn)
        self._added = rows(shape.hidden_size)  # what a block adds to the stream
        # The last layer continues with the needed rows alone.
        self._needed_stream, self._needed_attended = rows(shape.hidden_size), rows(q_width)
        scored = self.num_scores if ranks is None else shape.vocab_size
        per_row = scored * dtype.itemsize
        self._score_rows = max(1, min(max_rows, _SCORE_BYTES // per_row))
        if ranks is not None:
            self._score_rows = min(ranks.score_rows, self._score_rows)
            joined = max_rows if not ranks.sums else 0
            self._whole = {
                "heads": rows(whole_q, joined),
                "ffn": rows(shape.intermediate_size, joined),
            }
        self._scores = rows(self.num_scores, self._score_rows)
        self._ids = torch.zeros(max_rows, dtype=torch.int32, device=place.device)
        # Calls that differ in their layer alone share a plan in their scratch.
        self._scratch = {
            window: Scratch(place.device, "attention") for window in set(shape.sliding_window)
        }
        self._argmax_scratch = Scratch(place.device, "argmax")
        matrices = [m for one in weights.layers for m in (one.qkv, one.o, one.gate_up, one.down)]
        self._product = Products(
            (*matrices, weights.head, weights.own_head),
            place,
            dtype=dtype,
            max_rows=max_rows,
            exact=exact,
        )
        self._taps: tuple[int, ...] = ()
        self._tapped: torch.Tensor | None = None
        # By layer: K and V [P, G, S, K], and which of a step's tables names their pages.
        self._layer_pages: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        storage = kv_storage or KvStorage(str(dtype).removeprefix("torch."))
        self._kv_dtype: torch.dtype = getattr(torch, storage.dtype)
        # [layers, G] each, or nothing: both are 1.
        self._kv_scales = [
            torch.from_numpy(scales).to(place.device)
            for scales in (storage.k_scale, storage.v_scale)
            if scales is not None
        ]

    def together(self) -> contextlib.AbstractContextManager[None]:
        """A step's calls, if ranks run them together."""
        return contextlib.nullcontext() if self.ranks is None else self.ranks.together()

    def bind_cache(
        self, k_pages: torch.Tensor, v_pages: torch.Tensor, narrow: Sequence[LayerPool] = ()
    ) -> None:
        """K and V pages [layers, P, G, S, K] on the device, of layers that are in no pool of
        `narrow`; checked by the caller."""
        of_layer = {
            layer: (pool.k[i], pool.v[i], table)
            for table, pool in enumerate(narrow, start=1)
            for i, layer in enumerate(pool.layers)
        }
        others = iter(zip(k_pages, v_pages, strict=True))
        self._layer_pages = [
            of_layer[layer] if layer in of_layer else (*next(others), 0)
            for layer in range(self.shape.num_layers)
        ]

    def set_taps(self, layers: Sequence[int]) -> torch.Tensor:
        """From now on each pass leaves the stream as it enters these layers, ascending: a buffer
        [max_rows, len(layers) * hidden]. The number of layers stands for what leaves the last."""
        self._taps = tuple(layers)
        width = len(self._taps) * self.shape.hidden_size
        self._tapped = self._stream.new_zeros(self.max_rows, width)
        return self._tapped

    def _tap(self, layer: int, stream: torch.Tensor) -> None:
        width = stream.shape[1]
        for i, tap in enumerate(self._taps):
            if tap == layer:
                assert self._tapped is not None
                self._tapped[: len(stream), i * width : (i + 1) * width].copy_(stream)

    def scratch_bytes(self, max_kv_len: int) -> int:
        """Most scratch that attention takes: one piece for each kind of window."""
        problem = ops.AttentionProblem(
            num_heads=self._heads,
            num_kv_heads=self._kv_heads,
            head_dim=self.shape.head_dim,
            dtype=self.dtype,
            kv_dtype=self._kv_dtype,
            num_requests=self.max_rows,
            num_rows=self.max_rows,
            max_rows=self.max_rows,
            max_kv_len=max_kv_len,
        )
        limits = ops.device_limits(self.place.backend, self.place.device.index or 0)
        return len(self._scratch) * int(ops.plan_workspace(problem, limits)["total_bytes"])

    @torch.inference_mode()
    def forward_rows(
        self, step: DeviceStep, *, scores: bool = False, every_row: bool = False
    ) -> torch.Tensor:
        """Append the K/V of every row and return the head's input [L, hidden] of the needed rows.

        The result is a buffer: valid until the next call.
        scores     step_scores() is what follows, else greedy(): ranks compute what is asked for
        every_row  the last layer computes all rows, as rank 0's does for its taps
        """
        if not self._layer_pages:
            raise ModelError("forward before bind_cache(): the model has no K/V pages")
        count = step.num_rows
        if count > self.max_rows:
            raise ModelError(
                f"a step of {count} rows: this model was loaded for max_rows = {self.max_rows}"
            )
        shape, layers = self.shape, self.weights.layers
        stream, normed = self._stream[:count], self._normed[:count]
        taps_all = every_row or shape.num_layers in self._taps  # of every row, then
        ranks = self.ranks
        if ranks is not None and ranks.rank == 0:
            ranks.tell_step(step, scores=scores, every_row=taps_all)
        if ranks is None or ranks.rank == 0:
            torch.index_select(self.weights.embedding, 0, step.tokens, out=stream)
            if self._embedding_scale:
                stream.mul_(self._embedding_scale)
        if ranks is not None:
            ranks.link.spread(stream)
        self._norm(stream, layers[0].input_norm, normed)
        planned: set[int] = set()
        for index, layer in enumerate(layers):
            self._tap(index, stream)
            self._attend(step, index, layer, planned)
            attended = self._attended
            last = index + 1 == shape.num_layers
            if last and step.logit_rows is not None and not taps_all:
                needed = step.num_logit_rows
                if needed == 0:  # pieces of prompts: their K/V is all that is wanted
                    return self._normed[:0]
                stream = torch.index_select(
                    stream, 0, step.logit_rows, out=self._needed_stream[:needed]
                )
                torch.index_select(
                    attended[:count], 0, step.logit_rows, out=self._needed_attended[:needed]
                )
                attended, count = self._needed_attended, needed
                normed = self._normed[:count]
            following = self.weights.final_norm if last else layers[index + 1].input_norm
            added = self._project(
                attended[:count], "heads", layer.o, layer.o_bias, layer.attention_out_norm
            )
            self._norm(stream, layer.ffn_norm, normed, added, layer.attention_out_norm)
            added = self._feed_forward(layer, count)
            self._norm(stream, following, normed, added, layer.ffn_out_norm)
        self._tap(shape.num_layers, stream)
        if taps_all and step.logit_rows is not None:
            out = self._needed_stream[: step.num_logit_rows]
            return torch.index_select(normed, 0, step.logit_rows, out=out)
        return normed

    @torch.inference_mode()
    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """int32 [n]: the first largest score of each row of [n, hidden], -1 for a row with a NaN.

        A buffer: valid until the next call.
        """
        ids = self._ids[: len(hidden)]
        for first in range(0, len(hidden), self._score_rows):
            part = slice(first, min(first + self._score_rows, len(hidden)))
            scores = self._capped(self._score(hidden[part], self.weights.own_head))
            ops.argmax(
                scores,
                ids[part],
                backend=self.place.backend,
                workspace=self._argmax_scratch,
            )
            if self.ranks is not None:
                self.ranks.choose(scores, ids[part])
        return ids

    @torch.inference_mode()
    def step_scores(self, hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
        """scores() of a step's rows, of which each rank computes its part; on rank 0 into `out`."""
        if self.ranks is None:
            assert out is not None
            return self.scores(hidden, out)
        for first in range(0, len(hidden), self._score_rows):
            part = slice(first, min(first + self._score_rows, len(hidden)))
            own = self._score(hidden[part], self.weights.own_head)
            # Rank 0 has room for whole rows there, and `own` has been sent by then.
            whole = self._scores[: len(own)]
            self.ranks.join(own, self.ranks.vocab, whole, to_rank_0=True)
            if self.ranks.rank == 0:
                assert out is not None
                out[part].copy_(self._capped(whole), non_blocking=True)
        return out

    @torch.inference_mode()
    def scores(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """float32 [n, V] of rows [n, hidden] into `out`, on the same device or page-locked."""
        for first in range(0, len(hidden), self._score_rows):
            part = slice(first, min(first + self._score_rows, len(hidden)))
            scores = self._capped(self._score(hidden[part], self.weights.head))
            out[part].copy_(scores, non_blocking=True)
        return out

    def _score(self, hidden: torch.Tensor, head: Matrix) -> torch.Tensor:
        out = self._scores.view(-1)[: len(hidden) * head.shape[0]].view(len(hidden), head.shape[0])
        return self._product(hidden, head, None, out, self._cut(self.shape.vocab_size))

    def _capped(self, scores: torch.Tensor) -> torch.Tensor:
        cap = self.shape.final_softcap
        if not cap:
            return scores
        return scores.float().div_(cap).tanh_().mul_(cap)

    def _cut(self, columns: int) -> int:
        """Products.cut_columns of a rank's rows of a matrix of so many."""
        return 0 if self.ranks is None else columns

    def _project(
        self,
        own: torch.Tensor,
        share: str,
        weight: Matrix,
        bias: torch.Tensor | None,
        out_norm: torch.Tensor | None,
    ) -> torch.Tensor | LinearSums:
        """What a block adds to the stream [n, hidden], from what is computed here of its input:
        attention's output, or the gated activation (share: "heads", "ffn"). A buffer, or sums that
        the norm adds up: not if it has to look at them twice, for a norm of their own."""
        count, ranks = len(own), self.ranks
        out = self._added[:count]
        if ranks is None and out_norm is None:
            left = self._product.sums(own, weight, bias, out)
            return out if left is None else left
        if ranks is None:
            return self._product(own, weight, bias, out)
        if ranks.sums:
            self._product(own, weight, bias, out)
            ranks.link.add(out)
            return out
        bounds = ranks.heads if share == "heads" else ranks.ffn
        whole = ranks.join(own, bounds, self._whole[share][:count])
        part = ranks.own(ranks.hidden, count)
        self._product(whole, weight, bias, part, self._cut(self.shape.hidden_size))
        return ranks.join(part, ranks.hidden, out)

    def _attend(self, step: DeviceStep, index: int, layer: DeviceLayer, planned: set[int]) -> None:
        """The layer's attention into its buffer; K and V of the rows into the pages."""
        shape, count = self.shape, step.num_rows
        normed, qkv = self._normed[:count], self._qkv[:count]
        rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        sums = None
        if self.ranks is None:
            sums = self._product.sums(normed, layer.qkv, layer.qkv_bias, qkv)
        else:
            self._product(normed, layer.qkv, layer.qkv_bias, qkv, self._cut(rows))
        q_end, k_end, v_end = self._split
        q = qkv[:, :q_end].view(count, self._heads, shape.head_dim)
        k = qkv[:, q_end:k_end].view(count, self._kv_heads, shape.head_dim)
        v = qkv[:, k_end:v_end].view(count, self._kv_heads, shape.head_dim)
        out = self._attended[:count].view(count, self._heads, shape.head_dim)
        table = shape.rope_index[index]
        cos, sin = self.weights.rope[table] if table >= 0 else (None, None)
        where: dict[str, Any] = {
            "max_rows": step.max_rows,
            "max_kv_len": step.max_kv_len,
            "backend": self.place.backend,
            "status": step.status,
        }
        for name, scales in zip(("k_scale", "v_scale"), self._kv_scales, strict=False):
            where[name] = scales[index]
        k_pages, v_pages, of_pool = self._layer_pages[index]
        pages = (k_pages, v_pages)
        geometry = (step.tables[of_pool], step.kv_len, step.cu_rows)
        ops.rope_append_kv(
            q,
            k,
            v,
            *pages,
            *geometry,
            step.positions,
            q_out=q,
            cos=cos,
            sin=sin,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=shape.rms_norm_eps,
            norm_plus_one=shape.norm_offset == 1.0,
            sums=sums,
            **where,
        )
        window = shape.sliding_window[index]
        ops.spec_attention(
            q,
            *pages,
            *geometry,
            out=out,
            scale=shape.attention_scale,
            mask=step.mask,
            is_tree=step.is_tree,
            sliding_window=window,
            sink_tokens=shape.sink_tokens,
            softcap=shape.attention_softcap,
            exact=self._exact,
            max_depth=EXACT_DRAFT_DEPTH,
            reuse_plan=window in planned,
            workspace=self._scratch[window],
            **where,
        )
        planned.add(window)

    def _feed_forward(self, layer: DeviceLayer, count: int) -> torch.Tensor | LinearSums:
        """What the block adds, from the normed rows, as _project gives it."""
        both, gated = self._gate_up[:count], self._gated[:count]
        if self.ranks is not None and not self.ranks.sums:
            gated = self.ranks.own(self.ranks.ffn, count)  # from where it is sent
        cut = self._cut(2 * self.shape.intermediate_size)
        self._product(self._normed[:count], layer.gate_up, layer.gate_up_bias, both, cut)
        ops.gated_activation(
            both,
            out=gated,
            activation=self.shape.activation,
            backend=self.place.backend,
        )
        return self._project(gated, "ffn", layer.down, layer.down_bias, layer.ffn_out_norm)

    def _norm(
        self,
        stream: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        added: torch.Tensor | LinearSums | None = None,
        added_weight: torch.Tensor | None = None,
    ) -> None:
        """stream += added, normed first where the model does that; out = norm(stream)."""
        whole = added if isinstance(added, torch.Tensor) else None
        sums = None if isinstance(added, torch.Tensor) else added
        ops.rms_norm(
            stream,
            weight,
            out=out,
            added=whole,
            added_weight=added_weight,
            sums=sums,
            eps=self.shape.rms_norm_eps,
            norm_plus_one=self.shape.norm_offset == 1.0,
            backend=self.place.backend,
        )

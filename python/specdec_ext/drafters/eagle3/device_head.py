"""An EAGLE-3 head on the target's device: its layer on this package's kernels.

The rows are those of eagle_head.h: row p reads token p and the feature of position p - 1. Keys
begin at place 1, since no feature stands in front of place 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import ops
from ...models.device_decoder import EXACT_DRAFT_DEPTH
from ...models.device_products import Products
from ...models.device_scratch import Scratch
from ...models.host_arrays import HostArray, as_torch, converted
from ...models.rope import rope_tables
from ..draft_target.device_forward import ChainRows
from .checkpoint import Eagle3Weights

if TYPE_CHECKING:
    from torch import Tensor

    from ..._core import LinearSums
    from ...models.device_model import DeviceModel
    from ...models.device_step import DeviceStep

__all__ = ["DeviceHead"]

_ATTENTION = "midlayer.self_attn."


@dataclass(frozen=True)
class _Layer:
    """Matrices [outputs, inputs] and weights of norms, of the target's dtype."""

    fc: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    gate_up: Tensor
    down: Tensor
    head: Tensor
    input_norm: Tensor
    feature_norm: Tensor
    ffn_norm: Tensor
    final_norm: Tensor

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        return self.fc, self.qkv, self.o, self.gate_up, self.down, self.head


class DeviceHead:
    """Runs what DraftForward runs for a draft model: rows with sources.

    model         the target, whose dtype and embedding the head has
    max_rows      of a pass, and of a step of the target
    max_requests  of a pass
    max_scores    rows of a pass whose scores are needed
    window        tokens that its attention sees; 0: all

    num_scores    columns of its scores
    """

    takes_sources = True

    def __init__(
        self,
        weights: Eagle3Weights,
        model: DeviceModel,
        *,
        max_rows: int,
        max_requests: int,
        max_scores: int,
        window: int,
    ) -> None:
        shape = self.shape = weights.shape
        self._model, self._place, self._window = model, model.place, window
        dtype = model.kv_dtype
        self.num_scores = shape.draft_vocab_size
        self.num_passes = self.num_rows = 0
        device = self._place.device
        self._layer = _load(weights, dtype, device)
        self._embedding: Tensor | None = None
        if weights.embedding is not None:
            self._embedding = _on_device(weights.embedding, dtype, device)
        # A row's angle is that of its feature's position.
        tables = rope_tables(shape.rope, min(shape.max_position, model.max_position))
        self._cos, self._sin = (
            torch.from_numpy(np.concatenate([table[:1], table])).to(device) for table in tables
        )
        exact = model.numerics == "exact"
        self._exact = exact
        self._product = Products(
            self._layer.matrices, self._place, dtype=dtype, max_rows=max_rows, exact=exact
        )
        q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self._split = (q_width, q_width + kv_width, q_width + 2 * kv_width)

        def rows(width: int, count: int = max_rows) -> Tensor:
            return torch.zeros(count, width, dtype=dtype, device=device)

        hidden = shape.hidden_size
        self._embedded, self._feature, self._normed, self._added = (rows(hidden) for _ in range(4))
        self._result = rows(hidden)  # what the rows of the last pass give those that follow them
        self._pair, self._qkv = rows(2 * hidden), rows(self._split[2])
        self._attended = rows(q_width)
        self._gate_up, self._gated = (
            rows(2 * shape.intermediate_size), rows(shape.intermediate_size),
        )  # fmt: skip
        self._needed, self._raw = rows(hidden, max_scores), rows(self.num_scores, max_scores)
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._row = torch.arange(max_rows, **ints)
        self._mask, self._ids = torch.zeros(max_rows, 4, **ints), torch.zeros(max_scores, **ints)
        self._status = torch.zeros(max_requests, **ints)
        self._is_tree = torch.zeros(max_requests, dtype=torch.uint8, device=device)
        self._scores = torch.zeros(max_scores, self.num_scores, device=device)
        self._half = shape.feature_heads()
        self._nothing = rows(kv_width).view(max_rows, shape.num_kv_heads, shape.head_dim)
        self._attention_scratch = Scratch(device, "attention of the head")
        self._argmax_scratch = Scratch(device, "argmax of the head")
        self._pages: tuple[Tensor, Tensor] | None = None
        self._features: tuple[Tensor, Tensor] | None = None

    @property
    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in vars(self._layer).values() if t is not None)

    @property
    def memory_bytes(self) -> int:
        """What buffers and weights take."""
        kept = [t for t in vars(self).values() if torch.is_tensor(t)]
        return self.weight_bytes + sum(t.nbytes for t in kept)

    def bind_cache(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """The head's pages [1, P, G, S, K]."""
        self._pages = (k_pages, v_pages)

    def bind_features(self, first: Tensor, second: Tensor) -> None:
        """Halves of features by the same pages, [1, P, heads, S, head_dim] of feature_heads()."""
        self._features = (first, second)

    def keep(self, step: DeviceStep, taps: Tensor) -> None:
        """Behind the target's pass: features of its rows, taps [R, 3 * target_hidden_size], at
        the places of their K/V. Until the head reads what follows them its own K/V there is zero:
        the page may become another request's, which must not see what a third one left."""
        count = step.num_rows
        fused = self._product(taps[:count], self._layer.fc, None, self._feature[:count])
        heads = (count, *self._half)
        assert self._features is not None and self._pages is not None
        first, second = (half.view(heads) for half in fused.chunk(2, dim=1))
        nothing = self._nothing[:count]
        self._append(first, second, self._features, step)
        self._append(nothing, nothing, self._pages, step)

    def _append(self, k: Tensor, v: Tensor, pages: tuple[Tensor, Tensor], step: DeviceStep) -> None:
        ops.append_kv(
            k,
            v,
            pages[0][0],
            pages[1][0],
            step.page_table,
            step.kv_len,
            step.cu_rows,
            max_rows=step.max_rows,
            max_kv_len=step.max_kv_len,
            backend=self._place.backend,
            status=step.status,
        )

    def __call__(
        self,
        rows: ChainRows,
        page_table: Tensor,
        logit_rows: Tensor | None,
        *,
        needs_scores: bool,
        max_kv_len: int,
        sources: Tensor | None = None,
    ) -> Tensor:
        """See DraftForward.

        sources  int32 [R] the row of the call before whose result is the row's feature; -1: that
                 of the position in front of it, from the pages; None: -1 for all
        """
        shape, layer, count = self.shape, self._layer, rows.tokens.shape[0]
        self.num_passes += 1
        self.num_rows += count
        feature = self._gather(rows, page_table, sources)
        embedded, normed = self._embedded[:count], self._normed[:count]
        if self._embedding is None:
            self._model.embed_rows(rows.tokens, embedded)
        else:
            torch.index_select(self._embedding, 0, rows.tokens, out=embedded)
        pair, added = self._pair[:count], self._added[:count]
        left, right = pair.chunk(2, dim=1)
        self._norm(embedded, layer.input_norm, left)
        self._norm(feature, layer.feature_norm, right)
        stream = self._result[:count].copy_(right if shape.norm_before_residual else feature)
        self._attend(rows, page_table, max_kv_len)
        sums = self._product.sums(self._attended[:count], layer.o, layer.o_bias, added)
        self._norm(stream, layer.ffn_norm, normed, added, sums)
        both, gated = self._gate_up[:count], self._gated[:count]
        self._product(normed, layer.gate_up, None, both)
        ops.gated_activation(both, out=gated, activation="silu", backend=self._place.backend)
        sums = self._product.sums(gated, layer.down, None, added)
        self._norm(stream, layer.final_norm, normed, added, sums)
        if logit_rows is not None:
            out = self._needed[: logit_rows.shape[0]]
            normed = torch.index_select(normed, 0, logit_rows, out=out)
        scored = len(normed)
        raw = self._product(normed, layer.head, None, self._raw[:scored])
        if not needs_scores:
            return ops.argmax(
                raw, self._ids[:scored], backend=self._place.backend, workspace=self._argmax_scratch
            )
        return self._scores[:scored].copy_(raw)

    def _gather(self, rows: ChainRows, page_table: Tensor, sources: Tensor | None) -> Tensor:
        """The rows' features, in their buffer."""
        assert self._features is not None
        count = rows.tokens.shape[0]
        k, v = self._features
        num_pages, page_size = k.shape[1], k.shape[3]
        request = torch.searchsorted(rows.cu_rows[1:], self._row[:count], right=True)
        request.clamp_max_(page_table.shape[0] - 1)  # of padding any
        position = (rows.positions - 1).clamp_min(0)
        index = torch.div(position, page_size, rounding_mode="floor").clamp_max(
            page_table.shape[1] - 1
        )
        page = page_table[request, index.long()].clamp(0, num_pages - 1).long()
        offset = position.remainder(page_size).long()
        feature, half = self._feature[:count], self.shape.hidden_size // 2
        for part, pages in ((feature[:, :half], k), (feature[:, half:], v)):
            part.copy_(pages[0][page, :, offset].reshape(count, half))
        if sources is not None:
            before = self._result.index_select(0, sources.clamp_min(0))
            feature.copy_(torch.where((sources >= 0)[:, None], before, feature))
        return feature

    def _attend(self, rows: ChainRows, page_table: Tensor, max_kv_len: int) -> None:
        """Attention of `_pair` into its buffer; K and V into the pages."""
        shape, layer, count = self.shape, self._layer, rows.tokens.shape[0]
        requests = rows.kv_len.shape[0]
        assert self._pages is not None
        pages = self._pages[0][0], self._pages[1][0]
        qkv = self._qkv[:count]
        sums = self._product.sums(self._pair[:count], layer.qkv, layer.qkv_bias, qkv)
        q_end, k_end, v_end = self._split
        q = qkv[:, :q_end].view(count, shape.num_heads, shape.head_dim)
        k = qkv[:, q_end:k_end].view(count, shape.num_kv_heads, shape.head_dim)
        v = qkv[:, k_end:v_end].view(count, shape.num_kv_heads, shape.head_dim)
        geometry = (page_table, rows.kv_len, rows.cu_rows)
        where: dict[str, Any] = {
            "max_rows": rows.max_rows,
            "max_kv_len": max_kv_len,
            "backend": self._place.backend,
            "status": self._status[:requests],
        }
        ops.rope_append_kv(
            q, k, v, *pages, *geometry, rows.positions,
            q_out=q, cos=self._cos, sin=self._sin, sums=sums, **where,
        )  # fmt: skip
        ops.spec_attention(
            q,
            *pages,
            *geometry,
            out=self._attended[:count].view(q.shape),
            scale=shape.head_dim**-0.5,
            mask=self._mask[:count] if rows.mask is None else rows.mask,
            is_tree=self._is_tree[:requests] if rows.is_tree is None else rows.is_tree,
            sliding_window=self._window,
            first_key=1,
            exact=self._exact,
            max_depth=EXACT_DRAFT_DEPTH,
            workspace=self._attention_scratch,
            **where,
        )

    def _norm(
        self,
        stream: Tensor,
        weight: Tensor,
        out: Tensor,
        added: Tensor | None = None,
        sums: LinearSums | None = None,
    ) -> None:
        """stream += added, or these sums in its place; out = norm(stream)."""
        ops.rms_norm(
            stream, weight, out=out, added=added if sums is None else None, sums=sums,
            eps=self.shape.rms_norm_eps, backend=self._place.backend,
        )  # fmt: skip


def _on_device(values: HostArray, dtype: torch.dtype, device: torch.device) -> Tensor:
    return as_torch(converted(values, "float32")).to(device, dtype)


def _load(weights: Eagle3Weights, dtype: torch.dtype, device: torch.device) -> _Layer:
    """Matrices that read the same input are one, row under row."""
    tensors = weights.tensors

    def joined(kind: str, *names: str) -> Tensor:
        return torch.cat([_on_device(tensors[f"{name}.{kind}"], dtype, device) for name in names])

    def bias(*names: str) -> Tensor | None:
        return joined("bias", *names) if weights.shape.attention_bias else None

    queries = tuple(f"{_ATTENTION}{name}_proj" for name in "qkv")
    out, layer = f"{_ATTENTION}o_proj", "midlayer."
    return _Layer(
        fc=joined("weight", "fc"),
        qkv=joined("weight", *queries),
        qkv_bias=bias(*queries),
        o=joined("weight", out),
        o_bias=bias(out),
        gate_up=joined("weight", layer + "mlp.gate_proj", layer + "mlp.up_proj"),
        down=joined("weight", layer + "mlp.down_proj"),
        head=joined("weight", "lm_head"),
        input_norm=joined("weight", layer + "input_layernorm"),
        feature_norm=joined("weight", layer + "hidden_norm"),
        ffn_norm=joined("weight", layer + "post_attention_layernorm"),
        final_norm=joined("weight", "norm"),
    )

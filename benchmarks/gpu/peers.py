"""Other people's attention on the same inputs: what ours is compared with, in the same run.

Every peer is a program over the sets of a cell. A peer that is not installed, or does not do what
the cell asks, raises Absent; the result file says so. Nothing here is needed by the package.
"""

from __future__ import annotations

import abc
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import cells
from benchmarks.gpu.problem import Problem, dense, visible

WORKSPACE_BYTES = 512 << 20


class Absent(RuntimeError):
    """Why a peer takes no part in a cell."""


class Peer(abc.ABC):
    """A program over sets; `plan_us` is host planning per step that the program does not repeat."""

    plan_us: float = 0.0

    def __init__(self, sets: list[Problem]) -> None:
        self.sets = sets
        self.cell = sets[0].cell

    @abc.abstractmethod
    def __call__(self, index: int) -> Tensor:
        """Runs set `index` and returns the output, [R, H, K]."""


def _flashinfer(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Absent(f"not installed: {error}") from error


def _workspace() -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


class Xqa(Peer):
    """FlashInfer's XQA: packed mask over the drafts, the multi-query decode kernel."""

    def __init__(self, sets: list[Problem]) -> None:
        super().__init__(sets)
        if self.cell.is_prompt:
            raise Absent("a decode kernel")
        self._decode = _flashinfer("flashinfer.decode")
        self._work = _workspace()
        cell = self.cell
        self._lengths = torch.full(
            (cell.requests,), cell.context + cell.rows, dtype=torch.int32, device="cuda"
        ).view(torch.uint32)
        self._masks = [
            None
            if s.mask is None
            else s.mask.view(cell.requests, cell.rows, -1).contiguous().view(torch.uint16)
            for s in sets
        ]

    def __call__(self, index: int) -> Tensor:
        s, cell = self.sets[index], self.cell
        out = s.out if cell.rows == 1 else s.out.view(cell.requests, cell.rows, *s.out.shape[1:])
        self._decode.xqa_batch_decode_with_kv_cache(
            s.q,
            (s.k_pages, s.v_pages),
            self._work,
            s.page_table,
            self._lengths,
            cell.context + cell.rows,
            bmm1_scale=s.scale,
            bmm2_scale=1.0,
            out=out,
            kv_layout="HND",
            q_len_per_req=cell.rows,
            mask=self._masks[index],
        )
        return s.out


class _Paged(Peer):
    """FlashInfer's paged prefill wrappers, one plan per set made beforehand and timed."""

    def _plan(
        self,
        index: int,
        backend: str,
        first_page: int,
        tokens: int,
        causal: bool,
        mask: Tensor | None,
    ) -> Any:
        """A wrapper over `tokens` tokens of every request that begin at page `first_page`."""
        prefill = _flashinfer("flashinfer.prefill")
        s, cell = self.sets[index], self.cell
        wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(self._work, "HND", backend=backend)
        pages = -(-tokens // cell.page_size)
        counts = torch.arange(cell.requests + 1, dtype=torch.int32)
        last = tokens - (pages - 1) * cell.page_size
        started = time.perf_counter()
        wrapper.plan(
            counts * cell.rows,
            counts * pages,
            s.page_table[:, first_page : first_page + pages].reshape(-1).contiguous(),
            torch.full((cell.requests,), last, dtype=torch.int32),
            cell.num_heads,
            cell.num_kv_heads,
            cell.head_dim,
            cell.page_size,
            custom_mask=mask,
            causal=causal,
            sm_scale=s.scale,
            q_data_type=s.q.dtype,
            kv_data_type=s.k_pages.dtype,
        )
        torch.cuda.synchronize()
        self.plan_us += (time.perf_counter() - started) * 1e6 / len(self.sets)
        return wrapper

    def _draft_mask(self) -> Tensor:
        """[B * M * M] bool on the device."""
        return self.sets[0].bits.repeat(self.cell.requests, 1, 1).flatten().cuda()

    _work: Tensor


class Fa2(_Paged):
    """FlashInfer's FA2 with a bit for every (row, key) of the whole context."""

    def __init__(self, sets: list[Problem]) -> None:
        super().__init__(sets)
        cell = self.cell
        self._work = _workspace()
        total = cell.context + cell.rows
        mask = None
        if not cell.is_prompt and cell.rows > 1:
            one = torch.ones(cell.rows, total, dtype=torch.bool)
            one[:, cell.context :] = sets[0].bits
            mask = one.repeat(cell.requests, 1, 1).flatten().cuda()
        self._wrappers = [
            self._plan(i, "fa2", 0, total, mask is None, mask) for i in range(len(sets))
        ]

    def __call__(self, index: int) -> Tensor:
        s = self.sets[index]
        self._wrappers[index].run(s.q, (s.k_pages, s.v_pages), out=s.out)
        return s.out


class Fa3(_Paged):
    """FlashInfer's FA3 alone: causal, so prompts and single rows."""

    def __init__(self, sets: list[Problem]) -> None:
        super().__init__(sets)
        cell = self.cell
        if sets[0].mask is not None:
            raise Absent("takes no tree mask")
        self._work = _workspace()
        total = cell.context + cell.rows
        self._wrappers = [self._plan(i, "fa3", 0, total, True, None) for i in range(len(sets))]

    def __call__(self, index: int) -> Tensor:
        s = self.sets[index]
        self._wrappers[index].run(s.q, (s.k_pages, s.v_pages), out=s.out)
        return s.out


class Composite(_Paged):
    """The strongest composite: FA3 over the prefix, FA2 over the drafts, their states merged."""

    def __init__(self, sets: list[Problem]) -> None:
        super().__init__(sets)
        cell = self.cell
        if sets[0].mask is None:
            raise Absent("no tree to mask")
        if cell.context % cell.page_size:
            raise Absent("the drafts do not begin on a page")
        if cell.kv_dtype != cell.dtype:
            raise Absent("FA3 multiplies one type only")
        self._cascade = _flashinfer("flashinfer.cascade")
        self._work = _workspace()
        first = cell.context // cell.page_size
        self._prefix = [
            self._plan(i, "fa3", 0, cell.context, False, None) for i in range(len(sets))
        ]
        self._draft_work, self._work = self._work, _workspace()
        self._drafts = [
            self._plan(i, "fa2", first, cell.rows, False, self._draft_mask())
            for i in range(len(sets))
        ]

    def __call__(self, index: int) -> Tensor:
        s = self.sets[index]
        pages = (s.k_pages, s.v_pages)
        o1, l1 = self._prefix[index].run(s.q, pages, return_lse=True)
        o2, l2 = self._drafts[index].run(s.q, pages, return_lse=True)
        out: Tensor = self._cascade.merge_state(o1, l1, o2, l2)[0]
        return out


class Sdpa(Peer):
    """torch's scaled_dot_product_attention on K/V that was gathered beforehand."""

    gather = False

    def __init__(self, sets: list[Problem]) -> None:
        super().__init__(sets)
        cell = self.cell
        if cell.kv_dtype != cell.dtype:
            raise Absent("one type only")
        rows = torch.arange(cell.rows, device=sets[0].q.device)
        self._mask = visible(sets[0], rows)[None, None]
        self._kv = [self._dense(i) for i in range(len(sets))]

    def _dense(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a set, [B, KV heads, tokens, head dim]."""
        parts = [dense(self.sets[index], b) for b in range(self.cell.requests)]
        k, v = (torch.stack([part[i] for part in parts]).transpose(1, 2) for i in (0, 1))
        return k.contiguous(), v.contiguous()

    def __call__(self, index: int) -> Tensor:
        s, cell = self.sets[index], self.cell
        k, v = self._dense(index) if self.gather else self._kv[index]
        q = s.q.view(cell.requests, cell.rows, cell.num_heads, -1).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self._mask, scale=s.scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(s.out.shape)


class SdpaGather(Sdpa):
    """The same with the gather that a paged cache costs it."""

    gather = True


class Flex(Sdpa):
    """FlexAttention, compiled, on K/V that was gathered beforehand."""

    def __init__(self, sets: list[Problem]) -> None:
        super().__init__(sets)
        if sets[0].q.device.type != "cuda":
            raise Absent("compiled for CUDA only")
        from torch.nn.attention import flex_attention as flex

        cell = self.cell
        bits = sets[0].bits.cuda()
        context = cell.context

        def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            if cell.is_prompt:
                return key <= row
            draft = torch.clamp(key - context, min=0)
            return (key < context) | bits[row, draft]

        total = context + cell.rows
        self._block_mask = flex.create_block_mask(sees, None, None, cell.rows, total, device="cuda")
        self._attend: Callable[..., Any] = torch.compile(flex.flex_attention, dynamic=False)

    def __call__(self, index: int) -> Tensor:
        s, cell = self.sets[index], self.cell
        k, v = self._kv[index]
        q = s.q.view(cell.requests, cell.rows, cell.num_heads, -1).transpose(1, 2)
        out: Tensor = self._attend(
            q, k, v, block_mask=self._block_mask, scale=s.scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(s.out.shape)


FLASHINFER: dict[str, type[Peer]] = {
    "flashinfer-xqa": Xqa,
    "flashinfer-fa2": Fa2,
    "flashinfer-fa3": Fa3,
    "flashinfer-fa3+fa2": Composite,
}
TORCH: dict[str, type[Peer]] = {
    "torch-sdpa": Sdpa,
    "torch-sdpa-gather": SdpaGather,
    "torch-flex": Flex,
}


def peers_of(cell: cells.AttentionCell) -> Iterator[tuple[str, type[Peer]]]:
    """The peers that a cell is compared with, by name."""
    if cell.name in cells.PEER_CELLS or cell.is_prompt:
        yield from FLASHINFER.items()
    if cell.name in cells.TORCH_PEER_CELLS:
        yield from TORCH.items()

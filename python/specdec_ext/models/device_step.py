"""The geometry of one step where a device's kernels read it, and how it gets there from the host.

`DeviceStep` is what a device model's pass is made from. Here a host plan becomes one
(`PlanStaging`); arrays that kernels have built on the device (`ops.build_step`, `ops.draft_step`)
serve as well.

Axis letters: B requests, R rows, L rows whose scores are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..config.engine import pages_for

__all__ = ["DeviceStep", "PlanStaging", "Upload"]


@dataclass(frozen=True)
class DeviceStep:
    """One step. Tensors lie on the model's device, contiguous; nothing of them is read on the host.

    tokens      [R] int32 token ids
    positions   [R] int32 absolute positions
    mask        [R, 4] int32, the bits of a row's ancestors (uint32 words), least significant first
    cu_rows     [B + 1] int32 first row of each request
    kv_len      [B] int32 tokens in the K/V pages before the step
    is_tree     [B] uint8, 0: the request's rows are a chain and their mask is not read
    page_table  [B, pages] int32 page ids in token order
    narrow_tables  the same of each pool of a narrow window (kv_storage.LayerPool)
    logit_rows  [L] int32 rows whose scores are needed, ascending; None: all of them
    status      [B] int32 StatusFlag bits that kernels OR in; None: not wanted
    max_rows    most rows of one request, an upper bound known to the host
    max_kv_len  most kv_len + rows of one request, an upper bound known to the host

    Bounds size grids and scratch, never results. Rows from cu_rows[B] on are padding: they have
    valid token ids and no request, and are computed for nobody.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    cu_rows: torch.Tensor
    kv_len: torch.Tensor
    is_tree: torch.Tensor
    page_table: torch.Tensor
    logit_rows: torch.Tensor | None
    status: torch.Tensor | None
    max_rows: int
    max_kv_len: int
    narrow_tables: tuple[torch.Tensor, ...] = ()

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """The table of every pool of pages."""
        return (self.page_table, *self.narrow_tables)

    @property
    def num_rows(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_logit_rows(self) -> int:
        rows = self.tokens if self.logit_rows is None else self.logit_rows
        return int(rows.shape[0])


class Upload:
    """Host arrays to a device in one copy through page-locked memory.

    The memory is kept and only ever grown. What send() returned is valid until the next send().
    """

    _ALIGN = 16  # bytes: every array begins at a multiple of it

    def __init__(self, device: torch.device, num_bytes: int = 1 << 16) -> None:
        self._device = device
        self._sent: Any = None  # event of the last copy
        if device.type == "cuda":
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._make(num_bytes)

    def send(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        """The arrays, of int32, uint32 or uint8, as tensors int32 or uint8 of the same shapes.

        Copied on the current stream; the arrays may be changed as soon as this returns.
        """
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // self._ALIGN) * self._ALIGN
        if end > self._host.numel():
            self._make(2 * end)
        elif self._sent is not None:
            self._sent.synchronize()  # the copy before this one may still read the memory
        tensors = []
        for offset, array in zip(offsets, arrays, strict=True):
            place = slice(offset, offset + array.nbytes)
            self._bytes[place].view(array.dtype).reshape(array.shape)[...] = array
            dtype = torch.uint8 if array.dtype == np.uint8 else torch.int32
            tensors.append(self._there[place].view(dtype).view(array.shape))
        self._there[:end].copy_(self._host[:end], non_blocking=True)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self._device))
        return tensors

    def _make(self, num_bytes: int) -> None:
        pinned = self._device.type == "cuda"
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._bytes: np.ndarray[Any, Any] = self._host.numpy()
        self._there = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)


class PlanStaging:
    """Turns host plans (_core.StepPlan) into DeviceSteps, with one copy each."""

    def __init__(self, device: torch.device) -> None:
        self._upload = Upload(device)

    def stage(self, plan: Any, page_size: int, narrow: Sequence[int] = ()) -> DeviceStep:
        """The plan on the device. Valid until the next call.

        narrow  pages of each pool of a narrow window. A host plan has no tables of those: its pages
                are numbered round and round, which serves whoever wants a pass's time
        """
        rows = np.diff(plan.cu_rows)
        max_kv_len = int((plan.kv_len + rows).max(initial=0))
        pages = max(1, pages_for(max_kv_len, page_size))
        every_row = plan.num_logit_rows == plan.num_rows
        arrays = [
            plan.tokens,
            plan.positions,
            plan.mask,
            plan.cu_rows,
            plan.kv_len,
            plan.is_tree,
            plan.page_table[:, :pages],
            np.zeros(plan.num_requests, dtype=np.int32),
        ]
        if not every_row:
            arrays.append(plan.logit_rows)
        tokens, positions, mask, cu_rows, kv_len, is_tree, page_table, status, *rest = (
            self._upload.send(arrays)
        )
        return DeviceStep(
            tokens=tokens,
            positions=positions,
            mask=mask,
            cu_rows=cu_rows,
            kv_len=kv_len,
            is_tree=is_tree,
            page_table=page_table,
            logit_rows=rest[0] if rest else None,
            status=status,
            max_rows=int(rows.max(initial=0)),
            max_kv_len=max_kv_len,
            narrow_tables=tuple(page_table.remainder(count) for count in narrow),
        )

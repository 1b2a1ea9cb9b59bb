"""K/V of accepted drafts that is moved to its place, in every pool of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import ops
from .device_step import DeviceStep

__all__ = ["KvMoves"]

Pool = tuple[torch.Tensor, torch.Tensor, int]


@dataclass(frozen=True)
class KvMoves:
    """What ops.compact_kv reads, on the device.

    tables      [B, pages] int32 of every pool of pages
    kv_len      [B] int32 tokens in the pages before the step whose rows are moved
    cu_rows     [B + 1] int32 first row of each request
    path        [B, MAX_STEP_TOKENS] int32 rows that stay, path_len [B] int32 of them
    num_rows, max_kv_len  upper bounds that the host knows
    """

    tables: tuple[torch.Tensor, ...]
    kv_len: torch.Tensor
    cu_rows: torch.Tensor
    path: torch.Tensor
    path_len: torch.Tensor
    num_rows: int
    max_kv_len: int

    @classmethod
    def of_step(cls, step: DeviceStep, path: torch.Tensor, path_len: torch.Tensor) -> KvMoves:
        """What the step's own rows leave."""
        return cls(
            step.tables, step.kv_len, step.cu_rows, path, path_len, step.num_rows, step.max_kv_len
        )

    def run(
        self, pools: Sequence[Pool], backend: str | None, status: torch.Tensor | None = None
    ) -> None:
        """Enqueue them.

        pools   K and V pages, and which of `tables` names them
        status  [B] int32 StatusFlag bits that kernels OR in
        """
        for k_pages, v_pages, table in pools:
            ops.compact_kv(
                k_pages,
                v_pages,
                self.tables[table],
                self.kv_len,
                self.cu_rows,
                self.path,
                self.path_len,
                num_rows=self.num_rows,
                max_kv_len=self.max_kv_len,
                backend=backend,
                status=status,
            )

"""This package's operations as programs over a list of input sets."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.cells import MAX_DEPTH, AttentionCell
from benchmarks.gpu.problem import Problem
from benchmarks.gpu.run import ROOT, Target
from specdec_ext import ops

MASK_WORDS = 4
EMULATORS = {
    "cuda-emu": ROOT / "build" / "emu" / "libspecdec_emu.so",  # every access checked
    "cuda-emu-fast": ROOT / "build" / "emu" / "libspecdec_emu_fast.so",
}


class Unsupported(RuntimeError):
    """No kernel of the table serves what the cell asks for."""


def open_backend(target: Target) -> None:
    """Makes the target's backend known: an emulated one is a library that has to be opened."""
    if target.backend not in ops.backend_names():
        ops.load_backend(target.backend, str(EMULATORS[target.backend]))


def instance_for(cell: AttentionCell, target: Target) -> str | None:
    """Returns the instance that a cell insists on, None where the package's own choice is measured.

    The package multiplies in the type of q unless told otherwise; 8-bit products are asked for by
    name, in the smallest tile that takes all rows, else the largest.

    Raises   Unsupported if the table holds no such instance for the device.
    """
    if not cell.fp8_math:
        return None
    hopper = ops.device_limits(target.backend).major == 9
    rows = [
        row
        for row in ops.supported_attention()
        if (row["dtype"], row["kv_dtype"]) == (cell.dtype, cell.kv_dtype)
        and (row["math_dtype"], row["head_dim"]) == (cell.kv_dtype, cell.head_dim)
        and (row["family"] != "hopper" or hopper)
    ]
    if not rows:
        raise Unsupported(f"no instance with products of {cell.kv_dtype} for this device")
    tiles = {int(row["row_tile"]): str(row["name"]) for row in rows}
    needed = cell.rows * cell.group_size
    return tiles[min((tile for tile in tiles if tile >= needed), default=max(tiles))]


class Attention:
    """Attention of a cell over its sets; program(index) is one call.

    instance  the kernel's name; None: instance_for(cell)
    """

    def __init__(
        self, sets: list[Problem], target: Target, exact: bool, instance: str | None = None
    ) -> None:
        self.sets = sets
        self._target = target
        self._exact = exact
        cell = sets[0].cell
        self._instance = instance or instance_for(cell, target)
        device = target.device
        self.status = torch.zeros(cell.requests, dtype=torch.int32, device=device)
        self._masks = [widen(problem.mask) for problem in sets]
        self._is_tree = torch.full(
            (cell.requests,), 0 if sets[0].mask is None else 1, dtype=torch.uint8, device=device
        )

    def __call__(self, index: int, out: Tensor | None = None) -> Tensor:
        problem = self.sets[index]
        cell = problem.cell
        return ops.spec_attention(
            problem.q,
            problem.k_pages,
            problem.v_pages,
            problem.page_table,
            problem.kv_len,
            problem.cu_rows,
            mask=self._masks[index],
            is_tree=self._is_tree,
            out=problem.out if out is None else out,
            scale=problem.scale,
            exact=self._exact,
            max_depth=MAX_DEPTH,
            max_rows=cell.rows,
            max_kv_len=cell.context + cell.rows,
            instance=self._instance,
            backend=self._target.backend,
            status=self.status,
        )


def widen(mask: Tensor | None) -> Tensor | None:
    """Returns mask rows at the full width that a device wants, [R, 4] uint32."""
    if mask is None:
        return None
    wide = torch.zeros(mask.shape[0], MASK_WORDS, dtype=torch.int32, device=mask.device)
    wide[:, : mask.shape[1]] = mask
    return wide.view(torch.uint32)

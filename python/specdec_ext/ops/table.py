"""The attention kernels that exist, and which one serves a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from specdec_ext import _core
from specdec_ext._core import DeviceLimits

if TYPE_CHECKING:
    import torch


class AttentionInstance(TypedDict):
    """One kernel. dtypes are torch's names, without "torch."."""

    name: str
    family: str  # "ampere": compute capability 8.0 and later, "hopper": 9.0
    dtype: str  # of q and out
    kv_dtype: str  # of the pages
    math_dtype: str  # operands of the matrix instructions
    head_dim: int
    row_tile: int  # (token, head of the group) rows of a thread block
    threads: int
    smem_bytes: int  # shared memory of a thread block
    blocks_per_sm: int  # that registers allow
    granule: int  # keys that one instruction sums


class AttentionTable(list[AttentionInstance]):
    """Rows of the kernel table; ``str()`` of it is a table to read."""

    COLUMNS = (
        "name", "family", "dtype", "kv_dtype", "math_dtype", "head_dim", "row_tile", "threads",
        "smem_bytes", "blocks_per_sm",
    )  # fmt: skip

    def __str__(self) -> str:
        cells = [list(self.COLUMNS)]
        cells += [[str(dict(row)[column]) for column in self.COLUMNS] for row in self]
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.COLUMNS))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        lines.append('"generic" serves every other shape on compute capability 8.0 and later.')
        return "\n".join(lines)


def supported_attention() -> AttentionTable:
    """The attention kernels with matrix instructions that this package has. Print it to read it.

    What none of them serves is served by the "generic" kernel, slowly: any head_dim that is a
    multiple of 8 up to 256, any page size, any mix of dtypes, rows at any address.
    """
    return AttentionTable(_core.supported_attention())


def _bfloat16() -> torch.dtype:
    import torch

    return torch.bfloat16


@dataclass(frozen=True)
class AttentionProblem:
    """What the choice of a kernel depends on, besides the device.

    num_requests, num_rows, max_rows and max_kv_len bound the steps to come: they choose a row tile
    and size the scratch, never a result bit.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = field(default_factory=_bfloat16)  # of q and out
    kv_dtype: torch.dtype | None = None  # of the pages; None: dtype
    page_size: int = 64
    num_requests: int = 1
    num_rows: int = 1  # of all requests
    max_rows: int = 1  # of one request
    max_kv_len: int = 1  # kv_len + rows of one request
    aligned: bool = True  # every row of q, out, K and V begins at a multiple of 16 bytes


def pick_attention(
    problem: AttentionProblem, limits: DeviceLimits, instance: str | None = None
) -> str:
    """Name of the kernel that serves a problem on a device with these limits; "generic" for none.

    The family (and with it every result bit) depends on the device, the dtypes, head_dim, page
    size and alignment, never on how many rows or requests there are.

    Raises   ValueError if the device is older than 8.0, or the named instance cannot serve this.
    """
    return str(plan_workspace(problem, limits, instance)["instance"])


def plan_workspace(
    problem: AttentionProblem, limits: DeviceLimits, instance: str | None = None
) -> dict[str, Any]:
    """Scratch that ``spec_attention`` needs on a device, at most 256 MB: give ``total_bytes``.

    Also in it: instance, the kernel; max_jobs, max_units, max_slots, num_blocks, what fits; and
    pass_kv_heads, pass_group, the heads that one pass covers (a call with very many rows makes
    several).

    Raises   ValueError if there is no kernel (see ``pick_attention``), or the rows of a single
             head exceed 256 MB (some 250,000).
    """
    kv_dtype = problem.dtype if problem.kv_dtype is None else problem.kv_dtype
    return _core.plan_workspace(
        dtype=str(problem.dtype).removeprefix("torch."),
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        head_dim=problem.head_dim,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        page_size=problem.page_size,
        num_requests=problem.num_requests,
        num_rows=problem.num_rows,
        max_rows=problem.max_rows,
        max_kv_len=problem.max_kv_len,
        aligned=problem.aligned,
        limits=limits,
        instance=instance,
    )

"""Inputs of an attention cell, and what its output has to be.

K/V lies in shuffled pages. Large caches are views of one buffer of random numbers per data type:
filling tens of gigabytes anew for every cell would take longer than measuring it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.cells import MAX_DEPTH, AttentionCell

ROTATE_BELOW = 200_000_000  # bytes of one set; above, no cache holds it and one set is enough
# ||out - reference|| / ||reference||: 16-bit probabilities and outputs stay well under the first.
MAX_ERROR_16BIT = 6e-3
MAX_ERROR_FP8 = 6e-2


@dataclass
class Problem:
    """One set of inputs. Axes as in specdec_ext.ops; `parents` is the tree of every request."""

    cell: AttentionCell
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    kv_len: Tensor
    cu_rows: Tensor
    parents: list[int]
    bits: Tensor  # [M, M] bool: row i sees row j
    mask: Tensor | None  # [R, words] int32; None: chains
    out: Tensor

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.cell.head_dim)


class RandomPool:
    """Random K/V of one device: a buffer per data type that grows to the largest request."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[torch.dtype, Tensor] = {}

    def take(self, dtype: torch.dtype, elements: int) -> Tensor:
        """Returns the first `elements` normal numbers of a type, flat: the same memory again."""
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < elements:
            self._buffers.pop(dtype, None)
            buffer = torch.empty(elements, dtype=dtype, device=self._device)
            piece = 1 << 26
            for start in range(0, elements, piece):
                part = buffer[start : start + piece]
                part.copy_(torch.randn(part.numel(), dtype=torch.bfloat16, device=self._device))
            self._buffers[dtype] = buffer
        return buffer[:elements]


def random_tree(rows: int, max_depth: int, seed: int) -> list[int]:
    """Returns parents of a random tree of `rows` nodes, none deeper than `max_depth`."""
    generator = torch.Generator().manual_seed(seed)
    parents, depth = [-1], [0]
    for i in range(1, rows):
        while True:
            parent = int(torch.randint(0, i, (), generator=generator))
            if depth[parent] < max_depth:
                break
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return parents


def ancestor_bits(parents: Sequence[int]) -> Tensor:
    """Returns [M, M] bool: entry i, j is set if j is i or an ancestor of i."""
    bits = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            bits[i] = bits[parent]
        bits[i, i] = True
    return bits


def pack(bits: Tensor) -> Tensor:
    """Returns the rows of a bool matrix as int32 words, low bit first."""
    rows, columns = bits.shape
    words = (columns + 31) // 32
    padded = torch.zeros(rows, words * 32, dtype=torch.int64)
    padded[:, :columns] = bits
    weights = 1 << torch.arange(32, dtype=torch.int64)
    packed = (padded.view(rows, words, 32) * weights).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def num_sets(set_bytes: int) -> int:
    """Returns how many sets no cache holds together: 1 if it cannot hold one, else at least 3."""
    return max(3, ROTATE_BELOW // set_bytes + 1) if set_bytes < ROTATE_BELOW else 1


def make_sets(cell: AttentionCell, device: torch.device, pool: RandomPool) -> list[Problem]:
    """Returns as many sets as keep any cache from holding them all; they share no K/V."""
    pages_per_request = -(-(cell.context + cell.rows) // cell.page_size)
    pages = cell.requests * pages_per_request
    per_tensor = pages * cell.num_kv_heads * cell.page_size * cell.head_dim
    set_bytes = 2 * per_tensor * cell.kv_item_bytes
    count = 1 if device.type == "cpu" else num_sets(set_bytes)
    numbers = pool.take(getattr(torch, cell.kv_dtype), 2 * per_tensor * count)
    shape = (pages, cell.num_kv_heads, cell.page_size, cell.head_dim)
    parents = random_tree(cell.rows, MAX_DEPTH, seed=1)
    if cell.is_prompt:
        parents = list(range(-1, cell.rows - 1))
    bits = torch.zeros(0) if cell.is_prompt else ancestor_bits(parents)
    is_chain = cell.is_prompt or cell.rows == 1
    mask = None if is_chain else pack(bits).repeat(cell.requests, 1).to(device)
    rows = cell.requests * cell.rows
    sets = []
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        order = torch.randperm(pages, generator=generator).to(torch.int32)
        start = 2 * per_tensor * index
        dtype = getattr(torch, cell.dtype)
        q = torch.randn(rows, cell.num_heads, cell.head_dim, generator=generator)
        sets.append(
            Problem(
                cell,
                q.to(dtype).to(device),
                numbers[start : start + per_tensor].view(shape),
                numbers[start + per_tensor : start + 2 * per_tensor].view(shape),
                order.view(cell.requests, pages_per_request).to(device),
                torch.full((cell.requests,), cell.context, dtype=torch.int32, device=device),
                (torch.arange(cell.requests + 1) * cell.rows).to(torch.int32).to(device),
                parents,
                bits,
                mask,
                torch.empty(rows, cell.num_heads, cell.head_dim, dtype=dtype, device=device),
            )
        )
    return sets


def dense(problem: Problem, request: int) -> tuple[Tensor, Tensor]:
    """Returns K and V of one request, [tokens, KV heads, head dim], in the cache's type."""
    cell = problem.cell
    pages = problem.page_table[request].long()
    tokens = cell.context + cell.rows

    def gather(cache: Tensor) -> Tensor:
        flat = cache.view(torch.uint8)[pages].transpose(1, 2)  # fp8 tensors cannot be indexed
        return flat.reshape(-1, cell.num_kv_heads, flat.shape[-1])[:tokens].view(cache.dtype)

    return gather(problem.k_pages), gather(problem.v_pages)


def visible(problem: Problem, rows: Tensor) -> Tensor:
    """Returns [len(rows), tokens] bool: what these rows of a request see."""
    cell = problem.cell
    seen = torch.ones(len(rows), cell.context + cell.rows, dtype=torch.bool, device=rows.device)
    if cell.is_prompt:
        columns = torch.arange(cell.rows, device=rows.device)
        return columns[None, :] <= rows[:, None]
    seen[:, cell.context :] = problem.bits.to(rows.device)[rows]
    return seen


def references(problem: Problem) -> Iterator[tuple[slice | Tensor, slice, Tensor]]:
    """Yields (rows of out, heads of out, float32 reference) for a sample of the output.

    Two requests and two KV heads, all their rows, or 128 of a prompt. The sample is fixed.
    """
    cell = problem.cell
    group = cell.group_size
    rows = torch.arange(cell.rows, device=problem.q.device)
    if cell.rows > 128:
        rows = torch.linspace(0, cell.rows - 1, 128, device=problem.q.device).long()
    for request in sorted({0, cell.requests - 1}):
        k, v = dense(problem, request)
        seen = visible(problem, rows)
        for head in sorted({0, cell.num_kv_heads - 1}):
            where = rows + request * cell.rows
            heads = slice(head * group, (head + 1) * group)
            q = problem.q[where, heads].float()  # [rows, group, d]
            scores = torch.einsum("rgd,td->rgt", q, k[:, head].float()) * problem.scale
            scores.masked_fill_(~seen[:, None, :], float("-inf"))
            weights = torch.softmax(scores, dim=-1)
            yield where, heads, torch.einsum("rgt,td->rgd", weights, v[:, head].float())


def error(problem: Problem, out: Tensor) -> float:
    """Returns the largest relative error of the sampled parts; infinity for any NaN in `out`."""
    if not bool(torch.isfinite(out).all()):
        return math.inf
    worst = 0.0
    for rows, heads, expected in references(problem):
        difference = (out[rows, heads].float() - expected).norm() / expected.norm()
        worst = max(worst, float(difference))
    return worst


def max_error(cell: AttentionCell) -> float:
    return MAX_ERROR_FP8 if cell.fp8_math else MAX_ERROR_16BIT

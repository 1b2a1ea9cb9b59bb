"""Speculative attention written down a second time: float64, one row at a time, no code shared.

The reference walks parents (never a mask), gathers K/V token by token, and takes a plain softmax.
``dense_attend`` is the same for long contexts and many rows: one matrix product for each request
and KV head, on any device. A test holds it against the first.
``random_problem`` makes hostile inputs: pages shuffled over a pool that is larger than needed, NaN
in every slot that no row may read, huge page ids past a request's length, strided rows.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import torch

WILD_PAGE_ID = 2**31 - 1


@dataclasses.dataclass
class Problem:
    """One step. ``parents[b]`` is None for a causal chain of ``rows[b]`` rows."""

    q: torch.Tensor  # [R, H, K]
    k_pages: torch.Tensor  # [P, G, S, K]
    v_pages: torch.Tensor
    page_table: torch.Tensor  # [B, max_pages] int32
    kv_len: list[int]
    rows: list[int]
    parents: list[list[int]] | None
    scale: float
    sliding_window: int = 0
    sink_tokens: int = 0  # seen besides the window
    first_key: int = 0  # positions in front of it are no keys
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None  # [G] or [1] float32: K is what the pages hold times this
    v_scale: torch.Tensor | None = None

    @property
    def cu_rows(self) -> list[int]:
        out = [0]
        for n in self.rows:
            out.append(out[-1] + n)
        return out


def gather(pages: torch.Tensor, table: torch.Tensor, tokens: int) -> torch.Tensor:
    """[tokens, G, K]: the first tokens of a request, in slot order."""
    page_size = pages.shape[2]
    slots = torch.arange(tokens, device=pages.device)
    # Moved as bytes: nothing is known about 8-bit numbers but how to copy and convert them.
    raw = pages.view(torch.uint8) if pages.element_size() == 1 else pages
    picked = raw[table.to(pages.device).long()[slots // page_size], :, slots % page_size]
    return picked.view(pages.dtype)


def scaled(stored: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Stored K or V [tokens, G, K] as the numbers that they stand for."""
    numbers = stored.to(dtype)
    return numbers if scale is None else numbers * scale.to(numbers)[:, None]


def visible_slots(problem: Problem, b: int, row: int) -> list[int]:
    """Slots that a row sees, in position order; slot of entry i holds position i."""
    path = [row]
    if problem.parents is None:
        path = list(range(row + 1))
    else:
        while problem.parents[b][path[0]] >= 0:
            path.insert(0, problem.parents[b][path[0]])
    slots = list(range(problem.kv_len[b])) + [problem.kv_len[b] + i for i in path]
    if problem.sliding_window > 0:
        unseen = range(problem.sink_tokens, len(slots) - problem.sliding_window)
        slots = [slot for position, slot in enumerate(slots) if position not in unseen]
    left_out = problem.first_key - (len(path) + problem.kv_len[b] - len(slots))
    return slots[max(left_out, 0) :]


def attend(problem: Problem, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[R, H, K] in ``dtype``, every product and sum in ``dtype`` too."""
    num_heads = problem.q.shape[1]
    group = num_heads // problem.k_pages.shape[1]
    out = torch.empty(problem.q.shape, dtype=dtype)
    for b, first in enumerate(problem.cu_rows[:-1]):
        tokens = problem.kv_len[b] + problem.rows[b]
        keys = gather(problem.k_pages, problem.page_table[b], tokens)
        values = gather(problem.v_pages, problem.page_table[b], tokens)
        keys = scaled(keys, problem.k_scale, dtype)
        values = scaled(values, problem.v_scale, dtype)
        for row in range(problem.rows[b]):
            slots = visible_slots(problem, b, row)
            k = keys[slots].repeat_interleave(group, dim=1)  # [n, H, K]
            v = values[slots].repeat_interleave(group, dim=1)
            scores = torch.einsum("hk,nhk->hn", problem.q[first + row].to(dtype), k)
            scores = scores * problem.scale
            if problem.softcap:
                scores = problem.softcap * torch.tanh(scores / problem.softcap)
            if problem.sinks is not None:
                sink = problem.sinks.to(dtype)[:, None]
                weights = torch.softmax(torch.cat([scores, sink], dim=1), dim=1)[:, :-1]
            else:
                weights = torch.softmax(scores, dim=1)
            out[first + row] = torch.einsum("hn,nhk->hk", weights, v)
    return out


def rounding_bound(problem: Problem) -> torch.Tensor:
    """[R, H, 1]: what the rounding of one score and one weight can do to an output, in float32.

    A score is off by about one unit of scale * sum |q_d k_d|, a relative error of its weight.
    """
    group = problem.q.shape[1] // problem.k_pages.shape[1]
    out = torch.empty((*problem.q.shape[:2], 1), dtype=torch.float64)
    for b, first in enumerate(problem.cu_rows[:-1]):
        tokens = problem.kv_len[b] + problem.rows[b]
        keys = gather(problem.k_pages, problem.page_table[b], tokens).double().abs()
        values = gather(problem.v_pages, problem.page_table[b], tokens).double().abs()
        for row in range(problem.rows[b]):
            slots = visible_slots(problem, b, row)
            k = keys[slots].repeat_interleave(group, dim=1)
            size = torch.einsum("hk,nhk->hn", problem.q[first + row].double().abs(), k)
            size = problem.scale * size.amax(dim=1)
            largest = values[slots].amax(dim=(0, 2)).repeat_interleave(group)
            out[first + row, :, 0] = 2.0**-24 * (2 + size) * largest
    return out


def visibility(problem: Problem, b: int) -> torch.Tensor:
    """[rows, kv_len + rows] bool: row i of request b sees slot j."""
    seen = torch.zeros(problem.rows[b], problem.kv_len[b] + problem.rows[b], dtype=torch.bool)
    for row in range(problem.rows[b]):
        seen[row, visible_slots(problem, b, row)] = True
    return seen


def dense_scores(
    problem: Problem, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each request and KV head: its rows and query heads, scores [rows, heads, slots], minus
    infinity where unseen, values [slots, K] with zeros in place of what no row sees, and the
    largest scale * sum |q k| [rows, heads] over the slots that a row sees."""
    num_kv_heads = problem.k_pages.shape[1]
    group = problem.q.shape[1] // num_kv_heads
    for b, first in enumerate(problem.cu_rows[:-1]):
        if problem.rows[b] == 0:
            continue
        rows = slice(first, first + problem.rows[b])
        tokens = problem.kv_len[b] + problem.rows[b]
        seen = visibility(problem, b).to(problem.q.device)
        unused = ~seen.any(dim=0)
        keys = gather(problem.k_pages, problem.page_table[b], tokens)
        values = gather(problem.v_pages, problem.page_table[b], tokens)
        for g in range(num_kv_heads):
            heads = slice(g * group, (g + 1) * group)
            k_scale, v_scale = (
                None if s is None else s[g : g + 1] if s.numel() > 1 else s
                for s in (problem.k_scale, problem.v_scale)
            )
            k = scaled(keys[:, g : g + 1], k_scale, dtype)[:, 0].masked_fill(unused[:, None], 0)
            v = scaled(values[:, g : g + 1], v_scale, dtype)[:, 0].masked_fill(unused[:, None], 0)
            q = problem.q[rows, heads].to(dtype)
            scores = (q @ k.T) * problem.scale
            size = (q.abs() @ k.abs().T).masked_fill(~seen[:, None], 0).amax(dim=2) * problem.scale
            if problem.softcap:
                scores = problem.softcap * torch.tanh(scores / problem.softcap)
            yield rows, heads, scores.masked_fill(~seen[:, None], -torch.inf), v, size


def with_sinks(problem: Problem, heads: slice, scores: torch.Tensor) -> torch.Tensor:
    """Scores [rows, heads, slots] and one more column, the sinks or minus infinity."""
    if problem.sinks is None:
        return torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
    sinks = problem.sinks[heads].to(scores)[:, None]
    return torch.cat([scores, sinks.expand(*scores.shape[:2], 1)], dim=2)


def dense_attend(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float64: the result [R, H, K]; what one rounding of every weight does to it, added as
    independent errors are, sqrt(sum (w v)^2) [R, H, K]; the rounding of one float32 score [R, H, 1]
    """
    out = torch.zeros(problem.q.shape, dtype=torch.float64, device=problem.q.device)
    spread, score = torch.zeros_like(out), torch.zeros_like(out[:, :, :1])
    for rows, heads, scores, v, size in dense_scores(problem, torch.float64):
        weights = torch.softmax(with_sinks(problem, heads, scores), dim=2)[..., :-1]
        out[rows, heads] = weights @ v
        spread[rows, heads] = (weights.square() @ v.square()).sqrt()
        score[rows, heads, 0] = (2 + size) * v.abs().max()
    return out, spread, score


def rival_attend(problem: Problem) -> torch.Tensor:
    """[R, H, K] in the dtype of q: how torch's fused attention rounds. Products and sums are
    float32, the weights are rounded to 16 bits before they meet V, and so is the result."""
    dtype = problem.q.dtype
    out = torch.zeros(problem.q.shape, dtype=dtype, device=problem.q.device)
    for rows, heads, scores, v, _ in dense_scores(problem, torch.float32):
        scores = with_sinks(problem, heads, scores)
        weights = torch.exp(scores - scores.amax(dim=2, keepdim=True))
        total = weights.sum(dim=2, keepdim=True)
        out[rows, heads] = ((weights[..., :-1].to(dtype).float() @ v) / total).to(dtype)
    return out


def random_tree(rng: random.Random, size: int, shape: str) -> list[int]:
    """Parents of a tree: a chain, a star, branches as lookahead makes them, binary, the widening
    and narrowing levels of Medusa, or random."""
    if shape == "medusa":
        return medusa_tree(rng, size)
    parents = [-1]
    for i in range(1, size):
        if shape == "chain":
            parents.append(i - 1)
        elif shape == "star":
            parents.append(0)
        elif shape == "branches":
            parents.append(0 if (i - 1) % 4 == 0 else i - 1)
        elif shape == "binary":
            parents.append((i - 1) // 2)
        elif shape == "deep":
            parents.append(rng.randint(max(0, i - 3), i - 1))
        else:
            parents.append(rng.randint(0, i - 1))
    return parents


def medusa_tree(rng: random.Random, size: int) -> list[int]:
    """Level by level, the likelier children of the likelier nodes: most nodes are leaves."""
    parents, level = [-1], [0]
    while len(parents) < size:
        below: list[int] = []
        for rank, node in enumerate(level):
            for _ in range(max(rng.randint(0, 2), 8 // (rank + 1) - len(below) // 3)):
                if len(parents) < size:
                    below.append(len(parents))
                    parents.append(node)
        level = below or [level[0]]
    return parents


def shuffled_pages(
    rng: random.Random, kv_len: list[int], rows: list[int], page_size: int
) -> tuple[torch.Tensor, int]:
    """Page table over a pool with a third of its pages unused; wild ids past the lengths."""
    needed = [-(-(c + n) // page_size) for c, n in zip(kv_len, rows, strict=True)]
    num_pages = sum(needed) + sum(needed) // 3 + 2
    ids = rng.sample(range(num_pages), sum(needed))
    table = torch.full((len(rows), max(needed) + 1), WILD_PAGE_ID, dtype=torch.int32)
    at = 0
    for b, n in enumerate(needed):
        table[b, :n] = torch.tensor(ids[at : at + n], dtype=torch.int32)
        at += n
    return table, num_pages


def random_problem(
    seed: int,
    *,
    kv_len: list[int],
    rows: list[int],
    tree: str | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    sliding_window: int = 0,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    spread: float = 1.0,
) -> Problem:
    rng = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    table, num_pages = shuffled_pages(rng, kv_len, rows, page_size)
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    kv_dtype = kv_dtype or dtype
    k_pages = torch.full(shape, torch.nan, dtype=kv_dtype)
    v_pages = torch.full(shape, torch.nan, dtype=kv_dtype)
    for b, (c, n) in enumerate(zip(kv_len, rows, strict=True)):
        for t in range(c + n):
            page, slot = int(table[b, t // page_size]), t % page_size
            size = (num_kv_heads, head_dim)
            k_pages[page, :, slot] = torch.randn(size, generator=gen).to(kv_dtype)
            v_pages[page, :, slot] = torch.randn(size, generator=gen).to(kv_dtype)
    # Rows of q lie inside wider rows, as slices of a fused q/k/v projection do.
    wide = torch.full((sum(rows), num_heads * head_dim + 24), torch.nan, dtype=dtype)
    values = torch.randn((sum(rows), num_heads * head_dim), generator=gen) * spread
    wide[:, 8 : 8 + num_heads * head_dim] = values.to(dtype)
    q = wide[:, 8 : 8 + num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    return Problem(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=table,
        kv_len=kv_len,
        rows=rows,
        parents=[random_tree(rng, n, tree) for n in rows] if tree else None,
        scale=head_dim**-0.5,
        sliding_window=sliding_window,
        sink_tokens=sink_tokens,
        softcap=softcap,
        sinks=torch.randn(num_heads, generator=gen) if sinks else None,
    )

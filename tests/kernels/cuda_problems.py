"""Problems for the accelerator's attention: what reference_attention.py's hostile inputs lack.

Trees no deeper than a bound, 8-bit K/V with scales, pages that two requests share, requests without
rows, and the replay of tree nodes as plain decoding, all in one batch.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch
from reference_attention import (
    WILD_PAGE_ID,
    Problem,
    gather,
    random_tree,
    shuffled_pages,
    visible_slots,
)

F8 = torch.float8_e4m3fn
TREES = ["chain", "star", "binary", "branches", "deep", "medusa", "random"]


def depths(parents: list[int]) -> list[int]:
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent < 0 else out[parent] + 1)
    return out


def bounded_tree(rng: random.Random, size: int, shape: str, max_depth: int) -> list[int]:
    """A tree of a shape; nodes that would lie too deep hang on an ancestor instead."""
    parents: list[int] = []
    depth: list[int] = []
    for parent in random_tree(rng, size, shape)[:size]:
        while parent >= 0 and depth[parent] >= max_depth:
            parent = parents[parent]
        depth.append(0 if parent < 0 else depth[parent] + 1)
        parents.append(parent)
    return parents


def nan_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == F8:
        return torch.full(shape, 0x7F, dtype=torch.uint8).view(F8)  # the format's only NaN
    return torch.full(shape, torch.nan, dtype=dtype)


def put(pages: torch.Tensor, page: torch.Tensor, slot: torch.Tensor, values: torch.Tensor) -> None:
    """pages[page[i], :, slot[i]] = values[i], in the pages' dtype."""
    raw = values.to(pages.dtype)
    if pages.dtype == F8:
        pages, raw = pages.view(torch.uint8), raw.view(torch.uint8)
    pages[page, :, slot] = raw


def places(table: torch.Tensor, tokens: Sequence[int], page_size: int) -> tuple[torch.Tensor, ...]:
    at = torch.tensor(list(tokens), dtype=torch.long)
    return table.long()[at // page_size], at % page_size


def hostile_problem(
    seed: int,
    *,
    kv_len: list[int],
    rows: list[int],
    tree: str | list[str] | None = None,
    max_depth: int = 127,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype | None = None,
    scales: int = 0,
    sliding_window: int = 0,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    spread: float = 1.0,
    shared_pages: int = 0,
    first_key: int = 0,
) -> Problem:
    """``tree``: one shape for all requests, one for each, or None for causal chains.
    ``scales``: 0 none, 1 one of the tensor, 2 one for each KV head. ``shared_pages``: leading pages
    that every request with a prefix that long has in common."""
    rng = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or dtype
    table, num_pages = shuffled_pages(rng, kv_len, rows, page_size)
    if shared_pages:
        sharing = [b for b, c in enumerate(kv_len) if c >= shared_pages * page_size]
        assert len(sharing) >= 2, "nobody shares"
        table[sharing, :shared_pages] = table[sharing[0], :shared_pages].clone()
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    pages = [nan_pages(shape, kv_dtype), nan_pages(shape, kv_dtype)]
    # Not a power of two: a scale that is forgotten or used twice shows, and so does its rounding.
    scale = [0.3 + 0.7 * torch.rand(num_kv_heads if scales == 2 else 1, generator=gen)] * 2
    scale = [s * factor for s, factor in zip(scale, (0.11, 0.23), strict=True)]
    for b, (c, n) in enumerate(zip(kv_len, rows, strict=True)):
        where = places(table[b], range(c + n), page_size)
        for stored, s in zip(pages, scale, strict=True):
            values = torch.randn(c + n, num_kv_heads, head_dim, generator=gen)
            if sliding_window and not shared_pages:
                # No row sees them any more.
                values[sink_tokens : max(sink_tokens, c + 1 - sliding_window)] = torch.nan
            values[:first_key] = torch.nan
            put(stored, *where, values / s[:, None] if scales else values)
    # Rows of q lie inside wider rows, as slices of a fused q/k/v projection do.
    wide = torch.full((sum(rows), num_heads * head_dim + 24), torch.nan, dtype=dtype)
    values = torch.randn((sum(rows), num_heads * head_dim), generator=gen) * spread
    wide[:, 8 : 8 + num_heads * head_dim] = values.to(dtype)
    rng = random.Random(seed)  # a tree does not depend on how many pages there are
    shapes = [tree] * len(rows) if isinstance(tree, str) or tree is None else tree
    return Problem(
        q=wide[:, 8 : 8 + num_heads * head_dim].unflatten(1, (num_heads, head_dim)),
        k_pages=pages[0],
        v_pages=pages[1],
        page_table=table,
        kv_len=kv_len,
        rows=rows,
        parents=[
            bounded_tree(rng, n, kind or "chain", max_depth)
            for n, kind in zip(rows, shapes, strict=True)
        ]
        if tree is not None
        else None,
        scale=head_dim**-0.5,
        sliding_window=sliding_window,
        sink_tokens=sink_tokens,
        first_key=first_key,
        softcap=softcap,
        sinks=torch.randn(num_heads, generator=gen) if sinks else None,
        k_scale=scale[0] if scales else None,
        v_scale=scale[1] if scales else None,
    )


def replay(problem: Problem, nodes: list[tuple[int, int]], seed: int = 0) -> Problem:
    """Each (request, row) as a request of its own that decodes one row after its whole path.

    Half of the full prefix pages stay where they are, shared with the other replays; the rest of
    the path is copied in position order to pages of other numbers.
    """
    rng = random.Random(seed)
    page_size = problem.k_pages.shape[2]
    everything = dataclasses.replace(problem, sliding_window=0)
    paths = [visible_slots(everything, b, row) for b, row in nodes]
    kept = [problem.kv_len[b] // page_size // 2 for b, _ in nodes]
    fresh = [-(-len(path) // page_size) - k for path, k in zip(paths, kept, strict=True)]
    old = problem.k_pages.shape[0]
    ids = rng.sample(range(old, old + sum(fresh) + 3), sum(fresh))
    width = max(k + n for k, n in zip(kept, fresh, strict=True)) + 2
    table = torch.full((len(nodes), width), WILD_PAGE_ID, dtype=torch.int32)
    pages = []
    for stored in (problem.k_pages, problem.v_pages):
        more = nan_pages((sum(fresh) + 3, *stored.shape[1:]), stored.dtype)
        joined = torch.cat([stored.view(torch.uint8), more.view(torch.uint8)])
        pages.append(joined.view(stored.dtype))
    for i, ((b, _), path) in enumerate(zip(nodes, paths, strict=True)):
        table[i, : kept[i]] = problem.page_table[b, : kept[i]]
        mine, ids = ids[: fresh[i]], ids[fresh[i] :]
        table[i, kept[i] : kept[i] + fresh[i]] = torch.tensor(mine, dtype=torch.int32)
        begin = kept[i] * page_size
        where = places(table[i], range(begin, len(path)), page_size)
        tokens = problem.kv_len[b] + problem.rows[b]
        for stored, new in zip((problem.k_pages, problem.v_pages), pages, strict=True):
            put(new, *where, gather(stored, problem.page_table[b], tokens)[path[begin:]])
    return dataclasses.replace(
        problem,
        q=problem.q[[problem.cu_rows[b] + row for b, row in nodes]],
        k_pages=pages[0],
        v_pages=pages[1],
        page_table=table,
        kv_len=[len(path) - 1 for path in paths],
        rows=[1] * len(nodes),
        parents=None,
    )


def part(problem: Problem, b: int, begin: int, end: int) -> Problem:
    """Rows [begin, end) of a request alone; of a causal one, the rows before count as prefix."""
    first = problem.cu_rows[b]
    assert problem.parents is None or begin == 0
    return dataclasses.replace(
        problem,
        q=problem.q[first + begin : first + end],
        page_table=problem.page_table[b : b + 1].contiguous(),
        kv_len=[problem.kv_len[b] + begin],
        rows=[end - begin],
        parents=[problem.parents[b]] if problem.parents else None,
    )


def to_device(problem: Problem, device: str) -> Problem:
    """The problem with its tensors moved; strides of q are kept."""
    if device == "cpu":
        return problem
    moved = {}
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        if isinstance(value, torch.Tensor):
            if field.name == "q":
                store = torch.empty(value.shape[0], value.stride(0), dtype=value.dtype)
                store = store.to(device)
                width = value.shape[1] * value.shape[2]
                view = store[:, 8 : 8 + width] if value.stride(0) > width else store[:, :width]
                view = view.unflatten(1, value.shape[1:])
                view.copy_(value)
                moved["q"] = view
            else:
                moved[field.name] = value.to(device)
    return dataclasses.replace(problem, **moved)

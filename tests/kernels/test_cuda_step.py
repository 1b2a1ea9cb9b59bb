"""Step geometry from parents[], mask packing and argmax on every backend: exact."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from cuda_calls import BAD_LENGTH, BAD_PAGE, BAD_TREE, Target, checked, every_backend
from cuda_problems import TREES, bounded_tree, depths
from kernel_calls import assert_same_bits, int32
from reference_attention import WILD_PAGE_ID, shuffled_pages

from specdec_ext import ops

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 84, 127, 128]
WORDS = 4
SENTINEL = -7


# -- Step geometry ---------------------------------------------------------------------------------


def words_of(parents: list[int]) -> list[list[int]]:
    """Each node's own row with all of its ancestors, as four 32-bit words."""
    out = []
    for node in range(len(parents)):
        words = [0] * WORDS
        while node >= 0:
            words[node // 32] |= 1 << (node % 32)
            node = parents[node]
        out.append(words)
    return out


class Step:
    """A batch and what has to come of it."""

    def __init__(self, seed: int, trees: list[list[int]], page_size: int, padding: int = 0) -> None:
        rng = random.Random(seed)
        self.trees = trees
        self.rows = [len(parents) for parents in trees]
        self.kv_len = [rng.choice([0, 1, rng.randint(2, 300)]) for _ in trees]
        self.page_size = page_size
        self.table, self.num_pages = shuffled_pages(rng, self.kv_len, self.rows, page_size)
        self.cu_rows = [sum(self.rows[:b]) for b in range(len(trees) + 1)]
        self.parents = [p for parents in trees for p in parents] + [WILD_PAGE_ID] * padding
        self.positions, self.mask, self.slots = [], [], []
        self.is_tree, self.flags = [], [0] * len(trees)
        for b, parents in enumerate(trees):
            self.expect(b, parents)
        self.positions += [0] * padding
        self.mask += [[0] * WORDS] * padding
        self.slots += [-1] * padding

    def expect(self, b: int, parents: list[int]) -> None:
        n = len(parents)
        chain = parents == list(range(-1, n - 1))
        self.is_tree.append(int(not chain))
        self.positions += [self.kv_len[b] + d for d in depths(parents)]
        self.mask += words_of(parents) if n <= 128 else [[0] * WORDS] * n
        for token in range(self.kv_len[b], self.kv_len[b] + n):
            page = int(self.table[b, token // self.page_size])
            self.slots.append(page * self.page_size + token % self.page_size)

    def replace(self, b: int, positions: Any, mask: Any, slots: Any) -> None:
        rows = slice(self.cu_rows[b], self.cu_rows[b + 1])
        self.positions[rows], self.mask[rows], self.slots[rows] = positions, mask, slots
        self.is_tree[b] = 0

    def check(self, target: Target, **options: Any) -> None:
        rows = len(self.parents)
        positions = target.put(torch.full((rows,), SENTINEL, dtype=torch.int32))
        mask = target.put(torch.full((rows, WORDS), SENTINEL, dtype=torch.int32))
        is_tree = target.put(torch.full((len(self.trees),), 77, dtype=torch.uint8))
        slots = target.put(torch.full((rows,), SENTINEL, dtype=torch.int64))
        status = target.put(torch.zeros(len(self.trees), dtype=torch.int32))
        ops.build_step(
            target.put(int32(self.parents)),
            target.put(self.table),
            target.put(int32(self.kv_len)),
            target.put(int32(self.cu_rows)),
            positions=positions,
            mask=mask,
            is_tree=is_tree,
            slots=slots,
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_rows=max(self.rows),
            backend=target.backend,
            status=status,
            **options,
        )
        assert status.tolist() == self.flags
        assert is_tree.tolist() == self.is_tree
        assert positions.tolist() == self.positions
        words = torch.tensor(self.mask, dtype=torch.int64).to(torch.uint32).view(torch.int32)
        assert torch.equal(mask.cpu(), words)
        assert slots.tolist() == self.slots


@pytest.mark.parametrize("shape", TREES)
@every_backend
def test_geometry_of_every_tree(target: Target, shape: str) -> None:
    rng = random.Random(len(shape))
    trees = [bounded_tree(rng, n, shape, 127) for n in SIZES]
    Step(1, trees, page_size=16).check(target)


@pytest.mark.parametrize("page_size", [1, 4, 64, 128])
@every_backend
def test_geometry_of_a_ragged_batch(target: Target, page_size: int) -> None:
    """Trees, chains, a prompt longer than a tree may be, nothing at all, and padding rows."""
    rng = random.Random(page_size)
    trees = [bounded_tree(rng, rng.randint(1, 60), rng.choice(TREES), 127) for _ in range(20)]
    trees[3] = list(range(-1, 299))
    trees[5] = trees[19] = []
    Step(2, trees, page_size, padding=13).check(target)


@every_backend
def test_the_depth_bound(target: Target) -> None:
    """A tree as deep as the bound is one; a node deeper is refused; a chain may be longer."""
    deep = [-1, 0, 1, 2, 2, 0]
    step = Step(3, [deep, list(range(-1, 40)), deep], 16)
    step.check(target, max_depth=3)
    for b in (0, 2):
        length = step.kv_len[b]
        chain = list(range(-1, 5))
        slots = step.slots[step.cu_rows[b] : step.cu_rows[b + 1]]
        step.replace(b, [length + i for i in range(6)], words_of(chain), slots)
        step.flags[b] = BAD_TREE
    step.check(target, max_depth=2)


@pytest.mark.parametrize(
    "broken",
    [
        [-1, 0, 2, 1],  # a node that is its own parent
        [-1, 0, 3, 1],  # a parent that comes later
        [0, 0, 0, 0],  # the root has a parent
        [-1, -1, 0, 0],  # two roots
        [-1, 0, -5, 0],
        [-1, 0, 2**31 - 1, 0],
        [-1, 0, -(2**31), 0],
        [-1, 0, 1, 1] + [0] * 125,  # 129 nodes
    ],
    ids=str,
)
@every_backend
def test_what_is_no_tree_is_flagged_and_treated_as_a_chain(
    target: Target, broken: list[int]
) -> None:
    good = bounded_tree(random.Random(1), 20, "medusa", 127)
    chain = list(range(-1, len(broken) - 1))
    step = Step(4, [good, chain, good], 16)
    first, end = step.cu_rows[1:3]
    step.parents[first:end] = broken
    step.flags[1] = BAD_TREE
    step.check(target)


@checked
def test_bad_pages_and_lengths_of_a_step(target: Target) -> None:
    trees = [bounded_tree(random.Random(b), 20, "random", 127) for b in range(4)]
    step = Step(5, trees, 16)
    step.kv_len[1] = -1
    step.replace(1, [0] * 20, [[0] * WORDS] * 20, [-1] * 20)
    step.flags[1] = BAD_LENGTH
    step.kv_len[3] = step.table.shape[1] * 16 - 19
    step.replace(3, [0] * 20, [[0] * WORDS] * 20, [-1] * 20)
    step.flags[3] = BAD_LENGTH
    for bad in (-1, step.num_pages, WILD_PAGE_ID):
        at = step.kv_len[2] // 16
        page, step.table[2, at] = int(step.table[2, at]), bad
        before = list(step.slots)
        for i, slot in enumerate(step.slots[40:60]):
            if slot // 16 == page:
                step.slots[40 + i] = -1
        step.flags[2] = BAD_PAGE
        step.check(target)
        step.table[2, at], step.slots = page, before


# -- Mask packing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@every_backend
def test_pack_mask(target: Target, size: int) -> None:
    gen = torch.Generator().manual_seed(size)
    wide = torch.rand(size + 3, size + 2, generator=gen) < 0.5
    for mask in (wide[:, :size], wide[:, 1 : 1 + size], wide[:size].T[1 : size + 1]):
        expected = torch.zeros(mask.shape[0], -(-mask.shape[1] // 32), dtype=torch.int64)
        for j in range(mask.shape[1]):
            expected[:, j // 32] |= mask[:, j].long() << (j % 32)
        moved = target.put(mask)
        out = target.put(torch.full(expected.shape, SENTINEL, dtype=torch.int32))
        ops.pack_mask(moved, out=out.view(torch.uint32), backend=target.backend)
        assert_same_bits(out.cpu(), expected.to(torch.uint32).view(torch.int32))


# -- Argmax ----------------------------------------------------------------------------------------


def hard_scores(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    gen = torch.Generator().manual_seed(vocab)
    scores = torch.randn(12, vocab + 3, generator=gen).to(dtype)[:, 1 : vocab + 1]
    scores[1] = -math.inf
    scores[2] = 0.25  # all tied
    scores[3] = torch.randint(0, 2, (vocab,), generator=gen).to(dtype)
    scores[4] = torch.where(torch.rand(vocab, generator=gen) < 0.5, 0.0, -0.0)  # both zeros
    scores[5, vocab // 2] = math.inf
    scores[6] = -math.inf
    scores[6, vocab - 1] = torch.finfo(dtype).min
    scores[7:9] = math.inf
    scores[9, vocab - 1] = math.nan
    scores[10, vocab // 3] = -math.nan
    scores[11, 0], scores[11, vocab // 2] = math.inf, math.nan
    return scores


@pytest.mark.parametrize("vocab", [1, 2, 15, 63, 64, 65, 1023, 1024, 1025, 5000, 49152])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@every_backend
def test_argmax(target: Target, vocab: int, dtype: torch.dtype) -> None:
    if target.backend == "cpu" and dtype != F32:
        pytest.skip("the CPU's scores are float32")
    scores = hard_scores(vocab, dtype)
    expected = []
    for row in scores.tolist():
        expected.append(-1 if any(math.isnan(x) for x in row) else row.index(max(row)))
    on_device = target.put(torch.full((12, vocab + 3), math.nan, dtype=dtype))
    on_device = on_device[:, 1 : vocab + 1]  # rows aligned to nothing, NaN between them
    on_device.copy_(scores)
    for workspace in (None, torch.full((1 << 16,), math.nan)):
        out = target.put(torch.full((12,), SENTINEL, dtype=torch.int32))
        options = {} if workspace is None else {"workspace": target.put(workspace)}
        ops.argmax(on_device, out, backend=target.backend, **options)
        assert out.tolist() == expected


@checked
def test_argmax_of_one_long_row(target: Target) -> None:
    """More pieces than a warp has lanes to join them."""
    scores = torch.zeros(1, 151936)
    for at in (151935, 140000, 131071, 4096, 0):
        scores[0, at] = 1.0
        out = target.put(torch.zeros(1, dtype=torch.int32))
        ops.argmax(target.put(scores), out, backend=target.backend)
        assert out.tolist() == [at]

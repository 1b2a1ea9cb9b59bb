"""The same call many times gives the same bits: what moves between runs is a race."""

from __future__ import annotations

import math
from typing import Any

import torch

from benchmarks.gpu import problem as problems
from benchmarks.gpu.cells import AttentionCell
from benchmarks.gpu.ours import Attention
from benchmarks.gpu.run import Target

CELLS = (
    AttentionCell(1, 27, 2048),
    AttentionCell(8, 64, 4096),
    AttentionCell(3, 84, 5000, num_kv_heads=4),
    AttentionCell(32, 1, 4096),
    AttentionCell(2, 500, 0),
)


def repeat(cell: AttentionCell, target: Target, times: int) -> dict[str, Any]:
    """Returns how many of `times` repetitions differ from the first, in either mode."""
    first_set = problems.make_sets(cell, target.device, problems.RandomPool(target.device))[0]
    different = 0
    for exact in (True, False):
        attention = Attention([first_set], target, exact)
        expected = attention(0).clone()
        for _ in range(times):
            first_set.out.fill_(math.nan)
            different += int(not torch.equal(attention(0), expected))
    return {
        "status": "ok" if different == 0 else "failed",
        "summary": f"{2 * times} calls, {different} differ",
    }

"""What does a Medusa step cost outside the model and the heads?

Four random heads, the 63-node tree mc_sim_7b_63; the rest as in drafter_overhead. "whole tree"
verifies all nodes; "adaptive" chooses its nodes in every step, on a table of step times that makes
about a third of them pay.

    python -m benchmarks.medusa_overhead [--quick]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks import drafter_overhead, models

TREE = "mc_sim_7b_63"
STEP_SECONDS = {1: 1e-3, 64: 1.1e-3, 128: 1.2e-3}


def random_heads(folder: str) -> str:
    """Four heads with LM heads of their own."""
    from specdec_ext.drafters.medusa.heads import (
        MedusaHeads,
        MedusaHeadsConfig,
        save_medusa_heads,
    )

    shape = models.SHAPES[drafter_overhead.SHAPE]
    heads = MedusaHeads(MedusaHeadsConfig(shape.hidden, shape.vocab, 4))
    drafter_overhead.randomize(heads)
    return str(save_medusa_heads(folder, heads, dtype="float32"))


def heads_clock(drafter: Any) -> Callable[[], float]:
    return lambda: float(drafter.stats()["head_thread_seconds"])


def cases(rounds: int, tokens: int) -> dict[str, dict[str, Any]]:
    from specdec_ext import MedusaDecodingConfig

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        heads = random_heads(folder)
        for batch in (1, 8):
            for adaptive in (False, True):
                name = f"{'adaptive' if adaptive else 'whole tree'}, batch {batch}"
                results[name] = drafter_overhead.measure(
                    MedusaDecodingConfig(heads, TREE, adaptive=adaptive),
                    batch,
                    rounds,
                    tokens,
                    heads_clock,
                    STEP_SECONDS,
                )
    return results


if __name__ == "__main__":
    sys.exit(drafter_overhead.report("medusa_overhead", __doc__, cases, tree=TREE))

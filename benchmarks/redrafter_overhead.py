"""What does a ReDrafter step cost outside the model and the drafter's layers?

A random drafter with a head of its own; the rest as in drafter_overhead. What is left is beam
search, merging, the executor and the loop. The whole tree is verified.

    python -m benchmarks.redrafter_overhead [--quick]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks import drafter_overhead, models

# (beams, drafts of each): what fits a CPU, TensorRT-LLM's default, 63 drafts.
SETTINGS = ((2, 4), (5, 5), (21, 3))


def random_drafter(folder: str) -> str:
    """exit_dim = hidden size, one block, over the whole vocabulary."""
    import torch

    from specdec_ext.drafters.redrafter.model import Redrafter, RedrafterShape, save_redrafter

    shape = models.SHAPES[drafter_overhead.SHAPE]
    drafter = Redrafter(RedrafterShape(shape.vocab, shape.hidden, shape.hidden, 1, True))
    drafter_overhead.randomize(drafter)
    save_redrafter(drafter, folder, dtype=torch.float32)
    return folder


def network_clock(drafter: Any) -> Callable[[], float]:
    return lambda: float(drafter.stats()["network_thread_seconds"])


def cases(rounds: int, tokens: int) -> dict[str, dict[str, Any]]:
    from specdec_ext import ReDrafterDecodingConfig

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        drafter = random_drafter(folder)
        for batch in (1, 8):
            for beams, length in SETTINGS:
                config = ReDrafterDecodingConfig(drafter, beams, length, adaptive=False)
                results[f"{beams} beams x {length}, batch {batch}"] = drafter_overhead.measure(
                    config, batch, rounds, tokens, network_clock
                )
    return results


if __name__ == "__main__":
    sys.exit(drafter_overhead.report("redrafter_overhead", __doc__, cases, adaptive=False))

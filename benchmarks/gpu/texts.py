"""Is the text that of plain decoding? Many prompts through the engine, steps recorded as graphs.

exact  with numerics="exact" every token has to be equal
fast   a text may leave plain decoding where two tokens are as good as each other: then both have to
       be the best two of that row, closer than bf16 tells apart
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.engine_cells import TextsCell
from benchmarks.gpu.model_step import engine_of
from benchmarks.gpu.run import Target

# By how much scores may differ: their last bits in bf16, and what sums in another order add.
# Scores are of order 10.
NEAR_TIE = 2**-4

Tokens = list[list[int]]


def generate(engine: Any, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> Tokens:
    from specdec_ext import SamplingParams

    params = SamplingParams(max_tokens=count, ignore_eos=True, **options)
    states = [engine.submit(engine.resolve(list(prompt), params)) for prompt in prompts]
    engine.run(states)
    if (error := next((s.error for s in states if s.error), None)) is not None:
        raise ArithmeticError(error)
    return [state.token_ids for state in states]


def gap(engine: Any, history: Sequence[int], tokens: tuple[int, int]) -> float:
    """How far apart the scores of two tokens are behind a history; infinite if one of them is not
    among the best five."""
    from specdec_ext import SamplingParams

    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=5)
    state = engine.submit(engine.resolve(list(history), params))
    engine.run([state])
    best = state.snapshot().outputs[0].logprobs[0]
    found = [best[token].logprob for token in tokens if token in best]
    return abs(found[0] - found[1]) if len(found) == 2 else float("inf")


def measure(cell: TextsCell, target: Target) -> dict[str, Any]:
    """Returns the record: tokens compared, texts that differ, of them those without a near-tie.

    Raises   ArithmeticError for a difference that numerics="exact" rules out.
    """
    from specdec_ext import LookaheadDecodingConfig

    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(cell.vocab, (cell.prompts, cell.context), generator=generator).tolist()
    config = LookaheadDecodingConfig(7, 7, 7, adaptive=False)
    with engine_of(cell, target, config) as engine:
        plain = generate(engine, prompts, cell.new_tokens, speculative=False)
        texts = generate(engine, prompts, cell.new_tokens)
        metrics = engine.get_metrics()["speculative_decoding"]
        differing = [i for i, (a, b) in enumerate(zip(plain, texts, strict=True)) if a != b]
        gaps = []
        for i in differing:
            at = next(n for n, pair in enumerate(zip(plain[i], texts[i], strict=True))
                      if pair[0] != pair[1])  # fmt: skip
            history = prompts[i] + plain[i][:at]
            gaps.append(gap(engine, history, (plain[i][at], texts[i][at])))
    wrong = [g for g in gaps if g > NEAR_TIE]
    record = {
        **cell.describe(),
        "status": "ok",
        "us": None,
        "tokens": sum(len(text) for text in texts),
        "accepted_tokens": metrics["num_accepted_draft_tokens"],
        "differing": len(differing),
        "not_near_ties": len(wrong),
        "gaps": [round(g, 5) for g in gaps],
    }
    if wrong or (differing and cell.numerics == "exact"):
        raise ArithmeticError(f"{cell.name}: texts {differing} differ from plain decoding: {gaps}")
    return record

"""Edits of the prompt: what the output has replaced once is drafted wherever it comes again."""

from __future__ import annotations

import random
from typing import Any

import pytest
import simulated_time as simulated
import torch
from test_prediction import inconsistently_renamed
from test_prediction_time import CHEAP, TILES, TOKENS, edited, renamed

from reference.prediction_reference import Cursor
from specdec_ext import _core

EDITS = _core.DRAFT_SOURCES.index("edits")
SUFFIX: dict[str, Any] = {
    "method": "suffix",
    "suffix": {"max_draft_len": 127, "min_token_prob": 0.9},
}
FREE = ([1, 1024], [1.0, 1.0])  # rows that cost nothing: every draft is verified


def steps_of(
    prompt: list[int], output: list[int], method: dict[str, Any], **options: Any
) -> list[tuple[int, list[int]]]:
    """Drafts of each step that edits made, as a path, behind so many tokens of the output."""
    pages = torch.zeros(1, 16, 1, 32, 8)
    executor = _core.Executor(
        pages, pages.clone(), vocab_size=50, max_batch_size=1, max_seq_len=400,
        max_num_tokens=300, **method,
    )  # fmt: skip
    executor.set_step_cost(*FREE)
    text = prompt + output
    executor.submit(prompt, max_tokens=len(output), return_drafts=True, **options)
    written: list[int] = []
    steps = []
    while len(written) < len(output):
        plan = executor.plan()
        chosen = [
            text[position + 1] if position + 1 < len(text) else 0
            for position in (plan.positions.tolist()[row] for row in plan.logit_rows.tolist())
        ]
        for out in executor.commit(plan, torch.tensor(chosen, dtype=torch.int32)):
            path: list[int] = []
            last = -1
            for i, draft in enumerate(out.drafts):
                if EDITS in draft.sources:
                    assert draft.parent == last, "edits are one chain from the golden token"
                    path.append(draft.token)
                    last = i
            if out.num_rows and not out.is_prefill:
                steps.append((len(written), path))
            written += out.tokens
    assert written == output
    return steps


def test_drafts_are_those_of_the_edited_prompt() -> None:
    edited = 0
    for seed in range(150):
        rng = random.Random(seed)
        output, prompt = inconsistently_renamed(rng)
        cursor, known = Cursor(prompt), 0
        for at, path in steps_of(prompt, output, SUFFIX):
            for token in output[known:at]:
                cursor.take(token)
            known = at
            assert path == cursor.edited[: len(output) - at - 1], (seed, at)
            edited += bool(path)
    assert edited > 300, edited


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (SUFFIX, {"adaptive": False}),
        (SUFFIX, {"prediction": [1, 2, 3]}),
        (SUFFIX, {"speculative": False}),
        ({"method": "ngram", "ngram": {"max_draft_len": 8, "max_matching_ngram_size": 2}}, {}),
        ({"method": "none"}, {}),
    ],
    ids=["fixed", "with a prediction", "plain", "prompt lookup", "no method"],
)
def test_who_learns_no_edits_of_the_prompt(method: dict[str, Any], options: dict[str, Any]) -> None:
    output, prompt = inconsistently_renamed(random.Random(1))
    assert not any(path for _, path in steps_of(prompt, output, method, **options))
    assert any(path for _, path in steps_of(prompt, output, SUFFIX))


def copied(every: int, seed: int) -> tuple[list[int], list[int]]:
    """An output, and a prompt that differs from it at about one place in `every`."""
    source = random.Random(seed)
    output = [source.randrange(simulated.VOCAB) for _ in range(TOKENS)]
    return output, edited(every, seed)(output)


def gain(every: int, seconds: Any, make: Any = renamed) -> float:
    """Plain decoding's seconds over those of suffix decoding, of six outputs and prompts."""
    plain = drafted = 0.0
    for seed in range(6):
        output, prompt = make(every, seed)
        how = {"seconds": seconds, "times": simulated.guessed_times(), "slowdown": 0.0}
        how |= {"outputs": [output], "given": [prompt]}
        for _ in range(2):
            one = simulated.run([len(prompt)], TOKENS, method="none", **how)
        other = simulated.run([len(prompt)], TOKENS, method="suffix", **how)
        assert other.texts == one.texts
        plain, drafted = plain + one.decode_seconds, drafted + other.decode_seconds
    return plain / drafted


# Without edits these were 1.60, 2.72, 2.59 and 6.43.
@pytest.mark.parametrize(
    ("every", "seconds", "least"),
    [(6, simulated.SECONDS, 2.9), (40, simulated.SECONDS, 2.85), (6, CHEAP, 6.8), (40, CHEAP, 6.9)],
    ids=["6, dear", "40, dear", "6, cheap", "40, cheap"],
)
def test_what_renaming_the_prompt_saves(every: int, seconds: Any, least: float) -> None:
    assert gain(every, seconds) >= least


# With ten drafts at most the last ones were 3.6, 9.4 and 8.7.
@pytest.mark.parametrize(
    ("every", "seconds", "least"),
    [(40, simulated.SECONDS, 2.6), (40, CHEAP, 6.3), (40, TILES, 7.4),
     (10**6, simulated.SECONDS, 4.1), (10**6, CHEAP, 10.7), (10**6, TILES, 15.5)],
    ids=["40, dear", "40, cheap", "40, tiles", "never, dear", "never, cheap", "never, tiles"],
)  # fmt: skip
def test_what_a_copy_of_the_prompt_saves(every: int, seconds: Any, least: float) -> None:
    assert gain(every, seconds, copied) >= least

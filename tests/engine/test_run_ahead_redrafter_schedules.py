"""Random schedules of ReDrafter running ahead, on a stream that runs as late as is legal.

Requests join, end, are cancelled and change in their slots, with beams and lengths of their own;
pages that are given back are poisoned at once. What a slot's last request asked for, or the hidden
state that it left, must not show: drafts would be others, and with them the counts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from driver import Job
from run_ahead_driver import FakeRecorder, RunAheadEngine, run_ahead_model_engine
from test_run_ahead_redrafter import VOCAB, greedy, open_llm, prompts, run
from test_run_ahead_redrafter import learnt as learnt
from test_run_ahead_redrafter import plain as plain
from test_run_ahead_redrafter import target as target

from specdec_ext import ReDrafterDecodingConfig
from specdec_ext.drafters.redrafter.slots import RedrafterDrafter
from specdec_ext.models import load_model

BEAMS, LENGTH, BATCH, ROWS = 4, 5, 3, 40


@pytest.fixture(scope="module")
def texts(target: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts and how they go on."""
    starts = [*prompts(16), *[p[: len(p) // 2 + 1] for p in prompts(6)]]
    with open_llm(target, None, None) as llm:
        return list(zip(starts, run(llm, starts, greedy()), strict=True))


def make_engine(
    target: Path, drafter: Path, seed: int, depth: int, **options: Any
) -> RunAheadEngine:
    model = load_model(target, max_rows=ROWS)
    config = ReDrafterDecodingConfig(drafter, BEAMS, LENGTH)
    return run_ahead_model_engine(
        model,
        page_size=random.Random(seed).choice([1, 4, 16]),
        max_batch_size=BATCH,
        max_seq_len=96,
        max_num_tokens=ROWS,
        depth=depth,
        stub=None if seed % 5 == 0 else seed,
        drafter=RedrafterDrafter(config, model, max_requests=BATCH),
        method="proposed",
        proposed_max_draft_len=BEAMS * LENGTH,
        proposed_max_path=LENGTH,
        **options,
    )


def run_schedule(
    target: Path,
    drafter: Path,
    texts: list[tuple[list[int], list[int]]],
    seed: int,
    depth: int,
    **options: Any,
) -> tuple[int, int]:
    """(tokens, accepted drafts); every text is plain decoding's."""
    rng = random.Random(seed)
    engine = make_engine(target, drafter, seed, depth, **options)
    asked: dict[int, Mapping[str, Any]] = {}

    def options_of(request_id: int) -> Mapping[str, Any]:
        pick = random.Random(1000 * seed + request_id)
        chosen = {"num_beams": pick.randint(1, BEAMS), "length": pick.randint(1, LENGTH),
                  "adaptive": pick.random() < 0.3, "temperature": 1.0,
                  "keeps_laws": False}  # fmt: skip
        return asked.setdefault(request_id, {} if pick.random() < 0.1 else chosen)

    engine.pipeline.draft_options = options_of
    jobs, wanted = [], []
    for prompt, text in rng.choices(texts, k=14):
        extra: dict[str, Any] = {"seed": rng.randrange(2**60)}
        if rng.random() < 0.15:
            extra["speculative"] = False
        elif rng.random() < 0.3:
            extra["max_draft_len"] = rng.choice([0, 1, 3])
        if rng.random() < 0.2:
            extra["stop_token_ids"] = [rng.randrange(VOCAB)]
        cancel = rng.randrange(30) if rng.random() < 0.15 else None
        job = Job(prompt, rng.choice([1, 2, 7, len(text)]), extra, rng.randrange(15), cancel)
        jobs.append(job)
        stops = extra.get("stop_token_ids", [])
        cut = text[: job.max_tokens]
        end = next((i for i, token in enumerate(cut) if token in stops), len(cut))
        wanted.append(cut[: end + 1])
    tokens = accepted = 0
    for text, got in zip(wanted, engine.run(jobs), strict=True):
        assert got.tokens == (text[: len(got.tokens)] if got.cancelled else text)
        tokens += len(got.tokens)
        accepted += got.num_accepted
    assert engine.pipeline.draft_failures == 0
    engine.assert_idle()
    return tokens, accepted


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_schedules(
    target: Path, learnt: Path, texts: list[tuple[list[int], list[int]]], depth: int, graphs: bool
) -> None:
    tokens = accepted = 0
    for seed in range(8):
        options: dict[str, Any] = {"recorder": FakeRecorder()} if graphs else {}
        got = run_schedule(target, learnt, texts, 10 * depth + seed, depth, **options)
        tokens, accepted = tokens + got[0], accepted + got[1]
    assert tokens > 500
    assert accepted > 100


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_many_schedules(
    target: Path, learnt: Path, texts: list[tuple[list[int], list[int]]], depth: int
) -> None:
    """Fifty thousand tokens, all depths together."""
    runs = [run_schedule(target, learnt, texts, seed, depth) for seed in range(1000, 1160)]
    assert sum(tokens for tokens, _ in runs) > 16_700

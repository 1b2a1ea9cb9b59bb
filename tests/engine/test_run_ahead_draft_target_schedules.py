"""Random schedules of a draft model that runs ahead, on a stream that runs as late as is legal.

Pages that are given back are poisoned at once in both pools. The draft model is the target, so a
draft that is not accepted has read K/V that is not its text's.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_target_cases import PROMPTS, VOCAB, open_llm, tokens_of
from draft_target_cases import folders as folders
from driver import Job
from run_ahead_driver import FakeRecorder, RunAheadEngine, run_ahead_model_engine

from specdec_ext import DraftTargetDecodingConfig, SamplingParams
from specdec_ext.drafters import DraftTargetDrafter
from specdec_ext.drafters.vocabulary import VocabularyMap
from specdec_ext.models import load_model
from specdec_ext.models.place import CPU

DRAFTS, BATCH, ROWS = 4, 3, 24


@pytest.fixture(scope="module")
def texts(folders: dict[str, Path]) -> dict[tuple[int, ...], list[int]]:
    """Prompts and how they go on."""
    starts = [*PROMPTS, *[[*p[: len(p) // 2], 3] for p in PROMPTS if len(p) > 20]]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with open_llm(folders, None) as llm:
        outputs = tokens_of(llm.generate(starts, params, use_tqdm=False))
    return {tuple(start): text for start, text in zip(starts, outputs, strict=True)}


def make_engine(
    folders: dict[str, Path], seed: int, depth: int, **options: Any
) -> tuple[RunAheadEngine, DraftTargetDrafter]:
    model, draft = (load_model(folders["target"], max_rows=ROWS) for _ in range(2))
    drafter = DraftTargetDrafter(
        DraftTargetDecodingConfig(folders["target"], DRAFTS),
        draft,
        VocabularyMap(VOCAB, [], []),
        CPU,
        vocab_size=VOCAB,
        max_requests=BATCH,
        max_rows=ROWS,
    )
    engine = run_ahead_model_engine(
        model,
        page_size=random.Random(seed).choice([1, 4, 16]),
        max_batch_size=BATCH,
        max_seq_len=200,
        max_num_tokens=ROWS,
        depth=depth,
        stub=None if seed % 5 == 0 else seed,
        drafter=drafter,
        method="proposed",
        proposed_max_draft_len=DRAFTS,
        proposed_max_path=DRAFTS,
        **options,
    )
    pools = tuple(torch.full_like(pool, float("nan")) for pool in engine.pages)
    drafter.bind_cache(*pools)
    engine.pages = (*engine.pages, *pools)  # type: ignore[assignment]
    return engine, drafter


def jobs_of(rng: random.Random, texts: dict[tuple[int, ...], list[int]], count: int) -> list[Job]:
    jobs = []
    for prompt in rng.choices(sorted(texts), k=count):
        options: dict[str, Any] = {"seed": rng.randrange(2**60)}
        if rng.random() < 0.2:
            options["speculative"] = False
        elif rng.random() < 0.3:
            options["max_draft_len"] = rng.choice([0, 1, 3])
        if rng.random() < 0.3:
            options["stop_token_ids"] = [rng.randrange(VOCAB)]
        cancel = rng.randrange(30) if rng.random() < 0.15 else None
        job = Job(list(prompt), rng.choice([1, 2, 7, 25, 60]), options, rng.randrange(15), cancel)
        jobs.append(job)
    return jobs


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_schedules(
    folders: dict[str, Path],
    texts: dict[tuple[int, ...], list[int]],
    depth: int,
    reuse: bool,
    graphs: bool,
) -> None:
    accepted = hits = 0
    for seed in range(12):
        rng = random.Random(100 * depth + seed)
        options: dict[str, Any] = {"recorder": FakeRecorder()} if graphs else {}
        engine, _ = make_engine(folders, seed, depth, enable_block_reuse=reuse, **options)
        jobs = jobs_of(rng, texts, 12)
        for job, got in zip(jobs, engine.run(jobs), strict=True):
            text = texts[tuple(job.prompt)][: job.max_tokens]
            stops = job.options.get("stop_token_ids", [])
            text = text[: next((i for i, t in enumerate(text) if t in stops), len(text)) + 1]
            assert got.tokens == (text[: len(got.tokens)] if got.cancelled else text)
            if not (reuse or stops or got.cancelled):
                assert got.num_accepted == got.num_drafts
            accepted += got.num_accepted
        assert engine.pipeline.draft_failures == 0
        hits += engine.stats()["reuse_hits"]
        engine.assert_idle()
    assert accepted > 700
    assert (hits > 15) == reuse

"""Random programs over real models and the networks that draft for them, on a stream that runs as
late as is legal.

Pages that are given back are poisoned at once, in both pools of a draft model. The draft model is
the target, and the recurrent network has learnt its text: a draft that is not accepted has read
what is not its text's, or what the last request of its slot left.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from driver import Delivery, Job
from medusa_models import VOCAB
from method_cases import GREEDY, PROMPTS, Folders, open_llm, texts_of
from schedule_machine import Schedule, run_programs
from stream_driver import FakeRecorder, stream_model_engine

from specdec_ext import DraftTargetDecodingConfig, ReDrafterDecodingConfig
from specdec_ext.drafters import DraftSizes, DraftTargetDrafter
from specdec_ext.drafters.redrafter.slots import RedrafterDrafter
from specdec_ext.drafters.vocabulary import VocabularyMap
from specdec_ext.models import load_model
from specdec_ext.models.place import CPU

BATCH, ROWS, BEAMS, LENGTH = 3, 40, 4, 5


class ModelSchedule(Schedule):
    """Requests join, end, are cancelled and change in their slots."""

    places = (0, 1, 2)
    models: Folders
    texts: dict[tuple[int, ...], list[int]]

    def make(self, rng: random.Random) -> None:
        self.rates, self.reuse = [], self.method == "chain" and rng.random() < 0.5
        stub = rng.choice([None, rng.randrange(99), rng.randrange(99), rng.randrange(99)])
        self.late, self.fails = True, 0
        self.recorder = FakeRecorder() if rng.random() < 0.4 else None
        model = load_model(self.models["target"], max_rows=ROWS)
        drafter: Any
        if self.method == "chain":
            most, path = 4, 4
            drafter = DraftTargetDrafter(
                DraftTargetDecodingConfig(self.models["target"], most),
                load_model(self.models["target"], max_rows=ROWS), VocabularyMap(VOCAB, [], []), CPU,
                DraftSizes(VOCAB, BATCH, ROWS),
            )  # fmt: skip
        else:
            most, path = BEAMS * LENGTH, LENGTH
            config = ReDrafterDecodingConfig(self.models["network"], BEAMS, LENGTH)
            drafter = RedrafterDrafter(config, model, max_requests=BATCH)
        self.engine = stream_model_engine(
            model, page_size=rng.choice([1, 4, 16]), max_batch_size=BATCH, max_seq_len=200,
            max_num_tokens=ROWS, depth=self.depth or 0, stub=stub, drafter=drafter,
            recorder=self.recorder, enable_block_reuse=self.reuse, method="proposed",
            proposed_max_draft_len=most, proposed_max_path=path,
        )  # fmt: skip
        if self.method == "chain":
            pools = tuple(torch.full_like(pool, float("nan")) for pool in self.engine.pages)
            drafter.bind_cache(*pools)
            self.engine.pages = (*self.engine.pages, *pools)  # type: ignore[assignment]
        else:
            self.engine.pipeline.draft_options = self.asked

    @staticmethod
    def asked(request_id: int) -> Mapping[str, Any]:
        rng = random.Random(request_id)
        options = {"num_beams": rng.randint(1, BEAMS), "length": rng.randint(1, LENGTH),
                   "adaptive": rng.random() < 0.3, "temperature": 1.0,
                   "keeps_laws": False}  # fmt: skip
        return {} if rng.random() < 0.1 else options

    def job(self, rng: random.Random) -> Job:
        options: dict[str, Any] = {"seed": rng.randrange(2**60)}
        if rng.random() < 0.15:
            options["speculative"] = False
        elif rng.random() < 0.3:
            options["max_draft_len"] = rng.choice([0, 1, 3])
        if rng.random() < 0.2:
            options["stop_token_ids"] = [rng.randrange(VOCAB)]
        return Job(list(rng.choice(sorted(self.texts))), rng.choice([1, 2, 7, 24]), options)

    def alone(self, job: Job) -> Delivery:
        text = self.texts[tuple(job.prompt)][: job.max_tokens]
        stops = job.options.get("stop_token_ids", [])
        end = next((i for i, t in enumerate(text) if t in stops), len(text))
        by = text[end] if end < len(text) else None
        return Delivery(text[: end + 1], "length" if by is None else "stop", by)

    def ended(self, got: Delivery, wanted: Delivery) -> None:
        super().ended(got, wanted)
        if self.method == "chain" and not self.reuse and got.finish_reason == "length":
            assert got.num_accepted == got.num_drafts

    def idle(self) -> None:
        super().idle()
        assert self.engine.pipeline.draft_failures == 0


@pytest.fixture(scope="module")
def texts(models: Folders) -> dict[tuple[int, ...], list[int]]:
    """Prompts and how they go on."""
    starts = [*PROMPTS, *[p[: len(p) // 2 + 1] for p in PROMPTS]]
    with open_llm(models, None) as llm:
        said = texts_of(llm, GREEDY, starts)
    return {tuple(start): text for start, text in zip(starts, said, strict=True)}


@pytest.mark.parametrize("method", ["chain", "redrafter"])
def test_random_programs(models: Folders, texts: Any, method: str) -> None:
    seen = run_programs(ModelSchedule, 40, method=method, models=models, texts=texts)
    assert seen["compared"] > 300 and seen["accepted"] > 50 and seen["replayed"] > 20
    assert (seen["hits"] > 0) == (method == "chain")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["chain", "redrafter"])
def test_many_random_programs(models: Folders, texts: Any, method: str) -> None:
    seen = run_programs(ModelSchedule, 2000, method=method, models=models, texts=texts)
    assert seen["compared"] > 15_000

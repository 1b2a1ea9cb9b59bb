"""Medusa and ReDrafter keep the joint law of a sampled target.

As test_acceptance_law.py, with the real drafters: heads and a recurrent network with random weights
on hidden states that tell the last two tokens, so that drafts are right often enough to be accepted
and wrong often enough to be rejected. Both offer trees chosen without chance, and so does suffix
decoding beside them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from medusa_models import save_heads
from table_target import TableModel, chi_square, joint_law

from reference.sampling_reference import Law
from specdec_ext import MedusaDecodingConfig, ReDrafterDecodingConfig, SamplingParams, _core
from specdec_ext.drafters import make_drafter
from specdec_ext.drafters.redrafter.model import Redrafter, RedrafterShape, save_redrafter
from specdec_ext.engine.slot_drafting import SlotDrafting
from specdec_ext.models.place import CPU
from specdec_ext.request.resolve import stream_seed
from specdec_ext.request.speculation import resolve_speculation

VOCAB, TOKENS, HIDDEN = 5, 4, 8
PROMPT = [0, 3, 1, 3, 1, 2, 0, 3, 1, 4, 0, 3, 1]
BATCH = 500
LAWS = [Law(1.0), Law(0.6, top_p=0.85), Law(1.6, top_k=4, min_p=0.1)]
TREES: dict[str, Any] = {
    "medusa": {"medusa_choices": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    "redrafter": {"num_beams": 3, "draft_len_per_beam": 3},
    "redrafter, its law": {"num_beams": 4, "draft_len_per_beam": 2, "greedy_search": False},
}
SUFFIX = {"max_draft_len": 6, "min_token_prob": 0.0}


@functools.cache
def target_table() -> np.ndarray:
    """Scores [before, last, next]."""
    return np.random.default_rng(31).normal(0, 1.2, (VOCAB,) * 3).astype(np.float32)


class HiddenTarget:
    """What drafters ask of a target: sizes, embeddings, a head, and hidden states of a context."""

    hidden_size, vocab_size, kv_dtype = HIDDEN, VOCAB, torch.float32
    place = CPU

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.table = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.rows = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.states = torch.randn(VOCAB, VOCAB, HIDDEN, generator=generator)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids.long()]

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows[ids.long()]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.rows.T


def make(name: str, folder: Path) -> tuple[Any, Any]:
    """The drafter and its configuration."""
    if name == "medusa":
        save_heads(folder, hidden=HIDDEN, vocab=VOCAB, number=3)
        config: Any = MedusaDecodingConfig(folder, adaptive=False, **TREES[name])
    else:
        torch.manual_seed(2)
        network = Redrafter(RedrafterShape(VOCAB, HIDDEN, 2 * HIDDEN, 1, True))
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        save_redrafter(network, folder, dtype=torch.float32)
        config = ReDrafterDecodingConfig(folder, adaptive=False, **TREES[name])
    drafter = make_drafter(config, HiddenTarget(), max_requests=BATCH)
    return drafter, getattr(drafter, "config", config)


def sample(
    name: str, folder: Path, law: Law, acceptance: str, draws: int
) -> tuple[np.ndarray, float]:
    """Counts [V ** TOKENS] of what `draws` requests delivered, and accepted drafts per request."""
    name, _, beside = name.partition(" beside ")
    drafter, config = make(name, folder)
    sources = {"with_suffix": True, "suffix": SUFFIX} if beside else {}
    states = HiddenTarget().states
    params = SamplingParams(temperature=law.temperature, acceptance=acceptance)
    options = resolve_speculation(params, config)[2]
    model = TableModel(target_table())
    k_pages, v_pages = model.pages(num_pages=BATCH * 9, page_size=4)
    ex = _core.Executor(
        k_pages, v_pages, vocab_size=VOCAB, max_batch_size=BATCH, max_seq_len=28,
        max_num_tokens=BATCH * 24, method="proposed", adaptive=False,
        proposed_max_draft_len=config.max_draft_len, proposed_max_path=config.max_draft_path_len,
        **sources,
    )  # fmt: skip
    drafting = SlotDrafting(drafter, ex, hidden_size=HIDDEN)
    powers = [VOCAB**i for i in range(TOKENS - 1, -1, -1)]
    counts = np.zeros(VOCAB**TOKENS, np.int64)
    texts: dict[int, list[int]] = {}
    of_source = [0] * len(_core.DRAFT_SOURCES)  # accepted drafts
    submitted = 0
    while submitted < draws or texts:
        while submitted < draws and len(texts) < BATCH:
            number = ex.submit(
                PROMPT, max_tokens=TOKENS, seed=stream_seed(1, submitted), acceptance=acceptance,
                **law.options(),
            )  # fmt: skip
            texts[number] = []
            drafting.start(number, PROMPT, {}, options)
            submitted += 1
        plan = drafting.plan()
        hidden = drafting.hidden_for(plan)
        assert hidden is not None
        before, last = model.last_two(plan)
        hidden[:] = states[before, last]
        for out in drafting.commit(plan, torch.from_numpy(model.scores[before, last])):
            texts[out.request_id] += out.tokens
            for source, _, right in out.sources:
                of_source[source] += right
            if out.finish_reason is not None:
                tokens = texts.pop(out.request_id)
                drafting.end(out.request_id)
                assert len(tokens) == TOKENS, out.error
                counts[sum(t * p for t, p in zip(tokens, powers, strict=True))] += 1
    assert drafting.stats()["failures"] == 0
    accepted = ex.stats()["num_accepted_tokens"] / draws
    assert accepted > 0.1, f"{accepted} drafts accepted per text: they say nothing about the rule"
    if beside:  # and so have both sources
        assert (
            min(of_source[_core.DRAFT_SOURCES.index(s)] for s in ("suffix", "model")) > 0.05 * draws
        )
    return counts, accepted


CASES = [(name, law, "rejection") for name in TREES for law in LAWS]
CASES += [(name, LAWS[0], "exact_match") for name in TREES]
# With trees of suffix decoding merged into the drafter's.
BESIDE = ["medusa beside suffix", "redrafter beside suffix"]
CASES += [(name, law, "rejection") for name in BESIDE for law in LAWS]
CASES += [(name, LAWS[0], "exact_match") for name in BESIDE]


def check(name: str, folder: Path, law: Law, acceptance: str, draws: int) -> None:
    wanted = joint_law(target_table(), PROMPT, TOKENS, law)
    statistic, bound = chi_square(sample(name, folder, law, acceptance, draws)[0], wanted)
    assert statistic < bound, (statistic, bound)


@pytest.mark.parametrize(("name", "law", "acceptance"), CASES, ids=str)
def test_drafts_keep_the_joint_law(name: str, law: Law, acceptance: str, tmp_path: Path) -> None:
    check(name, tmp_path, law, acceptance, draws=5_000)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "law", "acceptance"), CASES, ids=str)
def test_drafts_keep_the_joint_law_of_many(
    name: str, law: Law, acceptance: str, tmp_path: Path
) -> None:
    check(name, tmp_path, law, acceptance, draws=100_000)


def test_best_beam_is_an_approximation_that_accepts_more(tmp_path: Path) -> None:
    """The longest of several beams is taken, and nothing corrects for that."""
    name, law = "redrafter", LAWS[0]
    counts, accepted = sample(name, tmp_path, law, "best_beam", 5_000)
    statistic, bound = chi_square(counts, joint_law(target_table(), PROMPT, TOKENS, law))
    assert statistic > bound
    assert accepted > 1.2 * sample(name, tmp_path, law, "rejection", 5_000)[1]

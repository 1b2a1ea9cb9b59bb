"""Outputs of earlier requests that suffix decoding searches: which, how many, what is drafted."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from reference import suffix_reference as reference
from specdec_ext import _core

VOCAB = 4096
LEAST = 6553  # of reference.ONE: 0.1
Step = tuple[list[int], list[tuple[int, int]]]  # history, drafts as (token, parent)


class Scripted:
    """An executor whose requests have known texts, one at a time."""

    def __init__(self, cached: int, *, max_seq_len: int = 512, **options: Any) -> None:
        pages = torch.zeros(1, max_seq_len // 8 + 20, 1, 8, 8)
        suffix = {"max_draft_len": 10, "min_token_prob": 0.1}
        self.executor = _core.Executor(
            pages, pages.clone(), vocab_size=VOCAB, max_batch_size=1, max_seq_len=max_seq_len,
            max_num_tokens=max_seq_len, method="suffix", suffix=suffix, adaptive=False,
            suffix_cached_requests=cached, **options,
        )  # fmt: skip

    def run(
        self, prompt: list[int], output: list[int], salt: str = "", cancel_at: int | None = None
    ) -> list[Step]:
        """What each step that decodes drafted."""
        text, steps, got = [*prompt, *output], [], 0
        rid = self.executor.submit(prompt, max_tokens=len(output), cache_salt=salt)
        while (plan := self.executor.plan()) is not None:
            positions, tokens = plan.positions.tolist(), plan.tokens.tolist()
            if not plan.num_prefill_rows:
                parents = [int(parent) - 1 for parent in plan.parents[1 : plan.num_rows]]
                drafts = list(zip(tokens[1:], parents, strict=True))
                steps.append((text[: positions[0] + 1], drafts))
            ids = [text[min(positions[r] + 1, len(text) - 1)] for r in plan.logit_rows.tolist()]
            for out in self.executor.commit(plan, torch.tensor(ids, dtype=torch.int32)):
                got += len(out.tokens)
            if cancel_at is not None and got >= cancel_at:
                self.executor.cancel(rid)
                break
        return steps

    @property
    def pool_bytes(self) -> int:
        return int(self.executor.stats()["pool_bytes"])


def phrases(source: random.Random, length: int, words: list[list[int]]) -> list[int]:
    text: list[int] = []
    while len(text) < length:
        text += source.choice(words) if source.random() < 0.8 else [source.randrange(VOCAB)]
    return text[:length]


def by_definition(history: list[int], halves: list[list[list[int]]]) -> list[tuple[int, int]]:
    """The drafts behind a history: of its own text, or of outputs that agree with more of it."""

    def longest(text: list[int], searched: int) -> int:
        return max((m for _, m in reference.occurrences(text, 24, searched)), default=0)

    best = longest(history, len(history))
    nodes = reference.draft(history, 10, min_prob=LEAST)
    for outputs in halves:  # the young one first
        past = [token for output in outputs for token in [-1, *output]]
        text = [*past, -2, *history[-64:]]
        if longest(text, len(past)) > best:
            best = longest(text, len(past))
            nodes = reference.draft(text, 10, min_prob=LEAST, searched=len(past))
    place = {-1: -1}
    drafts: list[tuple[int, int]] = []
    for i, node in enumerate(nodes):
        if node.token >= 0 and node.parent in place:
            place[i] = len(drafts)
            drafts.append((node.token, place[node.parent]))
    return drafts


@pytest.mark.parametrize("cached", [1, 2, 5, 100])
def test_drafts_are_those_of_the_definition(cached: int) -> None:
    source = random.Random(cached)
    words = [[source.randrange(VOCAB) for _ in range(source.randrange(2, 12))] for _ in range(12)]
    engine = Scripted(cached)
    kept: list[list[list[int]]] = [[], []]  # young, old
    compared = others = 0
    for _ in range(14):
        prompt, output = (phrases(source, n, words) for n in (30, source.randrange(60, 120)))
        for history, drafts in engine.run(prompt, output):
            if len(prompt) + len(output) - len(history) < 26:
                continue  # too near the end for every draft
            assert drafts == by_definition(history, kept)
            compared += bool(drafts)
            others += drafts != by_definition(history, [])
        if len(kept[0]) >= max(1, cached // 2):
            kept = [[], kept[0] if cached > 1 else []]
        kept[0].append(output)
    assert compared > 100 and others > 10


def new_text(seed: int, length: int = 60) -> list[int]:
    """No token twice: nothing of it is found in itself."""
    return random.Random(seed).sample(range(VOCAB), length)


def found(engine: Scripted, output: list[int], salt: str = "", first: int = 1) -> bool:
    """Whether an earlier output like this one is known to a request that begins as it does, which
    is an output of its own from then on."""
    steps = engine.run([first, *output[:9]], output[9:14], salt)
    return any((output[len(history) - 1], -1) in drafts for history, drafts in steps)


@pytest.mark.parametrize("cached", [1, 2, 3, 8])
def test_the_latest_outputs_are_kept(cached: int) -> None:
    for count in range(1, 3 * cached + 2):
        texts = [new_text(seed) for seed in range(count)]
        # One look for each engine: it is an output.
        for back in (1, max(1, cached // 2), cached + 1):
            engine = Scripted(cached)
            for text in texts:
                engine.run([2], text)
            if back > count:
                continue
            known = found(engine, texts[-back])
            # Half of the bound is sure to be there, more than the bound never is.
            assert known if back <= max(1, cached // 2) else not known, (cached, count, back)


def test_none_are_kept_unless_asked_for() -> None:
    engine = Scripted(0)
    for _ in range(3):
        engine.run([2], new_text(1))
    assert not found(engine, new_text(1))
    assert engine.pool_bytes == 0


def test_salts_do_not_meet_and_the_least_recent_goes() -> None:
    engine = Scripted(4)
    for i in range(8):
        engine.run([2], new_text(i), f"salt {i}")
    assert not found(engine, new_text(0), "salt 1")
    assert found(engine, new_text(0), "salt 0")  # which is used by that
    engine.run([2], new_text(9), "one more")  # salt 2 goes: 0 and 1 were used since
    assert found(engine, new_text(0), "salt 0")
    assert found(engine, new_text(3), "salt 3")
    assert not found(engine, new_text(2), "salt 2")


def test_a_cancelled_request_leaves_what_it_said() -> None:
    engine = Scripted(4)
    engine.run([2], new_text(5), cancel_at=30)
    assert found(engine, new_text(5)[:20])
    assert not found(engine, new_text(5)[35:])


def test_memory_is_bounded() -> None:
    engine = Scripted(1_000_000, max_seq_len=6_200)
    sizes = []
    for i in range(20):  # 120,000 tokens, most of them drafts of their own text
        engine.run([2], new_text(i) * 100, "one salt")
        sizes.append(engine.pool_bytes)
    assert 4e6 < max(sizes) <= 6.5e6 and max(sizes[12:]) == max(sizes)
    for i in range(30):
        engine.run([2], new_text(i), f"salt {i}")
    assert engine.pool_bytes < 8 * 60_000  # of eight salts, and the large one has gone


def test_what_has_no_suffix_decoding_is_refused() -> None:
    for method, cached in (("none", 3), ("suffix", -1)):
        with pytest.raises(ValueError, match="suffix_cached_requests = "):
            _core.Executor(
                vocab_size=8, max_seq_len=8, max_num_tokens=32, num_pages=8, page_size=4,
                method=method, suffix_cached_requests=cached,
            )  # fmt: skip

"""Prompts that enter a slot's n-gram index: by a block on a device, token by token on the host."""

from __future__ import annotations

import itertools
import random

import torch
from cuda_calls import CPU, Target, every_backend
from kernel_calls import int32

from specdec_ext import ops

SENTINEL = -7


def ngram_drafts(target: Target, max_seq_len: int, prompts: list[list[int]], choices: list[int],
                 longest: int) -> tuple[list[int], list[int]]:  # fmt: skip
    """What prompt lookup drafts after each prompt and the choice behind it: tokens, firsts."""
    count = len(prompts)
    layout = ops.SlotLayout(
        method="ngram", max_seq_len=max_seq_len, max_matching_ngram_size=longest
    )
    slots = ops.make_slots(layout, count)
    for slot, prompt in enumerate(prompts):
        ops.enter_slot(slots, slot, layout.request_bytes(prompt, max_tokens=20, max_draft_len=5))
    slots = target.put(slots)
    everyone = target.put(int32(list(range(count))))
    made = [target.put(t) for t in ops.make_results(layout, count)]
    ops.commit_step(
        layout, slots, everyone, target.put(int32(list(range(count + 1)))),
        target.put(int32(choices)), results=made[0], path=made[1], path_len=made[2],
        backend=target.backend,
    )  # fmt: skip
    tokens, parents, cu_rows, kv_len = (
        target.put(torch.full((n,), SENTINEL, dtype=torch.int32))
        for n in (6 * count, 6 * count, count + 1, count)
    )
    ops.draft_step(
        layout, slots, everyone, tokens=tokens, parents=parents, cu_rows=cu_rows, kv_len=kv_len,
        backend=target.backend,
    )  # fmt: skip
    return tokens.tolist(), cu_rows.tolist()


def tokens_of_one_part(count: int, parts: int) -> list[int]:
    """Tokens that the index of cpp/algo/ngram_index.h keeps in the first part of its table."""
    found: list[int] = []
    for token in itertools.count():
        if len(found) == count:
            return found
        h = (0x9E3779B97F4A7C15 ^ token) * 0x9FB21C651E98DF25 % 2**64
        if (h ^ h >> 29) >> 59 & (parts - 1) == 0:
            found.append(token)
    raise AssertionError


@every_backend
def test_a_prompt_that_a_block_enters_is_indexed_as_token_by_token(target: Target) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(vocab) for _ in range(700)] for vocab in (2, 30, 500, 10**6)]
    prompts += [[7] * 650, list(range(600)), list(range(40)) * 16]
    prompts = [prompt for prompt in prompts for _ in range(4)]
    choices = [rng.choice(prompt) for prompt in prompts]
    got = ngram_drafts(target, 1000, prompts, choices, 3)
    assert got == ngram_drafts(CPU, 1000, prompts, choices, 3)
    assert got[1][-1] > 4 * len(prompts), "most find a draft"


@every_backend
def test_a_crowded_index_leaves_out_what_it_does_token_by_token(target: Target) -> None:
    """More patterns than the part of a table holds: which ones stay depends on their order."""
    prompt = tokens_of_one_part(400, parts=8)
    choices = prompt[5:395:13]
    got = ngram_drafts(target, 1000, [prompt] * len(choices), choices, 1)
    assert got == ngram_drafts(CPU, 1000, [prompt] * len(choices), choices, 1)
    found = [end - first > 1 for first, end in itertools.pairwise(got[1])]
    assert any(found) and not all(found)

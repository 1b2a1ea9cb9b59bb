"""Fuzzed networks that draft on the host, ReDrafter's and Medusa's: see targets.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hostile import Arguments, damaged
from object_targets import some_decoder
from targets import V, attempt, i32, target, zeros

from specdec_ext import _core, _core_testing

HIDDEN, RATES = 12, np.full((2, 8), 0.3)


def layer(n: int, k: int) -> Any:
    return _core.PackedLinear(torch.randn(n, k))


def network_arguments(rng: random.Random, note: Callable[[str], None]) -> Arguments:
    return {
        "hidden_size": HIDDEN, "num_scores": V, "recurrence": layer(12, 24),
        "projection": layer(14, 24), "blocks": [layer(14, 14)],
        "target": some_decoder(rng, note, wild=False), "head": layer(V, 14),
    }  # fmt: skip


@target
def recurrent_drafter(rng: random.Random, note: Callable[[str], None]) -> None:
    drafter = attempt(note, _core.RecurrentDrafter, damaged(rng, network_arguments(rng, note)))
    search = _core_testing.BeamSearch()
    attempt(note, search.start, damaged(rng, {"num_beams": [2, 3], "lengths": [3, 2]}))
    if drafter is None:
        return
    calls: list[tuple[Callable[..., Any], Arguments]] = [
        (_core_testing.start_network, {"hidden": [torch.zeros(12)] * 2, "tokens": [1, 2]}),
        (_core_testing.score_network, {"search": search}),
        (_core_testing.advance_network, {"search": search, "token_ids": zeros(V)}),
        (_core_testing.run_network, {"search": search, "gains": [1.0], "pass_seconds": 0.0}),
    ]
    for call, given in rng.sample(calls, len(calls)) if rng.random() < 0.3 else calls:
        attempt(note, call, {"network": drafter, **damaged(rng, given)})


def begun_slots() -> tuple[Any, torch.Tensor]:
    """Two requests that have been given a token, in a pool of three slots."""
    layout = _core.SlotLayout(method="proposed", max_seq_len=32)
    pool = torch.zeros(3, layout.slot_bytes, dtype=torch.uint8)
    for slot in range(2):
        data = layout.request_bytes(prompt_ids=[1, 2, 3], max_tokens=20)
        pool[slot, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    _core.commit_step(
        layout, pool, i32(0, 1), cu_logits=i32(0, 1, 2), sampled=i32(4, 5),
        results=zeros(2, layout.result_words), path=zeros(2, 128), path_len=zeros(2),
    )  # fmt: skip
    return layout, pool


def step_arguments(pool: tuple[Any, torch.Tensor]) -> Arguments:
    return {
        "layout": pool[0], "slots": pool[1], "slot_ids": i32(1, 0, -1), "max_drafts": i32(5, 3, 0),
        "hidden": torch.randn(3, HIDDEN),
    }  # fmt: skip


def step(
    rng: random.Random, note: Callable[[str], None], draft: Callable[..., Any], given: Arguments
) -> None:
    """A step with damaged arguments; a slot's bytes are the extension's own memory."""
    attempt(note, draft, {**damaged(rng, given), "slots": given["slots"]})


@target
def beam_drafter(rng: random.Random, note: Callable[[str], None]) -> None:
    network = attempt(note, _core.RecurrentDrafter, network_arguments(rng, note))
    arguments = {"network": network, "token_ids": zeros(V), "max_requests": 3, "vocab_size": V}
    drafter = attempt(note, _core.BeamDrafter, damaged(rng, arguments))
    if drafter is None:
        return
    pool = begun_slots()
    asked = {"slot": 1, "num_beams": 3, "length": 2, "temperature": 0.5, "adaptive": False,
             "keeps_laws": True}  # fmt: skip
    for slot in range(2):
        attempt(note, drafter.enter, damaged(rng, {**asked, "slot": slot}))
    for _ in range(3):
        step(rng, note, drafter.draft, {
            **step_arguments(pool), "pass_price": 0.0, "probs": torch.zeros(3, 6, 50),
            "ids": zeros(3, 6, 50), "has_probs": torch.zeros(3, dtype=torch.uint8),
        })  # fmt: skip


@target
def medusa_drafter(rng: random.Random, note: Callable[[str], None]) -> None:
    lm_heads = rng.choice([[layer(V, HIDDEN)], [layer(V, HIDDEN), layer(V, HIDDEN)], []])
    arguments = {
        "hidden_size": HIDDEN, "num_heads": 2, "num_scores": V, "first": layer(24, 12),
        "deeper": [[layer(12, 12)], [layer(12, 12)]], "lm_heads": lm_heads,
        "target": some_decoder(rng, note, wild=False), "token_ids": zeros(V),
    }  # fmt: skip
    heads = attempt(note, _core.MedusaHeads, damaged(rng, arguments))
    if heads is None:
        return
    hidden = torch.randn(2, HIDDEN)
    attempt(note, heads.scores, damaged(rng, {"hidden": hidden, "num_heads": 2}))
    attempt(note, heads.best, damaged(rng, {"hidden": hidden, "num_heads": 2, "top_k": 3}))
    made = {"heads": heads, "rates": RATES, "max_requests": 3, "vocab_size": V}
    drafter = attempt(note, _core.MedusaDrafter, damaged(rng, made))
    choices = [[0], [1], [0, 0], [0, 7]]
    tree = {"choices": choices, "rates": RATES, "likeliest": True}
    attempt(note, _core.guess_tree, damaged(rng, tree))
    if drafter is None:
        return
    pool = begun_slots()
    for slot in range(2):
        entry = {"slot": slot, "choices": choices, "adaptive": True}
        attempt(note, drafter.enter, damaged(rng, entry))
    for _ in range(3):
        step(rng, note, drafter.draft, step_arguments(pool))
    drafter.stats()
    drafter.measured()

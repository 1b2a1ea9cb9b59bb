"""A drafter that guesses as hash_target's function mostly goes on, and then misbehaves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from hash_target import HashFunction
from specdec_ext import ops
from specdec_ext.drafters import DraftInputs

NODES, PATH = 12, 5
PROPOSED = {
    "method": "proposed",
    "proposed_max_draft_len": NODES,
    "proposed_max_path": PATH,
}


class Guesser:
    """A SlotDrafter on the CPU."""

    name, needs_hidden = "guesser", False

    def __init__(self, function: HashFunction, seed: int, *, hostile: bool = True) -> None:
        self.function, self.rng, self.hostile = function, random.Random(seed), hostile
        self.seen: Counter[str] = Counter()
        self.widest = 0
        self.options: dict[int, Mapping[str, Any]] = {}

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        self.options[slot] = options

    def stats(self) -> Mapping[str, Any]:
        return {"memory_bytes": 0, "device": "cpu"}

    def draft(self, inputs: DraftInputs) -> None:
        count = inputs.num_requests
        last = torch.full((count, 2), -9, dtype=torch.int32)
        lens = torch.full((count,), -9, dtype=torch.int32)
        ops.recent_tokens(inputs.layout, inputs.slots, inputs.slot_ids, tokens=last, lens=lens,
                          max_drafts=inputs.max_drafts)  # fmt: skip
        self.widest = max(self.widest, inputs.max_width)
        tokens = torch.full((count, NODES), -1, dtype=torch.int32)
        parents = torch.full((count, NODES), -1, dtype=torch.int32)
        for b in range(count):
            if lens[b] == 0:
                assert last[b].tolist() == [0, 0]
                continue
            tree = self.tree(*last[b].tolist())
            for i, (token, parent) in enumerate(tree):
                tokens[b, i], parents[b, i] = token, parent
        self.seen["steps"] += 1
        if self.hostile and self.rng.random() < 0.1:
            self.seen["raised"] += 1
            raise RuntimeError("no drafts today")
        ops.propose_drafts(
            inputs.layout, inputs.slots, inputs.slot_ids, tokens, parents,
            vocab_size=self.function.vocab, status=torch.zeros(count, dtype=torch.int32),
        )  # fmt: skip

    def tree(self, before: int, last: int) -> list[tuple[int, int]]:
        """Guesses along one path, mostly right, and siblings, in topological order."""
        rng, function = self.rng, self.function
        nodes: list[tuple[int, int]] = []
        parent = -1
        for _ in range(rng.randrange(1, PATH + 1)):
            if rng.random() < 0.3:
                nodes.append((rng.randrange(function.vocab), parent))
            # The function's second mood: a hash of the last two tokens.
            token = function.next_token(1, last, before)
            nodes.append((token, parent))
            parent = len(nodes) - 1
            before, last = last, token
        if self.hostile and rng.random() < 0.2:
            where = rng.randrange(len(nodes))
            bad = rng.choice([(function.vocab, -1), (-5, -1), (0, where), (0, -2), (-1, -1)])
            nodes[where] = bad
            self.seen["bad entry"] += 1
        return nodes

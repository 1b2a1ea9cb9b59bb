"""Drafting and committing where the requests live: n-gram pools that are looked up and filled.

Every call drafts a step's trees and commits it with choices at random, so histories grow by a token
or two a call, as in a text that is hard to guess. Checked against the CPU's slots, step by step.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu import timing
from benchmarks.gpu.cells import SlotCell
from benchmarks.gpu.run import Target
from specdec_ext import ops

CHECKED_STEPS = 4
ROOM = 16384  # tokens that histories may grow by while they are timed


class Slots:
    """The slots of a cell on one device, past their prompts."""

    def __init__(self, cell: SlotCell, backend: str, device: torch.device | str) -> None:
        self.cell, self.backend, batch = cell, backend, cell.requests
        self.layout = ops.SlotLayout(
            method=cell.method, max_seq_len=cell.context + ROOM, lookahead=(7, 7, 7),
            max_matching_ngram_size=3,
        )  # fmt: skip
        self.slots = ops.make_slots(self.layout, batch, device)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rows = batch * cell.rows
        self.ids = torch.arange(batch, dtype=torch.int32, device=device)
        self.tokens, self.parents, self.kv_len = ints(rows), ints(rows), ints(batch)
        self.cu_rows, self.path_len = ints(batch + 1), ints(batch)
        self.results, self.path, _ = ops.make_results(self.layout, batch, device)
        generator = torch.Generator().manual_seed(4)
        # Few tokens follow each other often, so that the pools are full of what is looked up.
        text = torch.randint(cell.alphabet, (batch, cell.context), generator=generator)
        for slot, prompt in enumerate(text.tolist()):
            block = self.layout.request_bytes(
                prompt, max_tokens=ROOM, lookahead=(7, 7, 7), max_draft_len=10, seed=slot
            )
            ops.enter_slot(self.slots, slot, block)
        choices = torch.randint(cell.alphabet, (rows,), generator=generator, dtype=torch.int32)
        self.sampled = choices.to(device)
        firsts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self._commit(firsts, self.sampled[:batch])

    def _commit(self, cu_logits: torch.Tensor, sampled: torch.Tensor) -> None:
        ops.commit_step(
            self.layout, self.slots, self.ids, cu_logits, sampled, results=self.results,
            path=self.path, path_len=self.path_len, backend=self.backend,
        )  # fmt: skip

    def draft(self) -> None:
        ops.draft_step(
            self.layout, self.slots, self.ids, tokens=self.tokens, parents=self.parents,
            cu_rows=self.cu_rows, kv_len=self.kv_len, backend=self.backend,
        )  # fmt: skip

    def commit(self) -> None:
        self._commit(self.cu_rows, self.sampled)

    def state(self) -> list[torch.Tensor]:
        found = (self.tokens, self.parents, self.cu_rows, self.kv_len, self.results)
        return [tensor.cpu() for tensor in found]


def programs(cell: SlotCell, target: Target) -> dict[str, timing.Program]:
    """Returns what is timed.

    Raises   ArithmeticError if a draft or a token differs from the CPU's.
    """
    ours, expected = Slots(cell, target.backend, target.device), Slots(cell, "cpu", "cpu")
    for step in range(CHECKED_STEPS):
        for slots in (ours, expected):
            slots.draft()
            slots.commit()
        for got, wanted in zip(ours.state(), expected.state(), strict=True):
            if not torch.equal(got, wanted):
                raise ArithmeticError(f"step {step}: {got.tolist()} instead of {wanted.tolist()}")

    def both(_: int) -> None:
        ours.draft()
        ours.commit()

    def draft(_: int) -> None:
        ours.draft()

    return {"ours": both, "draft_step": draft}


def measure(cell: SlotCell, target: Target, timer: timing.Timer) -> dict[str, Any]:
    """Returns the record: microseconds of both operations, and of drafting alone."""
    rounds = timer.measure(programs(cell, target), 1)
    if "ours" in timer.failures:
        raise RuntimeError(timer.failures["ours"])
    record: dict[str, Any] = {**cell.describe(), "kind": "slots", "status": "ok", "us": None}
    if "ours" in rounds:
        record["us"] = round(timing.median(rounds["ours"]), 2)
        record["others"] = {"draft_step": {"us": round(timing.median(rounds["draft_step"]), 2)}}
        record["rounds_us"] = [round(us, 2) for us in rounds["ours"]]
    return record

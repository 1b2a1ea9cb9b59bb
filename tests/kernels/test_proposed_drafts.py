"""Drafts that operations propose into slots, and what drafters read there, on every backend.

The oracle is a few lines of Python lists: what a drafter said, cut at the first entry that is no
draft and at the step's limit, without what lies behind the text's end.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from cuda_calls import BAD_TREE, Target, every_backend
from kernel_calls import int32

from specdec_ext import ops

VOCAB, MAX_SEQ_LEN, SLOTS, ROWS = 50, 64, 6, 200
SENTINEL = -7
LAYOUT = ops.SlotLayout(method="proposed", max_seq_len=MAX_SEQ_LEN)


@dataclasses.dataclass
class Text:
    """One request, as the definition knows it."""

    history: list[int]
    max_len: int
    speculative: bool
    begun: bool = False
    ended: bool = False
    proposed: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    tree: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # of the step, with root
    hidden: float = 0.0

    @property
    def wants_drafts(self) -> bool:
        room = self.max_len - len(self.history)
        return self.begun and not self.ended and self.speculative and room > 1

    def propose(self, said: list[tuple[int, int]]) -> bool:
        """Returns whether what was said breaks off at something that is no padding."""
        if not self.wants_drafts:
            return False
        self.proposed = []
        for i, (token, parent) in enumerate(said):
            if not (0 <= token < VOCAB and -1 <= parent < i):
                return token != -1
            self.proposed.append((token, parent))
        return False

    def draft(self, limit: int) -> list[tuple[int, int]]:
        """(token, parent) of the step's rows."""
        if self.ended or not self.begun:
            return []
        room = self.max_len - len(self.history) - 1
        self.tree = [(self.history[-1], -1)]
        rows, depths = {-1: 0}, {-1: 0}  # of each draft that is kept, by its index
        for i, (token, parent) in enumerate(self.proposed if self.wants_drafts else []):
            if len(rows) <= limit and parent in rows and depths[parent] < room:
                rows[i], depths[i] = len(self.tree), depths[parent] + 1
                self.tree.append((token, rows[parent]))
        return self.tree

    def commit(self, choices: list[int], hidden: list[float]) -> None:
        """choices: of the prompt's last row, or of each node; hidden: what belongs to them."""
        tree = self.tree if self.begun else [(self.history[-1], -1)]
        node, tokens = 0, [choices[0]]
        while True:
            follows = [i for i, (token, parent) in enumerate(tree)
                       if i and parent == node and token == choices[node]]  # fmt: skip
            if not follows:
                break
            node = follows[0]
            tokens.append(choices[node])
        room = self.max_len - len(self.history)
        self.history += tokens[:room]
        self.ended = len(self.history) == self.max_len
        self.begun = True
        self.proposed = []  # they continue another history now
        if not self.ended:
            self.hidden = hidden[node]


class World:
    """Slots on a target beside their texts."""

    def __init__(self, target: Target, rng: random.Random, hidden_size: int, dtype: Any) -> None:
        self.target, self.rng = target, rng
        noise = torch.randint(0, 255, (SLOTS, LAYOUT.slot_bytes), dtype=torch.uint8)
        self.slots = target.put(noise)
        self.texts: list[Text] = []
        for slot in range(SLOTS):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 9]))]
            max_tokens, speculative = rng.choice([2, 3, 9, 40]), rng.random() < 0.8
            block = LAYOUT.request_bytes(prompt, max_tokens=max_tokens, speculative=speculative)
            ops.enter_slot(self.slots, slot, block)
            self.texts.append(Text(prompt, len(prompt) + max_tokens, speculative))
        self.kept = target.put(torch.zeros(SLOTS, hidden_size, dtype=dtype))

    def filled(self, *shape: int) -> torch.Tensor:
        return self.target.put(torch.full(shape, SENTINEL, dtype=torch.int32))

    def where(self) -> dict[str, Any]:
        return {"backend": self.target.backend}

    def propose(self, ids: list[int], width: int) -> None:
        rng, target = self.rng, self.target
        tokens, parents, counts, flags = [], [], [], []
        chains = rng.random() < 0.3
        for slot in ids:
            said = [
                (rng.randrange(VOCAB), i - 1 if chains else rng.randrange(-1, i))
                for i in range(width)
            ]
            if rng.random() < 0.4:
                i = rng.randrange(width)
                bad = [(VOCAB, -1), (-2, -1), (-1, -1)]
                bad += [] if chains else [(3, i), (3, i + 1), (3, -2), (3, width)]
                said[i] = rng.choice(bad)
            tokens.append([t for t, _ in said])
            parents.append([p for _, p in said])
            counts.append(rng.choice([width, width, rng.randrange(width + 1)]))
            flagged = slot >= 0 and self.texts[slot].propose(said[: counts[-1]])
            flags.append(BAD_TREE if flagged else 0)
        status = target.put(torch.zeros(len(ids), dtype=torch.int32))
        ops.propose_drafts(
            LAYOUT, self.slots, target.put(int32(ids)), target.put(torch.tensor(tokens).int()),
            None if chains else target.put(torch.tensor(parents).int()),
            counts=target.put(int32(counts)), vocab_size=VOCAB, status=status, **self.where(),
        )  # fmt: skip
        assert status.tolist() == flags

    def recent(self, ids: list[int], width: int) -> None:
        limits = [self.rng.choice([0, 3]) for _ in ids]
        tokens, lens = self.filled(len(ids), width), self.filled(len(ids))
        room = self.filled(len(ids)) if self.rng.random() < 0.7 else None
        ops.recent_tokens(
            LAYOUT, self.slots, self.target.put(int32(ids)), tokens=tokens, lens=lens,
            room=room, max_drafts=self.target.put(int32(limits)), **self.where(),
        )  # fmt: skip
        for slot, limit, got, length, left in zip(
            ids, limits, tokens.tolist(), lens.tolist(),
            [None] * len(ids) if room is None else room.tolist(), strict=True,
        ):  # fmt: skip
            text = self.texts[slot] if slot >= 0 else None
            wants = text is not None and text.wants_drafts and limit > 0
            if text is None or not wants or len(text.history) < width:
                assert (got, length) == ([0] * width, 0)
                assert left in (0, None)
            else:
                assert (got, length) == (text.history[-width:], len(text.history))
                assert left in (text.max_len - len(text.history) - 1, None)

    def step(self, ids: list[int]) -> None:
        """Rows of all that decode, one for prompts that have not begun; choices; hidden states."""
        rng, target, where = self.rng, self.target, self.where()
        limits = [rng.choice([0, 1, 3, 127]) for _ in ids]
        tokens, parents = self.filled(ROWS), self.filled(ROWS)
        cu_rows, kv_len = self.filled(len(ids) + 1), self.filled(len(ids))
        ops.draft_step(
            LAYOUT, self.slots, target.put(int32(ids)), tokens=tokens, parents=parents,
            cu_rows=cu_rows, kv_len=kv_len, max_drafts=target.put(int32(limits)), **where,
        )  # fmt: skip
        rows, cu = cu_rows.tolist(), [0]
        choices: list[int] = []
        for b, slot in enumerate(ids):
            tree = self.texts[slot].draft(limits[b]) if slot >= 0 else []
            got = list(zip(tokens.tolist(), parents.tolist(), strict=True))[rows[b] : rows[b + 1]]
            assert got == tree
            begins = slot >= 0 and not self.texts[slot].begun and not self.texts[slot].ended
            drafts = [token for token, _ in tree[1:]]
            for _ in range(1 if begins else len(tree)):
                guess = rng.choice(drafts) if drafts and rng.random() < 0.7 else None
                choices.append(rng.randrange(VOCAB) if guess is None else guess)
            cu.append(len(choices))
        hidden = torch.arange(1, len(choices) + 1).float()[:, None] + 100 * rng.randrange(1, 3)
        hidden = hidden.repeat(1, self.kept.shape[1]).to(self.kept.dtype)
        results, path = self.filled(len(ids), LAYOUT.result_words), self.filled(len(ids), 128)
        path_len, on = self.filled(len(ids)), target.put(int32(ids))
        first = target.put(int32(cu))
        ops.commit_step(
            LAYOUT, self.slots, on, first, target.put(int32(choices or [0])), results=results,
            path=path, path_len=path_len, **where,
        )  # fmt: skip
        ops.keep_hidden(
            LAYOUT, self.slots, on, first, results=results, path=path, path_len=path_len,
            hidden=target.put(hidden), kept=self.kept, **where,
        )  # fmt: skip
        for b, slot in enumerate(ids):
            if cu[b + 1] > cu[b]:
                part = slice(cu[b], cu[b + 1])
                self.texts[slot].commit(choices[part], hidden[part, 0].float().tolist())
        for slot, kept in enumerate(self.kept.float().cpu()):
            assert kept.tolist() == [self.texts[slot].hidden] * len(kept)


@every_backend
@pytest.mark.parametrize(
    ("hidden_size", "dtype"), [(40, torch.float32), (9, torch.bfloat16), (24, torch.float16)]
)
def test_what_a_drafter_says_is_what_the_step_drafts(
    target: Target, hidden_size: int, dtype: torch.dtype
) -> None:
    for seed in range(8 if target.backend == "cuda-emu" else 25):
        rng = random.Random(seed)
        world = World(target, rng, hidden_size, dtype)
        for _ in range(8):
            ids = rng.sample(range(SLOTS), rng.randrange(1, SLOTS + 1))
            ids.insert(rng.randrange(len(ids) + 1), -1)
            world.propose(ids, rng.choice([1, 5, 33]))
            if rng.random() < 0.8:
                world.recent(ids, rng.choice([1, 2, 12]))
                world.step(ids)


@every_backend
def test_drafts_of_another_history_are_left_out(target: Target) -> None:
    """What a slot's last request was told, and drafts that the text has run past."""
    world = World(target, random.Random(3), 4, torch.float32)
    text = world.texts[0] = Text([1, 2], 60, True)
    block = LAYOUT.request_bytes([1, 2], max_tokens=58)
    ops.enter_slot(world.slots, 0, block)
    world.step([0])
    world.propose([0], 5)
    world.step([0])
    world.step([0])  # nothing was proposed for this one
    assert len(text.tree) == 1
    ops.enter_slot(world.slots, 0, block)  # the same text anew: its length was seen before
    text = world.texts[0] = Text([1, 2], 60, True, hidden=text.hidden)
    world.step([0])
    world.step([0])
    assert len(text.tree) == 1


@every_backend
def test_near_the_end_the_deep_drafts_alone_are_left_out(target: Target) -> None:
    """Two tokens may follow the golden one but the last: nodes of depth 3 go, others move up."""
    layout = ops.SlotLayout(method="proposed", max_seq_len=40)
    slots = target.put(torch.zeros(1, layout.slot_bytes, dtype=torch.uint8))
    ops.enter_slot(slots, 0, layout.request_bytes([5], max_tokens=4))
    one = target.put(int32([0]))
    results, path, path_len = ops.make_results(layout, 1, target.device)
    ops.commit_step(
        layout, slots, one, target.put(int32([0, 1])), target.put(int32([9])), results=results,
        path=path, path_len=path_len, backend=target.backend,
    )  # fmt: skip
    tokens, parents = [10, 11, 12, 13, 14, 15, 16, 17], [-1, 0, 1, 2, -1, 4, 5, 4]
    for most, expected in (
        (127, ([9, 10, 11, 14, 15, 17], [-1, 0, 1, 0, 3, 3])),
        (4, ([9, 10, 11, 14, 15], [-1, 0, 1, 0, 3])),
    ):
        ops.propose_drafts(
            layout, slots, one, target.put(int32([tokens])), target.put(int32([parents])),
            vocab_size=VOCAB, backend=target.backend,
        )  # fmt: skip
        got = [target.put(torch.zeros(n, dtype=torch.int32)) for n in (9, 9, 2, 1)]
        ops.draft_step(
            layout, slots, one, tokens=got[0], parents=got[1], cu_rows=got[2], kv_len=got[3],
            max_drafts=target.put(int32([most])), backend=target.backend,
        )  # fmt: skip
        rows = int(got[2][1])
        assert (got[0].tolist()[:rows], got[1].tolist()[:rows]) == expected


@every_backend
def test_a_full_tree_of_127_drafts(target: Target) -> None:
    layout = ops.SlotLayout(method="proposed", max_seq_len=400)
    slots = target.put(torch.zeros(1, layout.slot_bytes, dtype=torch.uint8))
    ops.enter_slot(slots, 0, layout.request_bytes([5], max_tokens=399))
    one = target.put(int32([0]))
    results, path, path_len = ops.make_results(layout, 1, target.device)
    ops.commit_step(
        layout, slots, one, target.put(int32([0, 1])), target.put(int32([9])), results=results,
        path=path, path_len=path_len, backend=target.backend,
    )  # fmt: skip
    rng = random.Random(1)
    tokens = [rng.randrange(VOCAB) for _ in range(127)]
    parents = [rng.randrange(-1, i) for i in range(127)]
    sent = [target.put(int32([values])) for values in (tokens, parents)]
    ops.propose_drafts(layout, slots, one, *sent, vocab_size=VOCAB, backend=target.backend)
    got = [target.put(torch.zeros(n, dtype=torch.int32)) for n in (128, 128, 2, 1)]
    ops.draft_step(layout, slots, one, tokens=got[0], parents=got[1], cu_rows=got[2],
                   kv_len=got[3], backend=target.backend)  # fmt: skip
    assert got[2].tolist() == [0, 128]
    assert got[0].tolist() == [9, *tokens]
    assert got[1].tolist() == [-1, *(p + 1 for p in parents)]


@every_backend
def test_estimates_lie_beside_the_drafts(target: Target) -> None:
    """A number that is no chance, and every one that is not given, reads as unknown."""
    slots = target.put(torch.zeros(3, LAYOUT.slot_bytes, dtype=torch.uint8))
    ids = target.put(int32([0, 1, 2]))
    for slot in range(3):
        ops.enter_slot(slots, slot, LAYOUT.request_bytes([5], max_tokens=40))
    results, path, path_len = ops.make_results(LAYOUT, 3, target.device)
    ops.commit_step(
        LAYOUT, slots, ids, target.put(int32([0, 1, 2, 3])), target.put(int32([9, 9, 9])),
        results=results, path=path, path_len=path_len, backend=target.backend,
    )  # fmt: skip
    tokens = target.put(int32([[1, 2, 3, 4], [1, 2, 3, -1], [4, 3, 2, 1]]))
    said = [[0.5, 0.25, 1.0, 0.0], [0.75, -0.5, 1.5, 0.3], [float("nan"), float("inf"), 0.1, 0.2]]
    read = [[0.5, 0.25, 1.0, 0.0], [0.75, -1.0, -1.0], [-1.0, -1.0, 0.1, 0.2]]
    nothing = [[-1.0] * len(numbers) for numbers in read]
    for chances, wanted in ((torch.tensor(said), read), (None, nothing)):
        ops.propose_drafts(
            LAYOUT, slots, ids, tokens, vocab_size=VOCAB, backend=target.backend,
            survival=None if chances is None else target.put(chances),
        )  # fmt: skip
        for slot, numbers in enumerate(wanted):
            block = slots[slot].cpu().view(torch.float32)
            first = len(block) - 128  # 127 numbers and a word of padding end a slot
            assert block[first : first + len(numbers)].tolist() == torch.tensor(numbers).tolist()


def arguments() -> dict[str, Any]:
    return {
        "slots": ops.make_slots(LAYOUT, 2),
        "slot_ids": int32([0, 1]),
        "tokens": torch.zeros(2, 3, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": torch.zeros(2, 128, dtype=torch.int32)}, r"128 drafts of each request: give 1"),
        ({"tokens": torch.zeros(3, 3, dtype=torch.int32)}, "tokens"),
        ({"tokens": torch.zeros(2, 3)}, "tokens"),
        ({"parents": torch.zeros(2, 2, dtype=torch.int32)}, "parents"),
        ({"counts": torch.zeros(3, dtype=torch.int32)}, "counts"),
        ({"survival": torch.zeros(2, 2)}, "survival"),
        ({"survival": torch.zeros(2, 3, dtype=torch.int32)}, "survival"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"slot_ids": int32([1, 1])}, "given twice"),
        ({"slots": torch.zeros(2, 8, dtype=torch.uint8)}, "slots"),
    ],
)
def test_bad_drafts_are_refused(changed: dict[str, Any], message: str) -> None:
    given = {**arguments(), "vocab_size": VOCAB, **changed}
    with pytest.raises((ValueError, TypeError), match=message):
        ops.propose_drafts(LAYOUT, given.pop("slots"), given.pop("slot_ids"), given.pop("tokens"),
                         given.pop("parents", None), **given)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": torch.zeros(2, 65, dtype=torch.int32)}, "tokens has 65 columns: give 1..64"),
        ({"lens": torch.zeros(3, dtype=torch.int32)}, "lens"),
        ({"max_drafts": torch.zeros(2)}, "max_drafts"),
        ({"room": torch.zeros(1, dtype=torch.int32)}, "room"),
    ],
)
def test_bad_places_for_recent_tokens_are_refused(changed: dict[str, Any], message: str) -> None:
    given = {**arguments(), "lens": torch.zeros(2, dtype=torch.int32), **changed}
    with pytest.raises((ValueError, TypeError), match=message):
        ops.recent_tokens(LAYOUT, given.pop("slots"), given.pop("slot_ids"), **given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kept": torch.zeros(3, 4)}, "kept"),
        ({"kept": torch.zeros(2, 4, dtype=torch.float16)}, "kept"),
        ({"hidden": torch.zeros(5, 4, dtype=torch.int32)}, "hidden"),
        ({"hidden": torch.zeros(4, 5).t()}, "hidden"),
        ({"path": torch.zeros(2, 64, dtype=torch.int32)}, "path"),
    ],
)
def test_bad_hidden_states_are_refused(changed: dict[str, Any], message: str) -> None:
    results, path, path_len = ops.make_results(LAYOUT, 2)
    given: dict[str, Any] = {
        "results": results, "path": path, "path_len": path_len, "hidden": torch.zeros(5, 4),
        "kept": torch.zeros(2, 4), **changed,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=message):
        ops.keep_hidden(LAYOUT, ops.make_slots(LAYOUT, 2), int32([0, 1]), int32([0, 1, 2]), **given)

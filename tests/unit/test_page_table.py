"""Pages and prefix reuse against a model of dictionaries, through random programs.

Beside the counts, every program writes what would be K/V: a page's memory remembers which text was
written where. Whatever a slot may read must be its own text.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from reference.page_table_reference import ReferencePageTable
from specdec_ext import _core_testing

SLOTS = 4


def make(num_pages: int, page_size: int, hash_bits: int = 64, **options: Any) -> Any:
    return _core_testing.PageTable(
        num_pages=num_pages,
        page_size=page_size,
        num_slots=SLOTS,
        max_pages_per_slot=16,
        enable_block_reuse=True,
        hash_bits=hash_bits,
        **options,
    )


class Program:
    """Random verbs on the table and its reference; `memory` stands for K/V."""

    def __init__(self, rng: random.Random, num_pages: int, page_size: int, hash_bits: int) -> None:
        self.rng, self.size = rng, page_size
        self.table = make(num_pages, page_size, hash_bits)
        self.model = ReferencePageTable(num_pages, page_size, SLOTS)
        # (page, place in the page) -> (salt, text up to and with this token)
        self.memory: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.texts: dict[int, tuple[str, list[int]]] = {}  # of opened slots
        self.pool = [[rng.randrange(2) for _ in range(8 * page_size)] for _ in range(3)]

    def text(self) -> list[int]:
        """Mostly the start of one of a few texts, then something of its own."""
        known = self.rng.choice(self.pool)
        own = [self.rng.randrange(2) for _ in range(self.rng.randrange(3 * self.size))]
        return known[: self.rng.randrange(len(known) + 1)] + own

    def write(self, slot: int, first: int, last: int) -> None:
        """Computes tokens first..last-1 of the slot's text; never into a published page."""
        salt, text = self.texts[slot]
        assert first >= self.table.shared_tokens(slot)
        pages = self.table.pages(slot)
        for i in range(first, last):
            self.memory[pages[i // self.size], i % self.size] = (salt, tuple(text[: i + 1]))

    def read(self, slot: int) -> None:
        """All committed tokens of the slot lie where they should, written after the same text."""
        salt, text = self.texts[slot]
        pages = self.table.pages(slot)
        for i in range(self.table.length(slot)):
            assert self.memory[pages[i // self.size], i % self.size] == (salt, tuple(text[: i + 1]))

    def begin(self, slot: int) -> None:
        salt, text = self.rng.choice(["", "a"]), self.text()
        self.texts[slot] = (salt, text)
        assert self.table.match(text, salt) == self.model.match(text, salt)
        self.table.open(slot, salt)
        self.model.open(slot, salt)
        assert self.table.attach(slot, text) == self.model.attach(slot, text)

    def grow(self, slot: int) -> None:
        """A step: room for drafts too, some tokens decided, the rest given back."""
        text = self.texts[slot][1]
        length = self.table.length(slot)
        if length == len(text):
            text += self.text()[: 16 * self.size - len(text)]
        decided = self.rng.randint(length, len(text))
        room = min(decided + self.rng.randrange(2 * self.size + 1), 16 * self.size)
        got = self.table.reserve(slot, room)
        assert got == self.model.reserve(slot, room)
        if not got:
            return
        self.write(slot, length, decided)
        for i in range(decided, room):  # rejected drafts
            self.memory[self.table.pages(slot)[i // self.size], i % self.size] = ("draft", ())
        for each in (self.table, self.model):
            each.commit(slot, decided)
            each.rewind(slot)
        if self.rng.random() < 0.7:
            self.table.publish(slot, text[:decided])
            self.model.publish(slot, text[:decided])

    def step(self) -> None:
        slot = self.rng.randrange(SLOTS)
        if slot not in self.texts:
            self.begin(slot)
        elif self.rng.random() < 0.25:
            self.table.release(slot)
            self.model.release(slot)
            del self.texts[slot]
        elif self.rng.random() < 0.02:
            assert self.table.drop_unused() == self.model.drop_unused()
        else:
            self.grow(slot)

    def compare(self) -> None:
        self.table.check_integrity()
        assert self.table.free_pages == self.model.free_pages
        assert self.table.cached_pages == self.model.cached_pages
        assert self.table.stats() == self.model.stats
        for slot in range(SLOTS):
            s = self.model.slots[slot]
            assert len(self.table.pages(slot)) == len(s.shared) + s.own
            assert self.table.length(slot) == s.length
            assert self.table.shared_tokens(slot) == len(s.shared) * self.size
            if slot in self.texts:
                self.read(slot)
        probe, salt = self.text(), self.rng.choice(["", "a", "never seen"])
        assert self.table.match(probe, salt) == self.model.match(probe, salt)


@pytest.mark.parametrize("hash_bits", [64, 1, 0])
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("num_pages", [9, 24, 80])
def test_random_programs(num_pages: int, page_size: int, hash_bits: int) -> None:
    rng = random.Random(num_pages * 1000 + page_size * 10 + hash_bits)
    totals = dict.fromkeys(("attached_pages", "deduplicated_pages", "evicted_pages"), 0)
    for _ in range(4):
        program = Program(rng, num_pages, page_size, hash_bits)
        for _ in range(250):
            program.step()
            program.compare()
        for slot in range(SLOTS):
            program.table.release(slot)
        program.table.check_integrity()
        assert program.table.free_pages == num_pages
        for name in totals:
            totals[name] += program.table.stats()[name]
    # The programs reach what they are about.
    assert totals["attached_pages"] > 50
    assert totals["evicted_pages"] > 20 or num_pages == 80
    assert totals["deduplicated_pages"] > 0


def fill(table: Any, slot: int, tokens: list[int], salt: str = "") -> None:
    """A request that reads `tokens`, publishes them and ends."""
    table.open(slot, salt)
    table.attach(slot, tokens)
    assert table.reserve(slot, len(tokens))
    table.commit(slot, len(tokens))
    table.publish(slot, tokens)
    table.release(slot)


def test_blocks_that_hash_alike_are_told_apart() -> None:
    """With no hash bit at all every block collides with every other."""
    table = make(16, 2, hash_bits=0)
    fill(table, 0, [1, 2, 3, 4])
    fill(table, 0, [1, 2, 5, 6])
    fill(table, 0, [3, 4, 1, 2])
    assert table.match([1, 2, 3, 4], "")[0] == 2
    assert table.match([1, 2, 5, 6], "")[0] == 2
    assert table.match([3, 4, 1, 2], "")[0] == 2
    assert table.match([3, 4, 3, 4], "")[0] == 1  # that block, but after other text
    assert table.match([2, 1], "")[0] == 0
    assert table.match([5, 6], "")[0] == 0


def test_salts_are_worlds_apart() -> None:
    table = make(16, 2)
    fill(table, 0, [1, 2, 3, 4], "tenant a")
    assert table.match([1, 2, 3, 4], "tenant a") == (2, 2)
    assert table.match([1, 2, 3, 4], "tenant b") == (0, 0)
    assert table.match([1, 2, 3, 4], "") == (0, 0)


def test_only_full_blocks_of_committed_tokens_are_found() -> None:
    table = make(16, 4)
    fill(table, 0, [1, 2, 3, 4, 5, 6, 7])
    assert table.match([1, 2, 3, 4, 5, 6, 7, 8], "") == (1, 1)
    assert table.match([1, 2, 3], "") == (0, 0)
    table.open(1)
    assert table.reserve(1, 8)
    with pytest.raises(ValueError, match="tokens has 8 entries: 0 are committed"):
        table.publish(1, [9] * 8)


def test_the_least_recently_used_leaf_gives_way() -> None:
    table = make(4, 1)
    fill(table, 0, [1, 2])
    fill(table, 0, [3, 4])
    fill(table, 0, [1, 2])  # used again: [3, 4] is the older one now
    table.open(0)
    assert table.reserve(0, 1)
    assert table.match([3, 4], "")[0] == 1  # its leaf went first
    assert table.match([1, 2], "")[0] == 2
    assert table.reserve(0, 2)
    assert table.match([3, 4], "")[0] == 0
    assert table.match([1, 2], "")[0] == 2
    table.check_integrity()


def test_what_a_reader_holds_is_not_evicted() -> None:
    table = make(4, 1)
    fill(table, 0, [1, 2, 3])
    table.open(1)
    assert table.attach(1, [1, 2]) == 2
    pages = table.pages(1)
    table.open(0)
    assert not table.reserve(0, 3)
    assert table.reserve(0, 2)
    assert table.free_pages == 0
    assert table.pages(1) == pages
    assert table.match([1, 2, 3], "") == (2, 0)
    with pytest.raises(
        ValueError, match="length = 1: slot 1 has room for 2 tokens, of which 2 are published"
    ):
        table.commit(1, 1)


def test_equal_pages_become_one() -> None:
    """Two requests computed the same text side by side; the second gives its copy up."""
    table = make(8, 2)
    for slot in (0, 1):
        table.open(slot)
        assert table.attach(slot, [1, 2, 3, 4]) == 0
        assert table.reserve(slot, 4)
        table.commit(slot, 4)
    assert table.free_pages == 4
    table.publish(0, [1, 2, 3, 4])
    table.publish(1, [1, 2, 3, 4])
    assert table.pages(0) == table.pages(1)
    assert table.free_pages == 6
    assert table.stats()["deduplicated_pages"] == 2
    table.release(0)
    assert table.match([1, 2, 3, 4], "") == (2, 0)
    table.release(1)
    assert table.match([1, 2, 3, 4], "") == (2, 2)
    table.check_integrity()


def test_without_reuse_nothing_is_published() -> None:
    table = _core_testing.PageTable(num_pages=8, page_size=2, num_slots=2, max_pages_per_slot=4)
    fill(table, 0, [1, 2, 3, 4])
    assert table.match([1, 2, 3, 4], "") == (0, 0)
    assert table.cached_pages == 0
    assert table.free_pages == 8


def test_refusals() -> None:
    with pytest.raises(ValueError, match="num_slots = 0"):
        _core_testing.PageTable(num_pages=4, page_size=2, num_slots=0, max_pages_per_slot=4)
    table = make(4, 2)
    for call in (table.release, table.pages, table.length):
        with pytest.raises(ValueError, match=r"slot = 4: slots are 0\.\.3"):
            call(4)
    with pytest.raises(ValueError, match="tokens = 33"):
        table.reserve(0, 33)
    with pytest.raises(ValueError, match="tokens = -1"):
        table.reserve(0, -1)
    table.open(0)
    with pytest.raises(ValueError, match="slot = 0: it is in use"):
        table.open(0)
    assert table.reserve(0, 2)
    with pytest.raises(ValueError, match="slot = 0: it holds pages of its own"):
        table.attach(0, [1, 2])

"""Pages and prefix reuse by their definition: dictionaries keyed by whole texts, no tree, no hash.

A published block is known by the salt and the *whole* text up to its end; who holds it is a set of
slots. Pages have no numbers here: there are only so many of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Key = tuple[str, tuple[int, ...]]


@dataclass
class Slot:
    salt: str | None = None  # None: not opened
    shared: list[Key] = field(default_factory=list)
    own: int = 0
    length: int = 0


class ReferencePageTable:
    """The same verbs as specdec_ext._core_testing.PageTable."""

    def __init__(self, num_pages: int, page_size: int, num_slots: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.slots = [Slot() for _ in range(num_slots)]
        self.holders: dict[Key, set[int]] = {}
        self.unused: list[Key] = []  # longest unused first
        self.stats = dict.fromkeys(
            ("attached_pages", "published_pages", "deduplicated_pages", "evicted_pages"), 0
        )

    def _pages_for(self, tokens: int) -> int:
        return (tokens + self.page_size - 1) // self.page_size

    @property
    def cached_pages(self) -> int:
        return len(self.unused)

    @property
    def free_pages(self) -> int:
        return self.num_pages - sum(bool(h) for h in self.holders.values()) - sum(
            slot.own for slot in self.slots
        )  # fmt: skip

    def _blocks(self, salt: str, tokens: list[int]) -> list[Key]:
        """The keys of the full blocks of a text."""
        size = self.page_size
        return [(salt, tuple(tokens[: i * size])) for i in range(1, len(tokens) // size + 1)]

    def match(self, tokens: list[int], salt: str) -> tuple[int, int]:
        found = []
        for key in self._blocks(salt, tokens):
            if key not in self.holders:
                break
            found.append(key)
        return len(found), sum(not self.holders[key] for key in found)

    def open(self, slot: int, salt: str) -> None:
        assert self.slots[slot] == Slot()
        self.slots[slot].salt = salt

    def attach(self, slot: int, tokens: list[int]) -> int:
        s = self.slots[slot]
        if s.salt is None:
            return 0
        taken = 0
        for key in self._blocks(s.salt, tokens)[len(s.shared) :]:
            if key not in self.holders:
                break
            self._hold(slot, key)
            s.shared.append(key)
            taken += 1
        s.length = len(s.shared) * self.page_size
        self.stats["attached_pages"] += taken
        return taken

    def reserve(self, slot: int, tokens: int) -> bool:
        s = self.slots[slot]
        missing = self._pages_for(tokens) - len(s.shared) - s.own
        if missing > self.free_pages:
            return False
        if missing > 0:
            s.own += missing
            # Published blocks give way when pages are short, longest unused first.
            while self.num_pages < len(self.holders) + sum(each.own for each in self.slots):
                del self.holders[self.unused.pop(0)]
                self.stats["evicted_pages"] += 1
        return True

    def commit(self, slot: int, length: int) -> None:
        self.slots[slot].length = length

    def publish(self, slot: int, tokens: list[int]) -> None:
        s = self.slots[slot]
        if s.salt is None:
            return
        for key in self._blocks(s.salt, tokens)[len(s.shared) :]:
            s.own -= 1
            s.shared.append(key)
            if key in self.holders:
                self._hold(slot, key)
                self.stats["deduplicated_pages"] += 1
            else:
                self.holders[key] = {slot}
                self.stats["published_pages"] += 1

    def rewind(self, slot: int) -> None:
        s = self.slots[slot]
        s.own = max(0, min(s.own, self._pages_for(s.length) - len(s.shared)))

    def release(self, slot: int) -> None:
        for key in reversed(self.slots[slot].shared):
            self.holders[key].remove(slot)
            if not self.holders[key]:
                self.unused.append(key)
        self.slots[slot] = Slot()

    def drop_unused(self) -> int:
        count = len(self.unused)
        for key in self.unused:
            del self.holders[key]
        self.unused.clear()
        return count

    def _hold(self, slot: int, key: Key) -> None:
        if not self.holders[key]:
            self.unused.remove(key)
        self.holders[key].add(slot)

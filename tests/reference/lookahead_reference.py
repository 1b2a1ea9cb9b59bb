"""Lookahead decoding of one request in plain Python, from the description alone.

Shares nothing with the core and is built differently where that is possible: the branches are laid
out as (token, position) lists, ancestors come from a stack over the positions, and merging works on
whole paths (tuples of tokens) instead of a tree that grows.
"""

from __future__ import annotations

from dataclasses import dataclass

M32 = 0xFFFFFFFF
WINDOW, GUESS = 1, 2  # origin bits
PURPOSE_WINDOW, PURPOSE_PREFILL = 1, 2


def philox4x32(seed: int, position: int, purpose: int, draw: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 with counter (position, purpose, draw) and key (seed)."""
    c = [position & M32, position >> 32, purpose, draw]
    k0, k1 = seed & M32, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & M32, (p0 >> 32) ^ c[3] ^ k1, p0 & M32]
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return c[0], c[1], c[2], c[3]


def draw_below(seed: int, position: int, purpose: int, draw: int, n: int) -> int:
    return (philox4x32(seed, position, purpose, draw)[0] * n) >> 32


def max_draft_len(w: int, n: int, g: int) -> int:
    return (0 if n == 1 else n - 2) + (w - 1 + g) * (n - 1)


class Pool:
    """key -> at most g grams, least recently inserted first; sets of bounded size."""

    def __init__(self, g: int, capacity: int):
        self.g = g
        self.ways = 16
        while self.ways < 2 * g:
            self.ways *= 2
        self.num_sets = 1
        while 2 * self.num_sets * self.ways <= capacity:
            self.num_sets *= 2
        self.sets: dict[int, list[tuple[int, tuple[int, ...]]]] = {}

    def set_of(self, key: int) -> int:
        h = (key * 0x9E3779B1) & M32
        h ^= h >> 15
        return h & (self.num_sets - 1)

    def insert(self, key: int, gram: tuple[int, ...]) -> None:
        if self.g == 0 or key < 0 or not gram or min(gram) < 0:
            return
        items = self.sets.setdefault(self.set_of(key), [])
        if (key, gram) in items:
            items.remove((key, gram))
        else:
            of_key = [item for item in items if item[0] == key]
            if len(of_key) >= self.g:
                items.remove(of_key[0])
            elif len(items) >= self.ways:
                del items[0]
        items.append((key, gram))

    def entries(self, key: int) -> list[tuple[int, ...]]:
        return [gram for k, gram in self.sets.get(self.set_of(key), []) if k == key]

    def lookup(self, key: int, k: int) -> list[tuple[int, ...]]:
        found = self.entries(key)
        return found[max(0, len(found) - k) :]


def ancestors_by_stack(positions: list[int]) -> list[list[int]]:
    """For each item the indices it attends to (itself last), from the list of positions alone."""
    stack: list[int] = []
    out = []
    for i, position in enumerate(positions):
        while stack and positions[stack[-1]] >= position:
            stack.pop()
        assert not stack or positions[stack[-1]] == position - 1
        stack.append(i)
        out.append(list(stack))
    return out


@dataclass
class Draft:
    tokens: list[int]
    parents: list[int]
    origin: list[int]
    unmerged: int  # draft tokens before merging


class Lookahead:
    def __init__(self, w: int, n: int, g: int, prompt: list[int], seed: int, pool_grams: int):
        self.w, self.n, self.g = w, n, g
        self.pool = Pool(g, pool_grams)
        count = len(prompt)
        self.prefill = [
            prompt[draw_below(seed, count, PURPOSE_PREFILL, i, count)] for i in range(max(0, n - 2))
        ]
        self.rows = (
            [[prompt[draw_below(seed, count, PURPOSE_WINDOW, i, count)]] for i in range(w)]
            if n > 1
            else [[] for _ in range(w)]
        )
        self.tail = ([-1] * (n - 1) + prompt)[-(n - 1) :] if n > 1 else []
        if n > 1:
            for i in range(count - n + 1):
                self.pool.insert(prompt[i], tuple(prompt[i + 1 : i + n]))
        self.emitted: list[int] = []  # node of the last token of each emitted row
        self.golden = -1

    def draft(
        self,
        golden: int,
        window_rows: int | None = None,
        guesses: int | None = None,
        guess_len: int | None = None,
        max_drafts: int = 127,
        max_depth: int = 127,
    ) -> Draft:
        width = self.n - 1
        rows = self.w if window_rows is None else min(self.w, window_rows)
        k = self.g if guesses is None else min(self.g, guesses)
        cut = min(width if guess_len is None else min(width, guess_len), max_depth)
        nodes: dict[tuple[int, ...], int] = {(): 0}
        origin = [0]
        unmerged = 0

        def put(path: tuple[int, ...], source: int) -> int:
            if path not in nodes:
                nodes[path] = len(nodes)
                origin.append(0)
            origin[nodes[path]] |= source
            return nodes[path]

        # Lookahead branch: one group per row, the chain of prefill tokens belongs to row 0.
        groups: list[list[tuple[int, int]]] = []
        if width:
            f = len(self.rows[0])
            for i, row in enumerate(self.rows):
                if f == width:
                    items = list(row)
                    first = i - 1
                    if i == 0:
                        items, first = items[1:], 0
                    groups.append([(t, first + j) for j, t in enumerate(items)])
                else:
                    chain = [(t, j) for j, t in enumerate(self.prefill[f:])] if i == 0 else []
                    first = self.n - 2 - f + i
                    groups.append(chain + [(t, first + j) for j, t in enumerate(row)])
        flat = [item for group in groups for item in group]
        above = ancestors_by_stack([position for _, position in flat])
        self.emitted = []
        at = 0
        for group in groups[:rows]:
            deepest = max((position + 1 for _, position in group), default=0)
            if len(nodes) - 1 + len(group) > max_drafts or deepest > max_depth:
                break
            last = 0
            for i in range(at, at + len(group)):
                last = put(tuple(flat[j][0] for j in above[i]), WINDOW)
            at += len(group)
            unmerged += len(group)
            self.emitted.append(last)
        # Verification branch.
        for gram in self.pool.lookup(golden, k) if cut else []:
            for j in range(1, cut + 1):
                if len(nodes) - 1 < max_drafts:
                    put(gram[:j], GUESS)
                    unmerged += 1
        self.golden = golden
        order = sorted(nodes, key=nodes.__getitem__)
        return Draft(
            tokens=[path[-1] if path else golden for path in order],
            parents=[nodes[path[:-1]] if path else -1 for path in order],
            origin=origin,
            unmerged=unmerged,
        )

    def update(self, sampled: list[int], accepted: list[int]) -> None:
        width = self.n - 1
        if width == 0:
            return
        grams = []
        for i, node in enumerate(self.emitted):
            row, new = self.rows[i], sampled[node]
            assert new >= 0
            if len(row) == width:
                key = self.golden if i == 0 else row[0]
                del row[0]
                row.append(new)
                grams.append((key, tuple(row)))
            else:
                row.append(new)
        for key, gram in grams:
            self.pool.insert(key, gram)
        self.emitted = []
        text = self.tail + accepted
        for i in range(len(accepted)):
            self.pool.insert(text[i], tuple(text[i + 1 : i + self.n]))
        self.tail = text[len(accepted) :]


def accept(
    tokens: list[int], parents: list[int], sampled: list[int], max_path: int
) -> tuple[list[int], list[int], int]:
    """(path, emitted, bad_row), by walking every node's path from the golden token."""
    best: list[int] = []
    for node in range(1, len(tokens)):
        path = [node]
        while parents[path[0]] > 0:
            path.insert(0, parents[path[0]])
        cur, hits = sampled[0], 0
        for step in path:
            if cur < 0 or tokens[step] != cur:
                break
            cur, hits = sampled[step], hits + 1
        if hits == len(path) and len(best) < hits <= max_path:
            best = path
    emitted = [sampled[0]] + [sampled[node] for node in best]
    bad = -1
    if emitted[-1] < 0:
        emitted.pop()
        bad = best[-1] if best else 0
    return best, emitted, bad

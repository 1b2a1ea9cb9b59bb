"""The workloads, by name. A cell is measured once per commit and device.

Groups G1..G6 are the targets of docs/gpu.md. Contexts are tokens before the step; every request of
a cell has the same, and the draft rows come after it in the cache.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.gpu import floors

# Bound on the depth of a node: the same for trees, single rows and prompts, as exactness wants it.
# Covers lookahead (7,7,7) and a chain of 15 drafts; the engine's is EXACT_DRAFT_DEPTH.
MAX_DEPTH = 15
NUM_HEADS = 32
HEAD_DIM = 128


@dataclass(frozen=True)
class AttentionCell:
    """One attention call. `rows` is the tree size, drafts and golden token; 0 context: a prompt."""

    requests: int
    rows: int
    context: int
    num_kv_heads: int = 8
    num_heads: int = NUM_HEADS
    head_dim: int = HEAD_DIM
    page_size: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    fp8_math: bool = False
    groups: tuple[str, ...] = field(default=(), compare=False)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def is_prompt(self) -> bool:
        return self.context == 0

    @property
    def name(self) -> str:
        kind = "prompt" if self.is_prompt else "attn"
        kv = "" if self.kv_dtype == self.dtype else "-kv8"
        math = "-math8" if self.fp8_math else ""
        length = f"-ctx{self.context}" if self.context else ""
        return f"{kind}-b{self.requests}-m{self.rows}-g{self.group_size}{length}{kv}{math}"

    @property
    def kv_item_bytes(self) -> int:
        return 1 if self.kv_dtype == "float8_e4m3fn" else 2

    def work(self) -> floors.Work:
        return floors.attention(
            self.requests,
            self.rows,
            self.context,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.kv_item_bytes,
            self.fp8_math,
        )

    def tiny(self) -> AttentionCell:
        """The same kind of call in a size that the emulator runs in a second."""
        return dataclasses.replace(
            self,
            requests=min(self.requests, 2),
            rows=min(self.rows, 70 if self.is_prompt else 5),
            context=min(self.context, 200),
            num_kv_heads=1,
            num_heads=self.group_size,
            head_dim=128 if self.fp8_math else 64,  # the only one of 8-bit products
        )


@dataclass(frozen=True)
class StepCell:
    """One of the small operations of a step, or with `kind` 'step' all of them over all layers."""

    # append | rope_append | compact | build_step | argmax | sample | match | accept | step
    kind: str
    requests: int
    rows: int
    context: int = 4096
    layers: int = 32
    num_heads: int = NUM_HEADS
    num_kv_heads: int = 8
    head_dim: int = HEAD_DIM
    page_size: int = 64
    vocab: int = 128256
    groups: tuple[str, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        return f"{self.kind.replace('_', '-')}-b{self.requests}-m{self.rows}"

    @property
    def token_bytes(self) -> int:
        """K and V of one token of one layer, 16 bits."""
        return 2 * self.num_kv_heads * self.head_dim * 2

    @property
    def accepted(self) -> int:
        """Drafts that the compaction cell moves per request."""
        return min(MAX_DEPTH, self.rows - 1, 6)

    def work(self) -> floors.Work:
        rows = self.requests * self.rows
        if self.kind in ("append", "rope_append"):
            return floors.moved(rows * self.token_bytes, rows * self.token_bytes)
        if self.kind == "compact":
            moved = self.requests * self.accepted * self.layers * self.token_bytes
            return floors.moved(moved, moved)
        if self.kind == "build_step":  # parents in; positions, mask out
            return floors.moved(rows * 4, rows * (4 + 16))
        if self.kind in ("argmax", "sample", "match", "accept"):  # one read of the scores
            return floors.moved(rows * self.vocab * 4, rows * 4)
        attention = AttentionCell(self.requests, self.rows, self.context, self.num_kv_heads)
        one = attention.work()
        append = 2 * rows * self.token_bytes
        return floors.Work(self.layers * (one.needed_bytes + append), self.layers * one.flops)

    def tiny(self) -> StepCell:
        return dataclasses.replace(
            self,
            requests=min(self.requests, 2),
            rows=min(self.rows, 5),
            context=80,
            layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            vocab=300,
        )


@dataclass(frozen=True)
class SlotCell:
    """Drafting and committing on slots whose histories are `context` tokens long."""

    method: str  # lookahead (7,7,7) or ngram
    requests: int
    context: int
    rows: int = 84  # of a request's step, at most
    alphabet: int = 1000  # tokens that texts are made of

    @property
    def name(self) -> str:
        return f"slots-{self.method}-b{self.requests}-ctx{self.context}"

    def describe(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def tiny(self) -> SlotCell:
        return dataclasses.replace(self, requests=2, context=80, alphabet=9)


_KV_HEADS = {1: 32, 4: 8, 8: 4}  # query heads per KV head -> KV heads of 32 query heads
_LENGTHS = (4096, 16384, 65536)


def _sweep() -> list[AttentionCell]:
    """G2, with what else its cells are; the heart of the sweep comes first."""
    found = []
    for group in (4, 8, 1):
        for context in _LENGTHS:
            for requests in (8, 1, 32):
                for rows in (64, 27, 11, 84):
                    groups: tuple[str, ...] = ("G2",)
                    if (group, context, requests, rows) == (4, 16384, 8, 64):
                        groups = ("G1", "G2")
                    found.append(
                        AttentionCell(requests, rows, context, _KV_HEADS[group], groups=groups)
                    )
    return found


def attention_cells() -> list[AttentionCell]:
    """Every attention cell in the order in which they are measured: targets first."""
    e4m3 = "float8_e4m3fn"
    targets = [
        AttentionCell(8, 64, 16384, groups=("G1", "G2")),
        AttentionCell(1, 27, 2048, groups=("G3",)),
        AttentionCell(8, 64, 16384, kv_dtype=e4m3, fp8_math=True, groups=("G4",)),
        AttentionCell(8, 64, 16384, kv_dtype=e4m3, groups=("G4",)),
        AttentionCell(32, 1, 16384, groups=("G5", "G6")),
    ]
    plain = [
        AttentionCell(requests, 1, context, groups=("G6",))
        for context in _LENGTHS
        for requests in (1, 8, 32)
        if (requests, context) != (32, 16384)
    ] + [AttentionCell(32, 1, 16384, kv_dtype=e4m3)]
    prompts = [AttentionCell(1, rows, 0, groups=("prefill",)) for rows in (2048, 4096, 8192, 16384)]
    seen: dict[str, AttentionCell] = {}
    for cell in [*targets, *prompts, *plain, *_sweep()]:
        seen.setdefault(cell.name, cell)
    return list(seen.values())


def step_op_cells() -> list[StepCell]:
    """The operations around attention, each alone. Batches: one user, several, many."""
    shapes = ((1, 27), (8, 64), (32, 11))
    cells = [StepCell("compact", 8, 64, groups=("G10",))]
    for kind in ("append", "rope_append", "build_step", "argmax", "sample", "match", "accept"):
        cells += [StepCell(kind, requests, rows) for requests, rows in shapes]
    for kind in ("sample", "match", "accept"):
        cells += [StepCell(kind, 1, 64), StepCell(kind, 8, 8)]
    return cells


def step_cells() -> list[StepCell]:
    """Whole steps without the model: every kernel of 32 layers in one graph."""
    return [
        StepCell("step", b, m) for b, m in ((1, 27), (8, 64), (1, 84), (8, 27), (32, 11), (1, 1))
    ]


def slot_cells() -> list[SlotCell]:
    """G9: the time is that of short histories."""
    return [
        SlotCell(method, requests, context)
        for method in ("lookahead", "ngram")
        for requests, context in ((32, 1024), (32, 65536), (1, 1024), (1, 65536))
    ]


# FlashInfer compiles a module per row count and data type: these cells keep that to a few.
PEER_CELLS = frozenset(
    {
        *(f"attn-b{b}-m64-g4-ctx{c}" for b in (1, 8, 32) for c in (4096, 16384)),
        *(f"attn-b{b}-m27-g4-ctx{c}" for b in (1, 8) for c in (4096, 16384)),
        *(f"attn-b8-m{m}-g8-ctx16384" for m in (27, 64)),
        *(f"attn-b8-m{m}-g1-ctx4096" for m in (27, 64)),
        *("attn-b1-m64-g4-ctx65536", "attn-b8-m64-g4-ctx65536", "attn-b1-m27-g4-ctx2048"),
        *("attn-b8-m64-g4-ctx16384-kv8", "attn-b8-m64-g4-ctx16384-kv8-math8"),
        "attn-b32-m1-g4-ctx16384",
    }
)
# torch needs dense K/V and tens of seconds of compilation.
TORCH_PEER_CELLS = frozenset(
    {
        *("attn-b8-m64-g4-ctx16384", "attn-b1-m27-g4-ctx2048"),
        *("attn-b8-m27-g4-ctx4096", "attn-b1-m64-g4-ctx16384"),
    }
)


def quick(cells: Sequence[AttentionCell]) -> list[AttentionCell]:
    """The targets alone, and the sweep's middle."""
    return [
        c
        for c in cells
        if set(c.groups) & {"G1", "G3", "G4", "G5"}
        or (c.groups == ("prefill",) and c.rows == 4096)
        or (c.groups == ("G2",) and c.requests == 8 and c.context == 16384)
    ]


def emulated(cells: Iterable[AttentionCell]) -> list[AttentionCell]:
    """One tiny cell of every kind, each under its own name."""
    seen: dict[str, AttentionCell] = {}
    for cell in cells:
        tiny = cell.tiny()
        seen.setdefault(tiny.name, tiny)
    return list(seen.values())


def select(names: Sequence[str], pattern: str) -> list[str]:
    """Returns the names that a --cells expression matches: a group, or a regular expression."""
    return [name for name in names if re.search(pattern, name)]

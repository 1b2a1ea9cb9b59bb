"""The workloads that need a model: passes, the engine's steps, speculation, whole texts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from benchmarks.gpu import floors
from benchmarks.gpu.cells import HEAD_DIM, NUM_HEADS


@dataclass(frozen=True)
class ModelCell:
    """A step with its model: `rows` of each request after `context` tokens, 8B-shaped."""

    requests: int
    rows: int = 1
    kind: str = "model"  # or decode: the engine's steps one after another
    context: int = 1024
    new_tokens: int = 64
    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    num_heads: int = NUM_HEADS
    num_kv_heads: int = 8
    head_dim: int = HEAD_DIM
    page_size: int = 64
    vocab: int = 128256
    overlap_depth: int | None = None  # decode: steps enqueued while one is read; None: the defaults
    graphs: bool = False  # with overlap_depth: steps recorded as CUDA graphs
    numerics: str = "fast"  # or exact

    @property
    def name(self) -> str:
        ahead = "" if self.overlap_depth is None else f"-ahead{self.overlap_depth}"
        graphs = "-graphs" if self.graphs else ""
        exact = "-exact" if self.numerics == "exact" else ""
        return f"{self.kind}-b{self.requests}-m{self.rows}{ahead}{graphs}{exact}"

    def describe(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def work(self) -> floors.Work:
        """Every weight but the embedding and every K/V byte once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden * (2 * q + 2 * kv + 3 * self.intermediate)
        numbers = self.layers * layer + self.vocab * self.hidden
        one = floors.attention(
            self.requests, self.rows, self.context, self.num_heads, self.num_kv_heads, self.head_dim
        )
        flops = 2 * numbers * self.requests * self.rows + self.layers * one.flops
        return floors.Work(2 * numbers + self.layers * one.needed_bytes, flops)

    def tiny(self) -> ModelCell:
        return dataclasses.replace(
            self,
            requests=min(self.requests, 2),
            rows=min(self.rows, 5),
            context=80,
            new_tokens=3,
            layers=2,
            hidden=128,
            intermediate=256,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            vocab=300,
        )


@dataclass(frozen=True)
class SpeculationCell(ModelCell):
    """The engine's steps with drafts that are kept at given rates (synthetic)."""

    kind: str = "spec"
    new_tokens: int = 256
    overlap_depth: int | None = 1
    graphs: bool = True
    method: str = "lookahead"  # medusa, redrafter, eagle3: random heads
    lookahead: tuple[int, int, int] = (7, 7, 7)  # as large as `rows` says
    mean_tokens: float = 2.0  # of a step and request

    @property
    def name(self) -> str:
        method = "" if self.method == "lookahead" else f"-{self.method}"
        return f"{super().name}{method}-tau{self.mean_tokens:g}"

    def tiny(self) -> SpeculationCell:
        return dataclasses.replace(
            super().tiny(),
            rows=self.rows,
            new_tokens=20,  # the method says how many
        )


@dataclass(frozen=True)
class TextsCell(ModelCell):
    """Texts with lookahead (7,7,7) against plain decoding of the same engine."""

    requests: int = 16
    kind: str = "texts"
    rows: int = 84
    context: int = 64
    new_tokens: int = 512
    prompts: int = 100
    overlap_depth: int | None = 1
    graphs: bool = True

    def tiny(self) -> TextsCell:
        return dataclasses.replace(super().tiny(), rows=84, prompts=3, new_tokens=12)


def model_cells() -> list[ModelCell]:
    """T(1), T(27), T(84) of one request and of batches; what exact mode costs; the engine."""
    found = [
        ModelCell(b, m)
        for b, m in ((1, 1), (1, 11), (1, 27), (1, 84), (8, 27), (8, 1), (32, 1), (32, 11))
    ]
    found += [ModelCell(b, m, numerics="exact") for b, m in ((1, 1), (1, 84), (8, 27))]
    modes = ((0, False), (1, False), (1, True), (0, True))
    return (
        found
        + [
            ModelCell(b, kind="decode", overlap_depth=ahead, graphs=graphs)
            for b in (1, 8)
            for ahead, graphs in modes
        ]
        + [ModelCell(32, kind="decode", overlap_depth=1, graphs=True)]
        + [ModelCell(b, kind="decode") for b in (1, 8)]
    )


def speculation_cells() -> list[SpeculationCell]:
    """G8 and G11: what speculation brings at a known acceptance, the host's share included."""
    shapes = ((1, 84, (7, 7, 7)), (8, 27, (5, 4, 4)), (32, 11, (6, 2, 5)))
    return [
        SpeculationCell(requests, rows, lookahead=triple, mean_tokens=tokens)
        for requests, rows, triple in shapes
        for tokens in (2.0, 4.0)
        if tokens <= triple[1]  # a step keeps N - 1 drafts at most
    ] + [
        SpeculationCell(1, 64, method="medusa"),
        SpeculationCell(1, 26, method="redrafter"),
        SpeculationCell(1, 17, method="eagle3"),
    ]


def texts_cells() -> list[TextsCell]:
    return [TextsCell(numerics=numerics) for numerics in ("exact", "fast")]

"""The operations around attention, each checked against torch and timed; and all of a step at once.

build_step      parents -> positions, mask, slots          once
rope_append_kv  rotate q and k, write K/V into the pages   per layer
spec_attention                                             per layer
compact_kv      accepted drafts to their final places      once, all layers
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import accept_ops, timing
from benchmarks.gpu import problem as problems
from benchmarks.gpu.attention import describe, figures, path_of
from benchmarks.gpu.cells import MAX_DEPTH, StepCell
from benchmarks.gpu.ours import MASK_WORDS
from benchmarks.gpu.run import Target
from specdec_ext import ops

MAX_STEP_TOKENS = 128


def longest_path(parents: list[int]) -> list[int]:
    """Returns the rows below the golden token on the way to a deepest node, increasing."""
    paths = [path_of(parents, node) for node in range(len(parents))]
    return max(paths, key=len)[1:]


class Step:
    """The tensors of a step of `layers` layers, and its operations as methods.

    Every tensor that a call needs is made here: a call itself only enqueues.
    """

    def __init__(self, cell: StepCell, target: Target, layers: int, seed: int = 0) -> None:
        self.cell = cell
        self._target = target
        device = target.device
        generator = torch.Generator().manual_seed(seed)
        requests, rows = cell.requests, cell.requests * cell.rows
        width = -(-(cell.context + cell.rows) // cell.page_size)
        self.num_pages = requests * width
        shape = (layers, self.num_pages, cell.num_kv_heads, cell.page_size, cell.head_dim)
        self.k_pages = torch.randn(shape, dtype=torch.bfloat16, device=device)
        self.v_pages = torch.randn(shape, dtype=torch.bfloat16, device=device)
        order = torch.randperm(self.num_pages, generator=generator).to(torch.int32)
        self.page_table = order.view(requests, width).to(device)
        self.kv_len = torch.full((requests,), cell.context, dtype=torch.int32, device=device)
        self.cu_rows = (torch.arange(requests + 1) * cell.rows).to(torch.int32).to(device)
        self.tree = problems.random_tree(cell.rows, MAX_DEPTH, seed=1)
        self.parents = torch.tensor(self.tree * requests, dtype=torch.int32, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int32, device=device)
        self.mask = torch.zeros(rows, MASK_WORDS, dtype=torch.int32, device=device)
        self.is_tree = torch.zeros(requests, dtype=torch.uint8, device=device)
        self.slots = torch.zeros(rows, dtype=torch.int64, device=device)
        self.status = torch.zeros(requests, dtype=torch.int32, device=device)

        def random(heads: int) -> Tensor:
            size = (rows, heads, cell.head_dim)
            return torch.randn(size, dtype=torch.bfloat16, device=device)

        self.q, self.k, self.v = (
            random(n) for n in (cell.num_heads, cell.num_kv_heads, cell.num_kv_heads)
        )
        self.q_out, self.out = torch.empty_like(self.q), torch.empty_like(self.q)
        angles = torch.arange(cell.context + cell.rows)[:, None] * torch.logspace(
            0, -4, cell.head_dim // 2
        )
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        path = longest_path(self.tree)[: cell.accepted]
        padded = path + [0] * (MAX_STEP_TOKENS - len(path))
        self.path = torch.tensor([padded] * requests, dtype=torch.int32, device=device)
        self.path_len = torch.full((requests,), len(path), dtype=torch.int32, device=device)
        self.accepted = path

    def _geometry(self) -> dict[str, Any]:
        """What the K/V operations are told of the step, where they run included."""
        return {
            "page_table": self.page_table,
            "kv_len": self.kv_len,
            "cu_rows": self.cu_rows,
            "max_kv_len": self.cell.context + self.cell.rows,
            "backend": self._target.backend,
            "status": self.status,
        }

    def build_step(self) -> None:
        ops.build_step(
            self.parents,
            self.page_table,
            self.kv_len,
            self.cu_rows,
            positions=self.positions,
            mask=self.mask,
            is_tree=self.is_tree,
            slots=self.slots,
            page_size=self.cell.page_size,
            num_pages=self.num_pages,
            max_depth=MAX_DEPTH,
            max_rows=self.cell.rows,
            backend=self._target.backend,
            status=self.status,
        )

    def append(self, layer: int = 0) -> None:
        ops.append_kv(
            k=self.k,
            v=self.v,
            k_pages=self.k_pages[layer],
            v_pages=self.v_pages[layer],
            max_rows=self.cell.rows,
            **self._geometry(),
        )

    def rope_append(self, layer: int = 0) -> None:
        ops.rope_append_kv(
            q=self.q,
            k=self.k,
            v=self.v,
            k_pages=self.k_pages[layer],
            v_pages=self.v_pages[layer],
            positions=self.positions,
            q_out=self.q_out,
            cos=self.cos,
            sin=self.sin,
            max_rows=self.cell.rows,
            **self._geometry(),
        )

    def attention(self, layer: int = 0) -> None:
        """The plan of layer 0 serves all layers of the step."""
        ops.spec_attention(
            q=self.q_out,
            k_pages=self.k_pages[layer],
            v_pages=self.v_pages[layer],
            mask=self.mask.view(torch.uint32),
            is_tree=self.is_tree,
            out=self.out,
            scale=1.0 / math.sqrt(self.cell.head_dim),
            max_depth=MAX_DEPTH,
            max_rows=self.cell.rows,
            reuse_plan=layer > 0,
            **self._geometry(),
        )

    def compact(self) -> None:
        ops.compact_kv(
            self.k_pages,
            self.v_pages,
            path=self.path,
            path_len=self.path_len,
            num_rows=self.cell.requests * self.cell.rows,
            **self._geometry(),
        )

    def whole(self) -> None:
        """Everything that a step does beside the model, in its order."""
        self.build_step()
        for layer in range(self.k_pages.shape[0]):
            self.rope_append(layer)
            self.attention(layer)
        self.compact()

    # -- what the results have to be --------------------------------------------------------------

    def tokens(self, pages: Tensor, first: int, count: int) -> Tensor:
        """Returns `count` tokens of every request from `first` on: [layers, B, count, G, K]."""
        at = torch.arange(first, first + count, device=pages.device)
        page = self.page_table.long()[:, at // self.cell.page_size]
        return pages[:, page, :, (at % self.cell.page_size).expand_as(page)].permute(2, 0, 1, 3, 4)

    def rotated(self, x: Tensor) -> Tensor:
        """Returns q or k as rope_append_kv should write it, float32."""
        half = self.cell.head_dim // 2
        where = self.positions.long()
        cos, sin = self.cos[where][:, None], self.sin[where][:, None]
        a, b = x.float()[..., :half], x.float()[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _require(condition: bool | Tensor, what: str) -> None:
    if not bool(condition):
        raise ArithmeticError(what)


def _close(got: Tensor, expected: Tensor, what: str) -> None:
    error = float((got.float() - expected).norm() / expected.norm())
    _require(error < 4e-3, f"{what}: error {error:.3g} against float32")


def check_build_step(step: Step) -> None:
    step.build_step()
    cell, bits = step.cell, problems.ancestor_bits(step.tree)
    depth = bits.sum(1) - 1
    expected = (cell.context + depth).repeat(cell.requests).to(step.positions)
    _require(torch.equal(step.positions, expected), "positions differ")
    words = problems.pack(bits)
    mask = torch.zeros(cell.rows, MASK_WORDS, dtype=torch.int32)
    mask[:, : words.shape[1]] = words
    trees = step.is_tree.cpu().bool()
    got = step.mask.cpu().view(cell.requests, cell.rows, MASK_WORDS)
    _require(bool((got[trees] == mask).all()), "mask differs")
    at = cell.context + torch.arange(cell.rows)
    page = step.page_table.cpu().long()[:, at // cell.page_size]
    slots = (page * cell.page_size + at % cell.page_size).flatten()
    _require(torch.equal(step.slots.cpu(), slots), "slots differ")


def check_append(step: Step) -> None:
    step.append()
    for pages, rows in ((step.k_pages, step.k), (step.v_pages, step.v)):
        got = step.tokens(pages[:1], step.cell.context, step.cell.rows)[0]
        _require(torch.equal(got.flatten(0, 1), rows), "K/V in the pages differ")


def check_rope_append(step: Step) -> None:
    step.build_step()
    step.q_out.fill_(math.nan)
    step.rope_append()
    _close(step.q_out, step.rotated(step.q), "q")
    rows = step.tokens(step.k_pages[:1], step.cell.context, step.cell.rows)[0].flatten(0, 1)
    _close(rows, step.rotated(step.k), "k")
    rows = step.tokens(step.v_pages[:1], step.cell.context, step.cell.rows)[0].flatten(0, 1)
    _require(torch.equal(rows, step.v), "v in the pages differs")


def check_compact(step: Step) -> None:
    before = [
        step.tokens(p, step.cell.context, step.cell.rows) for p in (step.k_pages, step.v_pages)
    ]
    step.compact()
    for pages, old in zip((step.k_pages, step.v_pages), before, strict=True):
        got = step.tokens(pages, step.cell.context, 1 + len(step.accepted))
        expected = old[:, :, [0, *step.accepted]]
        _require(torch.equal(got, expected), "compacted K/V differ")


CHECKS = {
    "build_step": check_build_step,
    "append": check_append,
    "rope_append": check_rope_append,
    "compact": check_compact,
}


def measure_argmax(cell: StepCell, target: Target, timer: timing.Timer) -> dict[str, Any]:
    rows = cell.requests * cell.rows
    scores = torch.randn(rows, cell.vocab, device=target.device)
    ids = torch.full((rows,), -2, dtype=torch.int32, device=target.device)
    ops.argmax(scores, ids, backend=target.backend)
    best = scores.gather(1, ids.long().clamp(min=0)[:, None])[:, 0]
    _require(torch.equal(best, scores.amax(1)), "argmax differs")

    def ours(_: int) -> None:
        ops.argmax(scores, ids, backend=target.backend)

    def torch_argmax(_: int) -> Tensor:
        return scores.argmax(1)

    return _record(cell, timer, {"ours": ours, "torch": torch_argmax})


def _record(
    cell: StepCell, timer: timing.Timer, programs: dict[str, timing.Program]
) -> dict[str, Any]:
    rounds = timer.measure(programs, 1)
    if "ours" in timer.failures:
        raise RuntimeError(timer.failures["ours"])
    work = cell.work()
    record = {**dataclasses.asdict(cell), **describe(work), "status": "ok"}
    record |= figures(work, rounds.get("ours", []))
    others = {name: figures(work, rounds.get(name, [])) for name in programs if name != "ours"}
    return {**record, "others": others} if others else record


def measure_op(cell: StepCell, target: Target, timer: timing.Timer) -> dict[str, Any]:
    """Returns the record of one operation.

    Raises   ArithmeticError if its result is wrong.
    """
    if cell.kind == "argmax":
        return measure_argmax(cell, target, timer)
    if cell.kind in ("sample", "match", "accept"):
        drawn = accept_ops.sample if cell.kind == "sample" else accept_ops.accept
        return _record(cell, timer, drawn(cell, target))
    layers = cell.layers if cell.kind == "compact" else 1
    step = Step(cell, target, layers)
    CHECKS[cell.kind](step)
    _require(not step.status.any(), f"status {step.status.tolist()}")
    operation = getattr(step, cell.kind)
    return _record(cell, timer, {"ours": lambda _: operation()})


def count_kernels(step: Step) -> dict[str, int]:
    """Returns how often each kernel runs in a whole step, as torch's profiler sees it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step.whole()
        torch.cuda.synchronize()
    return {
        event.key.split("(")[0][:120]: event.count
        for event in profiler.key_averages()
        if str(event.device_type).endswith("CUDA")
    }


def measure_step(cell: StepCell, target: Target, timer: timing.Timer) -> dict[str, Any]:
    """Returns the record of a whole step: time over all layers, and of its parts alone."""
    step = Step(cell, target, cell.layers)
    for check in (check_build_step, check_rope_append, check_compact):
        check(step)
    step.whole()
    _require(torch.isfinite(step.out).all(), "attention of the last layer is not finite")
    _require(not step.status.any(), f"status {step.status.tolist()}")
    layers = range(cell.layers)

    def attention(_: int) -> None:
        for layer in layers:
            step.attention(layer)

    def rope_append(_: int) -> None:
        for layer in layers:
            step.rope_append(layer)

    parts: dict[str, timing.Program] = {
        "build_step": lambda _: step.build_step(),
        "attention, all layers": attention,
        "rope_append_kv, all layers": rope_append,
        "compact_kv": lambda _: step.compact(),
    }
    record = _record(cell, timer, {"ours": lambda _: step.whole(), **parts})
    if not target.emulated:
        record["kernels"] = count_kernels(step)
    return record

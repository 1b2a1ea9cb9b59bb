"""Drawing tokens and accepting drafts by probabilities, checked against the CPU and set against one
read of the scores.

sample  every row drawn at temperature 0.8, against argmax of the same rows and torch.multinomial
accept  a tree of drafts for each request, drawn from what a drafter close to the target says, held
        against the scores by rejection
match   the same tree, kept as far as it is what the target draws (exact match): no probabilities
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu import problem as problems
from benchmarks.gpu import timing
from benchmarks.gpu.cells import MAX_DEPTH, StepCell
from benchmarks.gpu.run import Target
from specdec_ext import ops

TEMPERATURE = 0.8


def _require(condition: object, text: str) -> None:
    if not condition:
        raise ArithmeticError(text)


def _laws(requests: int, device: torch.device) -> ops.SamplingLaws:
    return ops.SamplingLaws(
        temperature=torch.full((requests,), TEMPERATURE, device=device),
        top_k=torch.zeros(requests, dtype=torch.int32, device=device),
        top_p=torch.ones(requests, device=device),
        min_p=torch.zeros(requests, device=device),
        seed=torch.arange(requests, dtype=torch.int64, device=device),
    )


class _Scores:
    """Rows of scores of a step's requests, and their laws."""

    def __init__(self, cell: StepCell, target: Target) -> None:
        rows = cell.requests * cell.rows
        generator = torch.Generator(device=target.device).manual_seed(0)
        self.scores = 3 * torch.randn(rows, cell.vocab, device=target.device, generator=generator)
        firsts = torch.arange(cell.requests + 1, dtype=torch.int32) * cell.rows
        self.cu_logits = firsts.to(target.device)
        self.positions = torch.arange(rows, dtype=torch.int32, device=target.device)
        self.laws = _laws(cell.requests, target.device)

    def on_cpu(self) -> tuple[Tensor, Tensor, Tensor, ops.SamplingLaws]:
        laws = {name: value.cpu() for name, value in vars(self.laws).items()}
        return (
            self.scores.cpu(),
            self.cu_logits.cpu(),
            self.positions.cpu(),
            ops.SamplingLaws(**laws),
        )


def sample(cell: StepCell, target: Target) -> dict[str, timing.Program]:
    """Returns what is timed.

    Raises   ArithmeticError if a token differs from the CPU's.
    """
    step = _Scores(cell, target)
    ids = torch.zeros(len(step.scores), dtype=torch.int32, device=target.device)

    def ours(_: int) -> None:
        ops.sample_rows(
            step.scores,
            step.cu_logits,
            step.positions,
            step.laws,
            out=ids,
            backend=target.backend,
        )

    def argmax(_: int) -> None:
        ops.argmax(step.scores, ids, backend=target.backend)

    def torch_multinomial(_: int) -> Tensor:
        return torch.softmax(step.scores / TEMPERATURE, 1).multinomial(1)

    ours(0)
    scores, cu_logits, positions, laws = step.on_cpu()
    expected = torch.zeros(len(scores), dtype=torch.int32)
    ops.sample_rows(scores, cu_logits, positions, laws, out=expected)
    _require(torch.equal(ids.cpu(), expected), "drawn tokens differ from the CPU's")
    return {"ours": ours, "argmax": argmax, "torch": torch_multinomial}


def accept(cell: StepCell, target: Target) -> dict[str, timing.Program]:
    """As ``sample``; what is decided has to be what the CPU decides."""
    step = _Scores(cell, target)
    device, rows = target.device, len(step.scores)
    generator = torch.Generator(device=device).manual_seed(1)
    tree = problems.random_tree(cell.rows, MAX_DEPTH, seed=1)
    parents = torch.tensor(tree * cell.requests, dtype=torch.int32, device=device)
    above = parents.clamp(min=0).long()
    above += torch.arange(cell.requests, device=device).repeat_interleave(cell.rows) * cell.rows
    noise = torch.randn(rows, cell.vocab, device=device, generator=generator)
    laws = torch.softmax(step.scores / TEMPERATURE + 0.1 * noise, 1)
    probs = laws[above]
    tokens = probs.multinomial(1, generator=generator)[:, 0].to(torch.int32)
    replacement = torch.ones(cell.requests, dtype=torch.uint8, device=device)
    rejects = cell.kind == "accept"
    name = "rejection" if rejects else "exact_match"
    rule = torch.full_like(replacement, ops.ACCEPTANCE_RULES.index(name))
    results = ops.make_accept_results(rows, cell.requests, device)
    given = ops.DraftProbs(probs, replacement=replacement) if rejects else None

    def ours(_: int) -> None:
        ops.accept_step(
            step.scores,
            step.cu_logits,
            step.positions,
            tokens,
            parents,
            step.laws,
            rule,
            results=results,
            draft_probs=given,
            backend=target.backend,
        )

    ours(0)
    scores, cu_logits, positions, cpu_laws = step.on_cpu()
    expected = ops.make_accept_results(rows, cell.requests)
    ops.accept_step(
        scores,
        cu_logits,
        positions,
        tokens.cpu(),
        parents.cpu(),
        cpu_laws,
        rule.cpu(),
        results=expected,
        draft_probs=ops.DraftProbs(probs.cpu(), replacement=replacement.cpu()) if rejects else None,
    )
    for name, value in vars(expected).items():
        _require(torch.equal(getattr(results, name).cpu(), value), f"{name} differs from the CPU's")
    ids = torch.zeros(rows, dtype=torch.int32, device=device)

    def argmax(_: int) -> None:
        ops.argmax(step.scores, ids, backend=target.backend)

    return {"ours": ours, "argmax": argmax}

"""How far a result of the accelerator's attention may be from float64."""

from __future__ import annotations

from typing import Any

import torch
from cuda_calls import Target, attend
from cuda_problems import to_device
from reference_attention import Problem, dense_attend, rival_attend

BF16, F16 = torch.bfloat16, torch.float16
EPS = {BF16: 2.0**-8, F16: 2.0**-11}  # unit round-off
SMALLEST = {BF16: 2.0**-133, F16: 2.0**-24}  # spacing of the subnormal numbers


def assert_close(problem: Problem, got: torch.Tensor) -> None:
    """Every element: at most twice torch's error in the same dtype, plus rounding.

    torch's error is the largest of the row and head, since any single element of it may be zero by
    luck. What two correct kernels may differ by beside it: the rounding of the result (one unit
    round-off); the rounding of the weights, which falls differently when they are scaled by another
    maximum (one round-off of each, added as independent errors); float32 scores whose products are
    summed in another order, with truncation on tensor cores, and 2^x by the special function unit
    (16 units of 2^-24 of the largest sum of a score).
    """
    exact, spread, score = dense_attend(problem)
    rival = (rival_attend(problem).double() - exact).abs().amax(dim=2, keepdim=True)
    unit = EPS[problem.q.dtype]
    bound = 2 * rival + unit * (1.01 * exact.abs() + spread) + 2.0**-20 * score
    bound = bound + SMALLEST[problem.q.dtype]
    got = got.to(exact)
    assert not bool(got.isnan().any()), "NaN in the result"
    excess = (got - exact).abs() - bound
    worst = int(excess.flatten().argmax())
    where = [int(i) for i in torch.unravel_index(torch.tensor(worst), excess.shape)]
    assert bool((excess <= 0).all()), (
        f"{int((excess > 0).sum())} elements outside; worst at {where}: "
        f"{float(got[tuple(where)]):.6g} for {float(exact[tuple(where)]):.6g}"
    )


def check(target: Target, problem: Problem, **options: Any) -> None:
    on_device = to_device(problem, target.device)
    assert_close(on_device, attend(target, problem, **options).to(target.device))

"""The loss against its formula, its gradient, and the sampled normaliser."""

from __future__ import annotations

import torch

from specdec_ext.training.loss import DRAWN, FREQUENT, FrozenHead, soft_cross_entropy


def test_the_loss_and_its_gradient_are_those_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(300, 16, generator=generator)
    head = FrozenHead(weight, torch.arange(300), torch.device("cpu")).for_step(
        torch.tensor([-1]), 0
    )
    assert head.weight.shape == (300, 16)  # few tokens: every step scores all of them
    hidden = torch.randn(700, 16, generator=generator)
    teacher = head.probabilities(hidden)
    rows = torch.randint(0, 700, (600,), generator=generator)
    labels = torch.randint(0, 300, (600,), generator=generator)
    features = torch.randn(600, 16, generator=generator, requires_grad=True)
    loss = soft_cross_entropy(features, head, teacher, rows, labels, 0.3)
    (3.0 * loss).backward()  # type: ignore[no-untyped-call]
    mine = features.grad

    plain = features.detach().clone().requires_grad_(True)
    exact = (plain.to(torch.bfloat16).double() @ weight.to(torch.bfloat16).double().T).log_softmax(
        1
    )
    wanted = 0.3 * teacher[rows].double()
    wanted[torch.arange(600), labels] += 0.7
    reference = -(wanted * exact).sum(dim=1).mean()
    (3.0 * reference).backward()  # type: ignore[no-untyped-call]
    # Scores are rounded to bfloat16, 2**-9 relative; the largest here is below 32.
    assert abs(float(loss.detach()) - float(reference.detach())) < 32 * 2**-9
    assert plain.grad is not None and mine is not None
    error = (mine - plain.grad).norm() / plain.grad.norm()
    assert float(error) < 0.02


def test_the_sampled_normaliser_is_unbiased() -> None:
    size = FREQUENT + 4 * DRAWN
    generator = torch.Generator().manual_seed(2)
    head = FrozenHead(
        torch.randn(size, 8, generator=generator), torch.randperm(size), torch.device("cpu")
    )
    feature = 0.3 * torch.randn(1, 8, generator=generator)
    whole = float(head.scores(feature).double().exp().sum())
    parts = []
    for seed in range(400):
        step = head.for_step(torch.tensor([-1]), seed)
        assert step.weight.shape[0] == FREQUENT + DRAWN
        parts.append(float((step.scores(feature)).double().exp().sum()))
    values = torch.tensor(parts, dtype=torch.float64)
    assert float(values.std()) > 0
    # 2**-9 for the rounding to bfloat16, plus five standard errors.
    assert abs(float(values.mean()) / whole - 1) < 2**-9 + 5 * float(values.std()) / whole / 20
    rare = torch.tensor([int(head._rest[5])])
    assert all(int(head.for_step(rare, seed).column[rare]) >= 0 for seed in range(20))


def test_a_softcap_is_the_teachers_alone() -> None:
    """The target's distribution is that of its capped scores; drawn tokens keep their offset."""
    weight = torch.randn(FREQUENT + 2 * DRAWN, 8, generator=torch.Generator().manual_seed(3))
    order = torch.arange(len(weight))
    head = FrozenHead(
        weight, order, torch.device("cpu"), dtype=torch.float32, softcap=2.0
    ).for_step(torch.tensor([-1]), 1)
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(4))
    raw = hidden @ head.weight.T
    wanted = (2.0 * torch.tanh(raw / 2.0) + head.offset).softmax(-1)
    assert torch.allclose(head.probabilities(hidden), wanted, atol=1e-6)
    assert torch.allclose(head.scores(hidden), raw + head.offset, atol=1e-5)
    assert len(set(head.offset.tolist())) == 2

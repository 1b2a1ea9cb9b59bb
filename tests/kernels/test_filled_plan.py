"""A step plan from the arrays of a step: what the kernels could not stand is refused before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec_ext import _core


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(**changed: Any) -> dict[str, Any]:
    """A tree of three rows and a row of another request."""
    mask = torch.zeros(4, 4, dtype=torch.int32)
    mask[:, 0] = int32(1, 3, 5, 1)
    return {
        "tokens": int32(1, 2, 3, 4), "positions": int32(5, 6, 6, 0), "parents": int32(-1, 0, 0, -1),
        "mask": mask, "cu_rows": int32(0, 3, 4), "kv_len": int32(5, 0),
        "is_tree": torch.tensor([1, 0], dtype=torch.uint8),
        "page_table": torch.tensor([[1, 3], [2, 0]], dtype=torch.int32),
        "logit_rows": int32(0, 1, 2, 3), "cu_logits": int32(0, 3, 4), "page_size": 4,
        "num_pages": 6, **changed,
    }  # fmt: skip


def fill(**changed: Any) -> Any:
    plan = _core.StepPlan(max_requests=4, max_rows=256, max_pages_per_request=64)
    _core.fill_step_plan(plan, **arguments(**changed))
    return plan


def with_words(row: int, *words: int) -> torch.Tensor:
    mask = arguments()["mask"]
    mask[row] = int32(*words)
    return mask


def test_what_it_holds() -> None:
    plan = fill()
    assert (plan.num_requests, plan.num_rows, plan.num_logit_rows) == (2, 4, 4)
    assert plan.tokens.tolist() == [1, 2, 3, 4]
    assert plan.mask[:3, 0].tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (with_words(1, 1, 0, 0, 0), "mask row 1 of request 0 lacks its own bit"),
        (with_words(1, 7, 0, 0, 0), "mask row 1 of request 0 has a bit of a later row"),
        (with_words(1, 3, -128, 0, 0), "mask row 1 of request 0 has a bit of a later row"),
        (with_words(0, 1, 0, 0, 1), "mask row 0 of request 0 has a bit of a later row"),
    ],
)
def test_rows_that_would_see_what_there_is_not(mask: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill(mask=mask)


def test_the_mask_of_a_chain_is_not_read() -> None:
    fill(mask=with_words(3, -1, -1, -1, -1))


def test_a_tree_has_128_rows_at_most() -> None:
    rows = 129
    with pytest.raises(ValueError, match="request 0 is a tree of 129 rows: at most 128"):
        fill(
            **{name: torch.zeros(rows, dtype=torch.int32) for name in ("tokens", "positions")},
            parents=torch.zeros(rows, dtype=torch.int32),
            mask=torch.zeros(rows, 4, dtype=torch.int32),
            cu_rows=int32(0, rows), kv_len=int32(0), is_tree=torch.ones(1, dtype=torch.uint8),
            page_table=torch.zeros(1, 33, dtype=torch.int32), logit_rows=int32(0),
            cu_logits=int32(0, 1),
        )  # fmt: skip

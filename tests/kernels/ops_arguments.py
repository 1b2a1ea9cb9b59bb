"""Small valid arguments of the operations, to be made wrong one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_ext import ops

R, H, G, K, P, S = 5, 4, 2, 16, 6, 4


def good() -> dict[str, Any]:
    """Arguments of spec_attention: two requests, 3 and 2 rows, kv_len 5 and 0."""
    return dict(
        q=torch.zeros(R, H, K),
        k_pages=torch.zeros(P, G, S, K),
        v_pages=torch.zeros(P, G, S, K),
        page_table=torch.tensor([[3, 1, 99], [0, -5, 7]], dtype=torch.int32),
        kv_len=torch.tensor([5, 0], dtype=torch.int32),
        cu_rows=torch.tensor([0, 3, 5], dtype=torch.int32),
        out=torch.zeros(R, H, K),
        scale=0.25,
        mask=torch.tensor([[1], [3], [5], [1], [3]], dtype=torch.int32),
    )


def call(**changed: Any) -> None:
    arguments = {**good(), **changed}
    positional = [
        arguments.pop(name)
        for name in ("q", "k_pages", "v_pages", "page_table", "kv_len", "cu_rows")
    ]
    ops.spec_attention(*positional, **arguments)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def refused(kind: type[Exception], text: str, run: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(text)) as caught:
        run()
    assert type(caught.value) is kind


def kv_arguments() -> list[Any]:
    """Arguments of append_kv, in order."""
    a = good()
    rows = [torch.zeros(R, G, K), torch.zeros(R, G, K)]
    return [*rows, a["k_pages"], a["v_pages"], a["page_table"], a["kv_len"], a["cu_rows"]]

"""Every refusal of the other operations names the argument, what it is and what it has to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_arguments import G, H, K, P, R, S, good, int32, kv_arguments, refused

from specdec_ext import _core, ops


@pytest.mark.parametrize(
    ("kind", "text", "index", "value"),
    [
        (ValueError, "k has shape [5, 4, 16]: expected [R, heads, K]", 0, torch.zeros(R, H, K)),
        (ValueError, "v has shape [4, 2, 16]", 1, torch.zeros(4, G, K)),
        (TypeError, "v has dtype float16: expected float32", 1, torch.zeros(R, G, K).half()),
        (TypeError, "k requires gradients", 0, torch.zeros(R, G, K, requires_grad=True)),
        (ValueError, "page_table[0, 0] = 6: page ids are 0..5", 4, int32(6, 0, 0, 0).view(2, 2)),
    ],
)
def test_append_kv(kind: type[Exception], text: str, index: int, value: Any) -> None:
    arguments = kv_arguments()
    ops.append_kv(*arguments)
    arguments[index] = value
    refused(kind, text, lambda: ops.append_kv(*arguments))


@pytest.mark.parametrize(
    ("kind", "text", "path", "path_len"),
    [
        (ValueError, "path_len[0] = 3: request 0 has 2 drafts", [[1, 2, 2], [1, 0, 0]], [3, 0]),
        (ValueError, "path_len[1] = -1", [[1, 2, 0], [1, 0, 0]], [0, -1]),
        (ValueError, "path[0, 1] = 1: a path increases", [[1, 1, 0], [1, 0, 0]], [2, 0]),
        (ValueError, "path[0, 0] = 0: a path increases from 1", [[0, 1, 0], [1, 0, 0]], [2, 0]),
        (
            ValueError,
            "path[1, 0] = 2: a path increases from 1 to at most 1",
            [[1, 2], [2, 0]],
            [0, 1],
        ),
        (ValueError, "path has shape [1, 2]: expected [B, max_path] = [2, any]", [[1, 2]], [0, 1]),
        (ValueError, "path_len has shape [1]: expected [B] = [2]", [[1, 2], [1, 0]], [1]),
    ],
)
def test_compact_kv(
    kind: type[Exception], text: str, path: list[list[int]], path_len: list[int]
) -> None:
    a = good()
    pages = [torch.zeros(2, P, G, S, K), torch.zeros(2, P, G, S, K)]
    geometry = [a["page_table"], a["kv_len"], a["cu_rows"]]
    ops.compact_kv(*pages, *geometry, torch.tensor([[1, 2], [1, 0]]).int(), int32(2, 1))
    refused(
        kind,
        text,
        lambda: ops.compact_kv(*pages, *geometry, torch.tensor(path).int(), int32(*path_len)),
    )
    one_layer = [page[0] for page in pages]
    refused(
        ValueError,
        "k_pages has shape [6, 2, 4, 16]: expected [layers, P, G, S, K]",
        lambda: ops.compact_kv(*one_layer, *geometry, torch.zeros(2, 2).int(), int32(0, 0)),
    )


@pytest.mark.parametrize(
    ("kind", "text", "scores", "out"),
    [
        (ValueError, "scores has shape [3]: expected [rows, V]", torch.zeros(3), int32(0)),
        (
            TypeError,
            "scores has dtype int32: expected float32",
            torch.zeros(1, 3).int(),
            int32(0),
        ),
        (ValueError, "scores has 0 columns: at least one", torch.zeros(1, 0), int32(0)),
        (ValueError, "scores has stride 2 on its last axis", torch.zeros(3, 2).T, int32(0, 0)),
        (ValueError, "out has shape [3]: expected [rows] = [2]", torch.zeros(2, 3), int32(0, 0, 0)),
        (TypeError, "out has dtype int64: expected int32", torch.zeros(1, 3), torch.tensor([0])),
    ],
)
def test_argmax(kind: type[Exception], text: str, scores: torch.Tensor, out: torch.Tensor) -> None:
    refused(kind, text, lambda: ops.argmax(scores, out))


def test_masks() -> None:
    wide = torch.ones(2, 129, dtype=torch.bool)
    refused(ValueError, "mask has 129 columns: 1..128", lambda: ops.pack_mask(wide))
    refused(TypeError, "mask has dtype uint8: expected bool", lambda: ops.pack_mask(wide.byte()))
    refused(ValueError, "mask has shape [2]: expected [R, n]", lambda: ops.pack_mask(wide[:, 0]))
    refused(ValueError, "draft_tree.size = 129", lambda: ops.mask_from_parents([-1] + [0] * 128))
    refused(ValueError, "draft_tree.size = 0", lambda: ops.mask_from_parents([]))
    refused(ValueError, "draft_tree.parents[0] = 0", lambda: ops.mask_from_parents([0, 0]))
    refused(ValueError, "draft_tree.parents[2] = 2", lambda: ops.mask_from_parents([-1, 0, 2]))


def test_step_forms() -> None:
    plan = _core.make_step_plan([[0, 0]], kv_len=[5], page_table=[[1, 3]])
    pages = [torch.zeros(3, P, G, S, K), torch.zeros(3, P, G, S, K)]
    q, k = torch.zeros(2, H, K), torch.zeros(2, G, K)

    def attend(layer: int, plan: Any = plan, q: torch.Tensor = q) -> None:
        ops.step_attention(plan, layer, q, torch.zeros_like(q), *pages, scale=1.0)

    attend(2)
    ops.step_append_kv(plan, 2, k, k, *pages)
    for layer in (-1, 3):
        refused(ValueError, f"layer = {layer}: layers are 0..2", lambda n=layer: attend(n))
        refused(
            ValueError,
            f"layer = {layer}: layers are 0..2",
            lambda n=layer: ops.step_append_kv(plan, n, k, k, *pages),
        )
    refused(ValueError, "q has shape [3, 4, 16]", lambda: attend(0, q=torch.zeros(3, H, K)))
    wild = _core.make_step_plan([[0, 0]], kv_len=[5], page_table=[[1, 6]])
    refused(ValueError, "plan.page_table[0, 1] = 6: page ids are 0..5", lambda: attend(0, wild))
    short = _core.make_step_plan([[0, 0]], kv_len=[7], page_table=[[1, 3]])
    refused(
        ValueError,
        "plan.page_table has 2 pages for request 0: kv_len + rows = 9 tokens need 3 pages of 4",
        lambda: attend(0, short),
    )


def test_num_threads() -> None:
    before = ops.num_threads()
    for count in (0, -1, 257):
        refused(
            ValueError,
            f"num_threads = {count}: give 1..256",
            lambda n=count: ops.set_num_threads(n),
        )
    assert ops.num_threads() == before

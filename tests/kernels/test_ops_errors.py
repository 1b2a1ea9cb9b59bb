"""Every refusal of the operations names the argument, what it is and what it has to be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specdec_ext import _core, ops

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


def test_the_unchanged_arguments_are_accepted() -> None:
    call()
    call(mask=None)
    call(mask=torch.tensor([[1], [3], [5], [1], [3]]).to(torch.uint32))
    call(sinks=torch.zeros(H), sliding_window=3, softcap=1.0)


class NotADlpackTensor:
    def __dlpack__(self) -> object:
        return object()


class BrokenTensor:
    def __dlpack__(self, max_version: object = None) -> object:
        raise RuntimeError("the device is on fire")


ATTENTION: list[tuple[type[Exception], str, dict[str, Any]]] = [
    # What is a tensor at all.
    (TypeError, "q is a list: give a tensor (torch.Tensor, or anything", dict(q=[1.0])),
    (TypeError, "kv_len is a NoneType: give a tensor", dict(kv_len=None)),
    (TypeError, "q.__dlpack__() of", dict(q=NotADlpackTensor())),
    (TypeError, "the device is on fire", dict(q=BrokenTensor())),
    (
        TypeError,
        "q requires gradients: these operations are for inference only: detach first (q.detach())",
        dict(q=torch.zeros(R, H, K, requires_grad=True)),
    ),
    (
        TypeError,
        "k_pages requires gradients",
        dict(k_pages=torch.nn.Parameter(torch.zeros(P, G, S, K))),
    ),
    # dtypes
    (
        TypeError,
        "q has dtype float64: supported are float32",
        dict(q=torch.zeros(R, H, K, dtype=torch.float64)),
    ),
    (
        TypeError,
        "q has dtype int32: expected float32 or bfloat16 or float16",
        dict(q=torch.zeros(R, H, K, dtype=torch.int32)),
    ),
    (
        TypeError,
        "out has dtype bfloat16: expected float32",
        dict(out=torch.zeros(R, H, K, dtype=torch.bfloat16)),
    ),
    (
        TypeError,
        "v_pages has dtype float16: expected float32",
        dict(v_pages=torch.zeros(P, G, S, K, dtype=torch.float16)),
    ),
    (
        TypeError,
        "k_pages has dtype uint8: expected float32",
        dict(k_pages=torch.zeros(P, G, S, K, dtype=torch.uint8)),
    ),
    (
        TypeError,
        "page_table has dtype int64: expected int32",
        dict(page_table=torch.zeros(2, 3, dtype=torch.int64)),
    ),
    (TypeError, "kv_len has dtype int64: expected int32", dict(kv_len=torch.tensor([5, 0]))),
    (TypeError, "cu_rows has dtype float32: expected int32", dict(cu_rows=torch.zeros(3))),
    (
        TypeError,
        "mask has dtype bool: expected uint32 or int32",
        dict(mask=torch.ones(R, 1, dtype=torch.bool)),
    ),
    (
        TypeError,
        "sinks has dtype bfloat16: expected float32",
        dict(sinks=torch.zeros(H, dtype=torch.bfloat16)),
    ),
    # shapes
    (
        ValueError,
        "q has shape [5, 64]: expected [R, H, K] = [5, any, 16]",
        dict(q=torch.zeros(R, 64)),
    ),
    (
        ValueError,
        "q has shape [4, 4, 16]: expected [R, H, K] = [5, any, 16]",
        dict(q=torch.zeros(4, H, K)),
    ),
    (
        ValueError,
        "out has shape [5, 4, 8]: expected [R, heads, K] = [5, 4, 16]",
        dict(out=torch.zeros(R, H, 8)),
    ),
    (
        ValueError,
        "k_pages has shape [4, 16]: expected [P, G, S, K] = [any, any, any, any]",
        dict(k_pages=torch.zeros(S, K)),
    ),
    (
        ValueError,
        "v_pages has shape [5, 2, 4, 16]: expected [P, G, S, K] = [6, 2, 4, 16]",
        dict(v_pages=torch.zeros(5, G, S, K)),
    ),
    (
        ValueError,
        "kv_len has shape [3]: expected [B] = [2]",
        dict(kv_len=int32(1, 2, 3)),
    ),
    (
        ValueError,
        "cu_rows has shape [2]: expected [B + 1] = [3]",
        dict(cu_rows=int32(0, 5)),
    ),
    (
        ValueError,
        "mask has shape [4, 1]: expected [R, W] = [5, any]",
        dict(mask=torch.ones(4, 1, dtype=torch.int32)),
    ),
    (
        ValueError,
        "sinks has shape [3]: expected [H] = [4]",
        dict(sinks=torch.zeros(3)),
    ),
    (
        ValueError,
        "q has 7 axes: at most 6",
        dict(q=torch.zeros(1, 1, 1, 1, 1, 1, 1)),
    ),
    # layout
    (
        ValueError,
        "q has stride 5 on its last axis",
        dict(
            q=torch.zeros(400)
            .as_strided((R, H, K), (1, 80, 5))
            .permute(2, 1, 0)[:, :, :]
            .transpose(0, 0)
            .as_strided((R, H, K), (1, 80, 5))
        ),
    ),
    (
        ValueError,
        "q has stride 80 between heads: heads lie head_dim = 16 elements apart",
        dict(q=torch.zeros(H, R, K).transpose(0, 1)),
    ),
    (
        ValueError,
        "out has overlapping rows (stride 0)",
        dict(out=torch.zeros(1, H, K).expand(R, H, K)),
    ),
    (
        ValueError,
        "page_table is not contiguous: use page_table.contiguous()",
        dict(page_table=torch.zeros(3, 2, dtype=torch.int32).T),
    ),
    (
        ValueError,
        "k_pages has stride 4 on its last axis",
        dict(k_pages=torch.zeros(P, G, K, S).transpose(2, 3)),
    ),
    (
        ValueError,
        "v_pages has stride 64 on axis 0, k_pages 128: both need the same layout",
        dict(v_pages=torch.zeros(G, P, S, K).transpose(0, 1)),
    ),
    # limits
    (
        ValueError,
        "k_pages has a page size of 3: supported are powers of two from 1 to 128",
        dict(k_pages=torch.zeros(P, G, 3, K), v_pages=torch.zeros(P, G, 3, K)),
    ),
    (
        ValueError,
        "k_pages has a page size of 256",
        dict(k_pages=torch.zeros(P, G, 256, K), v_pages=torch.zeros(P, G, 256, K)),
    ),
    (
        ValueError,
        "k_pages has a head_dim of 12: supported are multiples of 8 from 8 to 256",
        dict(k_pages=torch.zeros(P, G, S, 12), v_pages=torch.zeros(P, G, S, 12)),
    ),
    (
        ValueError,
        "k_pages has a head_dim of 264",
        dict(k_pages=torch.zeros(P, G, S, 264), v_pages=torch.zeros(P, G, S, 264)),
    ),
    (
        ValueError,
        "k_pages has 0 KV heads",
        dict(k_pages=torch.zeros(P, 0, S, K), v_pages=torch.zeros(P, 0, S, K)),
    ),
    (
        ValueError,
        "q has 3 heads: a multiple of the 2 KV heads is needed",
        dict(q=torch.zeros(R, 3, K), out=torch.zeros(R, 3, K)),
    ),
    (ValueError, "scale = nan: give a finite number", dict(scale=float("nan"))),
    (ValueError, "sliding_window = -1: give 0 (none)", dict(sliding_window=-1)),
    (ValueError, "softcap = -2: give 0 (none)", dict(softcap=-2.0)),
    (ValueError, "softcap = inf", dict(softcap=float("inf"))),
    # geometry
    (
        ValueError,
        "page_table has shape [0, 3]: at least one request is needed",
        dict(page_table=torch.zeros(0, 3, dtype=torch.int32)),
    ),
    (ValueError, "cu_rows[0] = 1: it starts at 0", dict(cu_rows=int32(1, 3, 5))),
    (
        ValueError,
        "cu_rows[2] = 3: it has to exceed cu_rows[1] = 3",
        dict(cu_rows=int32(0, 3, 3)),
    ),
    (ValueError, "kv_len[1] = -1: lengths are not negative", dict(kv_len=int32(5, -1))),
    (
        ValueError,
        "page_table has 3 pages for request 0: kv_len + rows = 13 tokens need 4 pages of 4",
        dict(kv_len=int32(10, 0)),
    ),
    (
        ValueError,
        "page_table[0, 2] = 99: page ids are 0..5",
        dict(kv_len=int32(6, 0)),
    ),
    (
        ValueError,
        "page_table[1, 1] = -5: page ids are 0..5",
        dict(kv_len=int32(5, 3)),
    ),
    (
        ValueError,
        "kv_len + rows = 2147483650 tokens need 536870913 pages of 4",
        dict(kv_len=int32(2**31 - 1, 0)),  # the sum does not fit 32 bits
    ),
    # mask
    (
        ValueError,
        "mask has 5 words per row: 1..4 are supported",
        dict(mask=torch.ones(R, 5, dtype=torch.int32)),
    ),
    (
        ValueError,
        "mask row 1 of request 0 lacks its own bit: a row sees itself",
        dict(mask=torch.tensor([[1], [1], [5], [1], [3]], dtype=torch.int32)),
    ),
    (
        ValueError,
        "mask row 0 of request 1 has a bit of a later row",
        dict(mask=torch.tensor([[1], [3], [5], [3], [3]], dtype=torch.int32)),
    ),
    (
        ValueError,
        "mask row 1 of request 1 has a bit of a later row",
        dict(mask=torch.tensor([[1, 0], [3, 0], [5, 0], [1, 0], [3, 1]], dtype=torch.int32)),
    ),
]


@pytest.mark.parametrize(("kind", "text", "changed"), ATTENTION, ids=[a[1][:40] for a in ATTENTION])
def test_spec_attention(kind: type[Exception], text: str, changed: dict[str, Any]) -> None:
    refused(kind, text, lambda: call(**changed))


def test_more_rows_than_the_mask_has_bits() -> None:
    def run(rows: int, words: int) -> None:
        pages = torch.zeros(64, 1, S, 8)
        mask = torch.zeros(rows, words, dtype=torch.int32)
        ops.spec_attention(
            torch.zeros(rows, 1, 8),
            pages,
            pages.clone(),
            torch.arange(64, dtype=torch.int32)[None],
            int32(0),
            int32(0, rows),
            mask=mask,
            out=torch.zeros(rows, 1, 8),
            scale=1.0,
        )

    refused(ValueError, "mask has 1 words per row: the 33 rows of request 0", lambda: run(33, 1))
    refused(ValueError, "mask has 4 words per row: the 129 rows of request 0", lambda: run(129, 4))


def test_a_refused_call_writes_nothing() -> None:
    out = torch.full((R, H, K), torch.nan)
    refused(ValueError, "page_table[1, 1] = -5", lambda: call(out=out, kv_len=int32(5, 3)))
    assert out.isnan().all()


# -- Other producers of DLPack ---------------------------------------------------------------------


class Wrapped:
    """A tensor that has __dlpack__ and no exchange table; counts the exports that are alive."""

    def __init__(self, tensor: torch.Tensor, versioned: bool) -> None:
        self.tensor, self.versioned = tensor, versioned

    def __dlpack__(self, **options: Any) -> object:
        if options and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.tensor.__dlpack__(**options)


@pytest.mark.parametrize("versioned", [True, False])
def test_any_dlpack_producer_is_read(versioned: bool) -> None:
    torch.manual_seed(0)
    arguments = good()
    for name in ("q", "k_pages", "v_pages"):
        arguments[name] = torch.randn_like(arguments[name])
    expected = torch.zeros(R, H, K)
    call(**{**arguments, "out": expected})
    wrapped = {
        name: Wrapped(value, versioned) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    call(**wrapped)
    assert torch.equal(arguments["out"], expected)
    assert bool((expected != 0).any())


def test_numpy_arrays_are_read_and_read_only_ones_not_written() -> None:
    scores = np.array([[0.0, 2.0, 1.0]], dtype=np.float32)
    out = np.zeros(1, dtype=np.int32)
    _core.argmax(scores, out)
    assert out.tolist() == [1]
    out.flags.writeable = False
    with pytest.raises((ValueError, TypeError), match=r"read-?only"):
        _core.argmax(scores, out)


def test_a_call_keeps_no_reference() -> None:
    import gc
    import sys

    arguments = good()
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    for _ in range(3):
        call(**arguments)
        refused(
            ValueError, "cu_rows[0] = 1", lambda: call(**{**arguments, "cu_rows": int32(1, 3, 5)})
        )
    gc.collect()
    assert [sys.getrefcount(tensor) for tensor in tensors] == before


# -- The other operations --------------------------------------------------------------------------


def kv_arguments() -> list[Any]:
    a = good()
    rows = [torch.zeros(R, G, K), torch.zeros(R, G, K)]
    return [*rows, a["k_pages"], a["v_pages"], a["page_table"], a["kv_len"], a["cu_rows"]]


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
            "scores has dtype float16: expected float32",
            torch.zeros(1, 3).half(),
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
        "plan.page_table has 2 pages for request 0: 9 tokens need 3 pages of 4",
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

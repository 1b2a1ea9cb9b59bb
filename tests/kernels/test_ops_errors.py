"""Every refusal of spec_attention names the argument, what it is and what it has to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_arguments import G, H, K, P, R, S, call, int32, refused

from specdec_ext import ops


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
        "cu_rows[2] = 2: it must not be below cu_rows[1] = 3",
        dict(cu_rows=int32(0, 3, 2)),
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

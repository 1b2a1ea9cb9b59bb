"""Arguments that no honest caller gives: refused in words, never read as memory.

A sample of what `make fuzz` does at length under sanitizers (tests/fuzz).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ops_arguments import G, H, K, P, S, good, kv_arguments, refused

from specdec_ext import _core, _core_testing, ops

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from object_targets import layer_tensors
from run import run_children

BIG = 2**31 - 1
LENGTHS = [
    (7, "page_table has 2 pages for request 0: kv_len + rows = 9 tokens need 3 pages of 4"),
    (BIG - 2, "kv_len + rows = 2147483647 tokens need 536870912 pages of 4"),
]


def pages() -> list[torch.Tensor]:
    return [torch.zeros(2, P, G, S, K), torch.zeros(2, P, G, S, K)]


@pytest.mark.parametrize(("kv_len", "text"), LENGTHS)
def test_step_operations_check_lengths(kv_len: int, text: str) -> None:
    plan = _core.make_step_plan([[1, 2]], kv_len=[kv_len], page_table=[[1, 2]])
    q, k = torch.zeros(2, H, K), torch.zeros(2, G, K)
    refused(
        ValueError,
        f"plan.{text}" if kv_len == 7 else text,
        lambda: ops.step_attention(plan, 1, q, torch.zeros_like(q), *pages(), scale=1.0),
    )
    with pytest.raises(ValueError, match=r"plan\.page_table has 2 pages"):
        ops.step_append_kv(plan, 1, k, k, *pages())


@pytest.mark.parametrize("kv_len", [-1, -(2**31), BIG - 1, BIG])
def test_a_plan_has_no_such_length(kv_len: int) -> None:
    with pytest.raises(ValueError, match=rf"kv_len\[0\] = {kv_len}: give 0..2147483647 less"):
        _core.make_step_plan([[1, 2]], kv_len=[kv_len], page_table=[[1, 2]])


@pytest.mark.parametrize(
    ("kv_len", "text"),
    [(-1, "kv_len[0] = -1: lengths are not negative"), *LENGTHS,
     (BIG, "kv_len + rows = 2147483650 tokens need 536870913 pages of 4")],
)  # fmt: skip
def test_operations_check_lengths(kv_len: int, text: str) -> None:
    lengths = torch.tensor([kv_len, 0], dtype=torch.int32)
    a = good()
    a.update(kv_len=lengths, page_table=torch.zeros(2, 2, dtype=torch.int32))
    rows = 3 if kv_len in (-1, BIG) else 2
    a["cu_rows"] = torch.tensor([0, rows, 5], dtype=torch.int32)
    names = ("q", "k_pages", "v_pages", "page_table", "kv_len", "cu_rows")
    first = [a.pop(name) for name in names]
    refused(ValueError, text, lambda: ops.spec_attention(*first, **a))
    append = kv_arguments()
    append[4:] = first[3:]
    refused(ValueError, text, lambda: ops.append_kv(*append))


def decoder(page_size: int = S) -> _core.LlamaDecoder:
    made = _core.LlamaDecoder(
        vocab_size=9, hidden_size=12, intermediate_size=20, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=8, max_rows=8, max_position=2**20, rms_norm_eps=1e-5,
        activation="silu", attention_scale=0.3, tie_word_embeddings=True, rope_index=[-1],
        sliding_window=[0],
    )  # fmt: skip
    made.set_embedding(torch.randn(9, 12))
    made.set_final_norm(torch.ones(12))
    made.set_layer(0, layer_tensors(torch.float32))
    shape = (1, P, 1, page_size, 8)
    made.bind_cache(torch.zeros(shape), torch.zeros(shape))
    return made


def test_the_decoder_checks_lengths_and_pages() -> None:
    model, out = decoder(), torch.zeros(2, dtype=torch.int32)
    for kv_len, table, text in (
        (7, [1, 2], "step.page_table has 2 pages for request 0: kv_len + rows = 9 tokens"),
        (2**20 - 2, [1, 2], "step.page_table has 2 pages"),
        (2, [P, 1], f"step.page_table[0, 0] = {P}: page ids are 0..{P - 1}"),
        (2, [-1, 1], "step.page_table[0, 0] = -1: page ids"),
    ):
        plan = _core.make_step_plan([[1, 2]], kv_len=[kv_len], page_table=[table])
        with pytest.raises(ValueError, match=re.escape(text)):
            model.forward(plan, out)
    model.forward(_core.make_step_plan([[1, 2]], kv_len=[6], page_table=[[1, 2]]), out)
    for page_size in (0, 3, 256):
        with pytest.raises(ValueError, match="power of two"):
            decoder(page_size)


def test_layers_that_are_none() -> None:
    layers = {"recurrence": None, "projection": None, "target": decoder(), "head": None}
    with pytest.raises(TypeError, match=r"blocks\[0\] is a NoneType: give a PackedLinear"):
        _core.RecurrentDrafter(hidden_size=4, num_scores=8, blocks=[None], **layers)
    for size in (0, -1, 2**62):
        with pytest.raises(ValueError, match=f"hidden_size = {size}, num_scores = 8: give 1.."):
            _core.RecurrentDrafter(hidden_size=size, num_scores=8, blocks=[], **layers)


def unaligned(dtype: Any, *shape: int) -> np.ndarray:
    raw = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 1, np.uint8)
    return raw[1:].view(dtype).reshape(shape)


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        (unaligned(np.float32, 2, 3), "float32 elements lie at multiples of 4 bytes, copy"),
        (unaligned(np.float16, 2, 3), "float16 elements lie at multiples of 2 bytes, copy"),
        (
            np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2, 2**57), (2**62, 4)),
            "scores has shape [2, 144115188075855872] and strides that reach beyond any memory",
        ),
        (
            np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2, 3), (-(2**62), 4)),
            "strides that reach beyond any memory",
        ),
    ],
)
def test_memory_that_no_tensor_has(scores: np.ndarray, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        _core.argmax(scores, torch.zeros(2, dtype=torch.int32))


def test_empty_tensors_have_no_address() -> None:
    """An empty tensor's data may be null: nothing is added to it."""
    ops.argmax(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int32))
    # NumPy gives arrays without elements strides of its own: they say nothing.
    _core.argmax(np.zeros((0, 3), np.float32)[:, ::-1], torch.zeros(0, dtype=torch.int32))
    with pytest.raises(ValueError, match="on its last axis"):
        _core.argmax(torch.zeros(0, 6)[:, ::2], torch.zeros(0, dtype=torch.int32))


@pytest.mark.parametrize("tokens", [-1, 17, 2**31, 2**63 - 1])
def test_a_page_table_has_no_such_room(tokens: int) -> None:
    table = _core_testing.PageTable(num_pages=8, page_size=4, num_slots=2, max_pages_per_slot=4)
    table.reserve(0, 16)
    for change in (table.reserve, table.commit):
        with pytest.raises(ValueError, match=f"tokens = {tokens}: a slot has at most 4 pages"):
            change(0, tokens)
    table.check_integrity()


@pytest.mark.parametrize("name", ["num_slots", "max_pages_per_slot"])
def test_a_page_table_of_nothing(name: str) -> None:
    sizes = {"num_pages": 8, "page_size": 4, "num_slots": 2, "max_pages_per_slot": 4}
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"{name} = {value}: at least 1"):
            _core_testing.PageTable(**{**sizes, name: value})


def test_hostile_calls_are_answered() -> None:
    """400 random calls with damaged arguments: answers and refusals, and the process lives."""
    assert run_children(400, seed=2, per_child=400) == []


def test_unaligned_arrays_are_copied_or_refused() -> None:
    parents = unaligned(np.int32, 3)
    parents[...] = [-1, 0, 1]
    assert not parents.flags.aligned
    assert _core_testing.tree_depths(parents).tolist() == [0, 1, 2]
    path, emitted, _ = _core_testing.accept_greedy(parents + 2, parents, parents + 3)
    assert path.tolist() == [1, 2] and emitted.tolist() == [2, 3, 4]
    batch = _core_testing.NgramBatch(2, 64, 3)
    arrays = {
        "tokens": np.ones((2, 4), np.int32), "counts": np.ones(2, np.int32),
        "drafts": np.zeros((2, 5), np.int32), "lengths": np.zeros(2, np.int32),
    }  # fmt: skip
    batch.propose(**arrays)
    for name, array in arrays.items():
        wild = unaligned(np.int32, *array.shape)
        with pytest.raises(ValueError, match="lie at multiples of 4 bytes"):
            batch.propose(**{**arrays, name: wild})

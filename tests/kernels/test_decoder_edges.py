"""What a caller of _core may get wrong, and rows that lie where others lay."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ops_arguments import refused

from specdec_ext import _core, ops

HIDDEN, FFN, VOCAB = 33, 64, 16


def weights(hidden: int = HIDDEN, rows: int = 64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.1).to(torch.bfloat16)

    return {
        "input_layernorm.weight": torch.ones(hidden),
        "post_attention_layernorm.weight": torch.ones(hidden),
        "self_attn.q_proj.weight": random(rows, hidden),
        "self_attn.k_proj.weight": random(rows, hidden),
        "self_attn.v_proj.weight": random(rows, hidden),
        "self_attn.o_proj.weight": random(hidden, 64),
        "mlp.gate_proj.weight": random(FFN, hidden),
        "mlp.up_proj.weight": random(FFN, hidden),
        "mlp.down_proj.weight": random(hidden, FFN),
    }


def decoder(**changed: Any) -> _core.LlamaDecoder:
    how: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_layers": 1,
        "num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "max_rows": 4, "max_position": 64,
        "rms_norm_eps": 1e-5, "activation": "silu", "attention_scale": 0.3,
        "tie_word_embeddings": True, "rope_index": [-1], "sliding_window": [0],
    }  # fmt: skip
    return _core.LlamaDecoder(**{**how, **changed})


@pytest.mark.parametrize("name", ["final_softcap", "attention_softcap"])
@pytest.mark.parametrize("value", [-30.0, math.nan, math.inf])
def test_a_cap_is_a_positive_number(name: str, value: float) -> None:
    refused(ValueError, f"decoder.{name} = {value:g}: give a positive number, or 0 for none",
            lambda: decoder(**{name: value}))  # fmt: skip


def test_a_row_that_is_not_finite_leaves_nothing_behind_where_rows_are_odd() -> None:
    """bfloat16 rows go in pairs. Rows of other widths, which lie in the same memory, write where a
    row of 33 ends."""
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    embedding[7] = math.inf
    made = decoder(tie_word_embeddings=False)
    made.set_embedding(embedding.to(torch.bfloat16))
    made.set_head(embedding.flip(1).nan_to_num(posinf=1.0).to(torch.bfloat16))
    made.set_final_norm(torch.ones(HIDDEN))
    made.set_layer(0, weights())
    pages = torch.zeros(1, 4, 1, 16, 64)
    made.bind_cache(pages, pages.clone())

    def scores(token: int, page: int) -> torch.Tensor:
        out = torch.zeros(1, VOCAB)
        made.forward(_core.make_step_plan([[token]], kv_len=[0], page_table=[[page]]), out)
        return out

    clean = scores(3, 0)
    assert not bool(scores(7, 1).isfinite().all())
    assert torch.equal(scores(3, 2), clean)


def test_a_part_that_is_none() -> None:
    made = decoder(
        hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=32, shard_rank=0,
        kv_head_bounds=[0, 1, 2], hidden_bounds=[0, 16, 32], ffn_bounds=[0, 32, 64],
        head_bounds=[0, 8, 16],
    )  # fmt: skip
    whole = weights(32)
    own = {name: t[: len(t) // 2] if t.ndim == 2 else t for name, t in whole.items()}
    made.set_embedding(torch.zeros(VOCAB, 32, dtype=torch.bfloat16))
    made.set_final_norm(torch.ones(32))
    made.set_layer(0, own)
    pages = torch.zeros(1, 4, 1, 16, 32)
    made.bind_cache(pages, pages.clone())
    plan = _core.make_step_plan([[1, 2]], kv_len=[0], page_table=[[0]])
    step = _core.ShardedStep(made, plan)
    assert step.chunk_bytes(0) > 0
    for part in (-1, step.num_parts, 4_000_002):
        refused(ValueError, f"part {part}: parts are 0..{step.num_parts - 1}",
                lambda part=part: step.chunk_bytes(part))  # fmt: skip


def test_bits_of_bfloat16_are_uint16() -> None:
    assert _core.Bfloat16Array(np.zeros(3, np.uint16)).shape == (3,)
    for dtype in (np.float32, np.int16, np.uint8, ">u2"):
        refused(TypeError, f"bits has dtype {np.dtype(dtype)}: expected uint16",
                lambda dtype=dtype: _core.Bfloat16Array(np.zeros(3, dtype)))  # fmt: skip


def test_outputs_have_memory_of_their_own() -> None:
    x = torch.randn(4, 32)
    linear = _core.PackedLinear(torch.randn(32, 32))
    wide = torch.zeros(5, 32)
    expected = torch.zeros(4, 32)
    linear.run(x, expected)
    wide[1:] = x
    for out in (wide[1:], wide[:4]):
        refused(ValueError, "out lies within the memory of x",
                lambda out=out: linear.run(wide[1:], out))  # fmt: skip
    apart = torch.zeros(8, 32)
    apart[4:] = x
    linear.run(apart[4:], apart[:4])
    assert torch.equal(apart[:4], expected)
    same_row = torch.zeros(32).expand(4, 32)
    for call in (
        lambda: ops.rms_norm(x, torch.ones(32), out=same_row),
        lambda: ops.linear(x, torch.randn(32, 32), out=same_row),
    ):
        refused(ValueError, "out has rows of 32 elements, 0 apart", call)

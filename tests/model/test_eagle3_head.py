"""_core.Eagle3Head alone: rows against the reference, the same bits however they are cut into
calls, and calls that are refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from reference.eagle3_reference import Head
from specdec_ext import _core

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, WIDE, SCORED, PAGE = 11, 16, 4, 2, 8, 24, 7, 4
LAYER, ATTENTION = "midlayer.", "midlayer.self_attn."


def weights_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)

    norms = [LAYER + n for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    return {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        ATTENTION + "q_proj.weight": matrix(HEADS * DIM, 2 * HIDDEN),
        ATTENTION + "k_proj.weight": matrix(KV_HEADS * DIM, 2 * HIDDEN),
        ATTENTION + "v_proj.weight": matrix(KV_HEADS * DIM, 2 * HIDDEN),
        ATTENTION + "o_proj.weight": matrix(HIDDEN, HEADS * DIM),
        LAYER + "mlp.gate_proj.weight": matrix(WIDE, HIDDEN),
        LAYER + "mlp.up_proj.weight": matrix(WIDE, HIDDEN),
        LAYER + "mlp.down_proj.weight": matrix(HIDDEN, WIDE),
        "lm_head.weight": matrix(SCORED, HIDDEN),
        "embed_tokens.weight": matrix(VOCAB, HIDDEN),
        **{f"{n}.weight": 1 + matrix(HIDDEN) for n in (*norms, "norm")},
        "d2t": np.zeros(SCORED, dtype=np.int64),
    }


def arguments(weights: dict[str, np.ndarray], **changes: Any) -> dict[str, Any]:
    half = DIM // 2
    angles = np.arange(32)[:, None] / 10000.0 ** (np.arange(half) / half)

    def pack(*names: str) -> Any:
        return _core.PackedLinear(np.concatenate([weights[f"{n}.weight"] for n in names]), None)

    values = {
        "hidden_size": HIDDEN, "tap_size": 3 * HIDDEN, "num_scores": SCORED, "num_heads": HEADS,
        "num_kv_heads": KV_HEADS, "head_dim": DIM, "rms_norm_eps": 1e-6,
        "norm_before_residual": False, "sliding_window": 0, "fc": pack("fc"),
        "qkv": pack(*(f"{ATTENTION}{n}_proj" for n in "qkv")), "o": pack(ATTENTION + "o_proj"),
        "gate_up": pack(LAYER + "mlp.gate_proj", LAYER + "mlp.up_proj"),
        "down": pack(LAYER + "mlp.down_proj"), "head": pack("lm_head"),
        "input_norm": weights[LAYER + "input_layernorm.weight"],
        "feature_norm": weights[LAYER + "hidden_norm.weight"],
        "ffn_norm": weights[LAYER + "post_attention_layernorm.weight"],
        "final_norm": weights["norm.weight"], "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32), "embedding": pack("embed_tokens"),
    }  # fmt: skip
    return {**values, **changes}


class Bound:
    """A head with four pages and random features in them."""

    def __init__(self, seed: int = 0) -> None:
        self.weights = weights_of(seed)
        self.core = _core.Eagle3Head(**arguments(self.weights))
        shape = (1, 4, KV_HEADS, PAGE, DIM)
        self.k, self.v = (np.full(shape, np.nan, dtype=np.float32) for _ in range(2))
        rng = np.random.default_rng(seed + 1)
        self.features = rng.normal(size=(4, PAGE, HIDDEN)).astype(np.float32)
        self.core.bind_cache(self.k, self.v, self.features)

    def run(self, tokens: list[int], kv_len: int, sources: list[int]) -> np.ndarray:
        plan = _core.make_step_plan(
            [tokens], kv_len=[kv_len], page_table=[[2, 0, 3, 1]], logits_for_all_rows=True,
            needs_logits=True,
        )  # fmt: skip
        out = np.empty((len(tokens), SCORED), dtype=np.float32)
        self.core.forward(plan, np.array(sources, dtype=np.int32), out)
        return out


TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def test_rows_are_the_references_and_drafts_follow() -> None:
    """Rows of a text, then two drafts behind it; what lies in place 0 and behind is not read."""
    head = Bound()
    config = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
              "hidden_size": HIDDEN}  # fmt: skip
    reference = Head(config, head.weights)
    features = head.features[[2, 0, 3, 1]].reshape(-1, HIDDEN).astype(np.float64)
    rows = len(TEXT) - 1
    scores = [head.run(TEXT[1:], 1, [-1] * rows)[-1]]
    drafts = [7, 8]
    scores.append(head.run(drafts[:1], len(TEXT), [rows - 1])[0])
    scores.append(head.run(drafts[1:], len(TEXT) + 1, [0])[0])
    for depth, found in enumerate(scores):
        wanted, _ = reference.follow(TEXT[1:], features[:rows], drafts[:depth])
        shares = np.exp(found - found.max(), dtype=np.float64)
        assert np.allclose(shares / shares.sum(), wanted, rtol=2e-5)


@pytest.mark.parametrize("cuts", [(1,), (4, 5), (2, 3, 8)])
def test_rows_are_the_same_bits_in_any_calls(cuts: tuple[int, ...]) -> None:
    whole, cut = Bound(), Bound()
    wanted = whole.run(TEXT[1:], 1, [-1] * (len(TEXT) - 1))
    bounds = [1, *(c + 1 for c in cuts), len(TEXT)]
    parts = [cut.run(TEXT[a:b], a, [-1] * (b - a)) for a, b in itertools.pairwise(bounds)]
    assert np.array_equal(np.concatenate(parts), wanted)
    assert np.array_equal(cut.k, whole.k, equal_nan=True)


@pytest.mark.parametrize(
    ("tokens", "kv_len", "sources", "message"),
    [
        ([1], 0, [-1], r"positions\[0\] = 0: a head's rows are at 1..32"),
        ([1], 1, [0], r"sources\[0\] = 0: the call before had 0 rows"),
        ([1], 1, [-2], r"sources\[0\] = -2"),
        ([1], 1, [-1, -1], "sources"),
        ([VOCAB], 1, [-1], "the embedding has 11 rows"),
        ([1], 16, [-1], "page_table"),
    ],
)
def test_bad_calls_are_refused(
    tokens: list[int], kv_len: int, sources: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Bound().run(tokens, kv_len, sources)


def test_layers_that_do_not_fit_are_named() -> None:
    weights = weights_of(0)
    small = _core.PackedLinear(np.zeros((8, 8), dtype=np.float32), None)
    for name in ("fc", "qkv", "o", "gate_up", "head", "embedding"):
        with pytest.raises(ValueError, match=name):
            _core.Eagle3Head(**arguments(weights, **{name: small}))
    with pytest.raises(ValueError, match="a norm has 3 weights"):
        _core.Eagle3Head(**arguments(weights, final_norm=np.ones(3, dtype=np.float32)))
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        _core.Eagle3Head(**arguments(weights, num_kv_heads=3))
    with pytest.raises(TypeError, match="fc is a"):
        _core.Eagle3Head(**arguments(weights, fc=None))
    head = _core.Eagle3Head(**arguments(weights))
    plan = _core.make_step_plan([[1]], kv_len=[1], page_table=[[0]])
    with pytest.raises(ValueError, match="bind_cache"):
        head.forward(plan, np.zeros(1, dtype=np.int32), None)
    pages = np.zeros((1, 2, KV_HEADS, PAGE, DIM), dtype=np.float32)
    with pytest.raises(ValueError, match="features"):
        head.bind_cache(pages, pages, np.zeros((2, PAGE, HIDDEN + 1), dtype=np.float32))

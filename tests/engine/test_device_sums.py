"""Passes of a device in which norms and the append add up products that are left in pieces.

Models as wide as that takes, and else tiny: the text and its probabilities are those of a decoder
that has every product added up first.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from device_llm_cases import PROMPTS, VOCAB, open_llm
from eagle3_cases import save_trained

from emulators import devices
from specdec_ext import LLM, Eagle3DecodingConfig, NGramDecodingConfig, SamplingParams, ops
from specdec_ext.models.device_products import Products
from tiny_models import save_llama

# Devices of 9.0 cut sums of 2,048 and more.
SHAPES: dict[str, dict[str, Any]] = {
    "qkv": {"hidden_size": 2048, "intermediate_size": 64, "head_dim": 16},
    "o and down": {
        "hidden_size": 64,
        "intermediate_size": 2048,
        "head_dim": 64,
        "num_attention_heads": 32,
    },
}
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3)


def texts(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    found = [out.outputs[0] for out in outputs]
    return [
        (list(one.token_ids), [{t: p.logprob for t, p in at.items()} for at in one.logprobs])
        for one in found
    ]


def count_left(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes of products that are left in pieces from now on."""
    left: list[tuple[int, int]] = []
    linear_sums = ops.linear_sums

    def counted(*args: Any, **options: Any) -> Any:
        found = linear_sums(*args, **options)
        left.extend([] if found is None else [found.shape])
        return found

    monkeypatch.setattr(ops, "linear_sums", counted)
    return left


def add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing is left."""

    def added_up(self: Products, *args: Any) -> None:
        self(*args)

    monkeypatch.setattr(Products, "sums", added_up)


@pytest.mark.parametrize("name", SHAPES)
@devices
def test_texts_are_those_of_products_that_were_added_up(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_llama(
        tmp_path / "model", 3, VOCAB, num_hidden_layers=2, initializer_range=0.1,
        attention_bias=True, **SHAPES[name],
    )  # fmt: skip

    def open_model(spec: Any = None) -> LLM:
        return open_llm({"target": folder}, device, spec, dtype="bfloat16", numerics="exact")

    left = count_left(monkeypatch)
    with open_model() as llm:
        plain = texts(llm)
    columns = {columns for _, columns in left}
    assert columns == ({(4 + 2 * 2) * 16} if name == "qkv" else {64})
    with open_model(NGramDecodingConfig(3, 2, adaptive=False)) as llm:
        drafted = texts(llm)
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]
    add_up(monkeypatch)
    with open_model() as llm:
        assert texts(llm) == plain


@devices
def test_an_eagle_head_drafts_what_it_did(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_llama(tmp_path / "target", 11, VOCAB, num_hidden_layers=3)
    rope = SimpleNamespace(
        model_type="eagle3",
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        max_position_embeddings=512,
        head_dim=64,
    )
    head = save_trained(
        tmp_path / "head", target, [[*prompt, *prompt] for prompt in PROMPTS], steps=5,
        intermediate_size=2048, num_heads=32, head_dim=64, rope=rope,
    )  # fmt: skip
    left = count_left(monkeypatch)
    found = []
    for _ in range(2):
        spec = Eagle3DecodingConfig(str(head), max_draft_len=4, adaptive=False)
        with open_llm({"target": target}, device, spec, dtype="bfloat16", numerics="exact") as llm:
            drafted = texts(llm)
            found.append((drafted, llm.get_metrics()["speculative_decoding"]))
        assert {columns for _, columns in left} == {32}, "o and down of the head"
        add_up(monkeypatch)
    assert found[0] == found[1]
    assert found[0][1]["num_accepted_draft_tokens"] > 0

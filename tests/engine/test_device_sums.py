"""Passes of a device in which norms and the append add up products that are left in pieces.

Models as wide as that takes, and else tiny: the text and its probabilities are those of a decoder
that has every product added up first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from device_llm_cases import PROMPTS, VOCAB, open_llm

from emulators import devices
from specdec_ext import LLM, NGramDecodingConfig, SamplingParams, ops
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


@pytest.mark.parametrize("name", SHAPES)
@devices
def test_texts_are_those_of_products_that_were_added_up(
    device: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_llama(
        tmp_path / "model", 3, VOCAB, num_hidden_layers=2, initializer_range=0.1,
        attention_bias=True, **SHAPES[name],
    )  # fmt: skip
    left: list[tuple[int, int]] = []
    linear_sums = ops.linear_sums

    def counted(*args: Any, **options: Any) -> Any:
        found = linear_sums(*args, **options)
        left.extend([] if found is None else [found.shape])
        return found

    def open_model(spec: Any = None) -> LLM:
        return open_llm({"target": folder}, device, spec, dtype="bfloat16", numerics="exact")

    monkeypatch.setattr(ops, "linear_sums", counted)
    with open_model() as llm:
        plain = texts(llm)
    columns = {columns for _, columns in left}
    assert columns == ({(4 + 2 * 2) * 16} if name == "qkv" else {64})
    with open_model(NGramDecodingConfig(3, 2, adaptive=False)) as llm:
        drafted = texts(llm)
    assert [tokens for tokens, _ in drafted] == [tokens for tokens, _ in plain]

    def added_up(self: Products, *args: Any) -> None:
        self(*args)

    monkeypatch.setattr(Products, "sums", added_up)
    with open_model() as llm:
        assert texts(llm) == plain

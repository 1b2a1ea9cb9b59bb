"""The built-in default model on a device: its text is the CPU decoder's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emulators import devices
from specdec_ext import LLM, LookaheadDecodingConfig, NGramDecodingConfig, SamplingParams

PROMPTS = [
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Write a list of three colours: red,",
]


def decode(folder: Path, device: str, spec: Any = None, **options: Any) -> list[list[int]]:
    with LLM(
        folder,
        device=device,
        speculative_config=spec,
        scheduler_config={"max_batch_size": 2, "max_seq_len": 96, "max_num_tokens": 64},
        kv_cache_config={"tokens_per_block": 16},
        **options,
    ) as llm:
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        if spec is not None:
            spoken = llm.get_metrics()["speculative_decoding"]
            assert spoken["num_draft_tokens"] > 0
    return [list(out.outputs[0].token_ids) for out in outputs]


@pytest.mark.slow
@devices
def test_the_default_model_says_the_same(default_model_path: Path, device: str) -> None:
    """In float32 as the CPU says it; in bfloat16 with drafts as without, near-ties included."""
    lookahead = LookaheadDecodingConfig(3, 3, 3, adaptive=False)
    expected = decode(default_model_path, "cpu", dtype="float32")
    for spec in (None, lookahead, NGramDecodingConfig(4, adaptive=False)):
        assert decode(default_model_path, device, spec, dtype="float32") == expected
    how = {"dtype": "bfloat16", "numerics": "exact"}
    expected = decode(default_model_path, device, **how)
    assert decode(default_model_path, device, lookahead, **how) == expected

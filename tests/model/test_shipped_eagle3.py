"""The EAGLE-3 head that is shipped for the default model: it drafts, and it changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec_ext import LLM, Eagle3DecodingConfig, SamplingParams
from specdec_ext.errors import ConfigError, ModelError

pytestmark = pytest.mark.default_model
PROMPTS = ["The capital of France is", "def fibonacci(n):\n"]
LIMITS: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 128}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_drafts_and_the_text_is_plain_decodings(
    default_model_path: Path, temperature: float
) -> None:
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=7, ignore_eos=True)
    config = Eagle3DecodingConfig(adaptive=False)
    with LLM(default_model_path, speculative_config=config, scheduler_config=LIMITS) as llm:
        drafted = llm.generate(PROMPTS, params, use_tqdm=False)
        metrics = llm.get_metrics()
    with LLM(default_model_path, speculative_config=None, scheduler_config=LIMITS) as llm:
        plain = llm.generate(PROMPTS, params, use_tqdm=False)
    for mine, theirs in zip(drafted, plain, strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert mine.metrics["tokens_per_forward_pass"] > 1.1
    assert Path(metrics["drafter"]["model"]).name == "eagle3"


def test_another_target_is_told_which_head_does_not_fit(saved: Any) -> None:
    with pytest.raises(ModelError, match=r"data/eagle3: eagle3: the head was trained for hidden"):
        LLM(saved("llama").folder, speculative_config="eagle3", scheduler_config=LIMITS)


def test_an_installation_without_it(saved: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("specdec_ext.drafters.shipped._ROOT", tmp_path)
    with pytest.raises(ConfigError, match=r"eagle3: no trained weights.*give the folder"):
        LLM(saved("llama").folder, speculative_config="eagle3", scheduler_config=LIMITS)

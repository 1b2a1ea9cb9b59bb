"""Forms that bring llguidance to its limits with a vocabulary of 49,152 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec_ext import LLM, SamplingParams
from specdec_ext.errors import RequestError


def test_no_request_fails_because_of_anothers_text(default_model_path: Path) -> None:
    """Expressions of which some texts bring the matcher to its limits."""
    engine = LLM(default_model_path, max_seq_len=256)
    form = {"json": {"type": "string", "pattern": "^.{0,300}(a|e).{0,50}(i|o).{0,50}$"}}

    def greedy() -> Any:
        # One token: whatever text the model writes, it is not what brings a matcher to its limits.
        params = SamplingParams(max_tokens=1, structured_outputs=form, cache_salt="B")
        [output] = engine.generate(["Write a sentence about the sea: "], params, use_tqdm=False)
        return output.outputs[0].token_ids, output.outputs[0].error

    before = greedy()
    assert before[1] is None
    failed = 0
    for seed in range(4):
        params = SamplingParams(
            max_tokens=64, temperature=1.5, seed=seed, structured_outputs=form, cache_salt="A"
        )
        [output] = engine.generate([f"Say something {seed}:"], params, use_tqdm=False)
        failed += output.outputs[0].finish_reason == "error"
        assert greedy() == before
    assert failed > 0, "or the test shows nothing"
    too_ambiguous = {"regex": r"^(\S{1,30} ?){5,200}$"}
    with pytest.raises(RequestError, match="too large or too ambiguous"):
        params = SamplingParams(structured_outputs=too_ambiguous)
        engine.generate(["a"], params, use_tqdm=False)
    engine.close()

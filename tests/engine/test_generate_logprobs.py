"""`specdec generate --logprobs, --prompt-logprobs`: JSON lines carry what LLM.generate returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import LLM, SamplingParams
from specdec_ext.cli import main
from tiny_models import save_tiny


@pytest.mark.parametrize(
    "method", [[], ["--prompt_lookup_config", "[4,2]"]], ids=["plain", "ngram"]
)
def test_json_lines_carry_logprobs(tmp_path: Path, capsys: Any, method: list[str]) -> None:
    folder = save_tiny(tmp_path / "m")
    argv = ["generate", "--model", str(folder), "--input_text", "abcabc", "--max_output_len", "5",
            "--json", "--logprobs", "1", "--prompt_logprobs", "2", *method]  # fmt: skip
    capsys.readouterr()
    assert main(argv) == 0
    line = json.loads(capsys.readouterr().out)
    params = SamplingParams(max_tokens=5, logprobs=1, prompt_logprobs=2)
    with LLM(folder) as llm:
        output = llm.generate("abcabc", params, use_tqdm=False)[0]
    expected = output.to_json_dict()
    assert line["token_ids"] == expected["token_ids"]
    assert len(line["logprobs"]) == 5
    assert len(line["prompt_logprobs"]) == 6 and line["prompt_logprobs"][0] is None
    for name in ("logprobs", "prompt_logprobs"):
        for row, wanted in zip(line[name], expected[name], strict=True):
            assert (row is None) == (wanted is None)
            for token, value in (wanted or {}).items():
                assert row[token]["rank"] == value["rank"]
                assert row[token]["logprob"] == pytest.approx(value["logprob"], abs=1e-5)
    for token, row in zip(output.prompt_token_ids[1:], line["prompt_logprobs"][1:], strict=True):
        assert str(token) in row and 2 <= len(row) <= 3


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt_logprobs"])
def test_without_json_they_are_refused(capsys: Any, flag: str) -> None:
    assert main(["generate", "--input_text", "x", flag, "2"]) == 2
    assert "logprobs without --json" in capsys.readouterr().err


def test_drawn_requests_in_one_step_get_what_they_get_alone(tmp_path: Path) -> None:
    """Their first tokens are drawn together, behind prompts whose other rows have scores, too."""
    params = [
        SamplingParams(max_tokens=8, temperature=t, seed=i, prompt_logprobs=1, ignore_eos=True)
        for i, t in enumerate((1.0, 0.7, 1.3))
    ]
    prompts = ["abcabc", "b", "the cat"]
    with LLM(save_tiny(tmp_path / "m"), scheduler_config={"max_batch_size": 4}) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        for prompt, own, output in zip(prompts, params, together, strict=True):
            [alone] = llm.generate([prompt], own, use_tqdm=False)
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
            assert output.prompt_logprobs == alone.prompt_logprobs

"""Prefix reuse through LLM and the command line: the same answers, and what is reported of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import LLM, ConfigError, LookaheadDecodingConfig, SamplingParams
from specdec_ext.cli import main
from tiny_models import save_llama

LIMITS: dict[str, Any] = {"scheduler_config": {"max_batch_size": 4, "max_seq_len": 256}}
REUSE: dict[str, Any] = {"kv_cache_config": {"tokens_per_block": 8, "enable_block_reuse": True}}
COLD: dict[str, Any] = {"kv_cache_config": {"tokens_per_block": 8}}
START = [(i * 37 + 11) % 97 for i in range(60)]
PROMPTS = [[*START, 5, 6, 7], [*START, 8], START[:33], [*START, 5, 6, 7, 8, 9, 10, 11, 12]]
METHODS: dict[str, Any] = {
    "plain": None,
    "lookahead": LookaheadDecodingConfig(4, 3, 4, adaptive=False),
    "ngram": {"method": "ngram", "K": 6, "M": 3, "adaptive": False},
    "ngram adaptive": {"method": "ngram", "K": 6, "M": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("reuse"), 7, 97)


def results(llm: Any, params: SamplingParams) -> list[tuple[Any, ...]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4, "top_k": 20}])
@pytest.mark.parametrize("method", METHODS)
def test_warm_equals_cold(method: str, sampling: dict[str, Any], folder: Path) -> None:
    params = SamplingParams(max_tokens=30, logprobs=3, **sampling)
    with LLM(folder, speculative_config=METHODS[method], **LIMITS, **COLD) as llm:
        cold = results(llm, params)
    with LLM(folder, speculative_config=METHODS[method], **LIMITS, **REUSE) as llm:
        assert results(llm, params) == cold
        assert results(llm, params) == cold
        output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
        assert output.num_cached_tokens == output.metrics["num_cached_tokens"] == 56
        stats = llm.get_metrics()["executor"]
        assert stats["cached_tokens"] >= 56 + 56 + 32 + 64
        assert stats["free_pages"] == stats["total_pages"]


def test_two_turns_of_a_conversation(folder: Path) -> None:
    with LLM(folder, speculative_config="[6,3]", **LIMITS, **REUSE) as llm:
        params = SamplingParams(max_tokens=40)
        first = llm.generate(START, params, use_tqdm=False)[0]
        assert first.num_cached_tokens == 0
        said = START + first.outputs[0].token_ids
        second = llm.generate([*said, 1, 2, 3], params, use_tqdm=False)[0]
        assert second.num_cached_tokens == (len(said) - 1) // 8 * 8


def test_measuring_the_step_cost_spoils_nothing(folder: Path) -> None:
    """The first adaptive request has rows timed in pages 0, 1, ...; those were published."""
    plain = SamplingParams(max_tokens=20, speculative=False)
    with LLM(folder, speculative_config="[6,3]", **LIMITS, **REUSE) as llm:
        cold = results(llm, plain)
        assert llm.get_metrics()["executor"]["cached_pages"] > 0
        assert results(llm, SamplingParams(max_tokens=20)) == cold
        assert results(llm, plain) == cold


def test_salts_and_reset(folder: Path) -> None:
    def cached(llm: Any, **options: Any) -> int:
        params = SamplingParams(max_tokens=2, **options)
        output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
        count: int = output.num_cached_tokens
        return count

    with LLM(folder, enable_prefix_caching=True, **LIMITS, **COLD) as llm:
        assert llm.kv_cache_config.enable_block_reuse
        assert cached(llm, cache_salt="a") == 0
        assert cached(llm, cache_salt="b") == 0
        assert cached(llm, cache_salt="a") == 56
        assert llm.reset_prefix_cache() > 0
        assert cached(llm, cache_salt="a") == 0
    with LLM(folder, enable_prefix_caching=False, **LIMITS, **COLD) as llm:
        assert cached(llm) == cached(llm) == 0


def test_outputs_of_one_prompt(folder: Path) -> None:
    params = SamplingParams(max_tokens=12, n=4, temperature=1.0, seed=1)
    with LLM(folder, **LIMITS, **COLD) as llm:
        cold = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    with LLM(folder, **LIMITS, **REUSE) as llm:
        warm = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
        assert [o.token_ids for o in warm.outputs] == [o.token_ids for o in cold.outputs]
        assert warm.num_cached_tokens == 0
        assert warm.metrics["num_cached_tokens"] == 3 * 56


def test_contradictions_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="two names of one switch"):
        LLM(folder, enable_prefix_caching=False, **REUSE)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        LLM(folder, enable_prefix_caching="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("flag", ["--kv_cache_enable_block_reuse", "--enable-prefix-caching"])
def test_command_line(
    flag: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": p}) for p in PROMPTS))
    command = ["generate", "--model", str(folder), "--input-file", str(prompts), "--json"]
    command += ["--max-output-len", "5", "--tokens-per-block", "8", "--max-batch-size", "1"]
    lines = []
    for extra in ([], [flag], [flag.replace("--", "--no-")]):
        assert main([*command, *extra, "--disable-tqdm"]) == 0
        out = capsys.readouterr().out
        lines.append([json.loads(line) for line in out.splitlines()])
    texts = [[answer["token_ids"] for answer in answers] for answers in lines]
    assert texts[0] == texts[1] == texts[2]
    for off in (0, 2):
        assert [x["metrics"]["num_cached_tokens"] for x in lines[off]] == [0, 0, 0, 0]
    assert [x["metrics"]["num_cached_tokens"] for x in lines[1]] == [0, 56, 32, 64]

"""K/V in 8 bits behind LLM: each drafter's text is plain decoding's, whoever shares the pages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from device_llm_cases import GREEDY, PROMPTS, open_llm, save_models, tokens_of
from last_tokens import LastTokens
from medusa_models import VOCAB, save_heads, save_target

from emulators import devices
from model.redrafter_cases import random_drafter
from specdec_ext import LLM, SamplingParams, UserDrafterConfig, _core
from specdec_ext.engine.kv_pages import KvPages
from specdec_ext.errors import ConfigError
from specdec_ext.models.place import CPU

TYPES = ("fp8", "int8")
DRAFTERS = ("lookahead", "ngram", "suffix", "medusa", "redrafter", "draft_target", "user")
TOKENS = 40


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("narrow")
    return {
        "target": save_target(root / "target", initializer_range=0.35, head_dim=24),
        "other": save_target(root / "other", seed=3, num_hidden_layers=1),
        "medusa": save_heads(root / "medusa", hidden=32),
        "redrafter": random_drafter(root / "redrafter", "apple", 32, VOCAB),
    }


def config_of(drafter: str, files: dict[str, Path]) -> Any:
    options: dict[str, dict[str, Any]] = {
        "lookahead": {"max_window_size": 4, "max_ngram_size": 4},
        "ngram": {"max_draft_len": 7},
        "suffix": {},
        "medusa": {"model": str(files["medusa"])},
        "redrafter": {"model": str(files["redrafter"])},
        "draft_target": {"model": str(files["target"]), "max_draft_len": 7, "top_k": 3,
                         "max_draft_depth": 3},
    }  # fmt: skip
    if drafter == "user":
        return UserDrafterConfig(drafter=LastTokens(), max_draft_len=5, adaptive=False)
    adaptive = {} if drafter == "suffix" else {"adaptive": False}
    return {"method": drafter, **adaptive, **options[drafter]}


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    drawn = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 5, 33, 70)]
    return [*drawn, drawn[1] * 6]


def decode(
    files: dict[str, Path], kind: str, config: Any = None, **kv_cache: Any
) -> list[list[int]]:
    cache = {"dtype": kind, "tokens_per_block": 8, "max_tokens": 1024, **kv_cache}
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    limits = {"max_batch_size": 3, "max_seq_len": 128, "max_num_tokens": 80}
    with LLM(
        files["target"], device="cpu", speculative_config=config, kv_cache_config=cache, **limits
    ) as llm:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        if kv_cache.get("enable_block_reuse"):
            outputs = llm.generate(prompts(), params, use_tqdm=False)
            assert llm.get_metrics()["executor"]["cached_tokens"] > 0
    if config is not None:
        drafted = [out.metrics["speculative_decoding"]["num_draft_tokens"] for out in outputs]
        assert sum(drafted) > 20, drafted
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def plain(files: dict[str, Path]) -> dict[str, list[list[int]]]:
    return {kind: decode(files, kind) for kind in ("auto", *TYPES)}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", TYPES)
def test_greedy_text_is_plain(
    kind: str, drafter: str, files: dict[str, Path], plain: dict[str, list[list[int]]]
) -> None:
    assert decode(files, kind, config_of(drafter, files)) == plain[kind]


@pytest.mark.parametrize("kind", TYPES)
def test_prefixes_of_others_and_other_pages_change_nothing(
    kind: str, files: dict[str, Path], plain: dict[str, list[list[int]]]
) -> None:
    assert decode(files, kind, enable_block_reuse=True) == plain[kind]
    assert decode(files, kind, tokens_per_block=1) == plain[kind]


def test_types_are_models_of_their_own(plain: dict[str, list[list[int]]]) -> None:
    """The comparisons above are not of a single text."""
    assert len({str(text) for text in plain.values()}) == 3
    for texts in plain.values():
        assert sum(len(set(text)) > 8 for text in texts) >= 3


@pytest.mark.parametrize(("kind", "width"), [("fp8", 24), ("int8", 24 + 4)])
def test_the_plan_counts_what_the_pages_take(files: dict[str, Path], kind: str, width: int) -> None:
    draft = {"method": "draft_target", "model": str(files["other"]), "max_draft_len": 2}
    cache = {"dtype": kind, "max_tokens": 256}
    with LLM(files["target"], device="cpu", speculative_config=draft, kv_cache_config=cache) as llm:
        memory = llm.memory
        assert memory.bytes_per_token == 2 * 2 * 2 * width
        assert memory.draft_bytes_per_token == 2 * 1 * 2 * 8 * 4  # its own type, float32
        pages = KvPages(llm.model, memory.num_pages, memory.tokens_per_block, CPU).tensors
        assert sum(part.num_bytes for part in pages) == memory.pool_bytes
        assert {"fp8": "float8_e4m3fn", "int8": "int8"}[kind] in llm.model.info.attention


@devices
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_device_keeps_fp8(tmp_path: Path, device: str, dtype: str) -> None:
    """Appended, moved and read by the device's kernels; a tree's text is plain decoding's."""
    folders = save_models(tmp_path)
    cache = {"dtype": "fp8", "tokens_per_block": 16, "max_tokens": 512}
    how: dict[str, Any] = {"kv_cache_config": cache, "dtype": dtype, "numerics": "exact"}
    with open_llm(folders, device, **how) as llm:
        expected = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert "float8_e4m3fn" in llm.model.info.attention
    spec = {"method": "lookahead", "max_window_size": 4, "max_ngram_size": 3, "adaptive": False}
    with open_llm(folders, device, spec, **how) as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        assert llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    if dtype == "float32":  # the same rounding of K and V: the texts of the CPU
        with open_llm(folders, "cpu", **{**how, "numerics": "auto"}) as llm:
            assert tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


@devices
def test_a_device_refuses_int8(tmp_path: Path, device: str) -> None:
    cache = {"dtype": "int8", "max_tokens": 512}
    with pytest.raises(ConfigError, match=rf"dtype = 'int8': {device}.*use 'fp8'"):
        open_llm(save_models(tmp_path), device, kv_cache_config=cache)


def test_another_float_type_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="dtype = 'float16': this model keeps K and V in float32"):
        decode(files, "float16")


def test_widths_stand_in_the_core() -> None:
    assert _core.kv_row_width("int8", 64) == _core.kv_row_bytes("int8", 64) == 68
    assert _core.kv_row_bytes("float8_e4m3fn", 64) == 64
    assert _core.kv_row_bytes("bfloat16", 64) == 128
    with pytest.raises(ValueError, match="dtype = 'int32'"):
        _core.kv_row_bytes("int32", 64)
    assert torch.float8_e4m3fn.itemsize == 1

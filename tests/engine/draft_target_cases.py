"""Targets, draft models and engines of the draft-target tests."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from method_cases import HOST, Folders, Where, placed
from safetensors.torch import load_file, save_file

from specdec_ext import (
    LLM,
    DraftTargetDecodingConfig,
    SamplingParams,
    _core,
)
from tiny_models import save_llama

VOCAB = 64
PROMPTS = [
    [5, 9, 2, 9, 2, 9],
    [7],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5],
    list(range(40, 10, -1)),
    *[[(7 * i + 3 * j) % VOCAB for j in range(1 + 5 * i)] for i in range(1, 13)],
]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, top_p=0.95, seed=5)
CHAIN: dict[str, Any] = {"max_draft_len": 4, "adaptive": False}
DRAFTS = ("target", "near", "far", "deep", "short")
TREE: dict[str, Any] = {"max_draft_len": 9, "top_k": 3, "max_draft_depth": 4, "adaptive": False}


def make_model(path: Path, seed: int, **shape: Any) -> Path:
    """A random Llama of the tests' vocabulary."""
    return save_llama(path, seed, **{"vocab_size": VOCAB, "max_position_embeddings": 256, **shape})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    target = make_model(root / "target", 11)
    # Close to the target: right often, and often wrong.
    near = root / "near"
    shutil.copytree(target, near)
    weights = load_file(near / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    noisy = {
        name: w + 0.03 * torch.randn(w.shape, generator=generator) for name, w in weights.items()
    }
    save_file(noisy, near / "model.safetensors", metadata={"format": "pt"})
    return {
        "target": target,
        "near": near,
        "far": make_model(root / "far", 12, hidden_size=16, num_hidden_layers=1,
                          num_attention_heads=2, num_key_value_heads=1),
        "deep": make_model(root / "deep", 13, hidden_size=64, num_hidden_layers=3,
                           num_attention_heads=4, num_key_value_heads=4),
        "short": make_model(root / "short", 14, max_position_embeddings=32),
    }  # fmt: skip


def open_llm(
    folders: Folders, draft: str | None, batch: int = 3, *, where: Where = HOST, **kwargs: Any
) -> LLM:
    spec = kwargs.pop("spec", CHAIN)
    config = None if draft is None else DraftTargetDecodingConfig(folders[draft], **spec)
    scheduler = {"max_batch_size": batch, "max_seq_len": 200, "overlap_depth": where.depth}
    settings: dict[str, Any] = {
        "scheduler_config": {**scheduler, **kwargs.pop("scheduler", {})},
        "device": where.device,
        **kwargs,
    }
    with placed(where):
        return LLM(folders["target"], speculative_config=config, **settings)


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in outputs]


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    with open_llm(folders, None) as llm:
        return {
            "greedy": tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)),
            "sampled": tokens_of(llm.generate(PROMPTS, SAMPLED, use_tqdm=False)),
        }


def run(llm: LLM, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
    """The tokens; pages are back, and the drafter never raised."""
    tokens = tokens_of(llm.generate(prompts, params, use_tqdm=False))
    metrics = llm.get_metrics()
    assert (metrics["drafter"] or {"failures": 0})["failures"] == 0
    stats = metrics["executor"]
    assert stats["free_pages"] == stats["total_pages"]
    return tokens


def rebuilt(model: Any, tokens: Sequence[int], page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [layers, tokens, heads, head_dim] of a text read from its start."""
    pages = -(-len(tokens) // page_size)
    shape = (model.num_layers, pages, model.num_kv_heads, page_size, model.head_dim)
    k, v = torch.zeros(shape, dtype=model.kv_dtype), torch.zeros(shape, dtype=model.kv_dtype)
    model.bind_cache(k, v)
    model.forward(_core.make_step_plan([list(tokens)], kv_len=[0], page_table=[list(range(pages))]))
    return gathered(k, v, list(range(pages)), len(tokens))


def gathered(
    k: torch.Tensor, v: torch.Tensor, pages: list[int], length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(  # type: ignore[return-value]
        pool[:, pages].transpose(2, 3).flatten(1, 2)[:, :length] for pool in (k, v)
    )

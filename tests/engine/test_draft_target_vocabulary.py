"""Draft models with other vocabularies and reduced heads; their pages, files and commands."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_target_cases import (
    CHAIN,
    GREEDY,
    PROMPTS,
    SAMPLED,
    TREE,
    VOCAB,
    make_model,
    open_llm,
    run,
    tokens_of,
)
from draft_target_cases import folders as folders
from draft_target_cases import plain as plain
from method_cases import HOST, Folders, Where, drafter_of, each_place, on_devices
from safetensors.torch import load_file, save_file

from specdec_ext import (
    LLM,
    ConfigError,
    ModelError,
    SamplingParams,
)
from specdec_ext.models.host_arrays import as_torch

STREAM = Where("stream", 1)
REJECTION = SamplingParams(
    max_tokens=40, ignore_eos=True, temperature=0.7, seed=3, acceptance="rejection"
)


def reduced(folders: Folders, path: Path, ids: list[int], tied: bool) -> Path:
    """The target as its own draft model, its head cut to `ids` in a shuffled order."""
    shutil.copytree(folders["target"], path)
    order = torch.tensor(ids)[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]
    weights = load_file(path / "model.safetensors")
    if tied:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        del weights["lm_head.weight"]
    else:
        weights["lm_head.weight"] = weights["lm_head.weight"][order].clone()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    save_file({"token_ids": order.to(torch.int32)}, path / "draft_vocab.safetensors")
    return path


@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_head_of_all_tokens_in_another_order_is_the_whole_head(
    folders: Folders, plain: dict[str, Any], tmp_path: Path, params: SamplingParams,
    spec: dict[str, Any], where: Where,
) -> None:  # fmt: skip
    path = reduced(folders, tmp_path / "draft", list(range(VOCAB)), tied=False)
    with open_llm({**folders, "draft": path}, "draft", where=where, spec=spec) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        metrics = llm.get_metrics()["speculative_decoding"]
    assert tokens_of(outputs) == plain["greedy" if params is GREEDY else "sampled"]
    if spec is CHAIN:
        assert metrics["num_accepted_draft_tokens"] == metrics["num_draft_tokens"]


@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_reduced_head_drafts_its_tokens_alone(
    folders: Folders, plain: dict[str, Any], tmp_path: Path, tied: bool, where: Where
) -> None:
    ids = [t for t in range(VOCAB) if t % 3]
    path = reduced(folders, tmp_path / "draft", ids, tied)
    with open_llm({**folders, "draft": path}, "draft", where=where) as llm:
        drafted: set[int] = set()
        forward = llm.model.forward

        def watched(plan: Any, *rest: Any) -> Any:
            if plan.num_prefill_rows == 0:
                for first, end in itertools.pairwise(plan.cu_rows.tolist()):
                    drafted.update(plan.tokens[first + 1 : end].tolist())
            return forward(plan, *rest)

        llm.model.forward = watched  # type: ignore[method-assign]
        assert run(llm, PROMPTS, GREEDY) == plain["greedy"]
        assert run(llm, PROMPTS, SAMPLED) == plain["sampled"]
        accepted = llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"]
    if where == HOST:  # a plan on a stream has rows of padding
        assert drafted and drafted <= set(ids)
    if not tied:
        assert accepted > 100
        with pytest.raises(ModelError, match="scores 42 of 64 tokens"):
            LLM(path)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1, 1], dtype=torch.int32), "an id twice"),
        (torch.tensor([1, VOCAB], dtype=torch.int32), "token_ids holds 64, the model's ids are"),
        (torch.tensor([-1, 2], dtype=torch.int32), "token_ids holds -1"),
        (torch.tensor([1.0, 2.0]), "expected int32"),
        (torch.tensor([[1]], dtype=torch.int32), "expected int32"),
        (torch.tensor([1, 2], dtype=torch.int32), "lm_head.weight"),
    ],
)
def test_a_damaged_token_list_is_refused(
    folders: Folders, tmp_path: Path, ids: torch.Tensor, message: str
) -> None:
    path = tmp_path / "draft"
    shutil.copytree(folders["target"], path)
    save_file({"token_ids": ids}, path / "draft_vocab.safetensors")
    with pytest.raises(ModelError, match=message):
        open_llm({**folders, "draft": path}, "draft")


def write_tokenizer(path: Path, words: list[str]) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)).save_pretrained(path)


@on_devices
def test_a_reduced_head_on_a_device_draws_what_it_draws_on_the_host(
    folders: Folders, tmp_path: Path, where: Where
) -> None:
    path = reduced(folders, tmp_path / "draft", list(range(0, VOCAB, 2)), tied=False)
    texts = []
    for place in (HOST, where):
        with open_llm({**folders, "half": path}, "half", where=place) as llm:
            texts.append(run(llm, PROMPTS[:4], REJECTION) + run(llm, PROMPTS[:4], SAMPLED))
    assert texts[0] == texts[1]


@each_place
@pytest.mark.parametrize("size", [VOCAB - 5, VOCAB + 8])
def test_vocabularies_may_differ_in_their_padding(
    folders: Folders, plain: dict[str, Any], tmp_path: Path, size: int, where: Where
) -> None:
    target = tmp_path / "target"
    shutil.copytree(folders["target"], target)
    draft = make_model(tmp_path / "draft", 21, vocab_size=size)
    pair = {"target": target, "draft": draft}
    with pytest.raises(ConfigError, match=f"has {size} tokens, the target's {VOCAB}"):
        open_llm(pair, "draft", where=where)
    words = [f"w{i}" for i in range(VOCAB - 5)]
    write_tokenizer(target, words)
    write_tokenizer(draft, words)
    n = 4 if where.device != "cpu" else len(PROMPTS)
    with open_llm(pair, "draft", where=where) as llm:
        assert run(llm, PROMPTS[:n], GREEDY) == plain["greedy"][:n]
        assert run(llm, PROMPTS[:n], SAMPLED) == plain["sampled"][:n]
        run(llm, PROMPTS[:n], REJECTION)
        assert llm.get_metrics()["speculative_decoding"]["num_draft_tokens"] > 100


def test_other_words_are_refused_with_the_first_that_differs(
    folders: Folders, tmp_path: Path
) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    shutil.copytree(folders["target"], target)
    shutil.copytree(folders["far"], draft)
    words = [f"w{i}" for i in range(VOCAB)]
    write_tokenizer(target, words)
    write_tokenizer(draft, [*words[:17], "other", *words[18:]])
    message = r"target 64 \(64 words\), draft 64 .*id 17: target 'w17', draft 'other'"
    with pytest.raises(ConfigError, match=message):
        open_llm({"target": target, "draft": draft}, "draft")


# -- memory ---------------------------------------------------------------------------------------


@each_place
def test_both_models_pages_are_in_one_plan(folders: Folders, where: Where) -> None:
    cache = {"tokens_per_block": 16}
    with open_llm(folders, "deep", where=where, kv_cache_config=cache) as llm:
        metrics = llm.get_metrics()
        memory, stats = metrics["memory"], metrics["drafter"]
        pages = [as_torch(pool) for pool in drafter_of(llm).pages]
        held = sum(pool.numel() * pool.element_size() for pool in pages)
        assert stats["device"] == llm.device
    assert pages[0].shape[1] == memory["draft_num_pages"] == memory["num_pages"]
    assert memory["draft_bytes_per_token"] == 2 * 3 * 4 * 16 * 4
    assert memory["draft_pool_bytes"] == held <= stats["memory_bytes"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_broken_draft_model_is_refused(folders: Folders, tmp_path: Path, name: str) -> None:
    path = tmp_path / "draft"
    shutil.copytree(folders["far"], path)
    (path / name).unlink()
    with pytest.raises(ModelError, match="draft"):
        open_llm({**folders, "draft": path}, "draft")
    with pytest.raises(ModelError, match="nowhere"):
        open_llm({**folders, "draft": tmp_path / "nowhere"}, "draft")


def test_the_command_line_decodes_and_inspects(
    folders: Folders, plain: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    from specdec_ext.cli import main

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": p}) + "\n" for p in PROMPTS[:3]))
    engine = ["--model", str(folders["target"]), "--draft_model", str(folders["near"]),
              "--max_draft_len", "3", "--max_seq_len", "200"]  # fmt: skip
    argv = ["generate", *engine, "--input_file", str(prompts), "--max_tokens", "40",
            "--ignore_eos", "--json", "--verify"]  # fmt: skip
    assert main(argv) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["token_ids"] for line in lines] == plain["greedy"][:3]
    assert all(line["identical"] for line in lines)
    assert main(["inspect", *engine, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["draft_model"]["path"] == str(folders["near"])
    assert report["memory"]["draft_pool_bytes"] == report["memory"]["pool_bytes"] > 0
    assert report["speculation"]["max_draft_len"] == 3
    assert main(["inspect", *engine]) == 0
    assert "draft_pool_bytes" in capsys.readouterr().out

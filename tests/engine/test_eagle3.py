"""EAGLE-3: the target's text whatever the head says, and drafts that are the reference's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_target_cases import GREEDY, PROMPTS, SAMPLED, VOCAB, make_model, run, tokens_of
from eagle3_cases import as_speculators, save_trained, states_of
from method_cases import HOST, placed
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from reference.eagle3_reference import Head, draft_tree
from specdec_ext import LLM, Eagle3DecodingConfig
from specdec_ext.drafters.eagle3.shape import default_taps

Folders = dict[str, Path]
IDS = [token for token in range(VOCAB) if token % 5]  # of the reduced head
CHAIN: dict[str, Any] = {"max_draft_len": 4, "top_k": 1, "adaptive": False}
TREE: dict[str, Any] = {"max_draft_len": 9, "top_k": 3, "max_draft_depth": 4, "adaptive": False}
SPECS: list[dict[str, Any]] = [
    CHAIN, TREE, {}, {"top_k": 1},
    {"max_draft_len": 30, "top_k": 4, "max_draft_depth": 4, "adaptive": False},
    {"max_draft_len": 12, "top_k": 12, "max_draft_depth": 1, "adaptive": False},
    {"max_draft_len": 1, "adaptive": False},
]  # fmt: skip
HEADS = ["whole", "reduced", "residual", "speculators"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("eagle3")
    target = make_model(root / "target", 11, num_hidden_layers=4)
    with LLM(target, speculative_config=None, scheduler_config={"max_seq_len": 200}) as llm:
        outputs = tokens_of(llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False))
    texts = [p + t for p, t in zip(PROMPTS, outputs, strict=False)]
    heads = {
        "whole": save_trained(root / "whole", target, texts),
        "reduced": save_trained(root / "reduced", target, texts, ids=IDS, taps=(1, 3, 4)),
        "residual": save_trained(
            root / "residual", target, texts, steps=60, norm_before_residual=True,
            attention_bias=True,
        ),
    }  # fmt: skip
    heads["speculators"] = as_speculators(root / "speculators", heads["reduced"], 4)
    return {"target": target, **heads}


def open_llm(folders: Folders, head: str | None, batch: int = 3, **kwargs: Any) -> LLM:
    spec = kwargs.pop("spec", CHAIN)
    config = None if head is None else Eagle3DecodingConfig(folders[head], **spec)
    scheduler = {"max_batch_size": batch, "max_seq_len": 200, **kwargs.pop("scheduler", {})}
    with placed(HOST):
        return LLM(
            folders["target"], speculative_config=config, scheduler_config=scheduler, **kwargs
        )


@pytest.fixture(scope="module")
def plain(folders: Folders) -> dict[str, list[list[int]]]:
    with open_llm(folders, None) as llm:
        return {
            "greedy": run(llm, PROMPTS, GREEDY),
            "sampled": run(llm, PROMPTS, SAMPLED),
        }


def reference_of(folder: Path, target: Any) -> tuple[Head, tuple[int, ...]]:
    """The head, and its taps."""
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("transformer_layer_config", {})}
    tensors = load_file(folder / "model.safetensors")
    named = {n.replace("layers.0.", "midlayer."): t.numpy() for n, t in tensors.items()}
    embedding = target.model.embed_tokens.weight.detach().numpy()
    taps = config.get("eagle_aux_hidden_state_layer_ids")
    if taps is None:
        own = config["eagle_config"].get("eagle_aux_hidden_state_layer_ids")
        taps = default_taps(4) if own is None else [tap + 1 for tap in own]
    return Head(config, named, embedding), tuple(taps)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_output_is_that_of_plain_decoding(
    folders: Folders, plain: dict[str, Any], head: str, spec: dict[str, Any], depth: int
) -> None:
    """Every head and shape, batches of 1, 3 and 16, steps that are read late."""
    batch = (1, 3, 16)[(HEADS.index(head) + SPECS.index(spec) + depth) % 3]
    n = 4 if batch == 1 else len(PROMPTS)
    scheduler = {"overlap_depth": depth}
    with open_llm(folders, head, batch, spec=spec, scheduler=scheduler) as llm:
        assert run(llm, PROMPTS[:n], GREEDY) == plain["greedy"][:n]
        assert run(llm, PROMPTS[:n], SAMPLED) == plain["sampled"][:n]
        metrics = llm.get_metrics()
    assert metrics["memory"]["draft_num_pages"] == metrics["memory"]["num_pages"]
    if spec.get("adaptive") is False:
        assert metrics["speculative_decoding"]["num_draft_tokens"] > 70
        assert metrics["drafter"]["features"] > 40 * n


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_every_draft_is_the_references(folders: Folders, head: str, spec: dict[str, Any]) -> None:
    """Tokens, parents and order of all steps of a text, from the target's states in float64."""
    target = LlamaForCausalLM.from_pretrained(folders["target"], dtype=torch.float64)
    reference, taps = reference_of(folders[head], target)
    params = dataclasses.replace(GREEDY, max_tokens=14, return_steps=True)
    depth = spec.get("max_draft_depth", 4)
    with open_llm(folders, head, spec=spec) as llm:
        outputs = llm.generate(PROMPTS[:4], params, use_tqdm=False)
    drafted = 0
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        text = list(prompt)
        [completion] = output.outputs
        for record in completion.steps:
            if record.drafts:
                states = states_of(target, text[:-1], taps).numpy()
                room = depth if len(text) + depth <= len(prompt) + 14 else 0
                if room:
                    wanted = draft_tree(
                        reference, text, states,
                        top_k=spec["top_k"], depth=depth, nodes=spec["max_draft_len"],
                    )  # fmt: skip
                    assert paths_of(record.drafts) == [path for path, _ in wanted]
                    drafted += len(wanted)
            text += record.token_ids
    assert drafted > 60


def paths_of(drafts: Any) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for draft in drafts:
        above = paths[draft.parent] if draft.parent >= 0 else ()
        paths.append((*above, draft.token_id))
    return paths


def test_a_trained_head_is_right_often(folders: Folders) -> None:
    """Else what the others say of acceptance would say nothing; and a tree is right more often."""
    passes = {}
    for name, spec in (("chain", CHAIN), ("tree", {**TREE, "max_draft_len": 16})):
        with open_llm(folders, "whole", spec=spec) as llm:
            outputs = llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
        passes[name] = sum(out.metrics["num_forward_passes"] for out in outputs)
    assert passes["tree"] <= passes["chain"] < 0.6 * 40 * 6

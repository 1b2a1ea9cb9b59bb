"""Draft-target with acceptance by probabilities: the output has the target's law.

It is counted where the host runs the steps. Elsewhere the texts are the host's, token by token.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_target_cases import CHAIN, PROMPTS, TREE, make_model, open_llm, run
from draft_target_cases import folders as folders
from method_cases import HOST, Folders, Where, ahead
from table_target import chi_square
from test_draft_target_vocabulary import REJECTION, reduced

from reference.sampling_reference import Law, probabilities
from specdec_ext import LLM, SamplingParams

STREAM = Where("stream", 1)
VOCAB = 5  # of the models whose joint law is counted
LENGTH = 4
CALL = 5000  # draws of one generate()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A target and a draft model of five tokens."""
    root = tmp_path_factory.mktemp("small")
    return {
        "target": make_model(root / "target", 31, vocab_size=VOCAB),
        "draft": make_model(root / "draft", 32, vocab_size=VOCAB, num_hidden_layers=1),
    }


def joint_law(folder: Path, prompt: list[int], length: int, law: Law) -> np.ndarray:
    """The law of the first `length` tokens, [5] * length, from whole passes of transformers."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    result = np.ones((VOCAB,) * length)
    paths = list(itertools.product(range(VOCAB), repeat=length - 1))
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + list(path) for path in paths])).logits.numpy()
    for path, rows in zip(paths, logits, strict=True):
        mass = 1.0
        for i, token in enumerate(path):
            mass *= probabilities(rows[len(prompt) - 1 + i], law)[token]
        result[path] = mass * probabilities(rows[-1], law)
    return result


def check_output_law(
    llm: LLM, target: Path, options: dict[str, Any], draws: int, *, drafts_differ: bool
) -> None:
    """Joint chi-square over four tokens, three of which may come from drafts.

    drafts_differ  of every request's drafts some are accepted and some are not
    """
    law, prompt = Law(0.8, top_k=4), [1, 4, 2]
    wanted = joint_law(target, prompt, LENGTH, law)
    counts = np.zeros_like(wanted)
    for begin in range(0, draws, CALL):
        each = [
            SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=begin + i, detokenize=False,
                           **law.options(), **options)
            for i in range(CALL)
        ]  # fmt: skip
        for output in llm.generate([prompt] * CALL, each, use_tqdm=False):
            counts[tuple(output.outputs[0].token_ids)] += 1
    metrics = llm.get_metrics()
    assert counts.sum() == draws and metrics["drafter"]["failures"] == 0
    statistic, bound = chi_square(counts, wanted)
    assert statistic < bound
    if drafts_differ:
        drafted = metrics["speculative_decoding"]["num_draft_tokens"]
        accepted = metrics["speculative_decoding"]["num_accepted_draft_tokens"]
        assert drafted > draws
        assert 0.05 * drafted < accepted < 0.95 * drafted


def check_law(small: Folders, spec: dict[str, Any], options: dict[str, Any], draws: int) -> None:
    differ = {**spec, "allow_vocab_mapping": True} == {**CHAIN, "allow_vocab_mapping": True}
    with open_llm(small, "draft", 32, spec=spec, scheduler={"max_seq_len": 16}) as llm:
        check_output_law(llm, small["target"], options, draws, drafts_differ=differ)


LAW_CASES = pytest.mark.parametrize(
    ("spec", "options"),
    [
        (CHAIN, {"acceptance": "rejection"}),
        ({"max_draft_len": 4}, {"acceptance": "rejection"}),
        ({**CHAIN, "min_confidence": 0.5}, {"acceptance": "rejection"}),
        (CHAIN, {"acceptance": "rejection", "use_draft_logits": False}),
        (TREE, {"acceptance": "rejection"}),
        (CHAIN, {}),
    ],
    ids=["q", "adaptive", "min-confidence", "one-hot", "tree", "exact-match"],
)


@LAW_CASES
def test_the_output_has_the_targets_law(
    small: Folders, spec: dict[str, Any], options: dict[str, Any]
) -> None:
    """5,000 draws each: through LLM.generate a request costs 0.3 ms of Python, so that 20,000 were
    35 s of processor time for this file. The executor's own law tests draw 20,000 of every rule
    (test_acceptance_law.py); the slow suite draws 200,000 here."""
    check_law(small, spec, options, 5000)


@pytest.mark.slow
@LAW_CASES
def test_the_output_has_the_targets_law_in_full(
    small: Folders, spec: dict[str, Any], options: dict[str, Any]
) -> None:
    check_law(small, spec, options, draws=200_000)


def test_the_output_of_a_reduced_head_has_the_targets_law(small: Folders, tmp_path: Path) -> None:
    folders = {**small, "draft": reduced(small, tmp_path / "draft", [4, 0, 3], tied=False)}
    check_law(folders, {**CHAIN}, {"acceptance": "rejection"}, 5000)


@pytest.mark.parametrize("where", [HOST, STREAM], ids=str)
def test_a_drawn_draft_of_the_targets_own_law_is_always_accepted(
    folders: Folders, where: Where
) -> None:
    with open_llm(folders, "target", where=where) as llm:
        run(llm, PROMPTS, REJECTION)
        counts = llm.get_metrics()["speculative_decoding"]
    assert counts["num_accepted_draft_tokens"] == counts["num_draft_tokens"] > 400


@ahead
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 6}, {"top_p": 0.7, "min_p": 0.05}], ids=str)
def test_drawn_drafts_are_those_of_the_host(
    folders: Folders, cuts: dict[str, Any], batch: int, where: Where
) -> None:
    """The same numbers draw them from the same law, cuts included, so the same are accepted: the
    text is the host's, in whatever company."""
    params, prompts = replace(REJECTION, **cuts), PROMPTS[: 8 if where.device == "cpu" else 3]
    seen = []
    for place, size in ((HOST, 3), (where, batch)):
        with open_llm(folders, "near", size, where=place) as llm:
            texts = run(llm, prompts, params)
            counts = llm.get_metrics()["speculative_decoding"]
        keys = ("num_draft_tokens", "num_accepted_draft_tokens")
        seen.append((texts, [counts[key] for key in keys]))
    assert seen[0] == seen[1] and seen[0][1][1] > 40

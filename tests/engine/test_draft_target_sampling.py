"""Draft-target with acceptance by probabilities: the output has the target's law."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_target_cases import CHAIN, TREE, make_model, open_llm
from draft_target_cases import folders as folders
from table_target import chi_square

from reference.sampling_reference import Law, probabilities
from specdec_ext import SamplingParams

__all__ = ["folders"]  # a fixture

VOCAB = 5  # of the models whose joint law is counted
LENGTH = 4
CALL = 5000  # draws of one generate()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
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


def check_law(
    small: dict[str, Path],
    spec: dict[str, Any],
    options: dict[str, Any],
    draws: int,
    run_ahead: int | None = None,
) -> None:
    """Joint chi-square over four tokens, three of which may come from drafts."""
    scheduler = {"max_seq_len": 16, "run_ahead": run_ahead}
    law = Law(0.8, top_k=4)
    prompt = [1, 4, 2]
    wanted = joint_law(small["target"], prompt, LENGTH, law)
    counts = np.zeros_like(wanted)
    with open_llm(small, "draft", 32, spec=spec, scheduler=scheduler) as llm:
        for begin in range(0, draws, CALL):
            params = [
                SamplingParams(
                    max_tokens=LENGTH, ignore_eos=True, seed=begin + i, **law.options(), **options
                )
                for i in range(CALL)
            ]
            for output in llm.generate([prompt] * CALL, params, use_tqdm=False):
                counts[tuple(output.outputs[0].token_ids)] += 1
        metrics = llm.get_metrics()
    assert counts.sum() == draws
    statistic, bound = chi_square(counts, wanted)
    assert statistic < bound
    assert metrics["drafter"]["failures"] == 0
    if spec is CHAIN:
        drafted = metrics["speculative_decoding"]["num_draft_tokens"]
        accepted = metrics["speculative_decoding"]["num_accepted_draft_tokens"]
        assert drafted > draws
        assert 0.05 * drafted < accepted < 0.95 * drafted


LAW_CASES = pytest.mark.parametrize(
    ("spec", "options"),
    [
        (CHAIN, {"acceptance": "rejection"}),
        ({"max_draft_len": 4}, {"acceptance": "rejection"}),
        ({**CHAIN, "min_confidence": 0.6}, {"acceptance": "rejection"}),
        (CHAIN, {"acceptance": "rejection", "use_draft_logits": False}),
        (TREE, {"acceptance": "rejection"}),
        (CHAIN, {}),
    ],
    ids=["q", "adaptive", "min-confidence", "one-hot", "tree", "exact-match"],
)


@LAW_CASES
def test_the_output_has_the_targets_law(
    small: dict[str, Path], spec: dict[str, Any], options: dict[str, Any]
) -> None:
    """5,000 draws each: through LLM.generate a request costs 0.3 ms of Python, so that 20,000 were
    35 s of processor time for this file. The executor's own law tests draw 20,000 of every rule
    (test_acceptance_law.py); the slow suite draws 200,000 here."""
    check_law(small, spec, options, draws=5000)


@pytest.mark.slow
@LAW_CASES
def test_the_output_has_the_targets_law_in_full(
    small: dict[str, Path], spec: dict[str, Any], options: dict[str, Any]
) -> None:
    check_law(small, spec, options, draws=200_000)


def test_a_rejection_draft_equal_to_the_target_is_always_accepted(
    folders: dict[str, Path],
) -> None:
    params = SamplingParams(
        max_tokens=40, ignore_eos=True, temperature=1.0, seed=3, acceptance="rejection"
    )
    with open_llm(folders, "target") as llm:
        llm.generate([[1, 2], [3], [4, 5, 6]], params, use_tqdm=False)
        metrics = llm.get_metrics()["speculative_decoding"]
    assert metrics["num_accepted_draft_tokens"] == metrics["num_draft_tokens"] > 80

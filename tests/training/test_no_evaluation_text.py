"""No text of the evaluation sets is trained on: 13-word overlap, with the sets themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import datasets, heldout

import specdec_ext
from specdec_ext.training.collect import CollectConfig
from specdec_ext.training.options import DEFAULT_PROMPTS, PRODUCTS
from specdec_ext.training.overlap import shared_runs
from specdec_ext.training.prompts import make_prompts

DATA = Path(specdec_ext.__file__).parent / "data"


def sets_or_skip() -> None:
    if not datasets.is_installed():
        pytest.skip("the evaluation texts are not installed: python -m benchmarks.datasets")


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_shipped_card_says_what_was_excluded(product: str) -> None:
    """Every set was held against the data that the shipped file was trained on."""
    folder = DATA / product
    if not folder.is_dir():
        pytest.skip(f"no {product} is shipped")
    card = json.loads((folder / "training_card.json").read_text())
    excluded = {entry["name"] for entry in card["data"]["excluded"]}
    assert {f"{name}.jsonl" for name in heldout.SETS} <= excluded
    assert all(entry["strings"] > 0 for entry in card["data"]["excluded"])


@pytest.mark.slow
@pytest.mark.parametrize("name", heldout.SETS)
def test_no_prompt_shares_thirteen_words_with_a_set(name: str) -> None:
    sets_or_skip()
    prompts = [p.text for p in make_prompts(DEFAULT_PROMPTS, CollectConfig().seed) if p.text]
    assert shared_runs(prompts, heldout.texts(name)) == {}


@pytest.mark.slow
def test_the_sets_are_read_whole_and_a_copy_would_be_found() -> None:
    sets_or_skip()
    least = {"humaneval": 164, "mtbench": 160, "gsm8k": 100, "squad": 11873, "news": 300,
             "hotpotqa": 7405, "hellaswag": 100, "truthfulqa": 100, "aclsum": 500}  # fmt: skip
    assert set(least) == set(heldout.SETS)
    for name, count in least.items():
        texts = list(heldout.texts(name))
        assert len(texts) >= count, name
        copied = max(texts, key=len)
        assert shared_runs(["nothing", f"Please answer: {copied}"], texts[:]).keys() == {1}

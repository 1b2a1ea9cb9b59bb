"""LLM(device=...): Medusa's heads and ReDrafter's network on the target's device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from device_llm_cases import (
    GREEDY,
    PROMPTS,
    VOCAB,
    open_llm,
    plain_texts,
    save_models,
    tokens_of,
)
from medusa_models import save_heads

from emulators import devices
from specdec_ext import MedusaDecodingConfig, ModelError, ReDrafterDecodingConfig
from specdec_ext.drafters.redrafter.model import Redrafter, RedrafterShape, save_redrafter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    return plain_texts(folders)


def drafter_of(root: Path, method: str, kind: str) -> Any:
    """Medusa's heads or a ReDrafter whose LM head is its own, the target's, or part of one."""
    reduced, target_head = kind.startswith("reduced"), kind.endswith("target's")
    ids = sorted({*range(0, VOCAB, 2), 5, 7}) if reduced else None
    folder = root / f"{method} {kind}"
    if method == "medusa":
        save_heads(folder, layers=2, lm_head="target" if target_head else "own", ids=ids)
        return MedusaDecodingConfig(str(folder), [[0], [1], [0, 0], [1, 0]], adaptive=False)
    torch.manual_seed(6)
    shape = RedrafterShape(
        VOCAB, 32, 32, 1, True, tie_lm_head=target_head, draft_vocab_size=ids and len(ids)
    )
    drafter = Redrafter(shape, None if ids is None else torch.tensor(ids))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_redrafter(drafter, folder, dtype=torch.float32)
    return ReDrafterDecodingConfig(str(folder), 3, 3, adaptive=False)


@devices
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("kind", ["own", "the target's", "reduced", "reduced, the target's"])
@pytest.mark.parametrize("method", ["medusa", "redrafter"])
def test_networks_of_drafters_run_where_the_target_does(
    folders: dict[str, Path], plain: dict[str, Any], tmp_path: Path, device: str, method: str,
    kind: str, impl: str,
) -> None:  # fmt: skip
    """The same drafts as on the CPU."""
    spec = drafter_of(tmp_path, method, kind)
    counts = []
    for where in ("cpu", device):
        with open_llm(folders, where, spec, model_impl=impl) as llm:
            found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
            assert found == plain["greedy"]
            metrics = llm.get_metrics()
            assert metrics["drafter"]["device"] == llm.device
            assert metrics["drafter"]["failures"] == 0
            assert metrics["drafter"]["memory_bytes"] > 0
            steps = metrics["speculative_decoding"]
            counts.append((steps["num_draft_tokens"], steps["num_accepted_draft_tokens"]))
    assert counts[0] == counts[1] and counts[0][0] > 0


@devices
@pytest.mark.parametrize("method", ["medusa", "redrafter"])
def test_a_drafter_that_chooses_how_much_to_draft(
    folders: dict[str, Path], plain: dict[str, Any], tmp_path: Path, device: str, method: str
) -> None:
    spec = dataclasses.replace(drafter_of(tmp_path, method, "own"), adaptive=True)
    with open_llm(folders, device, spec) as llm:
        found = tokens_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        assert found == plain["greedy"]
        assert llm.get_metrics()["drafter"]["failures"] == 0


@devices
def test_weights_of_a_drafter_are_refused_for_another_target(
    folders: dict[str, Path], tmp_path: Path, device: str
) -> None:
    save_heads(tmp_path / "heads", hidden=16)
    with pytest.raises(ModelError, match="hidden_size"):
        open_llm(folders, device, MedusaDecodingConfig(str(tmp_path / "heads"), [[0]]))
    shape = RedrafterShape(VOCAB, 16, 16, 1, True)
    save_redrafter(Redrafter(shape), tmp_path / "redrafter", dtype=torch.float32)
    with pytest.raises(ModelError, match="trained for hidden_size = 16, the target has 32"):
        open_llm(folders, device, ReDrafterDecodingConfig(str(tmp_path / "redrafter")))

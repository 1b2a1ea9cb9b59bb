"""Draft models cut out of a target: for every native family the folder that is loaded gives the
scores that training saw, and the engine takes what the trainer wrote."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_zoo import NATIVE
from plan_builder import Driver, Sequence, prompt_ids

from specdec_ext import LLM, DraftTargetDecodingConfig, SamplingParams
from specdec_ext.errors import ModelError
from specdec_ext.models import load_model
from specdec_ext.models.config_reader import read_config
from specdec_ext.models.drafter_files import read_drafter, write_drafter_model
from specdec_ext.models.native_config import native_shape
from specdec_ext.training.cache import TextRecord
from specdec_ext.training.data import make_batch
from specdec_ext.training.drafter import DrafterProduct, drafter_shape
from specdec_ext.training.loss import FrozenHead
from specdec_ext.training.target import read_target

CPU = torch.device("cpu")
SIZE = 64


def product_of(folder: Any) -> DrafterProduct:
    config = read_config(folder)
    ids = torch.arange(5, 5 + 2 * SIZE, 2, dtype=torch.int32)
    rows = read_target(config, ids, embeds=True)
    assert rows.embedding is not None
    shape = drafter_shape(config, num_layers=2, intermediate_size=48, draft_vocab_size=SIZE)
    return DrafterProduct(
        SimpleNamespace(token_ids=ids),  # type: ignore[arg-type]
        FrozenHead(rows.head, torch.arange(SIZE), CPU, softcap=rows.softcap),
        rows.embedding, config, shape, dtype="float32",
    )  # fmt: skip


def batch_of(hidden_size: int) -> Any:
    """One text of 30 tokens with a prompt of 6."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.tensor(prompt_ids(30, 7), dtype=torch.int32)
    hidden = torch.randn(24, hidden_size, generator=generator).half()
    labels = [torch.randint(0, SIZE, (24,), generator=generator)]
    record = TextRecord("00" * 32, "chat", tokens, 6, hidden)
    return make_batch([record], labels, CPU, 1, 0, labels[0])


@pytest.mark.parametrize("family", sorted(NATIVE))
def test_the_loaded_folder_gives_the_scores_that_training_saw(
    saved: Any, family: str, tmp_path: Any
) -> None:
    reference = saved(family)
    product = product_of(reference.folder)
    mine, theirs = product.shape.native(), native_shape(read_config(reference.folder))
    for i, layer in enumerate(product.shape.cut_from_layers):  # each as it is in the target
        assert mine.sliding_window[i] == theirs.sliding_window[layer]
        assert (mine.rope_index[i] < 0) == (theirs.rope_index[layer] < 0)
        if mine.rope_index[i] >= 0:
            kind = theirs.rope_layer_types[theirs.rope_index[layer]]
            assert mine.rope_layer_types[mine.rope_index[i]] == kind
    batch = batch_of(product.shape.hidden_size)
    optimizer = torch.optim.SGD([p for p in product.module.parameters() if p.requires_grad], lr=0.5)
    loss = product.loss(batch, product.counts(batch))
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {n: p.grad for n, p in product.module.named_parameters() if p.requires_grad}
    assert all(g is not None and bool(g.any()) for g in grads.values()), family
    optimizer.step()
    product.save(tmp_path / "drafter", {})
    shape, weights, ids, _ = read_drafter(tmp_path / "drafter")
    assert shape == product.shape and set(weights) == set(shape.expected_weights())
    folder = tmp_path / "hf"
    folder.mkdir()
    write_drafter_model(tmp_path / "drafter", reference.folder, folder)
    model = load_model(folder, draft=True)
    assert model.impl == "native" and model.num_scores == SIZE  # type: ignore[attr-defined]
    tokens = batch.texts[0].tokens[:-1].tolist()
    ours = Driver(model).scores([(Sequence(), tokens)])[0][5:]
    with torch.no_grad():
        scores = product._head.scores(product._features(batch))
    assert ours.shape == scores.shape and torch.equal(ids, product._token_ids)
    assert float((ours - scores).abs().max()) < 2e-4 * float(scores.abs().max())


def test_the_engine_takes_what_the_trainer_wrote(
    saved: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "root"))
    target = saved("qwen3").folder
    product_of(target).save(tmp_path / "drafter", {})
    config = DraftTargetDecodingConfig(tmp_path / "drafter", adaptive=False)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    texts = []
    for method in (None, config, config):  # the second time from the cache
        with LLM(target, speculative_config=method) as llm:
            [output] = llm.generate({"prompt_token_ids": prompt_ids(9, 1)}, params, use_tqdm=False)
            texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1] == texts[2]
    assert len(list((tmp_path / "root" / "drafters").glob("*/config.json"))) == 1


def test_a_target_of_no_native_family_is_refused(saved: Any) -> None:
    with pytest.raises(ModelError, match=r"'olmo2' is not one of the native.*Medusa heads"):
        drafter_shape(
            read_config(saved("olmo2").folder), num_layers=1, intermediate_size=8,
            draft_vocab_size=16,
        )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(ModelError, match=r"its partial_rotary_factor is that of no other.*Medusa"):
        drafter_shape(
            read_config(saved("phi3", rope_parameters=rope).folder), num_layers=1,
            intermediate_size=8, draft_vocab_size=16,
        )  # fmt: skip

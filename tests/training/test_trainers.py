"""The three products on a tiny target: the loss falls, a resumed run is the same, files load."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from workshop import MAX_NEW, MAX_PROMPT, NUM_PROMPTS, SHARD

from specdec_ext.drafters.medusa.heads import load_heads
from specdec_ext.drafters.redrafter.model import load_redrafter
from specdec_ext.errors import ConfigError, ModelError
from specdec_ext.models.config_reader import read_config
from specdec_ext.models.drafter_files import write_drafter_model
from specdec_ext.training.collect import CollectConfig
from specdec_ext.training.data import TrainingData
from specdec_ext.training.estimate import Machine
from specdec_ext.training.interrupts import Interrupts, Stopped
from specdec_ext.training.loop import Training, TrainSettings
from specdec_ext.training.options import PRODUCTS, TrainOptions
from specdec_ext.training.products import make_product
from specdec_ext.training.run import train

CPU = torch.device("cpu")
SETTINGS = TrainSettings(steps=40, batch_texts=8, learning_rate=0.01, warmup=5, eval_every=20)
SMALL: dict[str, Any] = {
    "draft_vocab_size": 200,
    "num_heads": 3,
    "num_layers": 2,
    "draft_len": 3,
    "intermediate_size": 32,
}


def new_product(name: str, target: Path, data: TrainingData) -> Any:
    options = TrainOptions(product=name, output=Path("unused"), settings=SETTINGS, **SMALL)
    return make_product(options, data, read_config(target), "sha", "tiny", CPU)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_loss_falls_and_accuracy_rises(name: str, target: Path, data: TrainingData) -> None:
    seen = copy.copy(data)  # a random model's texts have nothing in common: measure on seen ones
    seen.held_out = data.train[:24]
    training = Training(new_product(name, target, data), seen, SETTINGS)
    before = training.evaluate()["rank_accuracy"][0]
    result = training.run()
    first, last = sum(result.losses[:5]) / 5, sum(result.losses[-5:]) / 5
    assert last < 0.9 * first
    after = result.evaluations[-1][1]
    assert sum(after["rank_accuracy"][0]) > 1.1 * sum(before)
    assert after["accuracy"][0] == after["rank_accuracy"][0][0]
    assert [step for step, _ in result.evaluations] == [0, 20, 40]
    for ranks in after["rank_accuracy"]:
        assert len(ranks) == 10 and sum(ranks) <= 1.0005


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_resumed_run_is_the_same_run(
    name: str, target: Path, data: TrainingData, tmp_path: Path
) -> None:
    whole = Training(new_product(name, target, data), data, SETTINGS)
    whole.run()
    first = Training(new_product(name, target, data), data, SETTINGS, folder=tmp_path)
    first.run(stop_after=17)
    second = Training(new_product(name, target, data), data, SETTINGS, folder=tmp_path)
    assert second.step == 17
    second.run()
    assert second.result.losses == whole.result.losses
    assert second.result.evaluations == whole.result.evaluations
    left, right = whole.product.module.state_dict(), second.product.module.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_a_checkpoint_of_another_run_is_refused(
    target: Path, data: TrainingData, tmp_path: Path
) -> None:
    Training(new_product("medusa", target, data), data, SETTINGS, folder=tmp_path).run(stop_after=1)
    other = dataclasses.replace(SETTINGS, learning_rate=0.5)
    with pytest.raises(ModelError, match="a checkpoint of another run"):
        Training(new_product("medusa", target, data), data, other, folder=tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="not a training checkpoint"):
        Training(new_product("medusa", target, data), data, SETTINGS, folder=tmp_path)


def test_a_loss_that_is_not_finite_stops_the_run(target: Path, data: TrainingData) -> None:
    product = new_product("medusa", target, data)
    with torch.no_grad():
        next(product.module.parameters())[0] = float("nan")
    with pytest.raises(ModelError, match=r"the loss is nan at step 0; lower the learning rate"):
        Training(product, data, SETTINGS).run()


@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_accumulation_gives_the_step_of_the_whole_batch(
    name: str, precision: str, target: Path, data: TrainingData, monkeypatch: Any
) -> None:
    """Loss and gradient are those of the step, however its texts are parted: float32 sums in
    another order, and nothing else. Every step scores a part of the vocabulary."""
    monkeypatch.setattr("specdec_ext.training.loss.FREQUENT", 20)
    monkeypatch.setattr("specdec_ext.training.loss.DRAWN", 10)
    losses, weights = [], []
    for parts in (1, 3, 7):
        settings = dataclasses.replace(
            SETTINGS, steps=3, batch_texts=7, accumulation=parts, precision=precision
        )
        options = TrainOptions(product=name, output=Path("x"), settings=settings, **SMALL)
        product = make_product(options, data, read_config(target), "sha", "tiny", CPU)
        losses.append(Training(product, data, settings).run().losses)
        weights.append(nn.utils.parameters_to_vector(product.module.parameters()).detach())
    for other, moved in zip(losses[1:], weights[1:], strict=True):
        # In bf16 a part's sums round elsewhere, and later steps start from other weights.
        assert other == pytest.approx(losses[0], rel=2e-4 if precision == "float32" else 5e-3)
        # Adam's step does not depend on a gradient's size: a near 0 may change its sign.
        assert float((moved - weights[0]).abs().mean()) < 0.05 * 3 * SETTINGS.learning_rate
    assert losses[0][0] != losses[0][1]


def test_an_interrupt_saves_and_the_same_command_goes_on(
    target: Path, data: TrainingData, tmp_path: Path
) -> None:
    """Asked after step 5: that step is saved, and the run ends with the bytes of an uninterrupted
    one; a second signal does not wait."""
    whole = Training(new_product("medusa", target, data), data, SETTINGS)
    whole.run()
    training = Training(new_product("medusa", target, data), data, SETTINGS, folder=tmp_path)
    with Interrupts() as interrupts:

        def on_step(at: Training) -> None:
            if at.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(Stopped, match="stopped at step 6 of 40"):
            training.run(on_step, interrupts=interrupts)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
    second = Training(new_product("medusa", target, data), data, SETTINGS, folder=tmp_path)
    assert second.step == 6
    second.run()
    left, right = whole.product.module.state_dict(), second.product.module.state_dict()
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert second.result.losses == whole.result.losses


def test_a_checkpoint_is_written_every_minute(
    target: Path, data: TrainingData, tmp_path: Path, monkeypatch: Any
) -> None:
    training = Training(new_product("medusa", target, data), data, SETTINGS, folder=tmp_path)
    times, saved = itertools.count(0, 25.0), []
    monkeypatch.setattr(training, "save_checkpoint", lambda: saved.append(training.step))
    training.run(stop_after=12, clock=lambda: next(times))
    assert saved == [3, 6, 9, 12, 12]  # 25 s a look; the last one is that of the end


def test_a_full_disk_costs_no_checkpoint(
    target: Path, data: TrainingData, tmp_path: Path, monkeypatch: Any
) -> None:
    training = Training(new_product("medusa", target, data), data, SETTINGS, folder=tmp_path)
    training.run(stop_after=1)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc] write failed")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ModelError, match=r"the checkpoint cannot be written .*--work-dir"):
        training.run(stop_after=2)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


# -- files ----------------------------------------------------------------------------------------


class Silent:
    def on_estimate(self, estimate: Any, machine: Any) -> None:
        pass

    def on_collect(self, collector: Any) -> None:
        pass

    def on_train(self, training: Any) -> None:
        pass

    def on_measure(self) -> None:
        pass


def run(name: str, target: Path, cache_dir: Path, tmp_path: Path, **changes: Any) -> TrainOptions:
    options = TrainOptions(
        product=name,
        output=tmp_path / name,
        model=target,
        cache_dir=cache_dir,
        work_dir=tmp_path / "work",
        collect=CollectConfig(
            num_prompts=NUM_PROMPTS, max_new_tokens=MAX_NEW, max_prompt_len=MAX_PROMPT,
            shard_size=SHARD,
        ),
        settings=dataclasses.replace(SETTINGS, steps=6, eval_every=6),
        measure_prompts=0,
        **{**SMALL, **changes},
    )  # fmt: skip
    card = train(options, Silent())
    assert json.loads((options.output / "training_card.json").read_text())["product"] == name
    assert card["data"]["train_texts"] + card["data"]["held_out_texts"] == NUM_PROMPTS
    assert card["measured"] is None
    text = (options.output / "TRAINING_CARD.md").read_text()
    assert "Apache-2.0" in text and card["target"]["sha256"] in text
    return options


def trained_module(name: str, target: Path, data: TrainingData, tmp_path: Path) -> Any:
    """The float32 module as the last checkpoint of run() has it."""
    module = new_product(name, target, data).module
    state = torch.load(tmp_path / "work" / "checkpoint.pt", weights_only=True)
    module.load_state_dict(state["module"])
    return module.requires_grad_(False)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_medusa_files_load_and_say_the_same(
    target: Path, cache_dir: Path, tmp_path: Path, data: TrainingData, dtype: str
) -> None:
    options = run("medusa", target, cache_dir, tmp_path, dtype=dtype)
    heads = load_heads(options.output)
    assert heads.config.num_medusa_heads == 3 and heads.config.lm_head == "target"
    assert torch.equal(heads.token_ids, data.token_ids)
    assert heads.config.training["steps"] == 6
    trained = trained_module("medusa", target, data, tmp_path)
    hidden = data.held_out[0].hidden.float()
    error = (heads.features(hidden) - trained.features(hidden)).abs().max()
    assert 0 < float(error) < (0.02 if dtype == "float16" else 0.2)


def test_redrafter_files_load_and_say_the_same(
    target: Path, cache_dir: Path, tmp_path: Path, data: TrainingData
) -> None:
    options = run("redrafter", target, cache_dir, tmp_path)
    model = load_redrafter(options.output)
    assert model.shape.tie_lm_head and torch.equal(model.token_ids, data.token_ids)
    trained = trained_module("redrafter", target, data, tmp_path)
    hidden = data.held_out[0].hidden.float()
    state = torch.zeros_like(hidden)
    error = (model.features(hidden, state) - trained.features(hidden, state)).abs().max()
    assert 0 < float(error) < 0.02


def test_a_drafter_for_another_target_is_refused(
    target: Path, cache_dir: Path, tmp_path: Path
) -> None:
    options = run("drafter", target, cache_dir, tmp_path)
    config = json.loads((options.output / "config.json").read_text())
    decoder = config["decoder"]
    for change, message in (
        ({"decoder": {**decoder, "hidden_size": 64}}, r"expected \["),
        ({"decoder": {**decoder, "model_type": "gpt2"}}, "not native"),
        ({"decoder": 3}, "decoder = 3: expected an object"),
        ({"model_type": "llama"}, "model_type"),
        ({"draft_vocab_size": 199}, "token_ids"),
        ({"draft_vocab_size": True}, "draft_vocab_size"),
        ({"decoder": {**decoder, "vocab_size": 9999}}, "made for a target of vocab_size 9999"),
    ):
        (options.output / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError, match=message):
            write_drafter_model(options.output, target, tmp_path / "hf")
        assert not (tmp_path / "hf").exists()


def test_what_cannot_be_trained_is_refused_before_collecting(target: Path, tmp_path: Path) -> None:
    """No cache, no work folder, no result is there afterwards."""
    bare = tmp_path / "bare"
    shutil.copytree(target, bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    strange = tmp_path / "strange"
    shutil.copytree(target, strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "x", "completion": "a longer y"}\n')
    disk = Machine(1 << 40, 10, 1e12, 1e12)
    for changes, message in (
        ({"model": bare}, "has no tokenizer"),
        ({"product": "drafter", "model": strange}, "activation 'relu'.*train Medusa heads"),
        ({"product": "drafter", "num_layers": 4}, "the target has 3 and 64; choose at most"),
        ({"product": "drafter", "intermediate_size": 65}, "the target has 3 and 64"),
        ({"draft_vocab_size": 259}, "the target has 258 tokens"),
        ({"collect": CollectConfig(max_new_tokens=512)}, "the target has 512 positions"),
        ({"data": (few,)}, r"few\.jsonl: 1 texts are too few"),
        ({"chat_template": "{{ 'no message' }}"}, "does not repeat the user's message"),
        ({"exclude": (tmp_path / "gone.txt",)}, "no such file"),
        ({}, r"the cache needs .* 0\.0 MB are free"),
        ({"device": "cuda"}, "torch sees no GPU"),
    ):
        if "device" in changes and torch.cuda.is_available():
            continue
        values: dict[str, Any] = {
            "product": "medusa", "model": target, "output": tmp_path / "out", "num_layers": 2,
            "cache_dir": tmp_path / "cache", "work_dir": tmp_path / "work", **changes,
        }  # fmt: skip
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises((ConfigError, ModelError), match=message),
        ):
            patch.setattr("specdec_ext.training.run.measure_machine", lambda *_: disk)
            train(TrainOptions(**values), Silent())
        left = {path.name for path in tmp_path.iterdir()} - {"bare", "strange", "few.jsonl"}
        assert left <= {"cache"}
        assert not list((tmp_path / "cache").glob("*.safetensors"))


# -- refusals and the command ---------------------------------------------------------------------


def test_a_foreign_folder_is_not_overwritten(target: Path, cache_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "medusa").mkdir()
    (tmp_path / "medusa" / "thesis.txt").write_text("mine")
    (tmp_path / "medusa" / "config.json").write_text("{}")  # as in a model's folder
    with pytest.raises(ConfigError, match="was not written by this command"):
        run("medusa", target, cache_dir, tmp_path)
    assert (tmp_path / "medusa" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"product": "eagle"}, "product = 'eagle'"),
        ({"num_heads": 0}, "num_heads = 0"),
        ({"draft_vocab_size": 3}, "draft_vocab_size = 3"),
        ({"dtype": "int8", "product": "redrafter"}, "dtype = 'int8'"),
        ({"device": "tpu"}, "device = 'tpu'"),
        ({"device": "cuda:x"}, "device = 'cuda:x'"),
        ({"data": (Path("a"),), "prompts": (Path("b"),)}, "data and prompts"),
    ],
)
def test_options_are_checked(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainOptions(**{"product": "medusa", "output": tmp_path / "x", **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps = 0"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"soft_share": 1.5}, "soft_share"),
        ({"precision": "fp8"}, "precision = 'fp8'"),
        ({"batch_texts": 2, "accumulation": 3}, "accumulation = 3: a step has 2 texts"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainSettings(**change)

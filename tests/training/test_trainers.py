"""The three products on a tiny target: the loss falls, a resumed run is the same, files load."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec_ext.cli import main
from specdec_ext.drafters.medusa.heads import load_medusa_heads
from specdec_ext.drafters.redrafter.model import load_redrafter
from specdec_ext.errors import ConfigError, ModelError
from specdec_ext.models.drafter_files import materialize_drafter, read_drafter
from specdec_ext.training.collect import CollectConfig
from specdec_ext.training.data import TrainingData
from specdec_ext.training.loop import Training, TrainSettings
from specdec_ext.training.run import PRODUCTS, TrainOptions, make_product, train

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
    return make_product(options, data, target, "sha", "tiny", CPU)


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


# -- files ----------------------------------------------------------------------------------------


class Silent:
    def on_collect(self, collector: Any) -> None:
        pass

    def on_train(self, training: Any) -> None:
        pass


def run(name: str, target: Path, cache_dir: Path, tmp_path: Path, **changes: Any) -> TrainOptions:
    options = TrainOptions(
        product=name,
        output=tmp_path / name,
        model=target,
        cache_dir=cache_dir,
        work_dir=tmp_path / "work",
        collect=CollectConfig(num_prompts=72, max_new_tokens=40, max_prompt_len=24, shard_size=16),
        settings=dataclasses.replace(SETTINGS, steps=6, eval_every=6),
        **{**SMALL, **changes},
    )
    card = train(options, Silent())
    assert json.loads((options.output / "training_card.json").read_text())["product"] == name
    assert card["data"]["train_texts"] + card["data"]["held_out_texts"] == 72
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
    heads = load_medusa_heads(options.output)
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


def test_a_drafter_becomes_an_ordinary_model_folder(
    target: Path, cache_dir: Path, tmp_path: Path, data: TrainingData
) -> None:
    """transformers runs the folder, and gives the scores that training saw."""
    options = run("drafter", target, cache_dir, tmp_path)
    folder = materialize_drafter(options.output, target, tmp_path / "hf")
    again = materialize_drafter(options.output, target, tmp_path / "hf")  # replaced, not refused
    assert folder == again
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == 258 and config["draft_vocab_size"] == 200
    shape, _, ids, _ = read_drafter(options.output)
    assert torch.equal(ids, data.token_ids) and shape.cut_from_layers == (0, 2)
    from safetensors.torch import load_file
    from transformers import LlamaModel

    tensors = load_file(folder / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    body = LlamaModel(shape.hf_config())
    body.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items()})
    product = new_product("drafter", target, data)
    product.module = trained_module("drafter", target, data, tmp_path)
    batch = data.make(data.held_out[:1], CPU)
    with torch.no_grad():
        ids_in = data.held_out[0].tokens[None, :-1].to(torch.int64)
        mine = body(ids_in).last_hidden_state[0, data.held_out[0].prompt_len - 1 :] @ head.T
        theirs = product._head.scores(product._features(batch))
    assert mine.shape == theirs.shape
    assert float((mine - theirs).abs().max()) < 0.05 * float(theirs.abs().max())
    assert AutoModelForCausalLM  # the architecture's name is a class of transformers


def test_a_drafter_for_another_target_is_refused(
    target: Path, cache_dir: Path, tmp_path: Path
) -> None:
    options = run("drafter", target, cache_dir, tmp_path)
    config = json.loads((options.output / "config.json").read_text())
    for change, message in (
        ({"hidden_size": 64}, r"expected \["),
        ({"model_type": "llama"}, "model_type"),
        ({"draft_vocab_size": 199}, "token_ids"),
        ({"num_layers": True}, "num_layers"),
        ({"vocab_size": 9999}, "made for a target of vocab_size 9999"),
    ):
        (options.output / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError, match=message):
            materialize_drafter(options.output, target, tmp_path / "hf")
        assert not (tmp_path / "hf").exists()


# -- refusals and the command ---------------------------------------------------------------------


def test_a_foreign_folder_is_not_overwritten(target: Path, cache_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "medusa").mkdir()
    (tmp_path / "medusa" / "thesis.txt").write_text("mine")
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
    ],
)
def test_settings_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainSettings(**change)


def test_the_command(
    target: Path, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evaluation.txt").write_text("What nothing may be trained on.")
    command = [
        "train-medusa", "--model", str(target), "--output", str(tmp_path / "heads"),
        "--cache_dir", str(tmp_path / "cache"), "--work-dir", str(tmp_path / "work"),
        "--num-prompts", "50", "--max-new-tokens", "20", "--steps", "4", "--num-heads", "2",
        "--draft-vocab-size", "64", "--seed", "3", "--exclude", str(tmp_path / "evaluation.txt"),
    ]  # fmt: skip
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "held-out top-1 accuracy by position" in captured.out
    assert "training 4/4" in captured.err
    card = json.loads((tmp_path / "heads" / "training_card.json").read_text())
    assert card["command"].startswith("specdec train-medusa --num-prompts 50")
    assert card["command"].endswith("--seed 3 --exclude evaluation.txt")
    assert str(tmp_path) not in card["command"]
    assert card["sha256"]["medusa_lm_head.safetensors"]
    assert main([*command, "--draft-len", "3"]) == 4
    assert "--draft-len: only train-redrafter has it" in capsys.readouterr().err

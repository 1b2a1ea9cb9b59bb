"""Files of EAGLE-3 heads: both layouts say the same; what is damaged or foreign is one error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from emulators import EMULATED
from specdec_ext import LLM, Eagle3DecodingConfig
from specdec_ext.drafters.eagle3.checkpoint import check_target, read_eagle3
from specdec_ext.drafters.eagle3.model import Eagle3, save_eagle3
from specdec_ext.drafters.eagle3.shape import Eagle3Shape, default_taps, read_eagle3_shape
from specdec_ext.errors import ModelError, UnsupportedConfigError, UnsupportedModelError
from tiny_models import save_llama

VOCAB, HIDDEN = 40, 32
IDS = [1, 2, 5, 8, 13, 21, 34, 39]
Damage = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def make_head(folder: Path, **changes: Any) -> Path:
    rope = SimpleNamespace(
        model_type="eagle3",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=128,
        head_dim=8,
    )
    values: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "target_hidden_size": HIDDEN,
        "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "draft_vocab_size": len(IDS), "rms_norm_eps": 1e-5, "rope": rope,
    }  # fmt: skip
    torch.manual_seed(1)
    return save_eagle3(Eagle3(Eagle3Shape(**{**values, **changes}), IDS, 128), folder)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_head(tmp_path_factory.mktemp("head") / "specforge")


def changed(source: Path, folder: Path, damage: Damage) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = dict(load_file(folder / "model.safetensors"))
    damage(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def to_speculators(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    layer = dict(config)
    config.clear()
    own = layer.pop("eagle_config")
    for name in ("draft_vocab_size", "target_hidden_size", "norm_before_residual"):
        config[name] = layer.pop(name)
    config |= {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
    }
    taps = own.get("eagle_aux_hidden_state_layer_ids")
    if taps is not None:
        config["eagle_aux_hidden_state_layer_ids"] = [tap + 1 for tap in taps]
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
    tensors["verifier_norm.weight"] = torch.ones(HIDDEN)
    tensors["verifier_lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)


@pytest.mark.parametrize("taps", [None, (2, 4, 7)])
def test_both_layouts_are_the_same_head(tmp_path: Path, taps: tuple[int, ...] | None) -> None:
    ours = make_head(tmp_path / "ours", taps=taps, norm_before_residual=True)
    theirs = changed(ours, tmp_path / "theirs", to_speculators)
    first, second = read_eagle3(ours), read_eagle3(theirs)
    assert first.shape == second.shape
    assert first.shape.taps == taps and first.shape.norm_before_residual
    assert first.token_ids.tolist() == second.token_ids.tolist() == IDS
    assert first.tensors.keys() == second.tensors.keys() == first.shape.expected_weights().keys()
    for name, tensor in first.tensors.items():
        assert np.array_equal(as_bits(tensor), as_bits(second.tensors[name])), name


def as_bits(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.bits if hasattr(tensor, "bits") else tensor)


def test_taps_are_low_middle_and_high() -> None:
    assert default_taps(30) == (2, 15, 27)  # what vLLM and SGLang take
    assert default_taps(32) == (2, 16, 29)
    for layers in range(1, 12):
        taps = default_taps(layers)
        assert len(taps) == 3 and list(taps) == sorted(taps)
        assert taps[0] >= 1 and taps[-1] <= layers


def test_rows_of_the_head_may_come_in_any_order(head: Path, tmp_path: Path) -> None:
    """They are put in the order of their tokens."""
    order = torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])

    def shuffle(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        ids = torch.tensor(IDS)[order]
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order].contiguous()

    found, wanted = read_eagle3(changed(head, tmp_path / "x", shuffle)), read_eagle3(head)
    assert found.token_ids.tolist() == IDS
    name = "lm_head.weight"
    assert np.array_equal(as_bits(found.tensors[name]), as_bits(wanted.tensors[name]))


def put(name: str, tensor: torch.Tensor) -> Damage:
    return lambda config, tensors: tensors.__setitem__(name, tensor)


def drop(name: str) -> Damage:
    def damage(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return damage


def say(name: str, value: Any) -> Damage:
    return lambda config, tensors: config.__setitem__(name, value)


def own(name: str, value: Any) -> Damage:
    return lambda config, tensors: config["eagle_config"].__setitem__(name, value)


NAN = torch.full((HIDDEN,), float("nan"))
HOSTILE: list[tuple[str, Damage, str]] = [
    ("fc", put("fc.weight", torch.zeros(HIDDEN, 2 * HIDDEN)),
     r"'fc.weight' has shape \[32, 64\], config.json asks for \[32, 96\]"),
    ("q", put("midlayer.self_attn.q_proj.weight", torch.zeros(32, 32)),
     r"'midlayer.self_attn.q_proj.weight' has shape \[32, 32\].*\[32, 64\]"),
    ("missing", drop("midlayer.hidden_norm.weight"), "'midlayer.hidden_norm.weight' .* is missing"),
    ("extra", put("layers.1.mlp.up_proj.weight", torch.zeros(2, 2)),
     "'layers.1.mlp.up_proj.weight' .* has no place"),
    ("twice", put("layers.0.hidden_norm.weight", torch.ones(HIDDEN)),
     "two spellings of the same weight"),
    ("nan", put("norm.weight", NAN), "'norm.weight' holds 32 NaN"),
    ("no d2t", drop("d2t"), r"'d2t' \[8\] is missing"),
    ("short d2t", put("d2t", torch.zeros(7, dtype=torch.int64)), r"'d2t' is int64 \[7\]"),
    ("float d2t", put("d2t", torch.zeros(8)), r"'d2t' is float32"),
    ("d2t above", put("d2t", torch.tensor([0, 1, 2, 3, 4, 5, 6, 33])),
     r"'d2t'\[7\] = 33 makes row 7 of lm_head token 40; the target's tokens are 0..39"),
    ("d2t below", put("d2t", torch.tensor([-1, 0, 0, 0, 0, 0, 0, 0])), r"'d2t'\[0\] = -1"),
    ("d2t wraps", put("d2t", torch.full((8,), 2**63 - 1)), r"'d2t'\[0\] = 9223372036854775807"),
    ("d2t twice", put("d2t", torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])), "names token 1 twice"),
    ("embedding", put("embed_tokens.weight", torch.zeros(VOCAB, 16)), "'embed_tokens.weight'"),
    ("vocab", say("draft_vocab_size", 41), "draft_vocab_size = 41: expected an integer 1..40"),
    ("heads", say("num_key_value_heads", 3), "no multiple of num_key_value_heads = 3"),
    ("dim", say("head_dim", 12), "head_dim = 12"),
    ("layers", say("num_hidden_layers", 2), "a head of one layer"),
    ("size", say("hidden_size", 1 << 30), "hidden_size = 1073741824"),
    ("text", say("intermediate_size", "many"), "intermediate_size = 'many'"),
    ("eps", say("rms_norm_eps", -1), "rms_norm_eps = -1"),
    ("act", say("hidden_act", "gelu"), "hidden_act = 'gelu'"),
    ("theta", say("rope_theta", 0), "rope_theta = 0"),
    ("rope", say("rope_scaling", {"rope_type": "odd"}), "rope_type = 'odd'"),
    ("kind", say("architectures", ["LlamaForCausalLM"]), "is this the folder of the target"),
    ("speculators", say("speculators_model_type", "dflash"), "expected 'eagle3'"),
    ("fc norm", say("fc_norm", True), "fc_norm = true"),
    ("no taps", own("use_aux_hidden_state", False), "use_aux_hidden_state = False"),
    ("two taps", own("eagle_aux_hidden_state_layer_ids", [1, 2]), "expected 3 layers"),
    ("taps", own("eagle_aux_hidden_state_layer_ids", "low"), "expected 3 layers"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "message"), HOSTILE, ids=[h[0] for h in HOSTILE])
def test_hostile_files_are_one_error(
    head: Path, tmp_path: Path, name: str, damage: Damage, message: str
) -> None:
    folder = changed(head, tmp_path / "head", damage)
    with pytest.raises(ModelError, match=message):
        read_eagle3(folder)


def test_a_head_of_another_target(head: Path, tmp_path: Path) -> None:
    weights = read_eagle3(head)
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_layers": 4}
    assert check_target(weights, **sizes) == default_taps(4)
    for name, value in (("hidden_size", 64), ("vocab_size", 41)):
        with pytest.raises(ModelError, match=f"{name} = .*, the target has {value}"):
            check_target(weights, **{**sizes, name: value})
    beyond = read_eagle3(make_head(tmp_path / "beyond", taps=(1, 2, 5)))
    with pytest.raises(ModelError, match="taps what enters layer 5, the target has 4 layers"):
        check_target(beyond, **sizes)
    narrow = read_eagle3(make_head(tmp_path / "narrow", hidden_size=16, num_heads=2))
    with pytest.raises(ModelError, match=r"'embed_tokens.weight' \[40, 16\] is missing"):
        check_target(narrow, **sizes)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_eagle3_shape(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_eagle3_shape(tmp_path)


def test_what_does_not_fit_is_refused_before_the_target_is_loaded(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_llama(tmp_path / "target", 3, VOCAB, hidden_size=64)

    def load(*_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("specdec_ext.models.load_model", load)
    with pytest.raises(ModelError, match=r"specforge: eagle3: .* hidden_size = 32, .* has 64"):
        LLM(target, speculative_config=Eagle3DecodingConfig(head))


@EMULATED
def test_what_a_device_has_no_kernels_for_is_refused_before_too(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_llama(tmp_path / "target", 3, VOCAB)
    monkeypatch.setattr("specdec_ext.models.load_model", None)
    there: dict[str, Any] = {"device": "cuda-emu-fast"}
    with pytest.raises(UnsupportedConfigError, match="on cuda-emu-fast the head taps the native"):
        LLM(target, speculative_config=Eagle3DecodingConfig(head), model_impl="transformers",
            **there)  # fmt: skip
    odd = make_head(tmp_path / "odd", hidden_size=24, num_heads=2, target_hidden_size=24)
    small = save_llama(tmp_path / "small", 3, VOCAB, hidden_size=24)
    with pytest.raises(UnsupportedModelError, match="hidden_size = 24: on a device a multiple of"):
        LLM(small, speculative_config=Eagle3DecodingConfig(odd), **there)

"""The heads' module against its formula, and its files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_ext import ModelError
from specdec_ext.drafters.medusa.heads import (
    MedusaHeads,
    MedusaHeadsConfig,
    save_medusa_heads,
)
from specdec_ext.drafters.medusa.weights import HEADS_FILE, read_own_heads

HIDDEN, VOCAB = 12, 31
IDS = [30, 4, 0, 17, 9]


def make_heads(lm_head: str = "own", *, ids: Any = None, seed: int = 0, **fields: Any) -> Any:
    config = MedusaHeadsConfig(
        HIDDEN,
        VOCAB,
        **{"num_medusa_heads": 3, "num_medusa_layers": 2, **fields},
        lm_head=lm_head,
        draft_vocab_size=None if ids is None else len(ids),
    )
    heads = MedusaHeads(config, None if ids is None else torch.tensor(ids))
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return heads.requires_grad_(False)


def load(folder: Path) -> MedusaHeads:
    return MedusaHeads.of_weights(read_own_heads(folder))


def reference(heads: Any, hidden: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """The formula in float64, one row and one head at a time, from the names of the file."""
    tensors = {name: value.double() for name, value in heads.weights()}
    config, result = heads.config, []
    for h in range(config.num_medusa_heads):
        rows = []
        for row in hidden.double():
            x = row
            for layer in range(config.num_medusa_layers):
                y = tensors[f"{h}.{layer}.linear.weight"] @ x
                if config.has_bias:
                    y = y + tensors[f"{h}.{layer}.linear.bias"]
                x = x + y / (1 + torch.exp(-y))
            matrix = {
                "own": lambda h=h: tensors[f"{h}.{config.num_medusa_layers}.weight"],
                "shared": lambda: tensors["lm_head.weight"],
                "target": lambda: target.double(),
            }[config.lm_head]()
            rows.append(matrix @ x)
        result.append(torch.stack(rows))
    return torch.stack(result)


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("lm_head", ["own", "shared", "target"])
@pytest.mark.parametrize("fields", [{}, {"num_medusa_layers": 0}, {"has_bias": False}])
def test_forward_is_the_formula(lm_head: str, ids: Any, fields: dict[str, Any]) -> None:
    heads = make_heads(lm_head, ids=ids, **fields)
    hidden = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.1
    target = torch.randn(len(IDS) if ids else VOCAB, HIDDEN) if lm_head == "target" else None
    expected = reference(heads, hidden, target)
    found = heads(hidden, target)
    assert found.shape == (3, 4, len(IDS) if ids else VOCAB)
    assert torch.allclose(
        found.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
    )


def test_new_heads_say_what_the_targets_head_says() -> None:
    """Blocks start as the identity: training starts from the target's own guess."""
    heads = MedusaHeads(MedusaHeadsConfig(HIDDEN, VOCAB, 2, lm_head="target"))
    hidden, weight = torch.randn(3, HIDDEN), torch.randn(VOCAB, HIDDEN)
    assert torch.allclose(heads(hidden, weight), torch.stack([hidden @ weight.T] * 2), atol=1e-5)
    with pytest.raises(ValueError, match="give target_head"):
        heads(hidden)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize(("lm_head", "ids"), [("own", None), ("shared", IDS), ("target", IDS)])
def test_saved_heads_are_loaded(tmp_path: Path, lm_head: str, ids: Any, dtype: str) -> None:
    heads = make_heads(
        lm_head, ids=ids, model_sha256="ab" * 32, training={"steps": 3}, medusa_choices=[[0]]
    )
    save_medusa_heads(tmp_path, heads, dtype=dtype)
    again = load(tmp_path)
    assert again.config == heads.config
    assert not any(p.requires_grad for p in again.parameters())
    for (name, a), (other, b) in zip(heads.weights(), again.weights(), strict=True):
        assert name == other
        if name == "token_ids" or dtype == "float32":
            assert torch.equal(a, b)
        elif dtype == "int8" and name.endswith("weight"):  # half a step of the row's scale
            limit = a.abs().amax(dim=1, keepdim=True) / 127 / 2 * 1.001
            assert bool(((a - b).abs() <= limit).all())
        elif dtype != "int8":
            assert torch.equal(a.to(getattr(torch, dtype)).float(), b)
        else:
            assert torch.equal(a, b)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["model_type"] == "medusa" and content["num_medusa_heads"] == 3


def spoil(folder: Path, **changes: Any) -> None:
    """Change tensors (None: remove) of a saved file; names with '_' for '.'."""
    tensors = load_file(folder / HEADS_FILE)
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, folder / HEADS_FILE)


NAN = torch.full((HIDDEN, HIDDEN), float("nan"))
BAD_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"1__0__linear__weight": None}, r"'1\.0\.linear\.weight' \[12, 12\] is missing"),
    "shape": ({"0__1__linear__bias": torch.zeros(3)}, r"shape \[3\], expected \[12\]"),
    "extra": ({"3__0__linear__bias": torch.zeros(12)}, r"'3\.0\.linear\.bias' \[12\] \(and 0 more"),
    "nan": ({"2__0__linear__weight": NAN}, r"'2\.0\.linear\.weight' holds 144 NaN"),
    "int8 alone": ({"0__0__linear__weight": NAN.to(torch.int8)}, r"int8 without a tensor"),
    "integers": ({"0__0__linear__weight": NAN.to(torch.int64)}, r"int64; expected floats"),
    "ids": ({"token_ids": torch.tensor(IDS[:4] + IDS[:1])}, "expected 5 distinct ids 0..30, found"),
    "large ids": ({"token_ids": torch.tensor([1, 2, 3, 4, 31])}, "expected 5 distinct ids 0..30"),
    "fewer ids": ({"token_ids": torch.tensor([1])}, r"token_ids has shape \[1\]"),
    "no ids": ({"token_ids": None}, "draft_vocab_size = 5 needs the tensor token_ids"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_damaged_file_is_refused(tmp_path: Path, case: str) -> None:
    save_medusa_heads(tmp_path, make_heads("own", ids=IDS), dtype="float32")
    changes, message = BAD_FILES[case]
    spoil(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    save_medusa_heads(tmp_path, make_heads(), dtype="float32")
    whole = (tmp_path / HEADS_FILE).read_bytes()
    (tmp_path / HEADS_FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected an object with keys"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_medusa_heads": 0}, "num_medusa_heads = 0: expected an integer 1..32"),
        ({"num_medusa_heads": True}, "num_medusa_heads = True"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"lm_head": "tied"}, "lm_head = 'tied': expected one of own, shared, target"),
        ({"training": [1]}, r"training = \[1\]: expected an object with keys"),
        ({"draft_vocab_size": 32}, "draft_vocab_size = 32: expected 1..31"),
    ],
)
def test_a_bad_configuration_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(MedusaHeadsConfig(HIDDEN, VOCAB, 3), **fields)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected one of float32, float16, bfloat16, int8"):
        save_medusa_heads(tmp_path, make_heads(), dtype="fp8")

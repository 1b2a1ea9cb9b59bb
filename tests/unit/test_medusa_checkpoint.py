"""Heads in other projects' files: read, refused, written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdec_ext import ConfigError, ModelError, UnsupportedModelError
from specdec_ext.cli import main
from specdec_ext.drafters.medusa.convert import SPELLINGS, write_heads
from specdec_ext.drafters.medusa.heads import (
    MedusaHeads,
    MedusaHeadsConfig,
    load_heads,
    save_medusa_heads,
)

HIDDEN, VOCAB = 8, 23


class Target:
    """What of a StepModel the loader looks at."""

    hidden_size, vocab_size = HIDDEN, VOCAB

    class info:
        path = "target"

    def __init__(self) -> None:
        self.weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids.long()]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fasterdecoding(
    heads: int = 3, layers: int = 1, prefix: str = "", lm_head: bool = True, bias: bool = True
) -> dict[str, torch.Tensor]:
    tensors = {}
    for h in range(heads):
        for layer in range(layers):
            tensors[f"{prefix}{h}.{layer}.linear.weight"] = random(HIDDEN, HIDDEN, seed=h)
            if bias:
                tensors[f"{prefix}{h}.{layer}.linear.bias"] = random(HIDDEN, seed=h)
        if lm_head:
            tensors[f"{prefix}{h}.{layers}.weight"] = random(VOCAB, HIDDEN, seed=10 + h)
    return tensors


def vllm(heads: int = 3, prefix: str = "", rows: int = VOCAB) -> dict[str, torch.Tensor]:
    tensors = {}
    for h in range(heads):
        tensors[f"{prefix}blocks.{h}.layers.0.weight"] = random(HIDDEN, HIDDEN, seed=h)
        tensors[f"{prefix}blocks.{h}.layers.0.bias"] = random(HIDDEN, seed=h)
        tensors[f"{prefix}lm_heads.{h}.weight"] = random(VOCAB, HIDDEN, seed=10 + h)[:rows]
    return tensors


WHOLE_MODEL = {
    "model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": torch.zeros(4, HIDDEN),
    "lm_head.weight": torch.zeros(VOCAB, HIDDEN),
}


def write(folder: Path, file: str, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def check(heads: MedusaHeads, *, number: int = 3, kind: str = "own") -> None:
    """The weights are those of the functions above."""
    config = heads.config
    assert (config.num_medusa_heads, config.hidden_size, config.vocab_size) == (
        number, HIDDEN, VOCAB,
    )  # fmt: skip
    assert config.lm_head == kind
    for h, linears in enumerate(heads.block_linears()):
        assert torch.equal(linears[0].weight, random(HIDDEN, HIDDEN, seed=h))
        assert torch.equal(linears[0].bias, random(HIDDEN, seed=h))
    if kind == "own":
        for h, head in enumerate(heads.lm_heads):
            assert torch.equal(head.weight, random(VOCAB, HIDDEN, seed=10 + h))


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_fasterdecoding(tmp_path: Path, file: str) -> None:
    """The published config.json says 2 heads; the file decides."""
    folder = write(
        tmp_path, file, fasterdecoding(), medusa_num_heads=2, medusa_num_layers=1,
        base_model_name_or_path="lmsys/vicuna-7b-v1.3",
    )  # fmt: skip
    for source in (folder, folder / file):
        heads = load_heads(source, allow_pickle=True)
        check(heads)
        assert heads.config.base_model_name_or_path == "lmsys/vicuna-7b-v1.3"


def test_fasterdecoding_without_config_and_with_layers(tmp_path: Path) -> None:
    heads = load_heads(write(tmp_path, "medusa_lm_head.safetensors", fasterdecoding(layers=2)))
    check(heads)
    assert heads.config.num_medusa_layers == 2
    assert torch.equal(heads.block_linears()[1][1].weight, random(HIDDEN, HIDDEN, seed=1))


def test_legacy_heads_share_the_targets_head(tmp_path: Path) -> None:
    file = "medusa_lm_head.safetensors"
    folder = write(tmp_path, file, fasterdecoding(lm_head=False), medusa_num_heads=3)
    check(load_heads(folder, model=Target()), kind="target")
    with pytest.raises(ModelError, match=r"no vocab_size; name the target \(--model\)"):
        load_heads(folder)
    write(folder, file, fasterdecoding(lm_head=False), vocab_size=VOCAB)
    check(load_heads(folder), kind="target")


@pytest.mark.parametrize("prefix", ["medusa_head.", "base_model.medusa_head.", "medusa_heads."])
def test_joint_checkpoints(tmp_path: Path, prefix: str) -> None:
    tensors = {**WHOLE_MODEL, **fasterdecoding(prefix=prefix)}
    check(load_heads(write(tmp_path / "a", "model.safetensors", tensors)))
    folder = write(tmp_path / "b", "pytorch_model.bin", tensors)
    check(load_heads(folder, allow_pickle=True))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: pickle checkpoints .* refused"):
        load_heads(folder)


def test_joint_checkpoints_in_shards(tmp_path: Path) -> None:
    parts = {"1.safetensors": WHOLE_MODEL, "2.safetensors": fasterdecoding(prefix="medusa_head.")}
    for file, tensors in parts.items():
        write(tmp_path, file, tensors)
    index = {name: file for file, tensors in parts.items() for name in tensors}
    text = json.dumps({"weight_map": index})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    check(load_heads(tmp_path))


@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "model."])
def test_vllm(tmp_path: Path, prefix: str) -> None:
    identity = {"token_map": torch.arange(VOCAB)} if prefix else {}
    folder = write(tmp_path, "model.safetensors", {**vllm(prefix=prefix), **identity}, num_heads=7)
    check(load_heads(folder))


def test_vllm_with_a_reduced_vocabulary(tmp_path: Path) -> None:
    tensors = {**vllm(rows=5), "token_map": torch.tensor([9, 1, 22, 0, 4])}
    heads = load_heads(write(tmp_path, "model.safetensors", tensors, vocab_size=VOCAB))
    assert heads.config.draft_vocab_size == 5 and heads.config.vocab_size == VOCAB
    assert heads.token_ids is not None and heads.token_ids.tolist() == [9, 1, 22, 0, 4]
    assert torch.equal(heads.lm_heads[1].weight, random(VOCAB, HIDDEN, seed=11)[:5])


def test_vllm_with_one_lm_head(tmp_path: Path) -> None:
    tensors = {k: v for k, v in vllm().items() if not k.startswith("lm_heads")}
    tensors["lm_head.weight"] = random(VOCAB, HIDDEN, seed=77)
    heads = load_heads(write(tmp_path, "model.safetensors", tensors))
    check(heads, kind="shared")
    assert torch.equal(heads.lm_heads[0].weight, random(VOCAB, HIDDEN, seed=77))


# -- refusals -------------------------------------------------------------------------------------


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {k: v for k, v in tensors.items() if k != name}


HEADS = fasterdecoding()
NAN = {**HEADS, "1.0.linear.bias": torch.full((HIDDEN,), float("inf"))}
OTHER_HIDDEN = {
    f"{h}.{k}": t for h in range(2) for k, t in
    {"0.linear.weight": torch.zeros(6, 6), "1.weight": torch.zeros(VOCAB, 6)}.items()
}  # fmt: skip
OTHER_VOCAB = {k: v[:20].clone() for k, v in HEADS.items()}
EXTRA = {**HEADS, "0.2.weight": HEADS["0.1.weight"].clone()}
BAD: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "hidden size": (OTHER_HIDDEN, "hidden size of 6, the target .* hidden_size = 8"),
    "vocabulary": (OTHER_VOCAB, "vocabulary of 20, the target .* vocab_size = 23"),
    "missing block": (without(HEADS, "1.0.linear.weight"), r"'1\.0\.linear\.weight'.*mis"),
    "missing bias": (without(HEADS, "2.0.linear.bias"), r"'2\.0\.linear\.bias' .* missing"),
    "missing LM head": (without(HEADS, "2.1.weight"), r"'2\.1\.weight' \[23, 8\] is missing"),
    "a gap": (
        {k: v for k, v in fasterdecoding(4).items() if k[0] != "2"},
        r"'2\.0\.linear\.weight' .* is missing",
    ),
    "an extra LM head": (EXTRA, r"'0\.2\.weight'"),
    "too many heads": (fasterdecoding(33, lm_head=False), "33 Medusa heads, allowed 1..32"),
    "something else": ({**HEADS, "extra": torch.zeros(3)}, r"'extra' \[3\] is no tensor"),
    "twice": ({**HEADS, "model.0.0.linear.bias": torch.zeros(8)}, "is there twice"),
    "NaN": (NAN, r"'1\.0\.linear\.bias' holds 8 NaN or infinite values"),
    "a model": (WHOLE_MODEL, "no Medusa heads in it"),
    "nothing": ({}, "no Medusa heads in it"),
    "no matrix": ({"0.0.linear.bias": torch.zeros(8)}, "0 Medusa heads"),
    "integers": ({k: v.int() for k, v in HEADS.items()}, "int32; expected floats"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_heads_are_refused(tmp_path: Path, case: str) -> None:
    tensors, message = BAD[case]
    folder = write(tmp_path, "medusa_lm_head.safetensors", tensors)
    with pytest.raises(ModelError, match=message):
        load_heads(folder, model=Target())


def test_pickles_are_refused_and_never_run_code(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "medusa_lm_head.pt", fasterdecoding())
    for source in (folder, folder / "medusa_lm_head.pt"):
        with pytest.raises(ModelError, match=r"medusa_lm_head\.pt: pickle files can run code"):
            load_heads(source)

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "was here",))

    torch.save({"0.0.linear.weight": Evil()}, folder / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="not a readable torch checkpoint"):
        load_heads(folder, allow_pickle=True)
    assert not (tmp_path / "was here").exists()
    torch.save([torch.zeros(3)], folder / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="expected a dictionary of tensors"):
        load_heads(folder, allow_pickle=True)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "medusa_lm_head.safetensors", fasterdecoding(), medusa_num_heads=3)
    whole = (folder / "medusa_lm_head.safetensors").read_bytes()
    (folder / "medusa_lm_head.safetensors").write_bytes(whole[:-40])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        load_heads(folder)
    (folder / "medusa_lm_head.safetensors").write_bytes(whole)
    for text, message in (("{", "cannot be read as JSON"), ("3", "expected an object with keys")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            load_heads(folder)
    (folder / "config.json").write_text('{"medusa_hidden_act": "relu"}')
    with pytest.raises(UnsupportedModelError, match="'relu'; only 'silu'"):
        load_heads(folder)
    with pytest.raises(ModelError, match="no such folder or file"):
        load_heads(folder / "none")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load_heads(empty)


# -- conversion -----------------------------------------------------------------------------------


def own_heads(kind: str, ids: list[int] | None) -> MedusaHeads:
    size = None if ids is None else len(ids)
    config = MedusaHeadsConfig(HIDDEN, VOCAB, 3, lm_head=kind, draft_vocab_size=size)
    heads = MedusaHeads(config, None if ids is None else torch.tensor(ids))
    for number, parameter in enumerate(heads.parameters()):
        parameter.data = random(*parameter.shape, seed=number)
    return heads.requires_grad_(False)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("ids", [None, [4, 2, 22]])
@pytest.mark.parametrize("kind", ["own", "shared", "target"])
def test_conversion_keeps_every_score(tmp_path: Path, kind: str, ids: Any, spelling: str) -> None:
    target, heads = Target(), own_heads(kind, ids)
    if spelling == "fasterdecoding" and ids:
        with pytest.raises(UnsupportedModelError, match="3 of 23 tokens: FasterDecoding's files"):
            write_heads(tmp_path, heads, spelling)
        return
    if spelling == "vllm" and kind == "target":
        with pytest.raises(UnsupportedModelError, match="name the target"):
            write_heads(tmp_path, heads, spelling)
    write_heads(tmp_path, heads, spelling, dtype="float32", model=target)
    again = load_heads(tmp_path, model=target)
    hidden = random(4, HIDDEN, seed=50)
    weight = target.weight if ids is None else target.weight[torch.tensor(ids)]
    assert torch.allclose(again(hidden, weight), heads(hidden, weight), atol=1e-6)
    assert (again.token_ids is None) == (ids is None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_command(tmp_path: Path, capsys: Any, dtype: str) -> None:
    source = write(tmp_path / "a", "medusa_lm_head.pt", fasterdecoding())
    target = str(tmp_path / "b")
    assert main(["convert-heads", str(source), target]) == 4
    assert "--allow-pickle" in capsys.readouterr().err
    command = ["convert-heads", str(source), target, "--allow-pickle", "--dtype", dtype]
    assert main([*command, "--num-medusa-heads", "2"]) == 0
    assert "2 heads of 1 layers, hidden size 8, LM head 'own'" in capsys.readouterr().out
    heads = load_heads(target)
    error = (heads.lm_heads[1].weight - random(VOCAB, HIDDEN, seed=11)).abs().max()
    assert float(error) <= {"float32": 0.0, "float16": 2e-3, "bfloat16": 2e-2, "int8": 2e-2}[dtype]
    before = (tmp_path / "b" / "config.json").read_text()
    assert main([*command, "--num-medusa-heads", "2"]) == 2
    assert "might be overwritten; give a new or an empty one" in capsys.readouterr().err
    assert (tmp_path / "b" / "config.json").read_text() == before
    command[2] = target = str(tmp_path / "c")
    assert main([*command, "--num-medusa-heads", "4"]) == 4
    assert "num_medusa_heads = 4: the file has 3 heads" in capsys.readouterr().err
    assert main(["convert-heads", str(source), target, "--allow-pickle", "--to", "vllm",
                 "--dtype", "int8"]) == 4  # fmt: skip


def test_unknown_spellings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of specdec, fasterdecoding, vllm"):
        write_heads(tmp_path, own_heads("own", None), "tgi")


def test_own_files_with_a_head_too_many_are_refused(tmp_path: Path) -> None:
    save_medusa_heads(tmp_path, own_heads("own", None), dtype="float32")
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "num_medusa_heads": 2}))
    with pytest.raises(ModelError, match=r"'2\.0\.linear\.bias' .* no place in 2 heads"):
        load_heads(tmp_path)

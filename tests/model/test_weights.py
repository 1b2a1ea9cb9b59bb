"""Checkpoint files: single, sharded, pickled; and every way they can be wrong."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec_ext.errors import ModelError
from specdec_ext.models.host_arrays import as_torch
from specdec_ext.models.weights import INDEX, SINGLE, Checkpoint

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.weight": torch.ones(4, dtype=torch.bfloat16),
    "c.bias": torch.full((5,), -2.0, dtype=torch.float16),
}
SHAPES = {name: tuple(t.shape) for name, t in TENSORS.items()}


def single(folder: Path) -> Path:
    save_file(TENSORS, folder / SINGLE)
    return folder / SINGLE


def sharded(folder: Path) -> dict[str, str]:
    weight_map = {"a.weight": "m-1.safetensors", "b.weight": "m-2.safetensors",
                  "c.bias": "m-2.safetensors"}  # fmt: skip
    for file in set(weight_map.values()):
        save_file({n: TENSORS[n] for n, f in weight_map.items() if f == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("make", [single, sharded])
def test_reads_exactly_what_was_saved(tmp_path, make):
    make(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.check(SHAPES)
        assert set(checkpoint.entries) == set(TENSORS)
        for name, tensor in TENSORS.items():
            found = as_torch(checkpoint.load(name))
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)
            converted = as_torch(checkpoint.load(name, "float32"))
            assert converted.dtype == torch.float32 and torch.equal(converted, tensor.float())
        assert checkpoint.dtype() == "float32"
        assert checkpoint.warnings == []


def test_index_wins_over_a_stale_single_file(tmp_path):
    save_file({"stale": torch.ones(1)}, tmp_path / SINGLE)
    sharded(tmp_path)
    assert set(Checkpoint(tmp_path).entries) == set(TENSORS)


@pytest.mark.parametrize("keep", [0, 4, 7, 8, 40, -1])
def test_truncated_file(tmp_path, keep):
    path = single(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(ModelError) as error:
        Checkpoint(tmp_path)
    assert str(path) in str(error.value) and "not a complete safetensors file" in str(error.value)


@pytest.mark.parametrize(
    "header",
    [b"{", b"null", b'{"a":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4]}}',
     b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}', b"\xff\xff"],
)  # fmt: skip
def test_corrupt_header(tmp_path, header):
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        Checkpoint(tmp_path)


def test_header_that_claims_terabytes(tmp_path):
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        Checkpoint(tmp_path)


def test_missing_shard(tmp_path):
    sharded(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"m-2\.safetensors: shard is missing.*incomplete"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "file",
    ["../secret.safetensors", "/etc/secret.safetensors", "x/../../secret.safetensors", "..",
     "x\\..\\secret.safetensors"],
)  # fmt: skip
def test_shard_outside_the_folder_is_refused(tmp_path, file):
    folder = tmp_path / "model"
    folder.mkdir()
    weight_map = sharded(folder)
    save_file({"a.weight": torch.ones(1)}, tmp_path / "secret.safetensors")
    weight_map["a.weight"] = file
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"weight_map\['a\.weight'\] = .*leaves the model folder"):
        Checkpoint(folder)


def test_linked_shards_are_read(tmp_path):
    """Download caches keep the data elsewhere and link it."""
    sharded(tmp_path)
    blob = tmp_path / "blob"
    os.rename(tmp_path / "m-1.safetensors", blob)
    (tmp_path / "m-1.safetensors").symlink_to(blob)
    assert torch.equal(as_torch(Checkpoint(tmp_path).load("a.weight")), TENSORS["a.weight"])


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "["])
def test_bad_index(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match=INDEX):
        Checkpoint(tmp_path)


def test_tensor_in_the_wrong_shard(tmp_path):
    weight_map = sharded(tmp_path)
    weight_map["a.weight"] = "m-2.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"'a\.weight' is not in this shard"):
        Checkpoint(tmp_path)


def test_tensor_in_two_shards(tmp_path):
    sharded(tmp_path)
    save_file({"a.weight": torch.ones(2, 3), "b.weight": TENSORS["b.weight"],
               "c.bias": TENSORS["c.bias"]}, tmp_path / "m-2.safetensors")  # fmt: skip
    with pytest.raises(ModelError, match=r"'a\.weight' is also in"):
        Checkpoint(tmp_path)


def test_wrong_shape_names_both(tmp_path):
    path = single(tmp_path)
    with pytest.raises(ModelError) as error:
        Checkpoint(tmp_path).check({**SHAPES, "a.weight": (3, 2)})
    message = str(error.value)
    assert str(path) in message and "'a.weight'" in message
    assert "[2, 3]" in message and "[3, 2]" in message


def test_missing_tensor_names_the_nearest(tmp_path):
    single(tmp_path)
    with pytest.raises(ModelError, match=r"'a\.weights' \[2, 3\] is missing.*it has 'a\.weight'"):
        Checkpoint(tmp_path).check({**SHAPES, "a.weights": (2, 3)})


def test_unexpected_tensor(tmp_path):
    single(tmp_path)
    expected = {name: SHAPES[name] for name in ("a.weight", "b.weight")}
    with pytest.raises(ModelError, match=r"'c\.bias' \[5\].*has no place"):
        Checkpoint(tmp_path).check(expected)
    Checkpoint(tmp_path).check(expected, ignored=["c.bias"])
    Checkpoint(tmp_path).check(expected, ignored_suffixes=(".bias",))


def test_quantized_tensor_is_refused(tmp_path):
    save_file({"a.weight": torch.zeros(2, 3, dtype=torch.int8)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"dtype I8.*unquantized"):
        Checkpoint(tmp_path).check({"a.weight": (2, 3)})


def test_no_weights_at_all(tmp_path):
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_weights_are_a_warning(tmp_path, value):
    bad = TENSORS["a.weight"].clone()
    bad[1, 2] = bad[0, 0] = value
    save_file({**TENSORS, "a.weight": bad}, tmp_path / SINGLE)
    with Checkpoint(tmp_path) as checkpoint:
        for name in TENSORS:
            checkpoint.load(name)
        assert len(checkpoint.warnings) == 1
        assert "'a.weight' holds 2 NaN or infinite values" in checkpoint.warnings[0]


def test_large_finite_weights_are_no_warning(tmp_path):
    """Their sum overflows, they do not."""
    save_file({"a.weight": torch.full((8,), 3e38)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.load("a.weight")
    assert checkpoint.warnings == []


class _Bomb:
    def __reduce__(self):
        return (os.mkdir, ("pickle_ran",))


def test_pickle_is_refused_unless_allowed(tmp_path):
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*allow_pickle=True"):
        Checkpoint(tmp_path)
    with Checkpoint(tmp_path, allow_pickle=True) as checkpoint:
        checkpoint.check(SHAPES)
        assert torch.equal(as_torch(checkpoint.load("a.weight")), TENSORS["a.weight"])


def test_sharded_pickle(tmp_path):
    for number, names in enumerate((["a.weight"], ["b.weight", "c.bias"])):
        torch.save({n: TENSORS[n] for n in names}, tmp_path / f"p-{number}.bin")
    weight_map = {"a.weight": "p-0.bin", "b.weight": "p-1.bin", "c.bias": "p-1.bin"}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    Checkpoint(tmp_path, allow_pickle=True).check(SHAPES)
    index.write_text(json.dumps({"weight_map": {"a.weight": "../p-0.bin"}}))
    with pytest.raises(ModelError, match="leaves the model folder"):
        Checkpoint(tmp_path, allow_pickle=True)


def test_code_in_a_pickle_never_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a.weight": _Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="not a readable torch checkpoint"):
        Checkpoint(tmp_path, allow_pickle=True)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(ModelError, match="not a readable torch checkpoint"):
        Checkpoint(tmp_path, allow_pickle=True)
    assert not (tmp_path / "pickle_ran").exists()


def test_pickle_of_something_else(tmp_path):
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="a dictionary of names to tensors"):
        Checkpoint(tmp_path, allow_pickle=True)

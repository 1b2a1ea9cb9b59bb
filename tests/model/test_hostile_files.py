"""Model folders that somebody made to break their reader: one ModelError that names the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_ext import LLM
from specdec_ext.errors import ModelError
from specdec_ext.models import load
from specdec_ext.models.config_reader import read_config
from specdec_ext.models.weights import Checkpoint
from specdec_ext.text import tokenizer as tokenizers
from specdec_ext.text.tokenizer import load_tokenizer
from tiny_models import save_tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Iterator[Path]:
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    yield tmp_path


def change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **values}))


@pytest.mark.parametrize("name", ["text_config", "decoder", "generator"])
@pytest.mark.parametrize("value", [3, "x", [1]])
def test_inner_configurations_are_objects(folder: Path, name: str, value: Any) -> None:
    change(folder / "config.json", **{name: value})
    with pytest.raises(ModelError, match=rf"config\.json: {name} = .*: expected an object"):
        read_config(folder)


def test_two_inner_configurations(folder: Path) -> None:
    change(folder / "config.json", text_config={}, decoder={})
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(folder)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "x" * 256, ""])
def test_shard_names_are_file_names(folder: Path, name: str) -> None:
    change(folder / "model.safetensors.index.json", weight_map={"model.norm.weight": name})
    with pytest.raises(
        ModelError, match=r"index\.json: weight_map\['model\.norm\.weight'\] = "
    ) as e:
        Checkpoint(folder)
    assert len(str(e.value)) < 500


@pytest.mark.parametrize(
    "content", [{0: torch.zeros(2)}, {"a": torch.zeros(2), 1: torch.zeros(2)}, {"a": 3}, [1]]
)
def test_pickles_hold_named_tensors(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="expected a dictionary of names to tensors"):
        Checkpoint(tmp_path, allow_pickle=True)


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_deep_json(folder: Path, name: str) -> None:
    (folder / name).write_text(DEEP)
    with pytest.raises(ModelError, match=rf"{name}: .* cannot be read"):
        load.load_model(folder)


@pytest.mark.parametrize("value", ["512", None, [1], {"a": 1}, True, -3, 0])
def test_model_max_length_is_a_number(folder: Path, value: Any) -> None:
    change(folder / "tokenizer_config.json", model_max_length=value)
    if value is None:  # transformers' word for no limit
        assert load_tokenizer(None, folder).model_max_length > 1e20
        return
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json: model_max_length = .*expected a"
    ):
        load_tokenizer(None, folder)


def big_ids() -> Iterator[tuple[str, Any]]:
    for token_id in (2**24, 2**31, 2**40):
        yield "tokenizer.json", lambda spec, i=token_id: spec["model"]["vocab"].update(zzz=i)
        yield "tokenizer.json", lambda spec, i=token_id: spec["added_tokens"].append(
            {"id": i, "content": "<zzz>", "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
        )  # fmt: skip
        yield (
            "tokenizer_config.json",
            lambda spec, i=token_id: spec.update(
                added_tokens_decoder={str(i): {"content": "<zzz>", "special": True}}
            ),
        )
        yield "added_tokens.json", lambda spec, i=token_id: spec.update({"<zzz>": i})
        yield "vocab.json", lambda spec, i=token_id: spec.update({"<zzz>": i})


@pytest.mark.parametrize(("name", "damage"), list(big_ids()))
def test_ids_are_bounded_before_a_tokenizer_is_made(
    folder: Path, name: str, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables as long as the greatest id were made: 3 GB for one id of 2^31."""
    import transformers

    def made(*_: Any, **__: Any) -> None:
        raise AssertionError("loaded")

    path = folder / name
    spec = json.loads(path.read_text()) if path.exists() else {}
    damage(spec)
    path.write_text(json.dumps(spec))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", made)
    with pytest.raises(ModelError, match=rf"{name}: token id \d+: ids are 0\.\.16777215"):
        load_tokenizer(None, folder)


def test_a_long_number_in_a_tokens_text_is_no_id(folder: Path) -> None:
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["model"]["vocab"]['": 99999999999,'] = len(spec["model"]["vocab"]) + 100
    path.write_text(json.dumps(spec))
    assert load_tokenizer(None, folder) is not None


@pytest.mark.parametrize(
    "error", [MemoryError("std::bad_alloc"), RuntimeError("[enforce fail] can't allocate memory")]
)
def test_no_memory_at_load(folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("specdec_ext.engine.build.EngineBuilder._make_pages", fail)
    with pytest.raises(ModelError, match="loading it takes more memory than there is") as caught:
        LLM(folder)
    assert caught.value.__cause__ is error


def test_another_runtime_error_at_load_is_not_of_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("specdec_ext.engine.build.EngineBuilder._make_pages", fail)
    with pytest.raises(RuntimeError, match="broken"):
        LLM(folder)


def test_the_search_for_long_numbers_sees_them_in_every_place() -> None:
    for text in (
        b'{"a": 123456789}',
        b'{"123456789": 1}',
        b"[1,123456789]",
        b'{"a":\n 123456789\n}',
    ):
        assert tokenizers._LONG_NUMBER.search(text), text
    assert not tokenizers._LONG_NUMBER.search(b'{"a": 1234567, "b123456789": "x 123456789 y"}')

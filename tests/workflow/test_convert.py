"""specdec convert: what it writes decodes as what it was given, and nothing half-written stays."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.medusa_models import VOCAB, save_heads, save_target
from gguf_files import write_gguf
from model.quant_files import FORMATS, save_quantised
from specdec_ext import (
    LLM,
    ConfigError,
    ModelError,
    SamplingParams,
    UnsupportedConfigError,
    UnsupportedModelError,
)
from specdec_ext.cli import main
from specdec_ext.models.decoder_file import DECODER_FILE
from specdec_ext.models.folder_cache import file_sha256
from specdec_ext.workflow.convert import CHECKPOINT, Converted, ConvertOptions, convert
from specdec_ext.workflow.folder_writer import check_folder, written_folder
from tiny_models import as_phi3, save_tiny

HIDDEN = 256
PROMPT = [5, 6, 7, 8, 5, 6, 7]
SHARD = 40_000  # bytes: several shards of a tiny model


def decode(model: Path, **how: Any) -> list[int]:
    with LLM(model, **how) as llm:
        [output] = llm.generate(
            [{"prompt_token_ids": PROMPT}],
            SamplingParams(max_tokens=24, ignore_eos=True),
            use_tqdm=False,
        )
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in whole blocks of 256."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 512, "initializer_range": 0.1}
    return save_target(tmp_path_factory.mktemp("source") / "wide", **sizes)


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def run(source: Path, target: Path, **options: Any) -> Converted:
    return convert(source, target, ConvertOptions(**options))


def test_a_folder_becomes_shards_that_decode_alike(tiny: Path, tmp_path: Path) -> None:
    done = run(tiny, tmp_path / "made" / "ckpt", shard_bytes=SHARD)
    assert done.num_shards > 2 and done.num_resumed == 0
    assert decode(done.folder) == decode(tiny)
    with LLM(done.folder) as llm:
        assert llm.generate("abc", use_tqdm=False)[0].outputs[0].text  # its tokenizer came along
    index = json.loads((done.folder / "model.safetensors.index.json").read_text())
    with safe_open(tiny / "model.safetensors", "pt") as old:
        assert set(index["weight_map"]) == set(old.keys())
        for name, shard in index["weight_map"].items():  # by the library's own reader
            with safe_open(done.folder / shard, "pt") as new:
                assert new.get_tensor(name).equal(old.get_tensor(name))


@pytest.mark.parametrize("how", ["float32", "int4", "q4_1", "awq-32", "fp8-block", "part"])
def test_projections_in_one_matrix_stay_in_it(how: str, wide: Path, tmp_path: Path) -> None:
    """A folder of the family phi3 stays one that transformers reads, in floats."""
    if how in FORMATS:
        source, _, _ = save_quantised(tmp_path, how, fused=True)
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        changes = {"rope_parameters": rope} if how == "part" else {}
        source = as_phi3(shutil.copytree(wide, tmp_path / "phi3"), **changes)
    if how == "q4_1":
        file = tmp_path / "model.gguf"
        source = write_gguf(source, file, how, architecture="phi3", tokenizer=False)
    options = {"quantization": how} if how == "int4" else {}
    done = run(source, tmp_path / "ckpt", shard_bytes=500_000, **options)
    assert decode(done.folder) == decode(source, **options)
    index = json.loads((done.folder / "model.safetensors.index.json").read_text())
    names = set(index["weight_map"])
    assert "model.layers.1.self_attn.qkv_proj.weight" in names
    assert not any(".q_proj." in name or ".up_proj." in name for name in names)
    # The C++ runtime reads rows where they lie, in the decoder's order alone.
    decoder = done.folder / DECODER_FILE
    assert decoder.is_file() == (how != "part")
    if how == "float32":
        assert decode(done.folder, model_impl="transformers") == decode(source)
        lines = [line.split() for line in decoder.read_text().splitlines()]
        tensors = {line[1]: line for line in lines if line[0] == "tensor"}
        for name in ("self_attn.k_proj", "mlp.up_proj"):
            _, full, kind, file_name, offset, rows, columns = tensors[
                f"model.layers.1.{name}.weight"
            ]
            assert kind == "float32"
            data = (done.folder / file_name).read_bytes()[int(offset) :]
            count = int(rows) * int(columns)
            found = np.frombuffer(data, np.float32, count).reshape(int(rows), int(columns))
            expected = load_file(wide / "model.safetensors")[full]
            assert np.array_equal(found, expected.numpy())


def test_the_manifest_says_what_went_in_and_what_came_out(tiny: Path, tmp_path: Path) -> None:
    folder = run(tiny, tmp_path / "ckpt").folder
    manifest = check_folder(folder, CHECKPOINT, "")
    assert manifest["origin"]["files"]["model.safetensors"] == file_sha256(
        tiny / "model.safetensors"
    )
    there = {file.name for file in folder.iterdir()}
    assert there == {*manifest["files"], "manifest.json"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_dtype_is_that_of_loading(dtype: str, tiny: Path, tmp_path: Path) -> None:
    folder = run(tiny, tmp_path / "ckpt", dtype=dtype).folder
    assert decode(folder) == decode(tiny, dtype=dtype)
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_here_is_quantised_at_load(quantization: str, wide: Path, tmp_path: Path) -> None:
    folder = run(wide, tmp_path / "ckpt", quantization=quantization, shard_bytes=500_000).folder
    assert decode(folder) == decode(wide, quantization=quantization)
    with pytest.raises(ModelError, match=r"quantization = 'int8'.*have a width already"):
        LLM(folder, quantization="int8")
    again = run(folder, tmp_path / "again").folder  # a converted folder is a source, too
    assert decode(again) == decode(folder)


@pytest.mark.parametrize("format", ["q4_1", "q6_k"])
def test_a_gguf_file_keeps_its_blocks(format: str, wide: Path, tmp_path: Path) -> None:
    file = write_gguf(wide, tmp_path / "model.gguf", format, tokenizer=False)
    done = run(file, tmp_path / "ckpt", shard_bytes=500_000)
    assert done.format == format
    assert decode(done.folder) == decode(file)


def test_a_gguf_file_with_its_tokenizer(tiny: Path, tmp_path: Path) -> None:
    file = write_gguf(tiny, tmp_path / "model.gguf", "q8_0")
    kept = run(file, tmp_path / "kept", shard_bytes=20_000)
    assert kept.format == "q8_0" and kept.num_shards > 1
    assert decode(kept.folder) == decode(file)
    floats = run(file, tmp_path / "floats", dtype="bfloat16")
    assert decode(floats.folder) == decode(file, dtype="bfloat16")
    assert decode(kept.folder, dtype="bfloat16") == decode(file, dtype="bfloat16")


@pytest.mark.parametrize("damage", ["format", "bytes", "missing"])
def test_damaged_blocks_are_refused(damage: str, wide: Path, tmp_path: Path) -> None:
    folder = run(wide, tmp_path / "ckpt", quantization="int8").folder
    config = json.loads((folder / "config.json").read_text())
    formats = config["quantization_config"]["formats"]
    names = formats.pop("q8_0")
    formats |= {
        "format": {"q9_9": names},
        "bytes": {"q8_0": [*names, "model.norm.weight"]},
        "missing": {"q8_0": [*names, "no.such.weight"]},
    }[damage]
    (folder / "config.json").write_text(json.dumps(config))
    words = {"format": "q9_9", "bytes": "model.norm.weight.*blocks of 34", "missing": "is missing"}
    with pytest.raises(ModelError, match=words[damage] + ".*convert the model again"):
        LLM(folder)


# -- interrupted, refused, failed -----------------------------------------------------------------


class Interrupts:
    """Ctrl-C behind the second shard."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if len(self.lines) == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("how", "flags"), [
    ({"method": "int4", "group_size": 64, "embeddings": "keep"},
     ["--quantization=int4", "--quantization-group-size=64", "--quantization-embeddings=keep"]),
    ({"method": "int8", "group_size": -1, "head": "int4"},
     ["--quantization=int8", "--quantization-group-size=-1", "--quantization-head=int4"]),
])  # fmt: skip
def test_a_mapping_is_kept_once_written(
    how: dict[str, Any], flags: list[str], wide: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "ckpt"
    assert main(["convert", f"--model-dir={wide}", f"--output-dir={folder}", *flags]) == 0
    assert json.loads((folder / "quantization.json").read_text())["quantization"] == how
    expected = decode(wide, quantization=how)
    assert decode(folder) == expected
    again = tmp_path / "again"
    convert(wide, again, ConvertOptions(quantization=how))
    assert decode(again) == expected
    formats = json.loads((folder / "config.json").read_text())["quantization_config"]["formats"]
    assert set(formats) == ({"q4_g", "q8_0"} if how["method"] == "int4" else
                            {"q8_g", "q8_0", "q4_1"})  # fmt: skip


def test_flags_that_say_how_need_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", f"--output-dir={tmp_path}", "--quantization-head=keep"]) == 2
    assert "--quantization-head says how weights are narrowed; give --quantization" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("how", [{}, {"quantization": "int8"}])
def test_a_tied_model_with_another_head_keeps_it(how: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tied", tie_word_embeddings=True, hidden_size=64)
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(3)
    tensors["lm_head.weight"] = torch.randn(table.shape, generator=generator) * 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    expected = decode(folder, **how)
    written = convert(folder, tmp_path / "out", ConvertOptions(**how)).folder
    assert not json.loads((written / "config.json").read_text())["tie_word_embeddings"]
    assert decode(written) == expected
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert decode(folder, **how) != expected


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_scales_that_are_nan_are_refused(dtype: str, wide: Path, tmp_path: Path) -> None:
    convert(wide, tmp_path / "blocks", ConvertOptions(quantization="int8"))
    [file] = (tmp_path / "blocks").glob("*.safetensors")
    tensors = load_file(file)
    blocks = tensors["model.layers.0.self_attn.o_proj.weight"]
    blocks[0, :2] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.o_proj.*q8_0"):
        LLM(tmp_path / "blocks", dtype=dtype)


def test_an_interrupted_conversion_goes_on(wide: Path, tmp_path: Path) -> None:
    options = ConvertOptions(quantization="int8", shard_bytes=200_000)
    target = tmp_path / "ckpt"
    with pytest.raises(KeyboardInterrupt):
        convert(wide, target, options, tell=Interrupts())
    assert [file.name for file in target.iterdir()] == [".partial"]
    with pytest.raises(ModelError, match="interrupted"):
        check_folder(target, CHECKPOINT, "")
    done = convert(wide, target, options)
    assert done.num_resumed == 2 < done.num_shards
    whole = convert(wide, tmp_path / "whole", options).folder
    names = {file.name for file in whole.iterdir()}
    assert names == {file.name for file in target.iterdir()}
    for name in names - {"manifest.json"}:
        assert (whole / name).read_bytes() == (target / name).read_bytes()


def test_other_options_begin_anew(wide: Path, tmp_path: Path) -> None:
    target = tmp_path / "ckpt"
    with pytest.raises(KeyboardInterrupt):
        convert(wide, target, ConvertOptions(shard_bytes=200_000), tell=Interrupts())
    done = run(wide, target, shard_bytes=200_000, dtype="float16")
    assert done.num_resumed == 0
    assert decode(target) == decode(wide, dtype="float16")


def test_a_folder_is_replaced_by_the_same_command_alone(tiny: Path, tmp_path: Path) -> None:
    target = run(tiny, tmp_path / "ckpt", shard_bytes=SHARD).folder
    assert run(tiny, target).num_shards == 1
    assert not (target / "model-00002.safetensors").exists()
    assert decode(target) == decode(tiny)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds 'notes.txt'.*name an empty folder"):
        run(tiny, target)
    with pytest.raises(ConfigError, match="no part of a checkpoint"):
        run(tiny, tiny)  # the source is nobody's to replace
    assert (target / "notes.txt").read_text() == "mine"


def test_two_processes_do_not_write_one_folder(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "ckpt"
    with written_folder(target, CHECKPOINT, {}, resumes=True) as folder:
        (folder / "kept").write_text("x")
        with pytest.raises(ModelError, match="another process is writing"):
            run(tiny, target)
        assert (folder / "kept").is_file()
    assert (target / "kept").is_file()


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from specdec_ext.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_leaves_nothing_behind(wide: Path, tmp_path: Path) -> None:
    target = tmp_path / "above" / "ckpt"
    done = subprocess.run(
        [sys.executable, "-c", FULL, "convert", "--model_dir", wide, "--output_dir", target],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4, done.stderr
    assert "cannot be written" in done.stderr and "free space" in done.stderr
    assert not (tmp_path / "above").exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"pp_size": 2}, "pp_size = 2: limit 1.*--pp_size=1"),
        ({"dtype": "fp8"}, "quantization='fp8'"),
    ],
)
def test_what_is_not_supported_is_refused(option: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=words):
        ConvertOptions(**option)


def test_the_documents_command(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "tmp" / "engine" / "ckpt"
    command = ["convert", f"--model_dir={tiny}", f"--output_dir={target}", "--dtype=float16"]
    assert main([*command, "--tp_size=1", "--pp_size=1", "--workers=2"]) == 0
    said = capsys.readouterr()
    assert "float16" in said.out
    assert "without effect here: --workers" in said.err
    assert decode(target) == decode(tiny, dtype="float16")
    assert main([*command, "--pp_size=2"]) == 3
    assert "pp_size = 2: limit 1" in capsys.readouterr().err
    assert main(["convert", "--model_dir=/no/such", f"--output_dir={target}"]) == 4
    assert "does not exist" in capsys.readouterr().err


def test_heads_lie_beside_the_model(wide: Path, tmp_path: Path) -> None:
    heads = save_heads(tmp_path / "heads", hidden=HIDDEN)
    folder = run(wide, tmp_path / "ckpt", medusa_model=heads).folder
    assert decode(folder, speculative_config={"method": "medusa", "model": folder / "medusa"}) == (
        decode(wide)
    )
    others = save_heads(tmp_path / "others", hidden=32)
    with pytest.raises(ModelError, match=f"hidden_size 32 and vocab_size {VOCAB}.*{HIDDEN}"):
        run(wide, tmp_path / "refused", medusa_model=others)
    assert not (tmp_path / "refused").exists()


def test_scales_of_fp8_keys_and_values_are_kept(wide: Path, tmp_path: Path) -> None:
    """In float32, whatever the weights become; of a checkpoint for ranks each has them all."""
    source = Path(shutil.copytree(wide, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    names = [f"model.layers.{i}.self_attn.{k}_scale" for i in range(2) for k in "kv"]
    tensors |= {name: torch.tensor(0.1 + 0.01 * i) for i, name in enumerate(names)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    folder = run(source, tmp_path / "ckpt", dtype="bfloat16").folder
    written = load_file(folder / "model-00001.safetensors")
    for name in names:
        assert written[name].dtype == torch.float32 and written[name] == tensors[name]
    how = {"kv_cache_config": {"dtype": "fp8"}, "dtype": "bfloat16"}
    assert decode(folder, **how) == decode(source, **how)
    ranks = run(source, tmp_path / "ranks", dtype="bfloat16", tp_size=2).folder
    for rank in range(2):
        written = load_file(ranks / f"rank{rank}" / "model-00001.safetensors")
        assert all(written[name] == tensors[name] for name in names)
    assert decode(ranks, tensor_parallel_size=2, **how) == decode(source, **how)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_keeps_its_widths(name: str, tmp_path: Path) -> None:
    """Whole numbers and e4m3 stay as narrow as they are, but for groups that no block has."""
    source, _, _ = save_quantised(tmp_path, name)
    done = run(source, tmp_path / "ckpt")
    kept = json.loads((done.folder / "config.json").read_text()).get("quantization_config")
    if name == "float-block":
        assert kept is None and done.format == "bfloat16"
    else:
        assert kept is not None and done.weight_bytes < 1.2 * weight_bytes(source)
    assert decode(done.folder) == decode(source)
    floats = run(source, tmp_path / "wide", dtype="float32").folder
    assert decode(floats) == decode(source, dtype="float32")
    with pytest.raises(UnsupportedModelError, match="have a width already"):
        run(source, tmp_path / "narrow", quantization="int8")


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_checkpoint_of_fp8_keys_and_values_stays_one(dtype: str, tmp_path: Path) -> None:
    """What said so, quantization_config, is not that of the new files."""
    source, _, _ = save_quantised(tmp_path, "float-channel")
    scheme = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
    content = json.loads((source / "config.json").read_text())
    content["quantization_config"]["kv_cache_scheme"] = scheme
    (source / "config.json").write_text(json.dumps(content))
    tensors = load_file(source / "model.safetensors")
    names = [f"model.layers.{i}.self_attn.{k}_scale" for i in range(2) for k in "kv"]
    tensors |= {name: torch.tensor(0.05 + 0.01 * i) for i, name in enumerate(names)}
    save_file(tensors, source / "model.safetensors")
    once = run(source, tmp_path / "once", dtype=dtype).folder
    again = run(once, tmp_path / "again").folder
    for folder in (source, once, again):
        with LLM(folder, dtype=dtype) as llm:
            assert llm.model.kv_storage.dtype == "float8_e4m3fn"
    assert decode(again) == decode(once) == decode(source, dtype=dtype)
    assert decode(once, kv_cache_config={"dtype": "bfloat16"}) == (
        decode(source, dtype=dtype, kv_cache_config={"dtype": "bfloat16"})
    )
    config = json.loads((once / "config.json").read_text())
    (once / "config.json").write_text(json.dumps({**config, "specdec_kv_cache": "fp9"}))
    with pytest.raises(ModelError, match=r"specdec_kv_cache = 'fp9'.*convert the model again"):
        LLM(once)

"""Checkpoints and engines for several ranks: each rank's own shards, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from gguf_files import write_gguf
from model.quant_files import save_quantised
from specdec_ext import ConfigError, ModelError, SamplingParams, UnsupportedModelError
from specdec_ext.cli import main
from specdec_ext.engine.ranks import make_team
from specdec_ext.llm import LLM
from specdec_ext.models.default import find_default_gguf
from specdec_ext.models.safetensors_file import SafetensorsFile
from specdec_ext.workflow.convert import ConvertOptions, convert
from specdec_ext.workflow.engine_folder import EngineFolder
from tensor_parallel import started_team
from tiny_models import as_phi3, save_tiny

Capture = pytest.CaptureFixture[str]
UNEVEN = {
    "hidden_size": 288, "intermediate_size": 160, "num_attention_heads": 9,
    "num_key_value_heads": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "uneven", **UNEVEN)


@pytest.fixture(scope="module")
def team() -> Any:
    with started_team(2) as started:
        yield started


def decode(model: Path, **how: Any) -> list[int]:
    with LLM(model, speculative_config=None, max_seq_len=96, **how) as llm:
        (output,) = llm.generate("abcabc", SamplingParams(max_tokens=12), use_tqdm=False)
    return list(output.outputs[0].token_ids)


def token_ids(model: Path, **how: Any) -> list[int]:
    """As decode(), of a model without a tokenizer."""
    prompt = {"prompt_token_ids": [5, 6, 7, 8, 5, 6, 7]}
    with LLM(model, speculative_config=None, max_seq_len=96, **how) as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=12), use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("how", [{}, {"dtype": "bfloat16"}, {"quantization": "int4"}])
def test_text_of_two_ranks(how: dict[str, Any], uneven: Path, team: Any, tmp_path: Path) -> None:
    folder = convert(uneven, tmp_path / "ckpt", ConvertOptions(tp_size=2, **how)).folder
    assert decode(folder, tensor_parallel_size=2) == decode(uneven, **how)


def test_blocks_of_a_gguf_file(uneven: Path, team: Any, tmp_path: Path) -> None:
    file = write_gguf(uneven, tmp_path / "model.gguf", "q8_0")
    folder = convert(file, tmp_path / "ckpt", ConvertOptions(tp_size=2)).folder
    assert decode(folder, tensor_parallel_size=2) == decode(file)


@pytest.mark.parametrize("name", ["awq-32", "int-quantized", "fp8-block"])
def test_words_of_a_quantised_checkpoint(name: str, team: Any, tmp_path: Path) -> None:
    source, _, _ = save_quantised(tmp_path, name)
    folder = convert(source, tmp_path / "ckpt", ConvertOptions(tp_size=2)).folder
    assert token_ids(folder, tensor_parallel_size=2) == token_ids(source)


@pytest.mark.parametrize("how", ["float32", "bfloat16", "int4", "q8_0", "awq-32", "part"])
def test_projections_in_one_matrix(how: str, team: Any, tmp_path: Path) -> None:
    """Each rank has its rows of each projection, in the decoder's order."""
    options = {"bfloat16": {"dtype": how}, "int4": {"quantization": how}}.get(how, {})
    if how == "awq-32":
        source, _, _ = save_quantised(tmp_path, how, fused=True)
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
        changes = {"rope_parameters": rope} if how == "part" else {}
        source = as_phi3(save_tiny(tmp_path / "tiny", **UNEVEN), **changes)
    if how == "q8_0":
        source = write_gguf(source, tmp_path / "model.gguf", how, architecture="phi3")
    folder = convert(source, tmp_path / "ckpt", ConvertOptions(tp_size=2, **options)).folder
    expected = token_ids(source, **options)
    assert token_ids(folder, tensor_parallel_size=2) == expected
    assert token_ids(source, tensor_parallel_size=2, **options) == expected


def test_a_mapping_reaches_every_rank(uneven: Path, team: Any) -> None:
    how: dict[str, Any] = {"method": "int4", "group_size": 96, "head": "keep"}
    expected = decode(uneven, quantization=how)
    assert decode(uneven, quantization=how, tensor_parallel_size=2) == expected


def test_a_tied_model_with_another_head(team: Any, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tied", **UNEVEN, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(3)
    tensors["lm_head.weight"] = torch.randn(table.shape, generator=generator) * 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    expected = decode(folder)
    assert decode(folder, tensor_parallel_size=2) == expected
    convert(folder, tmp_path / "two", ConvertOptions(tp_size=2))
    assert decode(tmp_path / "two", tensor_parallel_size=2) == expected


def test_a_rank_needs_its_own_shards_alone(uneven: Path, tmp_path: Path) -> None:
    """2 and 1 of 3 groups of heads; rows of every projection once; rank 1 has no embeddings."""
    folder = convert(uneven, tmp_path / "ckpt", ConvertOptions(tp_size=2)).folder
    whole = SafetensorsFile(uneven / "model.safetensors")
    ranks = [SafetensorsFile(folder / f"rank{r}" / "model-00001.safetensors") for r in range(2)]
    q = "model.layers.0.self_attn.q_proj.weight"
    assert [rank.about(q)[1][0] for rank in ranks] == [192, 96]
    for name in whole.names:
        rows = [rank.about(name)[1][0] for rank in ranks if name in rank.names]
        if "proj" in name:
            assert sum(rows) == whole.about(name)[1][0], name
    assert "model.embed_tokens.weight" not in ranks[1].names
    assert not (folder / "decoder.txt").exists()
    size = [sum(f.stat().st_size for f in (folder / f"rank{r}").iterdir()) for r in range(2)]
    assert sum(size) < 1.3 * (uneven / "model.safetensors").stat().st_size


def test_another_number_of_ranks(uneven: Path, tmp_path: Path) -> None:
    folder = convert(uneven, tmp_path / "ckpt", ConvertOptions(tp_size=2)).folder
    for size in (1, 3):
        with pytest.raises(
            ConfigError,
            match=rf"tp_size = 2, asked for tensor_parallel_size = {size}.*--tp_size 2.*"
            rf"again with --tp_size={size}",
        ):
            if size > 1:
                make_team(size, folder, "auto", ("cpu",) * size)
            LLM(folder, device="cpu")
    with pytest.raises(ConfigError, match="asked for tensor_parallel_size = 1"):
        convert(folder, tmp_path / "again", ConvertOptions())


@pytest.mark.parametrize("content", ["{", "[]", '{"tp_size": true}', '{"tp_size": 1}', "{}"])
def test_a_damaged_number_of_ranks(content: str, uneven: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(uneven, tmp_path / "model"))
    (folder / "ranks.json").write_text(content)
    with pytest.raises(ModelError, match=r"ranks\.json"):
        LLM(folder, device="cpu")


def test_missing_shards_of_a_rank(uneven: Path, team: Any, tmp_path: Path) -> None:
    folder = convert(uneven, tmp_path / "ckpt", ConvertOptions(tp_size=2)).folder
    shutil.rmtree(folder / "rank1")
    with pytest.raises(ModelError, match=r"rank 1 of 2: .*shards of rank 1 of 2 are missing"):
        decode(folder, tensor_parallel_size=2)


def test_ranks_that_would_have_nothing(uneven: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 K/V heads"):
        convert(uneven, tmp_path / "four", ConvertOptions(tp_size=4))
    with pytest.raises(ConfigError, match=r"tp_size = 0.*1\.\.64"):
        ConvertOptions(tp_size=0)
    assert not (tmp_path / "four").exists()


def test_a_family_that_is_not_native(tmp_path: Path) -> None:
    config = GPT2Config(
        n_embd=32,
        n_layer=1,
        n_head=2,
        vocab_size=50,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModelError, match="tp_size=2 needs a native family"):
        convert(tmp_path / "gpt2", tmp_path / "ckpt", ConvertOptions(tp_size=2))


def test_an_engine_of_two_ranks(uneven: Path, team: Any, tmp_path: Path, capsys: Capture) -> None:
    checkpoint, engine = tmp_path / "ckpt", tmp_path / "engine"
    command = ["convert", f"--model_dir={uneven}", f"--output_dir={checkpoint}", "--tp_size=2"]
    assert main(command) == 0
    command = ["build", f"--checkpoint_dir={checkpoint}", f"--output_dir={engine}"]
    assert main([*command, "--max_batch_size=2", "--max_seq_len=96"]) == 0
    assert "packed-1-of-2.bin" in capsys.readouterr().err
    plain = decode(uneven)
    opened = EngineFolder.open(engine)
    with opened.load() as llm:
        (output,) = llm.generate("abcabc", SamplingParams(max_tokens=12), use_tqdm=False)
        # Both ranks have mapped their own file, and no other.
        follower = team._processes[0].pid
        for rank, process in enumerate(("self", follower)):
            maps = Path(f"/proc/{process}/maps").read_text().splitlines()
            # What an earlier test of this process has open is not this engine's.
            mine = {Path(line.split()[-1]).name for line in maps if str(tmp_path) in line}
            assert mine == {f"packed-{rank}-of-2.bin"}
    assert list(output.outputs[0].token_ids) == plain
    run = ["generate", f"--engine_dir={engine}", "--input_text", "abcabc", "--json"]
    assert main([*run, "--tp_size=1"]) == 4
    said = capsys.readouterr().err
    assert "built with tp_size = 2, asked for tensor_parallel_size = 1" in said
    assert "convert the model with --tp_size=1" in said
    assert main([*run, "--max_output_len=12"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["token_ids"] == plain


# -- over Gloo ------------------------------------------------------------------------------------


def torchrun(*arguments: str) -> list[int]:
    """Two ranks that torchrun starts, each with the command line."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
         "-m", "specdec_ext", "generate", "--device", "cpu", "--max-tokens", "12",
         "--prompt", "abcabc", "--json", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout)["token_ids"])


@pytest.mark.slow
def test_gloo_on_a_tiny_model(uneven: Path, tmp_path: Path) -> None:
    folder = convert(uneven, tmp_path / "ckpt", ConvertOptions(tp_size=2)).folder
    assert torchrun(f"--model={folder}", "--no-speculation") == decode(uneven)
    engine = tmp_path / "engine"
    command = ["build", f"--checkpoint_dir={folder}", f"--output_dir={engine}"]
    assert main([*command, "--max_batch_size=2", "--max_seq_len=96"]) == 0
    assert torchrun(f"--engine_dir={engine}") == decode(uneven)


@pytest.mark.slow
@pytest.mark.default_model
def test_gloo_on_the_default_model(tmp_path: Path) -> None:
    """9 and 3 heads on two ranks, 4-bit blocks of a GGUF file in shards of their own."""
    file = find_default_gguf()
    folder = convert(file, tmp_path / "ckpt", ConvertOptions(tp_size=2)).folder
    assert torchrun(f"--model={folder}", "--no-speculation") == decode(file)

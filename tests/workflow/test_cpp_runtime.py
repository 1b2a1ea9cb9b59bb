"""The C++ runtime as a wheel installs it: examples/cpp built by CMake's package, its text that of
the Python engine, its refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import packaging_tools as tools
import specdec_ext
from gguf_files import write_gguf
from specdec_ext import LLM, SamplingParams
from specdec_ext.models.decoder_file import DECODER_FILE, ROPE_FILE
from specdec_ext.workflow.convert import ConvertOptions, convert
from tiny_models import as_phi3, save_llama, save_tiny

EXAMPLE = tools.ROOT / "examples" / "cpp"
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def cmake(*arguments: str | Path) -> None:
    path = f"{tools.BIN}{os.pathsep}{os.environ['PATH']}"
    tools.run("cmake", *arguments, env={**os.environ, "PATH": path})


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built as its first lines say."""
    build = tmp_path_factory.mktemp("example")
    cmake("-S", EXAMPLE, "-B", build, "-G", "Ninja", f"-Dspecdec_DIR={specdec_ext.cmake_dir()}")
    cmake("--build", build)
    return build / "generate"


def run(program: Path, *arguments: Any, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, arguments)]
    env = {"SPECDEC_NUM_THREADS": "1", "PATH": "/nonexistent"}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=env)


def model(kind: str, folder: Path) -> tuple[Path, ConvertOptions]:
    if kind == "gguf":
        path = write_gguf(save_tiny(folder / "tiny"), folder / "tiny.gguf", "q8_0")
        return path, ConvertOptions()
    overrides: dict[str, Any] = {"tie_word_embeddings": kind == "tied"}
    if kind == "llama3 rope":
        overrides["rope_scaling"] = {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }  # fmt: skip
    options = {
        "bfloat16": ConvertOptions(dtype="bfloat16"),
        "int8": ConvertOptions(quantization="int8"),
    }
    if kind == "phi3":
        return as_phi3(save_llama(folder / "tiny", 3, 97)), ConvertOptions(quantization="int8")
    return save_llama(folder / "tiny", 3, 97, **overrides), options.get(kind, ConvertOptions())


@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", "int8", "tied", "llama3 rope", "gguf", "phi3"]
)
def test_the_text_is_that_of_the_python_engine(program: Path, kind: str, tmp_path: Path) -> None:
    """Plain and with drafts, and as many of these are accepted."""
    source, options = model(kind, tmp_path)
    folder = convert(source, tmp_path / "converted", options).folder
    config = {"method": "ngram", "max_draft_len": 6, "max_matching_ngram_size": 2,
              "adaptive": False}  # fmt: skip
    with LLM(str(folder), tokenizer=None, speculative_config=config, max_seq_len=128) as llm:
        params = SamplingParams(max_tokens=60, detokenize=False)
        [want] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    tokens = want.outputs[0].token_ids
    spec = want.metrics["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] > 0
    drafted = run(program, folder, 60, 6, 2, *PROMPT)
    assert drafted.returncode == 0, drafted.stderr
    assert list(map(int, drafted.stdout.split())) == tokens
    passes = want.metrics["num_forward_passes"]
    accepted = spec["num_accepted_draft_tokens"]
    assert drafted.stderr == f"{passes} passes, {accepted} drafts accepted\n"
    plain = run(program, folder, 60, 0, 1, stdin=" ".join(map(str, PROMPT)))
    assert list(map(int, plain.stdout.split())) == tokens
    assert plain.stderr == f"{len(tokens)} passes, 0 drafts accepted\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    target = tmp_path_factory.mktemp("converted") / "ckpt"
    return convert(source, target, ConvertOptions()).folder


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    return target


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("specdec-decoder 1", "specdec-decoder 2", "expected 'specdec-decoder 1'"),
        ("num_heads", "number_of_heads", r"'number_of_heads' is no field of this version"),
        ("num_heads 4", "num_heads four", "'four' is no whole number"),
        ("num_layers 2", "num_layers", "a word is missing"),
        ("num_layers 2", "num_layers 3", "rope_index"),
        ("tensor model.norm.weight", "tensor model.other.weight", "'model.norm.weight' is missing"),
        (" model-00001.safetensors ", " ../model.safetensors ", "is no name of a file in this"),
        (" model-00001.safetensors ", " model-00009.safetensors ", "No such file"),
        ("activation silu", "activation relu", "silu and gelu_tanh are known"),
        ("kv_dtype float32", "kv_dtype float8", "float32, float16 and bfloat16"),
        ("tensor model.embed_tokens.weight float32", "tensor model.embed_tokens.weight q9_9",
         "q9_9"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_message(
    program: Path, folder: Path, old: str, new: str, words: str, tmp_path: Path
) -> None:
    damaged = copy_of(folder, tmp_path / "damaged")
    replace(damaged / DECODER_FILE, old, new)
    done = run(program, damaged, 4, 2, 2, 1, 2)
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert done.stderr.startswith("generate: ") and done.stderr.count("\n") == 1


def test_files_that_are_cut_short(program: Path, folder: Path, tmp_path: Path) -> None:
    for name in (ROPE_FILE, "model-00001.safetensors"):
        damaged = copy_of(folder, tmp_path / f"cut {name}")
        data = (folder / name).read_bytes()
        (damaged / name).unlink()
        (damaged / name).write_bytes(data[: len(data) // 2])
        done = run(program, damaged, 4, 2, 2, 1, 2)
        assert done.returncode == 1 and "are not in its file" in done.stderr


def test_refusals_of_the_program(program: Path, folder: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ([], "usage: generate FOLDER"),
        ([tmp_path, 4, 2, 2, 1], "decoder.txt: cannot be opened; give a folder that"),
        ([folder, 4, 2, 2, 100000], "prompt_token_ids holds token id 100000"),
        ([folder, 4, 2, 2], "prompt_token_ids is empty"),
    ):
        done = run(program, *arguments)
        assert done.returncode == 1 and words in done.stderr, done.stderr


def test_a_family_that_is_not_native_has_no_such_file(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    source = tmp_path / "gpt2"
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).save_pretrained(source)
    made = convert(source, tmp_path / "out", ConvertOptions()).folder
    assert not (made / DECODER_FILE).exists() and not (made / ROPE_FILE).exists()


def test_every_public_header_stands_alone(tmp_path: Path) -> None:
    """Without any other header, as installed; they are those of cpp/include/specdec."""
    installed = Path(specdec_ext.include_dir())
    names = sorted(file.name for file in (installed / "specdec").glob("*.h"))
    source = tools.ROOT / "cpp" / "include" / "specdec"
    assert names == sorted(file.name for file in source.glob("*.h")) and len(names) == 6
    for name in names:
        assert (installed / "specdec" / name).read_text() == (source / name).read_text()
        unit = tmp_path / f"{name}.cc"
        unit.write_text(f"#include <specdec/{name}>\n")
        tools.run(
            "c++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
            "-Wno-unknown-pragmas", f"-I{installed}", f"-I{installed}/specdec/core", unit,
        )  # fmt: skip


def test_the_package_is_refused_for_another_version(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(x LANGUAGES CXX)\n"
        "find_package(specdec 99 CONFIG REQUIRED)\n"
    )
    path = f"{tools.BIN}{os.pathsep}{os.environ['PATH']}"
    done = tools.run(
        "cmake", "-S", tmp_path, "-B", tmp_path / "b", "-G", "Ninja",
        f"-Dspecdec_DIR={specdec_ext.cmake_dir()}",
        env={**os.environ, "PATH": path}, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and specdec_ext.__version__ in done.stderr


def test_it_starts_no_python(program: Path) -> None:
    linked = tools.run("ldd", program).stdout
    assert "python" not in linked and "torch" not in linked
    assert sys.executable not in program.read_bytes().decode("latin-1")

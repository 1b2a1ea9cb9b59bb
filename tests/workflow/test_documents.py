"""The commands of TensorRT-LLM's documents: docs/from_tensorrt_llm.md has each of them with the
program's name alone changed, and each runs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents_commands import COMMANDS, PROGRAMS

from docs_pages import ROOT, fences
from engine.medusa_models import save_heads
from model.redrafter_cases import random_drafter
from specdec_ext import LLM, SamplingParams
from specdec_ext.cli import _make_parser, main
from specdec_ext.cli.common import llm_kwargs, normalize_argv
from specdec_ext.workflow.fetched_file import FetchedFile
from specdec_ext.workflow.summarize import ENDING
from tiny_models import save_tiny

PAGE = (ROOT / "docs" / "from_tensorrt_llm.md").read_text()
BLOCKS = [text for language, text in fences(PAGE) if language == "sh"]
ARTICLES = (
    "The cat sat on the mat. It sat there for a long time.",
    "One two three. One two three.",
)

# The shell expands the page's words; `specdec` prints them instead of running.
SHELL = """
specdec() { printf '%s\\n' __command__ "$@"; }
python() { printf '%s\\n' __python__ "$@"; }
"""


def commands_of(block: str, where: Path, variables: dict[str, str]) -> list[list[str]]:
    """The words of each command of a block, as the shell gives them to the program."""
    done = subprocess.run(
        ["bash", "-euc", SHELL + block],
        capture_output=True,
        text=True,
        cwd=where,
        env={"PATH": os.environ["PATH"], **variables},
    )
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = []
    for line in done.stdout.splitlines():
        if line in ("__command__", "__python__"):
            found.append(["specdec"] if line == "__command__" else ["python"])
        else:
            found[-1].append(line)
    return found


def words(command: str) -> list[str]:
    return command.replace("\\\n", " ").split()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_has_the_documents_command(name: str) -> None:
    """With the program's name changed and a model's path in the place of its description."""
    theirs = COMMANDS[name].replace("\\\n", " ")
    for program, ours in PROGRAMS.items():
        theirs = theirs.replace(program, ours)
    for label in ("<Path To Llama-v2-13B repo>", "<Path To Llama-v2-7B repo>"):
        theirs = theirs.replace(label, "$MODEL_DIR")
    assert " ".join(words(theirs)) in " ".join(words(PAGE)), theirs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of the page: a target, a draft model, heads."""
    root = tmp_path_factory.mktemp("documents")
    model = save_tiny(root / "vicuna", max_position_embeddings=8192)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    (root / "work").mkdir()
    return {
        "MODEL_DIR": str(model),
        "ENGINE_DIR": "tmp/engine",
        "CKPT_DIR": "tmp/engine/ckpt",
        "DRAFT_MODEL_PATH": str(
            save_tiny(root / "draft", max_position_embeddings=8192, num_hidden_layers=1)
        ),
        "TARGET_MODEL_PATH": str(model),
        "MEDUSA_DIR": str(save_heads(root / "medusa", vocab=vocab)),
        "REDRAFTER_DIR": str(random_drafter(root / "redrafter", "apple", 32, vocab)),
    }


@pytest.fixture
def papers(world: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of the fetched papers: their summaries are what the model writes."""
    with LLM(world["MODEL_DIR"], dtype="float16") as llm:
        prompts = [text + ENDING.rstrip() for text in ARTICLES]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=100), use_tqdm=False)
    path = tmp_path / "papers.jsonl"
    rows: list[dict[str, Any]] = [
        {"id": f"paper-{i}", "sentences": {"abstract": [text]},
         "summary": {"outcome": output.outputs[0].text}}
        for i, (text, output) in enumerate(zip(ARTICLES, outputs, strict=True))
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(FetchedFile, "path", lambda self: path)
    return path


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_every_command_of_the_page_runs(
    index: int,
    world: dict[str, str],
    papers: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = commands_of(BLOCKS[index], tmp_path, world)
    assert commands
    monkeypatch.chdir(tmp_path)
    for command in commands:
        if command[0] == "python":  # with the default model, in tests/test_docs_code.py
            command = [str(ROOT / command[1]), *command[2:], "--model_dir", world["MODEL_DIR"]]
            done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert "=== 1/4" in done.stdout and "tok/pass" in done.stderr
        elif command[1] == "serve":  # what it would load; serving is tested in tests/serve
            args: argparse.Namespace = _make_parser().parse_args(normalize_argv(command[1:]))
            kwargs = llm_kwargs(args)
            assert kwargs["scheduler_config"].max_seq_len == 3072
            assert kwargs["speculative_config"].method == "draft_target"
        else:
            code = main(command[1:])
            said = capsys.readouterr()
            assert code == 0, (command, said.err)
            assert said.out.strip(), command
            if command[1] == "summarize":
                assert "identical: 2 of 2" in said.out
                assert "transformers" in said.out and "times the speed" in said.out


def test_a_threshold_that_is_not_met(
    world: dict[str, str], papers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["summarize", "--test_specdec", f"--hf_model_dir={world['MODEL_DIR']}"]
    command += ["--data_type=fp16", "--check_accuracy", "--prompt_lookup_config=[4,2]"]
    assert main(command) == 0
    assert "rouge1 = 100.00 is above the threshold 15" in capsys.readouterr().out
    assert main([*command, "--tensorrt_llm_rouge1_threshold=100"]) == 1
    assert "rouge1 = 100.00 is not above the threshold 100" in capsys.readouterr().err

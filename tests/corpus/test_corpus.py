"""2,000 requests as commit cebcf29 answered them: today's tokens and finish reasons are the same.

The whole corpus on tiny models runs in seconds; the built-in model and the other instruction sets
are slow. README.md says how a recording is made.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import corpus_groups
import corpus_models
import corpus_replay
import pytest

GROUPS = corpus_groups.all_groups()
SETS = ("avx2", "avx512", "avx512_bf16")  # recorded ones, ascending
# A set that came later, and the recorded one of which it differs in products of bfloat16 alone.
LATER = {"amx": "avx512_bf16"}
QUICK_DEFAULT = "default-lookahead-bfloat16"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return corpus_models.write_models(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def recording() -> tuple[dict[str, Any], dict[str, Any]]:
    isa = corpus_replay.instruction_set()
    isa = LATER.get(isa, isa)
    path = corpus_replay.DATA / f"{isa}.json.gz"
    if not path.is_file():
        pytest.skip(f"no recording for instruction set {isa}: {', '.join(SETS)} are recorded")
    return corpus_replay.read(path)


def check(group: corpus_groups.Group, folders: dict[str, Path], recording: Any) -> None:
    isa = corpus_replay.instruction_set()
    if isa in LATER and group.dtype == "bfloat16":
        pytest.skip(f"no recording of bfloat16 for instruction set {isa}")
    answers, metrics = corpus_replay.replay(group, folders, {})
    assert corpus_replay.differences(group, answers, recording[0][group.name]) == []
    # Plain decoding has the same texts: a method that silently does not draft must not pass.
    accepted = metrics["speculative_decoding"]["num_accepted_draft_tokens"]
    assert (accepted > 0) == group.drafts


def test_recording_is_of_these_requests(recording: tuple[Any, dict[str, Any]]) -> None:
    """Else nothing below means anything: whoever changes a request records it again at cebcf29."""
    answers, about = recording
    assert about["definitions"] == corpus_replay.definitions(GROUPS)
    assert (about["commit"], about["requests"]) == ("cebcf29", 2000)
    assert {name: len(a) for name, a in answers.items()} == {
        g.name: len(g.requests) for g in GROUPS
    }


@pytest.mark.parametrize("group", [g for g in GROUPS if g.model != "default"], ids=lambda g: g.name)
def test_tiny_models(group: corpus_groups.Group, folders: Any, recording: Any) -> None:
    check(group, folders, recording)


@pytest.mark.default_model
@pytest.mark.parametrize(
    "group",
    [
        pytest.param(g, id=g.name, marks=[] if g.name == QUICK_DEFAULT else [pytest.mark.slow])
        for g in GROUPS
        if g.model == "default"
    ],
)
def test_built_in_model(
    group: corpus_groups.Group, default_model_path: Path, recording: Any
) -> None:
    check(group, {"default": default_model_path}, recording)


@pytest.mark.slow
@pytest.mark.parametrize("isa", SETS)
def test_other_instruction_sets(isa: str) -> None:
    """The narrower sets of this machine, by a process of their own."""
    own, known = corpus_replay.instruction_set(), (*SETS, *LATER)
    if own not in known or known.index(isa) >= known.index(own):
        pytest.skip(f"this machine's instruction set is {own}: {isa} is not narrower")
    result = subprocess.run(
        [sys.executable, str(Path(corpus_replay.__file__).with_name("record.py")), "--check"],
        env={**os.environ, "SPECDEC_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr

"""The CPU's attention on the instruction sets that this machine would not choose.

A process reads its instruction set once, so each gets one of its own, for all of these files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_ext import _core

HERE = Path(__file__).parent
FILES = ("test_spec_attention.py", "test_narrow_kv.py", "test_sink_tokens.py")


def run(isa: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "SPECDEC_CPU_ISA": isa},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )


# What the instruction set's own code does: bits of any number of rows, trees, head sizes, 8 bits.
MOST = (
    "every_row_has_the_bits or tree_shapes or head_dims or prefill_chunks or large_scores "
    "or every_code or not_finite or test_eight_bits"
)


@pytest.mark.parametrize("isa", ["plain", "avx2"])
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(MOST, id="most"),
        pytest.param("not long_context", id="all", marks=pytest.mark.slow),
    ],
)
def test_the_attention_tests_pass(isa: str, chosen: str) -> None:
    asked = run(isa, "-c", "from specdec_ext import _core; print(_core.cpu_isa())")
    assert asked.returncode == 0, asked.stderr[-2000:]
    if (ran := asked.stdout.strip()) != isa:
        pytest.skip(f"this machine has no {isa}: {ran}")
    if isa == _core.cpu_isa():
        pytest.skip(f"{isa} is what these files run on here by themselves")
    run_tests(isa, chosen, *FILES)


def test_fast_attention_without_tiles() -> None:
    """Dot products of pairs, on a machine that would choose tiles."""
    if _core.cpu_isa() != "amx":
        pytest.skip("it is what this machine chooses, or does not have")
    run_tests("avx512_bf16", "", "test_fast_attention.py")


def run_tests(isa: str, chosen: str, *files: str) -> None:
    options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "-k", chosen)
    done = run(isa, "-m", "pytest", *options, *(HERE / name for name in files))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

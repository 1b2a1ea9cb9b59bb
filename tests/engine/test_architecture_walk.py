"""The walk of docs/architecture.md is the way that a request takes, on the host and on a stream."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from specdec_ext import LLM, NGramDecodingConfig, SamplingParams
from test_docs import HOP, ROOT
from tiny_models import save_tiny


def walk() -> list[tuple[int, str, str]]:
    """(hop, file, name) of every Python function that the page's table names."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.MULTILINE)
    return [
        (int(number), file, name)
        for number, places in rows
        for file, name in HOP.findall(places)
        if file.endswith(".py")
    ]


def code_of(file: str, name: str) -> CodeType:
    found: Any = importlib.import_module("specdec_ext." + file[:-3].replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    if isinstance(found, type):
        found = found.__init__  # type: ignore[misc]
    code: CodeType = getattr(found, "__wrapped__", found).__code__
    return code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("depth", ["auto", 1])
def test_a_request_takes_the_hops_of_the_page_in_their_order(
    folder: Path, on_stream: None, depth: int | str
) -> None:
    hops = {code_of(file, name): (number, name) for number, file, name in walk()}
    met: dict[CodeType, None] = {}

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in hops:
            met.setdefault(frame.f_code)

    # Fixed lengths: on a stream an adaptive engine times the model before its first step.
    spec = NGramDecodingConfig(adaptive=False)
    scheduler = {"overlap_depth": depth, "max_seq_len": 64}
    with LLM(folder, speculative_config=spec, scheduler_config=scheduler) as llm:
        sys.setprofile(watch)
        try:
            llm.generate("abcabcabc", SamplingParams(max_tokens=8), use_tqdm=False)
        finally:
            sys.setprofile(None)
    numbers = [hops[code][0] for code in met]
    assert numbers == sorted(numbers), [hops[code] for code in met]
    # Every hop that has a place in Python; where it has two, the one of this depth.
    wanted = {
        number
        for number, name in hops.values()
        if not name.startswith("StepOperations") or depth != "auto"
    }
    assert {*numbers} == wanted

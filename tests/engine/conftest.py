"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from method_cases import GREEDY, SAMPLED, Folders, open_llm, save_models, texts_of
from preemption_cases import results_alone

from specdec_ext.engine import build
from specdec_ext.engine.overlap.worker import Worker


@pytest.fixture
def on_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, too, steps are enqueued on a stream where overlap_depth is a number: the row of
    operations that a device runs, one after another over the CPU's buffers."""

    def asked(builder: Any) -> bool:
        return builder._options.scheduler_config.overlap_depth != "auto"

    monkeypatch.setattr(build.EngineBuilder, "_on_stream", property(asked))
    # In the calling thread, where a recorder of torch's operations sees them.
    monkeypatch.setattr(Worker, "run", lambda self, call: call())


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """See method_cases.py."""
    return save_models(Path(tmp_path_factory.mktemp("methods")))


@pytest.fixture(scope="session")
def plain_texts(models: Folders) -> dict[str, list[list[int]]]:
    """Texts of method_cases.PROMPTS, without drafts."""
    with open_llm(models, None) as llm:
        return {"greedy": texts_of(llm, GREEDY), "sampled": texts_of(llm, SAMPLED)}


@pytest.fixture(scope="session")
def alone(models: Folders) -> Callable[[str], list[Any]]:
    """By device: what each of preemption_cases' requests gives alone."""
    return results_alone(models)

"""Ranks for tests: one team of two serves one LLM after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specdec_ext import _core, llm
from specdec_ext.parallel.team import Team, lead


@contextmanager
def started_team(size: int = 2) -> Iterator[Team]:
    """Every LLM(tensor_parallel_size=size) that is made inside gets this team."""
    threads = _core.num_threads()
    team = lead(size)
    team.outlives = True

    def make_team(size: int, model: Path, model_impl: str, devices: tuple[str, ...]) -> Team:
        team.devices = devices
        return team

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(llm, "make_team", make_team)
        try:
            yield team
        finally:
            team.close()
            _core.set_num_threads(threads)
    assert all(process.poll() is not None for process in team._processes)

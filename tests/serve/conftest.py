"""One tiny model for the tests of the server, and ways to reach it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import NAME, Gate, LiveServer, make_app, make_llm, wait_until
from starlette.testclient import TestClient

from browsers import browser as browser
from specdec_ext import LLM
from tiny_models import save_tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("serve") / NAME)


@pytest.fixture(scope="session")
def llm(tiny_path: Path) -> Iterator[LLM]:
    with make_llm(tiny_path) as made:
        yield made


@pytest.fixture(scope="session")
def client(llm: LLM) -> TestClient:
    """A client of an application that answers errors as a server would."""
    return TestClient(make_app(llm), raise_server_exceptions=False)


@pytest.fixture
def gate(llm: LLM) -> Iterator[Gate]:
    made = Gate(llm)
    yield made
    made.remove()
    wait_until(lambda: llm.engine.num_unfinished == 0)


@pytest.fixture(scope="module")
def live(llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(make_app(llm)) as server:
        yield server

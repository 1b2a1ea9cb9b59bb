"""Shared settings. This file also makes tests/ importable: `from reference import ...`."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import hypothesis
import pytest

# Before torch is imported. Spinning OpenMP threads starve the others on a small machine; no test
# may reach for the network.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell without job control has what it runs in the background ignore Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a failure is a bug, never bad luck.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")


def pytest_collection_finish() -> None:
    """What importing and collecting made stays to the end: a million objects that the garbage
    collector need not look through again during every test."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Emulated devices are required under `make emu-test`; else their lack skips."""
    if item.get_closest_marker("emulated") and os.environ.get("SPECDEC_REQUIRE_EMU") != "1":
        from emulators import MISSING

        if MISSING:
            pytest.skip(MISSING)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The built-in default model's folder. Required under `make test`, else its lack skips."""
    from specdec_ext import default_model
    from specdec_ext.errors import ModelError

    try:
        return Path(default_model())
    except ModelError as error:
        if os.environ.get("SPECDEC_REQUIRE_MODEL") == "1":
            raise
        pytest.skip(f"the default model is not installed: {error}")


@pytest.fixture(scope="session", autouse=True)
def _own_step_costs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Engines of tests remember T(rows) among themselves, not for the user."""
    from specdec_ext.engine import served_cost

    folder = tmp_path_factory.mktemp("cache")
    served_cost.cache_root = lambda: folder

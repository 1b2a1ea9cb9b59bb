"""A Chromium of the system, driven by the playwright package: for tests that open pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For one file: while it is open its event loop is in the way of others."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the playwright package is not installed"
    )
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield made
        made.close()

"""Hashes that are remembered: a file that changes is read again, through a link, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_ext.models import folder_cache


def test_what_a_link_leads_to_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_cache, "cache_root", lambda: tmp_path / "cache")
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("before")
    link.symlink_to(file)
    before = folder_cache.remembered_sha256(link)
    assert folder_cache.remembered_sha256(link) == before == folder_cache.remembered_sha256(file)
    file.write_text("afterwards")
    assert folder_cache.remembered_sha256(link) == folder_cache.file_sha256(file) != before

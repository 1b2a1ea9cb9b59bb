"""`specdec serve`: what cannot work is said before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec_ext.bench.machine import _without_keys
from specdec_ext.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "99999"], "--port = 99999"),
        (["--port", "-1"], "--port = -1"),
        (["--ssl-keyfile", "nothing", "--ssl-certfile", "nothing"], "--ssl-keyfile nothing"),
        (
            ["--uds", "nowhere/at/all/socket"],
            "--uds nowhere/at/all/socket: there is no such folder",
        ),
    ],
)
def test_places_that_cannot_be(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code = main(["serve", "/no/such/model", *words])
    assert code != 0 and said in capsys.readouterr().err


def test_tls_has_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key.pem"
    key.write_text("a key")
    assert main(["serve", "/no/such/model", "--ssl-keyfile", str(key)]) == 2
    assert "go together" in capsys.readouterr().err


def test_keys_of_the_environment_that_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDEC_API_KEYS", " , ")
    assert main(["serve", "/no/such/model"]) != 0
    assert "holds no key" in capsys.readouterr().err


def test_reports_show_no_key() -> None:
    words = ["bench", "serve", "--api-key", "secret", "--api-key=secret", "--model", "m"]
    assert _without_keys(words) == [
        "bench", "serve", "--api-key", "...", "--api-key=...", "--model", "m",
    ]  # fmt: skip

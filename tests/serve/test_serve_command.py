"""`specdec serve`: what cannot work is said before a model is loaded."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from specdec_ext.bench.machine import _without_keys
from specdec_ext.cli import main
from specdec_ext.cli.serve import _keys
from specdec_ext.errors import ConfigError
from specdec_ext.serve.address import check_address, check_socket_path
from specdec_ext.serve.server import run_server


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


def test_addresses_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["serve", "/no/such/model"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = f"--port {port}: another process listens on 127.0.0.1:{port}; end it, or choose"
        for more in ([], ["--replicas", "2"]):
            assert main([*command, "--port", str(port), *more]) == 4
            assert said in capsys.readouterr().err
        module = [sys.executable, "-m", "specdec_ext.serve.address", "127.0.0.1", str(port)]
        busy = subprocess.run(module, capture_output=True, text=True)
        assert busy.returncode == 4 and said in busy.stderr
    assert subprocess.run(module).returncode == 0
    assert main([*command, "--host", "192.0.2.1"]) == 4
    assert "--host 192.0.2.1: this machine has no such address" in capsys.readouterr().err


def test_sockets_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # paths of Unix sockets must be short
    Path("file").write_text("")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind("mine")
        taken.listen()
        for path, said in (
            ("mine", "another process listens there"),
            ("file", "exists and is no socket"),
            ("x" * 200, "too long; choose another path"),
        ):
            assert main(["serve", "/no/such/model", "--uds", path]) == 4
            assert f"--uds {path}: " in (err := capsys.readouterr().err) and said in err
    for path in ("mine", "free"):  # one that nobody listens on any more, and none
        check_socket_path(path)


def test_an_address_that_was_taken_meanwhile(capsys: pytest.CaptureFixture[str]) -> None:
    settings = SimpleNamespace(drain_seconds=0)
    bridge = SimpleNamespace(drain=lambda: None)
    app = FastAPI()
    app.state.serving = SimpleNamespace(settings=settings, bridge=bridge)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"could not listen on 127.0.0.1:{port}"):
            run_server(app, host="127.0.0.1", port=port)


def test_tls_has_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key.pem"
    key.write_text("a key")
    assert main(["serve", "/no/such/model", "--ssl-keyfile", str(key)]) == 2
    assert "go together" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["", " , "])
def test_keys_of_the_environment_that_are_none(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDEC_API_KEYS", value)
    assert main(["serve", "/no/such/model"]) == 4
    assert f"$SPECDEC_API_KEYS = {value!r} holds no key" in capsys.readouterr().err


def test_a_file_of_keys_from_an_editor_that_marks_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key\nsecond-key\n", encoding="utf-8-sig")
    assert _keys(argparse.Namespace(api_key=None, api_key_file=str(file))) == [
        "first-key", "second-key",
    ]  # fmt: skip


def test_reports_show_no_key() -> None:
    words = ["bench", "serve", "--api-key", "secret", "--api-key=secret", "--model", "m"]
    assert _without_keys(words) == [
        "bench", "serve", "--api-key", "...", "--api-key=...", "--model", "m",
    ]  # fmt: skip


def test_an_address_of_a_family_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may stand for several addresses; those of the others suffice."""
    stream = (socket.SOCK_STREAM, 0, "")
    here = (socket.AF_INET, *stream, ("127.0.0.1", 0))
    other = (12345, *stream, ("::1", 0, 0, 0))
    for found, fits in (([other, here], True), ([here, other], True), ([other], False)):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        if fits:
            check_address("somewhere", 0)
        else:
            with pytest.raises(ConfigError, match="--host somewhere --port 0: "):
                check_address("somewhere", 0)

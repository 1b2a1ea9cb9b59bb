"""The repository of examples/triton in a real Triton: its binaries are in the PyPI package
nvidia-pytriton. SPECDEC_TRITON_PYTHON names the Python of an environment that has it and this
package; without, the tests are skipped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from triton_cases import TRITON, make_repository, save_models

PYTHON = os.environ.get("SPECDEC_TRITON_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="SPECDEC_TRITON_PYTHON names no environment of Triton"),
]
ENTRIES = [
    {"input": f"to be or {i}", "instruction": "Continue:", "output": " " * 24} for i in range(4)
]


@dataclass(frozen=True)
class Triton:
    http: str
    grpc: str

    def run(self, script: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [PYTHON, script, *words]
        return subprocess.run(command, capture_output=True, text=True)

    def client(self, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """The document's script with its options."""
        dataset = folder / "input_data.json"
        dataset.write_text(json.dumps(ENTRIES))
        return self.run(
            str(TRITON / "speculative_decoding_test.py"), "--max-input-len", "200",
            f"--dataset={dataset}", f"--url-target={self.grpc}", f"--url-draft={self.grpc}",
            "--draft-tensorrt-llm-model-name=specdec_draft",
            "--target-tensorrt-llm-model-name=specdec",
            "--bls-speculative-tensorrt-llm-model-name=specdec_bls", "--num-draft-tokens=4",
            "--verbose", *words,
        )  # fmt: skip


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module", params=["true", "false"], ids=["decoupled", "whole"])
def triton(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Triton]:
    root = tmp_path_factory.mktemp("triton")
    repository = make_repository(
        root / "repository", *save_models(root), PYTHON, decoupled_mode=request.param
    )
    http, grpc, metrics = free_ports(3)
    command = [
        PYTHON, str(TRITON / "launch_triton_server.py"), f"--model_repo={repository}",
        f"--http_port={http}", f"--grpc_port={grpc}", f"--metrics_port={metrics}",
    ]  # fmt: skip
    log = (root / "log.txt").open("w+")
    server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while not is_ready(f"http://127.0.0.1:{http}"):
            assert server.poll() is None, (root / "log.txt").read_text()[-4000:]
            time.sleep(0.2)
        yield Triton(f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}")
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait()
        log.close()
    assert code == 0
    assert "is not healthy" not in (root / "log.txt").read_text()


@pytest.mark.parametrize(
    "mode",
    [[], ["--execute-bls-speculative-decoding"], ["--bls", "--stream"]],
    ids=["loop", "bls", "stream"],
)
def test_the_documents_client(triton: Triton, tmp_path: Path, mode: list[str]) -> None:
    done = triton.client(tmp_path, *mode)
    assert done.returncode == 0, done.stderr
    assert "identical: 4 of 4" in done.stdout and "DIFFERENT" not in done.stdout
    assert done.stdout.count("prompt: 'Continue: to be or") == 4


def test_prompts_that_are_too_long_are_left_out(triton: Triton, tmp_path: Path) -> None:
    done = triton.client(tmp_path, "--max-input-len", "3")
    assert done.returncode == 0 and done.stdout.count("left out") == 4


def test_http_asks_the_ensemble(triton: Triton) -> None:
    """A model that is not decoupled answers plain HTTP; a decoupled one says that it cannot."""
    body = {"inputs": [tensor("text_input", "BYTES", "abcabc"), tensor("max_tokens", "INT32", 6)]}
    code, answer = post(f"{triton.http}/v2/models/ensemble/infer", body)
    if code == 200:
        outputs = {one["name"]: one["data"] for one in answer["outputs"]}
        assert outputs["text_output"][0]
        assert json.loads(outputs["report"][0])["finish_reason"] == "length"
    else:
        assert "decoupled" in answer["error"]


def test_errors_say_what_is_wrong_and_others_go_on(triton: Triton, tmp_path: Path) -> None:
    done = triton.client(tmp_path, "--num-draft-tokens=200", "--bls")
    assert done.returncode == 1 and "num_draft_tokens = 200" in done.stderr
    done = triton.client(tmp_path, "--target-model-name=nobody")
    assert done.returncode == 1 and "nobody" in done.stderr
    assert triton.client(tmp_path, "--bls").returncode == 0


def tensor(name: str, kind: str, value: Any) -> dict[str, Any]:
    return {"name": name, "datatype": kind, "shape": [1, 1], "data": [value]}


def post(url: str, body: Any) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())

"""Two replicas on Ray Serve, and one that is killed while it answers. Needs Ray: in this Python, or
in that of SPECDEC_RAY_PYTHON, whose environment has this package too."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_triton_live import free_ports

from specdec_ext import LLM, SamplingParams
from tiny_models import save_tiny

PYTHON = os.environ.get("SPECDEC_RAY_PYTHON", "") or (
    sys.executable if importlib.util.find_spec("ray") else ""
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="no Ray here, and SPECDEC_RAY_PYTHON names none"),
]
LONG = 6000
REPLICA = "ray::ServeReplica:specdec:replica"


class Service:
    """`specdec serve --replicas 2` in processes of its own, all of which carry a mark."""

    def __init__(self, model: Path, log: Path, *scaling: str) -> None:
        self.mark = f"SPECDEC_TEST_MARK={secrets.token_hex(8)}"
        self.log = log
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        # Paths of Unix sockets must be short.
        self.folder = tempfile.mkdtemp(prefix="ray")
        name, _, value = self.mark.partition("=")
        command = [
            PYTHON, "-m", "specdec_ext", "serve", "--model", str(model), "--no-speculation",
            "--served-model-name", "tiny", "--max-tokens-in-paged-kv-cache", "65536",
            "--port", str(port), *(scaling or ("--replicas", "2")),
        ]  # fmt: skip
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file,
                env={**os.environ, name: value, "RAY_TMPDIR": self.folder},
            )  # fmt: skip

    def wait_until_ready(self) -> None:
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/ready"):
                return
            time.sleep(0.2)

    def processes(self, name: str = "") -> dict[int, str]:
        """Those that carry the mark: process id, command line."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and self.mark.encode() in (
                    folder / "environ"
                ).read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(folder.name)] = command
        return {pid: command for pid, command in found.items() if command.startswith(name)}

    def post(self, body: dict[str, Any]) -> Any:
        data = json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", data, headers)
        return urllib.request.urlopen(request)

    def text(self, prompt: str) -> str:
        with self.post({"prompt": prompt, "max_tokens": 16}) as answer:
            text: str = json.loads(answer.read())["choices"][0]["text"]
            return text

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        return code


class Stream(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, service: Service, prompt: str, tokens: int = LONG) -> None:
        super().__init__(daemon=True)
        self.service, self.prompt, self.tokens = service, prompt, tokens
        self.begun = threading.Event()
        self.events: list[str] = []

    def run(self) -> None:
        body = {"prompt": self.prompt, "max_tokens": self.tokens, "stream": True,
                "ignore_eos": True}  # fmt: skip
        with self.service.post(body) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    self.events.append(line[6:].decode().strip())
                    self.begun.set()

    @property
    def text(self) -> str:
        pieces = [json.loads(event) for event in self.events if event != "[DONE]"]
        return "".join(piece["choices"][0]["text"] for piece in pieces if "choices" in piece)

    @property
    def errors(self) -> list[Any]:
        pieces = [json.loads(event) for event in self.events if event != "[DONE]"]
        return [piece["error"] for piece in pieces if "error" in piece]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("ray") / "tiny", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(model, tmp_path_factory.mktemp("log") / "log.txt")
    try:
        made.wait_until_ready()
        yield made
    finally:
        code = made.end()
    assert code == 0
    while made.processes():  # Ray's own ends a little later
        time.sleep(0.1)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    with LLM(model, speculative_config=None) as llm:
        yield llm


def listening(pids: set[int]) -> set[str]:
    """Addresses, as /proc writes them, on which the processes listen."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    return found


OPTIONS = """
import json, sys
from specdec_ext.errors import ConfigError
from specdec_ext.serve.ray import ReplicaOptions, app
scaling = ReplicaOptions(2, 8, target_requests=5, downscale_seconds=7).autoscaling
print(json.dumps([scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests,
                  scaling.upscale_delay_s, scaling.downscale_delay_s, scaling.look_back_period_s]))
assert ReplicaOptions(2).autoscaling is None
app({"model": sys.argv[1], "num_replicas": "2", "max_batch_size": "4", "drain_seconds": "3"})
for wrong in ({"num_replica": "2"}, {"num_replicas": "0"},
              {"max_replicas": "2", "num_replicas": "3"}, {"drain_seconds": "x"},
              {"upscale_seconds": "0"}):
    try:
        app({"model": sys.argv[1], **wrong})
    except ConfigError as error:
        print(error)
"""


def test_options_of_serve_run(model: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-c", OPTIONS, str(model)], capture_output=True, text=True, check=True
    )
    first, *refused = done.stdout.splitlines()
    assert json.loads(first) == [2, 8, 5, 30.0, 7.0, 30.0]
    named = ("num_replicas", "num_replicas = 0", "max_replicas = 2", "drain_seconds", "upscale")
    assert len(refused) == len(named)
    assert all(name in line for name, line in zip(named, refused, strict=True)), refused


def test_all_is_on_the_loopback(service: Service) -> None:
    four, six = "0100007F", ("0000000000000000FFFF00000100007F", "0" * 24 + "01000000")
    assert listening(set(service.processes())) <= {four, *six}


def test_answers_are_the_models_and_beginnings_are_reused(service: Service, plain: LLM) -> None:
    prompts = [f"{i}: " + "abcabc" * 20 for i in range(12)]
    outputs = plain.generate(prompts, SamplingParams(max_tokens=16), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert service.text(prompt) == output.outputs[0].text
    for prompt in prompts:  # whichever replica has it: the same as before
        with service.post({"prompt": prompt, "max_tokens": 1}) as answer:
            usage = json.loads(answer.read())["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 96


def test_an_error_passes_through(service: Service) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        service.post({"prompt": "x", "max_tokens": -1})
    assert error.value.code == 400
    assert json.loads(error.value.read())["error"]["param"] == "max_tokens"


def test_a_replica_is_killed_while_it_answers(service: Service, plain: LLM) -> None:
    before = service.processes(REPLICA)
    assert len(before) == 2
    prompts = [f"{i} to be or not" for i in range(10)]
    streams = [Stream(service, prompt) for prompt in prompts]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.begun.wait()
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    for stream in streams:
        stream.join()

    lost = [stream for stream in streams if stream.errors]
    kept = [stream for stream in streams if not stream.errors]
    assert lost and kept, "the ring gives both replicas some of ten prompts"
    for stream in lost:
        assert [error["code"] for error in stream.errors] == ["service_unavailable"]
        assert json.loads(stream.events[-2])["error"] and stream.events[-1] == "[DONE]"
    params = SamplingParams(max_tokens=LONG, ignore_eos=True)
    outputs = plain.generate(prompts, params, use_tqdm=False)
    for stream, output in zip(streams, outputs, strict=True):
        whole = output.outputs[0].text
        assert stream.text == whole if stream in kept else whole.startswith(stream.text)

    while len(service.processes(REPLICA)) < 2:  # the new one
        time.sleep(0.1)
    assert victim not in service.processes(REPLICA)
    short = plain.generate(prompts, SamplingParams(max_tokens=16), use_tqdm=False)
    for prompt, output in zip(prompts, short, strict=True):
        assert service.text(prompt) == output.outputs[0].text


def test_the_service_ends_when_its_answers_have(service: Service, plain: LLM) -> None:
    """The last test of this file: the fixture checks the exit code."""
    stream = Stream(service, "abc")
    stream.start()
    stream.begun.wait()
    service.process.send_signal(signal.SIGTERM)
    stream.join()
    params = SamplingParams(max_tokens=LONG, ignore_eos=True)
    expected = plain.generate("abc", params, use_tqdm=False)[0].outputs[0].text
    assert not stream.errors and stream.text == expected
    service.process.wait()


def test_replicas_come_and_go_with_the_queue(
    model: Path, plain: LLM, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One replica; while more requests wait than it should have there are more; then one again.
    What runs meanwhile is answered as ever."""
    log = tmp_path_factory.mktemp("log") / "scaling.txt"
    made = Service(
        model, log, "--replicas", "1", "--max-replicas", "2", "--target-requests", "2",
        "--upscale-seconds", "1", "--downscale-seconds", "4",
    )  # fmt: skip
    try:
        made.wait_until_ready()
        assert len(made.processes(REPLICA)) == 1
        prompts = [f"{i} to be or not" for i in range(8)]
        streams: list[Stream] = []
        while len(made.processes(REPLICA)) < 2:  # the queue stays long until there are two
            if sum(stream.is_alive() for stream in streams) < len(prompts):
                streams.append(Stream(made, prompts[len(streams) % len(prompts)], 200))
                streams[-1].start()
            time.sleep(0.02)
        for stream in streams:
            stream.join()
        while len(made.processes(REPLICA)) > 1:
            time.sleep(0.2)
        # The one that is left serves.
        short = plain.generate(prompts[0], SamplingParams(max_tokens=16), use_tqdm=False)
        assert made.text(prompts[0]) == short[0].outputs[0].text
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        outputs = plain.generate(prompts, params, use_tqdm=False)
        for number, stream in enumerate(streams):
            assert not stream.errors
            assert stream.text == outputs[number % len(prompts)].outputs[0].text
    finally:
        code = made.end()
    assert code == 0
    while made.processes():
        time.sleep(0.1)

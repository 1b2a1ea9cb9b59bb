"""A server in a process of its own, and real clients: the openai package, curl."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from servers import LiveServer, all_returned
from sse_reader import choice_text, chunks

from specdec_ext import LLM, SamplingParams

MESSAGES: Any = [{"role": "user", "content": "abcabcabc"}]


def text_of(llm: LLM, prompt: str, tokens: int, **more: Any) -> str:
    params = SamplingParams(max_tokens=tokens, **more)
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def test_the_openai_client(llm: LLM, live: LiveServer) -> None:
    output = llm.chat(MESSAGES, SamplingParams(max_tokens=20), use_tqdm=False)[0].outputs[0]
    want = output.text
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_completion_tokens=20, temperature=0
        )
        assert whole.choices[0].message.content == want
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=20, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        parts = list(stream)
        text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        assert text == want
        assert parts[-1].usage is not None
        assert parts[-1].usage.completion_tokens == len(output.token_ids)
        made = client.completions.create(model="tiny", prompt="ab", max_tokens=9, temperature=0,
                                         logprobs=1)  # fmt: skip
        assert made.choices[0].text == text_of(llm, "ab", 9)
        response = client.responses.create(
            model="tiny", input="abcabcabc", max_output_tokens=20, temperature=0
        )
        assert response.output_text == want
        with client.responses.stream(
            model="tiny", input="abcabcabc", max_output_tokens=20, temperature=0
        ) as events:
            assert events.get_final_response().output_text == want
        for status, wrong in (
            (openai.BadRequestError, {"extra_body": {"nonsense": 1}}),
            (openai.NotFoundError, {"model": "other"}),
        ):
            with pytest.raises(status):
                client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **wrong})


def test_the_openai_client_asynchronously(llm: LLM, live: LiveServer) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none") as client:

            async def one(number: int) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt=f"{number} x", max_tokens=12, temperature=0, stream=True
                )
                return "".join([part.choices[0].text async for part in stream])

            texts = await asyncio.gather(*(one(i) for i in range(12)))
            assert texts == [text_of(llm, f"{i} x", 12) for i in range(12)]
            stream = await client.completions.create(
                model="tiny", prompt="a", max_tokens=400, stream=True
            )
            async for _ in stream:
                break
            await stream.close()

    with all_returned(llm):
        asyncio.run(main())


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(llm: LLM, live: LiveServer) -> None:
    body = json.dumps({"prompt": "ab", "max_tokens": 9, "temperature": 0, "stream": True})
    command = ["curl", "-sSN", live.url + "/v1/completions", "-H",
               "Content-Type: application/json", "-d", body]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert choice_text(chunks(run.stdout)) == text_of(llm, "ab", 9)
    metrics = subprocess.run(["curl", "-sS", live.url + "/metrics"], capture_output=True, text=True)
    assert "\nvllm:spec_decode_num_drafts_total{" in metrics.stdout


def test_connections_that_are_no_requests(llm: LLM, live: LiveServer) -> None:
    """Half a request, rubbish, a flood of headers: others are served."""
    half = socket.create_connection(("127.0.0.1", live.port))
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    for content in (b"\x00\xff rubbish\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20000):
        with socket.create_connection(("127.0.0.1", live.port)) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            reply = b""
            try:
                while part := connection.recv(65536):
                    reply += part
            except ConnectionResetError:
                pass
            assert reply in (b"",) or reply.startswith(b"HTTP/1.1 400")
    assert httpx2.get(live.url + "/health").status_code == 200
    half.close()


class Process:
    """`specdec serve` as a user runs it."""

    def __init__(self, path: Path, *options: str) -> None:
        self._log = subprocess.PIPE
        command = [sys.executable, "-m", "specdec_ext", "serve", str(path), *options]
        self.process = subprocess.Popen(command, stderr=self._log, text=True)
        self.lines: list[str] = []

    def wait_for(self, text: str) -> str:
        """The line of its log that has `text`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError("".join(self.lines))

    def end(self) -> int:
        assert self.process.stderr is not None
        self.lines += self.process.stderr.readlines()
        self.process.stderr.close()
        return self.process.wait()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.end()


def test_sigterm_lets_answers_end(
    llm: LLM, tiny_path: Path, tmp_path: Path, processes: list[Process]
) -> None:
    """Through a Unix socket, with a key: the stream that runs is whole, the exit code 0."""
    sock, keys = tmp_path / "s", tmp_path / "keys"
    keys.write_text("a-key-of-ours\n")
    server = Process(
        tiny_path, "--uds", str(sock), "--api-key-file", str(keys), "--threads", "1",
        "--served-model-name", "mine", "other", "--max-queued-requests", "9",
    )  # fmt: skip
    processes.append(server)
    server.wait_for("running on")
    transport = httpx2.HTTPTransport(uds=str(sock))
    headers = {"Authorization": "Bearer a-key-of-ours"}
    with httpx2.Client(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
        models = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["mine", "other"]
        body = {"prompt": "hello", "max_tokens": 400, "temperature": 0, "stream": True,
                "ignore_eos": True}  # fmt: skip
        with client.stream("POST", "/v1/completions", json=body) as reply:
            received = reply.iter_text()
            text = next(received)
            server.process.send_signal(signal.SIGTERM)
            text += "".join(received)
    assert choice_text(chunks(text)) == text_of(llm, "hello", 400, ignore_eos=True)
    assert server.end() == 0, "".join(server.lines)
    access = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert [line["path"] for line in access] == ["/v1/models", "/v1/completions"]
    assert not any("a-key-of-ours" in line for line in server.lines)


def test_a_server_that_cannot_listen_says_so(live: LiveServer, tiny_path: Path) -> None:
    command = [sys.executable, "-m", "specdec_ext", "serve", str(tiny_path), "--port",
               str(live.port)]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 4 and "another process listens on" in run.stderr

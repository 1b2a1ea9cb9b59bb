"""A server under clients of every kind, drained and started again, over and over: nothing is left.

SPECDEC_SOAK_SECONDS is how long the slow form lasts (default: 900).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import gc
import json
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from raw_client import ask, connection, many_files, parts_of, request_bytes
from servers import LiveServer, all_returned, make_app, make_llm
from sse_reader import choice_text, chunks, events

from specdec_ext import LLM, SamplingParams
from specdec_ext.serve.interpreter import share_arenas

CLIENTS = 24  # at a time
LIFE_SECONDS = 5.0  # of a server, before it is drained
GROWTH_BYTES = 24 << 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# What a client may be told; a 500 is never one of them.
REFUSALS = (400, 404, 405, 408, 413, 422, 429, 503)


class Soak:
    """Clients of one kind after another, chosen by a seeded generator; counts what they did."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.rng = random.Random(seed)
        self.port = 0
        self.draining = False
        self.done: collections.Counter[str] = collections.Counter()
        self.sizes: list[int] = []  # bytes of this process behind every life
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        self.want = {
            prompt: llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
            for prompt in (f"{i} ab ab {i}" for i in range(12))
        }
        turns = [{"role": "user", "content": "abc"}]
        self.reply = llm.chat(turns, params, use_tqdm=False)[0].outputs[0].text
        self.polite: list[Callable[[], Awaitable[None]]] = [
            self.whole, self.stream, self.stream, self.several, self.responds, self.reads_about,
            self.reads_slowly, self.wrong_fields,
        ]  # fmt: skip
        self.kinds = [
            *self.polite, self.leaves_at_once, self.leaves_in_the_stream, self.leaves_in_the_body,
            self.stays_silent, self.wrong_body, self.no_request,
        ]  # fmt: skip

    def body(self, **more: Any) -> tuple[str, dict[str, Any]]:
        """(the text that must come, a request for it)."""
        prompt = self.rng.choice(sorted(self.want))
        return self.want[prompt], {"prompt": prompt, "max_tokens": 40, "temperature": 0,
                                   "ignore_eos": True, **more}  # fmt: skip

    async def client(self) -> None:
        while not self.draining:
            kind = self.rng.choice(self.kinds)
            try:
                await kind()
                self.done[kind.__name__] += 1
            except (OSError, asyncio.IncompleteReadError) as error:
                # A socket that its other end has closed cannot be shut down: no ConnectionError.
                closed = isinstance(error, ConnectionError) or (
                    isinstance(error, OSError) and error.errno == errno.ENOTCONN
                )
                assert closed or isinstance(error, asyncio.IncompleteReadError), error
                # The server may hang up on who is rude, and when it is drained.
                assert self.draining or kind not in self.polite, kind.__name__
                self.done[kind.__name__ + ", hung up"] += 1

    def answered(self, status: int, text: str) -> bool:
        """True: with 200. False: there was no room, or the server is being drained."""
        return status == 200 or not self.refused(status, text, (429, 503))

    def refused(self, status: int, text: str, allowed: tuple[int, ...] = REFUSALS) -> bool:
        assert status in allowed, (status, text)
        assert status != 503 or self.draining, text
        assert json.loads(text)["error"].keys() == {"message", "type", "param", "code"}
        self.done[str(status)] += 1
        return True

    def cut(self, text: str) -> bool:
        """The stream ended with an error: its server was drained, and out of time for it."""
        errors = [part["error"] for part in chunks(text) if "error" in part]
        for error in errors:
            assert self.draining and error["code"] == "service_unavailable", error
            self.done["cut by the drain"] += 1
        return bool(errors)

    # -- those who behave -------------------------------------------------------------------------

    async def whole(self) -> None:
        want, body = self.body()
        status, text = await ask(self.port, COMPLETIONS, body)
        if self.answered(status, text):
            assert json.loads(text)["choices"][0]["text"] == want

    async def stream(self) -> None:
        want, body = self.body(stream=True)
        status, text = await ask(self.port, COMPLETIONS, body)
        if self.answered(status, text) and not self.cut(text):
            assert choice_text(chunks(text)) == want

    async def several(self) -> None:
        prompts = self.rng.sample(sorted(self.want), 3)
        _, body = self.body(stream=True)
        status, text = await ask(self.port, COMPLETIONS, {**body, "prompt": prompts})
        if self.answered(status, text) and not self.cut(text):
            parts = chunks(text)
            assert [choice_text(parts, i) for i in range(3)] == [self.want[p] for p in prompts]

    async def responds(self) -> None:
        body = {"input": "abc", "max_output_tokens": 40, "temperature": 0, "ignore_eos": True,
                "stream": True}  # fmt: skip
        status, text = await ask(self.port, "/v1/responses", body)
        if not self.answered(status, text):
            return
        found = [(name, json.loads(data)) for name, data in events(text) if data != "[DONE]"]
        name, last = found[-1]
        if name == "error":
            assert self.draining and last["code"] == "service_unavailable", last
            self.done["cut by the drain"] += 1
            return
        deltas = [part["delta"] for _, part in found if "delta" in part]
        assert (name, "".join(deltas)) == ("response.incomplete", self.reply)

    async def reads_about(self) -> None:
        for path in ("/health", "/metrics", "/v1/models"):
            status, text = await ask(self.port, path)
            assert self.answered(status, text) or self.draining

    # -- those who do not -------------------------------------------------------------------------

    async def leaves_at_once(self) -> None:
        _, body = self.body(stream=self.rng.random() < 0.5, max_tokens=400)
        async with connection(self.port) as (_, writer):
            writer.write(request_bytes(self.rng.choice((COMPLETIONS, "/v1/responses")), body))
            await writer.drain()

    async def leaves_in_the_stream(self) -> None:
        _, body = self.body(stream=True, max_tokens=400)
        async with connection(self.port) as (reader, writer):
            writer.write(request_bytes(COMPLETIONS, body))
            for _ in range(self.rng.randrange(1, 30)):
                await reader.readline()

    async def leaves_in_the_body(self) -> None:
        content = request_bytes(COMPLETIONS, self.body()[1])
        async with connection(self.port) as (_, writer):
            writer.write(content[: self.rng.randrange(1, len(content))])
            await writer.drain()
            await asyncio.sleep(self.rng.random() * 0.05)

    async def stays_silent(self) -> None:
        """Half a body, and no end: refused when its time is over."""
        content = request_bytes(COMPLETIONS, self.body()[1])
        async with connection(self.port) as (reader, writer):
            writer.write(content[:-1])
            answer = await reader.read()
        if answer:
            status, text = parts_of(answer)
            assert self.refused(status, text, (408, 503))

    async def reads_slowly(self) -> None:
        want, body = self.body(stream=True)
        async with connection(self.port) as (reader, writer):
            writer.write(request_bytes(COMPLETIONS, body))
            answer = b""
            while part := await reader.read(self.rng.randrange(1, 400)):
                answer += part
                await asyncio.sleep(self.rng.random() * 0.02)
        status, text = parts_of(answer)
        if self.answered(status, text) and not self.cut(text):
            assert choice_text(chunks(text)) == want

    async def wrong_body(self) -> None:
        content = self.rng.choice([
            b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"prompt": "\xc3("}', b"[" * 5000,
            b'{"prompt": NaN}', b"x" * 70_000, self.rng.randbytes(64),
        ])  # fmt: skip
        path = self.rng.choice((COMPLETIONS, CHAT, "/v1/responses", "/tokenize", "/detokenize"))
        status, text = await ask(self.port, path, content)
        assert self.refused(status, text)

    async def wrong_fields(self) -> None:
        wrong = self.rng.choice([
            {"max_tokens": -1}, {"max_tokens": 10**9}, {"temperature": "hot"}, {"nonsense": 1},
            {"model": "other"}, {"logit_bias": {"x": 1}}, {"stop": [""]}, {"n": 0}, {"n": 5000},
            {"prompt": [10**9]}, {"stop": ["a"] * 10_000}, {"speculative_config": {"model": "x"}},
        ])  # fmt: skip
        status, text = await ask(self.port, COMPLETIONS, {**self.body()[1], **wrong})
        assert self.refused(status, text)

    async def no_request(self) -> None:
        async with connection(self.port) as (reader, writer):
            writer.write(self.rng.choice([b"\r\n\r\n", b"\x16\x03\x01", b"GET\r\n\r\n"]))
            writer.write_eof()
            await reader.read()

    # -- a life -----------------------------------------------------------------------------------

    async def life(self, live: LiveServer, seconds: float) -> None:
        """All clients for so long; then the server is told to stop while they are at it."""
        self.port, self.draining = live.port, False
        clients = [asyncio.create_task(self.client()) for _ in range(CLIENTS)]
        last = asyncio.create_task(self.through_the_drain(seconds))
        await asyncio.sleep(seconds)
        self.draining = True
        live.server.should_exit = True
        await last
        await asyncio.gather(*clients)

    async def through_the_drain(self, seconds: float) -> None:
        """A stream that has begun before the server is told to stop, and is whole all the same."""
        await asyncio.sleep(0.9 * seconds)
        prompt, tokens = "to the end", 400
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        try:
            status, text = await ask(self.port, COMPLETIONS, body)
        except ConnectionError:  # not accepted yet when the server stopped listening
            assert self.draining
            self.done["too late for the drain"] += 1
            return
        if self.answered(status, text) and not self.cut(text):
            found = [data for _, data in events(text)]
            assert found[-1] == "[DONE]"
            assert json.loads(found[-2])["usage"]["completion_tokens"] == tokens
            self.done["whole through the drain"] += 1


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(path: Path, seconds: float, life_seconds: float, seed: int) -> Soak:
    share_arenas()  # as `specdec serve` does first
    files, threads = 0, set[threading.Thread]()
    with contextlib.ExitStack() as stack:
        stack.enter_context(many_files(2000))
        llm = stack.enter_context(make_llm(path, max_queued_requests=16, max_batch_size=8))
        clients = Soak(llm, seed)
        sizes = clients.sizes
        end = time.monotonic() + seconds
        while len(sizes) < 2 or time.monotonic() < end:
            app = make_app(
                llm, body_seconds=0.5, send_seconds=5.0, drain_seconds=10.0, max_body_bytes=65536
            )
            bridge = app.state.serving.bridge
            with all_returned(llm):
                with LiveServer(app) as live:
                    asyncio.run(clients.life(live, life_seconds))
                    # uvicorn's tasks are those of requests; its loop ends when none is left.
                    live.thread.join()
                    assert live.server.server_state.tasks == set()
                    assert live.server.server_state.connections == set()
                assert bridge.running == set() and bridge._reserved == 0
            del app, bridge, live
            gc.collect()
            if not sizes:  # what opens with the first request and stays is there now
                files, threads = num_open_files(), set(threading.enumerate())
            while not (set(threading.enumerate()) <= threads and num_open_files() <= files):
                time.sleep(0.005)
            sizes.append(resident_bytes())
    early = sizes[len(sizes) // 3]
    assert sizes[-1] - early < GROWTH_BYTES, sizes
    return clients


def report(clients: Soak) -> None:
    print(dict(sorted(clients.done.items())))
    print("MiB behind every life:", [size >> 20 for size in clients.sizes])
    served = clients.done
    for kind in {kind.__name__ for kind in clients.kinds}:
        assert served[kind] + served[kind + ", hung up"] > 0, kind


def test_a_short_soak(tiny_path: Path) -> None:
    clients = soak(tiny_path, seconds=0.0, life_seconds=1.0, seed=1)
    assert clients.done["whole"] > 0 and clients.done["stream"] > 0


@pytest.mark.slow
def test_a_soak(tiny_path: Path) -> None:
    seconds = float(os.environ.get("SPECDEC_SOAK_SECONDS", "900"))
    clients = soak(tiny_path, seconds, LIFE_SECONDS, seed=2)
    report(clients)
    assert clients.done["whole through the drain"] > 0

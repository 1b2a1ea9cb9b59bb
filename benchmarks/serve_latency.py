"""How much later than the engine has a token does a client have it?

N streams decode together behind a server; clients read them in a process of their own. Of every
token: when the engine had it (its request was told of it), and when the client had read the event
that carries it. Both clocks are the system's monotonic one. Besides that the time of a step while
clients read, against the same requests in process, in turns; and the processor time that the
server's thread takes per event, in the middle half of the answers.

    python -m benchmarks.serve_latency [--streams 32 64] [--tokens 96] [--rounds 3]
                                       [--speculate] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import common, serve_tables
from specdec_ext import LLM, SamplingParams, _core
from specdec_ext.engine.request_state import RequestState
from specdec_ext.serve.app import create_app
from specdec_ext.serve.server import ThreadServer
from specdec_ext.serve.settings import ServerSettings

# (time, tokens by then) of one request, in order.
Marks = list[tuple[float, int]]


def prompt(number: int) -> str:
    return f"Story {number}: once upon a time there were {number} travellers who"


# -- the clients' process -------------------------------------------------------------------------


class Stream(asyncio.Protocol):
    """One request; notes when its bytes come and reads them later: a client that does more then
    would be measured along."""

    def __init__(self, number: int, tokens: int) -> None:
        body = json.dumps(
            {"prompt": prompt(number), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
             "seed": number, "stream": True, "return_token_ids": True}
        ).encode()  # fmt: skip
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self.request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        self.request += body
        self.received: list[tuple[float, bytes]] = []
        self.end = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.received.append((time.monotonic(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.end.set_result(None)

    def marks(self) -> Marks:
        """When how many tokens were there; an event belongs to the bytes that completed it."""
        marks: Marks = []
        count, rest = 0, b""
        for when, data in self.received:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    count += len(json.loads(line[6:])["choices"][0]["token_ids"])
                    marks.append((when, count))
        return marks


async def clients(port: int, streams: int, tokens: int) -> list[Marks]:
    loop = asyncio.get_running_loop()
    made = [Stream(i, tokens) for i in range(streams)]
    for stream in made:
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*(stream.end for stream in made))
    marks = [stream.marks() for stream in made]
    counts = [found[-1][1] for found in marks]
    if counts != [tokens] * streams:
        raise RuntimeError(f"the streams have {counts} tokens, each should have {tokens}")
    return marks


# -- the engine's process -------------------------------------------------------------------------


@contextmanager
def noted(
    marks: dict[int, Marks], used: list[tuple[float, float]] | None = None, clock: int = 0
) -> Iterator[None]:
    """While open, every request notes when it gets tokens; `seed` is its number. Request 0 also
    notes in `used` what `clock`, a thread's, says."""
    consume = RequestState.consume

    def noting(state: RequestState, out: Any, *given: Any, **more: Any) -> Any:
        result = consume(state, out, *given, **more)
        now = time.monotonic()
        # Not from the request's own text, which nobody makes before it is asked for: whoever asks
        # does that work, and here it has to be the server's thread.
        assert state.params.seed is not None
        found = marks.setdefault(state.params.seed, [])
        found.append((now, len(out.tokens) + (found[-1][1] if found else 0)))
        if used is not None and state.params.seed == 0:
            used.append((now, time.clock_gettime(clock)))
        return result

    RequestState.consume = noting  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        RequestState.consume = consume  # type: ignore[method-assign]


def reached(marks: Marks, tokens: int) -> list[float]:
    """When each of the tokens was there."""
    times: list[float] = []
    for when, count in marks:
        times += [when] * (count - len(times))
    return times[:tokens]


def step_ms(marks: dict[int, Marks]) -> float:
    """Median time between two steps of the same request; those that read prompts are few."""
    return statistics.median(
        1e3 * (b[0] - a[0]) for found in marks.values() for a, b in itertools.pairwise(found)
    )


def served(server: ThreadServer, streams: int, tokens: int) -> tuple[list[float], float, float]:
    """(ms that each token came later, ms of a step, us of the server's thread per event)."""
    marks: dict[int, Marks] = {}
    port = server.port
    assert server.thread.ident is not None
    used: list[tuple[float, float]] = []  # (time, seconds of the thread), once a step
    with noted(marks, used, time.pthread_getcpuclockid(server.thread.ident)):
        command = [sys.executable, "-m", "benchmarks.serve_latency", "--client", str(port),
                   "--streams", str(streams), "--tokens", str(tokens)]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    late = []
    every = json.loads(done.stdout)
    for number, read in enumerate(every):
        had = reached(marks[number], tokens)
        late += [1e3 * (b - a) for a, b in zip(had, reached(read, tokens), strict=True)]
    (begin, before), (end, after) = used[len(used) // 4], used[3 * len(used) // 4]
    events = sum(begin < when <= end for read in every for when, _ in read)
    return late, step_ms(marks), 1e6 * (after - before) / events


def alone(llm: LLM, streams: int, tokens: int) -> float:
    """Milliseconds of a step of the same requests without a server."""
    marks: dict[int, Marks] = {}
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i) for i in range(streams)]
    with noted(marks):
        llm.generate([prompt(i) for i in range(streams)], params, use_tqdm=False)
    return step_ms(marks)


def measure(
    llm: LLM, server: ThreadServer, streams: int, tokens: int, rounds: int
) -> dict[str, Any]:
    llm.reset_prefix_cache()
    served(server, streams, tokens)  # not counted
    late: list[float] = []
    ratios, steps, costs = [], [], []
    for round_ in range(rounds):
        order = ("served", "alone") if round_ % 2 == 0 else ("alone", "served")
        found: dict[str, float] = {}
        for kind in order:
            llm.reset_prefix_cache()
            if kind == "alone":
                found[kind] = alone(llm, streams, tokens)
            else:
                more, found[kind], cost = served(server, streams, tokens)
                late += more
                costs.append(cost)
        ratios.append(found["served"] / found["alone"])
        steps.append(found["served"])
    points = statistics.quantiles(late, n=1000, method="inclusive")
    return {
        "streams": streams, "tokens": len(late), "late_ms": {
            "p50": points[499], "p90": points[899], "p99": points[989], "max": max(late),
        },
        "step_ms": common.spread(steps), "step_over_alone": common.spread(ratios),
        "event_us": common.spread(costs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--speculate", action="store_true", help="by the default, not plainly")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    args = parser.parse_args()
    if args.client is not None:
        json.dump(asyncio.run(clients(args.client, args.streams[0], args.tokens)), sys.stdout)
        return
    common.set_threads(args.threads)
    about = {"environment": common.environment(_core.num_threads()), "arguments": vars(args)}
    with LLM(
        speculative_config="auto" if args.speculate else None,
        kv_cache_config={"enable_block_reuse": True},
        scheduler_config={"max_batch_size": max(args.streams)},
    ) as llm:
        settings = ServerSettings(served_model_names=["default"], request_seconds=3600.0)
        with ThreadServer(create_app(llm, settings)) as server:
            rows = [
                measure(llm, server, streams, args.tokens, args.rounds) for streams in args.streams
            ]
    table = serve_tables.latency(rows)
    print(table)
    print("load:", common.load_average())
    if args.write:
        print(common.write_result("serve_latency", {**about, "rows": rows}, [table]))


if __name__ == "__main__":
    main()

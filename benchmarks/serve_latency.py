"""How much later than the engine has a token does a client have it?

N streams decode together behind a server; clients read them in a process of their own, on the same
cores. Of every token: when the engine had it (its request was told of it); when the event that
carries it had arrived in the client's socket, which the kernel notes (SO_TIMESTAMPNS); and when the
client had read it. The first is what the server adds. The second has the client's part besides,
which has to get a core and takes its sockets one by one: it reads bytes, notes times and does all
else afterwards. All clocks are the system's real-time one.

Besides that the time of a step while clients read, against the same requests in process, in turns;
and the processor time that the server's thread and the client take per event, in the middle half of
the answers and of the whole run.

    python -m benchmarks.serve_latency [--streams 32 64] [--tokens 96] [--rounds 3]
                                       [--speculate] [--write]
"""

from __future__ import annotations

import argparse
import itertools
import json
import selectors
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks import common, serve_tables
from specdec_ext import LLM, SamplingParams, _core
from specdec_ext.engine.request_group import RequestGroup
from specdec_ext.engine.request_state import RequestState
from specdec_ext.serve.app import create_app
from specdec_ext.serve.server import ThreadServer
from specdec_ext.serve.settings import ServerSettings

# (time, tokens by then) of one request, in order.
Marks = list[tuple[float, int]]


def prompt(number: int) -> str:
    return f"Story {number}: once upon a time there were {number} travellers who"


# -- the clients' process -------------------------------------------------------------------------

_SO_TIMESTAMPNS = 35  # of Linux; the socket module does not name it
_STAMP = struct.Struct("@ll")  # a struct timespec


class Stream:
    """One request; notes when its bytes come and reads them later."""

    def __init__(self, port: int, number: int, tokens: int) -> None:
        body = json.dumps(
            {"prompt": prompt(number), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
             "seed": number, "stream": True, "return_token_ids": True}
        ).encode()  # fmt: skip
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self.request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        self.request += body
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.received: list[tuple[float, bytes, bytes]] = []  # when read, when arrived, what

    def read(self) -> bool:
        """Take what has come. False: it is the end."""
        data, notes, _, _ = self.socket.recvmsg(65536, socket.CMSG_SPACE(_STAMP.size))
        if data:
            self.received.append((time.time(), notes[0][2], data))
        return bool(data)

    def marks(self) -> tuple[Marks, Marks]:
        """When how many tokens had arrived, and had been read. An event belongs to the bytes that
        completed it; where several are read at once all have the arrival of the last."""
        arrived: Marks = []
        read: Marks = []
        count, rest = 0, b""
        for when, stamp, data in self.received:
            seconds, nanoseconds = _STAMP.unpack(stamp)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    count += len(json.loads(line[6:])["choices"][0]["token_ids"])
                    arrived.append((seconds + 1e-9 * nanoseconds, count))
                    read.append((when, count))
        return arrived, read


def clients(port: int, streams: int, tokens: int) -> dict[str, Any]:
    """What the clients noted, of every stream, and the seconds of a processor that reading took."""
    made = [Stream(port, i, tokens) for i in range(streams)]
    with selectors.DefaultSelector() as selector:
        for stream in made:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        for stream in made:
            stream.socket.sendall(stream.request)
        begin = time.process_time()
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
        seconds = time.process_time() - begin
    marks = [stream.marks() for stream in made]
    counts = [read[-1][1] for _, read in marks]
    if counts != [tokens] * streams:
        raise RuntimeError(f"the streams have {counts} tokens, each should have {tokens}")
    return {"arrived": [a for a, _ in marks], "read": [r for _, r in marks], "seconds": seconds}


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
        now = time.time()
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


class Served(NamedTuple):
    """One run behind a server: ms that each token came later, ms of a step, us per event."""

    arrived_ms: list[float]
    read_ms: list[float]
    step_ms: float
    server_us: float
    client_us: float


def served(server: ThreadServer, streams: int, tokens: int) -> Served:
    marks: dict[int, Marks] = {}
    port = server.port
    assert server.thread.ident is not None
    used: list[tuple[float, float]] = []  # (time, seconds of the thread), once a step
    with noted(marks, used, time.pthread_getcpuclockid(server.thread.ident)):
        command = [sys.executable, "-m", "benchmarks.serve_latency", "--client", str(port),
                   "--streams", str(streams), "--tokens", str(tokens)]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    late: dict[str, list[float]] = {}
    for kind in ("arrived", "read"):
        late[kind] = [
            1e3 * (came - had)
            for number, stream in enumerate(found[kind])
            for had, came in zip(
                reached(marks[number], tokens), reached(stream, tokens), strict=True
            )
        ]
    (begin, before), (end, after) = used[len(used) // 4], used[3 * len(used) // 4]
    middle = sum(begin < when <= end for stream in found["arrived"] for when, _ in stream)
    events = sum(len(stream) for stream in found["arrived"])
    return Served(
        late["arrived"], late["read"], step_ms(marks), 1e6 * (after - before) / middle,
        1e6 * found["seconds"] / events,
    )  # fmt: skip


def alone(llm: LLM, streams: int, tokens: int) -> float:
    """Milliseconds of a step of the same requests without a server; watched step by step, as
    generate() would take the outputs of many steps at once."""
    marks: dict[int, Marks] = {}
    with noted(marks):
        groups = []
        for i in range(streams):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i)
            text, ids = llm.prompts.read(prompt(i))
            groups.append(RequestGroup(llm.engine, llm.engine.resolve(ids, params), prompt=text))
        llm.engine.run([state for group in groups for state in group.states])
    return step_ms(marks)


def measure(
    llm: LLM, server: ThreadServer, streams: int, tokens: int, rounds: int
) -> dict[str, Any]:
    llm.reset_prefix_cache()
    served(server, streams, tokens)  # not counted
    runs: list[Served] = []
    ratios = []
    for round_ in range(rounds):
        order = ("served", "alone") if round_ % 2 == 0 else ("alone", "served")
        step = 0.0
        for kind in order:
            llm.reset_prefix_cache()
            if kind == "alone":
                step = alone(llm, streams, tokens)
            else:
                runs.append(served(server, streams, tokens))
        ratios.append(runs[-1].step_ms / step)
    arrived = [late for run in runs for late in run.arrived_ms]
    return {
        "streams": streams, "tokens": len(arrived), "arrived_ms": points(arrived),
        "late_ms": points([late for run in runs for late in run.read_ms]),
        "step_ms": common.spread([run.step_ms for run in runs]),
        "step_over_alone": common.spread(ratios),
        "event_us": common.spread([run.server_us for run in runs]),
        "client_us": common.spread([run.client_us for run in runs]),
    }  # fmt: skip


def points(late: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(late, n=1000, method="inclusive")
    return {"p50": cuts[499], "p90": cuts[899], "p99": cuts[989], "max": max(late)}


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
        json.dump(clients(args.client, args.streams[0], args.tokens), sys.stdout)
        return
    common.set_threads(args.threads)
    about: dict[str, Any] = {
        "environment": common.environment(_core.num_threads()), "arguments": vars(args),
    }  # fmt: skip
    with LLM(
        speculative_config="auto" if args.speculate else None,
        kv_cache_config={"enable_block_reuse": True},
        scheduler_config={"max_batch_size": max(args.streams)},
    ) as llm:
        about["dtype"] = common.width_of(llm.model)
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

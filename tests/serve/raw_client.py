"""A client of bare sockets: thousands at a time, and as rude as a test wants it.

Every request asks the server to close behind its answer, so that this is what comes until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import AsyncIterator, Iterator
from typing import Any

__all__ = ["ask", "connection", "many_files", "parts_of", "request_bytes"]


def request_bytes(path: str, body: Any = None) -> bytes:
    """A request; `body` is sent as JSON, bytes as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@contextlib.asynccontextmanager
async def connection(
    port: int,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Reader and writer of a new connection; at the end it is gone, whatever is on its way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def parts_of(answer: bytes) -> tuple[int, str]:
    """(status, body) of a whole answer. Raises ConnectionError if there is none."""
    if not answer:  # a server that has stopped closes what waited to be accepted
        raise ConnectionError("closed without an answer")
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        body, rest = b"", body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            body, rest = body + rest[:length], rest[length + 2 :]
    return int(head.split(b" ", 2)[1]), body.decode()


async def ask(port: int, path: str, body: Any = None) -> tuple[int, str]:
    """(status, body) of an answer, read to its end."""
    async with connection(port) as (reader, writer):
        writer.write(request_bytes(path, body))
        answer = await reader.read()
    if not answer:
        raise ConnectionError("the server has closed without an answer")
    return parts_of(answer)


@contextlib.contextmanager
def many_files(count: int) -> Iterator[None]:
    """This process may open so many files, of which sockets are some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""Many streams at once: none is lost, none mixed up, and nothing grows with their number."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from raw_client import ask, many_files
from servers import Gate, LiveServer, all_returned, make_app, make_llm, wait_until
from sse_reader import choice_text, chunks

from specdec_ext import LLM, SamplingParams

# So much may the process grow while it serves 1,000 streams for the third time. What a stream
# leaves behind would show: 1 KiB of each of 2,000 is more than half of it.
GROWTH_BYTES = 3 << 20


def parameters(number: int) -> dict[str, Any]:
    """Every request is another one: its text, its length, greedy or sampled, drafts or none."""
    sampled = {"temperature": 0.9, "seed": number, "top_p": 0.95}
    return {
        "max_tokens": 8 + number % 17,
        "ignore_eos": True,
        **(sampled if number % 3 else {"temperature": 0.0}),
        **({"speculative_config": False} if number % 5 == 0 else {}),
    }


def prompt(number: int) -> str:
    return f"{number}: tell me, tell me " + "ab" * (number % 7)


def solo_texts(llm: LLM, count: int) -> list[str]:
    """The text of each request when it is alone in the engine."""
    return [
        llm.generate(prompt(i), SamplingParams(**parameters(i)), use_tqdm=False)[0].outputs[0].text
        for i in range(count)
    ]


async def streams(port: int, count: int) -> list[str]:
    async def one(number: int) -> str:
        body = {"prompt": prompt(number), "stream": True, **parameters(number)}
        status, answer = await ask(port, "/v1/completions", body)
        assert status == 200, answer
        return choice_text(chunks(answer))

    return list(await asyncio.gather(*(one(i) for i in range(count))))


def at_once(llm: LLM, port: int, count: int) -> list[str]:
    """The texts of streams of which all have come before the first step."""
    gate = Gate(llm)
    gate.close()

    async def main() -> list[str]:
        running = asyncio.ensure_future(streams(port, count))
        came = lambda: llm.engine.num_unfinished == count or running.done()  # noqa: E731
        await asyncio.to_thread(wait_until, came)
        gate.open()
        return await running

    try:
        return asyncio.run(main())
    finally:
        gate.remove()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def many(path: Path, count: int, rounds: int) -> None:
    with make_llm(path, max_batch_size=32, max_queued_requests=count) as llm:
        want = solo_texts(llm, count)
        assert len(set(want)) > count // 2
        sizes = []
        with many_files(3 * count + 200), LiveServer(make_app(llm)) as live, all_returned(llm):
            for _ in range(rounds):
                assert at_once(llm, live.port, count) == want
                gc.collect()
                sizes.append(resident_bytes())
        print("MiB behind every round:", [size >> 20 for size in sizes])
        if rounds > 2:
            assert sizes[-1] - sizes[-2] < GROWTH_BYTES, sizes


def test_two_hundred_streams_of_32_at_a_time(tiny_path: Path) -> None:
    many(tiny_path, 200, 1)


@pytest.mark.slow
def test_a_thousand_streams_of_32_at_a_time(tiny_path: Path) -> None:
    many(tiny_path, 1000, 4)

"""Who waits for a step in an event loop: one call into the loop wakes them, a few in each turn."""

from __future__ import annotations

import asyncio
import threading

import pytest

from specdec_ext.engine.background import _Wakes, _wakes_here, behind_others

COUNT = 3 * _Wakes.PER_TURN + 1


class Calls:
    """Counts the calls into the running loop from other threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        call, self.count = loop.call_soon_threadsafe, 0

        def counting(*given: object, **more: object) -> object:
            self.count += 1
            return call(*given, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)


def set_all(wakes: _Wakes, waiters: list[asyncio.Future[None]]) -> None:
    """As a step does: from another thread, while the loop does something else."""

    def work() -> None:
        for waiter in waiters:
            wakes.set(waiter)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_step_calls_into_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        wakes = _Wakes(asyncio.get_running_loop())
        for _ in range(3):
            calls = Calls(monkeypatch)
            waiters = [wakes.new() for _ in range(COUNT)]
            waiters[2].cancel()
            set_all(wakes, [*waiters, waiters[0]])
            await asyncio.gather(*waiters, return_exceptions=True)
            assert calls.count == 1

    asyncio.run(main())


def test_the_first_need_not_wait_for_the_last() -> None:
    """They are woken in their order, PER_TURN in a turn of the loop."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        wakes = _Wakes(loop)
        turn = 0
        turns: dict[int, int] = {}  # by number, in which turn it was woken

        def next_turn() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(next_turn)

        async def wait(number: int) -> None:
            await waiters[number]
            turns[number] = turn

        waiters = [wakes.new() for _ in range(COUNT)]
        tasks = [asyncio.ensure_future(wait(i)) for i in range(COUNT)]
        await asyncio.sleep(0)
        next_turn()
        set_all(wakes, waiters)
        await asyncio.gather(*tasks)
        assert list(turns) == list(range(COUNT))
        counts = [list(turns.values()).count(t) for t in sorted(set(turns.values()))]
        assert counts == [_Wakes.PER_TURN] * 3 + [1]

    asyncio.run(main())


def test_behind_others() -> None:
    async def main() -> None:
        wakes = _wakes_here()
        told: list[int] = []

        async def wait(number: int) -> None:
            await waiters[number]
            told.append(number)

        waiters = [wakes.new() for _ in range(COUNT)]
        tasks = [asyncio.ensure_future(wait(i)) for i in range(COUNT)]
        await asyncio.sleep(0)
        set_all(wakes, waiters)
        await behind_others()
        assert told == list(range(COUNT))
        await asyncio.gather(*tasks)

    asyncio.run(main())

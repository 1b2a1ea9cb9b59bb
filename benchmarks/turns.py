"""Programs that take turns step by step, so that whatever else the machine does meets all alike."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

# Seconds of steps that read no prompt, of all, and of all that each request saw, summed over them.
KINDS, CLOCKS = ("decode", "total", "request"), ("wall", "cpu")


@dataclass
class Timed:
    """What a group of requests took, and brought."""

    wall: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    cpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    tokens: list[list[int]] = field(default_factory=list)
    passes: int = 0  # forward passes that decode, and the tokens that they brought
    decoded: int = 0
    rows: int = 0


Steps = Generator[None, None, Timed]


class Program:
    """An engine; every step is timed, those that read prompts apart.

    llm  its own: it runs nothing else meanwhile
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._reads_prompt = False
        forward = llm.model.forward

        def watched(plan: Any, *rest: Any) -> Any:
            self._reads_prompt = plan.num_prefill_rows > 0
            return forward(plan, *rest)

        llm.model.forward = watched

    def run(self, prompts: Sequence[Sequence[int]], params: Any) -> Steps:
        """All prompts at once, a step at a time."""
        engine, timed = self.llm.engine, Timed()
        states = [engine.submit(engine.resolve(list(prompt), params)) for prompt in prompts]
        while running := sum(not state.finished for state in states):
            wall, cpu = time.perf_counter(), time.process_time()
            engine.step()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            times = {"decode": 0 if self._reads_prompt else 1, "total": 1, "request": running}
            for kind, count in times.items():
                timed.wall[kind] += count * wall
                timed.cpu[kind] += count * cpu
            timed.passes += not self._reads_prompt
            yield
        timed.tokens = [list(state.token_ids) for state in states]
        timed.decoded = sum(len(ids) - 1 for ids in timed.tokens)
        timed.rows = sum(s.counter.num_rows for s in states) - sum(map(len, prompts))
        return timed

    def close(self) -> None:
        self.llm.close()


def take_turns(runs: dict[str, Steps]) -> dict[str, Timed]:
    """Runs all of them, each a step at a time."""
    results: dict[str, Timed] = {}
    while len(results) < len(runs):
        for name, run in runs.items():
            try:
                if name not in results:
                    next(run)
            except StopIteration as end:
                results[name] = end.value
    return results

"""What do ranks cost, and does a slower link cost what docs/tensor_parallel.md says?

Plain decoding of the default model: one rank with as many threads as there are ranks, against ranks
of one thread; over memory that the ranks share, as it is and with a delay behind each gather; in
exact mode, and in fast mode, which adds up partial sums and gathers half as often. In turns, step
by step timed. A busy machine shows in the median, less in the tenth percentile.

    python -m benchmarks.tensor_parallel [--ranks 2] [--delay-us 10 100] [--tokens 64] [--rounds 5]
                                         [--write]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from benchmarks import common
from specdec_ext import LLM, SamplingParams, _core

PROMPT = "The history of the bicycle begins"
# After each part of a layer the ranks exchange their outputs.
PARTS_OF_LAYER = {"exact": 4, "fast": 2}


class DelayedLink:
    """A link whose every gather takes `delay_s` longer on rank 0, for which all others wait."""

    def __init__(self, link: Any, delay_s: float) -> None:
        self._link, self._delay_s = link, delay_s
        self.gathers = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def gather(self, num_bytes: int, **how: Any) -> np.ndarray:
        gathered: np.ndarray = self._link.gather(num_bytes, **how)
        self.gathers += 1
        end = time.perf_counter() + self._delay_s
        while time.perf_counter() < end:
            pass
        return gathered


@contextmanager
def delayed(llm: LLM, delay_s: float) -> Iterator[DelayedLink]:
    team: Any = llm._team
    plain, team.link = team.link, DelayedLink(team.link, delay_s)
    try:
        yield team.link
    finally:
        team.link = plain


def step_times(llm: LLM, tokens: int) -> list[float]:
    """Seconds of the steps that decode one token each."""
    params = SamplingParams(max_tokens=tokens + 1, ignore_eos=True)
    _, ids = llm.prompts.read(PROMPT)
    state = llm.engine.submit(llm.engine.resolve(ids, params))
    llm.engine.step()  # the prompt
    times = []
    while not state.finished:
        begin = time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--delay-us", type=float, nargs="+", default=[10.0, 100.0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    args = parser.parse_args()
    settings: dict[str, Any] = {
        "device": "cpu", "max_seq_len": 512, "max_batch_size": 1, "speculative_config": None,
    }  # fmt: skip
    alone = f"1 rank, {args.ranks} threads"
    delays = [0.0, *args.delay_us]
    words = ["", *(f", + {delay:g} us" for delay in args.delay_us)]
    names = [alone, "1 rank, 1 thread"]
    modes = {mode: [f"{args.ranks} ranks, 1 thread each, {mode}{word}" for word in words]
             for mode in PARTS_OF_LAYER}  # fmt: skip
    for of_mode in modes.values():
        names += of_mode
    times: dict[str, list[float]] = {name: [] for name in names}
    gathers: dict[str, int] = {}
    with ExitStack() as stack:
        one = stack.enter_context(LLM(**settings))
        _core.set_num_threads(1)
        spread = {}
        for mode in modes:
            spread[mode] = stack.enter_context(
                LLM(tensor_parallel_size=args.ranks, numerics=mode, **settings)
            )
            step_times(spread[mode], 8)
        layers, width = one.model.num_layers, common.width_of(one.model)
        for _ in range(args.rounds):
            for name, threads in ((alone, args.ranks), (names[1], 1)):
                _core.set_num_threads(threads)
                times[name] += step_times(one, args.tokens)
            _core.set_num_threads(1)
            for mode, of_mode in modes.items():
                for name, delay in zip(of_mode, delays, strict=True):
                    with delayed(spread[mode], 1e-6 * delay) as link:
                        found = step_times(spread[mode], args.tokens)
                        gathers[mode] = link.gathers // (len(found) + 1)
                    times[name] += found
    assert gathers == {mode: parts * layers + 1 for mode, parts in PARTS_OF_LAYER.items()}
    rows: list[dict[str, Any]] = []
    about_names = [(alone, "", 0.0), (names[1], "", 0.0)]
    about_names += [
        (name, mode, delay)
        for mode, of_mode in modes.items()
        for name, delay in zip(of_mode, delays, strict=True)
    ]
    for name, mode, delay in about_names:
        steps = sorted(times[name])
        rows.append(
            {
                "name": name,
                "p10_s": steps[len(steps) // 10],
                "median_s": statistics.median(steps),
                "expected_added_s": 1e-6 * delay * gathers.get(mode, 0),
                "mode": mode,
            }
        )
    bases = {row["mode"]: row for row in rows[::-1] if row["expected_added_s"] == 0.0}
    header = ("", "p10, ms", "median, ms", "tokens/s (median)", "added (p10), ms", "expected, ms")
    cells = []
    for row in rows:
        slower = row["expected_added_s"] > 0
        row["added_p10_s"] = row["p10_s"] - bases[row["mode"]]["p10_s"] if slower else 0.0
        cells.append(
            (
                row["name"], f"{1e3 * row['p10_s']:.2f}", f"{1e3 * row['median_s']:.2f}",
                f"{1 / row['median_s']:.1f}", f"{1e3 * row['added_p10_s']:.2f}" if slower else "-",
                f"{1e3 * row['expected_added_s']:.2f}" if slower else "-",
            )
        )  # fmt: skip
    table = common.markdown(header, cells)
    print(f"{gathers} gathers in a step\n{table}")
    if args.write:
        about = {"environment": common.environment(1), "arguments": vars(args), "dtype": width,
                 "gathers": gathers}  # fmt: skip
        print(common.write_result("tensor_parallel", {**about, "rows": rows}, [table]))


if __name__ == "__main__":
    main()

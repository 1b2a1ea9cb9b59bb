"""What do a newcomer's first three minutes behind the build look like?

The README's first two commands are run as they stand there: `specdec chat` with one question, and
`specdec generate`, its tokens coloured by who drafted them. Then the second one is decoded plainly
and by default in turns, each time in a process of its own. Said is how long every command took, how
much faster than plain it decodes, and what is not as it should be: an answer that is empty, tokens
that differ from plain decoding's, no coloured token, no speed-up, more than three minutes in all.

    python -m benchmarks.first_minutes [--rounds 3] [--output file.json]

Exits with 1 if something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from specdec_ext.installation import cpu_name

README = Path(__file__).resolve().parents[1] / "README.md"
LIMIT_S = 180.0
_COLOR = re.compile(r"\x1b\[\d+m")
# What the README's lines show a reader, and a comparison has no use for.
_SHOWN = ("--stats", "--color_accepted")


@dataclass(frozen=True)
class Minutes:
    """What was seen.

    answers         of `specdec chat` and of `specdec generate`
    colored         `specdec generate` showed drafted tokens in colour
    equal           tokens of every default run are those of every plain run
    seconds         of each command, from its start to its end
    default, plain  tokens per second behind the first token, medians of the rounds
    """

    answers: tuple[str, str]
    colored: bool
    equal: bool
    seconds: dict[str, float]
    default: float
    plain: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def faults(self) -> list[str]:
        """What is not as it should be, in words."""
        found = [
            f"specdec {name} answered with nothing"
            for name, answer in zip(("chat", "generate"), self.answers, strict=True)
            if not answer.strip()
        ]
        if not self.colored:
            found.append("no token is coloured")
        if not self.equal:
            found.append("the tokens differ from those of plain decoding")
        if self.default <= self.plain:
            found.append(f"{self.default:.1f} tokens/s are not more than {self.plain:.1f} of plain")
        if self.total > LIMIT_S:
            found.append(f"{self.total:.0f} s are more than {LIMIT_S:.0f}")
        return found


def readme_commands(text: str) -> tuple[list[str], list[str]]:
    """The words of the README's first `specdec chat` and first `specdec generate`."""
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("specdec ")]
    chat, generate = (next(w for w in lines if w[1] == name) for name in ("chat", "generate"))
    return chat, generate


def run(words: Sequence[str]) -> tuple[str, float]:
    """(stdout, seconds) of a command of this package, in a process of its own, in colour."""
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "specdec_ext", *words[1:]],
        capture_output=True,
        text=True,
        env={**environment, "FORCE_COLOR": "1"},
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout, seconds


def tokens_per_second(metrics: dict[str, Any]) -> float:
    """Behind the first token, which belongs to the prompt."""
    total = metrics["num_generated_tokens"] / metrics["tokens_per_second"]
    rest = total - metrics["time_to_first_token_ms"] / 1e3
    return float((metrics["num_generated_tokens"] - 1) / max(rest, 1e-9))


def measure(chat: list[str], generate: list[str], rounds: int) -> Minutes:
    seconds = {}
    answer, seconds["chat"] = run(chat)
    shown, seconds["generate"] = run(generate)
    bare = [word for word in generate if word not in _SHOWN]
    ways = {"default": [*bare, "--json"], "plain": [*bare, "--json", "--no-speculation"]}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = set()
    for number in range(rounds):
        for name, words in ways.items():
            said, seconds[f"{name} {number + 1}"] = run(words)
            line = json.loads(said)
            speeds[name].append(tokens_per_second(line["metrics"]))
            tokens.add(tuple(line["token_ids"]))
    return Minutes(
        answers=(_COLOR.sub("", answer), _COLOR.sub("", shown)),
        colored=_COLOR.search(shown) is not None,
        equal=len(tokens) == 1,
        seconds=seconds,
        default=common.median(speeds["default"]),
        plain=common.median(speeds["plain"]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", help="write what was seen as JSON to this file")
    args = parser.parse_args(argv)
    chat, generate = readme_commands(README.read_text(encoding="utf-8"))
    load = common.load_average()
    seen = measure(chat, generate, args.rounds)
    for words, answer in zip((chat, generate), seen.answers, strict=True):
        print(f"$ {shlex.join(words)}\n{answer.strip()}\n")
    for name, seconds in seen.seconds.items():
        print(f"{name:12}{seconds:>8.1f} s")
    print(f"{'all':12}{seen.total:>8.1f} s")
    print(f"default / plain: {seen.default:.1f} / {seen.plain:.1f} tokens/s = "
          f"{seen.default / seen.plain:.2f}")  # fmt: skip
    faults = seen.faults()
    for fault in faults:
        print(f"not as it should be: {fault}", file=sys.stderr)
    if args.output:
        about = {"commit": common.commit(), "cpu": cpu_name(),
                 "load_average": [load, common.load_average()]}  # fmt: skip
        content = {**about, **asdict(seen), "total": seen.total, "faults": faults}
        Path(args.output).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

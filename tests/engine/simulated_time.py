"""An executor whose texts and times are scripted: seconds of whole schedules without a clock.

The model knows each request's text by position, so no row is computed, and a forward pass takes
what `SECONDS` says of its rows; of these times alone the executor's table is learnt, as by the
steps that are served. The table is near what two cores do with a small 4-bit model: the first rows
wait for the weights, every further one is paid for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec_ext import _core
from specdec_ext.engine import step_cost

VOCAB = 512
PAGE = 32
SECONDS = _core.StepCost({1: 5.0, 2: 6.0, 4: 8.0, 8: 12.0, 16: 20.0, 1024: 1000.0})


@dataclass(frozen=True)
class Schedule:
    """Sums over the steps of one schedule, in the table's unit."""

    seconds: float
    decode_seconds: float  # of steps that read no prompt
    steps: int
    rows: int
    prompts_read: float  # when the last prompt had been read
    texts: tuple[tuple[int, ...], ...]


def guessed_times() -> Any:
    """What a first run begins with: the shape that engine/served_cost.py guesses, too fast."""
    return _core.StepTimes(
        _core.StepCost({n: 2.5 * (1 + 0.15 * (n - 1)) for n in step_cost.ROW_COUNTS})
    )


def text_of(seed: int, length: int, *, repeats: float) -> list[int]:
    """A text that goes on as a phrase of it did, with the chance `repeats` of each token, and with
    some other token else."""
    source = random.Random(seed)
    text = [source.randrange(VOCAB) for _ in range(16)]
    at = 0
    while len(text) < length:
        if source.random() < repeats:
            text.append(text[at])
            at += 1
        else:
            at = source.randrange(len(text) - 8)
            text.append(source.randrange(VOCAB))
    return text


def run(
    prompts: Sequence[int],
    max_tokens: int | Sequence[int],
    *,
    method: str = "suffix",
    slowdown: float = 4.0,
    repeats: float = 0.8,
    seconds: Any = SECONDS,
    max_num_tokens: int = 1024,
    arrivals: Sequence[int] | None = None,
    times: Any = None,
    predictions: Callable[[list[int]], list[int]] | None = None,
    outputs: Sequence[list[int]] | None = None,
    given: Sequence[list[int]] | None = None,
) -> Schedule:
    """Decodes prompts of these lengths together.

    max_tokens  of each request, or of all
    slowdown    SchedulerConfig.max_prefill_slowdown; 0: no limit
    repeats     of text_of()
    seconds     T(rows) of the simulated model
    arrivals    the step before which each prompt comes; None: all at once
    times       a StepTimes that has seen other schedules; None: one that begins with a guess
    predictions what each request's output is said to be, made of what it will be; None: nothing
    outputs     the texts behind the prompts; None: text_of() goes on
    given       the prompts themselves; None: text_of() begins with them
    """
    count = len(prompts)
    tokens = [max_tokens] * count if isinstance(max_tokens, int) else list(max_tokens)
    texts = [
        text_of(seed, prompts[seed] + tokens[seed] + 1, repeats=repeats) for seed in range(count)
    ]
    for text, prompt, output in zip(texts, prompts, outputs or (), strict=False):
        text[prompt : prompt + len(output)] = output
    for text, prompt in zip(texts, given or (), strict=False):
        text[: len(prompt)] = prompt
    longest = max(p + n for p, n in zip(prompts, tokens, strict=True))
    pages = torch.zeros(1, count * (longest // PAGE + 6), 1, PAGE, 8)
    executor = _core.Executor(
        pages, pages.clone(), vocab_size=VOCAB, max_batch_size=count, max_seq_len=longest,
        max_num_tokens=max_num_tokens, method=method,
        adaptive=method != "none" or predictions is not None,
        max_prefill_slowdown=slowdown,
    )  # fmt: skip
    times = times or guessed_times()
    executor.set_step_cost(*times.cost.columns)
    starts = [0] * count if arrivals is None else arrivals
    owner: dict[int, int] = {}
    written: list[list[int]] = [[] for _ in texts]
    now = decode = read = 0.0
    steps = rows = 0
    while any(len(out) < n for out, n in zip(written, tokens, strict=True)):
        for i in range(count):
            if starts[i] == steps:
                output = texts[i][prompts[i] : prompts[i] + tokens[i]]
                rid = executor.submit(
                    texts[i][: prompts[i]], max_tokens=tokens[i],
                    prediction=[] if predictions is None else predictions(output),
                )  # fmt: skip
                owner[rid] = i
        plan = executor.plan()
        steps += 1
        if plan is None:
            continue
        rows += plan.num_rows
        took = seconds(plan.num_rows)
        now += took
        if plan.num_prefill_rows:
            read = now
        else:
            decode += took
        if times.observe(plan, took):
            executor.set_step_cost(*times.cost.columns)
        positions, ids = plan.positions.tolist(), plan.request_ids.tolist()
        texts_of_rows = np.repeat(ids, np.diff(plan.cu_rows)).tolist()
        chosen = [
            texts[owner[texts_of_rows[r]]][positions[r] + 1] for r in plan.logit_rows.tolist()
        ]
        for out in executor.commit(plan, torch.tensor(chosen, dtype=torch.int32)):
            written[owner[out.request_id]] += out.tokens
    for text, got, prompt, n in zip(texts, written, prompts, tokens, strict=True):
        assert got == text[prompt : prompt + n]
    return Schedule(now, decode, steps, rows, read, tuple(map(tuple, written)))

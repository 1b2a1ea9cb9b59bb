"""`make demo`: the built-in model decodes real prompts four ways, and the texts are compared.

Every prompt is decoded plainly, as LLM() does by default, with lookahead and with prompt lookup;
confirmed drafts are shown in colour on a terminal. Then a table shows cost and gain, also where
speculation was slower. Exit code 0 if every speculative output equals the plain one token for
token, else 1.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .cli.common import use_color
from .errors import SpecdecError
from .log import setup_logging
from .text.source_colors import colored

__all__ = ["main"]

BOLD, RESET = "\x1b[1m", "\x1b[0m"
MAX_TOKENS = 96
LOOKAHEAD = (4, 3, 4)
PROMPT_LOOKUP = (10, 2)

# (name, is a chat message, text)
PROMPTS: tuple[tuple[str, bool, str], ...] = (
    (
        "code",
        False,
        'class Stack:\n    """A last-in, first-out stack."""\n\n'
        "    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, item):\n        self.items.append(item)\n\n"
        "    def pop(self):\n        return self.items.pop()\n\n\n"
        'class Queue:\n    """A first-in, first-out queue."""\n\n'
        "    def __init__(self):\n        self.items = []\n\n    def ",
    ),
    (
        "summary",
        True,
        "Summarize this report in three sentences and quote its most important sentence.\n\n"
        "The harbour bridge was closed to traffic on Monday after inspectors found a crack in one "
        "of its steel girders. The city council said that the bridge will stay closed for at least "
        "six weeks while the girder is replaced. Buses that cross the bridge are sent through the "
        "river tunnel, and the ferry between the two banks runs every ten minutes. The council "
        "expects the repair to cost four million dollars.",
    ),
    (
        "passage",
        True,
        "Read the passage and answer the question with a sentence from it.\n\n"
        "Passage: The lighthouse at Grey Point was built in 1871 to warn ships of the reef that "
        "lies two miles from the shore. Its lamp burned whale oil until 1889, when it was changed "
        "to kerosene. The lighthouse was automated in 1962, and the last keeper, Martha Quill, "
        "moved to the village. Today the tower is a museum that is open from May to October.\n\n"
        "Question: When was the lighthouse automated, and what happened to its last keeper?",
    ),
    (
        "edit",
        True,
        "Return this JSON with every price raised by 1 and nothing else changed.\n\n"
        '[{"name": "apple", "price": 3, "unit": "kg"}, {"name": "pear", "price": 4, "unit": "kg"}, '
        '{"name": "plum", "price": 5, "unit": "kg"}, {"name": "fig", "price": 9, "unit": "kg"}]',
    ),
    ("chat", True, "What should I pack for a weekend hike in the mountains? Make a short list."),
)


@dataclass
class Run:
    """One prompt decoded one way."""

    name: str
    method: str
    token_ids: list[int]
    metrics: dict[str, Any]
    identical: bool

    @property
    def decode_s(self) -> float:
        """Seconds after the first token: the prompt's own pass is the same for all methods."""
        return (self.metrics["mean_itl_ms"] or 0.0) * (len(self.token_ids) - 1) / 1e3


@dataclass
class Total:
    """Sums of one method over all prompts."""

    tokens: int = 0
    passes: int = 0
    spec_steps: int = 0
    accepted: int = 0
    decoded: int = 0
    decode_s: float = 0.0
    decode_rows: int = 0
    decode_passes: int = 0
    runs: list[Run] = field(default_factory=list)

    def add(self, run: Run) -> None:
        spec = run.metrics["speculative_decoding"]
        self.runs.append(run)
        self.tokens += len(run.token_ids)
        self.passes += run.metrics["num_forward_passes"]
        self.spec_steps += spec["num_spec_steps"]
        self.accepted += spec["num_accepted_draft_tokens"]
        self.decoded += len(run.token_ids) - 1
        self.decode_s += run.decode_s
        self.decode_rows += run.metrics["num_rows"] - run.metrics["num_prompt_tokens"]
        self.decode_passes += run.metrics["num_forward_passes"] - run.metrics["num_prefill_passes"]


def interpolate(rows: Sequence[int], seconds: Sequence[float], at: float) -> float:
    """T(at) from the measured table, straight lines between its points."""
    for i in range(1, len(rows)):
        if at <= rows[i] or i == len(rows) - 1:
            share = (at - rows[i - 1]) / (rows[i] - rows[i - 1])
            return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])
    return seconds[0]


def _decode(llm: Any, item: tuple[str | None, list[int]], params: Any, color: bool) -> Any:
    """Stream one prompt to stdout; returns its RequestOutput."""
    output = None
    for output in llm.stream({"prompt_token_ids": item[1]}, params):
        for text, source in output.outputs[0].delta_segments:
            sys.stdout.write(colored(text, source) if color else text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return output


def _table(totals: dict[str, Total], costs: dict[str, tuple[list[int], list[float]]]) -> None:
    plain = totals["plain"]
    print(
        f"{'method':<24} {'tokens':>6} {'passes':>6} {'accept len':>10} {'tok/s':>7} "
        f"{'speed-up':>8} {'rows/pass':>9} {'break-even':>10}"
    )
    for method, total in totals.items():
        accept = 1.0 + (total.accepted / total.spec_steps if total.spec_steps else 0.0)
        mean_rows = total.decode_rows / max(1, total.decode_passes)
        rows, seconds = costs[method]
        even = interpolate(rows, seconds, mean_rows) / seconds[0]
        speed = total.decoded / total.decode_s if total.decode_s else 0.0
        ratio = plain.decode_s / total.decode_s if total.decode_s else 0.0
        print(
            f"{method:<24} {total.tokens:>6} {total.passes:>6} {accept:>10.2f} {speed:>7.1f} "
            f"{ratio:>7.2f}x {mean_rows:>9.1f} {even:>9.2f}x"
        )
    print(
        "\naccept len: tokens per pass that verified drafts. tok/s and speed-up: decoding only, "
        "without the\nprompt's own pass. rows/pass: tokens that a pass checks. break-even: "
        "T(rows)/T(1), the tokens that\na pass of that many rows must yield to pay on this "
        "machine. All methods adapt their draft lengths."
    )


def run_demo(color: bool) -> int:
    from .config.engine import SchedulerConfig
    from .config.lookahead import LookaheadDecodingConfig
    from .config.ngram import NGramDecodingConfig
    from .engine.step_cost import measure_step_cost
    from .llm import LLM
    from .request.sampling_params import SamplingParams

    limits = SchedulerConfig(max_batch_size=1, max_seq_len=1024)
    methods: dict[str, Any] = {
        "auto (the default)": "auto",
        f"lookahead {LOOKAHEAD}": LookaheadDecodingConfig(*LOOKAHEAD),
        f"prompt lookup {PROMPT_LOOKUP}": NGramDecodingConfig(*PROMPT_LOOKUP),
    }
    begin = time.perf_counter()
    llms = {
        name: LLM(speculative_config=spec, scheduler_config=limits)
        for name, spec in methods.items()
    }
    first = next(iter(llms.values()))
    info = first.model.info
    print(
        f"model: {first.model_path.name}, {info.dtype}, {info.impl}, numerics: {info.numerics}; "
        f"loaded in {time.perf_counter() - begin:.1f} s"
    )
    # Before the first request, so that no request's time holds it.
    costs = {
        name: measure_step_cost(
            llm.model, num_pages=llm.memory.num_pages, page_size=llm.memory.tokens_per_block
        )
        for name, llm in llms.items()
    }
    for llm in llms.values():  # the engine's own calibration, and the pages' first touch
        llm.generate("Warm up.", SamplingParams(max_tokens=4), use_tqdm=False)
    costs = {"plain": next(iter(costs.values())), **costs}
    totals = {name: Total() for name in costs}
    params = SamplingParams(max_tokens=MAX_TOKENS)
    off = SamplingParams(max_tokens=MAX_TOKENS, speculative_config=False)
    lines: list[str] = []
    for name, is_chat, text in PROMPTS:
        if is_chat:
            item = first.prompts.read_chat([{"role": "user", "content": text}], None, True)
        else:
            item = first.prompts.read(text)
        plain_ids: list[int] = []
        for method in totals:
            llm = llms.get(method, first)
            print(f"{BOLD if color else ''}--- {name}, {method}{RESET if color else ''}")
            output = _decode(llm, item, off if method == "plain" else params, color)
            out = output.outputs[0]
            if out.finish_reason == "error":
                print(f"{name}, {method}: failed: {out.error}", file=sys.stderr)
                return 1
            if method == "plain":
                plain_ids = out.token_ids
            run = Run(name, method, out.token_ids, output.metrics, out.token_ids == plain_ids)
            totals[method].add(run)
            lines.append(
                f"{name}, {method}: {len(run.token_ids)} tokens in "
                f"{run.metrics['num_forward_passes']} passes, "
                f"identical: {'yes' if run.identical else 'no'}"
            )
            print(lines[-1])
    print("\n" + "\n".join(lines) + "\n")
    _table(totals, costs)
    for llm in llms.values():
        llm.close()
    return 0 if all(run.identical for t in totals.values() for run in t.runs) else 1


def main() -> int:
    setup_logging(os.environ.get("SPECDEC_LOG_LEVEL"))
    try:
        return run_demo(use_color("auto", sys.stdout))
    except SpecdecError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

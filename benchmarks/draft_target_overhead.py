"""What does a draft-target step cost outside the two models?

A tiny pair of random Llamas (target: 2 layers x 64; draft: 1 layer x 32), fp32, one thread, K = 5
fixed: time of a step less the time inside the target's and the draft model's forward passes, and
the same of transformers' assisted generation with the same two models in the same run, per pass of
its target. In wall and in process CPU time; on a loaded machine only the latter says something.

    python -m benchmarks.draft_target_overhead [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import common, models, runners

DRAFTS = 5
PROMPT = 64
PAIR = ("tiny", "tiny-draft")


class Stopwatch:
    """Wall and CPU seconds inside the calls of one method, and how often it was called."""

    def __init__(self, owner: Any, method: str) -> None:
        self.calls, self.wall, self.cpu = 0, 0.0, 0.0
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            result = call(*args, **kwargs)
            self.cpu += time.process_time() - cpu
            self.wall += time.perf_counter() - wall
            self.calls += 1
            return result

        # transformers reads the signature to choose what it passes.
        timed.__wrapped__ = call  # type: ignore[attr-defined]
        setattr(owner, method, timed)

    def take(self) -> tuple[int, float, float]:
        taken = self.calls, self.wall, self.cpu
        self.calls, self.wall, self.cpu = 0, 0.0, 0.0
        return taken


def per_step(whole: Stopwatch, parts: list[Stopwatch], steps: Stopwatch) -> dict[str, float]:
    """Microseconds per step of `whole` less `parts`."""
    _, wall, cpu = whole.take()
    taken = [part.take() for part in parts]
    count = steps.calls or next(t[0] for t, p in zip(taken, parts, strict=True) if p is steps)
    return {
        "wall_us": (wall - sum(t[1] for t in taken)) / count * 1e6,
        "cpu_us": (cpu - sum(t[2] for t in taken)) / count * 1e6,
        "steps": count,
    }


def ours(
    target: Path, draft: Path, prompts: list[list[int]], tokens: int, adaptive: bool
) -> tuple[Callable[[], dict[str, float]], Callable[[], None]]:
    import specdec_ext

    llm = specdec_ext.LLM(
        target,
        speculative_config=specdec_ext.DraftTargetDecodingConfig(
            draft, max_draft_len=DRAFTS, adaptive=adaptive
        ),
        scheduler_config={"max_batch_size": 1, "max_seq_len": PROMPT + tokens + 8},
    )
    params = specdec_ext.SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
    step = Stopwatch(llm.engine, "step")
    assert llm.draft_model is not None
    inside = [Stopwatch(llm.model, "forward"), Stopwatch(llm.draft_model, "forward")]

    def run() -> dict[str, float]:
        for prompt in prompts:
            llm.generate([prompt], params, use_tqdm=False)
        return per_step(step, inside, inside[0])

    return run, llm.close


def peer(
    target: Path, draft: Path, prompts: list[list[int]], tokens: int
) -> tuple[Callable[[], dict[str, float]], Callable[[], None]]:
    import torch
    from transformers import AutoModelForCausalLM

    big, small = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (target, draft)
    )
    for model in (big, small):
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = None
    small.generation_config.num_assistant_tokens = DRAFTS
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0.0
    whole = Stopwatch(big, "generate")
    inside = [Stopwatch(big, "forward"), Stopwatch(small, "forward")]

    def run() -> dict[str, float]:
        with torch.inference_mode():
            for prompt in prompts:
                ids = torch.tensor([prompt])
                big.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=small,
                    max_new_tokens=tokens,
                    do_sample=False,
                )
        return per_step(whole, inside, inside[0])

    return run, lambda: None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="1 round, 40 tokens; no file")
    args = parser.parse_args()
    common.set_threads(1)
    runners.quiet_peers()
    environment = common.environment(1)
    target, draft = (models.make(name) for name in PAIR)
    count, tokens, rounds = (1, 40, 1) if args.quick else (4, 160, args.rounds)
    prompts = [models.random_prompt(models.SHAPES["tiny"].vocab, PROMPT, i) for i in range(count)]
    programs = {
        "fixed": ours(target, draft, prompts, tokens, adaptive=False),
        "adaptive": ours(target, draft, prompts, tokens, adaptive=True),
        "transformers": peer(target, draft, prompts, tokens),
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for run, _ in programs.values():
        run()  # warm-up: calibration, allocations
    for _ in range(rounds):
        for name, (run, _) in programs.items():
            results[name].append(run())
    for _, close in programs.values():
        close()
    # The least of the rounds: anything above it is the machine, not the program.
    least = {
        name: {key: min(r[key] for r in runs) for key in runs[0]} for name, runs in results.items()
    }
    table = common.markdown(
        ["program", "us/step outside the models, wall", "CPU", "steps"],
        [[name, r["wall_us"], r["cpu_us"], r["steps"]] for name, r in least.items()],
    )
    print(table)
    if not args.quick:
        result = {
            "benchmark": "draft_target_overhead",
            "environment": environment,
            "dtype": "float32",
            "draft_length": DRAFTS,
            "prompt_tokens": PROMPT,
            "results": least,
        }
        common.write_result("draft_target_overhead", result, [table])
    return 0


if __name__ == "__main__":
    sys.exit(main())

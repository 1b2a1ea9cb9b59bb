"""Measures cases in the environment whose Python runs this file: JSON lines in, JSON lines out.

It is started by step_versions in two environments, of two commits, so it imports nothing of
benchmarks and of specdec_ext only public names.

A case: {"model": folder, "spec": configuration as a dict, or null, "prompts": [[ids]], "tokens",
"repeats"}. The answer, microseconds per step, the least of the repeats:

    step_cpu_us, step_wall_us    the whole call of generate(), divided by its forward passes
    host_cpu_us, host_wall_us    the same less the time inside the target's forward pass
    steps, tokens, digest        forward passes and tokens of one call, and a hash of the tokens
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
from typing import Any


class ForwardClock:
    """Processor seconds inside the model's forward passes.

    An engine that reaches its model by another way than llm.model.forward is seen by the number of
    calls; its passes are then taken from its own clock, which shows wall time.
    """

    def __init__(self, llm: Any) -> None:
        self.calls, self.seconds = 0, 0.0
        forward = getattr(getattr(llm, "model", None), "forward", None)
        if forward is None:
            return

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            result = forward(*args, **kwargs)
            self.seconds += time.process_time() - begin
            self.calls += 1
            return result

        llm.model.forward = timed


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """The answer to one case."""
    import specdec_ext

    prompts, tokens = case["prompts"], case["tokens"]
    longest = max(map(len, prompts)) + tokens + 8
    llm = specdec_ext.LLM(
        model=case["model"],
        dtype="float32",
        device="cpu",
        speculative_config=case["spec"],
        kv_cache_config={"max_tokens": len(prompts) * (longest + 128)},
        scheduler_config={"max_batch_size": len(prompts), "max_seq_len": longest},
    )
    clock = ForwardClock(llm)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    best: dict[str, float] = {}
    with llm:
        for number in range(1 + case["repeats"]):
            length = tokens if number else min(8, tokens)  # the first call warms up
            params = specdec_ext.SamplingParams(
                max_tokens=length, ignore_eos=True, detokenize=False
            )
            gc.collect()
            calls, inside, before = clock.calls, clock.seconds, llm.get_metrics()
            wall, cpu = time.perf_counter(), time.process_time()
            outputs = llm.generate(inputs, params, use_tqdm=False)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            after = llm.get_metrics()
            steps = after["num_forward_passes"] - before["num_forward_passes"]
            forward = after["time"]["forward_s"] - before["time"]["forward_s"]
            seen = clock.calls - calls == steps
            figures = {
                "step_cpu_us": cpu,
                "step_wall_us": wall,
                "host_cpu_us": cpu - (clock.seconds - inside if seen else forward),
                "host_wall_us": wall - forward,
            }
            if number:
                for name, seconds in figures.items():
                    best[name] = min(best.get(name, 1e9), seconds / steps * 1e6)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    return {
        **best,
        "steps": steps,
        "tokens": sum(map(len, texts)),
        "digest": hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16],
        "forward_clock": "processor" if seen else "wall",
    }


def main() -> None:
    import specdec_ext

    specdec_ext.set_num_threads(1)
    about = {"package": str(specdec_ext.__file__), "isa": specdec_ext.build_info()["cpu_isa"]}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

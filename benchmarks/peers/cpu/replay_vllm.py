"""Replays a trace with vLLM: `replay_vllm.py TRACE.json RESULT.json`, in its own environment.

The trace holds the model's folder, the requests' ids and arrivals, and the limits of the engine;
the result is what arrivals.replay() returns. Steps run in this process, as ours do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.arrivals import Served, replay


def main(trace_file: str, result_file: str) -> None:
    trace = json.loads(Path(trace_file).read_text())
    os.environ.setdefault("OMP_NUM_THREADS", str(trace["threads"]))
    from vllm import LLM, SamplingParams, __version__

    block = 32  # its attention on the CPU takes multiples
    llm: Any = LLM(
        model=trace["model"],
        dtype=trace["dtype"],
        max_model_len=trace["max_seq_len"],
        max_num_seqs=trace["max_batch_size"],
        block_size=block,
        num_gpu_blocks_override=trace["pool_tokens"] // block,
        enable_prefix_caching=False,
        seed=0,
    )
    engine = llm.llm_engine
    greedy = {"temperature": 0.0, "max_tokens": trace["max_tokens"]}
    params = SamplingParams(**greedy)
    first: dict[int, float] = {}

    def submit(index: int) -> None:
        engine.add_request(str(index), {"prompt_token_ids": trace["prompts"][index]}, params)

    def step() -> list[Served]:
        ended = []
        outputs = engine.step()
        now = time.perf_counter()
        for out in outputs:
            index, tokens = int(out.request_id), len(out.outputs[0].token_ids)
            if tokens:
                first.setdefault(index, now)
            if out.finished:
                ended.append(Served(index, first.get(index, now), now, tokens))
        return ended

    # Kernels are compiled and memory is touched before the clock runs.
    # Parameters of its own: generate() changes them to be told of the end alone.
    prompts = [{"prompt_token_ids": trace["prompts"][0]}] * 4
    llm.generate(prompts, SamplingParams(**greedy), use_tqdm=False)
    found = replay(trace["arrivals"], submit, step)
    Path(result_file).write_text(json.dumps({**found, "version": __version__}))


if __name__ == "__main__":
    main(*sys.argv[1:])

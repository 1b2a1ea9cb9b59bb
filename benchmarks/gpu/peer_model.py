"""transformers' own decoding of the same 8B-shaped model: static cache, compiled, bf16."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.engine_cells import ModelCell
from benchmarks.gpu.model_step import config_of
from benchmarks.gpu.run import Target

SHORT, LONG, ROUNDS = 8, 72, 3


def measure(cell: ModelCell, target: Target) -> dict[str, Any]:
    """Returns the record: microseconds of a step that decodes one token of each request, from the
    difference between a long and a short text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {k: v for k, v in config_of(cell).items() if k not in ("architectures", "dtype")}
    torch.manual_seed(0)
    with torch.device(target.device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
        finally:
            torch.set_default_dtype(previous)
    model.generation_config.pad_token_id = 0
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(cell.vocab, (cell.requests, cell.context), generator=generator)
    ids = prompts.to(target.device)

    def generate(count: int) -> float:
        start = time.perf_counter()
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            cache_implementation="static",
        )
        if not target.emulated:
            torch.cuda.synchronize()
        if text.shape[1] != cell.context + count:
            raise ArithmeticError(f"{text.shape[1] - cell.context} tokens instead of {count}")
        return time.perf_counter() - start

    record: dict[str, Any] = {**cell.describe(), "kind": "peer", "status": "ok", "us": None}
    if target.emulated:
        generate(2)
        return record
    for count in (LONG, LONG, SHORT):  # compiled, then as it is
        generate(count)
    times = [(generate(LONG) - generate(SHORT)) / (LONG - SHORT) * 1e6 for _ in range(ROUNDS)]
    record["us"] = round(statistics.median(times), 1)
    record["rounds_us"] = [round(us, 1) for us in times]
    return record

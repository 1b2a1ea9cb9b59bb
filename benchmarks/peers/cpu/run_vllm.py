"""Worker: vLLM's CPU build on a Hugging Face folder."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.peers.cpu import job as jobs


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(job["threads"])
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        import vllm

        self._vllm = vllm
        self.version = vllm.__version__
        speculation = {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_max": 3}
        self._llm = vllm.LLM(
            job["model"],
            dtype="bfloat16",
            max_model_len=2048,
            enable_prefix_caching=False,
            speculative_config=speculation if job["method"] == "lookup" else None,
        )

    def generate(self, ids: list[int], max_tokens: int) -> list[int]:
        return self.generate_batch([ids], max_tokens)[0]

    def generate_batch(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        del self._llm


if __name__ == "__main__":
    jobs.serve(Engine)

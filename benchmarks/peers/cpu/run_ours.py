"""Worker: this package."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.cpu import job as jobs

METHODS: dict[str, Any] = {"plain": None, "lookup": {"method": "ngram"}, "default": "auto"}
CACHED_TOKENS = 10240  # of K/V: eight prompts and their answers fit


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        import specdec_ext

        specdec_ext.set_num_threads(job["threads"])
        self.version = specdec_ext.__version__
        self._package = specdec_ext
        self._llm = specdec_ext.LLM(
            job["model"],
            speculative_config=METHODS[job["method"].removeprefix(jobs.FAST)],
            numerics="fast" if job["method"].startswith(jobs.FAST) else "auto",
            kv_cache_config={"max_tokens": CACHED_TOKENS},
            enable_prefix_caching=False,
            max_batch_size=max(1, len(job["batch"])),
        )

    def generate(self, ids: list[int], max_tokens: int) -> list[int]:
        return self.generate_batch([ids], max_tokens)[0]

    def generate_batch(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = self._package.SamplingParams(
            max_tokens=max_tokens, temperature=0.0, detokenize=False
        )
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        self._llm.close()


if __name__ == "__main__":
    jobs.serve(Engine)

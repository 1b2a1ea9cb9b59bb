"""Worker: OpenVINO GenAI, reading the GGUF file itself. K and V in the precision of the sums."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.cpu import job as jobs


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        self._method = job["method"]
        self.version = openvino_genai.__version__
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = False
        options: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": job["precision"],
            "KV_CACHE_PRECISION": job["precision"],
            "INFERENCE_NUM_THREADS": job["threads"],
        }
        if self._method == "lookup":
            options["prompt_lookup"] = True
        self._pipeline = openvino_genai.LLMPipeline(
            job["model"], "CPU", scheduler_config=scheduler, **options
        )
        self._tokenizer = self._pipeline.get_tokenizer()

    def _config(self, max_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.do_sample = False
        config.apply_chat_template = False
        if self._method == "lookup":
            config.num_assistant_tokens, config.max_ngram_size = 10, 3
        config.eos_token_id = self._tokenizer.get_eos_token_id()
        return config

    def generate(self, ids: list[int], max_tokens: int) -> list[int]:
        tensor = self._openvino.Tensor(self._numpy.array([ids], self._numpy.int64))
        return list(self._pipeline.generate(tensor, self._config(max_tokens)).tokens[0])

    def generate_batch(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        # A batch of several lengths is taken as texts alone.
        texts = [self._tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]
        answers = self._pipeline.generate(texts, self._config(max_tokens))
        total = answers.perf_metrics.get_num_generated_tokens()
        return [[0] * total]  # only counted

    def close(self) -> None:
        del self._pipeline


if __name__ == "__main__":
    jobs.serve(Engine)

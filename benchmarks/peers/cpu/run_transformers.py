"""Worker: transformers on a Hugging Face folder, bfloat16."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.cpu import job as jobs


class Engine:
    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(job["threads"])
        self._torch = torch
        self._lookup = job["method"] == "lookup"
        self.version = transformers.__version__
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.bfloat16
        ).eval()
        self._model.generation_config.pad_token_id = 0

    def generate(self, ids: list[int], max_tokens: int) -> list[int]:
        options = {"prompt_lookup_num_tokens": 10} if self._lookup else {}
        prompt = self._torch.tensor([ids])
        return self._generate(prompt, self._torch.ones_like(prompt), max_tokens, options)[0]

    def generate_batch(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]] | None:
        if self._lookup:
            return None  # batch 1 alone
        width = max(map(len, prompts))
        padded = self._torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
        mask = self._torch.tensor([[0] * (width - len(i)) + [1] * len(i) for i in prompts])
        answers = self._generate(padded, mask, max_tokens, {})
        return [[token for token in answer if token] for answer in answers]

    def _generate(self, ids: Any, mask: Any, max_tokens: int, options: Any) -> list[list[int]]:
        with self._torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, **options
            )
        answers: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return answers

    def close(self) -> None:
        del self._model


if __name__ == "__main__":
    jobs.serve(Engine)

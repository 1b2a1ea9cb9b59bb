"""The built-in model as target: prompts in, texts of plain and of speculative decoding out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from driver import Job, model_engine

DRAFTERS: dict[str, dict[str, Any]] = {
    "lookahead-4-3-4": {"method": "lookahead", "lookahead": (4, 3, 4), "adaptive": False},
    "lookahead-7-7-7": {"method": "lookahead", "lookahead": (7, 7, 7), "adaptive": False},
    "lookahead-adaptive": {"method": "lookahead", "lookahead": (7, 7, 7), "adaptive": True},
    "ngram-4-2": {
        "method": "ngram",
        "ngram": {"max_draft_len": 4, "max_matching_ngram_size": 2},
        "adaptive": False,
    },
    "ngram-10-2": {
        "method": "ngram",
        "ngram": {"max_draft_len": 10, "max_matching_ngram_size": 2},
        "adaptive": False,
    },
    "ngram-adaptive": {
        "method": "ngram",
        "ngram": {"max_draft_len": 10, "max_matching_ngram_size": 3},
        "adaptive": True,
    },
}
# Rows of a step: long prompts are read in chunks, and three lookahead requests of 84 rows fit.
MAX_ROWS = 300


class Decoder:
    """The default model in one data type, "q4_1" as LLM() runs it, loaded once; plain texts are
    remembered."""

    def __init__(self, folder: Path, dtype: str, kv_cache_dtype: str = "auto") -> None:
        from transformers import AutoTokenizer

        from specdec_ext.models import load_model
        from specdec_ext.models.default import find_default_gguf

        self.folder = folder
        how: dict[str, Any] = {"max_rows": MAX_ROWS, "kv_cache_dtype": kv_cache_dtype}
        if dtype == "q4_1":
            self.model = load_model(find_default_gguf(), **how)
            assert self.model.info.dtype == dtype
        else:
            self.model = load_model(folder, dtype=dtype, **how)
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.plain: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def encode(self, message: str) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(
        self, prompts: list[list[int]], max_tokens: int, batch: int, page: int, **options: Any
    ) -> tuple[list[list[int]], int]:
        """Returns the texts and the number of accepted drafts."""
        longest = max(len(prompt) for prompt in prompts)
        engine = model_engine(
            self.model,
            page_size=page,
            max_batch_size=batch,
            max_seq_len=longest + max_tokens,
            max_num_tokens=MAX_ROWS,
            **options,
        )
        eos = {"eos_token_ids": list(self.model.info.eos_token_ids)}
        # Later requests join while earlier ones decode.
        jobs = [Job(p, max_tokens, eos, submit_step=4 * i) for i, p in enumerate(prompts)]
        deliveries = engine.run(jobs)
        assert all(d.finish_reason in ("stop", "length") for d in deliveries)
        return [d.tokens for d in deliveries], sum(d.num_accepted for d in deliveries)

    def plain_texts(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Returns the texts of plain decoding, each prompt alone, pages of 16."""
        for prompt in prompts:
            key = (tuple(prompt), max_tokens)
            if key not in self.plain:
                ((self.plain[key],), _) = self.decode([prompt], max_tokens, 1, 16)
        return [self.plain[tuple(prompt), max_tokens] for prompt in prompts]


def peer_texts(decoder: Decoder, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Returns transformers' greedy texts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(decoder.folder, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def sixty_prompts(decoder: Decoder) -> list[list[int]]:
    """Twelve of each evaluation set; they come with: python -m benchmarks.datasets."""
    from benchmarks import datasets

    prompts = [
        ids
        for name in datasets.SETS
        for _, ids in datasets.load_ids(decoder.tokenizer, name, 12, 700)
    ]
    assert len(prompts) == 60
    return prompts


def check_sixty_prompts(decoder: Decoder, drafter: str) -> None:
    """Tokens of a drafter and of plain decoding, 64 per prompt, three requests at once."""
    prompts = sixty_prompts(decoder)
    expected = decoder.plain_texts(prompts, 64)
    texts, accepted = decoder.decode(prompts, 64, 3, 16, **DRAFTERS[drafter])
    different = [i for i in range(60) if texts[i] != expected[i]]
    assert not different
    assert accepted > 0

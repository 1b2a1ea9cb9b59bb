"""The built-in model on real prompts: every drafter == plain decoding, and plain == transformers.

Tokens are compared one by one, in fp32 and bf16, batches of 1 and 3, several page sizes; pages
start as NaN, so that a stale or foreign entry shows. A few prompts in `make test`; sixty per data
type and drafter in `make test-slow` (with the evaluation texts: python -m benchmarks.datasets).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Job, model_engine

pytestmark = pytest.mark.default_model

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
DTYPES = ["float32", "bfloat16"]
# Rows of a step: long prompts are read in chunks, and three lookahead requests of 84 rows fit.
MAX_ROWS = 300
MESSAGES = [
    "Repeat this list three times, one item per line: apple, pear, plum, cherry.",
    "Write a Python function that returns the sum of the squares of a list, and its docstring.",
    "The ferry leaves Harwich at nine in the evening and arrives in Hook of Holland at eight in "
    "the morning. It carries cars, lorries and foot passengers. Summarize the text, then quote its "
    "first sentence.",
]


class Decoder:
    """The default model in one data type, loaded once; plain texts are remembered."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoTokenizer

        from specdec_ext.models import load_model

        self.folder = folder
        self.model = load_model(folder, dtype=dtype, max_rows=MAX_ROWS)
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


@pytest.fixture(scope="module", params=DTYPES)
def decoder(request: pytest.FixtureRequest, default_model_path: Path) -> Decoder:
    return Decoder(default_model_path, request.param)


@pytest.mark.parametrize(("batch", "page"), [(1, 16), (3, 2)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafter_equals_plain(decoder: Decoder, drafter: str, batch: int, page: int) -> None:
    prompts = [decoder.encode(message) for message in MESSAGES]
    expected = decoder.plain_texts(prompts, 64)
    texts, accepted = decoder.decode(prompts, 64, batch, page, **DRAFTERS[drafter])
    assert texts == expected
    assert accepted > 0, "no draft was ever accepted: the equality says nothing"


def test_batched_plain_equals_solo_plain(decoder: Decoder) -> None:
    prompts = [decoder.encode(message) for message in MESSAGES]
    for batch, page in ((3, 1), (3, 64)):
        texts, _ = decoder.decode(prompts, 64, batch, page)
        assert texts == decoder.plain_texts(prompts, 64)


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


@pytest.mark.filterwarnings("default")
def test_plain_equals_transformers(decoder: Decoder) -> None:
    if decoder.model.kv_dtype != torch.float32:
        return  # In bf16 transformers rounds by shape: its own greedy is no fixed text there.
    prompts = [decoder.encode(message) for message in MESSAGES]
    assert decoder.plain_texts(prompts, 64) == peer_texts(decoder, prompts, 64)


def sixty_prompts(decoder: Decoder) -> list[list[int]]:
    from benchmarks import datasets

    return [
        ids
        for name in datasets.SETS
        for _, ids in datasets.load_ids(decoder.tokenizer, name, 12, 700)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sixty_prompts(decoder: Decoder, drafter: str) -> None:
    prompts = sixty_prompts(decoder)
    assert len(prompts) == 60
    expected = decoder.plain_texts(prompts, 64)
    texts, accepted = decoder.decode(prompts, 64, 3, 16, **DRAFTERS[drafter])
    different = [i for i in range(60) if texts[i] != expected[i]]
    assert not different
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_sixty_prompts_equal_transformers(decoder: Decoder) -> None:
    if decoder.model.kv_dtype != torch.float32:
        return
    prompts = sixty_prompts(decoder)
    assert decoder.plain_texts(prompts, 64) == peer_texts(decoder, prompts, 64)

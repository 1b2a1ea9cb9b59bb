"""A small engine around the hash target, for the tests of the engine loop."""

from __future__ import annotations

import functools
import time
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hash_target import HashFunction, HashModel
from specdec_ext import _core
from specdec_ext.config.lookahead import LookaheadDecodingConfig
from specdec_ext.config.ngram import NGramDecodingConfig
from specdec_ext.config.parse import SpeculativeConfig
from specdec_ext.engine.loop import EngineLoop
from specdec_ext.engine.overlap import HostForward, ImmediateStream, OverlapPipeline
from specdec_ext.engine.overlap.loop import OverlapLoop
from specdec_ext.request.resolve import EngineLimits
from specdec_ext.request.sampling_params import SamplingParams

VOCAB = 64
FUNCTION = HashFunction(vocab=VOCAB)
NGRAM = NGramDecodingConfig(max_draft_len=6, max_matching_ngram_size=3, adaptive=False)
LOOKAHEAD = LookaheadDecodingConfig(4, 3, 4, adaptive=False)
METHODS: dict[str, SpeculativeConfig | None] = {
    "plain": None, "ngram": NGRAM, "lookahead": LOOKAHEAD,
}  # fmt: skip
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], [9, 8, 9, 8, 9], list(range(40))]


@functools.cache
def tokenizer() -> Any:
    """64 tokens: ASCII letters, and bytes of multi-byte characters that join at random."""
    alphabet = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c.isascii()][30:60]
    wide = ["ã", "ģ", "Ĥ", "Ġ", "â", "Ħ", "č", "ĊĊ"]
    words = alphabet + wide
    words += [a + b for a in alphabet[:5] for b in alphabet[:6]]
    core = Tokenizer(models.BPE({w: i for i, w in enumerate(words[:VOCAB])}, []))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def text_of(ids: list[int]) -> str:
    text: str = tokenizer().decode(ids, clean_up_tokenization_spaces=False)
    return text


class Broken(HashModel):
    """Raises in the forward passes named by `fails_at` (counted from 0)."""

    fails_at: dict[int, BaseException]
    count = 0
    delay_s = 0.0

    def forward(self, plan: Any) -> Any:
        self.count += 1
        time.sleep(self.delay_s)
        error = self.fails_at.get(self.count - 1)
        if error is not None:
            raise error
        return super().forward(plan)


def make_engine(
    config: SpeculativeConfig | None = None,
    *,
    num_pages: int = 64,
    page_size: int = 8,
    max_batch_size: int = 4,
    fails_at: dict[int, BaseException] | None = None,
    eos: tuple[int, ...] = (),
    calibrate: Any = None,
    with_tokenizer: bool = True,
    overlap_depth: int | None = None,
    max_seq_len: int = 256,
    max_num_tokens: int = 128,
    **options: Any,
) -> EngineLoop:
    """options: more of the executor's keywords."""
    model = Broken(FUNCTION, num_pages, page_size)
    model.fails_at = fails_at or {}
    how: dict[str, Any] = {"method": "none"}
    if isinstance(config, LookaheadDecodingConfig):
        how = {"method": "lookahead", "lookahead": config.triple}
    elif config is not None:
        ngram = config.to_dict()
        del ngram["method"], ngram["adaptive"]
        how = {"method": "ngram", "ngram": ngram}
    how |= options
    limits = EngineLimits(
        vocab_size=VOCAB, max_seq_len=max_seq_len, eos_token_ids=eos, speculative_config=config,
        num_pages=num_pages, tokens_per_block=page_size,
    )  # fmt: skip
    text = tokenizer() if with_tokenizer else None
    if overlap_depth is not None:
        ahead = _core.Executor(
            vocab_size=VOCAB, max_batch_size=max_batch_size, max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens, num_pages=num_pages, page_size=page_size,
            overlap_depth=overlap_depth, check_integrity=True, **how,
        )  # fmt: skip
        forward = HostForward(model, ahead, page_size=page_size, num_pages=num_pages)
        pipeline = OverlapPipeline(
            ahead, forward, model.k_pages, model.v_pages, stream=ImmediateStream()
        )
        return OverlapLoop(pipeline, model, limits=limits, tokenizer=text)
    executor = _core.Executor(
        model.k_pages, model.v_pages, vocab_size=VOCAB, max_batch_size=max_batch_size,
        max_seq_len=max_seq_len, max_num_tokens=max_num_tokens, check_integrity=True,
        adaptive=config.adaptive if config is not None else False, **how,
    )  # fmt: skip
    return EngineLoop(
        executor, model, limits=limits, tokenizer=text,
        calibrate=calibrate,
    )  # fmt: skip


def run(engine: EngineLoop, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    states = [engine.submit(engine.resolve(p, params)) for p in prompts]
    engine.run(states)
    return [s.snapshot() for s in states]


def assert_idle(engine: EngineLoop) -> None:
    """Nothing runs, every page is free."""
    assert engine.num_unfinished == 0
    stats = engine.executor.stats()
    assert (stats["running"], stats["waiting"], stats["promised_pages"]) == (0, 0, 0)
    assert stats["free_pages"] == stats["total_pages"]

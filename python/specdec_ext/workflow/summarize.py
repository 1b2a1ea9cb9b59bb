"""Summaries of articles by this package and by transformers: ROUGE, speed, equality of tokens.

Every article is decoded greedily: by transformers, by this package plainly, and with the drafts
that the configuration names. The prompts are token ids, the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..extras import require
from ..request.sampling_params import SamplingParams
from .articles import Article

if TYPE_CHECKING:
    from ..llm import LLM

__all__ = ["Side", "prompts_of", "rouge", "run_ours", "run_transformers"]

# What TensorRT-LLM's program puts after an article.
ENDING = " TL;DR: "
_ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@dataclass
class Side:
    """What one way of decoding gave.

    token_ids      of each article's output, without the end token
    seconds        of all calls, prompts included
    """

    name: str
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    acceptance_length: float | None = None
    rouge: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "num_tokens": self.num_tokens,
            "tokens_per_second": self.tokens_per_second,
        }


def prompts_of(articles: Sequence[Article], tokenizer: Any, max_input_len: int) -> list[list[int]]:
    """Token ids of each article and the words that ask for its summary, at most `max_input_len`.

    An article that is too long loses its end, never those words. Raises ConfigError.
    """
    ending = tokenizer.encode(ENDING.rstrip(), add_special_tokens=False)
    room = max_input_len - len(ending)
    if room < 1:
        raise ConfigError(
            f"max_input_length = {max_input_len}: {len(ending)} tokens of it ask for the summary; "
            "raise it"
        )
    result = []
    for article in articles:
        text = article.text.strip().replace(" n't", "n't")
        result.append(list(tokenizer.encode(text))[:room] + list(ending))
    return result


def rouge(texts: Sequence[str], articles: Sequence[Article]) -> dict[str, float]:
    """Mean F-measures of 100 (rouge-score, without stemmer). Raises ConfigError without it."""
    require("rouge_score", "summarize")
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(_ROUGE, use_stemmer=False)
    scores = [scorer.score(a.summary, text) for a, text in zip(articles, texts, strict=True)]
    return {n: 100 * sum(s[n].fmeasure for s in scores) / max(1, len(scores)) for n in _ROUGE}


def run_ours(
    llm: LLM,
    prompts: Sequence[list[int]],
    *,
    speculative: bool,
    output_len: int,
    batch_size: int,
    decode: Callable[[list[Any], SamplingParams], list[Any]] | None = None,
    on_batch: Callable[[int], object] = lambda done: None,
) -> Side:
    """Decode the prompts with this package, `batch_size` at a time.

    decode  in the place of llm.generate: a loop that drafts outside the engine
    Raises EngineError for a request that failed.
    """
    from ..errors import EngineError

    params = SamplingParams(
        max_tokens=output_len, speculative_config=None if speculative else False
    )
    side = Side("speculative" if speculative else "plain")
    passes = 0
    for first in range(0, len(prompts), batch_size):
        batch = [{"prompt_token_ids": ids} for ids in prompts[first : first + batch_size]]
        begin = time.perf_counter()
        if speculative and decode is not None:
            outputs = decode(batch, params)
        else:
            outputs = llm.generate(batch, params, use_tqdm=False)
        side.seconds += time.perf_counter() - begin
        for i, output in enumerate(outputs):
            one = output.outputs[0]
            if one.finish_reason == "error":
                raise EngineError(f"article {first + i + 1} failed: {one.error}")
            ends = set(llm.engine.limits.eos_token_ids)
            side.token_ids.append([token for token in one.token_ids if token not in ends])
            side.texts.append(one.text)
            passes += (output.metrics or {}).get("num_forward_passes", 0)
        on_batch(min(first + batch_size, len(prompts)))
    if passes:
        side.acceptance_length = side.num_tokens / passes
    return side


def run_transformers(
    model_dir: str,
    prompts: Sequence[list[int]],
    tokenizer: Any,
    *,
    dtype: str,
    output_len: int,
    batch_size: int,
    end_ids: Sequence[int],
    on_batch: Callable[[int], object] = lambda done: None,
) -> Side:
    """Decode the prompts with transformers on the CPU, greedily, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..models.quiet import quiet_transformers

    with quiet_transformers():
        loader: Any = AutoModelForCausalLM
        model = loader.from_pretrained(
            model_dir, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
        ).eval()
    side = Side("transformers")
    ends = list(end_ids) or None
    pad = end_ids[0] if end_ids else 0
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        longest = max(map(len, batch))
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
        begin = time.perf_counter()
        with torch.inference_mode(), quiet_transformers():
            rows = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=output_len,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=pad,
            )
        side.seconds += time.perf_counter() - begin
        for row in rows[:, longest:].tolist():
            stop = next((i for i, token in enumerate(row) if token in set(end_ids)), len(row))
            side.token_ids.append(row[:stop])
            side.texts.append(tokenizer.decode(row[:stop], skip_special_tokens=True))
        on_batch(min(first + batch_size, len(prompts)))
    return side

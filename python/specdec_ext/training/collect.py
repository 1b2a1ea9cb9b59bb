"""Self-distillation data: the target continues every prompt, its tokens and hidden states are kept.

All prompts go through one executor, as many at a time as the batch holds, so that a forward pass
always has enough rows to be efficient. Numerics are exact: a text does not depend on the batch, so
the same description always gives the same data.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import _core
from ..errors import ModelError
from ..models import load_model
from ..text.chat_template import render_chat
from ..text.tokenizer import eos_token_ids, load_tokenizer
from .cache import CacheWriter, TextRecord, fingerprint
from .fingerprint import model_sha256
from .prompts import CATEGORIES, TrainingPrompt, make_prompts

__all__ = ["CollectConfig", "collect"]

_PAGE_SIZE = 16
# The user's turn that the target writes for itself: drawn at this temperature.
_SELF_TEMPERATURE, _SELF_TOP_P, _SELF_MAX_TOKENS = 0.9, 0.95, 64


@dataclass(frozen=True)
class CollectConfig:
    """What data to collect; another value of any of these is another cache.

    num_prompts     texts
    max_new_tokens  most tokens of a continuation
    max_prompt_len  longer prompts are cut at their beginning
    shard_size      sequences of one file
    """

    num_prompts: int = 4096
    max_new_tokens: int = 160
    max_prompt_len: int = 448
    seed: int = 20261121
    shard_size: int = 64


@dataclass
class _Running:
    """One prompt in the executor. stage 0: the target writes the user's turn; 1: the answer."""

    index: int
    prompt: TrainingPrompt
    stage: int
    ids: list[int]
    tokens: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)


class _ChatFrame:
    """Token ids around the user's message, from the model's own chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        marker = "\u2063user text\u2063"
        text = render_chat(tokenizer, [{"role": "user", "content": marker}])
        self.before, _, self.after = text.partition(marker)
        if not self.after:
            raise ModelError(
                "the tokenizer's chat template does not repeat the user's message; training data "
                "need a model with a chat template"
            )

    def ids(self, message: str) -> list[int]:
        return self._encode(self.before + message + self.after)

    def opening(self) -> list[int]:
        """Everything before the user's first word."""
        return self._encode(self.before)

    def _encode(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]


def describe(config: CollectConfig, model_path: Path, model: Any) -> dict[str, Any]:
    """What identifies the data, as JSON-ready values."""
    prompts = make_prompts(config.num_prompts, config.seed)
    return {
        "model_sha256": model_sha256(model_path),
        "dtype": str(model.kv_dtype).removeprefix("torch."),
        "numerics": model.numerics,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "num_prompts": config.num_prompts,
        "max_new_tokens": config.max_new_tokens,
        "max_prompt_len": config.max_prompt_len,
        "seed": config.seed,
        "shard_size": config.shard_size,
        "categories": list(CATEGORIES),
        "prompts_sha256": fingerprint([[p.category, p.text, p.temperature] for p in prompts]),
    }


class Collector:
    """Runs the prompts of missing shards; `step()` is one forward pass."""

    def __init__(
        self, model_path: Path, folder: Path, config: CollectConfig, *, batch_size: int = 32
    ) -> None:
        max_len = config.max_prompt_len + max(config.max_new_tokens, _SELF_MAX_TOKENS)
        rows = 2 * batch_size + config.max_prompt_len
        self._config = config
        self._model = load_model(model_path, max_rows=rows, max_seq_len=max_len)
        self._tokenizer = load_tokenizer(None, model_path)
        if self._tokenizer is None:
            raise ModelError(f"{model_path}: has no tokenizer; training data need one")
        self._frame = _ChatFrame(self._tokenizer)
        self._eos = list(
            eos_token_ids(
                self._model.info.eos_token_ids, self._model.info.vocab_size, self._tokenizer
            )
        )
        self._writer = CacheWriter(folder, describe(config, model_path, self._model))
        model = self._model
        pages = batch_size * -(-max_len // _PAGE_SIZE)
        shape = (model.num_layers, pages, model.num_kv_heads, _PAGE_SIZE, model.head_dim)
        self._pages = torch.zeros(2, *shape, dtype=model.kv_dtype).unbind()
        model.bind_cache(*self._pages)
        self._executor = _core.Executor(
            *self._pages,
            vocab_size=model.vocab_size,
            max_batch_size=batch_size,
            max_seq_len=max_len,
            max_num_tokens=rows,
            method="none",
        )
        self._batch_size = batch_size
        prompts = make_prompts(config.num_prompts, config.seed)
        size = config.shard_size
        self._waiting = [
            (i, prompt) for i, prompt in enumerate(prompts) if not self._writer.has(i // size)
        ]
        self.num_prompts = len(prompts)
        self.num_done = len(prompts) - len(self._waiting)
        self.num_tokens = 0  # written by the target in this run
        self._waiting.reverse()
        self._running: dict[int, _Running] = {}
        self._finished: dict[int, list[TextRecord]] = {}

    def step(self) -> bool:
        """One forward pass; False when every shard is written."""
        while self._waiting and len(self._running) < self._batch_size:
            index, prompt = self._waiting.pop()
            if prompt.category == "self":
                self._submit(_Running(index, prompt, 0, self._frame.opening()))
            else:
                self._submit(_Running(index, prompt, 1, self._frame.ids(prompt.text)))
        plan = self._executor.plan()
        if plan is None:
            return False
        hidden = torch.empty(plan.num_logit_rows, self._model.hidden_size, dtype=torch.float32)
        result = self._model.forward(plan, hidden)
        for out in self._executor.commit(plan, result):
            if out.error is not None:
                raise ModelError(f"collecting training data failed: {out.error}")
            running = self._running[out.request_id]
            if out.tokens:
                running.tokens += out.tokens
                if running.stage == 1:
                    running.hidden.append(hidden[out.last_logit_row].to(torch.float16))
            if out.finish_reason is not None:
                del self._running[out.request_id]
                self._end(running)
        return True

    def _submit(self, running: _Running) -> None:
        limit = self._config.max_prompt_len
        running.ids = running.ids[-limit:]
        prompt = running.prompt
        sampling: dict[str, Any] = {"temperature": prompt.temperature, "seed": prompt.seed}
        max_tokens = self._config.max_new_tokens
        if running.stage == 0:
            max_tokens = _SELF_MAX_TOKENS
            sampling = {
                "temperature": _SELF_TEMPERATURE, "top_p": _SELF_TOP_P, "seed": prompt.seed ^ 1,
            }  # fmt: skip
        request = self._executor.submit(
            running.ids, max_tokens=max_tokens, eos_token_ids=self._eos, **sampling
        )
        self._running[request] = running

    def _end(self, running: _Running) -> None:
        if running.stage == 0:
            text = self._tokenizer.decode(running.tokens, skip_special_tokens=True).strip()
            self._submit(_Running(running.index, running.prompt, 1, self._frame.ids(text)))
            return
        self.num_done += 1
        self.num_tokens += len(running.tokens)
        sequence = TextRecord(
            index=running.index,
            category=running.prompt.category,
            tokens=torch.tensor(running.ids + running.tokens, dtype=torch.int32),
            prompt_len=len(running.ids),
            hidden=torch.stack(running.hidden),
        )
        size = self._config.shard_size
        shard = running.index // size
        ready = self._finished.setdefault(shard, [])
        ready.append(sequence)
        if len(ready) == min(size, self.num_prompts - shard * size):
            parts = sorted(ready, key=lambda s: s.index)
            self._writer.write(shard, parts)
            del self._finished[shard]


def collect(
    model_path: Path,
    folder: Path,
    config: CollectConfig,
    *,
    batch_size: int = 32,
    time_limit_s: float | None = None,
    on_step: Callable[[Collector], None] | None = None,
) -> None:
    """Complete the cache in `folder`, or as much of it as `time_limit_s` allows.

    Raises ModelError when the folder holds other data, or the model cannot be used.
    """
    collector = Collector(model_path, folder, config, batch_size=batch_size)
    begin = time.monotonic()
    while collector.step():
        if on_step is not None:
            on_step(collector)
        if time_limit_s is not None and time.monotonic() - begin > time_limit_s:
            return

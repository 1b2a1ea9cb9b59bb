"""What the tests of the trainers share: collecting for a tiny target, and the user's sentences."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_ext.models.config_reader import read_config
from specdec_ext.models.fingerprint import model_sha256
from specdec_ext.text.tokenizer import load_tokenizer
from specdec_ext.training.cache import CacheReader, CacheWriter
from specdec_ext.training.collect import Collector, shard_keys
from specdec_ext.training.passes import TargetPasses
from specdec_ext.training.prompts import make_prompts
from specdec_ext.training.texts import Frame, Task, prompt_tasks

NUM_PROMPTS, MAX_NEW, MAX_PROMPT, SHARD, SEED = 72, 40, 24, 16, 20261121
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dogs", "run", "far", "away")


@dataclass
class Workshop:
    """What collecting needs of one target."""

    model: Path

    def __post_init__(self) -> None:
        self.config = read_config(self.model)
        self.tokenizer = load_tokenizer(None, self.model)
        self.frame = Frame(self.tokenizer, None, self.config.eos_token_ids)

    def tasks(self, count: int = NUM_PROMPTS, seed: int = SEED) -> list[Task]:
        return prompt_tasks(
            make_prompts(count, seed), self.frame, max_prompt_len=MAX_PROMPT, max_new_tokens=MAX_NEW
        )

    def writer(self, folder: Path) -> CacheWriter:
        return CacheWriter(
            folder,
            {
                "model_sha256": model_sha256(self.model),
                "hidden_size": self.config.hidden_size,
                "vocab_size": self.config.vocab_size,
            },
        )

    def passes(self, batch_size: int = 8, **how: Any) -> TargetPasses:
        return TargetPasses(
            self.model, self.tokenizer, self.frame, max_prompt_len=MAX_PROMPT,
            max_new_tokens=MAX_NEW, batch_size=batch_size, **how,
        )  # fmt: skip

    def collector(self, folder: Path, tasks: list[Task], batch_size: int = 8) -> Collector:
        return Collector(self.writer(folder), self.passes(batch_size), tasks, SHARD)

    def reader(self, folder: Path, tasks: list[Task], **how: Any) -> CacheReader:
        return CacheReader(folder, shard_keys(tasks, SHARD), **how)


def sentences(seed: int, count: int, words: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(count)]

"""Draft models with another vocabulary: the same words at other ids, and words of their own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from draft_target_cases import VOCAB
from safetensors.torch import load_file, save_file
from test_draft_target_vocabulary import write_tokenizer

MAPPED: dict[str, Any] = {"max_draft_len": 4, "adaptive": False, "allow_vocab_mapping": True}
MAPPED_TREE: dict[str, Any] = {**MAPPED, "max_draft_len": 9, "top_k": 3, "max_draft_depth": 4}
WORDS = [f"w{i}" for i in range(VOCAB)]


def renamed(
    draft: Path, path: Path, words: list[str], vocab: int = VOCAB, noise: float = 0.0
) -> Path:
    """The model in `draft` with the vocabulary `words`: a word of the target (w<i>) has the rows
    that it has there, any other one random ones.

    vocab  words of the target
    noise  added to all weights
    """
    path.mkdir(parents=True)
    weights = load_file(draft / "model.safetensors")
    generator = torch.Generator().manual_seed(len(words))
    rows = [int(word[1:]) if word[1:].isdecimal() and word[0] == "w" else -1 for word in words]
    rows = [row if row < vocab else -1 for row in rows]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = weights[name]
        new = 0.3 * torch.randn(len(words), old.shape[1], generator=generator)
        for i, row in enumerate(rows):
            if row >= 0:
                new[i] = old[row]
        weights[name] = new
    if noise:
        weights = {
            name: w + noise * torch.randn(w.shape, generator=generator)
            for name, w in weights.items()
        }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((draft / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": len(words)}))
    write_tokenizer(path, words)
    return path


def shuffled(words: list[str], seed: int = 7) -> list[str]:
    return random.Random(seed).sample(words, len(words))


def half_known(vocab: int = VOCAB, share: float = 0.6) -> list[str]:
    """Some of the target's words in another order, among more words that it does not have."""
    kept = shuffled([f"w{i}" for i in range(vocab)])[: round(share * vocab)]
    return shuffled([*kept, *(f"o{i}" for i in range(vocab))])

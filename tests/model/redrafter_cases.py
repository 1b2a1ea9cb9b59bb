"""Drafters for tests: random ones, and ones that have learnt a tiny target's own text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from specdec_ext.drafters.redrafter.model import Redrafter, RedrafterShape, save_redrafter

# What the network is made of: (exit_dim as a multiple of H, blocks, rnn, tied head, reduced).
KINDS: dict[str, tuple[int, int, bool, bool, bool]] = {
    "apple": (2, 2, True, False, False),
    "projected": (1, 1, True, False, False),
    "no rnn": (1, 1, False, False, False),
    "tied": (1, 1, True, True, False),
    "reduced": (2, 0, True, False, True),
    "reduced tied": (1, 2, True, True, True),
}


def random_drafter(folder: Path, kind: str, hidden: int, vocab: int, seed: int = 0) -> Path:
    """Weights wide enough that its beams vary."""
    multiple, blocks, rnn, tied, reduced = KINDS[kind]
    torch.manual_seed(seed)
    scored = vocab // 3 if reduced else None
    ids = None if scored is None else torch.randperm(vocab)[:scored].sort().values.int()
    model = Redrafter(
        RedrafterShape(vocab, hidden, multiple * hidden, blocks, rnn, tied, scored), ids
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_redrafter(model, folder, dtype=torch.float32)
    return folder


def trained_drafter(folder: Path, target: Any, texts: list[list[int]], *, length: int = 4) -> Path:
    """A drafter fitted to `texts` by teacher forcing: a transformers model says the hidden states.

    Its guesses on those texts are mostly right, so that deep paths are accepted.
    """
    torch.manual_seed(3)
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    model = Redrafter(RedrafterShape(vocab, hidden, 2 * hidden, 1, True))
    table = target.get_input_embeddings().weight.detach().float()
    contexts, chunks = [], []
    for text in texts:
        with torch.no_grad():
            states = target.model(torch.tensor([text])).last_hidden_state[0].float()
        for i in range(len(text) - length - 1):
            contexts.append(states[i])
            chunks.append(text[i + 1 : i + 2 + length])
    context, tokens = torch.stack(contexts), torch.tensor(chunks)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        state, losses = model.initial_state(len(tokens)), []
        for depth in range(length):
            state = model.next_state(state, table[tokens[:, depth]])
            scores = model.scores(model.features(context, state))
            losses.append(functional.cross_entropy(scores, tokens[:, depth + 1]))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    save_redrafter(model, folder, dtype=torch.float32)
    return folder

"""Drives a StepModel by hand-made plans: no executor, one thing at a time.

Pages are handed out in a shuffled order and start as NaN, so a slot that is read before it is
written, or a page that is guessed instead of looked up, shows in the scores.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec_ext import _core


@dataclass
class Sequence:
    """One request: its decided tokens whose K/V is in the pages, and those pages."""

    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Driver:
    """K/V pages and page lists for one model."""

    def __init__(self, model: Any, *, page_size: int = 4, num_pages: int = 128, seed: int = 0):
        self.model, self.page_size = model, page_size
        shape = (model.num_layers, num_pages, model.num_kv_heads, page_size, model.head_dim)
        place = getattr(model, "place", None)
        device = None if place is None else place.device
        self.k = torch.full(shape, float("nan"), dtype=model.kv_dtype, device=device)
        self.v = torch.full(shape, float("nan"), dtype=model.kv_dtype, device=device)
        self.free = list(range(num_pages))
        random.Random(seed).shuffle(self.free)
        model.bind_cache(self.k, self.v)

    def _plan(
        self,
        requests: list[tuple[Sequence, list[int]]],
        parents: list[list[int]] | None,
        logits_for_all_rows: bool,
        needs_logits: bool,
    ) -> Any:
        for sequence, rows in requests:
            while len(sequence.pages) * self.page_size < len(sequence.tokens) + len(rows):
                sequence.pages.append(self.free.pop())
        return _core.make_step_plan(
            [rows for _, rows in requests],
            parents=parents or [],
            kv_len=[len(sequence.tokens) for sequence, _ in requests],
            page_table=[sequence.pages for sequence, _ in requests],
            logits_for_all_rows=logits_for_all_rows,
            needs_logits=needs_logits,
        )

    def scores(
        self,
        requests: list[tuple[Sequence, list[int]]],
        parents: list[list[int]] | None = None,
        *,
        keep: bool = True,
    ) -> list[torch.Tensor]:
        """Scores [rows, V] per request. `keep`: the rows become part of the sequences."""
        plan = self._plan(requests, parents, True, True)
        out = torch.as_tensor(self.model.forward(plan)).clone()
        if keep:
            for sequence, rows in requests:
                sequence.tokens += rows
        return list(out.split([len(rows) for _, rows in requests]))

    def greedy(
        self, prompts: list[list[int]], num_tokens: int, *, chunk: int = 0
    ) -> list[list[int]]:
        """Plain greedy decoding of all prompts in one batch; prompts in chunks of `chunk` rows."""
        sequences = [Sequence() for _ in prompts]
        generated: list[list[int]] = [[] for _ in prompts]
        pending = [list(prompt) for prompt in prompts]
        while any(len(g) < num_tokens for g in generated):
            active = [i for i, g in enumerate(generated) if len(g) < num_tokens]
            rows = [pending[i][: chunk or None] for i in active]
            plan = self._plan(
                [(sequences[i], r) for i, r in zip(active, rows, strict=True)], None, False, False
            )
            ids = self.model.forward(plan).tolist()
            assert len(ids) == len(active)
            for i, fed, token in zip(active, rows, ids, strict=True):
                sequences[i].tokens += fed
                pending[i] = pending[i][len(fed) :]
                if not pending[i]:
                    generated[i].append(token)
                    pending[i] = [token]
        for sequence in sequences:
            self.free[:0] = sequence.pages  # reused last, with stale K/V in them
        return generated


@torch.inference_mode()
def hf_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """transformers' own greedy decoding, never stopping early."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def hf_scores(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' scores [T, V] of one sequence, in the model's dtype."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def prompt_ids(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 199) for _ in range(length)]

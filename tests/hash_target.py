"""A target model whose next token is a hash of everything the row can see, read through the cache.

`HashModel` is a step model without weights. Its "attention" stores (token, position) of every step
row in the pages, in all layers, K and V, at the slot where the real K/V would lie, and then reads
the whole visible history back: the request's pages up to kv_len, plus the row's ancestors of the
draft tree by mask bit. Its next token is a function of that reading. So one wrong page, slot, mask
bit, position, layer or stale entry changes a token, and the output differs from `reference`, which
computes the same function of plain Python lists without pages, batches or drafts.

The function has two moods, so that drafts are often right and errors still show: most tokens follow
from the last two tokens (the text falls into loops), every `surprise`-th one, decided by the hash
of the whole history, is a hash of the whole history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

NUM_LAYERS = 3
HEAD_DIM = 8
POISON = -12345.0
SPOILT = 12345
MASK64 = (1 << 64) - 1
ROOT = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """Returns a well mixed 64-bit integer (the finaliser of splitmix64)."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


class HashFunction:
    """next token = f(history); also whole score rows whose argmax is that token.

    vocab      number of token ids
    surprise   one token in `surprise` depends on the whole history; 1: every token does
    alphabet   the tokens that follow from the last two are drawn from this many ids
    """

    def __init__(
        self, vocab: int = 64, surprise: int = 12, alphabet: int = 6, seed: int = 1
    ) -> None:
        self.vocab, self.surprise = vocab, surprise
        self.alphabet = min(alphabet, vocab)
        self.salt = _mix(seed)
        # Terms of the history sum: one factor per position, odd, so that no token is lost.
        self.factors = np.array([_mix(ROOT * (i + 1) + seed) | 1 for i in range(8192)], np.uint64)
        rng = np.random.default_rng(seed)
        # Score rows are one of these plus a peak; all values of a row are distinct.
        self.rows = np.stack([rng.permutation(vocab) for _ in range(31)]).astype(np.float32)
        self.rows = self.rows / np.float32(vocab)

    def history_sum(self, tokens: np.ndarray, positions: np.ndarray) -> int:
        """Returns the sum over the history of (token + 1) * factor[position], modulo 2**64."""
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self.factors[positions]
        return int(terms.sum(dtype=np.uint64))

    def extend(self, total: int, token: int, position: int) -> int:
        """Returns the sum of a history that is one token longer."""
        return (total + (token + 1) * int(self.factors[position])) & MASK64

    def next_token(self, total: int, last: int, before: int) -> int:
        """Returns the token that follows a history with this sum and these last two tokens."""
        mixed = _mix(total ^ self.salt)
        if mixed % self.surprise == 0:
            return (mixed >> 20) % self.vocab
        return _mix(last * 1009 + before + self.salt) % self.alphabet

    def scores(self, total: int, last: int, before: int) -> np.ndarray:
        """Returns a float32 score row [vocab] whose argmax is next_token()."""
        row = self.rows[_mix(total + self.salt) % len(self.rows)].copy()
        row[self.next_token(total, last, before)] = np.float32(1.5)
        return row

    def reference(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Returns the continuation of a prompt by the definition, one token after another."""
        history = list(prompt)
        total = self.history_sum(np.array(history, np.int64), np.arange(len(history)))
        for _ in range(num_tokens):
            before = history[-2] if len(history) > 1 else -1
            token = self.next_token(total, history[-1], before)
            total = self.extend(total, token, len(history))
            history.append(token)
        return history[len(prompt) :]

    def reference_scores(self, history: Sequence[int]) -> np.ndarray:
        """Returns the score row after a whole history (prompt and output)."""
        tokens = np.array(history, np.int64)
        total = self.history_sum(tokens, np.arange(len(tokens)))
        return self.scores(total, int(tokens[-1]), int(tokens[-2]) if len(tokens) > 1 else -1)


class HashModel:
    """Step model over HashFunction; see the module docstring. Pages are float32."""

    num_layers = NUM_LAYERS
    num_kv_heads = 1
    head_dim = HEAD_DIM
    kv_dtype = torch.float32
    max_position = 8192
    numerics = "exact"
    impl = "native"

    def __init__(self, function: HashFunction, num_pages: int, page_size: int) -> None:
        self.function = function
        self.vocab_size = function.vocab
        shape = (NUM_LAYERS, num_pages, 1, page_size, HEAD_DIM)
        self.k_pages = torch.full(shape, POISON)
        self.v_pages = torch.full(shape, POISON)
        self.page_size = page_size
        # Views of the same memory: [layers, pages, page_size, head_dim].
        self._stores = [self.k_pages[:, :, 0].numpy(), self.v_pages[:, :, 0].numpy()]

    def bind_cache(self, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
        self._stores = [k_pages[:, :, 0].numpy(), v_pages[:, :, 0].numpy()]

    def _append(self, pages: np.ndarray, slots: np.ndarray, tokens: Any, positions: Any) -> None:
        """Writes rows to their slots; every element of every layer, K and V, matters."""
        at = (pages[slots // self.page_size], slots % self.page_size)
        for kind, store in enumerate(self._stores):
            for layer in range(NUM_LAYERS):
                entry = np.empty((len(slots), HEAD_DIM), np.float32)
                entry[:, 0::2] = (np.asarray(tokens) + 2 * layer + kind)[:, None]
                entry[:, 1::2] = np.asarray(positions)[:, None]
                store[layer][at] = entry

    def _read(self, pages: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and positions of the slots; disagreement of the copies spoils a token."""
        at = (pages[slots // self.page_size], slots % self.page_size)
        first = self._stores[0][0][at]
        tokens, positions = first[:, 0].copy(), first[:, 1]
        spoilt = np.zeros(len(slots), bool)
        for kind, store in enumerate(self._stores):
            for layer in range(NUM_LAYERS):
                entry = store[layer][at]
                spoilt |= (entry[:, 0::2] - (2 * layer + kind) != tokens[:, None]).any(1)
                spoilt |= (entry[:, 1::2] != positions[:, None]).any(1)
        tokens[spoilt] = SPOILT
        # Stale or poisoned positions must not index outside the table.
        return tokens.astype(np.int64), np.clip(positions, 0, 8191).astype(np.int64)

    def forward(self, plan: Any) -> torch.Tensor:
        """Returns greedy ids int32 [L], or float32 scores [L, V] if the plan needs them."""
        cu_rows, logit_rows = plan.cu_rows, plan.logit_rows
        results: list[Any] = []
        cu_logits = plan.cu_logits
        for b in range(plan.num_requests):
            first, last = int(cu_rows[b]), int(cu_rows[b + 1])
            pages = np.asarray(plan.page_table[b], np.int64)
            kv_len = int(plan.kv_len[b])
            slots = kv_len + np.arange(last - first)
            self._append(pages, slots, plan.tokens[first:last], plan.positions[first:last])
            wanted = [int(r) - first for r in logit_rows[cu_logits[b] : cu_logits[b + 1]]]
            if not wanted:
                continue
            tokens, positions = self._read(pages, np.arange(last - first + kv_len))
            # Committed entries lie in position order; a swapped page would otherwise go unseen.
            tokens[:kv_len][positions[:kv_len] != np.arange(kv_len)] = SPOILT
            context = self.function.history_sum(tokens[:kv_len], positions[:kv_len])
            mask = plan.mask[first:last] if plan.is_tree[b] else None
            for row in wanted:
                results.append(self._row(row, kv_len, context, tokens, positions, mask, plan))
        if plan.needs_logits:
            return (
                torch.from_numpy(np.stack(results)) if results else torch.empty(0, self.vocab_size)
            )
        return torch.tensor(results, dtype=torch.int32)

    def _row(
        self,
        row: int,
        kv_len: int,
        context: int,
        tokens: np.ndarray,
        positions: np.ndarray,
        mask: np.ndarray | None,
        plan: Any,
    ) -> Any:
        if mask is None:
            visible = range(row + 1)
        else:
            bits = sum(int(word) << (32 * i) for i, word in enumerate(mask[row]))
            visible = [j for j in range(len(mask)) if bits >> j & 1]
        total = context
        seen = []
        for j in visible:
            token, position = int(tokens[kv_len + j]), int(positions[kv_len + j])
            total = self.function.extend(total, token, position)
            seen.append((position, token))
        # Like attention, the row knows positions, not slots: "last two" goes by position.
        if kv_len:
            seen.append((int(positions[kv_len - 1]), int(tokens[kv_len - 1])))
        seen.sort()
        before = seen[-2][1] if len(seen) > 1 else -1
        choose = self.function.scores if plan.needs_logits else self.function.next_token
        return choose(total, seen[-1][1], before)

"""Cached texts as training batches: split, reduced vocabulary, rows of whole texts.

Row j of a text is the hidden state that decided its continuation token j. A batch holds whole
texts one after the other, so a target d tokens further on is simply d rows further on, and one
pass of the target's head over the rows gives the soft targets of every depth.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from .cache import CacheReader, TextRecord
from .overlap import shared_runs

__all__ = ["TRAINED_PROMPT", "Batch", "TrainingData", "frequent_tokens"]

# Every HELD_OUT-th prompt is never trained on.
HELD_OUT = 24
# Tokens of a prompt that a drafter with attention reads in training: most of the time would go into
# long prompts otherwise.
TRAINED_PROMPT = 96


@dataclass(frozen=True)
class Batch:
    """Whole texts; R rows in all.

    texts      the records
    hidden     float32 [R, hidden_size]
    tokens     int64 [R]: the token that each row decided
    labels     int64 [R]: its row in the reduced head, -1 outside the reduced vocabulary
    end        int64 [R]: row after the text's last
    seed       of what is drawn for this step
    first_row  of the step: where this part begins in it
    step_labels
               int64 on the host, the labels of all parts of the step: what is drawn for a step
               does not depend on how it is parted
    """

    texts: Sequence[TextRecord]
    hidden: torch.Tensor
    tokens: torch.Tensor
    labels: torch.Tensor
    end: torch.Tensor
    seed: int
    first_row: int
    step_labels: torch.Tensor

    def every(self, rows: torch.Tensor, stride: int) -> torch.Tensor:
        """Those of `rows` that the step's seed chooses, one in `stride`."""
        return rows[(rows + self.first_row) % stride == self.seed % stride]

    def pairs(self, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, rows `distance` tokens further on in the same text), int64 [n] each.

        Only pairs whose second row's token is in the reduced vocabulary.
        """
        rows = torch.arange(len(self.tokens), device=self.tokens.device)
        rows = rows[rows + distance < self.end[rows]]
        rows = rows[self.labels[rows + distance] >= 0]
        return rows, rows + distance


class TrainingData:
    """The texts of a cache, split by prompt, and the reduced vocabulary.

    exclude  texts that nothing trained on may share a run of 13 words with; texts that do are
             dropped (`dropped` counts them)
    """

    def __init__(
        self,
        cache: CacheReader,
        *,
        draft_vocab_size: int,
        decode: object = None,
        exclude: Iterable[str] = (),
    ) -> None:
        vocab = int(cache.description["vocab_size"])
        if draft_vocab_size > vocab:
            raise ConfigError(
                f"draft_vocab_size = {draft_vocab_size}: the target has {vocab} tokens; choose at "
                "most as many"
            )
        records = [record for record in cache if len(record.continuation) > 1]
        self.dropped = 0
        if decode is not None:
            assert callable(decode)
            found = shared_runs([decode(r.tokens.tolist()) for r in records], exclude)
            self.dropped = len(found)
            records = [r for i, r in enumerate(records) if i not in found]
        self.train = [r for r in records if r.index % HELD_OUT]
        self.held_out = [r for r in records if r.index % HELD_OUT == 0]
        if not self.train or not self.held_out:
            raise ConfigError(
                f"{cache.folder}: {len(records)} texts are too few to train on and to hold out "
                f"every {HELD_OUT}th; give more data"
            )
        self.hidden_size = int(cache.description["hidden_size"])
        self.vocab_size = vocab
        by_frequency = frequent_tokens(self.train, draft_vocab_size, vocab)
        self.token_ids = by_frequency.sort().values
        # Rows of the reduced head, the most frequent token first.
        self.ranked = torch.searchsorted(self.token_ids, by_frequency)
        self._order: tuple[tuple[int, int], list[int]] | None = None
        self._row_of = torch.full((vocab,), -1, dtype=torch.int64)
        self._row_of[self.token_ids.to(torch.int64)] = torch.arange(draft_vocab_size)

    @property
    def num_train_tokens(self) -> int:
        return sum(len(r.continuation) for r in self.train)

    @property
    def num_held_out_tokens(self) -> int:
        return sum(len(r.continuation) for r in self.held_out)

    def coverage(self) -> float:
        """Share of the held-out tokens that the reduced vocabulary has."""
        tokens = torch.cat([r.continuation for r in self.held_out]).to(torch.int64)
        return float((self._row_of[tokens] >= 0).float().mean())

    def order(self, epoch: int, seed: int) -> list[int]:
        """Indices into `train` in the order of an epoch."""
        order = list(range(len(self.train)))
        random.Random(f"{seed}-{epoch}").shuffle(order)
        return order

    def chosen(self, step: int, size: int, seed: int) -> list[TextRecord]:
        """The texts of a step: a function of its arguments alone, so a run can be resumed."""
        per_epoch = max(1, len(self.train) // size)
        epoch, at = divmod(step, per_epoch)
        if self._order is None or self._order[0] != (epoch, seed):
            self._order = ((epoch, seed), self.order(epoch, seed))
        return [self.train[i] for i in self._order[1][at * size : (at + 1) * size]]

    def parts(
        self,
        step: int,
        size: int,
        seed: int,
        device: torch.device,
        count: int = 1,
        which: slice = slice(None),
    ) -> list[Batch]:
        """`which` of the `count` parts of a step's texts; empty ones are left out."""
        texts = self.chosen(step, size, seed)
        labels = [self._row_of[t.continuation.to(torch.int64)] for t in texts]
        starts = [0, *itertools.accumulate(len(part) for part in labels)]
        step_labels = torch.cat(labels)
        bounds = [i * len(texts) // count for i in range(count + 1)]
        return [
            make_batch(texts[a:b], labels[a:b], device, seed + step, starts[a], step_labels)
            for a, b in list(itertools.pairwise(bounds))[which]
            if a < b
        ]

    def make(self, texts: Sequence[TextRecord], device: torch.device) -> Batch:
        """A batch that is not of a step, for measures."""
        labels = [self._row_of[t.continuation.to(torch.int64)] for t in texts]
        return make_batch(texts, labels, device, 0, 0, torch.cat(labels))


def make_batch(
    texts: Sequence[TextRecord],
    labels: Sequence[torch.Tensor],
    device: torch.device,
    seed: int,
    first_row: int,
    step_labels: torch.Tensor,
) -> Batch:
    """labels: of each text."""
    counts = torch.tensor([len(part) for part in labels])
    end = counts.cumsum(0).repeat_interleave(counts)
    return Batch(
        texts=texts,
        hidden=torch.cat([t.hidden for t in texts]).to(device=device, dtype=torch.float32),
        tokens=torch.cat([t.continuation for t in texts]).to(device, torch.int64),
        labels=torch.cat(list(labels)).to(device),
        end=end.to(device),
        seed=seed,
        first_row=first_row,
        step_labels=step_labels,
    )


def frequent_tokens(records: Iterable[TextRecord], size: int, vocab_size: int) -> torch.Tensor:
    """int32 [size]: the most frequent tokens of the continuations, the most frequent first.

    Where the texts have fewer different tokens, low ids fill up: merges of a byte-pair vocabulary
    are ordered by frequency.
    """
    counts: Counter[int] = Counter()
    for record in records:
        counts.update(record.continuation.tolist())
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    chosen = set(ranked)
    rest = (token for token in range(vocab_size) if token not in chosen)
    ranked += itertools.islice(rest, size - len(ranked))
    return torch.tensor(ranked, dtype=torch.int32)

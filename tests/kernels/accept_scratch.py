"""What accept_step leaves in its scratch; the layout is that of cuda/accept/row_laws.cu."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from accept_cases import Drafted, row_laws_bytes
from cuda_calls import Target

from specdec_ext import ops


def scratch_for(target: Target, requests: list[Drafted]) -> torch.Tensor:
    rows, vocab = sum(len(r.tokens) for r in requests), requests[0].scores.shape[1]
    wanted = ops.accept_scratch_bytes(len(requests), vocab, True) + row_laws_bytes(rows, vocab)
    whole = torch.full((wanted + 512,), 0xFF, dtype=torch.uint8)
    placed = target.put(whole)
    return placed[-placed.data_ptr() % 256 :][:wanted]


@dataclasses.dataclass
class Known:
    """What the scratch of a call says of a row when rows have been weighed and drafts held."""

    next: int  # the draft that the row keeps; -1: none, 0: nothing is known
    token: int  # after the row
    mass: int  # of the probabilities of the row's own draft, in units of 2^-43; 0: not summed


def counters_of(scratch: torch.Tensor, requests: list[Drafted]) -> tuple[np.ndarray, int]:
    """What all rows have of each kind, kind by kind, and the number of rows."""
    rows, vocab = sum(len(r.tokens) for r in requests), requests[0].scores.shape[1]
    given = any(r.probs is not None for r in requests)
    begin = ops.accept_scratch_bytes(len(requests), vocab, given)
    return scratch[begin : begin + 8 * (2 + rows * 9)].cpu().numpy().view(np.uint64)[2:], rows


def totals_of(scratch: torch.Tensor, requests: list[Drafted]) -> list[list[int]]:
    """The mass of each row of each request."""
    words, rows = counters_of(scratch, requests)
    found = iter(int(total) for total in words[rows : 2 * rows])
    return [[next(found) for _ in r.tokens] for r in requests]


def known_of(scratch: torch.Tensor, requests: list[Drafted]) -> list[list[Known]]:
    """Returns it for each row of each request."""
    words, rows = counters_of(scratch, requests)
    held, outcomes = words[2 * rows : 8 * rows].reshape(rows, 6), words[8 * rows :].view(np.int32)
    found = iter(
        Known(int(outcomes[2 * i]), int(outcomes[2 * i + 1]), int(held[i, 0])) for i in range(rows)
    )
    return [[next(found) for _ in r.tokens] for r in requests]

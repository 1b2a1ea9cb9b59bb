"""Draw tokens and accept drafts by probabilities, on the device that holds a step's scores.

A request's *law* is softmax(scores / temperature), cut by min_p, top_k and top_p
(docs/methods/sampling.md). The token drawn at an absolute position depends only on the scores, the
law, the request's seed and that position, so it is the same on every backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec_ext import _core
from specdec_ext.ops._where import MAX_STEP_TOKENS, name_of, stream_of, workspace_for

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The values of ``acceptance`` in accept_step.
ACCEPTANCE_RULES = tuple(_core.acceptance_rules())


@dataclass(frozen=True)
class SamplingLaws:
    """The laws of a step's requests, each [B] on the device of the scores.

    temperature    float32; 0: greedy, the largest score, on ties the first
    top_k          int32; 0: all; ties with the k-th largest stay
    top_p, min_p   float32, in (0, 1] and [0, 1]
    seed           int64, the bits of the unsigned seed
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor


@dataclass(frozen=True)
class DraftProbs:
    """The distributions that a step's drafts were drawn from.

    probs          [R, columns] float32, rows may be strided: row i is the distribution that the
                   draft of row i was drawn from; rows of golden tokens are not read. Or
                   [D, n, columns]: the distributions of the first n drafts of each of the last D
                   requests
    vocab_ids      [columns] int32, the token of each column, each token once; other tokens have
                   probability 0. None: column = token. With the second form of probs also
                   [D, n, columns]: each row's own tokens, -1 for a column that holds 0
    draft_columns  [R] or [D * n] int32, the column of each draft's token. Needed with vocab_ids,
                   unless each row has its own
    has_probs      [B] or [D] uint8, 0: that request's drafts were chosen, not drawn; None: all were
                   drawn
    replacement    as has_probs, 1: siblings were drawn with replacement; None: without
    """

    probs: Any
    vocab_ids: Any = None
    draft_columns: Any = None
    has_probs: Any = None
    replacement: Any = None

    def first(self, num_requests: int) -> DraftProbs:
        """The first `num_requests` requests, for the second form of probs."""

        def cut(tensor: Any) -> Any:
            return None if tensor is None else tensor[:num_requests]

        ids, columns = self.vocab_ids, cut(self.draft_columns)
        return DraftProbs(
            self.probs[:num_requests],
            ids if ids is None or ids.ndim == 1 else ids[:num_requests],
            None if columns is None else columns.reshape(-1),
            cut(self.has_probs),
            cut(self.replacement),
        )


@dataclass(frozen=True)
class AcceptResults:
    """What accept_step decided, int32 tensors.

    sampled      [R] the token after the golden token and after each accepted draft; for other rows
                 the token of the largest score, or the one that exact match drew
    path         [B, 128] accepted rows within the request, downwards, as ``compact_kv`` takes them
    path_len     [B] number of accepted drafts
    emitted      [B, 128] the accepted drafts and the token after them
    num_emitted  [B] path_len + 1, or path_len if the row after the path has no token
    """

    sampled: Tensor
    path: Tensor
    path_len: Tensor
    emitted: Tensor
    num_emitted: Tensor


def make_accept_results(
    num_rows: int, num_requests: int, device: str | torch.device = "cpu"
) -> AcceptResults:
    """Zeroed results for a step of that size."""
    import torch

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return AcceptResults(
        sampled=zeros(num_rows),
        path=zeros(num_requests, MAX_STEP_TOKENS),
        path_len=zeros(num_requests),
        emitted=zeros(num_requests, MAX_STEP_TOKENS),
        num_emitted=zeros(num_requests),
    )


def _scratch(scores: Tensor, backend: str | None, workspace: Tensor | None) -> Any:
    if workspace is not None:
        return workspace
    return partial(workspace_for, name_of(backend, scores), scores)


def sample_rows(
    scores: Tensor,
    cu_logits: Tensor,
    positions: Tensor,
    laws: SamplingLaws,
    *,
    out: Tensor,
    probs: Tensor | None = None,
    purpose: str = "token",
    backend: str | None = None,
    workspace: Tensor | None = None,
    status: Tensor | None = None,
) -> Tensor:
    """Draw the token after each row of scores by its request's law.

    Shapes   scores [R, V] float32|bfloat16|float16, rows may be strided, V <= 2**20; cu_logits
             [B + 1] int32: the rows of request b are cu_logits[b]:cu_logits[b + 1]; positions [R]
             int32, absolute position of each row's own token, as ``build_step`` writes it (the
             drawn token is at the next position); workspace: 32 + R (64 + 8 ceil(V / 256) +
             max(128 ceil(V / 256), 16 + 12 min(V, 2048))) bytes. With less, a single block draws
             from a row, or from all rows of a request.
    Writes   out [R] int32: the token; -1 for a row with a NaN (if it is drawn from, also +infinity)
             and for rows after the last request; -2 for a drawn row that is all -infinity. probs
             [B, V] float32, if given: the law that the request's token was drawn from, unchanged
             where nothing was drawn. Its rows may be strided; each request then has at most one
             row.
    Random   one number per (seed, position, purpose); purpose is "token" or "draft".
    status   [B], flags are OR-ed in: 1 a row of the request gave -1; 16 its law is not valid (the
             CPU raises).
    Returns  out.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.sample_rows(
        scores,
        cu_logits,
        positions,
        temperature=laws.temperature,
        top_k=laws.top_k,
        top_p=laws.top_p,
        min_p=laws.min_p,
        seed=laws.seed,
        out=out,
        probs=probs,
        purpose=purpose,
        backend=backend,
        stream=stream_of(scores),
        workspace=_scratch(scores, backend, workspace),
        status=status,
    )
    return out


def accept_step(
    scores: Tensor,
    cu_logits: Tensor,
    positions: Tensor,
    tokens: Tensor,
    parents: Tensor,
    laws: SamplingLaws,
    acceptance: Tensor,
    *,
    results: AcceptResults,
    draft_probs: DraftProbs | None = None,
    posterior_threshold: Tensor | None = None,
    posterior_alpha: Tensor | None = None,
    acceptance_threshold: Tensor | None = None,
    synthetic_rates: Tensor | None = None,
    backend: str | None = None,
    workspace: Tensor | None = None,
    status: Tensor | None = None,
) -> AcceptResults:
    """Accept each request's drafts by its rule, and draw the token after them.

    Shapes   scores, cu_logits, positions as in ``sample_rows``: a request's rows are the nodes of
             its draft tree, the golden token first; tokens, parents [R] int32, parents within the
             request, -1 for its first; acceptance [B] uint8, index into ``ACCEPTANCE_RULES``;
             posterior_threshold, posterior_alpha (typical) and acceptance_threshold (threshold)
             [B] float32, in (0, 1], None: 0.09, 0.3 and 1; synthetic_rates as in
             ``synthetic_step``; workspace: ``accept_scratch_bytes`` and that of ``sample_rows``.
    Writes   results. A request without rows, or left out, accepts and emits nothing.
    Rules    as SamplingParams(acceptance=); temperature 0 is greedy under all of them. Rejection of
             drafts without probabilities is exact match. If given, synthetic_rates decide how many
             drafts are kept, and no rule does; exact match draws the token after them.
    status   [B], flags are OR-ed in: 1 the row after the path holds a NaN and its token is not
             emitted; 4 parents are not a tree of at most 128 rows, or a draft is not a token id; 8
             rows outside of scores; 16 law, rule or a rate is not valid; 32 a draft was reached
             whose probabilities are invalid or give it 0, so it and its later siblings were not
             considered. With 8 and 16 the CPU raises.
    Returns  results.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    given = draft_probs
    _core.accept_step(
        scores,
        cu_logits,
        positions,
        tokens,
        parents,
        acceptance,
        temperature=laws.temperature,
        top_k=laws.top_k,
        top_p=laws.top_p,
        min_p=laws.min_p,
        seed=laws.seed,
        posterior_threshold=posterior_threshold,
        posterior_alpha=posterior_alpha,
        acceptance_threshold=acceptance_threshold,
        probs=None if given is None else given.probs,
        vocab_ids=None if given is None else given.vocab_ids,
        draft_columns=None if given is None else given.draft_columns,
        has_probs=None if given is None else given.has_probs,
        replacement=None if given is None else given.replacement,
        synthetic_rates=None if synthetic_rates is None else _bits_of(synthetic_rates),
        sampled=results.sampled,
        path=results.path,
        path_len=results.path_len,
        emitted=results.emitted,
        num_emitted=results.num_emitted,
        backend=backend,
        stream=stream_of(scores),
        workspace=_scratch(scores, backend, workspace),
        status=status,
    )
    return results


def _bits_of(rates: Tensor) -> Tensor:
    """The rates as the core takes them: it has no float64 tensors."""
    import torch

    if rates.dtype != torch.float64:
        raise TypeError(f"synthetic_rates has dtype {rates.dtype}: expected torch.float64")
    return rates.view(torch.int64)


def synthetic_step(
    cu_logits: Tensor,
    positions: Tensor,
    tokens: Tensor,
    parents: Tensor,
    seed: Tensor,
    synthetic_rates: Tensor,
    *,
    vocab_size: int,
    results: AcceptResults,
    backend: str | None = None,
    status: Tensor | None = None,
) -> AcceptResults:
    """Keep as many of each request's drafts as rates say, to measure speed. NOT the model's text.

    This is for greedy steps, where the target's choices are known; with scores use
    ``accept_step(synthetic_rates=)``. It keeps the first drafts of the tree's deepest path (on ties
    the one with the smallest index), at least i + 1 of them with probability synthetic_rates[i].
    The token after them is the target's choice, or the next id that is not a draft there.

    Shapes   cu_logits, positions, tokens, parents as in ``accept_step``; seed [B] int64, the bits
             of the unsigned seed; synthetic_rates [N] float64, N <= 127, in [0, 1], not rising;
             results.sampled [R] holds the target's choice after each row, -1: a NaN in its scores.
    Writes   results; of results.sampled the rows of the golden token and of kept drafts.
    Random   one number of (seed, position of the token after the golden one) for each request.
    status   [B], flags are OR-ed in: 1, 4, 8 as in ``accept_step``; 16 a rate is not valid (the CPU
             raises).
    Returns  results.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.synthetic_step(
        cu_logits,
        positions,
        tokens,
        parents,
        seed,
        _bits_of(synthetic_rates),
        vocab_size=vocab_size,
        sampled=results.sampled,
        path=results.path,
        path_len=results.path_len,
        emitted=results.emitted,
        num_emitted=results.num_emitted,
        backend=backend,
        stream=stream_of(tokens),
        status=status,
    )
    return results


def accept_scratch_bytes(num_requests: int, vocab_size: int, has_probs: bool) -> int:
    """Bytes of workspace for accept_step on a device: 4 per token and request with probabilities.

    Add the workspace of ``sample_rows``, so that several blocks can share a row.
    """
    return _core.accept_scratch_bytes(num_requests, vocab_size, has_probs)

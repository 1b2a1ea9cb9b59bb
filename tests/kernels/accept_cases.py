"""Random rows, laws and draft trees for the operations that draw tokens, and what the host draws.

The oracle is the code that the host's executor runs (``sample_token``, ``accept_drafts``), one row
or one tree at a time; tests/unit hold it against the float64 reference.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from cuda_calls import Target

from reference.sampling_reference import Law
from specdec_ext import _core, _core_testing, ops

LAWS = [
    Law(1.0),
    Law(0.3),
    Law(7.0),
    Law(1e-30),
    Law(1e30),
    Law(1e-6, top_k=3),
    Law(1.0, top_k=1),
    Law(0.8, top_k=7),
    Law(1.3, top_k=10**6),
    Law(1.0, top_p=0.9),
    Law(0.6, top_p=1e-7),
    Law(3.0, top_p=0.999),
    Law(1.0, min_p=0.05),
    Law(1.0, min_p=1.0),
    Law(1.0, top_k=40, top_p=0.95),
    Law(0.7, top_k=20, top_p=0.8, min_p=0.02),
    Law(1.5, top_p=0.7, min_p=0.01),
]
GREEDY = Law(0.0)


def hostile_row(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """One row of scores, float32 [V], of a random character."""
    row = rng.normal(0, rng.choice([0.01, 2.0, 6.0, 300.0]), vocab)
    match rng.integers(10):
        case 0:
            row = np.round(row)  # ties
        case 1:
            row[:] = rng.normal()
        case 2:
            row[rng.random(vocab) < 0.7] = -math.inf
            row[rng.integers(vocab)] = 1.0
        case 3:
            best = row[rng.integers(vocab)]
            row[:] = -math.inf
            row[rng.integers(vocab)] = best
        case 4:
            row[:] = -math.inf
        case 5:
            row[rng.choice([0, vocab - 1, rng.integers(vocab)])] = math.nan
        case 6:
            row[rng.integers(vocab)] = math.inf
        case 7:
            row = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
        case 8:
            row[rng.integers(vocab)] = 1e30
        case _:
            pass
    return row.astype(np.float32)


def strided(target: Target, rows: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """The rows inside wider ones, aligned to nothing or to 16 bytes, with NaN between them."""
    count, vocab = rows.shape
    skip, width = (0, -(-vocab // 64) * 64) if rng.random() < 0.5 else (1, vocab + 3)
    wide = target.put(torch.full((count, width), math.nan, dtype=rows.dtype))
    view = wide[:, skip : skip + vocab]
    view.copy_(rows)
    return view


def int64_bits(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def laws_on(target: Target, laws: list[Law], seeds: list[int]) -> ops.SamplingLaws:
    def floats(values: list[float]) -> torch.Tensor:
        return target.put(torch.tensor(values, dtype=torch.float32))

    return ops.SamplingLaws(
        temperature=floats([law.temperature for law in laws]),
        top_k=target.put(torch.tensor([law.top_k for law in laws], dtype=torch.int32)),
        top_p=floats([law.top_p for law in laws]),
        min_p=floats([law.min_p for law in laws]),
        seed=target.put(torch.tensor([int64_bits(s) for s in seeds], dtype=torch.int64)),
    )


def best_token(row: np.ndarray) -> int:
    return -1 if np.isnan(row).any() else int(np.argmax(row))


def host_token(row: np.ndarray, law: Law, seed: int, position: int, purpose: str = "token") -> int:
    """What the host draws at that absolute position."""
    if law.temperature == 0:
        return best_token(row)
    u = _core.random_uniform(seed, position, purpose)
    return int(_core_testing.sample_token(row, u, **law.options()))


@dataclasses.dataclass
class Drafted:
    """One request of a step: a tree and what is needed to accept along it."""

    tokens: list[int]  # of all nodes, the golden one first
    parents: list[int]
    scores: np.ndarray  # float32 [n, V]
    law: Law
    seed: int
    position: int  # of the golden token
    rule: str
    numbers: tuple[float, float, float]  # posterior_threshold, posterior_alpha, threshold
    probs: np.ndarray | None  # float32 [n, columns]; row 0 is never read
    replacement: bool

    @property
    def options(self) -> dict[str, Any]:
        return {
            "posterior_threshold": self.numbers[0],
            "posterior_alpha": self.numbers[1],
            "acceptance_threshold": self.numbers[2],
        }


def random_tree(rng: np.random.Generator, drafts: int) -> list[int]:
    kind = rng.integers(4)
    if kind == 0:
        return [-1, *range(drafts)]
    if kind == 1:
        return [-1, *([0] * drafts)]
    low = 0 if kind == 2 else 4
    return [-1, *(int(rng.integers(max(0, i - low), i)) if low else int(rng.integers(i))
                  for i in range(1, drafts + 1))]  # fmt: skip


def random_request(
    rng: np.random.Generator, vocab: int, dtype: torch.dtype, ids: np.ndarray | None, drawn: bool
) -> Drafted:
    """A request whose drafts are close to what the target says, some rows hostile."""
    drafts = int(rng.choice([0, 1, 2, 5, 12, 40], p=[0.1, 0.2, 0.2, 0.3, 0.15, 0.05]))
    parents = random_tree(rng, drafts)
    n = drafts + 1
    scores = rng.normal(0, 2, (n, vocab)).astype(np.float32)
    if rng.random() < 0.3:
        scores[rng.integers(n)] = hostile_row(rng, vocab)
    scores = torch.from_numpy(scores).to(dtype).float().numpy()
    law = GREEDY if rng.random() < 0.1 else LAWS[rng.integers(len(LAWS))]
    replacement = bool(rng.random() < 0.3)
    columns = np.arange(vocab) if ids is None else ids
    with np.errstate(all="ignore"):
        near = np.nan_to_num(scores[:, columns], nan=0.0, posinf=5.0, neginf=-5.0)
        near = np.clip(near, -20, 20) / max(min(law.temperature, 2.0), 0.3)
        near = near + rng.normal(0, rng.choice([0.0, 0.3, 1.0]), near.shape)
        rows = np.exp(near - near.max(1, keepdims=True))
        rows = (rows / rows.sum(1, keepdims=True)).astype(np.float32)
    tokens = [int(rng.integers(vocab))]
    probs = np.zeros((n, len(columns)), np.float32)
    for i in range(1, n):
        probs[i] = rows[parents[i]]
        q = probs[i].astype(np.float64)
        if not replacement:
            earlier = [tokens[j] for j in range(1, i) if parents[j] == parents[i]]
            q[np.isin(columns, earlier)] = 0.0
        if q.sum() <= 0:  # more siblings than columns: no draw, the likeliest once more
            replacement = True
            q = probs[i].astype(np.float64)
        tokens.append(int(columns[rng.choice(len(columns), p=q / q.sum())]))
    rule = ops.ACCEPTANCE_RULES[rng.integers(4)]
    if not drawn and rng.random() < 0.5:  # drafts that exact match has a chance to accept
        for i in range(1, n):
            tokens[i] = max(0, best_token(scores[parents[i]]))
    numbers = tuple(float(np.float32(x)) for x in rng.choice([0.05, 0.3, 0.9, 1.0], 3))
    return Drafted(
        tokens, parents, scores, law, int(rng.integers(2**63)) * 2 + 1, int(rng.integers(2**20)),
        rule, (numbers[0], numbers[1], numbers[2]), probs if drawn else None, replacement,
    )  # fmt: skip


def host_accepts(request: Drafted, ids: np.ndarray | None) -> tuple[list[int], int]:
    """The accepted rows and the token after them, as the host's executor decides."""
    r, at = request, request.position + 1
    n = len(r.tokens)
    exact = r.rule == "exact_match" or (r.rule == "rejection" and r.probs is None)
    if r.law.temperature > 0 and not exact:
        probs = {}
        if r.probs is not None and n > 1:
            reduced = None if ids is None else torch.from_numpy(ids.astype(np.int32))
            probs = {"probs": r.probs[1:], "vocab_ids": reduced, "replacement": r.replacement}
        if r.rule == "rejection" and n == 1:
            return [], host_token(r.scores[0], r.law, r.seed, at)
        path, token = _core_testing.accept_drafts(
            r.tokens[1:], [p - 1 for p in r.parents[1:]], r.scores, seed=r.seed, position=at,
            acceptance=r.rule, **r.law.options(), **r.options, **probs,
        )  # fmt: skip
        return [i + 1 for i in path], int(token)
    sampled, depth = [0] * n, [-1] * n
    for i, parent in enumerate(r.parents):
        if i == 0:
            depth[i] = 0
        elif depth[parent] >= 0 and r.tokens[i] == sampled[parent]:
            depth[i] = depth[parent] + 1
        if depth[i] >= 0:
            sampled[i] = host_token(r.scores[i], r.law, r.seed, at + depth[i])
    best = depth.index(max(depth))
    path, node = [], best
    while node > 0:
        path.insert(0, node)
        node = r.parents[node]
    return path, sampled[best]


@dataclasses.dataclass
class Accepted:
    """What the operation decided of one request."""

    path: list[int]
    emitted: list[int]
    sampled: list[int]
    status: int


def row_laws_bytes(rows: int, vocab: int) -> int:
    """All the scratch that a step's rows can use: words of counters, drafts, cuts and masses, and
    lists."""
    chunks = -(-vocab // 256)
    words = 2 + rows * (4 + 6 + 3 + chunks) + (rows + 1) // 2 * 2
    lists = max(128 * chunks, 16 + 12 * min(vocab, 2048))
    return -(-words // 2) * 16 + rows * (-(-lists // 16) * 16)


def by_draft(
    target: Target,
    requests: list[Drafted],
    rng: np.random.Generator,
    ids: np.ndarray | None,
    own: bool,
) -> ops.DraftProbs:
    """The probabilities in rows by draft, of the requests from the first on that has some."""
    first = next(b for b, r in enumerate(requests) if r.probs is not None)
    drafting = requests[first:]
    most = max(1, *(len(r.tokens) - 1 for r in drafting)) + int(rng.integers(2))
    tokens_of = np.arange(requests[0].scores.shape[1]) if ids is None else ids
    columns = len(tokens_of)
    spare = int(own and ids is not None)  # a column of nothing
    probs = np.full((len(drafting), most, columns + spare), math.nan, np.float32)
    tokens = np.full(probs.shape, -1, np.int32)
    stands = np.full((len(drafting), most), -1, np.int32)
    for b, r in enumerate(drafting):
        for i in range(1, len(r.tokens)):
            order = rng.permutation(columns) if own else np.arange(columns)
            tokens[b, i - 1, :columns] = tokens_of[order]
            if r.probs is not None:
                probs[b, i - 1] = 0.0
                probs[b, i - 1, :columns] = r.probs[i][order]
            stands[b, i - 1] = [*tokens[b, i - 1].tolist(), r.tokens[i]].index(r.tokens[i])

    def put(array: np.ndarray) -> torch.Tensor:
        return target.put(torch.from_numpy(np.ascontiguousarray(array)))

    vocab_ids = put(tokens) if own else None if ids is None else put(ids.astype(np.int32))
    return ops.DraftProbs(
        put(probs),
        vocab_ids,
        None if own or ids is None else put(stands.reshape(-1)),
        put(np.array([r.probs is not None for r in drafting], np.uint8)),
        put(np.array([r.replacement for r in drafting], np.uint8)),
    )


def accept(
    target: Target,
    requests: list[Drafted],
    rng: np.random.Generator,
    *,
    dtype: torch.dtype = torch.float32,
    ids: np.ndarray | None = None,
    workspace: str | torch.Tensor = "ours",
    form: str = "rows",
) -> list[Accepted]:
    """One call of accept_step for all requests; those with probabilities are told apart.

    workspace  "ours": the operation finds it; "least", "whole": as much as it needs, or can use,
               poisoned; or a tensor
    form  how probabilities are laid out: "rows" of the scores, "drafts" of the last requests, or
          these with columns of their "own" in an order of their own
    """
    counts = [len(r.tokens) for r in requests]
    firsts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    rows, vocab = firsts[-1], requests[0].scores.shape[1]
    scores = torch.cat([torch.from_numpy(r.scores) for r in requests]).to(dtype)

    def int32(values: list[int]) -> torch.Tensor:
        return target.put(torch.tensor(values, dtype=torch.int32))

    def flags(values: list[bool]) -> torch.Tensor:
        return target.put(torch.tensor(values, dtype=torch.uint8))

    def numbers(which: int) -> torch.Tensor:
        return target.put(torch.tensor([r.numbers[which] for r in requests]))

    given = None
    if any(r.probs is not None for r in requests):
        columns = vocab if ids is None else len(ids)
        filler = np.full((1, columns), math.nan, np.float32)
        tables = [np.repeat(filler, len(r.tokens), 0) if r.probs is None else r.probs
                  for r in requests]  # fmt: skip
        place = None if ids is None else {int(token): i for i, token in enumerate(ids)}
        at = None
        if place is not None:
            at = int32([place.get(token, -1) for r in requests for token in r.tokens])
        given = ops.DraftProbs(
            strided(target, torch.from_numpy(np.concatenate(tables)), rng),
            vocab_ids=None if ids is None else int32(ids.tolist()),
            draft_columns=at,
            has_probs=flags([r.probs is not None for r in requests]),
            replacement=flags([r.replacement for r in requests]),
        )
        if form != "rows":
            given = by_draft(target, requests, rng, ids, form == "own")
    results = ops.make_accept_results(rows, len(requests), target.device)
    for tensor in vars(results).values():
        tensor.fill_(-7)
    status = target.put(torch.zeros(len(requests), dtype=torch.int32))
    scratch = workspace if isinstance(workspace, torch.Tensor) else None
    if (
        scratch is None and workspace != "ours"
    ):  # what it cannot do without, or all it can use; poisoned
        needed = ops.accept_scratch_bytes(len(requests), vocab, given is not None)
        if workspace == "whole":
            needed += row_laws_bytes(rows, vocab)
        scratch = target.put(torch.full((needed + 256,), 0xFF, dtype=torch.uint8))
    ops.accept_step(
        strided(target, scores, rng),
        int32(firsts),
        int32([r.position if i == 0 else -5 for r in requests for i in range(len(r.tokens))]),
        int32([token for r in requests for token in r.tokens]),
        int32([parent for r in requests for parent in r.parents]),
        laws_on(target, [r.law for r in requests], [r.seed for r in requests]),
        flags([ops.ACCEPTANCE_RULES.index(r.rule) for r in requests]),
        results=results,
        draft_probs=given,
        posterior_threshold=numbers(0),
        posterior_alpha=numbers(1),
        acceptance_threshold=numbers(2),
        backend=target.backend,
        workspace=scratch,
        status=status,
    )
    found = []
    for b in range(len(requests)):
        length, emitted = int(results.path_len[b]), int(results.num_emitted[b])
        found.append(
            Accepted(
                path=results.path[b, :length].tolist(),
                emitted=results.emitted[b, :emitted].tolist(),
                sampled=results.sampled[firsts[b] : firsts[b + 1]].tolist(),
                status=int(status[b]),
            )
        )
        assert bool((results.path[b, length:] == -7).all()), "wrote past the path"
        assert bool((results.emitted[b, emitted:] == -7).all()), "wrote past what was emitted"
    return found

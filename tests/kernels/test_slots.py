"""Slots: drafting, acceptance, stop rules and pools where the requests live, on every backend.

The oracle is the executor of the host, which keeps its state in objects of its own: the same
requests must get the same tokens by the same drafts, step by step. On a device whole steps run,
with the hash model as the target: geometry, K/V and compaction come from the operations.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from cuda_calls import BAD_LENGTH, Target, checked, every_backend
from kernel_calls import int32
from slot_driver import SENTINEL, Device, HostOracle, Job, jobs_of, run_jobs

from hash_target import HashFunction
from specdec_ext import ops


@pytest.mark.parametrize("method", ["none", "lookahead", "ngram", "suffix"])
@every_backend
def test_slots_decode_as_the_host_executor_does(target: Target, method: str) -> None:
    rng = random.Random(5 + len(method))
    torch.manual_seed(3)
    function = HashFunction(vocab=40, surprise=9, alphabet=5, seed=len(method))
    jobs = jobs_of(rng, function.vocab, 60 if target.backend == "cpu" else 14, method)
    device = Device(target, function, method, num_slots=5, num_rows=5 * 64 + 3)
    traces = run_jobs(device, jobs, rng)
    oracle = HostOracle(function, method)
    accepted = 0
    for job, trace in zip(jobs, traces, strict=True):
        expected = oracle.run(job)
        assert trace == expected
        accepted += sum(step[1] for step in trace.steps)
        reference = function.reference(job.prompt, len(trace.tokens))
        assert trace.tokens == reference
    assert (accepted > 0) == (method != "none")


def small(target: Target, method: str = "lookahead") -> Device:
    torch.manual_seed(1)
    return Device(target, HashFunction(vocab=40, seed=4), method, num_slots=3, num_rows=150)


@every_backend
def test_a_nan_after_the_golden_token_ends_the_request(target: Target) -> None:
    device = small(target, "none")
    device.enter(0, 0, Job([1, 2, 3], 10))
    (result,) = device.commit([0], [0, 1], [7])
    assert (result.tokens, result.finish_reason) == ([7], None)
    device.enter(1, 1, Job([4], 10))
    (result,) = device.commit([1], [0, 1], [-1])
    assert (result.tokens, result.finish_reason) == ([], "error")
    assert device.step([1, 0])[0].tokens == []


@every_backend
def test_a_prompt_in_chunks_changes_nothing_until_its_last_row(target: Target) -> None:
    device = small(target)
    choice = device.enter(2, 0, Job([5, 6, 5, 6, 5], 20))
    before = device.slots[2].clone()
    (result,) = device.commit([2], [0, 0], choice)
    assert result.tokens == [] and result.finish_reason is None
    assert torch.equal(device.slots[2], before)
    (result,) = device.step([2])  # not begun: no rows
    assert result.tokens == []
    (result,) = device.commit([2], [0, 1], choice)
    assert result.tokens == choice


@checked
def test_bad_row_counts_are_flagged_and_change_nothing(target: Target) -> None:
    device = small(target)
    for slot in range(3):
        choice = device.enter(slot, slot, Job([5, 6, 5, 6, 5], 40, {"lookahead": (5, 4, 5)}))
        device.commit([slot], [0, 1], choice)
    device.step([0, 1, 2])
    ids = target.put(int32([0, 1, 2]))
    room = target.put(torch.zeros(3, dtype=torch.int32))

    def draft(rows: int, limit: list[int] | None = None) -> tuple[list[int], list[int]]:
        status = target.put(torch.zeros(3, dtype=torch.int32))
        cu_rows = device.filled(4)
        ops.draft_step(
            device.layout, device.slots, ids, tokens=device.filled(rows),
            parents=device.filled(rows), cu_rows=cu_rows, kv_len=room.clone(),
            max_drafts=None if limit is None else target.put(int32(limit)),
            backend=target.backend, status=status,
        )  # fmt: skip
        return cu_rows.tolist(), status.tolist()

    full, flags = draft(150)
    sizes = [b - a for a, b in itertools.pairwise(full)]
    assert flags == [0, 0, 0] and min(sizes) > 4
    # Room for the first and the third only.
    cu, flags = draft(sizes[0] + sizes[1] - 1, [127, 127, 0])
    assert cu == [0, sizes[0], sizes[0], sizes[0] + 1] and flags == [0, BAD_LENGTH, 0]
    assert draft(3, [0, 0, 0]) == ([0, 1, 2, 3], [0, 0, 0])

    cu, _ = draft(150)
    before = device.slots.clone()
    for bad in ([0, 1, 2, 3], [0, cu[1], cu[1], 2**31 - 1], [-5, cu[1] - 5, cu[1] - 5, cu[1] - 5]):
        status = target.put(torch.zeros(3, dtype=torch.int32))
        results, path, path_len = (target.put(t) for t in ops.make_results(device.layout, 3))
        ops.commit_step(
            device.layout, device.slots, ids, target.put(int32(bad)), device.filled(cu[1] + 1),
            results=results, path=path, path_len=path_len, backend=target.backend, status=status,
        )  # fmt: skip
        wrong = [bad[b + 1] != bad[b] for b in range(3)]
        if bad[1] - bad[0] == sizes[0] and bad[0] == 0:
            wrong[0] = False
        assert status.tolist() == [BAD_LENGTH if w else 0 for w in wrong]
        changed = [not torch.equal(a, b) for a, b in zip(before, device.slots, strict=True)]
        assert changed == [w is False and bad[b + 1] != bad[b] for b, w in enumerate(wrong)]
        device.slots.copy_(before)


@every_backend
def test_a_step_drafts_its_share_of_both_branches(target: Target) -> None:
    """The paths of window rows and of guesses; together those of a step without a share."""
    device = small(target)
    for slot in range(3):
        choice = device.enter(slot, slot, Job([5, 6, 5, 6, 5], 60, {"lookahead": (5, 4, 5)}))
        device.commit([slot], [0, 1], choice)

    def paths(window_rows: list[int] | None, guesses: list[int] | None) -> list[set[Any]]:
        tokens, parents, cu_rows = device.filled(150), device.filled(150), device.filled(4)
        given = {"window_rows": window_rows, "guesses": guesses}
        ops.draft_step(
            device.layout, device.slots, target.put(int32([0, 1, 2])), tokens=tokens,
            parents=parents, cu_rows=cu_rows, kv_len=device.filled(3), backend=target.backend,
            **{name: None if v is None else target.put(int32(v)) for name, v in given.items()},
        )  # fmt: skip
        found: list[set[Any]] = []
        for first, end in itertools.pairwise(cu_rows.tolist()):
            path: list[tuple[int, ...]] = []
            for token, parent in zip(
                tokens[first:end].tolist(), parents[first:end].tolist(), strict=True
            ):
                path.append((*(path[parent] if parent >= 0 else ()), token))
            found.append(set(path))
            assert len(found[-1]) == end - first
        return found

    for _ in range(30):  # until the golden token has been seen before
        device.step([0, 1, 2])
        guesses = paths([0, 0, 0], [99, 99, 99])
        if min(len(g) for g in guesses) > 4:
            break
    everything, window = paths(None, None), paths([99, 99, 99], [0, 0, 0])
    for b in range(3):
        assert window[b] | guesses[b] == everything[b]
        assert len(window[b]) > 4 and len(guesses[b]) > 4 and window[b] != guesses[b]
    one, two, three = paths([0, 2, 5], [0, 0, 1])
    assert len(one) == 1
    assert two < window[1] and 1 < len(two) <= 1 + 2 + 3  # (N - 2) + (rows - 1)(N - 1)
    assert window[2] <= three <= everything[2] and len(three) <= len(window[2]) + 3


@every_backend
def test_packing_more_requests_than_a_block_has_threads(target: Target) -> None:
    """Ids in any order, nobody in between, slots that are not there."""
    count = 150
    layout = ops.SlotLayout(method="ngram", max_seq_len=24, max_matching_ngram_size=1)
    slots = ops.make_slots(layout, count)
    for slot in range(count):  # a text that repeats its only token drafts as much as it may
        request = layout.request_bytes([slot] * 3, max_tokens=20, max_draft_len=slot % 3)
        ops.enter_slot(slots, slot, request)
    slots = target.put(slots)
    everyone = target.put(int32(list(range(count))))
    ops.commit_step(
        layout, slots, everyone, target.put(int32(list(range(count + 1)))), everyone,
        **dict(
            zip(
                ("results", "path", "path_len"),
                (target.put(t) for t in ops.make_results(layout, count)),
                strict=True,
            )
        ),
        backend=target.backend,
    )  # fmt: skip
    ids = random.Random(1).sample([*range(count), -1, -1, -1], count + 3)
    rows = [0 if slot < 0 else 1 + slot % 3 for slot in ids]
    total = sum(rows)
    arrays = [target.put(torch.full((n,), SENTINEL, dtype=torch.int32))
              for n in (total + 5, total + 5, count + 4, count + 3)]  # fmt: skip
    tokens, parents, cu_rows, kv_len = arrays
    ops.draft_step(
        layout, slots, target.put(int32(ids)), tokens=tokens, parents=parents, cu_rows=cu_rows,
        kv_len=kv_len, backend=target.backend,
    )  # fmt: skip
    assert cu_rows.tolist() == list(itertools.accumulate(rows, initial=0))
    assert kv_len.tolist() == [0 if slot < 0 else 3 for slot in ids]
    assert tokens.tolist() == [s for s in ids if s >= 0 for _ in range(1 + s % 3)] + [0] * 5
    assert parents.tolist() == [i - 1 for n in rows for i in range(n)] + [-1] * 5

"""Sampled requests in slots: accept_step decides by each request's rule, commit_step takes that.

Exact match needs no more than accept_step's choices: commit_step may walk the tree itself. Every
step (drafts, accepted drafts, tokens) has to be that of the host's executor, or, where it shares a
batch with other rules, that of the request alone.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from accept_cases import laws_on
from cuda_calls import BAD_TREE, Target, checked, every_backend
from kernel_calls import int32
from slot_driver import Device, HostOracle, Job, jobs_of, run_jobs

from hash_target import HashFunction
from reference.sampling_reference import Law
from specdec_ext import ops

LAWS = [Law(0.0), Law(0.25), Law(0.4, top_k=5), Law(0.5, top_p=0.8), Law(0.3, min_p=0.02)]


class SampledDevice(Device):
    """Draws with the laws of the jobs in its slots."""

    needs_logits = True

    def __init__(self, target: Target, function: HashFunction, method: str, jobs: list[Job]):
        super().__init__(target, function, method, num_slots=5, num_rows=5 * 64 + 3)
        self.jobs = jobs

    def choose(
        self, slot: int, plan: Any, tokens: list[int], parents: list[int], position: int
    ) -> list[int]:
        put = self.target.put
        rows, index = len(tokens), self.running[slot]
        results = ops.make_accept_results(rows, 1, self.target.device)
        ops.accept_step(
            put(self.model.forward(plan)),
            put(int32([0, rows])),
            put(int32([position] * rows)),
            put(int32(tokens)),
            put(int32(parents)),
            laws_on(self.target, [LAWS[index % len(LAWS)]], [self.jobs[index].options["seed"]]),
            put(torch.zeros(1, dtype=torch.uint8)),
            results=results,
            backend=self.target.backend,
        )
        return results.sampled.tolist()


@pytest.mark.parametrize("method", ["none", "lookahead", "ngram"])
@every_backend
def test_sampled_slots_decode_as_the_host_executor_does(target: Target, method: str) -> None:
    rng = random.Random(9 + len(method))
    torch.manual_seed(4)
    function = HashFunction(vocab=40, surprise=9, alphabet=5, seed=len(method))
    jobs = jobs_of(rng, function.vocab, 40 if target.backend == "cpu" else 8, method)
    jobs = [
        dataclasses.replace(job, max_tokens=min(job.max_tokens, 40), enters=0 if i < 3 else 4)
        for i, job in enumerate(jobs)
    ]
    traces = run_jobs(SampledDevice(target, function, method, jobs), jobs, rng)
    oracle = HostOracle(function, method)
    accepted = 0
    for i, (job, trace) in enumerate(zip(jobs, traces, strict=True)):
        law = LAWS[i % len(LAWS)].options() if i % len(LAWS) else {}
        assert trace == oracle.run(dataclasses.replace(job, options={**job.options, **law}))
        accepted += sum(step[1] for step in trace.steps)
    assert (accepted > 0) == (method != "none")


# What a request may ask for besides its law, as submit() takes it.
RULES: list[dict[str, Any]] = [
    {},
    {"acceptance": "rejection"},
    {"acceptance": "typical", "posterior_threshold": 0.02, "posterior_alpha": 0.4},
    {"acceptance": "threshold", "acceptance_threshold": 0.03},
    {"acceptance": "typical"},
]


class RulesDevice(Device):
    """Accepts by the rules and laws of the jobs in its slots, all of a batch in one call."""

    needs_logits = True

    def __init__(
        self, target: Target, function: HashFunction, method: str, asked: list[dict[str, Any]]
    ):
        super().__init__(target, function, method, num_slots=5, num_rows=5 * 64 + 3)
        self.asked = asked
        self.scores: list[torch.Tensor] = []
        self.tree: tuple[list[int], list[int], list[int]] = ([], [], [])

    def choose(
        self, slot: int, plan: Any, tokens: list[int], parents: list[int], position: int
    ) -> list[int]:
        self.scores.append(self.model.forward(plan))
        for kept, new in zip(self.tree, (tokens, parents, [position] * len(tokens)), strict=True):
            kept.extend(new)
        return []

    def commit(
        self,
        ids: list[int],
        cu: list[int],
        sampled: list[int],
        accepted: ops.AcceptResults | None = None,
    ) -> list[ops.SlotResult]:
        put, rows = self.target.put, len(self.tree[0])
        options = [self.asked[self.running[s]] if s in self.running else {} for s in ids]
        laws = [
            Law(
                o.get("temperature", 0.0),
                o.get("top_k", 0),
                o.get("top_p", 1.0),
                o.get("min_p", 0.0),
            )
            for o in options
        ]

        def numbers(name: str, default: float) -> torch.Tensor:
            return put(torch.tensor([o.get(name, default) for o in options]))

        names = [o.get("acceptance", "exact_match") for o in options]
        results = ops.make_accept_results(rows, len(ids), self.target.device)
        status = put(torch.zeros(len(ids), dtype=torch.int32))
        scores = torch.cat([*self.scores, torch.zeros(0, self.model.vocab_size)])
        tokens, parents, positions = (put(int32(values)) for values in self.tree)
        ops.accept_step(
            put(scores),
            put(int32(cu)),
            positions,
            tokens,
            parents,
            laws_on(self.target, laws, [o.get("seed", 0) for o in options]),
            put(torch.tensor([ops.ACCEPTANCE_RULES.index(n) for n in names], dtype=torch.uint8)),
            posterior_threshold=numbers("posterior_threshold", 0.09),
            posterior_alpha=numbers("posterior_alpha", 0.3),
            acceptance_threshold=numbers("acceptance_threshold", 1.0),
            results=results,
            backend=self.target.backend,
            status=status,
        )
        assert status.tolist() == [0] * len(ids)
        self.scores, self.tree = [], ([], [], [])
        return super().commit(ids, cu, results.sampled.tolist(), results)


@pytest.mark.parametrize("method", ["none", "lookahead", "ngram"])
@every_backend
def test_rules_in_one_batch_decode_as_the_host_executor_does(target: Target, method: str) -> None:
    rng = random.Random(21 + len(method))
    torch.manual_seed(8)
    function = HashFunction(vocab=40, surprise=9, alphabet=5, seed=len(method))
    count, most = (75, 40) if target.backend == "cpu" else (25, 24)
    jobs = [
        dataclasses.replace(job, max_tokens=min(job.max_tokens, most), enters=0 if i < 3 else 4)
        for i, job in enumerate(jobs_of(rng, function.vocab, count, method))
    ]
    # Laws and rules in every combination, among them greedy requests.
    asked = [
        {**LAWS[i % len(LAWS)].options(), **RULES[i // len(LAWS) % len(RULES)]}
        for i in range(count)
    ]
    rng.shuffle(asked)
    for job, options in zip(jobs, asked, strict=True):
        options["seed"] = job.options["seed"]
    traces = run_jobs(RulesDevice(target, function, method, asked), jobs, rng)
    oracle = HostOracle(function, method)
    accepted = {str(rule.get("acceptance")): 0 for rule in RULES}
    for job, options, trace in zip(jobs, asked, traces, strict=True):
        assert trace == oracle.run(dataclasses.replace(job, options={**job.options, **options}))
        accepted[str(options.get("acceptance"))] += sum(step[1] for step in trace.steps)
    # Few requests in the emulator: not every rule finds something to keep.
    counts = accepted.values() if target.backend == "cpu" else [sum(accepted.values())]
    assert all((count > 0) == (method != "none") for count in counts)


@checked
def test_a_path_that_is_none_of_the_tree_changes_nothing(target: Target) -> None:
    torch.manual_seed(1)
    device = Device(target, HashFunction(vocab=40, seed=4), "lookahead", num_slots=1, num_rows=64)
    job = Job([5, 6, 5, 6, 5], 40, {"lookahead": (5, 4, 5)})
    device.commit([0], [0, 1], device.enter(0, 0, job))
    put, ids = target.put, target.put(int32([0]))
    tokens, parents, cu_rows = device.filled(64), device.filled(64), device.filled(2)
    ops.draft_step(
        device.layout, device.slots, ids, tokens=tokens, parents=parents, cu_rows=cu_rows,
        kv_len=device.filled(1), backend=target.backend,
    )  # fmt: skip
    rows = int(cu_rows[1])
    assert rows > 4
    before = device.slots.clone()
    # A child of the golden token with a child of its own.
    node = next(i for i in range(rows) if parents[i].item() > 0)
    above, token = int(parents[node]), tokens.tolist()
    while parents[above].item() > 0:
        node, above = above, int(parents[above])

    def commit(path: list[int], emitted: list[int], length: int, count: int) -> tuple[int, bool]:
        """Its flags, and whether the slot is as it was."""
        accepted = ops.make_accept_results(rows, 1, target.device)
        accepted.path[0, : len(path)] = put(int32(path))
        accepted.emitted[0, : len(emitted)] = put(int32(emitted))
        accepted.path_len[0], accepted.num_emitted[0] = length, count
        results, path_out, path_len = (put(t) for t in ops.make_results(device.layout, 1))
        status = put(torch.zeros(1, dtype=torch.int32))
        ops.commit_step(
            device.layout, device.slots, ids, cu_rows, put(torch.zeros(rows, dtype=torch.int32)),
            results=results, path=path_out, path_len=path_len, accepted=accepted,
            backend=target.backend, status=status,
        )  # fmt: skip
        same = torch.equal(before, device.slots)
        device.slots.copy_(before)
        assert same == (ops.read_results(results)[0].tokens == [])
        return int(status[0]), same

    good = [token[above], token[node], 7]
    assert commit([above, node], good, 2, 3) == (0, False)
    assert commit([above, node], good, 2, 2) == (0, False)
    for path, emitted, length, count in (
        ([node], good, 1, 2),  # not a child of the golden token
        ([above, above], good, 2, 3),
        ([0], [token[0], 7], 1, 2),
        ([rows], good, 1, 2),
        ([-1], good, 1, 2),
        ([above, node], [token[above], token[node] + 1, 7], 2, 3),  # another token than the draft's
        ([above, node], [*good[:2], -1], 2, 3),
        ([above, node], good, 2, 1),
        ([above, node], good, 2, 4),
        ([above, node], good, -1, 0),
        ([above, node], good, 128, 129),
        ([above, node], good, -(2**31), -(2**31)),
        ([above, node], good, 2**31 - 1, 2**31 - 1),
    ):
        assert commit(path, emitted, length, count) == (BAD_TREE, True), (path, length, count)

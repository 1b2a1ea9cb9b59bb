"""Sampled requests in slots: accept_step draws, commit_step takes its choices.

Exact match needs no more than that: commit_step walks the tree itself. Every step (drafts,
accepted drafts, tokens) has to be that of the host's executor.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from accept_cases import laws_on
from cuda_calls import Target, every_backend
from kernel_calls import int32
from test_slots import Device, HostOracle, Job, jobs_of, run_jobs

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

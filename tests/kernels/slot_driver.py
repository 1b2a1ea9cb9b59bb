"""Requests in slots of any backend, and the host's executor as their oracle."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from cuda_calls import Target
from kernel_calls import int32

from hash_target import HashFunction, HashModel
from specdec_ext import _core, ops

PAGE = 16
MAX_SEQ_LEN = 200
SENTINEL = -7


@dataclasses.dataclass
class Job:
    """One request and the step at which it enters."""

    prompt: list[int]
    max_tokens: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    enters: int = 0


@dataclasses.dataclass
class Trace:
    """What every step brought a request: (drafts, accepted, tokens)."""

    steps: list[tuple[int, int, list[int]]] = dataclasses.field(default_factory=list)
    finish: str | None = None
    stop: int | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for _, _, tokens in self.steps for token in tokens]


def jobs_of(rng: random.Random, vocab: int, count: int, method: str) -> list[Job]:
    jobs = []
    for _ in range(count):
        prompt = [rng.randrange(vocab) for _ in range(rng.choice([1, 2, 3, 9, 40]))]
        options: dict[str, Any] = {"seed": rng.randrange(2**60)}
        if method == "lookahead":
            options["lookahead"] = rng.choice([(5, 4, 5), (2, 2, 1), (3, 4, 0), (1, 1, 0)])
        if method in ("ngram", "suffix"):
            options["max_draft_len"] = rng.choice([0, 1, 4, 10])
        if rng.random() < 0.2:
            options["speculative"] = False
        if rng.random() < 0.4:
            options["stop_token_ids"] = [rng.randrange(vocab), rng.randrange(vocab)]
        if rng.random() < 0.3:
            options["eos_token_ids"] = [rng.randrange(vocab)]
        jobs.append(Job(prompt, rng.choice([1, 2, 7, 60, 300]), options, rng.randrange(12)))
    return jobs


class HostOracle:
    """The executor of cpp/engine, drafts of fixed length, one request after another."""

    def __init__(self, function: HashFunction, method: str) -> None:
        self.function, self.method = function, method

    def run(self, job: Job) -> Trace:
        model = HashModel(self.function, 64, PAGE)
        options: dict[str, Any] = {"method": self.method}
        if self.method == "lookahead":
            options["lookahead"] = (5, 4, 5)
        if self.method == "ngram":
            options["ngram"] = {"max_draft_len": 10, "max_matching_ngram_size": 3}
        if self.method == "suffix":
            options["suffix"] = {"max_draft_len": 10}
        executor = _core.Executor(
            model.k_pages, model.v_pages, vocab_size=self.function.vocab, max_batch_size=1,
            max_seq_len=MAX_SEQ_LEN, max_num_tokens=256, adaptive=False, **options,
        )  # fmt: skip
        request = dict(job.options)
        if request.get("lookahead") == (1, 1, 0) or request.get("max_draft_len") == 0:
            request["speculative"] = False
        executor.submit(job.prompt, max_tokens=job.max_tokens, **request)
        trace = Trace()
        while (plan := executor.plan()) is not None:
            for out in executor.commit(plan, model.forward(plan)):
                trace.steps.append((out.num_drafts, out.num_accepted, out.tokens))
                trace.finish, trace.stop = out.finish_reason, out.stop_reason
        return trace


class Device:
    """Steps on slots: what an executor with its state on the device enqueues.

    The model reads host copies of the step's arrays (a real one would not have to). Each slot owns
    fixed pages, which it shares with nobody.
    """

    needs_logits = False

    def __init__(
        self, target: Target, function: HashFunction, method: str, num_slots: int, num_rows: int
    ) -> None:
        self.target, self.num_slots, self.num_rows = target, num_slots, num_rows
        self.layout = ops.SlotLayout(
            method=method, max_seq_len=MAX_SEQ_LEN, lookahead=(5, 4, 5), max_matching_ngram_size=3
        )
        self.slots = target.put(
            torch.randint(0, 255, (num_slots, self.layout.slot_bytes), dtype=torch.uint8)
        )
        per_slot = -(-(MAX_SEQ_LEN + 128) // PAGE)
        self.model = HashModel(function, num_slots * per_slot, PAGE)
        order = torch.randperm(num_slots * per_slot).to(torch.int32)
        self.pages = order.view(num_slots, per_slot)
        self.running: dict[int, int] = {}  # slot -> job

    def enter(self, slot: int, index: int, job: Job) -> list[int]:
        """Read the prompt; returns the choice after it."""
        ops.enter_slot(
            self.slots,
            slot,
            self.layout.request_bytes(job.prompt, max_tokens=job.max_tokens, **job.options),
        )
        self.running[slot] = index
        plan = _core.make_step_plan(
            [job.prompt], kv_len=[0], page_table=[self.pages[slot].tolist()],
            logits_for_all_rows=False, needs_logits=self.needs_logits,
        )  # fmt: skip
        return self.choose(slot, plan, job.prompt[-1:], [-1], len(job.prompt) - 1)

    def choose(
        self, slot: int, plan: Any, tokens: list[int], parents: list[int], position: int
    ) -> list[int]:
        """The target's choice after each row of a slot; position: of the first of them."""
        return self.model.forward(plan).tolist()

    def filled(self, *shape: int) -> torch.Tensor:
        return self.target.put(torch.full(shape, SENTINEL, dtype=torch.int32))

    def commit(
        self,
        ids: list[int],
        cu: list[int],
        sampled: list[int],
        accepted: ops.AcceptResults | None = None,
    ) -> list[ops.SlotResult]:
        batch = len(ids)
        results, path = self.filled(batch, self.layout.result_words), self.filled(batch, 128)
        path_len = self.filled(batch)
        status = self.target.put(torch.zeros(batch, dtype=torch.int32))
        ops.commit_step(
            self.layout, self.slots, self.target.put(int32(ids)), self.target.put(int32(cu)),
            self.target.put(int32(sampled)), results=results, path=path, path_len=path_len,
            accepted=accepted, backend=self.target.backend, status=status,
        )  # fmt: skip
        assert status.tolist() == [0] * batch
        self.path, self.path_len = path, path_len
        return ops.read_results(results)

    def step(self, ids: list[int]) -> list[ops.SlotResult]:
        """One decoding step of these slots (-1: padding)."""
        batch = len(ids)
        tokens, parents = self.filled(self.num_rows), self.filled(self.num_rows)
        cu_rows, kv_len = self.filled(batch + 1), self.filled(batch)
        status = self.target.put(torch.zeros(batch, dtype=torch.int32))
        ops.draft_step(
            self.layout, self.slots, self.target.put(int32(ids)), tokens=tokens, parents=parents,
            cu_rows=cu_rows, kv_len=kv_len, backend=self.target.backend, status=status,
        )  # fmt: skip
        assert status.tolist() == [0] * batch
        cu = cu_rows.tolist()
        assert tokens[cu[-1] :].tolist() == [0] * (self.num_rows - cu[-1])
        assert parents[cu[-1] :].tolist() == [-1] * (self.num_rows - cu[-1])
        sampled = []
        for b, slot in enumerate(ids):
            rows = slice(cu[b], cu[b + 1])
            if cu[b + 1] == cu[b]:
                continue
            plan = _core.make_step_plan(
                [tokens[rows].tolist()], parents=[parents[rows].tolist()],
                kv_len=[kv_len[b].item()], page_table=[self.pages[slot].tolist()],
                needs_logits=self.needs_logits,
            )  # fmt: skip
            sampled += self.choose(
                slot, plan, tokens[rows].tolist(), parents[rows].tolist(), int(kv_len[b])
            )
        table = torch.stack([self.pages[max(slot, 0)] for slot in ids])
        results = self.commit(ids, cu, sampled)
        # The hash model's pages are host memory: compaction runs there, by the device's paths.
        ops.compact_kv(
            self.model.k_pages, self.model.v_pages, table, kv_len.cpu(), cu_rows.cpu(),
            self.path.cpu(), self.path_len.cpu(),
        )  # fmt: skip
        return results


def run_jobs(device: Device, jobs: list[Job], rng: random.Random) -> list[Trace]:
    """Requests join and leave between steps; batches are ragged, padded and in any order."""
    traces = [Trace() for _ in jobs]
    waiting = sorted(range(len(jobs)), key=lambda i: jobs[i].enters)
    step = 0

    def take(results: list[ops.SlotResult], ids: list[int]) -> None:
        for slot, result in zip(ids, results, strict=True):
            if slot not in device.running:
                assert result.tokens == [] and result.num_drafts == 0
                continue
            trace = traces[device.running[slot]]
            if trace.finish is not None:  # frozen: nothing comes any more
                assert result.tokens == [] and result.finish_reason == trace.finish
                continue
            trace.steps.append((result.num_drafts, result.num_accepted, result.tokens))
            trace.finish, trace.stop = result.finish_reason, result.stop_reason

    while waiting or any(traces[i].finish is None for i in device.running.values()):
        # A slot is left a step or two after its request has ended, as run-ahead would.
        for slot, index in list(device.running.items()):
            if traces[index].finish is not None and rng.random() < 0.5:
                del device.running[slot]
        free = [s for s in range(device.num_slots) if s not in device.running]
        while waiting and free and jobs[waiting[0]].enters <= step:
            slot, index = free.pop(rng.randrange(len(free))), waiting.pop(0)
            choice = device.enter(slot, index, jobs[index])
            take(device.commit([slot], [0, 1], choice), [slot])
        ids = list(device.running)
        rng.shuffle(ids)
        ids.insert(rng.randrange(len(ids) + 1), -1)
        take(device.step(ids), ids)
        step += 1
        assert step < 2000
    return traces

"""Random programs of submit, step, cancel and failures, for every method, place and depth.

Hypothesis writes the program and shrinks it when a rule breaks. The rules: a request's tokens are
always a prefix of what it says alone, it gets exactly one end, cancelled requests get none, pages
add up, and an idle executor holds nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from driver import STEP_COST, Delivery, Job, hash_engine
from guesser import PROPOSED, Guesser
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stream_driver import FakeRecorder, stream_hash_engine

from hash_target import HashFunction
from specdec_ext.engine.overlap import OverlapPipeline

METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "lookahead": {"method": "lookahead", "lookahead": (4, 3, 4)},
    "lookahead-7": {"method": "lookahead", "lookahead": (7, 7, 7)},
    "ngram": {"method": "ngram", "ngram": {"max_draft_len": 8, "max_matching_ngram_size": 3}},
    "public": {
        "method": "ngram",
        "ngram": {"max_draft_len": 5, "max_matching_ngram_size": 3, "is_public_pool": True},
    },
    "suffix": {"method": "suffix", "suffix": {"max_draft_len": 9, "min_token_prob": 0.02}},
    "proposed": PROPOSED,
}
COSTS = [STEP_COST, ([1, 128], [1.0, 1.0]), ([1, 128], [1.0, 60.0])]
LAWS: list[dict[str, Any]] = [
    {"temperature": 0.1},
    {"temperature": 0.3, "top_k": 6},
    {"temperature": 0.4, "top_p": 0.7},
    {"temperature": 0.3, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
]
LOSSLESS: list[dict[str, Any]] = [{}, {"acceptance": "rejection"}, {"acceptance": "best_beam"}]
LOSSY: list[dict[str, Any]] = [
    {"acceptance": "typical", "posterior_threshold": 0.02, "posterior_alpha": 0.9},
    {"acceptance": "threshold", "acceptance_threshold": 0.03},
]
RATES: list[list[float]] = [[], [], [], [], [0.9, 0.7, 0.4, 0.2], [1.0, 1.0], [0.5] * 9]
VOCAB, MAX_SEQ_LEN, LONGEST = 30, 160, 70
# Starts that requests have in common: pages to be reused.
SHARED = [i * 7 % VOCAB for i in range(40)]


def host_options(rng: random.Random, most: int) -> dict[str, Any]:
    """What a request may ask of the host."""
    kinds: list[dict[str, Any]] = [
        {"min_tokens": rng.randint(1, most)},
        {"logprobs": rng.choice([0, 3])},
        {"prompt_logprobs": rng.choice([0, 2])},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.8, "frequency_penalty": -0.3},
        {"logit_bias": {rng.randrange(VOCAB): rng.choice([-5.0, 2.0])}},
        {"bad_words": [[rng.randrange(4)], [rng.randrange(4), rng.randrange(4)]]},
        {"allowed_token_ids": rng.sample(range(VOCAB), 7)},
    ]
    options: dict[str, Any] = {}
    for kind in rng.sample(kinds, rng.choice([1, 1, 2])):
        options.update(kind)
    return options


class Schedule(RuleBasedStateMachine):
    """The program: rules are its statements, the model is `expected` and `got`.

    method    of METHODS
    pipeline  what keeps the steps in flight
    places    None: the host runs the steps; else the depth of steps on a stub stream
    may_fail  passes fail now and then
    seen      sums over all programs
    """

    method = "none"
    pipeline: type[OverlapPipeline] = OverlapPipeline
    places: tuple[int | None, ...] = (None, 0, 1, 2)
    may_fail = True
    seen: Counter[str]

    @initialize(draw=st.integers(0, 2**24))
    def start(self, draw: int) -> None:
        rng = self.rng = random.Random(draw)
        self.depth = rng.choice(self.places)
        self.got: dict[int, Delivery] = {}
        self.expected: dict[int, Delivery] = {}
        self.alive: list[int] = []
        self.fails = 0
        self.make(rng)

    def make(self, rng: random.Random) -> None:
        """The function and the engine. Only where steps have room for all drafts, of fixed length,
        do lossy texts depend on the request alone."""
        self.function = HashFunction(VOCAB, rng.choice([1, 8, 30]), 4, seed=rng.randrange(99))
        self.roomy = rng.random() < 0.4 and self.method not in ("public", "proposed")
        self.rates = rng.choice(RATES) if self.roomy and self.method != "none" else []
        self.batch = rng.choice([1, 3, 4])
        self.rows = 1024 if self.roomy else rng.choice([7, 40, 300])
        page = rng.choice([1, 4, 16])
        self.reuse = not self.roomy and rng.random() < 0.4
        options: dict[str, Any] = {
            "page_size": page,
            "num_pages": -(-(MAX_SEQ_LEN + 130) // page) + rng.randrange(300) // page,
            "max_batch_size": self.batch,
            "max_seq_len": MAX_SEQ_LEN,
            "max_num_tokens": self.rows,
            "adaptive": not self.roomy and rng.random() < 0.5,
            "enable_block_reuse": self.reuse,
            "synthetic_acceptance_rates": self.rates,
            **METHODS[self.method],
        }
        self.guesser = Guesser(self.function, rng.randrange(99))
        self.recorder: FakeRecorder | None = None
        stub = rng.choice([None, None, rng.randrange(99), rng.randrange(99), rng.randrange(99)])
        self.late = self.depth is not None and stub is not None
        if self.depth is None:
            self.engine = hash_engine(self.function, **options)
        else:
            if rng.random() < 0.5:
                self.recorder = FakeRecorder()
            drafts = self.method == "proposed"
            self.engine = stream_hash_engine(
                self.function,
                depth=self.depth,
                stub=stub,
                pipeline=self.pipeline,
                recorder=self.recorder,
                drafter=self.guesser if drafts else None,
                pads_rows=options["adaptive"] and rng.random() < 0.5,
                **options,
            )
            executor = self.engine.executor
            if options["adaptive"]:
                executor.set_step_cost(*rng.choice(COSTS))
        self.fail_next = False
        forward = self.engine.model.forward

        def fails(plan: Any) -> Any:
            if self.fail_next:
                self.fail_next = False
                raise RuntimeError("injected")
            return forward(plan)

        self.engine.model.forward = fails

    # -- requests -----------------------------------------------------------------------------

    def job(self, rng: random.Random) -> Job:
        shared = SHARED[: rng.choice([0, 5, 16, 33])]
        prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 9, 30]))]
        most = rng.choice([25, LONGEST] if self.roomy else [1, 2, 9, 25, 25, LONGEST])
        options: dict[str, Any] = {"seed": rng.randrange(2**64)}
        if rng.random() < 0.2:
            options["speculative"] = False
        elif self.method.startswith("lookahead") and rng.random() < 0.4:
            options["lookahead"] = rng.choice([(2, 2, 1), (3, 3, 0), (1, 1, 0)])
        elif self.method in ("ngram", "proposed") and rng.random() < 0.4:
            options["max_draft_len"] = rng.choice([0, 1, 3])
        elif rng.random() < 0.2:
            options["adaptive"] = rng.random() < 0.5 and not self.roomy
        if rng.random() < 0.3:
            options["stop_token_ids"] = [rng.randrange(VOCAB)]
        if rng.random() < 0.2:
            options["eos_token_ids"] = [rng.randrange(VOCAB)]
            options["ignore_eos"] = rng.random() < 0.3
        if rng.random() < 0.2:
            options["cache_salt"] = "mine"
        if rng.random() < (0.7 if self.roomy else 0.3):
            rules = [{}] if self.rates else LOSSLESS + LOSSY * (3 * self.roomy)
            options.update(rng.choice(LAWS) | rng.choice(rules))
        lossy = any(options.get("acceptance") == rule["acceptance"] for rule in LOSSY)
        if rng.random() < 0.2 and not (lossy or self.rates):  # it is drafted for differently
            options.update(host_options(rng, most))
            if self.rows - self.batch >= 3 and rng.random() < 0.4:
                right = self.function.reference(prompt, min(3, most))
                options["external_drafts"] = [*right[:-1], rng.choice([right[-1], 0])]
        return Job(prompt, most, options)

    def alone(self, job: Job) -> Delivery:
        """The whole text of a request: by the definition, or by the host with the request alone."""
        asked = dict(job.options)
        decided = {"temperature", "acceptance", "logprobs", "prompt_logprobs", "min_tokens",
                   "repetition_penalty", "presence_penalty", "logit_bias", "bad_words",
                   "allowed_token_ids"} & set(asked)  # fmt: skip
        if not decided and not self.rates:
            stops = set(asked.get("stop_token_ids", []))
            eos = set() if asked.get("ignore_eos") else set(asked.get("eos_token_ids", []))
            text = self.function.reference(job.prompt, job.max_tokens)
            end = next((i for i, t in enumerate(text) if t in stops | eos), len(text))
            by = text[end] if end < len(text) else None
            reason = None if by in eos else by
            return Delivery(text[: end + 1], "length" if by is None else "stop", reason)
        how = METHODS[self.method]
        if not self.roomy:
            how = METHODS["none"]
            for name in ("lookahead", "max_draft_len"):
                asked.pop(name, None)
        engine = hash_engine(
            self.function, page_size=16, num_pages=24, max_batch_size=1, max_seq_len=MAX_SEQ_LEN,
            max_num_tokens=512, adaptive=False, synthetic_acceptance_rates=self.rates, **how,
        )  # fmt: skip
        (got,) = engine.run([Job(job.prompt, job.max_tokens, asked)])
        self.seen["by the host"] += len(got.tokens)
        return got

    @precondition(lambda self: len(self.alive) < 9)
    @rule(draw=st.integers(0, 2**24))
    def submit(self, draw: int) -> None:
        job = self.job(random.Random(draw))
        rid = self.engine.ex.submit(job.prompt, max_tokens=job.max_tokens, **job.options)
        self.expected[rid], self.got[rid] = self.alone(job), Delivery()
        self.alive.append(rid)

    # -- steps --------------------------------------------------------------------------------

    def propose(self) -> None:
        """On the host drafts of others are handed in before a step; on a stream the step asks."""
        if self.method != "proposed" or self.depth is not None:
            return
        for rid in self.alive:
            if self.engine.ex.decoding(rid) and len(text := self.engine.ex.history(rid)) > 1:
                tree = self.guesser.tree(*text[-2:])
                try:
                    self.engine.ex.propose(rid, [t for t, _ in tree], [p for _, p in tree])
                except ValueError:
                    self.seen["refused"] += 1

    @rule(count=st.integers(1, 30))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.propose()
            self.deliver(self.engine.step())

    def deliver(self, outputs: list[Any] | None) -> None:
        for out in outputs or []:
            rid = out.request_id
            assert rid in self.alive, "output for a request that ended or was cancelled"
            self.engine.record(self.got[rid], out)
            if out.finish_reason is not None:
                self.alive.remove(rid)
                self.ended(self.got[rid], self.expected[rid])

    def ended(self, got: Delivery, wanted: Delivery) -> None:
        self.seen["tokens"] += len(got.tokens)
        self.seen["accepted"] += got.num_accepted
        if got.error and "injected" in got.error:
            assert got.finish_reason == "error"
            self.seen["failed"] += 1
            return
        assert got.tokens == wanted.tokens
        assert (got.finish_reason, got.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
        assert got.error == wanted.error
        assert got.logprobs == wanted.logprobs
        assert got.prompt_logprobs == wanted.prompt_logprobs
        self.seen["compared"] += len(got.tokens)

    @precondition(lambda self: self.alive)
    @rule(draw=st.integers(0, 2**16))
    def cancel(self, draw: int) -> None:
        """Now and then; most programs go on instead."""
        if draw % 3:
            return self.step(9)
        rid = self.alive.pop(draw % len(self.alive))
        assert self.engine.ex.cancel(rid)
        assert not self.engine.ex.cancel(rid), "a second cancel finds nothing"
        assert not self.engine.ex.cancel(10**9)

    @precondition(lambda self: self.alive and self.depth is None)
    @rule(draw=st.integers(0, 2**16))
    def cancel_in_flight(self, draw: int) -> None:
        """Between plan and commit. On a stream every cancel is one in flight."""
        self.propose()
        rid = self.alive[draw % len(self.alive)]

        def strike(_: Any) -> None:
            assert self.engine.ex.cancel(rid)
            self.alive.remove(rid)

        self.deliver(self.engine.step(strike))

    @precondition(lambda self: self.alive and self.may_fail and self.fails < 2 and not self.late)
    @rule()
    def forward_fails(self) -> None:
        """A step's pass fails: its requests end with the error, others go on. What fails on a
        stream that runs late fails as it is enqueued, or with the device."""
        self.fails += 1
        if self.depth is None:
            self.deliver(self.engine.ex.fail(self.engine.ex.plan(), "injected"))
        else:
            self.fail_next = True
            self.deliver(self.engine.step())

    # -- laws ---------------------------------------------------------------------------------

    @invariant()
    def tokens_are_prefixes_and_pages_add_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        for rid in self.alive:
            assert self.got[rid].tokens == self.expected[rid].tokens[: len(self.got[rid].tokens)]
        assert self.engine.ex.num_unfinished == len(self.alive)
        stats = self.engine.ex.stats()
        assert 0 <= stats["free_pages"] <= stats["total_pages"]
        assert stats["promised_pages"] <= stats["total_pages"]
        if not self.alive:
            self.idle()

    def idle(self) -> None:
        self.engine.assert_idle()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        # Hypothesis leaves rules out of whole runs: whatever it drew, some programs see a failure.
        if self.may_fail and not self.fails and not self.late and len(self.alive) > 2:
            self.forward_fails()
        steps = 0
        while self.alive:
            self.step(1)
            steps += 1
            assert steps < 1500, "requests never end"
        self.idle()
        stats = self.engine.ex.stats()
        self.seen["hits"] += stats["reuse_hits"]
        self.seen["replayed"] += 0 if self.recorder is None else self.recorder.replayed
        if self.reuse:  # forgotten, no published page is left
            executor = getattr(self.engine, "executor", self.engine.ex)
            assert executor.reset_prefix_cache() == stats["cached_pages"]


def run_programs(
    kind: type[Schedule], programs: int, *, shrink: bool = True, **changes: Any
) -> Any:
    """Runs so many programs of a machine; the sums over them."""
    machine = type(kind.__name__, (kind,), {**changes, "seen": Counter()})
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=programs, stateful_step_count=25, deadline=None, derandomize=True,
            phases=phases, report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    return machine.seen  # type: ignore[attr-defined]

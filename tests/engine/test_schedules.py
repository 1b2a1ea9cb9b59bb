"""Random programs of submit, step, propose, fail, cancel: nothing lost or doubled, pages back.

Hypothesis writes the program and shrinks it when a rule breaks. The rules: a request's tokens are
always a prefix of its definition, it gets exactly one end, cancelled requests get none, and an idle
executor holds nothing.
"""

from __future__ import annotations

import os
from typing import Any

from driver import hash_engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hash_target import HashFunction

METHODS: list[dict[str, Any]] = [
    {"method": "none"},
    {"method": "lookahead", "lookahead": (4, 3, 4)},
    {"method": "lookahead", "lookahead": (7, 7, 7), "adaptive": False},
    {"method": "ngram", "ngram": {"max_draft_len": 10, "max_matching_ngram_size": 2}},
    {
        "method": "ngram",
        "ngram": {"max_draft_len": 5, "max_matching_ngram_size": 3, "is_public_pool": True},
        "adaptive": False,
    },
]


# Starts that requests have in common: pages to be reused.
SHARED = [i * 7 % 20 for i in range(40)]


class Schedule(RuleBasedStateMachine):
    """The program: rules are its statements, the model is `expected` and `got`."""

    @initialize(
        method=st.sampled_from(METHODS),
        page_size=st.sampled_from([1, 2, 16, 64]),
        batch=st.sampled_from([1, 3, 8]),
        rows=st.sampled_from([8, 40, 300]),
        spare=st.integers(0, 200),
        surprise=st.sampled_from([1, 8, 30]),
        reuse=st.booleans(),
    )
    def start(
        self,
        method: dict[str, Any],
        page_size: int,
        batch: int,
        rows: int,
        spare: int,
        surprise: int,
        reuse: bool,
    ) -> None:
        self.function = HashFunction(vocab=20, surprise=surprise, seed=rows)
        # Enough pages for the largest request, so that every submission is admissible.
        pages = -(-(40 + 80 + 128) // page_size) + spare // page_size
        self.engine = hash_engine(
            self.function,
            page_size=page_size,
            num_pages=pages,
            max_batch_size=batch,
            max_seq_len=140,
            max_num_tokens=max(rows, batch),
            enable_block_reuse=reuse,
            **method,
        )
        self.expected: dict[int, list[int]] = {}
        self.got: dict[int, list[int]] = {}
        self.alive: list[int] = []

    @rule(
        start=st.integers(0, 39),
        own=st.lists(st.integers(0, 19), min_size=1, max_size=40),
        max_tokens=st.integers(1, 80),
        speculative=st.booleans(),
        stop=st.one_of(st.none(), st.integers(0, 19)),
    )
    def submit(
        self, start: int, own: list[int], max_tokens: int, speculative: bool, stop: int | None
    ) -> None:
        prompt = (SHARED[:start] + own)[:40]
        stops = [] if stop is None else [stop]
        rid = self.engine.ex.submit(
            prompt, max_tokens=max_tokens, speculative=speculative, eos_token_ids=stops
        )
        text = self.function.reference(prompt, max_tokens)
        if stop in text:
            text = text[: text.index(stop) + 1]
        self.expected[rid], self.got[rid] = text, []
        self.alive.append(rid)

    @rule(count=st.integers(1, 30))
    def step(self, count: int) -> None:
        for _ in range(count):
            for out in self.engine.step() or []:
                self.deliver(out)

    def deliver(self, out: Any) -> None:
        rid = out.request_id
        assert rid in self.alive, "output for a request that ended or was cancelled"
        self.got[rid] += out.tokens
        if out.finish_reason is not None:
            assert out.finish_reason in ("stop", "length")
            assert self.got[rid] == self.expected[rid]
            self.alive.remove(rid)

    @precondition(lambda self: getattr(self, "alive", None))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(self.alive))
        assert self.engine.ex.cancel(rid)
        assert not self.engine.ex.cancel(rid), "a second cancel finds nothing"
        self.alive.remove(rid)

    @precondition(lambda self: getattr(self, "alive", None))
    @rule(data=st.data())
    def cancel_in_flight(self, data: st.DataObject) -> None:
        """Cancel between plan and commit."""
        rid = data.draw(st.sampled_from(self.alive))

        def strike(_: Any) -> None:
            assert self.engine.ex.cancel(rid)
            self.alive.remove(rid)

        for out in self.engine.step(strike) or []:
            self.deliver(out)

    @precondition(lambda self: getattr(self, "alive", None))
    @rule()
    def forward_fails(self) -> None:
        """The forward pass of a step fails: its requests end with the error, others go on."""
        plan = self.engine.ex.plan()
        for out in self.engine.ex.fail(plan, "injected"):
            assert (out.finish_reason, out.error) == ("error", "injected")
            self.alive.remove(out.request_id)

    @precondition(lambda self: getattr(self, "alive", None))
    @rule(data=st.data())
    def propose_garbage(self, data: st.DataObject) -> None:
        running = [rid for rid in self.alive if self.engine.ex.decoding(rid)]
        if not running:
            return
        rid = data.draw(st.sampled_from(running))
        tokens = data.draw(st.lists(st.integers(-1, 20), max_size=6))
        valid = all(0 <= token < 20 for token in tokens)
        try:
            self.engine.ex.propose(rid, tokens, None)
        except ValueError as error:
            # Refused for an id, or because a plain request may have no drafts; never for nothing.
            assert not valid or "drafts" in str(error)
        else:
            assert valid

    @precondition(lambda self: hasattr(self, "engine"))
    @rule()
    def cancel_unknown(self) -> None:
        assert not self.engine.ex.cancel(10**9)

    @invariant()
    def tokens_are_prefixes_and_pages_add_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        for rid in self.alive:
            assert self.got[rid] == self.expected[rid][: len(self.got[rid])]
        assert self.engine.ex.num_unfinished == len(self.alive)
        stats = self.engine.ex.stats()
        assert 0 <= stats["free_pages"] <= stats["total_pages"]
        assert stats["promised_pages"] <= stats["total_pages"]
        if not self.alive:
            self.engine.assert_idle()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.alive:
            for out in self.engine.step() or []:
                self.deliver(out)
            steps += 1
            assert steps < 5000, "requests never end"
        self.engine.assert_idle()


# `make test-slow` raises the number of programs.
PROGRAMS = int(os.environ.get("SPECDEC_TEST_PROGRAMS", "120"))
TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(
    max_examples=PROGRAMS,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

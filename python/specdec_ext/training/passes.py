"""Forward passes of the target that give texts with their hidden states.

Texts that the target writes go through one executor, as many at a time as the batch holds. Texts
that are there already are read: their prompts, then their answers, of which every row is kept. In
exact numerics a row does not depend on the others of its pass, so both give the same bits, and the
same texts always give the same data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import _core
from ..engine.kv_pages import KvPages
from ..errors import ModelError
from ..models import load_model
from ..models.kv_storage import page_shape, stored_name
from ..models.place import CPU, Place
from ..text.tokenizer import eos_token_ids
from .cache import TextRecord
from .texts import Frame, Task

__all__ = ["PAGE_SIZE", "SELF_MAX_TOKENS", "TargetPasses", "pass_rows"]

PAGE_SIZE = 16
# The user's turn that the target writes for itself: drawn at this temperature.
_SELF_TEMPERATURE, _SELF_TOP_P, SELF_MAX_TOKENS = 0.9, 0.95, 64


def pass_rows(batch_size: int, max_prompt_len: int) -> int:
    """Rows of a forward pass: every text's next token, and a prompt."""
    return 2 * batch_size + max_prompt_len


@dataclass
class _Running:
    """One text in the executor. stage 0: the target writes the user's turn; 1: the answer."""

    task: Task
    stage: int
    ids: list[int]
    tokens: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)


class TargetPasses:
    """The target with K/V pages for `batch_size` texts.

    frame  wraps a self-written user's turn

    Raises ModelError when the model cannot be used.
    """

    def __init__(
        self,
        model_path: Path,
        tokenizer: Any,
        frame: Frame,
        *,
        max_prompt_len: int,
        max_new_tokens: int,
        batch_size: int = 32,
        place: Place = CPU,
    ) -> None:
        self._max_prompt_len, self._max_new_tokens = max_prompt_len, max_new_tokens
        self._rows = pass_rows(batch_size, max_prompt_len)
        length = max_prompt_len + max(max_new_tokens, SELF_MAX_TOKENS)
        self.model: Any = load_model(
            model_path, max_rows=self._rows, max_seq_len=length, place=place
        )
        info = self.model.info
        self._tokenizer, self._frame = tokenizer, frame
        self._eos = list(eos_token_ids(info.eos_token_ids, info.vocab_size, tokenizer))
        self._pages_each = -(-length // PAGE_SIZE)
        pages = KvPages(self.model, batch_size * self._pages_each, PAGE_SIZE, place)
        self.model.bind_cache(*pages.tensors)
        held = pages.tensors
        if not place.is_cpu:
            # The executor plans and moves nothing, for there are no drafts: these are never read.
            shape = page_shape(self.model, batch_size * self._pages_each, PAGE_SIZE)
            dtype = str(stored_name(self.model))
            held = (_core.LazyZeros(shape, dtype), _core.LazyZeros(shape, dtype))
        self._held = (pages, held)
        self.batch_size = batch_size
        self._executor = _core.Executor(
            *held,
            vocab_size=self.model.vocab_size,
            max_batch_size=batch_size,
            max_seq_len=length,
            max_num_tokens=self._rows,
            method="none",
        )
        self._running: dict[int, _Running] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    # -- texts that are read ----------------------------------------------------------------------

    def read(self, tasks: Sequence[Task]) -> list[TextRecord]:
        """The records of up to batch_size texts, while none is being written."""
        before = [task.ids[:-1] for task in tasks]
        self._feed(before, [0] * len(tasks), None)
        after: list[tuple[int, ...]] = []
        for task in tasks:
            assert task.answer is not None
            after.append((task.ids[-1], *task.answer[:-1]))
        kept: list[list[torch.Tensor]] = [[] for _ in tasks]
        self._feed(after, [len(ids) for ids in before], kept)
        return [
            _record(task, [*task.ids, *(task.answer or ())], len(task.ids), torch.cat(kept[i]))
            for i, task in enumerate(tasks)
        ]

    def _feed(
        self,
        texts: Sequence[Sequence[int]],
        start: Sequence[int],
        kept: list[list[torch.Tensor]] | None,
    ) -> None:
        """Rows of `texts`, whose K/V begins at `start`; kept: where all hidden states go."""
        done = [0] * len(texts)
        while any(d < len(t) for d, t in zip(done, texts, strict=True)):
            left, parts = self._rows, []
            for i, text in enumerate(texts):
                count = min(left, len(text) - done[i])
                if count > 0:
                    parts.append((i, text[done[i] : done[i] + count]))
                    left -= count
            plan = _core.make_step_plan(
                [rows for _, rows in parts],
                kv_len=[start[i] + done[i] for i, _ in parts],
                page_table=[
                    range(i * self._pages_each, (i + 1) * self._pages_each) for i, _ in parts
                ],
                logits_for_all_rows=kept is not None,
                needs_logits=False,
            )
            hidden = torch.empty(plan.num_logit_rows, self.model.hidden_size, dtype=torch.float32)
            self.model.forward(plan, hidden)
            at = 0
            for i, rows in parts:
                if kept is not None:
                    kept[i].append(hidden[at : at + len(rows)].to(torch.float16))
                    at += len(rows)
                done[i] += len(rows)

    # -- texts that the target writes -------------------------------------------------------------

    def submit(self, task: Task) -> None:
        self._submit(_Running(task, 0 if task.self_written else 1, list(task.ids)))

    def step(self) -> list[TextRecord]:
        """One forward pass; the texts that ended with it."""
        plan = self._executor.plan()
        if plan is None:
            return []
        hidden = torch.empty(plan.num_logit_rows, self.model.hidden_size, dtype=torch.float32)
        result = self.model.forward(plan, hidden)
        done = []
        for out in self._executor.commit(plan, result):
            if out.error is not None:
                raise ModelError(f"collecting training data failed: {out.error}")
            running = self._running[out.request_id]
            if out.tokens:
                running.tokens += out.tokens
                if running.stage == 1:
                    running.hidden.append(hidden[out.last_logit_row].to(torch.float16))
            if out.finish_reason is not None:
                del self._running[out.request_id]
                done += self._end(running)
        return done

    def _submit(self, running: _Running) -> None:
        running.ids = running.ids[-self._max_prompt_len :]
        task = running.task
        sampling: dict[str, Any] = {"temperature": task.temperature, "seed": task.seed}
        max_tokens = self._max_new_tokens
        if running.stage == 0:
            max_tokens = SELF_MAX_TOKENS
            sampling = {
                "temperature": _SELF_TEMPERATURE, "top_p": _SELF_TOP_P, "seed": task.seed ^ 1,
            }  # fmt: skip
        request = self._executor.submit(
            running.ids, max_tokens=max_tokens, eos_token_ids=self._eos, **sampling
        )
        self._running[request] = running

    def _end(self, running: _Running) -> list[TextRecord]:
        if running.stage == 0:
            text = self._tokenizer.decode(running.tokens, skip_special_tokens=True).strip()
            self._submit(_Running(running.task, 1, self._frame.wrap(text) or running.ids))
            return []
        hidden = torch.stack(running.hidden)
        ids = running.ids + running.tokens
        return [_record(running.task, ids, len(running.ids), hidden)]


def _record(task: Task, ids: Sequence[int], prompt_len: int, hidden: torch.Tensor) -> TextRecord:
    return TextRecord(
        key=task.key,
        category=task.category,
        tokens=torch.tensor(list(ids), dtype=torch.int32),
        prompt_len=prompt_len,
        hidden=hidden,
    )

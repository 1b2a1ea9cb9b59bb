"""What the operations of a step are launched with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_ext.engine.overlap.graphs import Bucket

__all__ = ["StepSizes"]


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a step: what its operations are launched with.

    prompts, decodes             requests; prompts come first
    prompt_rows, decode_rows     rows, of decoding an upper bound
    prompt_logits                choices of prompts
    max_rows, max_kv_len         of any one request, upper bounds
    needs_scores                 somebody samples, or the host chooses
    drafts                       a decoding request may have more than one row
    host_choices, host_trees     what the host reads: _core.StagedChoices, _core.StagedTree
    kept_rows                    (slot, row) of what such requests' drafts go on from
    moves                        K/V of choices that the host has made is moved before the step
    recorded                     they are those of a bucket
    """

    prompts: int
    decodes: int
    prompt_rows: int
    decode_rows: int
    prompt_logits: int
    max_rows: int
    max_kv_len: int
    needs_scores: bool
    drafts: bool = True
    host_choices: tuple[Any, ...] = ()
    host_trees: tuple[Any, ...] = ()
    kept_rows: tuple[tuple[int, int], ...] = ()
    moves: bool = False
    recorded: bool = False

    @property
    def needs_host(self) -> bool:
        """What is enqueued follows from more than sizes: nothing to record."""
        return bool(self.host_choices or self.host_trees or self.moves)

    @classmethod
    def of_bucket(
        cls, bucket: Bucket, max_rows: int, capacity: int, needs_scores: bool, drafts: bool
    ) -> StepSizes:
        """A recorded step's. max_rows, capacity: rows and tokens of any one request, at most."""
        rows = min(bucket.rows, max_rows)
        return cls(
            0, bucket.requests, 0, bucket.rows, 0, rows, capacity, needs_scores, drafts,
            recorded=True,
        )  # fmt: skip

    @classmethod
    def of(cls, planned: Any) -> StepSizes:
        """What the executor planned."""
        return cls(
            planned.num_prompts,
            planned.num_decodes,
            planned.num_prompt_rows,
            planned.max_decode_rows,
            planned.num_prompt_logits,
            planned.max_rows,
            planned.max_kv_len,
            planned.needs_scores,
            planned.max_decode_rows > planned.num_decodes,
            tuple(planned.host_choices),
            tuple(planned.host_trees),
            tuple(planned.kept_rows),
            planned.moves,
        )

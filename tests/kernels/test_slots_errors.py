"""Slots: requests and layouts that are refused, bad arguments of the operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_calls import int32

from specdec_ext import ops

LAYOUT = ops.SlotLayout(method="lookahead", max_seq_len=64, lookahead=(4, 3, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, "slot.prompt is empty"),
        ({"prompt_ids": [1] * 64}, "slot.prompt has 64 tokens, max_seq_len is 64"),
        ({"prompt_ids": [1, -2]}, "negative token id"),
        ({"max_tokens": 0}, "slot.max_tokens = 0"),
        ({"stop_token_ids": list(range(257))}, "257 end and stop ids, a slot holds 256"),
        ({"lookahead": (5, 3, 4)}, r"slot.lookahead = \[5,3,4\] exceeds the pool's \[4,3,4\]"),
        ({"lookahead": (0, 3, 4)}, "window size 0 is below 1"),
        ({"max_draft_len": 128}, "slot.max_draft_len = 128"),
    ],
)
def test_a_request_that_no_slot_can_hold_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    given = {"prompt_ids": [1, 2], "max_tokens": 4, "lookahead": (4, 3, 4), **arguments}
    with pytest.raises(ValueError, match=message):
        LAYOUT.request_bytes(given.pop("prompt_ids"), **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "medusa"}, "give 'none', 'lookahead', 'ngram', 'suffix' or 'proposed'"),
        ({"max_seq_len": 1}, "slots.max_seq_len = 1"),
        ({"lookahead": (7, 9, 40)}, "the limit is 127"),
        ({"method": "ngram", "max_matching_ngram_size": 17}, "slots.max_ngram = 17"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"method": "lookahead", "max_seq_len": 64, "lookahead": (4, 3, 4)}
    with pytest.raises(ValueError, match=message):
        ops.SlotLayout(**{**given, **arguments})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("slot_ids", int32([0, 0]), r"slot_ids\[1\] = 0 is given twice"),
        ("slot_ids", int32([0, 2]), r"slot_ids\[1\] = 2: the pool has 2 slots"),
        ("slot_ids", torch.zeros(2), "slot_ids"),
        ("slots", torch.zeros(2, 64, dtype=torch.uint8), "slots"),
        ("tokens", torch.zeros(8), "tokens"),
        ("parents", int32([0] * 7), "parents"),
        ("cu_rows", int32([0] * 2), "cu_rows"),
        ("kv_len", int32([0] * 3), "kv_len"),
        ("max_drafts", int32([0]), "max_drafts"),
    ],
)
def test_bad_arguments_of_draft_step(name: str, value: torch.Tensor, message: str) -> None:
    given = {
        "slots": ops.make_slots(LAYOUT, 2),
        "slot_ids": int32([0, 1]),
        "tokens": int32([0] * 8),
        "parents": int32([0] * 8),
        "cu_rows": int32([0] * 3),
        "kv_len": int32([0] * 2),
        name: value,
    }
    with pytest.raises((ValueError, TypeError), match=message):
        ops.draft_step(LAYOUT, given.pop("slots"), given.pop("slot_ids"), **given)


def test_bad_arguments_of_commit_step() -> None:
    slots, ids = ops.make_slots(LAYOUT, 2), int32([0, 1])
    results, path, path_len = ops.make_results(LAYOUT, 2)

    def commit(**changed: Any) -> None:
        given: dict[str, Any] = {
            "cu_logits": int32([0, 1, 2]), "sampled": int32([1, 2]), "results": results,
            "path": path, "path_len": path_len, **changed,
        }  # fmt: skip
        ops.commit_step(LAYOUT, slots, ids, given.pop("cu_logits"), given.pop("sampled"), **given)

    for changed, message in [
        ({"cu_logits": int32([1, 1, 2])}, r"cu_logits\[0\] = 1: it begins with 0"),
        ({"cu_logits": int32([0, 2, 1])}, r"cu_logits\[2\] = 1: it never decreases"),
        ({"cu_logits": int32([0, 1, 3])}, r"cu_logits\[2\] = 3"),
        ({"sampled": torch.zeros(2)}, "sampled"),
        ({"results": results[:, :5]}, "results"),
        ({"path": path[:1]}, "path"),
        ({"path_len": path}, "path_len"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            commit(**changed)
    commit()  # empty slots: nothing happens
    assert [r.tokens for r in ops.read_results(results)] == [[], []]

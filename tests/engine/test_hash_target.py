"""The synthetic target itself: it agrees with its definition, and it notices every kind of slip."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from hash_target import HashFunction, HashModel

FUNCTION = HashFunction(vocab=1000, surprise=1)
PROMPT = [17, 4, 99, 250, 3, 8, 8, 61, 5]
# A golden token, a wrong child in front of the right chain, and a wrong leaf.
PARENTS = [-1, 0, 0, 2, 2]
PAGES = [5, 0, 7, 2, 9, 4]
PAGE_SIZE = 4


def make_plan(tokens: list[int], parents: list[int], kv_len: int) -> SimpleNamespace:
    n = len(tokens)
    depths = [0] * n
    mask = np.zeros((n, 4), np.uint32)
    for i in range(n):
        mask[i] = mask[parents[i]] if i else 0
        mask[i, 0] |= np.uint32(1 << i)
        depths[i] = depths[parents[i]] + 1 if i else 0
    return SimpleNamespace(
        num_requests=1,
        needs_logits=False,
        tokens=np.array(tokens, np.int32),
        positions=np.array(depths, np.int32) + kv_len,
        parents=np.array(parents, np.int32),
        mask=mask,
        cu_rows=np.array([0, n]),
        kv_len=np.array([kv_len]),
        is_tree=np.array([parents != list(range(-1, n - 1))], np.uint8),
        page_table=np.array([PAGES], np.int32),
        logit_rows=np.arange(n),
        cu_logits=np.array([0, n]),
    )


def tree_step() -> tuple[HashModel, SimpleNamespace, list[int]]:
    """A model after the prompt, the plan of a tree step, and the right answers of its rows."""
    model = HashModel(FUNCTION, 10, PAGE_SIZE)
    chain = list(range(-1, len(PROMPT) - 1))
    golden = int(model.forward(make_plan(PROMPT, chain, 0))[-1])
    assert golden == FUNCTION.reference(PROMPT, 1)[0]
    first, second = FUNCTION.reference([*PROMPT, golden], 2)
    tokens = [golden, (first + 1) % 1000, first, second, (second + 1) % 1000]
    paths = [[], [tokens[1]], [first], [first, second], [first, tokens[4]]]
    expected = [FUNCTION.reference([*PROMPT, golden, *path], 1)[0] for path in paths]
    return model, make_plan(tokens, PARENTS, len(PROMPT)), expected


def test_tree_rows_equal_the_definition() -> None:
    model, plan, expected = tree_step()
    assert model.forward(plan).tolist() == expected
    plan.needs_logits = True
    assert model.forward(plan).argmax(1).tolist() == expected


def corrupt_page(model: HashModel, plan: SimpleNamespace) -> None:
    plan.page_table[0, [0, 1]] = plan.page_table[0, [1, 0]]


def corrupt_layer(model: HashModel, plan: SimpleNamespace) -> None:
    model.v_pages[2, PAGES[1], 0, 1] = model.v_pages[2, PAGES[1], 0, 2]


def corrupt_element(model: HashModel, plan: SimpleNamespace) -> None:
    model.k_pages[1, PAGES[0], 0, 3, 7] += 1


def stale_slot(model: HashModel, plan: SimpleNamespace) -> None:
    model.k_pages[:, PAGES[2], 0, 0] = -12345.0


def short_context(model: HashModel, plan: SimpleNamespace) -> None:
    plan.kv_len[0] -= 1


def late_positions(model: HashModel, plan: SimpleNamespace) -> None:
    plan.positions += 1


def slot_positions(model: HashModel, plan: SimpleNamespace) -> None:
    plan.positions = np.arange(5, dtype=np.int32) + len(PROMPT)


def causal_mask(model: HashModel, plan: SimpleNamespace) -> None:
    plan.is_tree[0] = 0


def extra_mask_bit(model: HashModel, plan: SimpleNamespace) -> None:
    plan.mask[3, 0] |= np.uint32(1 << 1)


def lost_mask_bit(model: HashModel, plan: SimpleNamespace) -> None:
    plan.mask[3, 0] &= ~np.uint32(1 << 2)


def wrong_token(model: HashModel, plan: SimpleNamespace) -> None:
    plan.tokens[2] += 1


@pytest.mark.parametrize(
    "slip",
    [
        corrupt_page,
        corrupt_layer,
        corrupt_element,
        stale_slot,
        short_context,
        late_positions,
        slot_positions,
        causal_mask,
        extra_mask_bit,
        lost_mask_bit,
        wrong_token,
    ],
)
def test_every_slip_changes_the_deep_row(
    slip: Callable[[HashModel, SimpleNamespace], None],
) -> None:
    model, plan, expected = tree_step()
    slip(model, plan)
    assert model.forward(plan).tolist()[3] != expected[3]

"""Medusa's drafter alone, as on a device: what it proposes, from what, into what.

The device is torch's CPU, or torch's "meta" device, which computes nothing and mixes with no other.
Expected drafts come from the module in float64 and from trees as sets of paths.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dispatch_recorder import Recorder
from reference import medusa_reference as ref
from specdec_ext import MedusaDecodingConfig
from specdec_ext.drafters import DraftInputs, make_drafter
from specdec_ext.drafters.medusa.heads import (
    MedusaHeads,
    MedusaHeadsConfig,
    save_medusa_heads,
)
from specdec_ext.models.place import Place

HIDDEN, VOCAB, SLOTS = 12, 90, 5
DEVICE = Place("stub", "cpu", "stub")
ELSEWHERE = Place("elsewhere", "meta", "stub")
KINDS: dict[str, dict[str, Any]] = {
    "own": {},
    "two layers": {"layers": 2},
    "no layer": {"layers": 0},
    "shared": {"lm_head": "shared"},
    "the target's": {"lm_head": "target"},
    "reduced": {"ids": list(range(80, 10, -3))},
    "reduced, the target's": {"lm_head": "target", "ids": list(range(89, 3, -2)), "layers": 2},
}
# What may be launched on a device: products, look-ups and copies into what is there already.
LAUNCHED = {
    "aten::clamp.out", "aten::index_select.out", "aten::gather.out", "aten::topk.values",
    "aten::bmm.out", "aten::baddbmm.out", "aten::mm.out", "aten::silu_", "aten::add_.Tensor",
    "aten::copy_",
}  # fmt: skip
VIEWS = {
    "aten::slice.Tensor", "aten::select.int", "aten::view", "aten::t", "aten::transpose.int",
    "aten::expand", "aten::alias",
}  # fmt: skip


class Target:
    """A target of which the heads need the output head alone."""

    hidden_size, vocab_size = HIDDEN, VOCAB

    def __init__(self, place: Place, dtype: torch.dtype = torch.float32) -> None:
        self.place, self.kv_dtype = place, dtype
        self.rows = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.rows = self.rows.to(place.device)

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows[ids.long()]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.rows.T

    def scores_into(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        assert hidden.dtype == self.kv_dtype
        torch.mm(hidden.to(self.rows.dtype), self.rows.T, out=out)


def save(folder: Path, *, lm_head: str = "own", ids: Any = None, layers: int = 1) -> MedusaHeads:
    config = MedusaHeadsConfig(
        HIDDEN, VOCAB, 4, num_medusa_layers=layers, lm_head=lm_head,
        draft_vocab_size=None if ids is None else len(ids),
        training={"guess_rates": [[0.4, 0.2, 0.1], [0.5, 0.1], [0.3, 0.3], [0.2]]},
    )  # fmt: skip
    heads = MedusaHeads(config, None if ids is None else torch.tensor(ids))
    generator = torch.Generator().manual_seed(layers)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    save_medusa_heads(folder, heads, dtype="float32")
    return heads.requires_grad_(False)


class Proposed:
    """In the place of `ops`: keeps what was proposed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        stub = SimpleNamespace(propose_drafts=self.propose_drafts)
        monkeypatch.setattr("specdec_ext.drafters.medusa.device_slots.ops", stub)

    def propose_drafts(
        self, layout: Any, slots: Any, slot_ids: Any, tokens: Any, parents: Any, *,
        survival: Any, counts: Any = None, vocab_size: int, backend: Any = None, status: Any,
    ) -> None:  # fmt: skip
        assert vocab_size == VOCAB and len(status) == len(slot_ids) == len(tokens)
        assert tokens.dtype == parents.dtype == torch.int32 and tokens.shape == parents.shape
        assert tokens.is_contiguous() and parents.is_contiguous() and survival.is_contiguous()
        assert survival.dtype == torch.float32 and survival.shape == tokens.shape
        self.calls.append((tokens, parents, counts))


def inputs_of(slots: list[int], most: list[int], hidden: Any, width: int) -> DraftInputs:
    """As a step gives them."""

    def ints(values: list[int]) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=hidden.device)

    unused: Any = None
    memory: Any = hidden  # of slots; nobody looks at it
    return DraftInputs(
        unused, memory, ints(slots), ints(most), unused, unused, False, ints([0] * len(slots)),
        hidden, width, 100,
    )  # fmt: skip


def best_of(heads: MedusaHeads, target: Target, hidden: torch.Tensor) -> list[list[int]]:
    """Guesses of each head for one hidden state, in float64 and by sorting."""
    rows = target.rows if heads.token_ids is None else target.rows[heads.token_ids.long()]
    scores = heads.double()(hidden.double()[None], rows.double())[:, 0]
    heads.float()
    order = scores.argsort(dim=-1, descending=True)
    chosen = order if heads.token_ids is None else heads.token_ids[order]
    result: list[list[int]] = chosen.tolist()
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_heads_best_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Slots that come and go with trees of their own, steps of any size, padding in between."""
    heads, target, rng = save(tmp_path, **KINDS[kind]), Target(DEVICE), random.Random(kind)
    largest = [[i] for i in range(22)] + [[i, j] for i in range(22) for j in range(4)]
    config = MedusaDecodingConfig(tmp_path, largest)
    drafter = make_drafter(config, target, max_requests=SLOTS)
    proposed = Proposed(monkeypatch)
    trees: dict[int, list[ref.Path]] = {slot: [] for slot in range(SLOTS)}
    hidden = torch.zeros(SLOTS, HIDDEN)
    buffers = None
    checked = 0
    for _ in range(40):
        for slot in rng.sample(range(SLOTS), rng.randrange(3)):
            trees[slot] = ref.random_tree(rng, 110, 4, 8) if rng.random() < 0.8 else []
            options = {"medusa_choices": tuple(trees[slot]), "adaptive": False}
            drafter.enter(slot, options if trees[slot] else {})
        slots = rng.sample([*range(SLOTS), -1, -1], rng.randrange(1, SLOTS + 1))
        most = [rng.choice([0, 1, 3, 20, 110]) if slot >= 0 else 0 for slot in slots]
        width = max(1, *most)
        hidden.copy_(torch.randn(SLOTS, HIDDEN))
        proposed.calls.clear()
        drafter.draft(inputs_of(slots, most, hidden, width))
        ((tokens, parents, counts),) = proposed.calls
        for b, slot in enumerate(slots):
            nodes = trees[slot][:width] if slot >= 0 else []
            top = best_of(heads, target, hidden[slot]) if nodes else []
            found, above = tokens[b, : len(nodes)].tolist(), parents[b, : len(nodes)].tolist()
            assert found == ref.draft_tokens(nodes, top)
            assert [() if p < 0 else nodes[p] for p in above] == [n[:-1] for n in nodes]
            if slot >= 0:
                assert int(counts[b]) == len(trees[slot])
            checked += len(nodes)
        # A graph would go on using the first step's addresses.
        side: Any = drafter._side  # type: ignore[attr-defined]
        now = [t.data_ptr() for t in (*side._memory, *side._heads._buffers.values())]
        assert buffers in (None, now)
        buffers = now
    assert checked > 400


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_a_device_only_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    """Every tensor lies there, none is made by a step, no value is read: "meta" has none."""
    save(tmp_path, **KINDS[kind])
    config = MedusaDecodingConfig(tmp_path, "mc_sim_7b_63", dtype=dtype)
    proposed = Proposed(monkeypatch)
    for place in (ELSEWHERE, DEVICE):
        target = Target(place, torch.bfloat16)
        drafter = make_drafter(config, target, max_requests=SLOTS)
        made = dict(drafter.stats())
        drafter.enter(2, {"medusa_choices": ((0,), (0, 1), (7,)), "adaptive": True})
        hidden = torch.empty(SLOTS, HIDDEN, dtype=torch.bfloat16, device=place.device)
        steps = [inputs_of([2, -1, 0], [3, 0, 2], hidden, width) for width in (1, 3, 63, 127)]
        with Recorder() as seen:
            for step in steps:
                drafter.draft(step)
        exempt = {"aten::_to_copy", "aten::permute"} if kind == "the target's" else set()  # Target
        assert seen.names <= LAUNCHED | VIEWS | exempt
        assert drafter.stats() == made and made["buffer_bytes"] > 0
    devices = {t.device.type for call in proposed.calls[:4] for t in call if t is not None}
    assert devices == {"meta"}
    assert [tuple(call[0].shape) for call in proposed.calls[:4]] == [
        (3, 1),
        (3, 3),
        (3, 63),
        (3, 63),
    ]


def test_an_adaptive_request_proposes_the_likeliest_nodes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, target = save(tmp_path), Target(DEVICE)
    config = MedusaDecodingConfig(tmp_path, [[0], [1], [2], [0, 0], [1, 0], [0, 1], [0, 0, 1]])
    drafter = make_drafter(config, target, max_requests=2)
    proposed = Proposed(monkeypatch)
    given = config.medusa_choices
    # By the rates that save() notes: 0.4, 0.2, 0.2, 0.1, 0.1, 0.06, 0.04.
    best = [(0,), (1,), (0, 0), (2,), (1, 0), (0, 0, 1), (0, 1)]
    for slot, adaptive in enumerate((True, False)):
        drafter.enter(slot, {"medusa_choices": given, "adaptive": adaptive})
    hidden = torch.randn(2, HIDDEN)
    drafter.draft(inputs_of([0, 1], [9, 9], hidden, 9))
    for slot, nodes in enumerate((best, list(given))):
        wanted = ref.draft_tokens(nodes, best_of(heads, target, hidden[slot]))
        assert proposed.calls[0][0][slot].tolist() == wanted

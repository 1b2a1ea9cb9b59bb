"""Medusa's heads and ReDrafter's network where a device's model runs, against those of the host.

The device is torch's CPU: what is tested is what is computed and what crosses, not a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from specdec_ext.drafters.redrafter.device_model import DeviceRedrafter
from specdec_ext.drafters.redrafter.drafter import PackedRedrafter
from test_redrafter_model import SHAPES, EmbeddingTarget, make, same_tree, shape_for

from specdec_ext import _core
from specdec_ext.drafters.medusa.device_heads import DeviceHeads
from specdec_ext.drafters.medusa.heads import MedusaHeads, MedusaHeadsConfig
from specdec_ext.drafters.medusa.packed_heads import PackedHeads
from specdec_ext.errors import UnsupportedModelError
from specdec_ext.models.host_rows import HostRows
from specdec_ext.models.place import Place

HIDDEN, VOCAB = 12, 90
PLACE = Place("stub", torch.device("cpu"), "stub")


class Target(EmbeddingTarget):
    """On a device; its head's and embedding's rows are asked for where the ids lie."""

    place = PLACE


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of all that comes to the host."""
    shapes: list[tuple[int, ...]] = []
    fetch = HostRows.fetch

    def seen(self: HostRows, values: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(values.shape))
        return fetch(self, values)

    monkeypatch.setattr(HostRows, "fetch", seen)
    return shapes


def make_heads(lm_head: str, ids: list[int] | None, layers: int, bias: bool) -> MedusaHeads:
    config = MedusaHeadsConfig(
        HIDDEN, VOCAB, 4, num_medusa_layers=layers, lm_head=lm_head, has_bias=bias,
        draft_vocab_size=None if ids is None else len(ids),
    )  # fmt: skip
    heads = MedusaHeads(config, None if ids is None else torch.tensor(ids))
    generator = torch.Generator().manual_seed(layers)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return heads.requires_grad_(False)


def target_of(hidden: int, vocab: int, dtype: torch.dtype) -> Target:
    torch.manual_seed(hidden)
    shape = type("Shape", (), {"hidden_size": hidden, "vocab_size": vocab})()
    return Target(shape, dtype)


@pytest.mark.parametrize("ids", [None, list(range(80, 10, -3))], ids=["all", "reduced"])
@pytest.mark.parametrize("lm_head", ["own", "shared", "target"])
@pytest.mark.parametrize(("layers", "bias"), [(0, True), (1, True), (2, True), (2, False)])
def test_heads_guess_what_they_guess_on_the_host(
    fetched: list[tuple[int, ...]], lm_head: str, ids: Any, layers: int, bias: bool
) -> None:
    heads, target = make_heads(lm_head, ids, layers, bias), target_of(HIDDEN, VOCAB, torch.float32)
    kept = 3  # of four
    host = PackedHeads(heads, target, num_heads=kept, dtype=torch.float32)
    device = DeviceHeads(heads, target, num_heads=kept, dtype=torch.float32)
    own_bytes = sum(p.numel() for n, p in heads.named_parameters()) * 4 * kept // 4
    if lm_head == "own":
        assert device.weight_bytes == own_bytes
    assert device.scratch_bytes(5) == 2 * kept * 5 * device.num_scores * 4
    for batch, asked in ((1, 3), (5, 2), (5, 1)):
        hidden = torch.randn(batch, HIDDEN)
        expected = host.scores(hidden, asked)
        scores = device.scores(hidden, asked)
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-4)
        found = device.top(hidden, asked, 7)
        assert found.dtype == torch.int32 and fetched.pop() == (asked, batch, 7) and not fetched
        assert found.tolist() == host.top(hidden, asked, 7).tolist()


def test_heads_in_the_targets_dtype() -> None:
    """Activations are rounded to bfloat16 there: close to the host's, and no more."""
    heads, target = make_heads("own", None, 1, True), target_of(HIDDEN, VOCAB, torch.bfloat16)
    host = PackedHeads(heads, target, num_heads=4, dtype=torch.bfloat16)
    device = DeviceHeads(heads, target, num_heads=4, dtype=torch.bfloat16)
    hidden = torch.randn(3, HIDDEN)
    expected = host.scores(hidden, 4)
    error = (device.scores(hidden, 4).float() - expected).abs().max() / expected.abs().max()
    assert 0 < float(error) < 3e-2


@pytest.mark.parametrize("name", SHAPES)
def test_beams_are_those_of_the_host(
    native: Any, fetched: list[tuple[int, ...]], name: str
) -> None:
    """float32: the same drafts, the same laws; one copy to the host for each depth."""
    target = native(torch.float32)
    model = make(shape_for(name, target), seed=5, std=0.1)
    networks = (PackedRedrafter(model, target), DeviceRedrafter(model, target))
    scored = networks[0].num_scores
    for case in range(20):
        torch.manual_seed(case)
        context = torch.randn(3, target.hidden_size)
        if case == 7:
            context[1] = float("nan")
        searches, costs = [], []
        for network in networks:
            search = _core.BeamSearch()
            search.start([1, 4, 2], [3, 2, 5], [1.0, 0.7, 1.0], [False, True, False])
            network.start(list(context), [4, 0, 30])
            costs.append(network.run(search, [], 0.0))
            searches.append(search)
        host, device = costs
        assert (host.passes, host.rows) == (device.passes, device.rows) and host.passes == 5
        assert len(fetched) == 5 and fetched[1][0] == 2 and fetched[1][2] == min(50, scored)
        assert sum(shape[1] for shape in fetched) == host.rows
        fetched.clear()
        assert 0 < device.network_seconds <= device.seconds
        for r in range(3):
            same_tree(searches[0], searches[1], r)
        laws = [search.tree_laws(1, 127, scored) for search in searches]
        # Nodes that are nearly as likely may stand in another order.
        laws = [law[np.lexsort(law.round(3).T)] for law in laws]
        assert laws[1] == pytest.approx(laws[0], rel=1e-3, abs=1e-3)
    # A copy of its head's.
    rows_of_the_target = 9 * target.hidden_size if name == "reduced tied" else 0
    assert networks[1].weight_bytes == 4 * (
        sum(p.numel() for p in model.parameters()) + rows_of_the_target
    )


@pytest.mark.parametrize(
    ("gains", "passes"), [([], 4), ([1e9] * 3, 4), ([0.0], 1), ([9e9, 0.0], 2)]
)
def test_a_search_that_does_not_pay_ends_early(gains: list[float], passes: int) -> None:
    model = make(SHAPES["apple"], seed=5)
    network = DeviceRedrafter(model, Target(model.shape, torch.float32))
    search = _core.BeamSearch()
    search.start([2], [4])
    network.start([torch.randn(6)], [3])
    assert network.run(search, gains, 1.0).passes == passes
    assert search.tree(0)[2].tolist().count(passes) == 2  # both beams are so deep


class Elsewhere(Target):
    """On torch's "meta" device, which computes nothing and mixes with no other."""

    place = Place("elsewhere", torch.device("meta"), "stub")

    def __init__(self, shape: Any, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.table, self.rows = self.table.to("meta"), self.rows.to("meta")


@pytest.fixture
def nothing_crosses_unseen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []

    def fetch(_self: HostRows, values: torch.Tensor) -> torch.Tensor:
        assert values.device.type == "meta"
        shapes.append(tuple(values.shape))
        return torch.zeros(values.shape, dtype=values.dtype)

    monkeypatch.setattr(HostRows, "fetch", fetch)
    return shapes


@pytest.mark.parametrize("name", SHAPES)
def test_every_tensor_of_the_network_is_on_the_device(
    nothing_crosses_unseen: list[tuple[int, ...]], name: str
) -> None:
    model = make(SHAPES[name])
    network = DeviceRedrafter(model, Elsewhere(model.shape, torch.bfloat16))
    search = _core.BeamSearch()
    search.start([2, 3], [3, 2])
    network.start([torch.zeros(6, device="meta")] * 2, [1, 2])
    assert network.run(search, [], 0.0).passes == 3
    assert [shape[1] for shape in nothing_crosses_unseen] == [2, 5, 2]


@pytest.mark.parametrize("ids", [None, list(range(5))], ids=["all", "reduced"])
@pytest.mark.parametrize("lm_head", ["own", "shared", "target"])
def test_every_tensor_of_the_heads_is_on_the_device(
    nothing_crosses_unseen: list[tuple[int, ...]], lm_head: str, ids: Any
) -> None:
    shape = type("Shape", (), {"hidden_size": HIDDEN, "vocab_size": VOCAB})()
    target = Elsewhere(shape, torch.bfloat16)
    heads = make_heads(lm_head, ids, 2, True)
    device = DeviceHeads(heads, target, num_heads=3, dtype=torch.bfloat16)
    device.top(torch.zeros(2, HIDDEN, device="meta"), 2, 4)
    assert nothing_crosses_unseen == [(2, 2, 4)]


def test_a_target_without_a_head_of_its_own_is_refused_at_once() -> None:
    class Headless(Target):
        def head(self, hidden: torch.Tensor) -> torch.Tensor:
            raise UnsupportedModelError("no head")

    model = make(SHAPES["tied"])
    with pytest.raises(UnsupportedModelError, match="no head"):
        DeviceRedrafter(model, Headless(model.shape, torch.float32))
    target = target_of(HIDDEN, VOCAB, torch.float32)
    heads = make_heads("target", None, 1, True)
    headless = Headless(
        type("S", (), {"hidden_size": HIDDEN, "vocab_size": VOCAB})(), target.kv_dtype
    )
    with pytest.raises(UnsupportedModelError, match="no head"):
        DeviceHeads(heads, headless, num_heads=4, dtype=torch.float32)

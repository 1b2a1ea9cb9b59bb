"""ReDrafter's searches of steps that run ahead: on a device the trees are those of the host.

The device is torch's CPU and the CPU's kernels: what is tested is the search, not a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_redrafter_model import SHAPES, EmbeddingTarget, make, shape_for

from dispatch_recorder import Recorder
from host_weights import redrafter_weights
from specdec_ext import ConfigError, ReDrafterDecodingConfig, ops
from specdec_ext.drafters import DraftInputs
from specdec_ext.drafters.redrafter.device_beams import DeviceBeams
from specdec_ext.drafters.redrafter.layers import RedrafterLayers
from specdec_ext.drafters.redrafter.model import Redrafter, save_redrafter
from specdec_ext.drafters.redrafter.packed_model import PackedRedrafter
from specdec_ext.drafters.redrafter.slots import HostBeams, RedrafterDrafter
from specdec_ext.models.place import Place

LAYOUT = ops.SlotLayout(method="proposed", max_seq_len=64)
BEAMS, LENGTH, SLOTS = 4, 5, 6
# Each slot's beams, length, how deep its text lets a draft lie, drafts of a step.
ASKED = [
    (4, 5, 40, 20),
    (2, 3, 40, 20),
    (4, 5, 3, 20),
    (1, 5, 40, 20),
    (4, 1, 40, 2),
    (3, 4, 40, 0),
]
STEPS = [[0, 1, 2, 3, 4, 5], [3, -1, 0], [4], [-1, -1], [5, 2, 1]]


class Target(EmbeddingTarget):
    """On a device of its own kind; writes where it is told."""

    place = Place("stub", "cpu", "cpu")

    def embed_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(self.table, 0, ids, out=out)

    def score_rows(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(hidden, self.rows.t(), out=out)


class Slots:
    """Requests that have been given one token."""

    def __init__(self, vocab: int, hidden: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.slots = ops.make_slots(LAYOUT, SLOTS)
        ids = torch.arange(SLOTS, dtype=torch.int32)
        for slot, (*_, room, _) in enumerate(ASKED):
            block = LAYOUT.request_bytes([slot + 1, slot + 2], max_tokens=room + 2)
            ops.enter_slot(self.slots, slot, block)
        results, path, path_len = ops.make_results(LAYOUT, SLOTS)
        first = torch.arange(SLOTS + 1, dtype=torch.int32)
        golden = torch.randint(0, vocab, (SLOTS,), dtype=torch.int32)
        ops.commit_step(LAYOUT, self.slots, ids, first, golden, results=results, path=path,
                        path_len=path_len)  # fmt: skip
        self.hidden = torch.randn(SLOTS, hidden)

    def inputs(self, step: list[int], max_width: int = BEAMS * LENGTH) -> DraftInputs:
        limits = [ASKED[slot][3] if slot >= 0 else 20 for slot in step]
        ones = torch.ones(len(step))
        greedy = ops.SamplingLaws(0 * ones, 0 * ones.int(), ones, 0 * ones, 0 * ones.long())
        return DraftInputs(
            layout=LAYOUT, slots=self.slots, slot_ids=torch.tensor(step, dtype=torch.int32),
            max_drafts=torch.tensor(limits, dtype=torch.int32),
            page_table=torch.zeros(len(step), 1, dtype=torch.int32), laws=greedy,
            samples=False, status=torch.zeros(len(step), dtype=torch.int32),
            hidden=self.hidden, max_width=max_width, max_kv_len=64,
        )  # fmt: skip

    def trees(self, step: list[int]) -> list[list[tuple[int, ...]]]:
        """What a step drafts of what was proposed, as paths; then it is forgotten."""
        inputs = self.inputs(step)
        slots = self.slots.clone()
        rows = 128 * len(step)
        tokens, parents = (torch.zeros(rows, dtype=torch.int32) for _ in range(2))
        cu_rows = torch.zeros(len(step) + 1, dtype=torch.int32)
        ops.draft_step(
            LAYOUT, slots, inputs.slot_ids, tokens=tokens, parents=parents, cu_rows=cu_rows,
            kv_len=torch.zeros(len(step), dtype=torch.int32), max_drafts=inputs.max_drafts,
        )  # fmt: skip
        found = []
        for first, end in zip(cu_rows.tolist(), cu_rows.tolist()[1:], strict=False):
            paths: list[tuple[int, ...]] = [()]
            for token, parent in zip(
                tokens[first + 1 : end].tolist(), parents[first + 1 : end].tolist(), strict=True
            ):
                paths.append((*paths[parent], token))
            found.append(paths[1:])
        nothing = torch.full((len(step), 1), -1, dtype=torch.int32)
        ops.propose_drafts(LAYOUT, self.slots, inputs.slot_ids, nothing, vocab_size=1)
        return found


def make_device(network: Redrafter, target: Any) -> DeviceBeams:
    device = DeviceBeams(network, target, vocab_size=target.vocab_size, max_requests=SLOTS,
                         num_beams=BEAMS, length=LENGTH)  # fmt: skip
    for slot, (beams, length, *_) in enumerate(ASKED):
        device.enter(slot, {"num_beams": beams, "length": length, "adaptive": False})
    return device


def make_stub(name: str) -> tuple[DeviceBeams, Target]:
    network = make(SHAPES[name], seed=5)
    target = Target(network.shape, torch.float32)
    return make_device(network, target), target


@pytest.mark.parametrize("name", SHAPES)
def test_trees_are_those_of_the_host(native: Any, name: str) -> None:
    """Requests of their own beams, lengths and ends; padding; a hidden state that is no number."""
    target = native(torch.float32)
    network = make(shape_for(name, target), seed=5, std=0.1)
    device = make_device(network, target)
    packed = PackedRedrafter(redrafter_weights(network), target)
    host = HostBeams(
        packed, vocab_size=target.vocab_size, max_requests=SLOTS, max_drafts=BEAMS * LENGTH
    )
    for slot, (beams, length, *_) in enumerate(ASKED):
        options = {"num_beams": beams, "length": length, "adaptive": False}
        host.enter(slot, {**options, "temperature": 1.0, "keeps_laws": False})
    compared = 0
    for seed in range(15):
        slots = Slots(target.vocab_size, target.hidden_size, seed)
        if seed == 3:
            slots.hidden[1] = float("nan")
        for step in STEPS:
            trees = []
            for search in (host, device):
                inputs = slots.inputs(step)
                search.draft(inputs)
                assert not inputs.status.any()
                trees.append(slots.trees(step))
            wanted, found = trees
            assert [sorted(tree) for tree in found] == [sorted(tree) for tree in wanted], seed
            for tree, slot in zip(found, step, strict=True):
                drafts = 0 if slot < 0 else ASKED[slot][3]
                assert len(tree) <= drafts
                if slot >= 0 and drafts and not slots.hidden[slot].isnan().any():
                    assert max(map(len, tree)) == min(ASKED[slot][1:])
            compared += sum(map(len, found))
    assert compared > 800


def test_a_step_of_few_drafts_searches_no_more() -> None:
    device, target = make_stub("apple")
    slots = Slots(target.vocab_size, target.hidden_size, 1)
    passes: list[int] = []
    run = device._layers.run
    device._layers.run = lambda rows, tokens: (passes.append(len(rows)), run(rows, tokens))[1]  # type: ignore[method-assign,func-returns-value]
    for max_width, expected in ((2, [3, 6]), (1, [3]), (20, [3, 12, 12, 12, 12])):
        passes.clear()
        device.draft(slots.inputs([0, 3, 1], max_width))
        assert passes == expected
        for tree in slots.trees([0, 3, 1]):
            assert tree and max(map(len, tree)) <= max_width


# What stands for a search's launches: no tensor is made, no value read.
LAUNCHED = {
    "aten::addmm.out", "aten::mm.out", "aten::add.out", "aten::add_.Tensor", "aten::silu_",
    "aten::index_select.out", "aten::clamp.out", "aten::minimum.out", "aten::topk.values",
    "aten::copy_", "aten::zero_", "aten::fill_.Scalar", "aten::gather.out", "aten::exp_",
}  # fmt: skip
VIEWS = {
    "aten::slice.Tensor", "aten::select.int", "aten::view", "aten::t", "aten::transpose.int",
    "aten::detach", "aten::alias", "aten::as_strided",
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_search_reads_no_value_and_makes_no_tensor(name: str) -> None:
    device, target = make_stub(name)
    inputs = Slots(target.vocab_size, target.hidden_size, 1).inputs(STEPS[0])
    kept = {key: t.data_ptr() for key, t in vars(device).items() if torch.is_tensor(t)}
    with torch.inference_mode(), Recorder() as seen:
        device.enter(2, {"num_beams": 2, "length": 2})
        device.enter(3, {})
        device.draft(inputs)
    assert seen.names <= LAUNCHED | VIEWS
    assert kept == {key: t.data_ptr() for key, t in vars(device).items() if torch.is_tensor(t)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_makes_trees_that_are_drafts(dtype: torch.dtype) -> None:
    """Rounded scores tie, so trees differ from the host's; they are trees of its size."""
    network = make(SHAPES["apple"], seed=5)
    target = Target(network.shape, dtype)
    target.table, target.rows = target.table.to(dtype), target.rows.to(dtype)
    device = DeviceBeams(network, target, vocab_size=31, max_requests=SLOTS, num_beams=BEAMS,
                         length=LENGTH)  # fmt: skip
    slots = Slots(31, 6, 2)
    slots.hidden = slots.hidden.to(dtype)
    device.enter(0, {"num_beams": 4, "length": 5})
    inputs = slots.inputs([0])
    device.draft(inputs)
    (tree,) = slots.trees([0])
    assert not inputs.status.any() and len(set(tree)) == len(tree) >= 8
    assert max(map(len, tree)) == 5
    assert sum(1 for path in tree if len(path) == 5) == 4


def test_memory_is_stated() -> None:
    device, target = make_stub("apple")
    stated = device.stats()["memory_bytes"]
    weights = device._layers.weight_bytes
    rows, hidden, vocab = SLOTS * BEAMS, target.hidden_size, target.vocab_size
    layers = 4 * rows * (4 * hidden + 2 * 2 * hidden + vocab)
    assert stated >= weights + layers + rows * vocab * (4 + 8)
    assert device.scratch_bytes(SLOTS) == 4 * rows * vocab
    network = make(SHAPES["apple"])
    wide = DeviceBeams(network, target, vocab_size=vocab, max_requests=SLOTS, num_beams=127,
                       length=1)  # fmt: skip
    assert wide.scratch_bytes(SLOTS) == 4 * SLOTS * vocab  # a depth has one row of each request
    for slot in range(SLOTS):
        wide.enter(slot, {"num_beams": 127, "length": 1})
    slots = Slots(vocab, target.hidden_size, 1)
    wide.draft(slots.inputs([0, 1], 127))
    assert [len(tree) for tree in slots.trees([0, 1])] == [20, 20]


def test_a_device_without_room_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RedrafterLayers, rows: int) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(RedrafterLayers, "make_rows", full)
    network = make(SHAPES["apple"])
    save_redrafter(network, tmp_path, dtype=torch.float32)
    config = ReDrafterDecodingConfig(tmp_path, 60, 2)
    target = Target(network.shape, torch.float32)
    target.place = Place("stub", "cpu", "stub")
    with pytest.raises(ConfigError, match=r"num_beams = 60.*max_batch_size = 7.*9 GiB.*lower one"):
        RedrafterDrafter(config, target, max_requests=7)

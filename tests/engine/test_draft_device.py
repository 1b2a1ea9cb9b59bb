"""A draft model on a device of its own: what one device gives, and nothing of one on the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from method_cases import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    Folders,
    Where,
    counts_of,
    drafter_of,
    open_llm,
    record_steps,
    texts_of,
)

from combinations import mixed
from emulators import EMULATED
from specdec_ext import ConfigError, DraftTargetDecodingConfig
from specdec_ext.drafters.draft_target.device_apart import OwnDevice, Parcel
from specdec_ext.engine.host_pool import HostPool
from specdec_ext.models.place import Place
from specdec_ext.parallel.team import Team
from specdec_ext.workflow.convert import ConvertOptions, convert
from tensor_parallel import started_team
from two_devices import FIRST, SECOND, Watch, WatchedStream, watched

pytestmark = EMULATED

FEW = PROMPTS[1:4]
REJECTION = dataclasses.replace(SAMPLED, acceptance="rejection")
SWAPPING: dict[str, Any] = {
    "scheduler": {"policy": "max_utilization", "max_seq_len": 64},
    "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 80,
                        "host_cache_size": 1 << 26, "host_link_gb_per_s": 1e6},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"max_draft_len": 4},
    "tree": {"max_draft_len": 9, "top_k": 3, "max_draft_depth": 4},
}


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with started_team() as team:
        yield team


@pytest.fixture
def watch() -> Iterator[Watch]:
    with watched() as watch:
        yield watch


def spec_of(models: Folders, device: str | None, **options: Any) -> DraftTargetDecodingConfig:
    options = {"model": models["near"], **SHAPES["chain"], "adaptive": False, **options}
    return DraftTargetDecodingConfig(device=device, **options)


def said(llm: Any) -> Any:
    """Everything that must not depend on where drafts are made."""
    return [texts_of(llm, law, FEW) for law in (GREEDY, SAMPLED, REJECTION)], counts_of(llm)


@pytest.mark.parametrize(("shape", "depth"), mixed(SHAPES, [0, 1, 2]))
def test_texts_drafts_and_acceptance(
    models: Folders, plain_texts: dict[str, Any], watch: Watch, shape: str, depth: int
) -> None:
    found = []
    for device in (None, SECOND):
        spec = spec_of(models, device, **SHAPES[shape])
        with open_llm(models, spec, Where(FIRST, depth)) as llm:
            found.append(said(llm))
            assert drafter_of(llm).stats()["device"] == (device or FIRST)
        assert bool(watch.copies) == (device is not None)
    assert found[0] == found[1]
    assert found[1][0][:2] == [plain_texts["greedy"][1:4], plain_texts["sampled"][1:4]]
    assert not watch.faults


def both(
    models: Folders, watch: Watch, spec: dict[str, Any], where: Where, ask: Any, **options: Any
) -> Any:
    """What `ask` returns, wherever drafts are made."""
    found = []
    for device in (None, SECOND):
        with open_llm(models, spec_of(models, device, **spec), where, **options) as llm:
            found.append(ask(llm))
    assert found[0] == found[1]
    assert watch.copies and not watch.faults
    return found[1]


def test_what_drafts_are_drawn_from_crosses_only_if_somebody_draws(
    models: Folders, watch: Watch
) -> None:
    """USE_LOGITS of TensorRT-LLM's documents: those rows are the bulk of all that crosses."""
    sent = []
    for logits in (False, True):
        watch.copies.clear()
        both(
            models, watch, {"use_draft_logits": logits}, Where(FIRST, 1),
            lambda llm: (texts_of(llm, REJECTION, FEW), counts_of(llm)),
        )  # fmt: skip
        sent.append(max(size for device, size in watch.copies if device == FIRST))
    assert sent[0] < 1000 < sent[1]


SCHEDULES: dict[str, dict[str, Any]] = {
    "chunks": {"scheduler": {"max_num_tokens": 17}},
    "reuse": {
        "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 1600, "enable_block_reuse": True}
    },
    "swapping": SWAPPING,
    "slots": {"scheduler": {"max_batch_size": 6}},
}


@pytest.mark.parametrize(("name", "depth"), mixed(SCHEDULES, [0, 2]))
def test_schedules(
    models: Folders, plain_texts: dict[str, Any], watch: Watch, name: str, depth: int
) -> None:
    options = SCHEDULES[name]
    prompts = PROMPTS if name == "slots" else FEW

    def ask(llm: Any) -> Any:
        twice = [texts_of(llm, GREEDY, prompts) for _ in range(2)]
        stats = llm.get_metrics()["executor"]
        if name == "swapping":
            assert stats["swapped_in"] == stats["swapped_out"] > 0
        if name == "reuse":
            assert stats["cached_tokens"] > 0
        return twice, counts_of(llm)

    texts, _ = both(models, watch, {}, Where(FIRST, depth), ask, **options)
    wanted = plain_texts["greedy"] if name == "slots" else plain_texts["greedy"][1:4]
    assert texts == [wanted, wanted]


class Recorder:
    """On the draft model's device. memory: recordings for which there is room."""

    memory_bytes = 0

    def __init__(self, memory: int = 1000) -> None:
        self.memory = memory
        self.recorded = self.replayed = 0

    def record(self, operations: Any) -> Callable[[], None]:
        if self.recorded == self.memory:
            raise torch.OutOfMemoryError("no room")
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for operation in operations:
                operation()

        return replay


@pytest.mark.parametrize(("shape", "room"), mixed(SHAPES, [1000, 2]))
def test_recorded_steps(
    models: Folders, plain_texts: dict[str, Any], watch: Watch, shape: str, room: int
) -> None:
    """A graph belongs to one device: the passes are one, what the target does after them another.
    Where there is no room for more they are launched one by one."""
    there = Recorder(room)

    def ask(llm: Any) -> Any:
        recorder, own = record_steps(llm), drafter_of(llm).own_device
        if own is not None:
            own._recorder = there
        texts = texts_of(llm, GREEDY, FEW), texts_of(llm, REJECTION, FEW)
        assert recorder.replayed > 20
        if own is not None:
            assert there.recorded == room or 2 < there.recorded < there.replayed
            assert own._recorder is (None if room == 2 else there)
        return texts, counts_of(llm)

    texts, _ = both(models, watch, SHAPES[shape], Where(FIRST, 1), ask)
    assert texts[0] == plain_texts["greedy"][1:4]


def test_requests_that_need_the_host(models: Folders, watch: Watch) -> None:
    laws = [GREEDY, dataclasses.replace(REJECTION, logprobs=2), SAMPLED]
    both(
        models, watch, {}, Where(FIRST, 2),
        lambda llm: [list(o.outputs[0].token_ids) for o in llm.generate(FEW, laws, use_tqdm=False)],
    )  # fmt: skip


def test_an_adaptive_length_and_timed_steps(
    models: Folders, plain_texts: dict[str, Any], watch: Watch
) -> None:
    with open_llm(models, spec_of(models, SECOND, adaptive=True), Where(FIRST, 2)) as llm:
        llm.engine.time_steps()  # type: ignore[attr-defined]
        assert texts_of(llm, GREEDY, FEW) == plain_texts["greedy"][1:4]
        assert llm.get_metrics()["overlap"]["step_times"]
    assert watch.copies and not watch.faults


def test_a_quantised_draft_model(
    models: Folders, plain_texts: dict[str, Any], watch: Watch, tmp_path: Path
) -> None:
    narrow = ConvertOptions(dtype="bfloat16", quantization="int8")
    folder = convert(models["near"], tmp_path / "int8", narrow).folder

    def ask(llm: Any) -> Any:
        return said(llm)

    texts, counts = both(models, watch, {"model": folder}, Where(FIRST, 1), ask)
    assert texts[0] == plain_texts["greedy"][1:4]
    assert counts["num_accepted_tokens"] > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_target_of_two_ranks(
    models: Folders, plain_texts: dict[str, Any], watch: Watch, team: Team, shape: str
) -> None:
    spec = spec_of(models, SECOND, **SHAPES[shape])
    for depth in (0, 2):
        with open_llm(
            models, spec, Where(FIRST, depth), tensor_parallel_size=2, numerics="exact"
        ) as llm:
            assert texts_of(llm, GREEDY, FEW) == plain_texts["greedy"][1:4]
            assert texts_of(llm, SAMPLED, FEW) == plain_texts["sampled"][1:4]
            assert counts_of(llm)["num_accepted_tokens"] > 0
    assert watch.copies and not watch.faults


# -- memory ---------------------------------------------------------------------------------------


def test_pages_are_sized_by_each_device(
    models: Folders, monkeypatch: pytest.MonkeyPatch, watch: Watch, plain_texts: dict[str, Any]
) -> None:
    """The draft model's do not count against the target's; where there is room for fewer, who holds
    others decodes without drafts."""
    real, there = Place.free_bytes, [None]
    monkeypatch.setattr(
        Place, "free_bytes", lambda self: there[0] if self.name == SECOND else real(self)
    )
    cache = {"tokens_per_block": 8, "max_tokens": 1600}
    sizes = []
    for device, free in ((None, None), (SECOND, None), (SECOND, 120_000)):
        there[0] = free
        with open_llm(
            models, spec_of(models, device), Where(FIRST, 1), kv_cache_config=cache
        ) as llm:
            sizes.append((llm.memory.num_pages, llm.memory.draft_num_pages))
            assert texts_of(llm, GREEDY, FEW) == plain_texts["greedy"][1:4]
    assert sizes[0] == sizes[1] == (200, 200)
    assert sizes[2][0] == 200 and 0 < sizes[2][1] < 200
    there[0] = 1000
    with pytest.raises(ConfigError, match=r"limit 900 bytes on the draft model's device"):
        open_llm(models, spec_of(models, SECOND), Where(FIRST, 1))
    assert not watch.faults


# -- mistakes are noticed -------------------------------------------------------------------------


def _forget(device: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The stream of this device waits for none."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = WatchedStream.wait_for

        def wait_for(self: WatchedStream, other: WatchedStream) -> None:
            if self.device != device:
                real(self, other)

        patch.setattr(WatchedStream, "wait_for", wait_for)

    return plant


def _stay(patch: pytest.MonkeyPatch) -> None:
    """Drafts are left on the device that has made them."""
    patch.setattr(OwnDevice, "bring", lambda self, made, probs=None: list(made))


def _stay_at_home(patch: pytest.MonkeyPatch) -> None:
    """The draft model reads the texts where the target has them."""
    patch.setattr(OwnDevice, "texts", lambda self, *given: given)


def _prompts_at_home(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnDevice, "prompts", lambda self, prompts: prompts)


def _wrong_stream(patch: pytest.MonkeyPatch) -> None:
    """Passes are enqueued on the target's stream."""
    patch.setattr(OwnDevice, "run", lambda self, operation: operation())


def _wrong_side(patch: pytest.MonkeyPatch) -> None:
    """Parcels are packed into the memory in which they should arrive."""
    real = Parcel.send

    def send(self: Parcel, *given: Any) -> Any:
        self._packed, self._arrived = self._arrived, self._packed
        return real(self, *given)

    patch.setattr(Parcel, "send", send)


MISTAKES = [_forget(FIRST), _forget(SECOND), _stay, _stay_at_home, _prompts_at_home, _wrong_stream,
            _wrong_side]  # fmt: skip


@pytest.mark.parametrize(
    "mistake", MISTAKES,
    ids=["target does not wait", "draft does not wait", "drafts stay", "texts stay", "prompts stay",
         "wrong stream", "wrong side"],
)  # fmt: skip
def test_mistakes_are_noticed(models: Folders, watch: Watch, mistake: Any) -> None:
    with pytest.MonkeyPatch.context() as patched:
        mistake(patched)
        with open_llm(models, spec_of(models, SECOND), Where(FIRST, 1)) as llm:
            texts_of(llm, REJECTION, FEW)
    assert watch.faults


def test_pages_that_the_wrong_stream_copies(
    models: Folders, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = HostPool.__init__

    def init(self: HostPool, *given: Any, streams: Any, **options: Any) -> None:
        real(self, *given, **options)

    monkeypatch.setattr(HostPool, "__init__", init)
    with open_llm(models, spec_of(models, SECOND), Where(FIRST, 1), **SWAPPING) as llm:
        texts_of(llm, GREEDY, FEW)
    assert watch.faults

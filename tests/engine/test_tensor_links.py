"""What links bring from rank to rank: random calls of three ranks, in three threads."""

from __future__ import annotations

import datetime
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from specdec_ext.parallel import nccl_link
from specdec_ext.parallel.gloo_link import GlooLink
from specdec_ext.parallel.link import Link, LostRankError
from specdec_ext.parallel.shared_link import SharedLink, make_memory
from specdec_ext.parallel.tensor_link import HostTensorLink, TensorLink

RANKS = 3


def shared() -> Callable[[int], Link]:
    files = make_memory(RANKS)
    return lambda rank: SharedLink([os.dup(f) for f in files], rank, RANKS, heartbeat_s=5.0)


def gloo() -> Callable[[int], Link]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return lambda rank: GlooLink(store, rank, RANKS, heartbeat_s=5.0)


def on_all_ranks(make: Callable[[int], TensorLink], run: Callable[[TensorLink], Any]) -> list[Any]:
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda rank: run(make(rank)), range(RANKS)))


def value(rank: int, call: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(size) * 7 + 31 * rank + call) % 29).to(dtype)


@pytest.mark.parametrize("kind", [shared, gloo])
def test_every_order_of_calls(kind: Callable[[], Callable[[int], Link]]) -> None:
    """Whoever is late, nobody's values are written over before all have them: one-way calls follow
    each other, too."""
    make = kind()
    found = on_all_ranks(lambda rank: HostTensorLink(make(rank)), random_calls(400))
    assert found == [0] * RANKS


class GlooForNccl:
    """Takes the calls that go to NCCL's process group, on the CPU."""

    class Options:
        _timeout: Any = None

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        assert options._timeout is not None
        return dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=10))


def test_the_calls_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their arguments and results; NCCL itself needs GPUs."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", GlooForNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    store = dist.HashStore()  # type: ignore[attr-defined]
    cpu = torch.device("cpu")
    found = on_all_ranks(
        lambda rank: nccl_link.NcclTensorLink(store, rank, RANKS, cpu), random_calls(60)
    )
    assert found == [0] * RANKS


def random_calls(count: int) -> Callable[[TensorLink], int]:
    """How many of them brought something else than they should have."""

    def run(link: TensorLink) -> int:
        plan, own = random.Random(3), random.Random(link.rank)
        wrong = 0
        for call in range(count):
            how, size = plan.choice(["spread", "all", "first", "add"]), plan.choice([0, 1, 9, 3000])
            dtype = plan.choice([torch.float32, torch.bfloat16, torch.float16])
            if own.random() < 0.05:
                time.sleep(0.001 * own.random())
            mine = value(link.rank, call, size, dtype)
            everybody = torch.stack([value(r, call, size, dtype) for r in range(RANKS)])
            whole = torch.zeros_like(everybody)
            if how == "spread":
                link.spread(mine)
                wrong += not torch.equal(mine, everybody[0])
            elif how == "add":
                link.add(mine)
                total = everybody.float().sum(0)  # small integers: every order of sums is exact
                wrong += not torch.equal(mine, total.to(dtype))
            else:
                link.gather(mine, whole, to_rank_0=how == "first")
                got = how == "all" or link.rank == 0
                wrong += not torch.equal(whole, everybody if got else torch.zeros_like(everybody))
        return wrong

    return run


@pytest.mark.parametrize("call", ["spread", "gather", "add"])
def test_a_rank_that_never_comes(call: str) -> None:
    files = make_memory(2)
    link = HostTensorLink(SharedLink(files, 1, 2, heartbeat_s=0.2))
    tensor = torch.ones(3)
    with pytest.raises(LostRankError, match="rank 0: no heartbeat") as lost:
        if call == "gather":
            link.gather(tensor, torch.empty(2, 3))
        else:
            getattr(link, call)(tensor)
    assert lost.value.silent and lost.value.rank == 0

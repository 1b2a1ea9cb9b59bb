"""K/V pages take memory as they fill, not when a model is loaded; what was taken can go back."""

from __future__ import annotations

import gc
import mmap
import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from specdec_ext import LLM, DraftTargetDecodingConfig, KvCacheConfig, SamplingParams, _core
from specdec_ext.models.host_arrays import as_torch
from tiny_models import save_tiny

GIB = 1 << 30


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pages") / "tiny")


def load(folder: Path, pool_bytes: int, **options: Any) -> LLM:
    with LLM(folder, kv_cache_config=KvCacheConfig(max_tokens=64)) as small:
        each = small.memory.bytes_per_token
    tokens = pool_bytes // each // (2 if "speculative_config" in options else 1)
    return LLM(folder, kv_cache_config=KvCacheConfig(max_tokens=tokens), **options)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_large_pool_costs_nothing_to_load(folder: Path, drafts: bool) -> None:
    spec = DraftTargetDecodingConfig(folder, max_draft_len=2) if drafts else None
    options = {} if spec is None else {"speculative_config": spec}
    load(folder, 1 << 20, **options).close()  # libraries
    costs = []
    for size in (1 << 20, GIB):
        memory, faults = resident(), page_faults()
        llm = load(folder, size, **options)
        costs.append((resident() - memory, page_faults() - faults))
        held = llm.memory.pool_bytes + llm.memory.draft_pool_bytes
        assert held >= 0.9 * size
        llm.close()
    (small, small_faults), (large, large_faults) = costs
    assert large - small <= 50 << 20
    # Nor was anything touched and given back: that is what took seconds. Unlike them it is counted.
    assert large_faults - small_faults <= (50 << 20) // mmap.PAGESIZE


def test_what_requests_wrote_goes_back_when_nobody_runs(folder: Path) -> None:
    with load(folder, GIB) as llm:
        params = SamplingParams(max_tokens=8)
        text = llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
        pages = llm.engine.model._pages  # type: ignore[attr-defined]
        as_torch(pages[0]).view(-1)[: 32 << 20] = 1.0
        before = resident()
        state = llm.engine.submit(llm.engine.resolve([1, 2, 3], params))
        llm.engine.step()
        llm.reset_prefix_cache()
        assert resident() > before - (8 << 20)  # a request runs
        llm.engine.run([state])
        assert state.token_ids == text
        llm.reset_prefix_cache()
        assert resident() < before - (100 << 20)
        assert not as_torch(pages[0]).any()
        assert llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids == text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_a_view_is_zeros_and_outlives_its_owner(dtype: str) -> None:
    zeros = _core.LazyZeros([2, 3, 16], dtype)
    view = torch.from_dlpack(zeros)
    again = torch.from_dlpack(zeros)
    assert view.dtype == getattr(torch, dtype)
    assert view.shape == (2, 3, 16) and view.is_contiguous()
    assert view.view(torch.uint8).eq(0).all()
    view.view(torch.uint8).fill_(3)
    del zeros, view
    gc.collect()
    assert again.view(torch.uint8).eq(3).all()


def test_memory_is_given_back_with_the_last_view() -> None:
    space = psutil.Process().memory_info().vms
    for _ in range(3):
        zeros = _core.LazyZeros([GIB], "uint8")
        view = torch.from_dlpack(zeros)
        capsule = zeros.__dlpack__()  # that nobody takes
        part = view[5:9]
        del zeros, view, capsule
        assert part.tolist() == [0, 0, 0, 0]
        assert psutil.Process().memory_info().vms >= space + GIB
        del part
        gc.collect()
        assert psutil.Process().memory_info().vms < space + GIB // 2


def test_release_gives_back_what_was_written() -> None:
    zeros = _core.LazyZeros([64 << 20], "uint8")
    assert zeros.num_bytes == 64 << 20
    view = torch.from_dlpack(zeros)
    before = resident()
    view.fill_(1)
    assert resident() > before + (60 << 20)
    zeros.release()
    assert resident() < before + (8 << 20)
    assert not view[:: 1 << 20].any()
    empty = _core.LazyZeros([0, 4], "float32")
    empty.release()
    assert torch.from_dlpack(empty).shape == (0, 4)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="axis of -1"):
        _core.LazyZeros([2, -1], "float32")
    with pytest.raises(ValueError, match="dtype 'complex64' is not one of float32"):
        _core.LazyZeros([2], "complex64")
    with pytest.raises(ValueError, match=r"more than 2\^63 bytes"):
        _core.LazyZeros([1 << 40, 1 << 40], "float32")
    with pytest.raises(MemoryError):
        _core.LazyZeros([1 << 60], "uint8")


def test_zeros_that_are_written_take_memory() -> None:
    """Only those of [:, :count], in every first axis."""
    zeros = _core.LazyZeros([3, 64, 1 << 18], "uint8")
    view = torch.from_dlpack(zeros)
    view[1, 5, 7] = 9
    before = resident()
    zeros.write_zeros(32)
    assert 20 << 20 < resident() - before < 30 << 20  # 3 x 32 x 256 KiB
    assert not view[:, :32].any()
    for count in (-1, 65):
        with pytest.raises(ValueError, match=f"count = {count}: the second axis has 64"):
            zeros.write_zeros(count)
    with pytest.raises(ValueError, match="second axis has 0"):
        _core.LazyZeros([4], "uint8").write_zeros(1)
    _core.LazyZeros([0, 4], "float32").write_zeros(4)

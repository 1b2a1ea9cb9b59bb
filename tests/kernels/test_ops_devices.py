"""Where operations run: backends by name, tensors of one device, scratch, status, plug-ins."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_calls import CHECKED, CPU, EMULATED, FAST, ON_EMU, Target, environment
from ops_arguments import G, H, K, P, R, S, call, good, int32, kv_arguments, refused

from emulators import seed_schedule
from specdec_ext import _core, ops

F8 = torch.float8_e4m3fn


def device_call(**changed: Any) -> torch.Tensor:
    """spec_attention on the emulated backend, where values are not checked on the host."""
    arguments = {**good(), "backend": CHECKED.backend, **changed}
    names = ("q", "k_pages", "v_pages", "page_table", "kv_len", "cu_rows")
    positional = [arguments.pop(name) for name in names]
    return ops.spec_attention(*positional, **arguments)


def test_flags_of_all_streams_are_made_once_and_not_within_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from specdec_ext.ops import _where

    waited: list[str] = []
    device = torch.device("cpu")
    stream = SimpleNamespace(synchronize=lambda: waited.append("once"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(_where, "_flags", {})
    monkeypatch.setattr(_where, "_outgrown_flags", [])
    lengths: Any = SimpleNamespace(device=device, is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"is_tree=None: 3 flags would be made while a CUDA"):
        _where.constant_flags(lengths, 1, 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = _where.constant_flags(lengths, 1, 3)
    assert made.tolist() == [1, 1, 1] and waited == ["once"], "every stream may read them"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _where.constant_flags(lengths, 1, 2).data_ptr() == made.data_ptr()
    assert waited == ["once"]


# -- Names -----------------------------------------------------------------------------------------


def test_backend_names() -> None:
    names = ops.backend_names()
    assert names[0] == "cpu"
    assert ("cuda" in names) == bool(_core.cuda_info()["devices"])
    refused(
        ValueError,
        f'backend = "gpu": there are {", ".join(names)}',
        lambda: call(backend="gpu"),
    )
    refused(TypeError, "backend is a int: give a name or None", lambda: call(backend=3))


@pytest.mark.skipif("cuda" in ops.backend_names(), reason="there is a CUDA GPU")
def test_cuda_is_refused_with_the_reason_where_there_is_none() -> None:
    reason = _core.cuda_info()["reason"]
    assert reason
    text = f'backend = "cuda": not usable here: {reason}'
    refused(ValueError, text, lambda: call(backend="cuda"))


class DLTensor(ctypes.Structure):
    """The start of DLPack's managed tensor; its device can be written."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    )


class OnCuda:
    """A CPU tensor that says through DLPack that it lies on a CUDA device."""

    def __init__(self, tensor: torch.Tensor, index: int = 0) -> None:
        self.tensor, self.index = tensor, index
        self.shape = tensor.shape

    def __dlpack__(self, max_version: object = None) -> object:
        capsule = self.tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        tensor = DLTensor.from_address(pointer(capsule, b"dltensor"))
        tensor.device_type, tensor.device_id = 2, self.index
        return capsule


def test_all_tensors_of_a_call_are_on_one_device() -> None:
    text = "q is on cuda:0, k_pages on the CPU: all tensors of a call are on one device"
    for name in ("q", "kv_len", "cu_rows", "out", "mask", "v_pages", "page_table"):
        moved = {name: OnCuda(good()[name])}
        refused(ValueError, text.replace("q", name, 1), lambda moved=moved: call(**moved))
    both = {name: OnCuda(good()[name]) for name in ("k_pages", "v_pages")}
    for name in ("cpu", *(n for n in ops.backend_names() if n.startswith("cuda-emu"))):
        text = (
            f'k_pages is on cuda:0: backend "{name.removesuffix("-fast")}" takes tensors on the CPU'
        )
        refused(ValueError, text, lambda name=name: call(**both, backend=name))


@pytest.mark.skipif("cuda" in ops.backend_names(), reason="there is a CUDA GPU")
def test_a_cuda_tensor_is_refused_with_the_reason_where_there_is_no_gpu() -> None:
    both = {name: OnCuda(good()[name]) for name in ("k_pages", "v_pages")}
    text = f"k_pages is on cuda:0: {_core.cuda_info()['reason']}"
    refused(ValueError, text, lambda: call(**both))


def test_limits_belong_to_backends_that_have_them() -> None:
    refused(
        ValueError,
        'backend = "cpu": has no device limits',
        lambda: ops.device_limits("cpu"),
    )


def test_kernels_have_names_on_devices_only() -> None:
    text = 'instance = "generic": backend "cpu" has one kernel for all'
    refused(ValueError, text, lambda: call(instance="generic"))


# -- Plug-ins --------------------------------------------------------------------------------------


def test_what_is_no_plug_in_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.so")
    text = f'path = "{missing}": cannot be opened: '
    refused(ValueError, text, lambda: ops.load_backend("mine", missing))
    for name in ("", "cpu", "cuda"):
        text = f'name = "{name}": a plug-in needs a name of its own'
        refused(ValueError, text, lambda name=name: ops.load_backend(name, missing))
    assert "mine" not in ops.backend_names()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_plug_in_of_other_headers_is_refused(tmp_path: Path) -> None:
    def library(name: str, text: str) -> str:
        (tmp_path / f"{name}.cc").write_text(text)
        path = str(tmp_path / f"{name}.so")
        command = ["g++", "-shared", "-fPIC", str(tmp_path / f"{name}.cc"), "-o", path]
        subprocess.run(command, check=True)
        return path

    empty = library("empty", "int nothing;")
    text = f'path = "{empty}": exports no specdec_backend()'
    refused(ValueError, text, lambda: ops.load_backend("mine", empty))
    code = 'unsigned long long layout[64]; extern "C" const void* specdec_backend() '
    other = library("other", code + "{ return layout; }")
    text = f'path = "{other}": was built from other headers than this package'
    refused(ValueError, text, lambda: ops.load_backend("mine", other))
    assert "mine" not in ops.backend_names()


# -- Arguments on a device -------------------------------------------------------------------------


@EMULATED
def test_values_on_a_device_are_not_read_by_the_host() -> None:
    """What the CPU refuses, a kernel finds: its request is flagged, the others are served."""
    status = int32(0, 0)
    out = torch.full((R, H, K), torch.nan)
    device_call(page_table=int32(3, 1, 99, 77, -5, 7).view(2, 3), out=out, status=status)
    assert status.tolist() == [0, 2]
    assert bool((out[:3] == 0).all())
    assert bool((out[3:] == 0).all())


@EMULATED
@pytest.mark.parametrize(
    ("kind", "text", "changed"),
    [
        (ValueError, "status has shape [3]: expected [B] = [2]", dict(status=int32(0, 0, 0))),
        (TypeError, "status has dtype int64: expected uint32", dict(status=torch.zeros(2).long())),
        (
            ValueError,
            "status is not contiguous",
            dict(status=torch.zeros(4, dtype=torch.int32)[::2]),
        ),
        (
            TypeError,
            "is_tree has dtype float32: expected uint8 or bool",
            dict(is_tree=torch.zeros(2)),
        ),
        (
            ValueError,
            "is_tree has shape [3]: expected [B] = [2]",
            dict(is_tree=torch.zeros(3, dtype=torch.bool)),
        ),
        (
            ValueError,
            "mask has 5 words per row: 1..4 are supported",
            dict(mask=torch.ones(R, 5, dtype=torch.int32)),
        ),
        (
            ValueError,
            "k_scale is given and k_pages has dtype float32: scales belong to float8_e4m3fn pages",
            dict(k_scale=torch.ones(1), v_scale=torch.ones(1)),
        ),
        (ValueError, "v_scale is None and the other is not", dict(k_scale=torch.ones(1))),
        (ValueError, "max_depth = 128: give 0..127", dict(max_depth=128)),
        (ValueError, "max_depth = -1: give 0..127", dict(max_depth=-1)),
        (ValueError, "max_rows = -1: give the most rows", dict(max_rows=-1)),
        (ValueError, "max_kv_len = -1: give the most tokens", dict(max_kv_len=-1)),
        (ValueError, 'instance = "fastest": no such kernel', dict(instance="fastest")),
        (TypeError, "workspace is a list: give a tensor", dict(workspace=[1])),
    ],
)
def test_device_arguments(kind: type[Exception], text: str, changed: dict[str, Any]) -> None:
    device_call()
    refused(kind, text, lambda: device_call(**changed))


def e4m3_pages() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(P, G, S, K).to(F8) for name in ("k_pages", "v_pages")}


@pytest.mark.parametrize(
    ("kind", "text", "k_scale", "v_scale"),
    [
        (ValueError, "k_scale has 3 values on 1 axes: expected [1] or [G] = [2]", (3,), (3,)),
        (ValueError, "k_scale has 2 values on 2 axes: expected [1] or [G]", (1, 2), (2,)),
        (ValueError, "v_scale has shape [1]: expected that of k_scale = [2]", (2,), (1,)),
    ],
)
def test_scales(kind: type[Exception], text: str, k_scale: Any, v_scale: Any) -> None:
    scales = dict(k_scale=torch.ones(k_scale), v_scale=torch.ones(v_scale))
    refused(kind, text, lambda: call(**e4m3_pages(), **scales))
    half = dict(k_scale=torch.ones(2).half(), v_scale=torch.ones(2).half())
    refused(
        TypeError,
        "k_scale has dtype float16: expected float32",
        lambda: call(**e4m3_pages(), **half),
    )


# -- The CPU honours the same keywords -------------------------------------------------------------


def test_bounds_are_checked_where_lengths_can_be_read() -> None:
    call(max_rows=3, max_kv_len=8, max_depth=1)
    refused(ValueError, "max_rows = 2: request 0 has 3 rows", lambda: call(max_rows=2))
    text = "max_kv_len = 7: request 0 has kv_len + rows = 8"
    refused(ValueError, text, lambda: call(max_kv_len=7))
    refused(
        ValueError,
        "max_depth = 0: row 1 of request 0 has 1 ancestors",
        lambda: call(max_depth=0),
    )


def test_a_request_without_a_tree_ignores_its_mask() -> None:
    torch.manual_seed(0)
    arguments = good()
    for name in ("q", "k_pages", "v_pages"):
        arguments[name] = torch.randn_like(arguments[name])
    wrong = arguments["mask"].clone()
    wrong[3:] = 0
    chain, mixed = torch.zeros(R, H, K), torch.zeros(R, H, K)
    call(**{**arguments, "mask": None, "out": chain})
    call(
        **{**arguments, "mask": wrong, "out": mixed, "is_tree": torch.tensor([True, False])},
    )
    assert torch.equal(mixed[3:], chain[3:])
    assert not torch.equal(mixed[:3], chain[:3])
    refused(
        ValueError,
        "mask is None and is_tree[0] = 1: a tree needs a mask",
        lambda: call(mask=None, is_tree=torch.tensor([True, False])),
    )


def test_a_request_may_have_no_rows() -> None:
    arguments = good()
    out = torch.zeros(3, H, K)
    call(
        **{
            **arguments,
            "q": arguments["q"][:3],
            "mask": arguments["mask"][:3],
            "out": out,
            "cu_rows": int32(0, 3, 3),
            "kv_len": int32(5, 10_000),  # of a request that takes no part
        }
    )


# -- Scratch ---------------------------------------------------------------------------------------


def half_call(backend: str, **options: Any) -> torch.Tensor:
    """A call that a kernel with matrix instructions serves."""
    torch.manual_seed(0)
    pages = [torch.randn(4, 1, 16, 64).half() for _ in range(2)]
    return ops.spec_attention(
        torch.randn(2, 4, 64).half(),
        *pages,
        torch.tensor([[0, 1, 2, 3]], dtype=torch.int32),
        int32(40),
        int32(0, 2),
        out=torch.full((2, 4, 64), torch.nan, dtype=torch.half),
        scale=0.125,
        max_depth=8,
        backend=backend,
        **options,
    )


@EMULATED
def test_the_workspace_is_as_large_as_planned() -> None:
    limits = ops.device_limits(CHECKED.backend)
    problem = ops.AttentionProblem(
        num_heads=4, num_kv_heads=1, head_dim=64, dtype=torch.half, page_size=16,
        num_rows=2, max_rows=2, max_kv_len=64,
    )  # fmt: skip
    needed = ops.plan_workspace(problem, limits)["total_bytes"]
    expected = half_call(CHECKED.backend)
    assert not bool(expected.isnan().any())
    room = torch.full((needed + 512,), 0xFF, dtype=torch.uint8)
    begin = -room.data_ptr() % 256
    exact = room[begin : begin + needed]
    assert torch.equal(half_call(CHECKED.backend, workspace=exact), expected)
    assert bool((room[:begin] == 0xFF).all())
    assert bool((room[begin + needed :] == 0xFF).all())
    refused(
        ValueError,
        f"workspace has {needed - 1} bytes from its first multiple of 256 on: spec_attention "
        f"needs {needed} here",
        lambda: half_call(CHECKED.backend, workspace=exact[:-1]),
    )


@EMULATED
def test_a_plan_can_be_used_again() -> None:
    workspace = torch.full((16 << 20,), 0xFF, dtype=torch.uint8)
    first = half_call(FAST.backend, workspace=workspace)
    again = half_call(FAST.backend, workspace=workspace, reuse_plan=True)
    assert torch.equal(first, again)


@EMULATED
def test_emulated_limits_choose_the_kernel() -> None:
    with environment("SPECDEC_EMU_LIMITS", "8.6,3,101376"):
        limits = ops.device_limits(FAST.backend)
        assert (limits.major, limits.minor, limits.num_sms) == (8, 6, 3)
        assert limits.shared_bytes == 99 << 10
    with environment("SPECDEC_EMU_LIMITS", "7.5,3,65536"):
        refused(
            ValueError,
            "the device has compute capability 7.5: these kernels need 8.0 or newer",
            lambda: half_call(FAST.backend),
        )
    with environment("SPECDEC_EMU_LIMITS", "fast"):
        refused(
            RuntimeError,
            "SPECDEC_EMU_LIMITS=fast: expected major.minor,SMs,shared memory",
            lambda: half_call(FAST.backend),
        )


@EMULATED
def test_no_schedule_changes_a_result() -> None:
    expected = kv_arguments()
    ops.append_kv(*expected)
    for seed in range(3):
        got = kv_arguments()
        seed_schedule(CHECKED.backend, seed)
        ops.append_kv(*got, backend=CHECKED.backend)
        assert torch.equal(got[2], expected[2])
        assert torch.equal(got[3], expected[3])
    seed_schedule(CHECKED.backend, 0)


@pytest.mark.parametrize("target", [pytest.param(CPU, id="cpu"), ON_EMU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_result_that_is_no_number_flags_its_request(target: Target, dtype: torch.dtype) -> None:
    """The CPU reports it as a device does; what else a device flags, the CPU refuses before."""
    arguments = good()
    changed = {name: arguments[name].to(dtype) for name in ("q", "k_pages", "v_pages", "out")}
    status = int32(0, 8)
    changed |= {"backend": target.backend, "status": status}
    call(**changed)
    assert status.tolist() == [0, 8]  # flags are added, none is taken away
    for value in (torch.nan, torch.inf):
        changed["q"][int(arguments["cu_rows"][1]), 0, 3] = value
        status[:] = int32(2, 0)
        call(**changed)
        assert status.tolist() == [2, 1]

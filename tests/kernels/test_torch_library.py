"""The opt-in torch operators: schemas that tell the truth, fake tensors, the functions' results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_arguments import G, H, K, P, R, S, good, int32, kv_arguments

from specdec_ext import ops


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    ops.register_torch_library()
    ops.register_torch_library()


def random_good() -> tuple[list[torch.Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    options = good()
    names = ("q", "k_pages", "v_pages", "page_table", "kv_len", "cu_rows")
    arguments = [options.pop(name) for name in names]
    for tensor in arguments[:3]:
        tensor.normal_()
    return arguments, options


def attention() -> tuple[list[Any], dict[str, Any]]:
    arguments, options = random_good()
    return arguments, {**options, "sliding_window": 3, "softcap": 2.0, "sinks": torch.ones(H)}


def rope() -> tuple[list[Any], dict[str, Any]]:
    k, v, *rest = kv_arguments()
    options = {"q_out": torch.zeros(R, H, K), "cos": torch.ones(9, 8), "sin": torch.ones(9, 8)}
    return [torch.ones(R, H, K), k, v, *rest, int32(5, 6, 6, 0, 1)], options


def compaction() -> tuple[list[Any], dict[str, Any]]:
    pages = [torch.randn(2, P, G, S, K) for _ in range(2)]
    path = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
    return [*pages, *kv_arguments()[4:], path, int32(1, 0)], {}


def step() -> tuple[list[Any], dict[str, Any]]:
    outputs = {
        "positions": torch.zeros(R, dtype=torch.int32),
        "mask": torch.zeros(R, 4, dtype=torch.int32),
        "is_tree": torch.zeros(2, dtype=torch.uint8),
        "slots": torch.zeros(R, dtype=torch.int64),
    }
    arguments = [int32(-1, 0, 0, -1, 0), *kv_arguments()[4:]]
    return arguments, {**outputs, "page_size": S, "num_pages": P}


CALLS: dict[str, Callable[[], tuple[list[Any], dict[str, Any]]]] = {
    "spec_attention": attention,
    "append_kv": lambda: (kv_arguments(), {}),
    "rope_append_kv": rope,
    "compact_kv": compaction,
    "build_step": step,
    "pack_mask": lambda: (
        [torch.rand(3, 40) < 0.5, torch.zeros(3, 2, dtype=torch.int32)],
        {},
    ),
    "rms_norm": lambda: (
        [torch.randn(2, 8), torch.ones(8)],
        {"out": torch.zeros(2, 8), "added": torch.randn(2, 8), "added_weight": torch.ones(8)},
    ),
    "linear": lambda: (
        [torch.randn(2, 8), torch.randn(3, 8)],
        {"out": torch.zeros(2, 3), "bias": torch.randn(3)},
    ),
    "gated_activation": lambda: ([torch.randn(2, 8)], {"out": torch.zeros(2, 4)}),
    "argmax": lambda: ([torch.randn(3, 40), int32(0, 0, 0)], {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_schema_and_fake_tensors(name: str) -> None:
    arguments, options = CALLS[name]()
    operator = getattr(torch.ops.specdec_ext, name).default
    torch.library.opcheck(operator, tuple(arguments), options)


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_does_what_its_function_does(name: str) -> None:
    torch.manual_seed(1)
    expected, options = CALLS[name]()
    getattr(ops, name)(*expected, **options)
    torch.manual_seed(1)
    got, same = CALLS[name]()
    assert getattr(torch.ops.specdec_ext, name)(*got, **same) is None
    for mine, theirs in zip([*got, *same.values()], [*expected, *options.values()], strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


def test_every_operation_is_registered_with_all_its_arguments() -> None:
    import inspect

    for name in CALLS:
        schema = getattr(torch.ops.specdec_ext, name).default._schema
        parameters = inspect.signature(getattr(ops, name)).parameters
        tensors = [name for name in parameters if name != "sums"]
        assert [argument.name for argument in schema.arguments] == tensors


def test_a_compiled_function_holds_the_operator() -> None:
    arguments, options = random_good()
    expected = ops.spec_attention(*arguments, **{**options, "out": torch.zeros(R, H, K)})

    def program(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.ops.specdec_ext.spec_attention(q * 1.0, *arguments[1:], **{**options, "out": out})
        return out + 1.0

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(arguments[0], torch.zeros(R, H, K)), expected + 1.0)

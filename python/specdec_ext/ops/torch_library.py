"""The operations as torch operators, so that torch.compile and torch.export can hold them.

Opt-in: nothing is registered until ``register_torch_library()`` is called. The operators are in
``torch.ops.specdec_ext``, take the arguments of the functions of the same name, except `sums`,
which are no tensor, fill their outputs and return nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from specdec_ext.ops.attention import spec_attention
from specdec_ext.ops.kv import append_kv, compact_kv, rope_append_kv
from specdec_ext.ops.rows import gated_activation, linear, rms_norm
from specdec_ext.ops.step import argmax, build_step, pack_mask

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NAMESPACE = "specdec_ext"

# Schemas, with what an operator writes marked (a!), (b!), ...
SCHEMAS: dict[str, tuple[Callable[..., Any], str]] = {
    "spec_attention": (
        spec_attention,
        "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor kv_len, "
        "Tensor cu_rows, *, Tensor(a!) out, float scale, Tensor? mask=None, Tensor? is_tree=None, "
        "int sliding_window=0, float softcap=0.0, Tensor? sinks=None, Tensor? k_scale=None, "
        "Tensor? v_scale=None, bool exact=True, int max_depth=127, int? max_rows=None, "
        "int? max_kv_len=None, str? instance=None, bool reuse_plan=False, str? backend=None, "
        "Tensor(b!)? workspace=None, Tensor(c!)? status=None, int sink_tokens=0, "
        "int first_key=0) -> ()",
    ),
    "append_kv": (
        append_kv,
        "(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor page_table, "
        "Tensor kv_len, Tensor cu_rows, *, Tensor? k_scale=None, Tensor? v_scale=None, "
        "int? max_rows=None, int? max_kv_len=None, str? backend=None, Tensor(c!)? status=None) "
        "-> ()",
    ),
    "rope_append_kv": (
        rope_append_kv,
        "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, "
        "Tensor page_table, Tensor kv_len, Tensor cu_rows, Tensor positions, *, Tensor(c!) q_out, "
        "Tensor? cos=None, Tensor? sin=None, bool interleaved=False, Tensor? q_norm=None, "
        "Tensor? k_norm=None, float norm_eps=1e-6, bool norm_plus_one=False, "
        "Tensor? k_scale=None, Tensor? v_scale=None, int? max_rows=None, int? max_kv_len=None, "
        "str? backend=None, Tensor(d!)? status=None) -> ()",
    ),
    "compact_kv": (
        compact_kv,
        "(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor page_table, Tensor kv_len, "
        "Tensor cu_rows, Tensor path, Tensor path_len, *, int? num_rows=None, "
        "int? max_kv_len=None, str? backend=None, Tensor(c!)? status=None) -> ()",
    ),
    "build_step": (
        build_step,
        "(Tensor parents, Tensor page_table, Tensor kv_len, Tensor cu_rows, *, "
        "Tensor(a!) positions, Tensor(b!) mask, Tensor(c!) is_tree, Tensor(d!)? slots=None, "
        "int page_size, int num_pages, int max_depth=127, int? max_rows=None, str? backend=None, "
        "Tensor(e!)? status=None) -> ()",
    ),
    "pack_mask": (pack_mask, "(Tensor mask, Tensor(a!) out, *, str? backend=None) -> ()"),
    "rms_norm": (
        rms_norm,
        "(Tensor(a!) x, Tensor weight, *, Tensor(b!) out, Tensor? added=None, "
        "Tensor? added_weight=None, float eps=1e-6, bool norm_plus_one=False, "
        "str? backend=None) -> ()",
    ),
    "linear": (
        linear,
        "(Tensor x, Tensor weight, *, Tensor(a!) out, Tensor? bias=None, "
        "bool constant_weight=False, int cut_columns=0, str? backend=None, "
        "Tensor(b!)? workspace=None) -> ()",
    ),
    "gated_activation": (
        gated_activation,
        '(Tensor x, *, Tensor(a!) out, str activation="silu", str? backend=None) -> ()',
    ),
    "argmax": (
        argmax,
        "(Tensor scores, Tensor(a!) out, *, str? backend=None, Tensor(b!)? workspace=None) -> ()",
    ),
}

_library: torch.library.Library | None = None  # kept: operators go with it


def register_torch_library() -> None:
    """Register the operators ``torch.ops.specdec_ext.*`` with fake kernels. Again: does nothing."""
    global _library
    if _library is not None:
        return
    import torch

    library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
    for name, (function, schema) in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _without_result(function), "CompositeExplicitAutograd")
        # Outputs are the caller's: there is nothing to allocate, so nothing to describe.
        torch.library.register_fake(f"{NAMESPACE}::{name}", _nothing, lib=library)
    _library = library


def _without_result(function: Callable[..., Any]) -> Callable[..., None]:
    def run(*args: Any, **options: Any) -> None:
        function(*args, **options)

    return run


def _nothing(*args: Tensor, **options: Any) -> None:
    return None

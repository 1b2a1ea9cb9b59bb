"""The attention function that transformers models call: K/V into our pages, then our attention.

Registered under the name "specdec_paged". Everything about a layer (scale, window, soft cap, sinks)
is read from the call, never from the configuration. What a call asks for and the function does not
know is an error, not a default: that is what tells a faithful model from a silently wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _core, ops
from ..errors import UnsupportedModelError
from .device_step import DeviceStep, PlanStaging
from .place import CPU, Place

__all__ = ["ATTENTION_NAME", "StepContext", "register", "running"]

ATTENTION_NAME = "specdec_paged"

# Arguments that say nothing about the scores of a causal decoder that has no cache.
_HARMLESS = frozenset((
    "position_ids", "position_embeddings", "use_cache", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "cache_position",
    "logits_to_keep", "past_key_values", "past_key_value", "num_items_in_batch",
    "deterministic", "layer_type",
))  # fmt: skip


@dataclass
class StepContext:
    """One forward pass: its plan, the pages it writes, and which layers called (in call order).

    k_pages, v_pages  [layers, P, G, S, K]; None while probing: then made at the first call, with
                      `probe_layers` layers and `probe_pages` pages of `probe_page_size` tokens
    """

    plan: Any
    k_pages: torch.Tensor | None = None
    v_pages: torch.Tensor | None = None
    probe_layers: int = 0
    probe_pages: int = 0
    probe_page_size: int = 0
    place: Place = CPU
    staging: PlanStaging | None = None  # on a device
    # [layers, G] of K and of V, or nothing: both are 1
    kv_scales: tuple[torch.Tensor, ...] = ()
    # What the layers see where that is less than the calls ask for; none while probing.
    layer_windows: tuple[int, ...] = ()
    sink_tokens: int = 0
    calls: list[int] = field(default_factory=list)
    windows: dict[int, int] = field(default_factory=dict)
    num_heads: int = 0
    _staged: tuple[Any, DeviceStep] | None = None  # a plan, and what became of it

    def scales_of(self, layer: int) -> dict[str, Any]:
        """The keywords k_scale and v_scale of the layer's operations."""
        names = ("k_scale", "v_scale")
        return {name: part[layer] for name, part in zip(names, self.kv_scales, strict=False)}

    def step(self) -> DeviceStep:
        """The plan on the device, copied there once."""
        if self._staged is None or self._staged[0] is not self.plan:
            assert self.k_pages is not None
            self.staging = self.staging or PlanStaging(self.place.device)
            self._staged = self.plan, self.staging.stage(self.plan, self.k_pages.shape[3])
        return self._staged[1]


_current: ContextVar[StepContext | None] = ContextVar("specdec_step", default=None)


@contextmanager
def running(context: StepContext) -> Iterator[StepContext]:
    """Attention calls inside the block belong to `context`."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def register() -> None:
    """Make the name known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, R, K], key and value [1, G, R, K] -> ([1, R, H, K], None).

    Raises UnsupportedModelError for anything the call asks for that our attention cannot honour.
    """
    context = _current.get()
    if context is None:
        raise RuntimeError(
            f"attention {ATTENTION_NAME!r} was called outside of a step: run the model through "
            "the engine, or select another attn_implementation"
        )
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not tell its layer_idx")
    where = f"{type(module).__name__} of layer {layer}"
    _refuse_unknown(where, module, attention_mask, dropout, is_causal, kwargs)
    _, heads, rows, head_dim = query.shape
    if key.shape != value.shape or key.shape[-1] != head_dim or key.shape[2] != rows:
        raise UnsupportedModelError(
            f"{where}: query {list(query.shape)}, key {list(key.shape)}, value "
            f"{list(value.shape)}: one head_dim for all three is supported"
        )
    _check_pages(context, where, layer, key)
    assert context.k_pages is not None and context.v_pages is not None
    context.calls.append(layer)
    context.windows[layer] = int(sliding_window or 0)
    context.num_heads = max(context.num_heads, heads)
    # Copies only where the model left heads outermost.
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    out = torch.empty_like(q)
    options: dict[str, Any] = {
        "scale": float(head_dim**-0.5 if scaling is None else scaling),
        "sliding_window": context.windows[layer],
        "sink_tokens": context.sink_tokens,
        "softcap": float(softcap or 0.0),
        "sinks": None if s_aux is None else s_aux.detach().float().contiguous(),
    }
    if context.layer_windows:
        options["sliding_window"] = context.layer_windows[layer]
    if context.place.is_cpu:
        options |= context.scales_of(layer)
        pages = context.k_pages, context.v_pages
        _core.step_append_kv(context.plan, layer, k, v, *pages, **context.scales_of(layer))
        _core.step_attention(context.plan, layer, q, out, *pages, **options)
    else:
        _attend_on_device(context, layer, q, k, v, out, options)
    return out[None], None


def _attend_on_device(
    context: StepContext,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    options: dict[str, Any],
) -> None:
    assert context.k_pages is not None and context.v_pages is not None
    step = context.step()
    pages = (context.k_pages[layer], context.v_pages[layer])
    geometry = (step.page_table, step.kv_len, step.cu_rows)
    where: dict[str, Any] = {
        "max_rows": step.max_rows,
        "max_kv_len": step.max_kv_len,
        "backend": context.place.backend,
        **context.scales_of(layer),
    }
    ops.append_kv(k, v, *pages, *geometry, **where)
    ops.spec_attention(
        q,
        *pages,
        *geometry,
        out=out,
        mask=step.mask,
        is_tree=step.is_tree,
        exact=False,
        **(options | where),
    )


def _refuse_unknown(
    where: str,
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> None:
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{where} passes an attention mask {list(attention_mask.shape)}: it masks in a way "
            "of its own"
        )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{where} is not causal")
    if dropout:
        raise UnsupportedModelError(f"{where} asks for dropout {dropout} at inference")
    for name, value in kwargs.items():
        if value is not None and name not in _HARMLESS:
            raise UnsupportedModelError(
                f"{where} passes {name} = {type(value).__name__}, which the paged attention does "
                "not implement; leaving it out would give wrong text"
            )


def _check_pages(context: StepContext, where: str, layer: int, key: torch.Tensor) -> None:
    _, kv_heads, _, head_dim = key.shape
    if context.k_pages is None:
        if head_dim % 8 or head_dim > 256:
            raise UnsupportedModelError(
                f"{where}: head_dim = {head_dim}: a multiple of 8 up to 256 is supported"
            )
        # NaN: a slot that is read before it was written shows.
        shape = (
            context.probe_layers, context.probe_pages, kv_heads, context.probe_page_size, head_dim,
        )  # fmt: skip
        context.k_pages = torch.full(shape, float("nan"), dtype=key.dtype, device=key.device)
        context.v_pages = torch.full(shape, float("nan"), dtype=key.dtype, device=key.device)
    layers, _, page_heads, _, page_dim = context.k_pages.shape
    if not 0 <= layer < layers:
        raise UnsupportedModelError(f"{where}: the model has {layers} layers by its configuration")
    width = _core.kv_row_width(str(context.k_pages.dtype).removeprefix("torch."), head_dim)
    if (kv_heads, width) != (page_heads, page_dim):
        raise UnsupportedModelError(
            f"{where} has {kv_heads} KV heads of {head_dim}, other layers {page_heads} of "
            f"{page_dim - width + head_dim}: one shape for all layers is supported"
        )

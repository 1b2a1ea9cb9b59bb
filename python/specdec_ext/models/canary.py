"""The check that an adapted transformers model is the model: run at load, on a few tokens.

Faithful   every layer calls our attention exactly once, with the window the configuration gives it,
           and the scores equal those of transformers' own eager attention: for three tokens, and
           for every root-to-leaf path of a branching tree of five.
Exact      the scores of a row have the same bits whether it runs in a step of 17 rows or of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from .. import _core
from ..errors import UnsupportedModelError
from .attention_hook import StepContext, running
from .place import CPU, Place

__all__ = ["Canary", "CanaryTokens", "canary_tokens", "eager_scores", "run_canary"]

# Largest difference from eager, as a share of the largest score. Wrong semantics (a sink left out,
# a window not applied, ALiBi dropped) show as several percent in any dtype.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

# Rows of the tree: 0 - 1 - 3 and 0 - 2 - 4.
_TREE_PARENTS = [-1, 0, 0, 1, 2]
_TREE_PATHS = [[0, 1, 3], [0, 2, 4]]
_PAGE_SIZE = 2
_CHAIN_ROWS = 17


@dataclass(frozen=True)
class CanaryTokens:
    """Fixed token ids spread over the vocabulary."""

    prompt: list[int]  # 3
    tree: list[int]  # 5
    chain: list[int]  # 17


@dataclass(frozen=True)
class Canary:
    """What the canary found out about a model it accepted."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    windows: tuple[int, ...]
    is_exact: bool
    largest_error: float  # share of the largest score


def canary_tokens(vocab_size: int) -> CanaryTokens:
    ids = [(i * 7919 + 13) % vocab_size for i in range(3 + 5 + _CHAIN_ROWS)]
    return CanaryTokens(ids[:3], ids[3:8], ids[8:])


@torch.inference_mode()
def eager_scores(model: torch.nn.Module, tokens: CanaryTokens) -> list[torch.Tensor]:
    """Reference scores: of the prompt [3, V], then of the prompt with each path of the tree."""
    sequences = [tokens.prompt]
    sequences += [tokens.prompt + [tokens.tree[i] for i in path] for path in _TREE_PATHS]
    scores = []
    device = next(model.parameters()).device
    for ids in sequences:
        output = model(input_ids=torch.tensor([ids], device=device), use_cache=False)
        scores.append(output.logits[0].float())
    return scores


def run_canary(
    forward: Callable[[Any, StepContext], torch.Tensor],
    *,
    num_layers: int,
    expected_windows: tuple[int, ...],
    dtype: torch.dtype,
    tokens: CanaryTokens,
    reference: list[torch.Tensor],
    place: Place = CPU,
) -> Canary:
    """Run the adapted model and compare. forward(plan, context) returns scores [R, V].

    Raises UnsupportedModelError with the reason when the model is not run faithfully.
    """
    context = StepContext(
        None, probe_layers=num_layers, probe_page_size=_PAGE_SIZE, probe_pages=16, place=place
    )
    # Shuffled and with gaps: a page that is taken for granted shows.
    page_table = [15, 2, 9, 4, 11, 6, 13, 0, 7, 3]

    def step(ids: list[int], kv_len: int, parents: list[int] | None = None) -> torch.Tensor:
        context.calls.clear()
        context.plan = _core.make_step_plan(
            [ids], parents=[parents or []], kv_len=[kv_len], page_table=[page_table]
        )
        with running(context):
            scores = forward(context.plan, context)
        _check_calls(context.calls, num_layers)
        return scores.clone()

    prompt_scores = step(tokens.prompt, 0)
    _check_windows(context, expected_windows)
    error = _compare("a prompt of three tokens", prompt_scores, reference[0], dtype)
    tree_scores = step(tokens.tree, 3, _TREE_PARENTS)
    for path, expected in zip(_TREE_PATHS, reference[1:], strict=True):
        found = tree_scores[path]
        error = max(error, _compare(f"tree path {path}", found, expected[3:], dtype))
    assert context.k_pages is not None
    _, _, kv_heads, _, head_dim = context.k_pages.shape
    return Canary(
        num_heads=context.num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kv_dtype=context.k_pages.dtype,
        windows=expected_windows,
        is_exact=_is_row_invariant(step, tokens.chain),
        largest_error=error,
    )


def _check_calls(calls: list[int], num_layers: int) -> None:
    if not calls:
        raise UnsupportedModelError(
            "its attention layers never called the registered attention function: the class runs "
            "an attention of its own (as ALiBi models do)"
        )
    if sorted(calls) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"the registered attention function was called for layers {sorted(calls)}, expected "
            f"each of 0..{num_layers - 1} once: some layers keep a state that is not paged K/V"
        )


def _check_windows(context: StepContext, expected: tuple[int, ...]) -> None:
    found = tuple(context.windows[layer] for layer in range(len(expected)))
    if found != expected:
        layer = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise UnsupportedModelError(
            f"layer {layer} has sliding_window = {expected[layer]} by the configuration but asks "
            f"the attention function for {found[layer]} (0: none): the window is applied through "
            "a mask, which the paged attention does not see"
        )


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    if found.shape != expected.shape:
        raise UnsupportedModelError(
            f"{what}: scores {list(found.shape)}, eager attention gives {list(expected.shape)}"
        )
    largest = float(expected.abs().max())
    error = float((found - expected).abs().max()) / max(largest, 1e-30)
    limit = _TOLERANCE[dtype]
    if not error <= limit:  # NaN fails too
        raise UnsupportedModelError(
            f"{what}: scores differ from transformers' eager attention by {error:.2g} of the "
            f"largest score, limit {limit:.2g} in {dtype}: the class does something that the "
            "attention function is not told"
        )
    return error


def _is_row_invariant(step: Callable[..., torch.Tensor], ids: list[int]) -> bool:
    whole = step(ids, 0)
    cuts = [0, 12, 13, len(ids)]
    parts = [step(ids[a:b], a) for a, b in pairwise(cuts)]
    return torch.equal(whole, torch.cat(parts))

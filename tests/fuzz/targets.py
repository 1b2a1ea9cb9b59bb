"""What is fuzzed: every raw operation of the extension, here, and its objects but the executors
(object_targets.py, drafter_targets.py).

A target builds valid arguments, damages some and calls. What it lets out is judged by child.py:
refusals are ValueError, TypeError, OverflowError or MemoryError; anything else is a finding.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hostile import Arguments, damaged, text_of

from specdec_ext import _core, _core_testing

R, H, G, K, P, S, B, V = 5, 4, 2, 16, 6, 4, 2, 37
REFUSALS = (ValueError, TypeError, OverflowError, MemoryError)

Target = Callable[[random.Random, Callable[[str], None]], None]
TARGETS: dict[str, Target] = {}


def target(function: Target) -> Target:
    TARGETS[function.__name__] = function
    return function


def attempt(note: Callable[[str], None], call: Callable[..., Any], arguments: Arguments) -> Any:
    """Calls with keywords; a refusal is as good as an answer."""
    named = ", ".join(f"{name}={text_of(value)}" for name, value in arguments.items())
    note(f"{getattr(call, '__name__', call)}({named})")
    with contextlib.suppress(*REFUSALS):
        return call(**arguments)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def _owner(name: str) -> Any:
    """The module that has it: the package's, or the one for tests."""
    return _core if hasattr(_core, name) else _core_testing


def operation(name: str, arguments: Callable[[random.Random], Arguments]) -> None:
    """A target for one function of the extension."""

    def run(rng: random.Random, note: Callable[[str], None]) -> None:
        attempt(note, getattr(_owner(name), name), damaged(rng, arguments(rng)))

    run.__name__ = name
    target(run)


def pages(layers: int = 0, dtype: torch.dtype = torch.float32) -> Arguments:
    shape = ((layers,) if layers else ()) + (P, G, S, K)
    return {
        "k_pages": torch.zeros(shape, dtype=dtype),
        "v_pages": torch.zeros(shape, dtype=dtype),
    }


def geometry() -> Arguments:
    return {
        "page_table": torch.tensor([[3, 1, 99], [0, -5, 7]], dtype=torch.int32),
        "kv_len": i32(5, 0),
        "cu_rows": i32(0, 3, 5),
    }


def rows(heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(R, heads, K).to(dtype)


def some_dtype(rng: random.Random) -> torch.dtype:
    return rng.choice([torch.float32, torch.bfloat16, torch.float16])


def attention(rng: random.Random) -> Arguments:
    dtype = some_dtype(rng)
    arguments = {
        "q": rows(H, dtype), **pages(dtype=some_dtype(rng)), **geometry(),
        "out": rows(H, dtype), "scale": 0.25, "exact": rng.random() < 0.5,
        "max_depth": rng.choice([2, 127]), "sliding_window": rng.choice([0, 3]), "softcap": 0.0,
    }  # fmt: skip
    if rng.random() < 0.6:
        arguments["mask"] = torch.tensor([[1], [3], [5], [1], [3]], dtype=torch.int32)
    if rng.random() < 0.3:
        arguments.update(sinks=torch.zeros(H), status=zeros(B), max_rows=3, max_kv_len=8)
    if rng.random() < 0.2:
        for name in ("k_pages", "v_pages"):
            arguments[name] = torch.zeros(P, G, S, K).to(torch.float8_e4m3fn)
        arguments.update(k_scale=torch.ones(1), v_scale=torch.ones(1))
    return arguments


def append(rng: random.Random) -> Arguments:
    dtype = some_dtype(rng)
    return {"k": rows(G, dtype), "v": rows(G, dtype), **pages(dtype=some_dtype(rng)), **geometry()}


def rope_append(rng: random.Random) -> Arguments:
    return {
        "q": rows(H), **append(rng), "k": rows(G), "v": rows(G), "positions": i32(5, 6, 6, 0, 1),
        "q_out": rows(H), "cos": torch.ones(9, K // 2), "sin": torch.ones(9, K // 2),
        "q_norm": torch.ones(K), "k_norm": torch.ones(K), "interleaved": rng.random() < 0.5,
        "norm_eps": 1e-6,
    }  # fmt: skip


def compact(rng: random.Random) -> Arguments:
    return {
        **pages(2), **geometry(), "path": torch.tensor([[1, 2], [1, 0]]).int(),
        "path_len": i32(2, 1),
    }  # fmt: skip


def step(rng: random.Random) -> Arguments:
    return {
        "parents": i32(-1, 0, 0, -1, 0), **geometry(), "positions": zeros(R),
        "mask": zeros(R, 4), "is_tree": torch.zeros(B, dtype=torch.uint8),
        "slots": torch.zeros(R, dtype=torch.int64), "page_size": S, "num_pages": P,
        "max_depth": 127,
    }  # fmt: skip


def laws() -> Arguments:
    return {
        "temperature": torch.tensor([0.7, 0.0]), "top_k": i32(0, 5), "top_p": torch.ones(B),
        "min_p": torch.zeros(B), "seed": torch.tensor([1, -1]),
    }  # fmt: skip


def scored(rng: random.Random) -> Arguments:
    return {
        "scores": torch.randn(R, V).to(some_dtype(rng)), "cu_logits": i32(0, 3, 5),
        "positions": i32(4, 5, 5, 9, 10), **laws(),
    }  # fmt: skip


def decided() -> Arguments:
    return {
        "sampled": zeros(R), "path": zeros(B, 128), "path_len": zeros(B),
        "emitted": zeros(B, 128), "num_emitted": zeros(B),
    }  # fmt: skip


def drafted() -> Arguments:
    return {"tokens": i32(1, 2, 3, 4, 5), "parents": i32(-1, 0, 0, -1, 0)}


def accept(rng: random.Random) -> Arguments:
    arguments = {
        **scored(rng), **drafted(), **decided(), "acceptance": torch.tensor([1, 0]).byte(),
    }  # fmt: skip
    if rng.random() < 0.6:
        arguments["acceptance"] = torch.tensor([rng.randrange(5), rng.randrange(5)]).byte()
        arguments["probs"] = torch.full((R, V), 1 / V)
    if rng.random() < 0.3:
        arguments.update(
            probs=torch.full((R, 2), 0.5), vocab_ids=i32(2, 5), draft_columns=zeros(R),
            has_probs=torch.tensor([1, 0]).byte(), replacement=torch.tensor([0, 1]).byte(),
            posterior_threshold=torch.ones(B), posterior_alpha=torch.ones(B),
            acceptance_threshold=torch.full((B,), 0.5), status=zeros(B),
        )  # fmt: skip
    return arguments


def synthetic(rng: random.Random) -> Arguments:
    rates = torch.tensor([0.9, 0.5], dtype=torch.float64).view(torch.int64)
    return {
        "cu_logits": i32(0, 3, 5), "positions": i32(4, 5, 5, 9, 10), **drafted(), **decided(),
        "seed": torch.tensor([1, -1]), "synthetic_rates": rates, "vocab_size": V,
    }  # fmt: skip


def beams(rng: random.Random) -> Arguments:
    return {
        "tokens": zeros(B, 3, 4), "parents": zeros(B, 3, 4), "log_probs": torch.zeros(B, 3, 4),
        "reached": zeros(B),
    }  # fmt: skip


def grow(rng: random.Random) -> Arguments:
    depth = rng.choice([0, 1, 2])
    count = B if depth == 0 else B * 4
    return {
        "scores": torch.randn(count, 6), "columns": torch.randint(V, (count, 6)), **beams(rng),
        "depth": depth, "num_scores": V, "num_beams": i32(4, 2), "lengths": i32(3, 2),
        "next_rows": zeros(B, 4), "next_tokens": zeros(B, 4), "token_ids": zeros(V),
    }  # fmt: skip


def merge(rng: random.Random) -> Arguments:
    return {
        **beams(rng), "draft_tokens": zeros(B, 12), "draft_parents": zeros(B, 12),
        "counts": zeros(B),
    }  # fmt: skip


def packed(rng: random.Random) -> Arguments:
    dtype = some_dtype(rng)
    return {
        "x": torch.randn(R, K).to(dtype), "weight": torch.randn(V, K).to(dtype),
        "out": torch.zeros(R, V, dtype=dtype), "bias": torch.zeros(V, dtype=dtype),
    }  # fmt: skip


def norm(rng: random.Random) -> Arguments:
    dtype = some_dtype(rng)
    tensor = torch.randn(R, K).to(dtype)
    arguments: Arguments = {
        "x": tensor, "weight": torch.ones(K, dtype=dtype), "out": tensor.clone(), "eps": 1e-6,
    }  # fmt: skip
    if rng.random() < 0.5:
        arguments.update(added=tensor.clone(), added_weight=torch.ones(K, dtype=dtype))
    return arguments


def gated(rng: random.Random) -> Arguments:
    return {"x": torch.randn(R, K), "out": torch.zeros(R, K // 2), "activation": "silu"}


def scratch(rng: random.Random) -> Arguments:
    return {
        "dtype": "bfloat16", "kv_dtype": "bfloat16", "head_dim": 128, "num_heads": 8,
        "num_kv_heads": 2, "page_size": 64, "num_requests": 2, "num_rows": 8, "max_rows": 4,
        "max_kv_len": 4096, "aligned": True, "instance": None,
        "limits": _core.DeviceLimits(
            major=9, minor=0, num_sms=132, shared_bytes=232448, l2_bytes=50 * 2**20
        ),
    }  # fmt: skip


for _name, _arguments in {
    "spec_attention": attention, "append_kv": append, "rope_append_kv": rope_append,
    "compact_kv": compact, "build_step": step, "sample_rows": lambda rng: {
        **scored(rng), "out": zeros(R), "purpose": "token"}, "accept_step": accept,
    "synthetic_step": synthetic, "grow_beams": grow, "merge_step_beams": merge, "linear": packed,
    "rms_norm": norm, "gated_activation": gated, "plan_workspace": scratch,
    "argmax": lambda rng: {"scores": torch.randn(R, V).to(some_dtype(rng)), "out": zeros(R)},
    "pack_mask": lambda rng: {"mask": torch.ones(R, 40).bool(), "out": zeros(R, 2)},
    "mask_from_parents": lambda rng: {"parents": [-1, 0, 1, 0]},
    "tree_depths": lambda rng: {"parents": i32(-1, 0, 1, 0).numpy()},
    "tree_mask": lambda rng: {"parents": i32(-1, 0, 1, 0).numpy()},
    "tree_path": lambda rng: {"parents": i32(-1, 0, 1, 0).numpy(), "node": 2},
    "validate_tree": lambda rng: {"tokens": i32(1, 2).numpy(), "parents": i32(-1, 0).numpy(),
                                  "vocab_size": 9},
    "accept_greedy": lambda rng: {"tokens": i32(1, 2).numpy(), "parents": i32(-1, 0).numpy(),
                                  "sampled": i32(2, 3).numpy(), "max_path": 3},
    "accept_drafts": lambda rng: {
        "tokens": [1, 2], "parents": [-1, 0], "scores": np.zeros((3, V), np.float32), "seed": 1,
        "position": 4, "acceptance": "rejection", "temperature": 0.7, "top_k": 3, "top_p": 0.9,
        "min_p": 0.0, "probs": torch.full((2, V), 1 / V), "replacement": False,
        "posterior_threshold": 0.1, "posterior_alpha": 0.3, "acceptance_threshold": 1.0},
    "sample_token": lambda rng: {"scores": np.zeros(V, np.float32), "u": 0.3, "temperature": 0.7,
                                 "top_k": 3, "top_p": 0.9, "min_p": 0.0},
    "accept_scratch_bytes": lambda rng: {"num_requests": 2, "vocab_size": V, "has_probs": True},
    "linear_scratch_bytes": lambda rng: {"rows": 2, "columns": V, "depth": K, "dtype": "float32",
                                         "backend": "cpu"},
    "lookahead_bytes": lambda rng: {"w": 4, "n": 3, "g": 4, "max_seq_len": 64},
    "lookahead_max_draft_len": lambda rng: {"w": 4, "n": 3, "g": 4},
    "token_uniform": lambda rng: {"seed": 1, "position": 2},
    "set_num_threads": lambda rng: {"num_threads": 1},
    "device_limits": lambda rng: {"backend": "cpu", "device": 0},
    "backend_memory": lambda rng: {"backend": "cpu"},
}.items():  # fmt: skip
    if hasattr(_owner(_name), _name):
        operation(_name, _arguments)

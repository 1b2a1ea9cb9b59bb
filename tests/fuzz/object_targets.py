"""Fuzzed objects: plans, decoders, searches, pools, tables, slots; see targets.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hostile import Arguments, damaged, hostile
from targets import G, H, K, P, S, V, attempt, i32, pages, some_dtype, target, zeros

from specdec_ext import _core, _core_testing

# -- plans ----------------------------------------------------------------------------------------


def plan_arguments(rng: random.Random) -> Arguments:
    return {
        "tokens": [[1, 2, 3], [4]], "parents": rng.choice([[], [[-1, 0, 0], []]]),
        "kv_len": [5, 0], "page_table": [[1, 3], [2]], "logits_for_all_rows": True,
        "needs_logits": False,
    }  # fmt: skip


def filled_arguments(rng: random.Random) -> Arguments:
    return {
        "plan": _core.StepPlan(max_requests=4, max_rows=16, max_pages_per_request=4),
        "tokens": i32(1, 2, 3, 4), "positions": i32(5, 6, 6, 0), "parents": i32(-1, 0, 0, -1),
        "mask": torch.tensor([[1, 0, 0, 0], [3, 0, 0, 0], [5, 0, 0, 0], [1, 0, 0, 0]]).int(),
        "cu_rows": i32(0, 3, 4), "kv_len": i32(5, 0), "is_tree": torch.tensor([1, 0]).byte(),
        "page_table": torch.tensor([[1, 3], [2, 0]]).int(), "logit_rows": i32(0, 1, 2, 3),
        "cu_logits": i32(0, 3, 4), "page_size": S, "num_pages": P, "needs_logits": False,
    }  # fmt: skip


def some_plan(rng: random.Random, note: Callable[[str], None]) -> Any:
    if rng.random() < 0.6:
        return attempt(note, _core.make_step_plan, damaged(rng, plan_arguments(rng)))
    arguments = damaged(rng, filled_arguments(rng))
    attempt(note, _core.fill_step_plan, arguments)
    return arguments["plan"]


@target
def step_attention(rng: random.Random, note: Callable[[str], None]) -> None:
    plan = some_plan(rng, note)
    arguments = {
        "plan": plan, "layer": 1, "q": torch.randn(4, H, K), "out": torch.zeros(4, H, K),
        **pages(2), "scale": 0.25, "sliding_window": 0, "softcap": 0.0, "sinks": torch.zeros(H),
    }  # fmt: skip
    attempt(note, _core.step_attention, damaged(rng, arguments))


@target
def step_append_kv(rng: random.Random, note: Callable[[str], None]) -> None:
    arguments = {
        "plan": some_plan(rng, note), "layer": 1, "k": torch.randn(4, G, K),
        "v": torch.randn(4, G, K), **pages(2),
    }  # fmt: skip
    attempt(note, _core.step_append_kv, damaged(rng, arguments))


# -- the decoder ----------------------------------------------------------------------------------


def decoder_arguments(rng: random.Random) -> Arguments:
    return {
        "vocab_size": V, "hidden_size": 12, "intermediate_size": 20, "num_layers": 2,
        "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "max_rows": 8, "max_position": 32,
        "rms_norm_eps": 1e-5, "activation": "silu", "attention_scale": 0.3,
        "attention_softcap": 0.0, "final_softcap": rng.choice([0.0, 3.0]),
        "embedding_scale": 1.0, "norm_offset": 0.0, "has_qk_norm": False,
        "has_sandwich_norms": False, "tie_word_embeddings": rng.random() < 0.5,
        "rope_index": [0, -1], "sliding_window": [0, 4], "head_size": 0,
    }  # fmt: skip


def layer_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {
        "input_layernorm": (12,), "post_attention_layernorm": (12,), "self_attn.q_proj": (16, 12),
        "self_attn.k_proj": (8, 12), "self_attn.v_proj": (8, 12), "self_attn.o_proj": (12, 16),
        "mlp.gate_proj": (20, 12), "mlp.up_proj": (20, 12), "mlp.down_proj": (12, 20),
    }  # fmt: skip
    return {f"{name}.weight": torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def some_decoder(rng: random.Random, note: Callable[[str], None], wild: bool) -> Any:
    """A decoder that is ready to run; with `wild`, some of its parts are hostile."""
    change = damaged if wild else lambda _, given: given
    arguments = change(rng, decoder_arguments(rng))
    decoder = attempt(note, _core.LlamaDecoder, arguments)
    if decoder is None:
        return None
    dtype = some_dtype(rng)
    table = torch.ones(32, 4)
    embedding = torch.randn(V, 12).to(dtype)
    attempt(note, decoder.set_embedding, change(rng, {"weight": embedding}))
    attempt(note, decoder.set_head, change(rng, {"weight": embedding}))
    attempt(note, decoder.set_final_norm, change(rng, {"weight": torch.ones(12)}))
    attempt(note, decoder.set_rope, change(rng, {"index": 0, "cos": table, "sin": table}))
    for layer in range(2):
        tensors = change(rng, layer_tensors(dtype))
        attempt(note, decoder.set_layer, change(rng, {"layer": layer, "tensors": tensors}))
    shape = (2, P, 1, S, 8)
    attempt(
        note,
        decoder.bind_cache,
        change(rng, {"k_pages": torch.zeros(shape), "v_pages": torch.zeros(shape)}),
    )
    return decoder


@target
def llama_decoder(rng: random.Random, note: Callable[[str], None]) -> None:
    decoder = some_decoder(rng, note, wild=rng.random() < 0.5)
    if decoder is None:
        return
    plan = some_plan(rng, note)
    out = rng.choice([zeros(4), torch.zeros(4, V)])
    arguments = {"plan": plan, "out": out, "hidden": torch.zeros(4, 12)}
    attempt(note, decoder.forward, damaged(rng, arguments))
    attempt(note, decoder.embed, damaged(rng, {"tokens": i32(1, 2), "out": torch.zeros(2, 12)}))
    attempt(
        note,
        decoder.score_rows,
        damaged(rng, {"hidden": torch.zeros(3, 12), "out": torch.zeros(3, V)}),
    )
    attempt(
        note,
        decoder.unpack_head_rows,
        damaged(rng, {"ids": i32(1, 2), "out": torch.zeros(2, 12)}),
    )


@target
def packed_linear(rng: random.Random, note: Callable[[str], None]) -> None:
    weight = torch.randn(V, 13).to(some_dtype(rng))
    linear = attempt(
        note, _core.PackedLinear, damaged(rng, {"weight": weight, "bias": torch.zeros(V)})
    )
    if linear is None:
        return
    x, out = torch.randn(4, 13).to(some_dtype(rng)), torch.zeros(4, V, dtype=some_dtype(rng))
    attempt(note, linear.run, damaged(rng, {"x": x, "out": out}))
    attempt(note, linear.unpack_rows, damaged(rng, {"ids": i32(0, 36), "out": torch.zeros(2, 13)}))


# -- searches, pools and tables -------------------------------------------------------------------


@target
def beam_search(rng: random.Random, note: Callable[[str], None]) -> None:
    search = _core_testing.BeamSearch()
    start = {"num_beams": [2, 3], "lengths": [3, 2], "temperatures": [1.0, 0.5],
             "keeps_laws": [True, False]}  # fmt: skip
    attempt(note, search.start, damaged(rng, start))
    for _ in range(3):
        count = search.num_rows
        whole = {"scores": torch.randn(count, V), "token_ids": None}
        attempt(note, search.advance, damaged(rng, whole))
    attempt(note, search.tree, damaged(rng, {"request": 0}))
    limits = {"request": 0, "max_drafts": 5, "num_scores": V}
    attempt(note, search.tree_laws, damaged(rng, limits))


@target
def ngram_index(rng: random.Random, note: Callable[[str], None]) -> None:
    index = attempt(
        note, _core_testing.NgramIndex, damaged(rng, {"max_seq_len": 64, "max_ngram": 3})
    )
    if index is None:
        return
    history = np.array([1, 2, 3, 1, 2, 3, 1], np.int32)
    for _ in range(3):
        attempt(note, index.extend, damaged(rng, {"history": history}))
        attempt(note, index.lookup, damaged(rng, {"history": history, "max_draft_len": 4}))
        history = np.concatenate([history, history[-2:]])


@target
def ngram_batch(rng: random.Random, note: Callable[[str], None]) -> None:
    sizes = {"num_sequences": 2, "max_seq_len": 64, "max_ngram": 3}
    batch = attempt(note, _core_testing.NgramBatch, damaged(rng, sizes))
    if batch is None:
        return
    for _ in range(4):
        given = {
            "tokens": np.ones((2, 4), np.int32), "counts": np.array([4, 2], np.int32),
            "drafts": np.zeros((2, 5), np.int32), "lengths": np.zeros(2, np.int32),
        }  # fmt: skip
        changed = damaged(rng, given)
        attempt(
            note,
            batch.propose,
            {k: v.numpy() if isinstance(v, torch.Tensor) and can_be_array(v) else v
             for k, v in changed.items()},
        )  # fmt: skip
        attempt(note, batch.clear, damaged(rng, {"sequence": 0}))


def can_be_array(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or tensor.requires_grad or tensor.dtype == torch.bfloat16)


@target
def shared_ngram_pool(rng: random.Random, note: Callable[[str], None]) -> None:
    sizes = {"capacity_tokens": 64, "max_ngram": 3, "max_salts": 2}
    pool = attempt(note, _core_testing.SharedNgramPool, damaged(rng, sizes))
    if pool is None:
        return
    text = np.array([1, 2, 3, 1, 2, 3, 1], np.int32)
    for _ in range(3):
        given = {"salt": rng.choice("abc"), "text": text, "begin": 0, "end": 7}
        attempt(note, pool.publish, damaged(rng, given))
        look = {"salt": "a", "history": text, "max_draft_len": 5}
        attempt(note, pool.lookup, damaged(rng, look))


@target
def lookahead(rng: random.Random, note: Callable[[str], None]) -> None:
    given = {"w": 4, "n": 3, "g": 4, "prompt": [1, 2, 3, 1, 2], "seed": 1, "pool_grams": 64}
    state = attempt(note, _core_testing.Lookahead, damaged(rng, given))
    if state is None:
        return
    tokens: Any = None
    for _ in range(3):
        sampled = [] if tokens is None else [rng.randrange(V) for _ in range(len(tokens[0]))]
        update = {"sampled": sampled, "accepted": [rng.randrange(V)]}
        attempt(note, state.update, damaged(rng, update))
        limits = {"golden": 2, "window_rows": 3, "guesses": 2, "max_drafts": 9, "max_depth": 3}
        tokens = attempt(note, state.draft, damaged(rng, limits))
    attempt(note, state.pool_entries, damaged(rng, {"key": 2}))
    for name in ("emitted_rows", "fill", "prefill", "tail", "window"):
        getattr(state, name)


@target
def page_table(rng: random.Random, note: Callable[[str], None]) -> None:
    sizes = {"num_pages": 8, "page_size": 4, "num_slots": 3, "max_pages_per_slot": 4,
             "enable_block_reuse": rng.random() < 0.5, "hash_bits": 64}  # fmt: skip
    table = attempt(note, _core_testing.PageTable, damaged(rng, sizes))
    if table is None:
        return
    tokens = list(range(12))
    for _ in range(8):
        slot, count = rng.randrange(3), rng.randrange(17)
        calls: list[tuple[Callable[..., Any], Arguments]] = [
            (table.open, {"slot": slot, "cache_salt": "s"}),
            (table.match, {"tokens": tokens, "cache_salt": "s"}),
            (table.attach, {"slot": slot, "tokens": tokens}),
            (table.reserve, {"slot": slot, "tokens": count}),
            (table.commit, {"slot": slot, "length": count}),
            (table.publish, {"slot": slot, "tokens": tokens[:count]}),
            (table.rewind, {"slot": slot}),
            (table.release, {"slot": slot}),
            (table.pages, {"slot": slot}),
            (table.length, {"slot": slot}),
            (table.shared_tokens, {"slot": slot}),
        ]
        call, given = rng.choice(calls)
        attempt(note, call, damaged(rng, given))
    table.check_integrity()


# -- slots ----------------------------------------------------------------------------------------

METHODS = ("none", "lookahead", "ngram", "proposed")


@target
def slots(rng: random.Random, note: Callable[[str], None]) -> None:
    """A short life of two requests in slots, with damaged calls in between.

    A slot's bytes are the extension's own memory: they are written by `request_bytes` and the
    operations, never by the fuzzer.
    """
    method = rng.choice(METHODS)
    sizes = {"method": method, "max_seq_len": 32, "lookahead": (4, 3, 4),
             "max_matching_ngram_size": 2}  # fmt: skip
    layout = attempt(note, _core.SlotLayout, damaged(rng, sizes))
    if layout is None or layout.slot_bytes > 2**24:
        return
    pool = torch.zeros(3, layout.slot_bytes, dtype=torch.uint8)
    pool = pool if pool.data_ptr() % 16 == 0 else torch.zeros(3, layout.slot_bytes).byte()
    for slot in range(2):
        entry = {
            "prompt_ids": [1, 2, 3, 1, 2], "max_tokens": 9, "eos_token_ids": [7],
            "stop_token_ids": [8], "speculative": True, "lookahead": (4, 3, 4),
            "max_draft_len": 4, "seed": 3,
        }  # fmt: skip
        data = attempt(note, layout.request_bytes, damaged(rng, entry))
        if data is not None and len(data) <= layout.slot_bytes:
            pool[slot, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    ids = i32(0, 1)
    shared = {"layout": layout, "slots": pool, "slot_ids": ids}

    def call(function: Any, own: Arguments) -> None:
        changed = {**shared, **damaged(rng, own)}
        if rng.random() < 0.2:
            name = rng.choice(["layout", "slot_ids"])
            changed[name] = hostile(rng, changed[name])
        attempt(note, function, changed)

    cu_rows, kv_len = zeros(3), zeros(2)
    path, path_len = zeros(2, 128), zeros(2)
    results = zeros(2, layout.result_words)
    for _ in range(3):
        call(_core.commit_step, {
            "cu_logits": i32(0, 1, 2), "sampled": i32(rng.randrange(V), rng.randrange(V)),
            "results": results, "path": path, "path_len": path_len,
        })  # fmt: skip
        call(_core.propose_drafts, {
            "tokens": torch.ones(2, 4).int(), "parents": torch.tensor([[-1, 0, 0, 2]] * 2).int(),
            "counts": i32(4, 2), "vocab_size": V,
        })  # fmt: skip
        call(_core.recent_tokens, {
            "tokens": zeros(2, 4), "lens": zeros(2), "room": zeros(2), "max_drafts": i32(3, 3),
        })  # fmt: skip
        call(_core.draft_step, {
            "tokens": zeros(40), "parents": zeros(40), "cu_rows": cu_rows, "kv_len": kv_len,
            "max_drafts": i32(5, 5), "window_rows": i32(2, 2), "guesses": i32(2, 2),
        })  # fmt: skip
        total = int(cu_rows[2]) if 0 <= int(cu_rows[2]) <= 40 else 0
        call(_core.commit_step, {
            "cu_logits": cu_rows.clone(), "sampled": torch.randint(V, (total,)).int(),
            "results": results, "path": path, "path_len": path_len,
            "accepted_path": zeros(2, 128), "accepted_path_len": zeros(2),
            "emitted": zeros(2, 128), "num_emitted": i32(1, 1),
        })  # fmt: skip
        call(_core.keep_hidden, {
            "cu_logits": cu_rows.clone(), "results": results, "path": path, "path_len": path_len,
            "hidden": torch.zeros(max(total, 1), 6), "kept": torch.zeros(3, 6),
        })  # fmt: skip

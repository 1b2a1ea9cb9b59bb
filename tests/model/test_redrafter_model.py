"""The recurrent drafter's module and checkpoints, and the embedding rows it asks of a target."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import ADAPTED, NATIVE, edit_json
from safetensors.torch import load_file, save_file

from host_weights import redrafter_weights
from reference.redrafter_reference import Network
from specdec_ext import _core_testing
from specdec_ext.drafters.redrafter.checkpoint import read_redrafter_shape
from specdec_ext.drafters.redrafter.model import (
    Redrafter,
    RedrafterShape,
    load_redrafter,
    save_redrafter,
)
from specdec_ext.drafters.redrafter.packed_model import PackedRedrafter
from specdec_ext.errors import ModelError, UnsupportedModelError
from specdec_ext.models import load_model

SHAPES = {
    "apple": RedrafterShape(31, 6, 12, 2, True),
    "projected": RedrafterShape(31, 6, 8, 1, True),
    "no rnn": RedrafterShape(31, 6, 7, 2, False),
    "no blocks": RedrafterShape(31, 6, 12, 0, True),
    "tied": RedrafterShape(31, 6, 6, 1, True, tie_lm_head=True),
    "reduced": RedrafterShape(31, 6, 8, 1, True, draft_vocab_size=9),
    "reduced tied": RedrafterShape(31, 6, 6, 2, True, tie_lm_head=True, draft_vocab_size=9),
}


def make(shape: RedrafterShape, seed: int = 0, std: float = 0.6) -> Redrafter:
    torch.manual_seed(seed)
    ids = None
    if shape.draft_vocab_size is not None:
        ids = torch.randperm(shape.vocab_size)[: shape.draft_vocab_size].sort().values.int()
    model = Redrafter(shape, ids)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model.requires_grad_(False)


def shape_for(name: str, target: Any) -> RedrafterShape:
    """SHAPES' network for a target of other sizes."""
    shape, hidden = SHAPES[name], target.hidden_size
    exits = {6: hidden, 12: 2 * hidden}
    return dataclasses.replace(
        shape,
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        exit_dim=exits.get(shape.exit_dim, hidden + shape.exit_dim),
    )


@pytest.mark.parametrize("name", SHAPES)
def test_network_equals_the_reference(name: str) -> None:
    shape = SHAPES[name]
    model = make(shape).double()
    weights = {n: w.tolist() for n, w in model.state_dict().items()}
    network = Network({**vars(shape)}, weights)
    head = torch.randn(shape.draft_vocab_size or shape.vocab_size, shape.exit_dim).double()
    own = not shape.tie_lm_head
    rows = weights[f"lm_head.{shape.num_draft_layers}.weight"] if own else head.tolist()
    context, embeddings = torch.randn(3, 6).double(), torch.randn(4, 3, 6).double()
    state = model.initial_state(3)
    expected = [[0.0] * 6 for _ in range(3)]
    for step in embeddings:
        state = model.next_state(state, step)
        expected = [network.next_state(s, e) for s, e in zip(expected, step.tolist(), strict=True)]
        torch.testing.assert_close(state.tolist(), expected, rtol=1e-12, atol=1e-12)
        scores = model.scores(model.features(context, state), None if own else head)
        wanted = [network.scores(c, s, rows)
                  for c, s in zip(context.tolist(), expected, strict=True)]  # fmt: skip
        torch.testing.assert_close(scores.tolist(), wanted, rtol=1e-12, atol=1e-12)


class EmbeddingTarget:
    """A target of which a drafter needs the embedding table and the head alone."""

    def __init__(self, shape: RedrafterShape, dtype: torch.dtype) -> None:
        self.hidden_size, self.vocab_size, self.kv_dtype = (
            shape.hidden_size,
            shape.vocab_size,
            dtype,
        )
        self.table = torch.randn(shape.vocab_size, shape.hidden_size)
        self.rows = torch.randn(shape.vocab_size, shape.hidden_size)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids.long()]

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows[ids.long()]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.rows.T


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SHAPES)
def test_packed_network_scores_every_beam_as_the_module(
    native: Any, name: str, dtype: torch.dtype
) -> None:
    """Three requests of different beams and lengths: each row continues the row it extends."""
    target = native(dtype)
    model = make(shape_for(name, target), seed=7, std=0.1)
    packed = PackedRedrafter(redrafter_weights(model), target)
    every = torch.arange(target.vocab_size)
    module, table = model.double(), target.embed(every).double()
    own = not model.shape.tie_lm_head
    head = None
    if not own:
        head = target.head_rows(every if model.token_ids is None else model.token_ids).double()
    context = torch.randn(3, model.shape.hidden_size)
    tokens = torch.tensor([4, 0, 30], dtype=torch.int32)
    search = _core_testing.BeamSearch()
    search.start([1, 4, 2], [3, 2, 5])
    _core_testing.start_network(packed.core, list(context), tokens.tolist())
    state = module.initial_state(3).double()
    context = context.double()
    depths = 0
    while search.num_rows:
        if depths:
            parents = torch.from_numpy(search.row_parents).long()
            context, state = context[parents], state[parents]
            tokens = torch.from_numpy(search.row_tokens)
        state = module.next_state(state, table[tokens.long()])
        expected = module.scores(module.features(context, state), head)
        found = torch.from_numpy(_core_testing.score_network(packed.core, search)).double()
        error = float((found - expected).abs().max() / expected.abs().max())
        assert error < (3e-2 if dtype == torch.bfloat16 else 2e-6)
        _core_testing.advance_network(packed.core, search, packed.token_ids)
        depths += 1
    assert depths == 5


def searched(packed: PackedRedrafter, context: torch.Tensor, by_depth: bool, **rule: Any) -> Any:
    search = _core_testing.BeamSearch()
    search.start([1, 4, 2], [3, 2, 5])
    _core_testing.start_network(packed.core, list(context), [4, 0, 30])
    if not by_depth:
        return search, _core_testing.run_network(
            packed.core,
            search,
            packed.token_ids,
            rule.get("gains", []),
            rule.get("pass_seconds", 0.0),
        )
    passes = 0
    while search.num_rows and passes < rule.get("passes", 99):
        _core_testing.score_network(packed.core, search)
        _core_testing.advance_network(packed.core, search, packed.token_ids)
        passes += 1
    return search, passes


@pytest.mark.parametrize("name", SHAPES)
def test_a_search_in_one_call_is_the_search_depth_by_depth(native: Any, name: str) -> None:
    target = native(torch.float32)
    model = make(shape_for(name, target), seed=3, std=0.1)
    packed = PackedRedrafter(redrafter_weights(model), target)
    context = torch.randn(3, model.shape.hidden_size)
    endless = [1e9] * 4
    for gains, passes in (([], 5), (endless, 5), ([0.0], 1), ([1e9, 0.0], 2), ([1e9, 1e9], 5)):
        expected, _ = searched(packed, context, True, passes=passes)
        found, cost = searched(packed, context, False, gains=gains, pass_seconds=1.0)
        assert cost.passes == passes and cost.rows >= 3 + 2 * (passes - 1)
        assert cost.network_thread_seconds > 0 and 0 < cost.network_seconds <= cost.seconds
        for r in range(3):
            for a, b in zip(found.tree(r), expected.tree(r), strict=True):
                assert (a == b).all()
    # A search whose rows have no candidate ends at once.
    _, cost = searched(packed, context * float("nan"), False)
    assert cost.passes == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SHAPES)
def test_saved_and_loaded_again(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(SHAPES[name])
    save_redrafter(model, tmp_path, dtype=dtype, extra={"trained_on": "nothing"})
    assert json.loads((tmp_path / "config.json").read_text())["trained_on"] == "nothing"
    assert read_redrafter_shape(tmp_path) == SHAPES[name]
    again = load_redrafter(tmp_path)
    assert again.shape == SHAPES[name] and not again.training
    assert set(again.state_dict()) == set(model.state_dict())
    for key, value in model.state_dict().items():
        expected = value.to(dtype).float() if value.is_floating_point() else value
        assert torch.equal(again.state_dict()[key], expected)


def test_every_spelling_of_the_reference(tmp_path: Path) -> None:
    model = make(SHAPES["projected"])
    save_redrafter(model, tmp_path, dtype=torch.float32)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for projection, head in (("input_proj", "lm_head"), ("input_projs", "lm_heads"),
                             ("input_proj", "0")):  # fmt: skip
        renamed = {
            name.replace("input_proj", projection).replace("lm_head", head): value
            for name, value in tensors.items()
        }
        save_file(renamed, file)
        loaded = load_redrafter(tmp_path).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in tensors.items())
    save_file({**tensors, "input_projs.bias": tensors["input_proj.bias"].clone()}, file)
    with pytest.raises(ModelError, match="two spellings of the same weight"):
        load_redrafter(tmp_path)


def damage_nan(folder: Path) -> None:
    change(folder, "rnn_u.bias", lambda t: t.fill_(float("nan")))


def change(folder: Path, name: str, edit: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    value = edit(tensors.pop(name))
    if value is not None:
        tensors[name] = value
    save_file(tensors, file)


def drop(name: str) -> Any:
    return lambda folder: change(folder, name, lambda t: None)


def extra(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), "lm_head.7.weight": torch.zeros(2)}, file)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


def fields(**changes: Any) -> Any:
    return lambda folder: edit_json(folder / "config.json", **changes)


DAMAGE: dict[str, tuple[Any, str]] = {
    "NaN weights": (damage_nan, r"'rnn_u\.bias' holds 6 NaN or infinite values; .*refused"),
    "infinite weights": (
        lambda f: change(f, "lm_head.1.weight", lambda t: t.fill_(float("inf"))), "infinite values",
    ),
    "no projection": (drop("input_proj.bias"), r"'input_proj\.bias' \[8\] is missing"),
    "no recurrence": (drop("rnn_w.weight"), r"'rnn_w\.weight' \[6, 6\] is missing"),
    "no head": (drop("lm_head.1.weight"), r"lm_head\.1\.weight' \[9, 8\] is missing.*tie_lm_head"),
    "no ids": (drop("token_ids"), r"'token_ids' \[9\] is missing"),
    "an extra tensor": (extra, r"'lm_head\.7\.weight' \[2\].*has no place"),
    "pickle": (pickled, "pickle checkpoints can run code and are refused"),
    "truncated": (truncated, "not a complete safetensors file"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "configuration is missing"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    "other hidden size": (fields(hidden_size=7), r"shape \[8, 12\], config\.json asks for \[8, 14"),
    "other vocabulary": (fields(draft_vocab_size=10), r"'token_ids' is int32 \[9\]"),
    "too small a vocabulary": (fields(vocab_size=12), "increasing token ids within 0..11"),
    "more scores than tokens": (fields(draft_vocab_size=32), r"draft_vocab_size = 32.* 1\.\.31"),
    "no rnn field": (fields(rnn=None), "rnn = None: expected true or false"),
    "exit_dim 0": (fields(exit_dim=0), "exit_dim = 0: expected an integer"),
    "layers -1": (fields(num_draft_layers=-1), "num_draft_layers = -1"),
    "layers True": (fields(num_draft_layers=True), "num_draft_layers = True"),
    "tied without the size": (fields(tie_lm_head=True), "tie_lm_head with exit_dim = 8"),
    "another architecture": (fields(model_type="llama"), "model_type = 'llama'"),
    "ids out of order": (
        lambda f: change(f, "token_ids", lambda t: t.flip(0).contiguous()), "increasing token ids",
    ),
    "ids twice": (lambda f: change(f, "token_ids", lambda t: t.fill_(3)), "increasing token ids"),
    "ids too large": (lambda f: change(f, "token_ids", lambda t: t + 31), r"within 0\.\.30"),
    "ids as floats": (lambda f: change(f, "token_ids", lambda t: t.float()), "expected int32"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_one_error(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    save_redrafter(make(SHAPES["reduced"]), tmp_path, dtype=torch.float32)
    damage(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_redrafter(tmp_path)


def test_pickle_where_it_is_allowed(tmp_path: Path) -> None:
    model = make(SHAPES["projected"])
    save_redrafter(model, tmp_path, dtype=torch.float32)
    pickled(tmp_path)
    loaded = load_redrafter(tmp_path, allow_pickle=True).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_a_missing_folder_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_redrafter(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="is a file"):
        load_redrafter(tmp_path / "file")


def test_saving_refuses_what_the_dtype_cannot_hold(tmp_path: Path) -> None:
    model = make(SHAPES["apple"])
    model.rnn_w.weight[0, 0] = 1e5
    with pytest.raises(ModelError, match=r"'rnn_w\.weight' holds values that are not finite in"):
        save_redrafter(model, tmp_path / "new", dtype=torch.float16)
    with pytest.raises(ModelError, match="extra field 'rnn' is the drafter's own"):
        save_redrafter(model, tmp_path, dtype=torch.float32, extra={"rnn": False})


def test_ids_and_their_number_go_together() -> None:
    with pytest.raises(ModelError, match="go together"):
        Redrafter(SHAPES["reduced"])
    with pytest.raises(ModelError, match="go together"):
        Redrafter(SHAPES["apple"], torch.arange(4))


def test_a_foreign_model_type_is_unsupported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "medusa"}')
    with pytest.raises(UnsupportedModelError, match="medusa"):
        load_redrafter(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "gemma3", "gpt2"])
def test_embedding_rows_are_those_of_the_checkpoint(
    saved: Any, family: str, impl: str, dtype: str
) -> None:
    if impl == "native" and family not in NATIVE:
        assert family in ADAPTED
        return
    target = load_model(saved(family).folder, model_impl=impl, dtype=dtype)
    table = saved(family).model.get_input_embeddings().weight
    ids = torch.tensor([3, 198, 0, 3, 57], dtype=torch.int32)
    rows = target.embed(ids)
    assert rows.dtype == torch.float32 and rows.is_contiguous()
    assert torch.equal(rows, table[ids.long()].to(getattr(torch, dtype)).float())
    assert target.embed(ids[:0]).shape == (0, 64)
    for bad in (-1, 199):
        with pytest.raises((ValueError, IndexError)):
            target.embed(torch.tensor([bad], dtype=torch.int32))

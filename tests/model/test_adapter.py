"""The transformers adapter: families it runs, families it refuses, and what it checks."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from model_zoo import ADAPTED, NATIVE, REFUSED, edit_json, make_model, save_model
from plan_builder import Driver, Sequence, hf_greedy, hf_scores, prompt_ids
from safetensors.torch import load_file, save_file

from specdec_ext.errors import ModelError, UnsupportedModelError
from specdec_ext.models import attention_hook, load_model
from specdec_ext.models.attention_hook import StepContext, paged_attention, running
from specdec_ext.models.packed_modules import PackedLinear

NUM_TOKENS = 36
# Their experts multiply matrices in groups whose size is that of the step.
FAST = {"gpt_oss", "qwen3_moe"}


def load(folder, **options):
    model = load_model(folder, model_impl="transformers", **options)
    assert model.impl == "transformers"
    return model


@pytest.mark.parametrize("family", sorted(ADAPTED) + sorted(NATIVE))
def test_greedy_equals_transformers(saved, family):
    reference = saved(family)
    prompts = [prompt_ids(length, seed) for seed, length in enumerate((2, 19))]
    expected = [hf_greedy(reference.model, prompt, NUM_TOKENS) for prompt in prompts]
    model = load(reference.folder)
    assert model.numerics == ("fast" if family in FAST else "exact")
    assert Driver(model).greedy(prompts, NUM_TOKENS) == expected
    assert Driver(model, page_size=1, seed=3).greedy([prompts[1]], NUM_TOKENS, chunk=5) == [
        expected[1]
    ]


@pytest.mark.parametrize("family", ["phi3", "gemma2", "cohere", "granite", "gpt_neox"])
def test_tree_rows_equal_their_paths(saved, family):
    """A branching tree across the sliding window, in one batch with another request."""
    model = load(saved(family).folder)
    prompt = prompt_ids(9, 2)
    rows, parents = [11, 12, 13, 14, 15, 16, 17], [-1, 0, 0, 1, 2, 2, 4]
    paths = [[0, 1, 3], [0, 2, 4, 6], [0, 2, 5]]
    driver = Driver(model)
    target = Sequence()
    driver.scores([(target, prompt)])
    tree = driver.scores([(Sequence(), [3, 4, 5]), (target, rows)], [[], parents])[1]
    for path in paths:
        ids = prompt + [rows[i] for i in path]
        expected = hf_scores(saved(family).model, ids)[len(prompt) :]
        torch.testing.assert_close(tree[path], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "phi3", "olmo2", "starcoder2", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_means_the_same_bits_in_every_company(saved, family, dtype):
    model = load(saved(family).folder, dtype=dtype)
    assert model.numerics == "exact" and model.kv_dtype == getattr(torch, dtype)
    prompt, tail = prompt_ids(13, 2), prompt_ids(6, 9)
    alone = Driver(model, page_size=1, seed=1)
    sequence = Sequence()
    expected = torch.cat([alone.scores([(sequence, [t])])[0] for t in prompt + tail])
    packed = Driver(model, page_size=8, seed=2)
    target = Sequence()
    together = packed.scores([(Sequence(), prompt_ids(17, 30)), (target, prompt)])[1]
    assert torch.equal(together, expected[:13])
    rows = [tail[0], 50, tail[1], tail[2], 51, tail[3], 52, tail[4], tail[5]]
    tree = packed.scores([(target, rows)], [[-1, 0, 0, 2, 1, 3, 4, 5, 7]], keep=False)[0]
    assert torch.equal(tree[[0, 2, 3, 5, 7, 8]], expected[13:])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", "position_ids"),
        ("falcon", "never called the registered attention function"),
        ("gptj", "never called the registered attention function"),
        ("mamba", "does not describe a decoder with attention layers"),
        ("t5", "encoder-decoder"),
        ("bert", "is not causal"),
    ],
)
def test_refused(saved, family, reason):
    assert family in REFUSED
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        load(saved(family).folder)
    assert str(saved(family).folder) in str(error.value)


def test_ignoring_the_sinks_would_be_found(saved, monkeypatch):
    """The canary on a model whose attention is told something that the function drops."""
    real = attention_hook._core.step_attention

    def without_sinks(*args, **kwargs):
        kwargs["sinks"] = None
        return real(*args, **kwargs)

    monkeypatch.setattr(attention_hook._core, "step_attention", without_sinks)
    with pytest.raises(UnsupportedModelError, match="differ from transformers' eager attention"):
        load(saved("gpt_oss").folder)


@pytest.mark.parametrize(
    "mistake",
    ["scale", "softcap", "tree", "twice", "never", "window"],
)
def test_the_canary_finds_a_wrong_attention(saved, monkeypatch, mistake):
    """Every way the attention function could be wrong must stop the load."""
    core, real = attention_hook._core, attention_hook._core.step_attention
    hook = paged_attention

    def attention(plan, layer, q, out, *pages, **kwargs):
        if mistake == "scale":
            kwargs["scale"] *= 1.5
        elif mistake == "softcap":
            kwargs["softcap"] = 0.0
        elif mistake == "tree" and len(set(plan.parents.tolist())) < plan.num_rows:
            plan = core.make_step_plan(
                [plan.tokens.tolist()],
                kv_len=plan.kv_len.tolist(),
                page_table=plan.page_table.tolist(),
            )
        real(plan, layer, q, out, *pages, **kwargs)

    def wrapped(module, query, key, value, mask, **kwargs):
        if mistake == "twice":
            hook(module, query, key, value, mask, **kwargs)
        if mistake == "window":
            kwargs["sliding_window"] = None
        if mistake == "never" and module.layer_idx == 1:
            return query.transpose(1, 2).contiguous(), None
        return hook(module, query, key, value, mask, **kwargs)

    monkeypatch.setattr(core, "step_attention", attention)
    monkeypatch.setattr(attention_hook, "paged_attention", wrapped)
    reason = {
        "twice": "each of 0..2 once", "never": "each of 0..2 once",
        "window": "layer 0 has sliding_window = 6",
    }.get(mistake, "differ from transformers' eager attention")  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=reason):
        load(saved("gemma2").folder)


def test_more_than_the_function_knows_is_refused():
    module = torch.nn.Module()
    module.layer_idx = 0
    x = torch.zeros(1, 2, 3, 8)

    def call(**changes):
        arguments = {"scaling": 1.0, "attention_mask": None, **changes}
        mask = arguments.pop("attention_mask")
        with running(StepContext(None, probe_layers=1, probe_pages=4, probe_page_size=2)):
            paged_attention(module, x, arguments.pop("key", x), x, mask, **arguments)

    for changes, reason in (
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "passes an attention mask"),
        ({"is_causal": False}, "is not causal"),
        ({"dropout": 0.1}, "asks for dropout"),
        ({"position_bias": torch.zeros(3)}, "passes position_bias = Tensor"),
        ({"head_mask": torch.ones(2)}, "passes head_mask"),
        ({"key": torch.zeros(1, 2, 3, 16)}, "one head_dim"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            call(**changes)
    with pytest.raises(RuntimeError, match="outside of a step"):
        paged_attention(module, x, x, x, None)
    del module.layer_idx
    with pytest.raises(UnsupportedModelError, match="layer_idx"):
        call()


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, 64),
        (
            {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
             "long_factor": [2.0] * 8, "factor": 2.0, "original_max_position_embeddings": 32},
            32,
        ),
    ],
)  # fmt: skip
def test_length_dependent_rope_stops_at_its_original_length(saved, rope, limit):
    reference = saved("llama", rope_parameters=rope, max_position_embeddings=64)
    model = load(reference.folder)
    assert model.max_position == limit
    assert any(rope["rope_type"] in warning for warning in model.info.warnings)
    prompt = prompt_ids(5, 1)
    count = limit - len(prompt)
    assert Driver(model).greedy([prompt], count) == [hf_greedy(reference.model, prompt, count)]


def test_chunked_attention_is_refused(saved, tmp_path):
    folder = shutil.copytree(saved("cohere2").folder, tmp_path / "model")
    edit_json(
        folder / "config.json",
        layer_types=["chunked_attention", "full_attention", "full_attention", "full_attention"],
    )
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        load(folder)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "truncated", "pickle"])
def test_damaged_checkpoints(saved, tmp_path, damage):
    folder = shutil.copytree(saved("phi3").folder, tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "extra":
        tensors["model.layers.1.mlp.extra.weight"] = torch.zeros(3)
    elif damage == "shape":
        tensors[name] = torch.zeros(64, 95)
    reason = {
        "missing": r"down_proj\.weight.*is missing from the checkpoint",
        "extra": r"mlp\.extra\.weight.*has no place",
        "shape": r"down_proj\.weight' has shape \[64, 95\], config\.json asks for \[64, 96\]",
        "truncated": "not a complete safetensors file",
        "pickle": "allow_pickle=True",
    }[damage]
    save_file(tensors, path, metadata={"format": "pt"})
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    if damage == "pickle":
        path.unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
        load(folder, allow_pickle=True)
    with pytest.raises(ModelError, match=reason):
        load(folder)


def test_nan_weights_warn(saved, tmp_path):
    model = copy.deepcopy(saved("phi3").model)
    model.model.embed_tokens.weight.data[77, 3] = float("nan")
    save_model(model, tmp_path)
    loaded = load(tmp_path)
    assert any("embed_tokens" in warning for warning in loaded.info.warnings)
    driver = Driver(loaded)
    plan = driver._plan([(Sequence(), [5, 77])], None, True, False)
    ids = loaded.forward(plan).tolist()
    assert ids[0] >= 0 and ids[1] == -1


def test_two_models_at_once_keep_their_pages_apart(saved):
    first, second = load(saved("phi3").folder), load(saved("olmo2").folder)
    prompt = prompt_ids(6, 1)
    a, b = Driver(first), Driver(second)
    expected = [hf_greedy(saved(f).model, prompt, 8) for f in ("phi3", "olmo2")]
    assert [a.greedy([prompt], 8)[0], b.greedy([prompt], 8)[0]] == expected
    assert a.greedy([prompt], 8)[0] == expected[0]


def test_forward_needs_pages(saved):
    model = load(saved("phi3").folder)
    with pytest.raises(ModelError, match=r"before bind_cache"):
        model.forward(None)


def test_packed_linear_replaces_linear_for_code_that_looks_at_it():
    torch.manual_seed(0)
    linear = torch.nn.Linear(24, 40)
    packed = PackedLinear(linear.weight, linear.bias)
    x = torch.randn(2, 5, 24)
    torch.testing.assert_close(packed(x), linear(x))
    assert packed(x[..., ::1].transpose(0, 1)).shape == (5, 2, 40)
    strided = torch.randn(24, 7).t()
    torch.testing.assert_close(packed(strided), linear(strided))
    assert packed.weight.shape == (40, 24) and packed.weight.dtype == torch.float32
    # Whoever computes with it gets NaN, which the canary refuses.
    assert packed.weight.isnan().all()
    assert (packed.in_features, packed.out_features) == (24, 40)
    assert packed(torch.empty(0, 24)).shape == (0, 40)


def test_code_in_the_folder_never_runs(saved, tmp_path):
    folder = shutil.copytree(saved("phi3").folder, tmp_path / "model")
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert load(folder).info.architecture == "Phi3ForCausalLM"


def test_loading_is_silent(saved, capfd):
    load(saved("phi3").folder)
    assert capfd.readouterr() == ("", "")


def test_seed_of_the_caller_is_not_touched(saved):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load(saved("phi3").folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_of_a_saved_model_are_not_written(saved):
    """Swapping layers works on copies: the file can be mapped read-only."""
    path = saved("phi3").folder / "model.safetensors"
    before = path.read_bytes()
    load(saved("phi3").folder)
    assert path.read_bytes() == before


def test_make_model_is_deterministic():
    a, b = make_model("phi3"), make_model("phi3")
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))

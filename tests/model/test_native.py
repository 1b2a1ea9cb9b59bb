"""The native decoder against transformers: the same greedy text, and scores as close as torch's."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from model_zoo import NATIVE, edit_json, make_model, save_model, to_v4_keys
from plan_builder import Driver, Sequence, hf_greedy, hf_scores, prompt_ids

from specdec_ext.errors import ModelError
from specdec_ext.models import load_model

NUM_TOKENS = 40

ROPE = {
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16, "rope_theta": 1e4,
    },
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24,
        "rope_theta": 1e4,
    },
}  # fmt: skip


def load(folder, **options):
    model = load_model(folder, model_impl="native", max_rows=64, **options)
    assert (model.impl, model.numerics) == ("native", "exact")
    return model


@pytest.mark.parametrize("family", sorted(NATIVE))
def test_greedy_equals_transformers(saved, family):
    reference = saved(family)
    prompts = [prompt_ids(length, seed) for seed, length in enumerate((1, 9, 23))]
    expected = [hf_greedy(reference.model, prompt, NUM_TOKENS) for prompt in prompts]
    model = load(reference.folder)
    assert Driver(model).greedy(prompts, NUM_TOKENS) == expected
    # Prompts in chunks, other pages, one at a time: the same text.
    driver = Driver(model, page_size=1, seed=5)
    for prompt, text in zip(prompts, expected, strict=True):
        assert driver.greedy([prompt], NUM_TOKENS, chunk=4) == [text]


@pytest.mark.parametrize("name", sorted(ROPE))
def test_rope_types_beyond_the_original_length(saved, name):
    reference = saved("llama", rope_parameters=ROPE[name], max_position_embeddings=24)
    # dynamic: transformers gives the whole prompt the frequencies of its last token; only what is
    # decoded beyond the original length is a function of the position alone.
    prompt = prompt_ids(20, 3)
    expected = hf_greedy(reference.model, prompt, NUM_TOKENS)
    model = load(reference.folder)
    if name == "llama3":  # the one type that states its full length
        assert model.max_position == 24
        return
    assert model.max_position >= 72
    assert Driver(model).greedy([prompt], NUM_TOKENS) == [expected]
    assert model.info.rope_types == (name,)


def test_llama3_rope(saved):
    reference = saved("llama", rope_parameters=ROPE["llama3"], max_position_embeddings=128)
    prompt = prompt_ids(20, 3)
    assert Driver(load(reference.folder)).greedy([prompt], NUM_TOKENS) == [
        hf_greedy(reference.model, prompt, NUM_TOKENS)
    ]


@pytest.mark.parametrize("share", [0.5, 0.75])
@pytest.mark.parametrize("long", [False, True])
def test_phi3_rotates_parts_of_heads_up_to_the_original_length(saved, share, long):
    """With one list of factors, as Phi-4-mini does."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    if long:
        factors = [1.0 + 0.3 * i for i in range(int(8 * share))]
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors[::-1]}
    reference = saved("phi3", rope_parameters=rope, original_max_position_embeddings=48)
    model = load(reference.folder)
    assert model.max_position == (48 if long else 256)
    assert any("48 of 256 positions" in note for note in model.info.warnings) == long
    assert not load(reference.folder, max_seq_len=48).info.warnings
    prompt = prompt_ids(20, 3)
    expected = hf_greedy(reference.model, prompt, 28)
    assert Driver(model).greedy([prompt], 28) == [expected]
    adapted = load_model(reference.folder, model_impl="transformers", max_rows=64)
    assert Driver(adapted).greedy([prompt], 28) == [expected]


def test_longrope_of_another_family_and_its_older_name(saved, tmp_path):
    factors = [1.0 + 0.2 * i for i in range(8)]
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors,
        "long_factor": [4.0] * 8, "factor": 4.0, "original_max_position_embeddings": 48,
    }  # fmt: skip
    prompt = prompt_ids(20, 3)
    reference = saved("llama", rope_parameters=rope, max_position_embeddings=192)
    model = load(reference.folder)
    assert (model.max_position, model.info.rope_types) == (48, ("longrope",))
    text = hf_greedy(reference.model, prompt, 28)
    assert Driver(model).greedy([prompt], 28) == [text]
    short = shutil.copytree(reference.folder, tmp_path / "short")
    edit_json(short / "config.json", rope_parameters={**rope, "short_factor": factors[1:]})
    with pytest.raises(ModelError, match="short_factor has 7 numbers: expected 8"):
        load(short)
    phi3 = saved("phi3", rope_parameters=rope, original_max_position_embeddings=48)
    old = shutil.copytree(phi3.folder, tmp_path / "old")
    scaling = {"type": "su", "factor": 4.0, "short_factor": factors, "long_factor": [4.0] * 8}
    edit_json(old / "config.json", rope_parameters=None, rope_theta=1e4, rope_scaling=scaling)
    expected = hf_greedy(phi3.model, prompt, 28)
    assert Driver(load(phi3.folder)).greedy([prompt], 28) == [expected]
    assert Driver(load(old)).greedy([prompt], 28) == [expected]


def test_phi3_as_its_authors_wrote_it(saved, tmp_path):
    """Fields of the code that came with the first folders; transformers' class reads none."""
    reference = saved("phi3_window")
    folder = shutil.copytree(reference.folder, tmp_path / "model")
    edit_json(
        folder / "config.json", attention_bias=False, mlp_bias=False, lm_head_bias=False,
        full_attn_mod=1, interpolate_factor=1,
        auto_map={"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    )  # fmt: skip
    model = load(folder)
    assert model.info.sliding_window == 7 and model.layer_windows == (7, 7, 7)
    prompt = prompt_ids(20, 3)
    assert Driver(model).greedy([prompt], 20) == [hf_greedy(reference.model, prompt, 20)]


def test_gemma3_with_scaled_full_attention(saved):
    reference = saved(
        "gemma3",
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    )
    prompt = prompt_ids(20, 3)
    model = load(reference.folder)
    assert model.info.rope_types == ("default", "linear")
    assert Driver(model).greedy([prompt], NUM_TOKENS) == [
        hf_greedy(reference.model, prompt, NUM_TOKENS)
    ]


@pytest.mark.parametrize(
    "family", ["llama_tied", "mistral_window", "qwen2", "qwen3", "gemma3", "phi3_window"]
)
def test_v4_config_decodes_the_same(saved, family, tmp_path):
    reference = saved(family)
    folder = shutil.copytree(reference.folder, tmp_path / "v4")
    if family == "gemma3":
        edit_json(folder / "config.json", layer_types=None, sliding_window_pattern=3)
    to_v4_keys(folder)
    prompt = prompt_ids(15, 1)
    assert Driver(load(folder)).greedy([prompt], NUM_TOKENS) == [
        hf_greedy(reference.model, prompt, NUM_TOKENS)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_scores_are_as_close_as_torch(saved, family, dtype):
    """err(ours) <= 2 err(torch in the same dtype) + rounding, both against float64 on the weights
    as the dtype holds them."""
    torch_dtype = getattr(torch, dtype)
    rounded = copy.deepcopy(saved(family).model).to(torch_dtype)
    ids = prompt_ids(30, 7)
    theirs = hf_scores(rounded, ids).double()
    exact = hf_scores(rounded.double(), ids)
    model = load(saved(family).folder, dtype=dtype)
    assert model.kv_dtype == torch_dtype and model.info.dtype == dtype
    driver = Driver(model)
    ours = driver.scores([(Sequence(), ids)])[0].double()
    largest = exact.abs().max()
    limit = 2 * (theirs - exact).abs().max() + 2 * torch.finfo(torch_dtype).eps * largest
    assert (ours - exact).abs().max() <= limit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2_window"])
def test_a_row_has_the_same_bits_in_every_company(saved, family, dtype):
    model = load(saved(family).folder, dtype=dtype)
    prompt, tail = prompt_ids(13, 2), prompt_ids(6, 9)
    alone = Driver(model, page_size=1, seed=1)
    sequence = Sequence()
    expected = [alone.scores([(sequence, [token])])[0] for token in prompt + tail]
    # All at once, beside two others, other pages.
    others = [(Sequence(), prompt_ids(17, 30)), (Sequence(), prompt_ids(1, 31))]
    packed = Driver(model, page_size=8, seed=2)
    target = Sequence()
    together = packed.scores([others[0], (target, prompt), others[1]])[1]
    assert torch.equal(together, torch.cat(expected[:13]))
    # The tail as one branch of a tree whose other branch is wrong: rows 0, 2, 3, 5, 7, 8 are it.
    rows = [tail[0], 50, tail[1], tail[2], 51, tail[3], 52, tail[4], tail[5]]
    parents = [-1, 0, 0, 2, 1, 3, 4, 5, 7]
    tree = packed.scores([(target, rows)], [parents], keep=False)[0]
    assert torch.equal(tree[[0, 2, 3, 5, 7, 8]], torch.cat(expected[13:]))


def test_greedy_ids_are_the_argmax_of_the_scores(saved):
    model = load(saved("gemma2").folder)  # the ids go through the soft cap
    ids = prompt_ids(20, 4)
    scores = Driver(model).scores([(Sequence(), ids)])[0]
    driver = Driver(model)
    plan = driver._plan([(Sequence(), ids)], None, True, False)
    assert model.forward(plan).tolist() == scores.argmax(-1).tolist()


def test_a_processor_without_kernels_is_told_of_once(saved, monkeypatch, caplog):
    from specdec_ext.models import native

    def told():
        return [r.getMessage() for r in caplog.records if "plain C++" in r.getMessage()]

    native._warn_of_plain_kernels.cache_clear()
    load(saved("llama").folder)
    assert not told()
    monkeypatch.setattr(native._core, "cpu_isa", lambda: "plain")
    for _ in range(2):
        load(saved("llama").folder)
    assert told() == [
        "products run in plain C++, many times slower: this processor has no AVX2 (or "
        "SPECDEC_CPU_ISA rules it out)"
    ]
    native._warn_of_plain_kernels.cache_clear()


def test_nan_weights_warn_and_give_no_token(saved, tmp_path):
    model = copy.deepcopy(saved("llama").model)
    model.model.embed_tokens.weight.data[77, 3] = float("nan")
    save_model(model, tmp_path)
    loaded = load(tmp_path)
    assert len(loaded.info.warnings) == 1 and "embed_tokens" in loaded.info.warnings[0]
    driver = Driver(loaded)
    plan = driver._plan([(Sequence(), [5, 77])], None, True, False)
    ids = loaded.forward(plan).tolist()
    assert ids[0] >= 0 and ids[1] == -1


def test_sharded_checkpoint_decodes_the_same(saved, tmp_path):
    reference = saved("llama")
    save_model(reference.model, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    prompt = prompt_ids(9, 1)
    assert Driver(load(tmp_path)).greedy([prompt], 16) == [hf_greedy(reference.model, prompt, 16)]


def test_info(saved):
    model = load(saved("qwen2_window").folder)
    info = model.info
    assert info.architecture == "Qwen2ForCausalLM" and info.sliding_window == 5
    assert info.num_parameters == saved("qwen2_window").model.num_parameters()
    assert (info.eos_token_ids, info.bos_token_id, info.pad_token_id) == ((2,), 1, 0)
    linear = info.num_parameters - info.vocab_size * info.hidden_size  # the untied embedding
    assert 0.9 * 4 * linear <= info.weight_bytes <= 2.5 * 4 * linear
    assert json.loads(json.dumps(info.to_dict()))["impl"] == "native"


def test_bind_cache_checks_its_pages(saved):
    model = load(saved("llama").folder)
    good = torch.zeros(3, 5, 2, 4, 16)
    model.bind_cache(good, good.clone())
    for bad in (good[:2], good[:, :, :1], good[..., :8], good[0], good.transpose(1, 3)):
        with pytest.raises(ModelError, match="k_pages"):
            model.bind_cache(bad, good)
    with pytest.raises(ModelError, match=r"float64, the model needs float32"):
        model.bind_cache(good.double(), good.double())
    with pytest.raises(ModelError, match="differ in shape"):
        model.bind_cache(good, torch.zeros(3, 6, 2, 4, 16))


def test_max_seq_len_limits_the_tables(saved):
    model = load(saved("llama").folder, max_seq_len=32)
    assert model.max_position == 32
    driver = Driver(model)
    with pytest.raises(ValueError, match="position"):
        driver.greedy([prompt_ids(30, 1)], 5)


@pytest.mark.parametrize("damage", ["missing", "shape", "extra"])
def test_weights_that_do_not_fit_the_config(saved, tmp_path, damage):
    folder = shutil.copytree(saved("llama").folder, tmp_path / "model")
    changes = {
        "missing": {"num_hidden_layers": 4},
        "shape": {"intermediate_size": 128},
        "extra": {"num_hidden_layers": 2},
    }[damage]
    edit_json(folder / "config.json", **changes)
    reason = {
        "missing": r"'model\.layers\.3\.input_layernorm\.weight' \[64\] is missing",
        "shape": r"gate_proj\.weight' has shape \[96, 64\], config\.json asks for \[128, 64\]",
        "extra": r"'model\.layers\.2\..*has no place",
    }[damage]
    with pytest.raises(ModelError, match=reason):
        load(folder)


def test_matrices_of_phi3_that_do_not_fit(saved, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(saved("phi3").folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    qkv, gate_up = (f"model.layers.1.{n}_proj.weight" for n in ("self_attn.qkv", "mlp.gate_up"))
    for changed, reason in (
        ({qkv: tensors[qkv][1:]},
         r"self_attn\.qkv_proj\.weight' has shape \[127, 64\], config\.json asks for \[128, 64\]"),
        ({gate_up: tensors[gate_up][:, :32]}, r"gate_up_proj\.weight' has shape \[192, 32\]"),
        ({gate_up: None}, r"'model\.layers\.1\.mlp\.gate_up_proj\.weight' \[192, 64\] is missing"),
        ({"model.layers.1.mlp.up_proj.weight": torch.zeros(96, 64)}, r"up_proj\.weight'.*no place"),
    ):  # fmt: skip
        kept = {k: v.contiguous() for k, v in {**tensors, **changed}.items() if v is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=reason):
            load(folder)


def tied_with(folder, head):
    """A tied model whose file also holds `head`; transformers' own reading of it."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    save_model(make_model("llama_tied"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = head(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def other_head(table):
    return torch.randn(table.shape, generator=torch.Generator().manual_seed(1)) * 0.3


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_tied_checkpoint_that_also_holds_the_head(tmp_path, model_impl):
    """The same head again is the embedding; another one is a head of its own, as transformers has
    it. It is looked at anew when the file changes."""
    prompt = prompt_ids(9, 1)
    for head, ties in ((torch.clone, True), (other_head, False), (torch.clone, True)):
        reference = tied_with(tmp_path, head)
        model = load_model(tmp_path, model_impl=model_impl, max_rows=64)
        assert model.info.tie_word_embeddings == ties
        assert Driver(model).greedy([prompt], 16) == [hf_greedy(reference, prompt, 16)]


def test_a_head_of_its_own_in_another_shape_or_type(tmp_path):
    tied_with(tmp_path, lambda table: table.half().float())
    prompt = prompt_ids(9, 1)
    expected = Driver(load(tmp_path)).greedy([prompt], 16)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path)
    assert not model.info.tie_word_embeddings
    assert Driver(model).greedy([prompt], 16) == expected
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"].float()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load(tmp_path).info.tie_word_embeddings  # the same numbers
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:50]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lm_head.weight' has shape \[50, 64\]"):
        load(tmp_path)


def test_a_pickle_with_another_head_is_refused(tmp_path):
    model = make_model("llama_tied")
    model.config.save_pretrained(tmp_path)
    state = model.state_dict()
    torch.save(state, tmp_path / "pytorch_model.bin")
    load(tmp_path, allow_pickle=True)
    state["lm_head.weight"] = other_head(state["lm_head.weight"])
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"lm_head.weight' is not 'model.embed_tokens.weight'"):
        load(tmp_path, allow_pickle=True)


@pytest.mark.default_model
def test_default_model_equals_transformers(default_model_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model_path, local_files_only=True)
    reference = AutoModelForCausalLM.from_pretrained(
        default_model_path, dtype=torch.float32, local_files_only=True
    )
    texts = ["def fibonacci(n):\n", "The three primary colours are"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    expected = [hf_greedy(reference, prompt, 32) for prompt in prompts]
    model = load(default_model_path, dtype="float32", max_seq_len=256)
    assert Driver(model, page_size=16).greedy(prompts, 32) == expected

"""The fused decoder against transformers, layer by layer of every family, and against itself.

`transformers` in float32 is the reference for values; the decoder's own bits for one request alone,
one row at a time, are the reference for everything that speculation changes: rows per step, trees,
chunks, batches, pages, threads.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers

from specdec_ext import _core

PAGE = 4
MAX_POSITION = 96
MAX_ROWS = 160

SMALL = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-untied-bias": (
        transformers.LlamaConfig,
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "llama-mha-odd": (
        transformers.LlamaConfig,
        {"intermediate_size": 77, "num_key_value_heads": 6, "vocab_size": 33},
    ),
    "llama-mqa": (transformers.LlamaConfig, {"num_key_value_heads": 1}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 7}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "smollm3": (transformers.SmolLM3Config, {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "phi3": (transformers.Phi3Config, {"sliding_window": 7, "pad_token_id": 0}),
    "gemma2": (
        transformers.Gemma2Config,
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 13,
            "sliding_window": 5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24},
    ),
}


def build_reference(family: str, dtype: torch.dtype) -> torch.nn.Module:
    config_class, changes = FAMILIES[family]
    torch.manual_seed(7)
    config = config_class(
        **{**SMALL, "tie_word_embeddings": True, **changes}, attn_implementation="eager"
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.2)  # transformers starts biases at 0 and norms at 1:
            elif "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)  # a test could not tell them apart
    return model.to(dtype).eval()


def build_decoder(model: torch.nn.Module, max_rows: int = MAX_ROWS) -> _core.LlamaDecoder:
    config = model.config
    kind = config.model_type
    gemma = kind.startswith("gemma")
    layers = model.model.layers
    head_dim = layers[0].self_attn.head_dim
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    tables = [None] if kind != "gemma3_text" else sorted(set(types))
    rope_index = [0 if kind != "gemma3_text" else tables.index(t) for t in types]
    if kind == "smollm3":
        rope_index = [0 if use else -1 for use in config.no_rope_layers]
    window = getattr(config, "sliding_window", None) or 0
    if kind in ("qwen2", "qwen3", "smollm3"):
        window = 0
    sliding = [
        window if kind in ("mistral", "phi3") or t == "sliding_attention" else 0 for t in types
    ]
    embedding = model.get_input_embeddings().weight.detach()
    decoder = _core.LlamaDecoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=len(layers),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        max_rows=max_rows,
        max_position=MAX_POSITION,
        rms_norm_eps=config.rms_norm_eps,
        activation="gelu_tanh" if gemma else "silu",
        attention_scale=layers[0].self_attn.scaling,
        attention_softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        final_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
        embedding_scale=(
            float(torch.tensor(config.hidden_size**0.5, dtype=embedding.dtype)) if gemma else 1.0
        ),
        norm_offset=1.0 if gemma else 0.0,
        has_qk_norm=kind in ("qwen3", "gemma3_text"),
        has_sandwich_norms=gemma,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_index=rope_index,
        sliding_window=sliding,
    )
    positions = torch.arange(MAX_POSITION)[None]
    probe = torch.zeros(1, dtype=torch.float32)
    for index, layer_type in enumerate(tables):
        args = () if layer_type is None else (layer_type,)
        cos, sin = model.model.rotary_emb(probe, positions, *args)
        half = cos.shape[-1] // 2
        decoder.set_rope(index, cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
    for index, layer in enumerate(layers):
        decoder.set_layer(index, layer_state(layer, config, head_dim))
    decoder.set_embedding(embedding)
    if not config.tie_word_embeddings:
        decoder.set_head(model.lm_head.weight.detach())
    decoder.set_final_norm(model.model.norm.weight.detach())
    return decoder


def layer_state(layer: torch.nn.Module, config, head_dim: int) -> dict[str, torch.Tensor]:
    """By the decoder's names; phi3 has q, k and v in one matrix, and gate and up in another."""
    state = {n: p.detach() for n, p in layer.state_dict().items()}
    if config.model_type == "phi3":
        heads = [config.num_attention_heads, *[config.num_key_value_heads] * 2]
        qkv = state.pop("self_attn.qkv_proj.weight").split([n * head_dim for n in heads])
        state |= {f"self_attn.{n}_proj.weight": p for n, p in zip("qkv", qkv, strict=True)}
        gate, up = state.pop("mlp.gate_up_proj.weight").chunk(2)
        state |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    return state


class Session:
    """A decoder with its own pages; requests own disjoint, shuffled pages."""

    def __init__(self, model: torch.nn.Module, kv_dtype: torch.dtype, seed: int = 0, page=PAGE):
        self.decoder = build_decoder(model)
        self.vocab = model.config.vocab_size
        attention = model.model.layers[0].self_attn
        self.per_request = -(-2 * MAX_POSITION // page)
        shape = (
            len(model.model.layers),
            4 * self.per_request,
            model.config.num_key_value_heads,
            page,
            attention.head_dim,
        )
        self.k = torch.full(shape, float("nan"), dtype=kv_dtype)
        self.v = torch.full(shape, float("nan"), dtype=kv_dtype)
        self.decoder.bind_cache(self.k, self.v)
        order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(seed)).tolist()
        self.pages = [order[i::4] for i in range(4)]

    def step(self, *requests, ids: bool = False) -> torch.Tensor:
        """requests: (slot, kv_len, tokens[, parents])."""
        plan = _core.make_step_plan(
            [list(r[2]) for r in requests],
            parents=[list(r[3]) if len(r) > 3 else [] for r in requests],
            kv_len=[r[1] for r in requests],
            page_table=[self.pages[r[0]] for r in requests],
        )
        rows = plan.num_logit_rows
        out = torch.empty(rows, dtype=torch.int32) if ids else torch.empty(rows, self.vocab)
        self.decoder.forward(plan, out)
        return out


def prompt(n: int, vocab: int, seed: int = 1) -> list[int]:
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str) -> None:
    model = build_reference(family, torch.float32)
    session = Session(model, torch.float32)
    tokens = prompt(40, session.vocab)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
        exact = model.double()(torch.tensor([tokens])).logits[0]
    got = session.step((0, 0, tokens))
    scale = exact.abs().max()
    ours, theirs = (got - exact).abs().max() / scale, (expected - exact).abs().max() / scale
    assert ours < max(4 * theirs, 4e-6), (ours, theirs)
    ids = session.step((1, 0, tokens), ids=True)
    assert torch.equal(ids.long(), got.argmax(-1))
    assert torch.equal(ids.long(), expected.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "llama-untied-bias", "llama-mha-odd", "gemma3"])
def test_half_precision_is_no_worse_than_transformers(family: str, dtype: torch.dtype) -> None:
    model = build_reference(family, dtype)
    session = Session(model, dtype)
    tokens = prompt(40, session.vocab)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].double()
        exact = model.double()(torch.tensor([tokens])).logits[0]
    got = session.step((0, 0, tokens))
    scale = exact.abs().max()
    ours, theirs = (got - exact).abs().max() / scale, (expected - exact).abs().max() / scale
    assert ours < 1.5 * theirs, (ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "mistral"])
def test_bits_do_not_depend_on_the_step(family: str, dtype: torch.dtype) -> None:
    model = build_reference(family, dtype)
    tokens = prompt(45, SMALL["vocab_size"])
    alone = Session(model, dtype)
    rows = [alone.step((0, i, [token]))[0] for i, token in enumerate(tokens)]
    expected = torch.stack(rows)

    whole = Session(model, dtype, seed=1, page=16)
    assert torch.equal(whole.step((2, 0, tokens)), expected)

    chunked = Session(model, dtype, seed=2, page=1)
    sizes, start = itertools.cycle([1, 12, 3, 13, 5]), 0
    while start < len(tokens):
        size = min(next(sizes), len(tokens) - start)
        assert torch.equal(
            chunked.step((1, start, tokens[start : start + size])), expected[start : start + size]
        )
        start += size

    batch = Session(model, dtype, seed=3)
    other = prompt(61, SMALL["vocab_size"], seed=5)
    batch.step((3, 0, other[:20]), (0, 0, tokens[:30]))
    out = batch.step((3, 20, other[20:]), (0, 30, tokens[30:]), (1, 0, tokens[:9]))
    assert torch.equal(out[41:56], expected[30:])
    assert torch.equal(out[56:], expected[:9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "llama-mha-odd"])
def test_bits_of_rows_that_take_several_runs(family: str, dtype: torch.dtype) -> None:
    """More than 128 rows go through gate, up and activation 120 at a time."""
    model = build_reference(family, dtype)
    prompts = [prompt(80, 33, seed) for seed in (1, 2)]
    together = Session(model, dtype).step((0, 0, prompts[0]), (1, 0, prompts[1][:79]))
    alone = Session(model, dtype, seed=1)
    assert torch.equal(together[:80], alone.step((0, 0, prompts[0])))
    assert torch.equal(together[80:], alone.step((1, 0, prompts[1][:79])))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tree_rows_equal_their_paths(family: str) -> None:
    model = build_reference(family, torch.float32)
    vocab = SMALL["vocab_size"]
    context = prompt(11, vocab)
    tree = prompt(14, vocab, seed=9)
    parents = [-1, 0, 0, 1, 2, 2, 4, 3, 0, 8, 9, 7, 10, 6]
    session = Session(model, torch.float32)
    session.step((0, 0, context))
    got = session.step((0, len(context), tree, parents))
    for row in range(len(tree)):
        path, node = [], row
        while node >= 0:
            path.append(tree[node])
            node = parents[node]
        plain = Session(model, torch.float32, seed=row)
        assert torch.equal(plain.step((1, 0, context + path[::-1]))[-1], got[row]), row


def test_nan_gives_no_token() -> None:
    model = build_reference("llama", torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[17] = float("nan")
    session = Session(model, torch.float32)
    # The embedding is also the head: every row has a NaN score for token 17.
    assert session.step((0, 0, [1, 2, 3]), ids=True).tolist() == [-1, -1, -1]


def test_errors_name_field_value_and_limit() -> None:
    model = build_reference("llama", torch.float32)
    session = Session(model, torch.float32)
    with pytest.raises(ValueError, match=r"tokens\[1\] = 199.*0\.\.198"):
        session.step((0, 0, [1, 199]))
    with pytest.raises(ValueError, match=r"positions\[0\] = 96"):
        session.step((0, MAX_POSITION, [1]))
    with pytest.raises(ValueError, match="161 rows"):
        session.step((0, 0, [1] * 161))
    decoder = build_decoder(model)
    state = dict(model.model.layers[0].state_dict())
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight: missing"):
        decoder.set_layer(0, {n: p for n, p in state.items() if "up_proj" not in n})
    with pytest.raises(ValueError, match=r"layers\.0\.extra: this decoder has no such weight"):
        decoder.set_layer(0, {**state, "extra": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"q_proj\.weight: shape must be \[48, 48\]"):
        decoder.set_layer(0, {**state, "self_attn.q_proj.weight": torch.zeros(49, 48)})
    with pytest.raises(ValueError, match="one dtype"):
        halves = {n: p.bfloat16() if "k_proj" in n else p for n, p in state.items()}
        decoder.set_layer(0, halves)
    with pytest.raises(ValueError, match="layer 3"):
        decoder.set_layer(3, state)
    fresh = _core.LlamaDecoder
    with pytest.raises(ValueError, match="num_heads = 5"):
        fresh(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=5,
            num_kv_heads=2, head_dim=8, max_rows=1, max_position=8, rms_norm_eps=1e-6,
            activation="silu", attention_scale=1.0, rope_index=[0], sliding_window=[0],
        )  # fmt: skip

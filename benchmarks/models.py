"""Random Llama models for the overhead and peer benchmarks: same weights for every program.

A model is written once, as an HF-format folder of fp32 safetensors under .data/models/; its config
uses the keys that transformers 4.34 (lade's) and 5.x both read. The rows of the head have lognormal
lengths, so that a few tokens are frequent, as in natural text; greedy decoding then falls into
loops now and then and drafts are accepted. The step counts are reported beside every figure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.datasets import DATA_DIR

# Standard deviation of the logarithm of a head row's length.
HEAD_SPREAD = 0.5


@dataclass(frozen=True)
class Shape:
    """Llama shape of a benchmark model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int


SHAPES: dict[str, Shape] = {
    # Everything but the loop around it costs nothing: what remains is the engine.
    "tiny": Shape(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=4096),
    # The draft model beside it.
    "tiny-draft": Shape(hidden=32, layers=1, heads=2, kv_heads=1, ffn=64, vocab=4096),
    # 57M parameters, the smallest shape whose forward dominates a step.
    "56m": Shape(hidden=512, layers=8, heads=8, kv_heads=8, ffn=1376, vocab=32000),
    "56m-draft": Shape(hidden=64, layers=1, heads=2, kv_heads=1, ffn=128, vocab=32000),
}


def config_of(shape: Shape) -> dict[str, object]:
    """Returns config.json of the shape, readable by transformers 4.34 and 5.x."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def make(name: str, seed: int = 1) -> Path:
    """Returns the folder of model `name`, writing it on first use (deterministic in `seed`)."""
    import torch
    from safetensors.torch import save_file

    folder = DATA_DIR / "models" / f"{name}-{seed}"
    if (folder / "model.safetensors").is_file():
        return folder
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    kv = shape.hidden // shape.heads * shape.kv_heads

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(shape.vocab, shape.hidden, generator=generator)
    }
    for i in range(shape.layers):
        at = f"model.layers.{i}."
        tensors[at + "self_attn.q_proj.weight"] = normal(shape.hidden, shape.hidden)
        tensors[at + "self_attn.k_proj.weight"] = normal(kv, shape.hidden)
        tensors[at + "self_attn.v_proj.weight"] = normal(kv, shape.hidden)
        tensors[at + "self_attn.o_proj.weight"] = normal(shape.hidden, shape.hidden)
        tensors[at + "mlp.gate_proj.weight"] = normal(shape.ffn, shape.hidden)
        tensors[at + "mlp.up_proj.weight"] = normal(shape.ffn, shape.hidden)
        tensors[at + "mlp.down_proj.weight"] = normal(shape.hidden, shape.ffn)
        tensors[at + "input_layernorm.weight"] = torch.ones(shape.hidden)
        tensors[at + "post_attention_layernorm.weight"] = torch.ones(shape.hidden)
    tensors["model.norm.weight"] = torch.ones(shape.hidden)
    lengths = torch.exp(HEAD_SPREAD * torch.randn(shape.vocab, 1, generator=generator))
    tensors["lm_head.weight"] = normal(shape.vocab, shape.hidden) * lengths
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=1))
    # Renamed when complete: an interrupted run leaves no truncated model behind.
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")
    return folder


def make_medusa(name: str, seed: int = 1) -> Path:
    """Returns the folder of four random Medusa heads on the output head of model `name`."""
    shape = SHAPES[name]
    config = {
        "model_type": "medusa",
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab,
        "num_medusa_heads": 4,
        "num_medusa_layers": 1,
        "lm_head": "target",
    }
    square = (shape.hidden, shape.hidden)
    sizes: dict[str, tuple[int, ...]] = {}
    for head in range(4):
        sizes |= {f"{head}.0.linear.weight": square, f"{head}.0.linear.bias": (shape.hidden,)}
    return _make_drafter(f"{name}-medusa-{seed}", config, sizes, "medusa_lm_head.safetensors", seed)


def make_redrafter(name: str, seed: int = 1) -> Path:
    """Returns the folder of a random recurrent drafter on the output head of model `name`."""
    shape = SHAPES[name]
    hidden, square = shape.hidden, (shape.hidden, shape.hidden)
    config = {
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": shape.vocab,
        "hidden_size": hidden,
        "exit_dim": hidden,
        "num_draft_layers": 1,
        "rnn": True,
        "tie_lm_head": True,
        "num_lookback_tokens": 0,
        "dtype": "float32",
    }
    sizes: dict[str, tuple[int, ...]] = {
        "input_proj.weight": (hidden, 2 * hidden), "input_proj.bias": (hidden,),
        "lm_head.0.linear.weight": square, "lm_head.0.linear.bias": (hidden,),
        "rnn_u.weight": square, "rnn_u.bias": (hidden,), "rnn_w.weight": square,
    }  # fmt: skip
    return _make_drafter(f"{name}-redrafter-{seed}", config, sizes, "model.safetensors", seed)


def _make_drafter(
    folder_name: str, config: dict[str, object], sizes: dict[str, tuple[int, ...]], file: str,
    seed: int,
) -> Path:  # fmt: skip
    """Writes random float32 tensors of these sizes on first use."""
    import torch
    from safetensors.torch import save_file

    folder = DATA_DIR / "models" / folder_name
    if (folder / file).is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(size, generator=generator) * 0.1 for name, size in sizes.items()}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    partial = folder / f"{file}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(folder / file)
    return folder


def random_prompt(vocab: int, length: int, seed: int) -> list[int]:
    """Returns `length` seeded random token ids above the special ones."""
    import random

    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(length)]

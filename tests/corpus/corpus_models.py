"""The corpus's models: tiny targets, draft models, heads and drafters, the same bytes everywhere.

Weights come from NumPy's frozen RandomState and are written as files in the formats that the
documents describe, so that neither a release of torch or transformers nor a module that moves can
change them.

A target is a successor table with noise. Its head answers the embedding of token t with FOLLOWS[t];
attention and the feed-forward layers, which read the whole history, disturb that often enough that
a wrong page, slot, mask bit or position changes the text. So a drafter that knows the table alone
is often right and often wrong, and no drafter needs training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB = 64
HIDDEN = 64
MAX_POSITIONS = 256
NUM_HEADS = 4  # of Medusa

# model_type, layers, attention heads, K/V heads, head_dim, seed, further fields of config.json.
TARGETS: dict[str, tuple[str, int, int, int, int, int, dict[str, Any]]] = {
    "llama": ("llama", 2, 4, 2, 16, 1, {}),
    "mistral": ("mistral", 3, 4, 1, 24, 2, {"sliding_window": 24}),
    "qwen3": ("qwen3", 2, 4, 4, 32, 3, {}),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _follows() -> list[int]:
    """A permutation of the vocabulary in cycles of 3, 5, 7, ... tokens."""
    order = np.random.RandomState(77).permutation(VOCAB).tolist()
    successor, start, length = [0] * VOCAB, 0, 3
    while start < VOCAB:
        cycle = order[start : start + length]
        for i, token in enumerate(cycle):
            successor[token] = cycle[(i + 1) % len(cycle)]
        start, length = start + length, length + 2
    return successor


FOLLOWS = _follows()
PRECEDES = [FOLLOWS.index(token) for token in range(VOCAB)]


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any], name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    arrays = {key: np.ascontiguousarray(value, np.float32) for key, value in tensors.items()}
    save_file(arrays, str(folder / name), metadata={"format": "pt"})
    return folder


def _target(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, tensors) of a target."""
    kind, layers, heads, kv_heads, head_dim, seed, fields = TARGETS[name]
    random = np.random.RandomState(seed)

    def normal(rows: int, columns: int, gain: float = 1.0) -> Any:
        return random.standard_normal((rows, columns)) * (gain / columns**0.5)

    embedding = random.standard_normal((VOCAB, HIDDEN))
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(HIDDEN),
        "lm_head.weight": embedding[PRECEDES] / 6.0,
    }
    for i in range(layers):
        where = f"model.layers.{i}."
        width, kv_width = heads * head_dim, kv_heads * head_dim
        tensors |= {
            where + "input_layernorm.weight": np.ones(HIDDEN),
            where + "post_attention_layernorm.weight": np.ones(HIDDEN),
            where + "self_attn.q_proj.weight": normal(width, HIDDEN, 1.5),
            where + "self_attn.k_proj.weight": normal(kv_width, HIDDEN, 1.5),
            where + "self_attn.v_proj.weight": normal(kv_width, HIDDEN, 1.5),
            where + "self_attn.o_proj.weight": normal(HIDDEN, width, 1.5),
            where + "mlp.gate_proj.weight": normal(96, HIDDEN, 1.5),
            where + "mlp.up_proj.weight": normal(96, HIDDEN, 1.5),
            where + "mlp.down_proj.weight": normal(HIDDEN, 96),
        }
        if kind == "qwen3":
            tensors[where + "self_attn.q_norm.weight"] = np.ones(head_dim) * 1.5
            tensors[where + "self_attn.k_norm.weight"] = np.ones(head_dim) * 1.5
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **fields,
    }
    return config, tensors


def target_weights(name: str) -> dict[str, Any]:
    """A target's tensors by their names in the file."""
    return _target(name)[1]


def _save_draft_model(folder: Path, name: str, noise: float) -> Path:
    """The target with noise on its weights: right as often as the noise lets it."""
    config, tensors = _target(name)
    random = np.random.RandomState(50)
    noisy = {
        key: value + noise * random.standard_normal(value.shape) if value.ndim == 2 else value
        for key, value in tensors.items()
    }
    return _write(folder, config, noisy, "model.safetensors")


def _after(steps: int) -> list[int]:
    """Token -> the token whose successor of that many steps it is."""
    result = list(range(VOCAB))
    for _ in range(steps):
        result = [PRECEDES[token] for token in result]
    return result


def _save_medusa_heads(folder: Path, name: str) -> Path:
    """Head h answers the embedding of token t with the table's entry h + 2 steps behind t."""
    embedding = _target(name)[1]["model.embed_tokens.weight"]
    tensors = {f"{h}.0.weight": embedding[_after(h + 2)] / 6.0 for h in range(NUM_HEADS)}
    config = {
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_medusa_heads": NUM_HEADS,
        "num_medusa_layers": 0,
        "lm_head": "own",
    }
    return _write(folder, config, tensors, "medusa_lm_head.safetensors")


def _save_redrafter(folder: Path, name: str) -> Path:
    """The recurrent state is a function of the last token; the head reads the table off it."""
    embedding = _target(name)[1]["model.embed_tokens.weight"]
    state = embedding / (1.0 + np.exp(-embedding))  # SiLU with W = 1, U = 0
    answers = np.zeros((VOCAB, VOCAB))
    answers[np.arange(VOCAB), FOLLOWS] = 4.0
    # Ridge regression: the rows of `state` are as many as its columns, and nearly dependent.
    head = np.linalg.solve(state.T @ state + 0.3 * np.eye(HIDDEN), state.T @ answers).T
    tensors = {
        "rnn_u.weight": np.zeros((HIDDEN, HIDDEN)),
        "rnn_u.bias": np.zeros(HIDDEN),
        "rnn_w.weight": np.eye(HIDDEN),
        "lm_head.0.weight": np.concatenate([np.zeros((VOCAB, HIDDEN)), head], axis=1),
    }
    config = {
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "exit_dim": 2 * HIDDEN,
        "num_draft_layers": 0,
        "rnn": True,
        "num_lookback_tokens": 0,
        "dtype": "float32",
    }
    return _write(folder, config, tensors, "model.safetensors")


def write_models(root: Path) -> dict[str, Path]:
    """Folders by name: the targets, and "<target>-near", "-far", "-medusa", "-redrafter"."""
    folders: dict[str, Path] = {}
    for name in TARGETS:
        config, tensors = _target(name)
        folders[name] = _write(root / name, config, tensors, "model.safetensors")
        for kind, noise in (("near", 0.03), ("far", 0.1)):
            where = f"{name}-{kind}"
            folders[where] = _save_draft_model(root / where, name, noise)
        folders[f"{name}-medusa"] = _save_medusa_heads(root / f"{name}-medusa", name)
        folders[f"{name}-redrafter"] = _save_redrafter(root / f"{name}-redrafter", name)
    return folders

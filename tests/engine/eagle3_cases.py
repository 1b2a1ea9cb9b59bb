"""EAGLE-3 heads for tiny targets: trained on their texts, so that they are right now and then."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import LlamaForCausalLM

from specdec_ext.drafters.eagle3.model import Eagle3, save_eagle3
from specdec_ext.drafters.eagle3.shape import Eagle3Shape, default_taps


def head_shape(model: Any, **changes: Any) -> Eagle3Shape:
    """The shape of a head for a transformers Llama; it scores all tokens unless changed."""
    c = model.config
    values: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "target_hidden_size": c.hidden_size,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "draft_vocab_size": c.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope": SimpleNamespace(
            model_type="eagle3",
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            max_position_embeddings=512,
            head_dim=16,
        ),
    }
    return Eagle3Shape(**{**values, **changes})


def states_of(model: Any, text: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
    """[n, 3 * hidden] the residual stream of a text as it enters these layers."""
    kept: dict[int, torch.Tensor] = {}
    layers = model.model.layers

    def keep(index: int) -> Any:
        return lambda _module, args, *_rest: kept.__setitem__(index, args[0][0])

    hooks = [layer.register_forward_pre_hook(keep(i)) for i, layer in enumerate(layers)]
    hooks.append(model.model.norm.register_forward_pre_hook(keep(len(layers))))
    with torch.no_grad():
        model(torch.tensor([list(text)]))
    for hook in hooks:
        hook.remove()
    return torch.cat([kept[tap] for tap in taps], dim=-1)


def save_trained(
    folder: Path,
    target: Path,
    texts: Sequence[Sequence[int]],
    *,
    ids: Sequence[int] | None = None,
    taps: Sequence[int] | None = None,
    steps: int = 100,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A head of this target, trained to know its texts."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = range(model.config.vocab_size) if ids is None else ids
    chosen = tuple(default_taps(model.config.num_hidden_layers) if taps is None else taps)
    torch.manual_seed(seed)
    shape = head_shape(model, draft_vocab_size=len(ids), taps=taps and chosen, **changes)
    head = Eagle3(shape, list(ids), 512)
    row_of = {token: row for row, token in enumerate(ids)}
    unroll, longest = 3, max(map(len, texts))
    tokens = torch.zeros(len(texts), longest + unroll, dtype=torch.int64)
    labels = torch.full_like(tokens, -100)
    states = torch.zeros(len(texts), longest - 1, head.fc.in_features)
    for i, text in enumerate(texts):
        tokens[i, : len(text)] = torch.tensor(list(text))
        labels[i, : len(text)] = torch.tensor([row_of.get(token, -100) for token in text])
        states[i, : len(text) - 1] = states_of(model, text, chosen)[:-1]
    with torch.no_grad():
        embedded = model.model.embed_tokens(tokens)
    rows = longest - 1
    optimizer = torch.optim.Adam(head.parameters(), lr=4e-3)
    for _ in range(steps):
        # Padding stands behind a text, where its rows do not look, and has no labels.
        results = head.unrolled(embedded[:, 1 : rows + unroll], states, unroll)
        loss = torch.zeros(())
        for step, each in enumerate(results):
            wanted = labels[:, 2 + step : 2 + step + rows].reshape(-1)
            guesses = head.lm_head(each).flatten(0, 1)
            loss = loss + functional.cross_entropy(guesses, wanted, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return save_eagle3(head, folder, dtype=torch.float32)


def as_speculators(folder: Path, source: Path, num_layers: int) -> Path:
    """The same head in the layout of `speculators`."""
    config = json.loads((source / "config.json").read_text())
    own = config.pop("eagle_config")
    taps = own.get("eagle_aux_hidden_state_layer_ids")
    tops = {name: config.pop(name) for name in ("draft_vocab_size", "target_hidden_size")}
    tops["norm_before_residual"] = config.pop("norm_before_residual")
    config.pop("architectures")
    taps = default_taps(num_layers) if taps is None else [tap + 1 for tap in taps]
    verifier = {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
    whole = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
        "transformer_layer_config": config,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        **tops,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(source / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    return folder

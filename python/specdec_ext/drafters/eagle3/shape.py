"""config.json of an EAGLE-3 head, in SpecForge's layout and in that of `speculators`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...config.validate import show
from ...errors import ModelError, UnsupportedModelError
from ...models.json_file import read_json
from ...models.rope import ROPE_TYPES, max_position

__all__ = ["ARCHITECTURE", "NUM_TAPS", "Eagle3Shape", "default_taps", "read_eagle3_shape"]

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_TAPS = 3

# Limits of integers: far above any head, there to stop a damaged file before it asks for memory.
_LIMITS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_attention_heads": 1 << 14,
    "max_position_embeddings": 1 << 26,
}
# What other heads of this family do and this reader does not: true is refused.
_REFUSED = ("norm_before_fc", "fc_norm", "norm_output", "mlp_bias")


@dataclass(frozen=True)
class Eagle3Shape:
    """The fields of config.json that decide what the tensors are, and what they mean.

    vocab_size           tokens of the target
    target_hidden_size   of the states that fc reads
    draft_vocab_size     tokens that the head scores
    taps                 the target's layers whose input is tapped, ascending; None: default_taps().
                         The number of its layers stands for what leaves the last one
    norm_before_residual the residual stream begins with the normed feature
    attention_bias       q, k, v and o have biases
    rope                 what models.rope reads: rope_parameters, max_position_embeddings, head_dim
    """

    vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    rms_norm_eps: float
    taps: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    attention_bias: bool = False
    rope: Any = field(default=None, repr=False)

    num_layers = 1  # of K/V

    @property
    def max_position(self) -> int:
        """Positions that the head serves."""
        return max_position(self.rope)

    def feature_heads(self) -> tuple[int, int]:
        """(heads, head_dim) of a device's pages whose K and V hold one half of a feature each, so
        that features are appended, moved and copied as K/V is. Raises UnsupportedModelError."""
        half = self.hidden_size // 2
        for head_dim in range(256, 7, -8):
            if self.hidden_size % 2 == 0 and half % head_dim == 0:
                return half // head_dim, head_dim
        raise UnsupportedModelError(
            f"the EAGLE-3 head's hidden_size = {self.hidden_size}: on a device a multiple of 16 is "
            "needed; use device='cpu'"
        )

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every floating-point tensor but the embedding, in SpecForge's names."""
        hidden, wide = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention, layer = "midlayer.self_attn.", "midlayer."
        expected: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, NUM_TAPS * self.target_hidden_size),
            layer + "input_layernorm.weight": (hidden,),
            layer + "hidden_norm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
            attention + "q_proj.weight": (queries, 2 * hidden),
            attention + "k_proj.weight": (keys, 2 * hidden),
            attention + "v_proj.weight": (keys, 2 * hidden),
            attention + "o_proj.weight": (hidden, queries),
            layer + "mlp.gate_proj.weight": (wide, hidden),
            layer + "mlp.up_proj.weight": (wide, hidden),
            layer + "mlp.down_proj.weight": (hidden, wide),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }
        if self.attention_bias:
            for name, size in (("q", queries), ("k", keys), ("v", keys), ("o", hidden)):
                expected[f"{attention}{name}_proj.bias"] = (size,)
        return expected

    def target_taps(self, num_layers: int) -> tuple[int, ...]:
        """The taps of a target of so many layers. Raises ModelError for one beyond them."""
        taps = default_taps(num_layers) if self.taps is None else self.taps
        for tap in taps:
            if tap > num_layers:
                raise ModelError(
                    f"eagle_aux_hidden_state_layer_ids: the head taps what enters layer {tap}, the "
                    f"target has {num_layers} layers; give the head of this target"
                )
        return taps


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high: the inputs of layers 2, L/2 and L - 3 where a target has that many."""
    low, middle, high = 2, num_layers // 2, num_layers - 3
    if low < middle < high:
        return low, middle, high
    return tuple(min(i * num_layers // NUM_TAPS + 1, num_layers) for i in range(NUM_TAPS))


def read_eagle3_shape(folder: str | Path) -> Eagle3Shape:
    """config.json of a head's folder, checked. Raises ModelError, UnsupportedModelError."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ModelError(
            f"eagle3 model = {str(folder)!r} {kind}; give a local folder with config.json and "
            "model.safetensors (SpecForge's layout or that of `speculators`); nothing is downloaded"
        )
    path = folder / "config.json"
    raw = read_json(
        path, "the head's configuration", remedy="give a folder with it and the head's safetensors"
    )
    speculators = raw.get("speculators_model_type")
    names = raw.get("architectures") or []
    if speculators is not None and speculators != "eagle3":
        raise UnsupportedModelError(
            f"{path}: speculators_model_type = {show(speculators)}: expected 'eagle3'"
        )
    if speculators is None and not (isinstance(names, list) and ARCHITECTURE in names):
        raise UnsupportedModelError(
            f"{path}: architectures = {show(names)}: an EAGLE-3 head has {ARCHITECTURE!r}, or "
            "speculators_model_type 'eagle3'; is this the folder of the target or of other heads?"
        )
    layer: Mapping[str, Any] = raw
    if speculators is not None:
        layer = _object(path, raw, "transformer_layer_config")
    own = _object(path, raw, "eagle_config") if raw.get("eagle_config") is not None else {}
    for name in _REFUSED:
        if any(part.get(name) for part in (raw, layer, own)):
            raise UnsupportedModelError(
                f"{path}: {name} = true: heads with it are not supported in this version"
            )
    if own.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModelError(
            f"{path}: eagle_config.use_aux_hidden_state = {show(own['use_aux_hidden_state'])}: the "
            "head reads three taps of the target in this version"
        )
    return _shape(path, raw, layer, own)


def _shape(
    path: Path, raw: Mapping[str, Any], layer: Mapping[str, Any], own: Mapping[str, Any]
) -> Eagle3Shape:
    numbers = {name: _integer(path, layer, name, limit) for name, limit in _LIMITS.items()}
    hidden, heads = numbers["hidden_size"], numbers["num_attention_heads"]
    kv_heads = heads
    if layer.get("num_key_value_heads") is not None:
        kv_heads = _integer(path, layer, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"{path}: num_attention_heads = {heads} is no multiple of num_key_value_heads = "
            f"{kv_heads}"
        )
    head_dim = hidden // heads
    if layer.get("head_dim") is not None:
        head_dim = _integer(path, layer, "head_dim", 256)
    if not 8 <= head_dim <= 256 or head_dim % 8:
        raise UnsupportedModelError(f"{path}: head_dim = {head_dim}: a multiple of 8, 8..256")
    if layer.get("num_hidden_layers", 1) != 1:
        raise UnsupportedModelError(
            f"{path}: num_hidden_layers = {show(layer['num_hidden_layers'])}: a head of one layer "
            "is supported"
        )
    if layer.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"{path}: hidden_act = {show(layer['hidden_act'])}: expected 'silu'"
        )
    scored, target_hidden = numbers["vocab_size"], hidden
    if raw.get("draft_vocab_size") is not None:
        scored = _integer(path, raw, "draft_vocab_size", scored)
    if raw.get("target_hidden_size") is not None:
        target_hidden = _integer(path, raw, "target_hidden_size", _LIMITS["hidden_size"])
    eps = layer.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 < eps < 1:
        raise ModelError(f"{path}: rms_norm_eps = {show(eps)}: expected a number in (0, 1)")
    # The residual is said at the top by `speculators`, beside eagle_config by others.
    residual = raw.get("norm_before_residual", own.get("norm_before_residual", False))
    return Eagle3Shape(
        vocab_size=numbers["vocab_size"],
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        intermediate_size=numbers["intermediate_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        draft_vocab_size=scored,
        rms_norm_eps=float(eps),
        taps=_taps(path, raw, own),
        norm_before_residual=_flag(
            path, {"norm_before_residual": residual}, "norm_before_residual"
        ),
        attention_bias=_flag(path, layer, "attention_bias"),
        rope=_rope(path, layer, head_dim),
    )


def _taps(path: Path, raw: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[int, ...] | None:
    """At the top an id is the layer that the state enters, in eagle_config the one that it leaves:
    vLLM and `speculators` count as the former, SpecForge and SGLang as the latter."""
    name = "eagle_aux_hidden_state_layer_ids"
    given, step = raw.get(name), 0
    if given is None:
        given, step = own.get(name), 1
    if given is None:
        return None
    if (
        not isinstance(given, list)
        or len(given) != NUM_TAPS
        or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in given)
    ):
        raise ModelError(
            f"{path}: {name} = {show(given)}: expected {NUM_TAPS} layers of the target, for "
            "example [2, 15, 27]"
        )
    return tuple(i + step for i in given)


def _rope(path: Path, layer: Mapping[str, Any], head_dim: int) -> SimpleNamespace:
    given = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ModelError(f"{path}: rope_scaling = {show(given)}: expected an object")
    parameters = dict(given)
    kind = parameters.get("rope_type") or parameters.pop("type", None) or "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{path}: rope_type = {show(kind)}: supported are {', '.join(ROPE_TYPES)}"
        )
    theta = parameters.get("rope_theta") or layer.get("rope_theta", 10000.0)
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or not theta > 0:
        raise ModelError(f"{path}: rope_theta = {show(theta)}: expected a number above 0")
    return SimpleNamespace(
        model_type="eagle3",
        rope_parameters={**parameters, "rope_type": kind, "rope_theta": float(theta)},
        max_position_embeddings=layer["max_position_embeddings"],
        head_dim=head_dim,
    )


def _object(path: Path, raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: {name} = {show(value)}: expected an object")
    return value


def _integer(path: Path, raw: Mapping[str, Any], name: str, high: int) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise ModelError(
            f"{path}: {name} = {show(value)}: expected an integer 1..{high}; the file is damaged "
            "or not a head's"
        )
    return value


def _flag(path: Path, raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name, False)
    if not isinstance(value, bool):
        raise ModelError(f"{path}: {name} = {show(value)}: expected true or false")
    return value

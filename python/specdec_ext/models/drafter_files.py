"""Files of a small drafter that borrows its embeddings from the target, and what becomes of them.

Stored (compact): config.json and drafter.safetensors with the trained decoder layers and the int32
tensor `token_ids`. The input embeddings and the rows of the output head are the target's, so they
are not stored. `materialize_drafter` puts both together into an ordinary Hugging Face folder:

    config.json             LlamaForCausalLM, vocab_size of the target, draft_vocab_size = V'
    model.safetensors       with model.embed_tokens.weight [V, H] and lm_head.weight [V', H]
    draft_vocab.safetensors token_ids int32 [V'], increasing: the target's token of each score
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.validate import show
from ..errors import ModelError
from .config_reader import read_config
from .folder_cache import make_folder
from .host_arrays import as_torch
from .json_file import read_json
from .weights import Checkpoint

if TYPE_CHECKING:
    import torch

__all__ = [
    "DRAFTER_FILE",
    "DRAFT_VOCAB_FILE",
    "DrafterShape",
    "materialize_drafter",
    "read_drafter",
    "save_drafter",
    "write_drafter_model",
]

MODEL_TYPE = "specdec_borrowing_drafter"
DRAFTER_FILE = "drafter.safetensors"
DRAFT_VOCAB_FILE = "draft_vocab.safetensors"
TOKEN_IDS = "token_ids"


@dataclass(frozen=True)
class DrafterShape:
    """What config.json says of the drafter.

    vocab_size        of the target: every id is a valid input
    draft_vocab_size  tokens that the head scores
    cut_from_layers   layers of the target that training began from
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    draft_vocab_size: int
    cut_from_layers: tuple[int, ...] = ()

    def hf_config(self, vocab_size: int | None = None) -> Any:
        """transformers' configuration of the decoder."""
        from transformers import LlamaConfig

        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=self.vocab_size if vocab_size is None else vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every stored floating-point tensor."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        expected: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,)}
        for i in range(self.num_layers):
            at = f"layers.{i}."
            expected |= {
                at + "self_attn.q_proj.weight": (q, hidden),
                at + "self_attn.k_proj.weight": (kv, hidden),
                at + "self_attn.v_proj.weight": (kv, hidden),
                at + "self_attn.o_proj.weight": (hidden, q),
                at + "mlp.gate_proj.weight": (ffn, hidden),
                at + "mlp.up_proj.weight": (ffn, hidden),
                at + "mlp.down_proj.weight": (hidden, ffn),
                at + "input_layernorm.weight": (hidden,),
                at + "post_attention_layernorm.weight": (hidden,),
            }
        return expected


def save_drafter(
    folder: str | Path,
    shape: DrafterShape,
    weights: Mapping[str, torch.Tensor],
    token_ids: torch.Tensor,
    *,
    dtype: str = "float16",
    model_sha256: str = "",
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and drafter.safetensors.

    weights  the tensors of DrafterShape.expected_weights()
    Raises ModelError for a value that is not finite in `dtype`.
    """
    import torch
    from safetensors.torch import save_file

    kind = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    tensors: dict[str, torch.Tensor] = {}
    for name in shape.expected_weights():
        value = weights[name].detach().to(device="cpu", dtype=kind).contiguous()
        if not torch.isfinite(value).all():
            raise ModelError(f"drafter: tensor {name!r} is not finite in {dtype}; nothing written")
        tensors[name] = value
    tensors[TOKEN_IDS] = token_ids.to(torch.int32).contiguous()
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / DRAFTER_FILE, metadata={"format": "pt"})
    config = {
        "model_type": MODEL_TYPE,
        **asdict(shape),
        "dtype": dtype,
        "model_sha256": model_sha256,
        "training": dict(notes or {}),
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")


def read_drafter(
    folder: str | Path,
) -> tuple[DrafterShape, dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """(shape, weights in float32, token_ids int32 [V'], config.json) of what save_drafter wrote.

    Raises ModelError naming file and field or tensor.
    """
    import torch
    from safetensors import safe_open

    folder = Path(folder)
    path = folder / "config.json"
    raw = read_json(path, "the drafter's configuration")
    if raw.get("model_type") != MODEL_TYPE:
        raise ModelError(
            f"{path}: model_type = {show(raw.get('model_type'))}: expected {MODEL_TYPE!r}"
        )
    values: dict[str, Any] = {}
    for field in fields(DrafterShape):
        value = raw.get(field.name)
        if field.name == "cut_from_layers":
            value = tuple(value or ())
        elif not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{path}: {field.name} = {show(value)}: expected a positive number")
        values[field.name] = value
    shape = DrafterShape(**values)
    file_path = folder / DRAFTER_FILE
    try:
        with safe_open(file_path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # SafetensorError, OSError
        raise ModelError(
            f"{file_path}: not a complete safetensors file ({error}); copy it again"
        ) from error
    ids = tensors.pop(TOKEN_IDS, None)
    expected = shape.expected_weights()
    for name in sorted({*expected, *tensors}):
        found = list(tensors[name].shape) if name in tensors else None
        if name not in expected or found != list(expected[name]):
            raise ModelError(
                f"{file_path}: tensor {name!r} has shape {found}, expected "
                f"{list(expected[name]) if name in expected else None} by config.json"
            )
        if not torch.isfinite(tensors[name]).all():
            raise ModelError(f"{file_path}: tensor {name!r} holds NaN or infinite values")
    if (
        ids is None
        or ids.dtype != torch.int32
        or list(ids.shape) != [shape.draft_vocab_size]
        or int(ids[0]) < 0
        or int(ids[-1]) >= shape.vocab_size
        or not bool((ids[1:] > ids[:-1]).all())
    ):
        raise ModelError(
            f"{file_path}: tensor {TOKEN_IDS!r} must be int32 [{shape.draft_vocab_size}], "
            f"increasing, within 0..{shape.vocab_size - 1}"
        )
    return shape, {name: t.float() for name, t in tensors.items()}, ids, raw


def materialize_drafter(drafter: str | Path, target: str | Path, folder: str | Path) -> Path:
    """Write the drafter with the target's embeddings as a Hugging Face folder; returns it.

    drafter  folder of save_drafter()
    target   folder of the target model
    folder   replaced if it exists; appears complete or not at all

    Raises ModelError when the two do not fit.
    """
    folder = Path(folder)
    make_folder(folder, {}, lambda work: write_drafter_model(drafter, target, work))
    return folder


def write_drafter_model(drafter: str | Path, target: str | Path, folder: Path) -> None:
    """materialize_drafter's files, into an empty folder."""
    import torch
    from safetensors.torch import save_file

    shape, weights, ids, raw = read_drafter(drafter)
    config = read_config(target)
    if (config.vocab_size, config.hidden_size) != (shape.vocab_size, shape.hidden_size):
        raise ModelError(
            f"{drafter}: made for a target of vocab_size {shape.vocab_size} and hidden_size "
            f"{shape.hidden_size}; {target} has {config.vocab_size} and {config.hidden_size}"
        )
    name = config.dtype or "float32"
    dtype = getattr(torch, name)
    head_name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    with Checkpoint(target) as checkpoint:
        embedding = as_torch(checkpoint.load("model.embed_tokens.weight", name))
        head = as_torch(checkpoint.load(head_name, name))[ids.to(torch.int64)]
    tensors = {"model." + key: value.to(dtype).contiguous() for key, value in weights.items()}
    tensors["model.embed_tokens.weight"] = embedding.contiguous()
    tensors["lm_head.weight"] = head.contiguous()
    content = shape.hf_config().to_dict()
    content |= {
        "dtype": name,
        "draft_vocab_size": shape.draft_vocab_size,
        "model_sha256": raw.get("model_sha256", ""),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({TOKEN_IDS: ids}, folder / DRAFT_VOCAB_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")

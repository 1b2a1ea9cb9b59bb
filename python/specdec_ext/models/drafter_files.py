"""Files of a small drafter that borrows its embeddings from the target, and what becomes of them.

Stored (compact): config.json and drafter.safetensors with the trained decoder layers and the int32
tensor `token_ids`. The input embeddings and the rows of the output head are the target's, so they
are not stored. `write_drafter_model` puts both together into an ordinary Hugging Face folder:

    config.json             the target's family, its vocab_size, draft_vocab_size = V'
    model.safetensors       with model.embed_tokens.weight [V, H] and lm_head.weight [V', H]
    draft_vocab.safetensors token_ids int32 [V'], increasing: the target's token of each score
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.validate import show
from ..errors import ModelError
from .config_reader import ModelConfig, parse_config, read_config
from .family_config import FamilyConfig
from .fused_rows import fused_rows
from .host_arrays import as_torch
from .json_file import read_json
from .native_config import ARCHITECTURES, NativeShape, NotNativeError, native_shape
from .open_checkpoint import open_checkpoint

if TYPE_CHECKING:
    import torch

__all__ = [
    "DRAFTER_FILE",
    "DRAFT_VOCAB_FILE",
    "DrafterShape",
    "cut_decoder",
    "is_borrowing",
    "read_drafter",
    "save_drafter",
    "write_drafter_model",
]

MODEL_TYPE = "specdec_borrowing_drafter"
DRAFTER_FILE = "drafter.safetensors"
DRAFT_VOCAB_FILE = "draft_vocab.safetensors"
TOKEN_IDS = "token_ids"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


# Keys of config.json that transformers knows and that say nothing of the decoder's weights.
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class DrafterShape:
    """What config.json says of the drafter.

    decoder           configuration of the decoder, of the target's family (Mistral's, where that
                      keeps several projections in one matrix); every id of the target's vocabulary
                      is a valid input
    draft_vocab_size  tokens that the head scores
    cut_from_layers   layers of the target that training began from
    """

    decoder: Mapping[str, Any]
    draft_vocab_size: int
    cut_from_layers: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return int(self.decoder["vocab_size"])

    @property
    def hidden_size(self) -> int:
        return int(self.decoder["hidden_size"])

    def native(self, path: Path = Path("config.json")) -> NativeShape:
        """How the native decoder runs it. Raises ModelError, naming `path`, if it does not."""
        try:
            return native_shape(parse_config(path, dict(self.decoder)))
        except NotNativeError as error:
            raise ModelError(f"{path}: the drafter's decoder is not native: {error}") from error

    def hf_config(self, vocab_size: int | None = None) -> Any:
        """transformers' configuration of the decoder."""
        from transformers import CONFIG_MAPPING

        values = {**self.decoder, "vocab_size": vocab_size or self.vocab_size}
        return CONFIG_MAPPING[str(self.decoder["model_type"])].from_dict(values)

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every stored floating-point tensor."""
        return {
            name.removeprefix("model."): shape
            for name, shape in self.native().expected_weights().items()
            if name not in (EMBEDDING, HEAD)
        }


def cut_decoder(target: ModelConfig, layers: Sequence[int], intermediate_size: int) -> DrafterShape:
    """The shape of a drafter of these layers of the target, with a head of no tokens yet.

    A target that keeps several projections in one matrix gets a drafter that has them apart, of a
    family that is the same otherwise.

    Raises ModelError for a target whose family the native decoder does not run, or whose rotary
    positions that other family has not.
    """
    fused = fused_rows(target)
    try:
        shape = native_shape(target)
        if any(part.order for part in fused.values()):
            raise NotNativeError("its partial_rotary_factor is that of no other family")
    except NotNativeError as error:
        raise ModelError(
            f"{target.path}: a drafter is cut out of a target that the native decoder runs, and "
            f"{error}; train Medusa heads or a ReDrafter for it"
        ) from error
    hf = target.hf
    values = dict(vars(hf)) if isinstance(hf, FamilyConfig) else dict(hf.to_dict())
    for name in ("layer_types", "no_rope_layers"):
        if values.get(name) is not None:
            values[name] = [values[name][layer] for layer in layers]
    family = "mistral" if fused else target.model_type
    for name in ("resid_pdrop", "embd_pdrop", "original_max_position_embeddings") if fused else ():
        values.pop(name, None)
    values |= {
        **_NO_TOKENS,
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "num_hidden_layers": len(layers),
        "intermediate_size": intermediate_size,
        "head_dim": shape.head_dim,
        "num_key_value_heads": shape.num_kv_heads,
        "tie_word_embeddings": False,
    }
    if "final_logit_softcapping" in values:
        values["final_logit_softcapping"] = None  # what is trained learns scores without one
    for name in ("quantization_config", "auto_map", "transformers_version"):
        values.pop(name, None)
    return DrafterShape(json.loads(json.dumps(values)), 0, tuple(layers))


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
        "decoder": dict(shape.decoder),
        "draft_vocab_size": shape.draft_vocab_size,
        "cut_from_layers": list(shape.cut_from_layers),
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
    decoder, size, layers = (raw.get(k) for k in ("decoder", "draft_vocab_size", "cut_from_layers"))
    if not isinstance(decoder, dict):
        raise ModelError(f"{path}: decoder = {show(decoder)}: expected an object; train it again")
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ModelError(f"{path}: draft_vocab_size = {show(size)}: expected a positive number")
    shape = DrafterShape(decoder, size, tuple(layers or ()))
    shape.native(path)
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


def write_drafter_model(drafter: str | Path, target: str | Path, folder: Path) -> None:
    """Write the drafter with the target's embeddings as a Hugging Face folder.

    drafter  folder of save_drafter()
    target   folder of the target model
    folder   empty

    Raises ModelError when the two do not fit.
    """
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
    head_name = EMBEDDING if config.tie_word_embeddings else HEAD
    with open_checkpoint(config) as checkpoint:
        embedding = as_torch(checkpoint.load(EMBEDDING, name))
        head = as_torch(checkpoint.load(head_name, name))[ids.to(torch.int64)]
    tensors = {"model." + key: value.to(dtype).contiguous() for key, value in weights.items()}
    tensors[EMBEDDING] = embedding.contiguous()
    tensors[HEAD] = head.contiguous()
    content = {
        **shape.decoder,
        "dtype": name,
        "draft_vocab_size": shape.draft_vocab_size,
        "model_sha256": raw.get("model_sha256", ""),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({TOKEN_IDS: ids}, folder / DRAFT_VOCAB_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def is_borrowing(folder: str | Path) -> bool:
    """Did save_drafter() write this folder?"""
    path = Path(folder)
    if not (path / DRAFTER_FILE).is_file():
        return False
    raw = read_json(path / "config.json", "the drafter's configuration")
    return bool(raw.get("model_type") == MODEL_TYPE)

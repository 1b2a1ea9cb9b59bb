"""Medusa heads: the module that runtime and trainer share, and its files.

Head h (0-based) guesses the token h + 2 places behind the row whose hidden state it reads: one
further than the target's own head. It is `num_medusa_layers` residual blocks, x + SiLU(Wx + b),
and an LM head. The LM head is one of three:

    "own"     a matrix per head
    "shared"  one matrix for all heads
    "target"  the target's output head, nothing is stored

and may cover a part of the vocabulary: `token_ids` then maps its rows to token ids.

On disk: a folder with config.json and medusa_lm_head.safetensors, which holds
"{h}.{l}.linear.weight" [H, H], "{h}.{l}.linear.bias" [H], "{h}.{L}.weight" [V', H] (own) or
"lm_head.weight" (shared), "token_ids" int32 [V']. A weight in int8 comes with a float32
"..._scale" per row. Other projects' files: checkpoint.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config.validate import show
from ...errors import ModelError

__all__ = [
    "HEADS_FILE",
    "LM_HEADS",
    "MedusaHeads",
    "MedusaHeadsConfig",
    "load_medusa_heads",
    "save_medusa_heads",
]

HEADS_FILE = "medusa_lm_head.safetensors"
LM_HEADS = ("own", "shared", "target")
MAX_HEADS = 32
MAX_LAYERS = 32
SAVE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


@dataclass(frozen=True)
class MedusaHeadsConfig:
    """What config.json says of the heads.

    vocab_size         of the target; the heads' own rows are draft_vocab_size (None: all of it)
    lm_head            "own", "shared" or "target"
    has_bias           of the residual blocks' linear layers
    model_sha256       of the target's weight file they were trained for; "" if unknown
    training           what the trainer notes; its "guess_rates" [heads][ranks], how often a head's
                       guess of a rank is right where the guesses above it were, are where the
                       draft budget starts and what `specdec tree` reads
    medusa_choices     the tree to use where the user names none, or None
    """

    hidden_size: int
    vocab_size: int
    num_medusa_heads: int
    num_medusa_layers: int = 1
    lm_head: str = "own"
    draft_vocab_size: int | None = None
    has_bias: bool = True
    base_model_name_or_path: str = ""
    model_sha256: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)
    medusa_choices: Any = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("hidden_size", 1, 1 << 20),
            ("vocab_size", 1, 1 << 26),
            ("num_medusa_heads", 1, MAX_HEADS),
            ("num_medusa_layers", 0, MAX_LAYERS),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ModelError(
                    f"Medusa heads: {name} = {show(value)}: expected an integer {low}..{high}"
                )
        if self.lm_head not in LM_HEADS:
            raise ModelError(
                f"Medusa heads: lm_head = {show(self.lm_head)}: expected one of "
                f"{', '.join(LM_HEADS)}"
            )
        size = self.draft_vocab_size
        if size is not None and (type(size) is not int or not 1 <= size <= self.vocab_size):
            raise ModelError(
                f"Medusa heads: draft_vocab_size = {show(size)}: expected 1..{self.vocab_size}, "
                "the target's vocab_size"
            )

        if not isinstance(self.training, Mapping):
            raise ModelError(
                f"Medusa heads: training = {show(self.training)}: expected an object with keys"
            )

    @property
    def head_rows(self) -> int:
        """Scores that a head gives: draft_vocab_size, or the whole vocabulary."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "medusa", **asdict(self)}


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b); starts as the identity."""

    def __init__(self, hidden_size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=bias)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + nn.functional.silu(self.linear(x))
        return result


class MedusaHeads(nn.Module):
    """The heads; made with identity blocks and zero LM heads, to be trained or loaded.

    token_ids  int32 [V'] of distinct ids, exactly when config.draft_vocab_size is set
    """

    blocks: nn.ModuleList
    lm_heads: nn.ModuleList  # one per head ("own"), one ("shared"), none ("target")
    token_ids: torch.Tensor | None

    def __init__(self, config: MedusaHeadsConfig, token_ids: torch.Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                ResidualBlock(size, config.has_bias) for _ in range(config.num_medusa_layers)
            )
            for _ in range(config.num_medusa_heads)
        )
        count = {"own": config.num_medusa_heads, "shared": 1, "target": 0}[config.lm_head]
        lm_heads = [nn.Linear(size, config.head_rows, bias=False) for _ in range(count)]
        for head in lm_heads:
            nn.init.zeros_(head.weight)
        self.lm_heads = nn.ModuleList(lm_heads)
        self.register_buffer("token_ids", check_token_ids(config, token_ids), persistent=False)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the LM heads read: [num_heads, ..., hidden_size] for hidden [..., hidden_size]."""
        return torch.stack([self._run_blocks(blocks, hidden) for blocks in self.blocks])

    def forward(
        self, hidden: torch.Tensor, target_head: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores [num_heads, ..., V'] for hidden states [..., hidden_size].

        target_head  [V', hidden_size], with lm_head "target": the target's output weight, its rows
                     `token_ids` if there are such
        """
        features = self.features(hidden)
        if self.config.lm_head == "target":
            if target_head is None:
                raise ValueError("these heads use the target's LM head: give target_head")
            return features @ target_head.T
        if self.config.lm_head == "shared":
            shared: torch.Tensor = self.lm_heads[0](features)
            return shared
        return torch.stack([head(x) for head, x in zip(self.lm_heads, features, strict=True)])

    def block_linears(self) -> list[list[nn.Linear]]:
        """The residual blocks' layers: [num_heads][num_layers]."""
        linears: list[list[nn.Linear]] = []
        for blocks in self.blocks:
            assert isinstance(blocks, nn.ModuleList)
            linears.append([block.linear for block in blocks if isinstance(block, ResidualBlock)])
        return linears

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name in the file, tensor) of everything that is stored."""
        layers = self.config.num_medusa_layers
        for h, linears in enumerate(self.block_linears()):
            for number, linear in enumerate(linears):
                yield f"{h}.{number}.linear.weight", linear.weight
                if linear.bias is not None:
                    yield f"{h}.{number}.linear.bias", linear.bias
        for h, head in enumerate(self.lm_heads):
            assert isinstance(head, nn.Linear)
            name = "lm_head.weight" if self.config.lm_head == "shared" else f"{h}.{layers}.weight"
            yield name, head.weight
        if self.token_ids is not None:
            yield "token_ids", self.token_ids

    @staticmethod
    def _run_blocks(blocks: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for block in blocks.children():
            x = block(x)
        return x


def check_token_ids(
    config: MedusaHeadsConfig, token_ids: torch.Tensor | None
) -> torch.Tensor | None:
    """`token_ids` as int32 [V'], distinct and inside the vocabulary; ModelError otherwise."""
    size, vocab = config.draft_vocab_size, config.vocab_size
    if (size is None) != (token_ids is None):
        raise ModelError(
            f"Medusa heads: draft_vocab_size = {size} "
            + ("needs" if token_ids is None else "does not go with")
            + " the tensor token_ids, which names the token of each row"
        )
    if token_ids is None:
        return None
    ids = token_ids.detach().to(torch.int64)
    if tuple(ids.shape) != (size,):
        raise ModelError(
            f"Medusa heads: token_ids has shape {list(ids.shape)}, draft_vocab_size is {size}"
        )
    distinct = len(set(ids.tolist()))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or distinct != size:
        raise ModelError(
            f"Medusa heads: token_ids: expected {size} distinct ids 0..{vocab - 1}, found "
            f"{distinct} in {int(ids.min())}..{int(ids.max())}"
        )
    return ids.to(torch.int32).contiguous()


def save_medusa_heads(folder: str | Path, heads: MedusaHeads, *, dtype: str = "float16") -> Path:
    """Write config.json and medusa_lm_head.safetensors; returns the folder.

    dtype  of the matrices: "float32", "float16", "bfloat16", or "int8" with a scale per row.
           Biases are float32 with int8, of the same dtype otherwise.
    """
    from safetensors.torch import save_file

    if dtype not in SAVE_DTYPES:
        raise ModelError(f"dtype = {show(dtype)}: expected one of {', '.join(SAVE_DTYPES)}")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in heads.weights():
        value = tensor.detach().cpu()
        if name == "token_ids":
            tensors[name] = value.contiguous()
        elif dtype != "int8":
            tensors[name] = value.to(SAVE_DTYPES[dtype]).contiguous()
        elif name.endswith("weight"):
            tensors[name], tensors[name + "_scale"] = quantize_rows(value)
        else:
            tensors[name] = value.float().contiguous()
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(target / HEADS_FILE), metadata={"format": "pt"})
    text = json.dumps(heads.config.to_dict(), indent=2, sort_keys=True)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")
    return target


def load_medusa_heads(folder: str | Path) -> MedusaHeads:
    """The heads that save_medusa_heads() wrote, in float32; ModelError for anything else."""
    from safetensors import safe_open

    path = Path(folder) / HEADS_FILE
    config, _ = read_heads_config(Path(folder) / "config.json")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # SafetensorError, OSError
        raise ModelError(
            f"{path}: not a complete safetensors file ({error}); copy it again"
        ) from error
    return heads_from_tensors(config, tensors, source=str(path))


def read_heads_config(path: Path) -> tuple[MedusaHeadsConfig, dict[str, Any]]:
    """The configuration that save_medusa_heads() wrote, and the whole file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected an object with keys, got {type(content).__name__}")
    known = {f.name for f in fields(MedusaHeadsConfig)}
    missing = {"hidden_size", "vocab_size", "num_medusa_heads"} - content.keys()
    if missing:
        raise ModelError(f"{path}: {sorted(missing)[0]!r} is missing")
    try:
        config = MedusaHeadsConfig(**{k: v for k, v in content.items() if k in known})
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    return config, content


def heads_from_tensors(
    config: MedusaHeadsConfig, tensors: Mapping[str, torch.Tensor], *, source: str
) -> MedusaHeads:
    """Fill the module. `tensors` by the names of the file; every one is used, none is missing."""
    heads = MedusaHeads(config, tensors.get("token_ids"))
    left = dict(tensors)
    left.pop("token_ids", None)
    with torch.no_grad():
        for name, parameter in heads.weights():
            if name == "token_ids":
                continue
            value = left.pop(name, None)
            if value is None:
                raise ModelError(
                    f"{source}: tensor {name!r} {list(parameter.shape)} is missing; the heads are "
                    "incomplete or config.json belongs to others"
                )
            if value.shape != parameter.shape:
                raise ModelError(
                    f"{source}: tensor {name!r} has shape {list(value.shape)}, expected "
                    f"{list(parameter.shape)} by config.json"
                )
            scale = left.pop(name + "_scale", None)
            parameter.copy_(dequantize_rows(value, scale, f"{source}: tensor {name!r}"))
            if not torch.isfinite(parameter).all():
                bad = int((~torch.isfinite(parameter)).sum())
                raise ModelError(
                    f"{source}: tensor {name!r} holds {bad} NaN or infinite values; train or "
                    "convert the heads again"
                )
    if left:
        name = min(left)
        raise ModelError(
            f"{source}: tensor {name!r} {list(left[name].shape)} (and {len(left) - 1} more) has no "
            f"place in {config.num_medusa_heads} heads of {config.num_medusa_layers} layers with "
            f"lm_head {config.lm_head!r}"
        )
    return heads.requires_grad_(False)


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K], float32 scale [N]) with weight ~ int8 * scale, symmetric per row."""
    values = weight.float()
    scale = values.abs().amax(dim=1).clamp_min(1e-12) / 127.0
    return (values / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def dequantize_rows(value: torch.Tensor, scale: torch.Tensor | None, what: str) -> torch.Tensor:
    """float32; int8 needs its scale, other dtypes must have none."""
    if (value.dtype == torch.int8) != (scale is not None):
        raise ModelError(
            f"{what} is {value.dtype} "
            + ("without" if scale is None else "with")
            + " a tensor ..._scale; int8 has one float32 scale per row, other dtypes none"
        )
    if scale is None:
        if not value.is_floating_point():
            raise ModelError(f"{what} is {value.dtype}; expected floats or int8")
        return value.float()
    if scale.shape != value.shape[:1]:
        raise ModelError(f"{what} [{value.shape[0]}, ...] has scales {list(scale.shape)}")
    return value.float() * scale.float()[:, None]

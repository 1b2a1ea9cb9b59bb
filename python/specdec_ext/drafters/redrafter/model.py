"""The recurrent drafter of ReDrafter: a torch module, and its checkpoints.

With c the target's last hidden state (the head's input of the row that decided the last token) and
a state s that starts at zero and takes in one token after the other, both of `hidden_size` H:

    s <- SiLU(W_w e(t) + W_u s + b)      (rnn; otherwise s <- s + e(t))
    x <- [c, s]                          (2H), and if 2H != exit_dim: x <- W x + b
    x <- x + SiLU(W_i x + b_i)           for each of num_draft_layers blocks
    scores <- head(x)

e(t) is the row of the target's input embedding table. The head is the drafter's own, or the
target's (`tie_lm_head`, exit_dim = H); either over the whole vocabulary or over the tokens
`token_ids` (`draft_vocab_size` of them).

Folder: config.json and model.safetensors as Apple's ml-recurrent-drafter writes them;
`tie_lm_head`, `draft_vocab_size` and the tensor `token_ids` are this package's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...config.validate import show
from ...errors import ModelError, UnsupportedModelError
from ...models.config_reader import read_json
from ...models.host_arrays import as_torch
from ...models.weights import SINGLE, Checkpoint

__all__ = [
    "Redrafter",
    "RedrafterShape",
    "load_redrafter",
    "read_redrafter_shape",
    "save_redrafter",
]

MODEL_TYPE = "recurrent_drafting_drafter"
TOKEN_IDS = "token_ids"

# Limits of config.json's integers: far above any drafter, there to stop a damaged file before it
# asks for memory.
_LIMITS = {
    "vocab_size": (1, 1 << 24),
    "hidden_size": (1, 1 << 20),
    "exit_dim": (1, 1 << 21),
    "num_draft_layers": (0, 64),
}
# What the first part of a tensor's name is called by other versions of the reference.
_SPELLINGS = {"input_proj": ("input_proj", "input_projs"), "lm_head": ("lm_head", "lm_heads", "0")}


@dataclass(frozen=True)
class RedrafterShape:
    """The fields of config.json that decide what the tensors are.

    vocab_size        tokens of the target
    draft_vocab_size  tokens that the head scores; None: all of the target's
    tie_lm_head       the head is the target's, restricted to `token_ids` if there are any
    """

    vocab_size: int
    hidden_size: int
    exit_dim: int
    num_draft_layers: int
    rnn: bool
    tie_lm_head: bool = False
    draft_vocab_size: int | None = None

    @property
    def has_input_proj(self) -> bool:
        return self.exit_dim != 2 * self.hidden_size

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every floating-point tensor of a checkpoint."""
        hidden, exit_dim, blocks = self.hidden_size, self.exit_dim, self.num_draft_layers
        expected: dict[str, tuple[int, ...]] = {}
        if self.has_input_proj:
            expected["input_proj.weight"] = (exit_dim, 2 * hidden)
            expected["input_proj.bias"] = (exit_dim,)
        for i in range(blocks):
            expected[f"lm_head.{i}.linear.weight"] = (exit_dim, exit_dim)
            expected[f"lm_head.{i}.linear.bias"] = (exit_dim,)
        if not self.tie_lm_head:
            scored = self.draft_vocab_size or self.vocab_size
            expected[f"lm_head.{blocks}.weight"] = (scored, exit_dim)
        if self.rnn:
            expected["rnn_u.weight"] = (hidden, hidden)
            expected["rnn_u.bias"] = (hidden,)
            expected["rnn_w.weight"] = (hidden, hidden)
        return expected


class _Block(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.linear(x))


class Redrafter(nn.Module):
    """The network above; parameters are named as in the checkpoint.

    token_ids  int32 [draft_vocab_size], increasing: the target's token of each score; None where
               every token has one
    """

    token_ids: torch.Tensor | None

    def __init__(self, shape: RedrafterShape, token_ids: torch.Tensor | None = None) -> None:
        super().__init__()
        if (token_ids is None) != (shape.draft_vocab_size is None):
            raise ModelError(
                "redrafter: draft_vocab_size and token_ids go together; give both or neither"
            )
        if token_ids is not None:
            token_ids = _check_token_ids(token_ids, shape, "redrafter")
        self.shape = shape
        hidden, exit_dim = shape.hidden_size, shape.exit_dim
        if shape.has_input_proj:
            self.input_proj = nn.Linear(2 * hidden, exit_dim)
        self.lm_head = nn.ModuleList([_Block(exit_dim) for _ in range(shape.num_draft_layers)])
        if not shape.tie_lm_head:
            scored = shape.draft_vocab_size or shape.vocab_size
            self.lm_head.append(nn.Linear(exit_dim, scored, bias=False))
        if shape.rnn:
            self.rnn_u = nn.Linear(hidden, hidden)
            self.rnn_w = nn.Linear(hidden, hidden, bias=False)
        self.register_buffer(TOKEN_IDS, token_ids)

    def blocks(self) -> list[_Block]:
        """The residual blocks in front of the head."""
        return [block for block in self.lm_head if isinstance(block, _Block)]

    def own_head(self) -> nn.Linear:
        """The drafter's own head; only without tie_lm_head."""
        head = self.lm_head[-1]
        assert isinstance(head, nn.Linear)
        return head

    def initial_state(self, *lead: int) -> torch.Tensor:
        """Zeros [*lead, H]: the state before the golden token."""
        some = next(self.parameters())
        return torch.zeros(*lead, self.shape.hidden_size, dtype=some.dtype, device=some.device)

    def next_state(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """The state [.., H] after a token with this embedding [.., H]."""
        if not self.shape.rnn:
            return state + embedding
        return functional.silu(self.rnn_w(embedding) + self.rnn_u(state))

    def features(self, context: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """What the head reads [.., exit_dim], of hidden states [.., H] and states [.., H]."""
        x = torch.cat((context, state), dim=-1)
        if self.shape.has_input_proj:
            x = self.input_proj(x)
        for block in self.blocks():
            x = block(x)
        return x

    def scores(
        self, features: torch.Tensor, target_head: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores [.., V'] of features [.., exit_dim].

        target_head  [V', exit_dim], with tie_lm_head alone: the rows of the target's head that
                     belong to `token_ids`, or all of them
        """
        if not self.shape.tie_lm_head:
            result: torch.Tensor = self.own_head()(features)
            return result
        if target_head is None:
            raise ValueError("tie_lm_head: scores() needs the target's head")
        return functional.linear(features, target_head)


def save_redrafter(
    model: Redrafter,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float16,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and model.safetensors; `extra` are more fields of config.json.

    Raises ModelError for a value that is not finite in `dtype`.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value = value.detach().to(device="cpu", dtype=dtype)
            if not torch.isfinite(value).all():
                raise ModelError(
                    f"redrafter: tensor {name!r} holds values that are not finite in {dtype}; "
                    "nothing was written"
                )
        tensors[name] = value.cpu().contiguous()
    config: dict[str, Any] = {"model_type": MODEL_TYPE, **asdict(model.shape)}
    if model.shape.draft_vocab_size is None:
        del config["draft_vocab_size"]
    if not model.shape.tie_lm_head:
        del config["tie_lm_head"]
    config["num_lookback_tokens"] = 0
    clash = set(config) & set(extra or {}) - {"num_lookback_tokens"}
    if clash:
        raise ModelError(f"redrafter: extra field {sorted(clash)[0]!r} is the drafter's own")
    config.update(extra or {})
    config["dtype"] = str(dtype).removeprefix("torch.")
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def read_redrafter_shape(folder: str | Path) -> RedrafterShape:
    """config.json of a drafter's folder, checked. Raises ModelError."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ModelError(
            f"redrafter model = {str(folder)!r} {kind}; give a local folder with config.json and "
            f"{SINGLE} (Apple's ml-recurrent-drafter format); nothing is downloaded"
        )
    path = folder / "config.json"
    raw = read_json(path, "the drafter's configuration")
    model_type = raw.get("model_type")
    if model_type != MODEL_TYPE:
        raise UnsupportedModelError(
            f"{path}: model_type = {show(model_type)}: a ReDrafter has {MODEL_TYPE!r}; is this the "
            "folder of the target or of other heads?"
        )
    numbers = {name: _integer(path, raw, name, *limits) for name, limits in _LIMITS.items()}
    rnn = _flag(path, raw, "rnn", None)
    tied = _flag(path, raw, "tie_lm_head", False)
    scored = None
    if raw.get("draft_vocab_size") is not None:
        scored = _integer(path, raw, "draft_vocab_size", 1, numbers["vocab_size"])
    shape = RedrafterShape(**numbers, rnn=rnn, tie_lm_head=tied, draft_vocab_size=scored)
    if tied and shape.exit_dim != shape.hidden_size:
        raise ModelError(
            f"{path}: tie_lm_head with exit_dim = {shape.exit_dim}: the target's head reads "
            f"hidden_size = {shape.hidden_size} values; the two must be equal"
        )
    return shape


def load_redrafter(
    folder: str | Path, dtype: torch.dtype = torch.float32, *, allow_pickle: bool = False
) -> Redrafter:
    """The drafter of a folder, in evaluation mode.

    Raises ModelError naming the file, the field or tensor, and what was expected: for a damaged
    or foreign configuration, missing, extra or misshapen tensors, pickle files
    (unless allowed, then read with weights_only=True), values that are not finite.
    """
    folder = Path(folder).expanduser()
    shape = read_redrafter_shape(folder)
    expected = shape.expected_weights()
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        names = _canonical_names(checkpoint)
        ids = _load_token_ids(checkpoint, shape)
        head = f"lm_head.{shape.num_draft_layers}.weight"
        if head in expected and head not in names:
            raise ModelError(
                f"{folder}: tensor {head!r} {list(expected[head])} is missing from the checkpoint; "
                "if the drafter shares the target's head, config.json must say "
                '"tie_lm_head": true'
            )
        known = {*expected, TOKEN_IDS} if ids is not None else set(expected)
        extra = sorted(set(names) - known)
        if extra:
            entry = checkpoint.entries[names[extra[0]]]
            raise ModelError(
                f"{entry.file}: tensor {names[extra[0]]!r} {list(entry.shape)} (and "
                f"{len(extra) - 1} more) has no place in the drafter that config.json describes; "
                "the files do not belong together"
            )
        checkpoint.check(
            {names.get(name, name): extents for name, extents in expected.items()},
            ignored=(TOKEN_IDS,) if ids is not None else (),
        )
        kind = str(dtype).removeprefix("torch.")
        weights = {name: as_torch(checkpoint.load(names[name], kind)) for name in expected}
        if checkpoint.warnings:
            raise ModelError(
                f"{folder / checkpoint.warnings[0].split('; ')[0]}; the drafter would propose "
                "nothing of use, so it is refused: train or copy it again"
            )
    model = Redrafter(shape, ids)
    if ids is not None:
        weights[TOKEN_IDS] = ids
    model.load_state_dict(weights)
    return model.to(dtype).eval().requires_grad_(False)


def _canonical_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Canonical name -> the name in the file, for every spelling of the reference."""
    names: dict[str, str] = {}
    for found in checkpoint.entries:
        first, _, rest = found.partition(".")
        first = next((ours for ours, all_ in _SPELLINGS.items() if first in all_), first)
        name = f"{first}.{rest}" if rest else first
        if name in names:
            raise ModelError(
                f"{checkpoint.entries[found].file}: tensors {names[name]!r} and {found!r} are two "
                "spellings of the same weight; keep one"
            )
        names[name] = found
    return names


def _load_token_ids(checkpoint: Checkpoint, shape: RedrafterShape) -> torch.Tensor | None:
    entry = checkpoint.entries.get(TOKEN_IDS)
    if shape.draft_vocab_size is None:
        return None
    if entry is None:
        raise ModelError(
            f"{checkpoint.folder}: tensor {TOKEN_IDS!r} [{shape.draft_vocab_size}] is missing; "
            "config.json states draft_vocab_size, so it must say which tokens these are"
        )
    return _check_token_ids(as_torch(checkpoint.load(TOKEN_IDS)), shape, str(entry.file))


def _check_token_ids(ids: torch.Tensor, shape: RedrafterShape, where: str) -> torch.Tensor:
    if ids.dtype not in (torch.int32, torch.int64) or list(ids.shape) != [shape.draft_vocab_size]:
        raise ModelError(
            f"{where}: tensor {TOKEN_IDS!r} is {ids.dtype} {list(ids.shape)}, expected int32 "
            f"[{shape.draft_vocab_size}]"
        )
    first, last = int(ids[0]), int(ids[-1])
    if first < 0 or last >= shape.vocab_size or not bool((ids[1:] > ids[:-1]).all()):
        raise ModelError(
            f"{where}: tensor {TOKEN_IDS!r} must be increasing token ids within "
            f"0..{shape.vocab_size - 1} (it goes from {first} to {last})"
        )
    return ids.to(torch.int32).contiguous()


def _integer(path: Path, raw: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelError(
            f"{path}: {name} = {show(value)}: expected an integer {low}..{high}; the file is "
            "damaged or not a drafter's"
        )
    return value


def _flag(path: Path, raw: Mapping[str, Any], name: str, default: bool | None) -> bool:
    value = raw.get(name, default)
    if not isinstance(value, bool):
        raise ModelError(f"{path}: {name} = {show(value)}: expected true or false")
    return value

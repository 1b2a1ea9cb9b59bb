"""Draft-target decoding: a second, smaller model drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..errors import ConfigError, UnsupportedConfigError
from .base import MODEL_SPELLINGS, Spellings
from .dtypes import normalize_dtype
from .grown_tree import GrownTreeConfig
from .validate import check_bool, check_choice, check_float, check_int, show

__all__ = ["MIN_VOCAB_OVERLAP", "DraftTargetDecodingConfig"]

# allow_vocab_mapping: the share of the smaller vocabulary that both models must have. With less, a
# draft model can seldom say what the target does.
MIN_VOCAB_OVERLAP = 0.5

_MODEL_KEYS = (
    "draft_model", "draft_model_dir", "draft_model_path",
    "speculative_draft_model", "speculative_draft_model_path", "spec_model", "spec_draft_model",
    "assistant_model",
)  # fmt: skip
_LENGTH_KEYS = (
    "k", "num_speculative_tokens", "num_draft_tokens", "num_assistant_tokens", "spec_tokens",
    "spec_draft_n_max",
)  # fmt: skip


@dataclass(frozen=True)
class DraftTargetDecodingConfig(GrownTreeConfig):
    """Drafts from a second model, with the same vocabulary unless allow_vocab_mapping is set.

    model              folder of a Hugging Face model, usually 10 to 50 times smaller than the
                       target (speculative_model and speculative_model_dir are accepted spellings);
                       None: the one shipped for the default model
    max_draft_len      the most drafts of a step, 1..127; for a tree, its nodes
    adaptive           True: draft only as far as it pays. The engine weighs what the draft model's
                       confidence has proved to be worth against the measured time of its passes
                       and of verifying. False: always max_draft_len
    top_k              1: a chain. More: a tree, in which each node gets its top_k likeliest
                       continuations; the max_draft_len likeliest nodes are verified
    max_draft_depth    levels of a tree, 1..max_draft_len. None: 4, or as many as the nodes
                       (max_draft_len) and the 128 rows of a pass allow; for a chain max_draft_len
    min_confidence     end a chain after a draft with a lower probability, 0..1; 0: never
    use_draft_logits   True: sampled requests with acceptance="rejection" draw their drafts from
                       the draft model's distribution and accept by it. False: they propose the
                       likeliest token and accept it with the target's probability
    dtype, model_impl  for the draft model, as LLM's arguments of these names
    max_kv_tokens      tokens that the draft model's KV pages hold; None: as many as the target's.
                       A request that finds no page decodes without drafts
    device             a GPU of its own, "cuda:N": passes run there, beside the target's device.
                       None: the target's first device
    allow_vocab_mapping
                       True: the draft model may have another tokenizer. It drafts the tokens that
                       both have by text, at least MIN_VOCAB_OVERLAP of the smaller vocabulary

    Whatever the draft model says, greedy output is the target's own and sampled output has the
    target's distribution. Raises ConfigError.
    """

    method: ClassVar[str] = "draft_target"
    words: ClassVar[str] = "a draft model"
    aliases: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(_MODEL_KEYS, "model"),
        **dict.fromkeys(_LENGTH_KEYS, "max_draft_len"),
        "speculative_eagle_topk": "top_k",
        "speculative_num_steps": "max_draft_depth",
        "spec_draft_p_min": "min_confidence",
        "assistant_confidence_threshold": "min_confidence",
        "use_draft_probs": "use_draft_logits",
        "draft_dtype": "dtype",
        "use_heterogeneous_vocab": "allow_vocab_mapping",
    }

    spellings: ClassVar[Spellings] = MODEL_SPELLINGS

    model: str | Path | None = None
    max_draft_len: int = 4
    adaptive: bool = True
    top_k: int = 1
    max_draft_depth: int | None = None
    min_confidence: float = 0.0
    use_draft_logits: bool = True
    dtype: str = "auto"
    model_impl: str = "auto"
    max_kv_tokens: int | None = None
    device: str | None = None
    allow_vocab_mapping: bool = False

    def __post_init__(self) -> None:
        where = "DraftTargetDecodingConfig."
        model = self.model
        if model is not None and (not isinstance(model, (str, Path)) or not str(model)):
            raise ConfigError(
                f"{where}model = {show(model)}: expected the folder of a draft model with the "
                "target's vocabulary, or None for the one shipped for the default model"
            )
        self._check_tree("draft model")
        self._set(
            model=None if model is None else str(model),
            min_confidence=check_float(
                where + "min_confidence", self.min_confidence, ConfigError, low=0.0, high=1.0
            ),
            dtype=normalize_dtype(where + "dtype", self.dtype),
            model_impl=check_choice(
                where + "model_impl",
                self.model_impl,
                ("auto", "native", "transformers"),
                ConfigError,
            ),
        )
        if self.max_kv_tokens is not None:
            tokens = check_int(where + "max_kv_tokens", self.max_kv_tokens, ConfigError, low=1)
            self._set(max_kv_tokens=tokens)
        if self.device is not None:
            self._set(device=_check_device(where + "device", self.device))
        for name in ("adaptive", "use_draft_logits", "allow_vocab_mapping"):
            check_bool(where + name, getattr(self, name), ConfigError)
        self._check_options()

    @classmethod
    def normalize_keys(cls, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Other projects' keys whose meaning is not a mere name."""
        result = dict(values)

        def take(name: str) -> Any:
            for raw in list(result):
                if isinstance(raw, str) and raw.lower().replace("-", "_") == name:
                    return result.pop(raw)
            return None

        # TensorRT-LLM counts levels in max_draft_len, nodes here; SGLang counts the golden token.
        nodes, levels = take("max_total_draft_tokens"), take("speculative_num_steps")
        counted = take("speculative_num_draft_tokens")
        if nodes is not None:
            nodes = check_int("max_total_draft_tokens", nodes, ConfigError, low=1)
            levels = take("max_draft_len") if levels is None else levels
        elif counted is not None:
            nodes = check_int("speculative_num_draft_tokens", counted, ConfigError, low=2) - 1
        if nodes is None and levels is not None:
            nodes = levels
        if nodes is not None:
            result["max_draft_len"] = nodes
        if levels is not None and levels != nodes:
            result["max_draft_depth"] = levels
        size = take("draft_tensor_parallel_size")
        if size is not None and check_int("draft_tensor_parallel_size", size, ConfigError) != 1:
            raise UnsupportedConfigError(
                f"draft_tensor_parallel_size = {size}: only 1 is supported in this version"
            )
        how = take("draft_sample_method")
        if how is not None:
            choices = ("greedy", "probabilistic")
            chosen = check_choice("draft_sample_method", how, choices, ConfigError)
            result["use_draft_logits"] = chosen == "probabilistic"
        return result


def _check_device(what: str, device: object) -> str:
    """One device's name; whether it can be used is only known once torch is loaded."""
    if not isinstance(device, str) or not device:
        raise ConfigError(
            f"{what} = {show(device)}: expected the name of a device, such as 'cuda:0', got "
            f"{type(device).__name__}; None: the target's first device"
        )
    if "," in device:
        raise UnsupportedConfigError(
            f"{what} = {device!r}: {device.count(',') + 1} devices, and a draft model is not "
            "spread over several; name one"
        )
    return device

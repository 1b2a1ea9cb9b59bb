"""What `specdec train-*` takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config.validate import check_choice, check_int
from ..errors import ConfigError
from ..models.config_reader import ModelConfig
from .collect import CollectConfig
from .loop import MAX_TERMS, TrainSettings

__all__ = ["DEFAULT_PROMPTS", "PRODUCTS", "TrainOptions", "default_settings"]

PRODUCTS = ("medusa", "redrafter", "drafter", "eagle3")
# Built-in prompts that the shipped files were made with.
DEFAULT_PROMPTS = 4096
DEFAULT_VOCAB, DEFAULT_NEURONS = 8192, 768


@dataclass(frozen=True)
class TrainOptions:
    """Everything that `specdec train-*` takes.

    model               target's folder or GGUF file; None: the built-in default model
    output              folder for the result; must not hold other files
    data                files of texts that the target reads (user_data.py)
    prompts             files of which the prompts are taken: the target writes the answers.
                        Neither: the built-in prompts
    chat_template       a built-in name, a file, "none"; None: the tokenizer's, or none
    cache_dir           of the texts, shared by products and runs; None: below the cache root
    work_dir            of the checkpoint; None: below the cache root, until the run is done
    collect             what data; see CollectConfig
    collect_time_limit  seconds after which collecting stops and training takes what is there
    settings            see TrainSettings
    draft_vocab_size    tokens that the heads score; None: 8192, or all where there are fewer
    num_heads           Medusa heads
    num_layers          residual blocks per head (Medusa, ReDrafter) or decoder layers (drafter)
    draft_len           steps trained over (ReDrafter, EAGLE-3)
    intermediate_size   MLP neurons of a layer (drafter, EAGLE-3); None: 768, or all where there are
                        fewer
    dtype               of the stored weights
    exclude             files whose texts must not be trained on (13-word overlap)
    device              "cpu", "cuda" or "cuda:N"
    measure_prompts     held-out prompts that the result is tried out on; 0: it is not
    measure_tokens      most tokens of each
    """

    product: str
    output: Path
    model: Path | None = None
    data: tuple[Path, ...] = ()
    prompts: tuple[Path, ...] = ()
    chat_template: str | None = None
    cache_dir: Path | None = None
    work_dir: Path | None = None
    collect: CollectConfig = field(default_factory=CollectConfig)
    collect_time_limit: float | None = None
    settings: TrainSettings = field(default_factory=TrainSettings)
    draft_vocab_size: int | None = None
    num_heads: int = 4
    num_layers: int = 2
    draft_len: int = 5
    intermediate_size: int | None = None
    dtype: str = "float16"
    exclude: tuple[Path, ...] = ()
    device: str = "cpu"
    measure_prompts: int = 8
    measure_tokens: int = 96
    command: str = ""

    def __post_init__(self) -> None:
        check_choice("product", self.product, PRODUCTS, ConfigError)
        for name, low, high in (
            ("draft_vocab_size", 16, 1 << 20),
            ("num_heads", 1, MAX_TERMS),
            ("num_layers", 1, 16),
            ("draft_len", 1, MAX_TERMS),
            ("intermediate_size", 8, 1 << 20),
            ("measure_prompts", 0, 1 << 16),
            ("measure_tokens", 1, 1 << 16),
        ):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), ConfigError, low=low, high=high)
        if self.data and self.prompts:
            raise ConfigError("data and prompts: give one of them: texts that are trained on as "
                              "they are, or prompts that the target answers")  # fmt: skip
        kinds = ("float16", "bfloat16", "float32")
        check_choice(
            "dtype", self.dtype, (*kinds, "int8") if self.product == "medusa" else kinds,
            ConfigError,
        )  # fmt: skip
        kind, _, number = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
            raise ConfigError(f"device = {self.device!r}: expected 'cpu', 'cuda' or 'cuda:N'")

    def for_target(self, config: ModelConfig) -> TrainOptions:
        """With a number for each limit that follows from the target."""
        neurons = int(getattr(config.hf, "intermediate_size", None) or DEFAULT_NEURONS)
        return replace(
            self,
            draft_vocab_size=self.draft_vocab_size or min(DEFAULT_VOCAB, config.vocab_size),
            intermediate_size=self.intermediate_size or min(DEFAULT_NEURONS, neurons),
        )


def default_settings(product: str) -> TrainSettings:
    """The settings that the shipped files were made with."""
    if product == "drafter":
        return TrainSettings(learning_rate=1e-3, batch_texts=4, steps=3000)
    return TrainSettings()

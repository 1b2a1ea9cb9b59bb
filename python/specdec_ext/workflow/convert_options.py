"""What `specdec convert` is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.dtypes import normalize_dtype
from ..config.quantization import Quantization
from ..config.ranks import MAX_RANKS
from ..config.validate import check_int
from ..errors import ConfigError, UnsupportedConfigError

__all__ = ["SHARD_BYTES", "ConvertOptions"]

SHARD_BYTES = 1 << 30


@dataclass(frozen=True)
class ConvertOptions:
    """What `specdec convert` is told. Raises ConfigError, UnsupportedConfigError.

    dtype            "auto": as the checkpoint says, a GGUF file's weights in their own width
    quantization     as LLM takes it: matrices become blocks (native families); `narrowing` is the
                     same, checked
    tp_size          ranks that the model will be spread over: each gets shards of its own rows
    perplexity       a text whose perplexity is told before and after quantization
    medusa_model     Medusa heads for this model, to be kept beside it
    redrafter_model  a ReDrafter for this model
    shard_bytes      a shard is closed before it grows beyond this
    """

    dtype: str = "auto"
    quantization: str | Mapping[str, Any] | None = None
    tp_size: int = 1
    pp_size: int = 1
    perplexity: Path | None = None
    medusa_model: Path | None = None
    redrafter_model: Path | None = None
    allow_pickle: bool = False
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        if self.pp_size != 1:
            raise UnsupportedConfigError(
                f"pp_size = {self.pp_size}: limit 1, pipelines of several devices are not "
                "supported in this version; use --pp_size=1"
            )
        check_int("tp_size", self.tp_size, ConfigError, low=1, high=MAX_RANKS)
        object.__setattr__(self, "dtype", normalize_dtype("dtype", self.dtype))
        if self.quantization is not None:
            Quantization.of(self.quantization)
        if self.perplexity is not None and (self.quantization is None or self.tp_size > 1):
            raise ConfigError(
                "perplexity: of a model before and after quantization, on one rank; give "
                "--quantization, and no --tp_size"
            )
        check_int("shard_bytes", self.shard_bytes, ConfigError, low=1)

    @property
    def narrowing(self) -> Quantization | None:
        return None if self.quantization is None else Quantization.of(self.quantization)

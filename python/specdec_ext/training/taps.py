"""The target's hidden states of three layers for texts that training meets.

They are six times what the cache of texts holds of a token, so they are not written: the target
reads a text when it is first met, and as many as fit are kept in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _core
from ..engine.kv_pages import KvPages
from ..engine.memory_plan import available_memory_bytes
from ..errors import ModelError
from ..models import load_model
from ..models.config_reader import ModelConfig
from ..models.native import NativeModel
from ..models.place import CPU
from .cache import TextRecord

__all__ = ["TargetTaps", "kept_bytes"]

_ROWS, _PAGE = 512, 16


def kept_bytes(free: int) -> int:
    """How much of the states is kept where `free` bytes of the host's memory are: a quarter, and
    2 GiB at least. A text beyond that is read each time that training meets it."""
    return max(2 << 30, free // 4)


class TargetTaps:
    """States of `layers` of the target (NativeModel.set_taps), which the CPU reads.

    Raises ModelError for a target that the native decoder does not run.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        self._config, self._layers = config, tuple(layers)
        self._left = kept_bytes(available_memory_bytes())
        self._kept: dict[str, torch.Tensor] = {}
        self._length = 0  # of the texts that the model has pages for

    def of(self, record: TextRecord, begin: int) -> torch.Tensor:
        """float16 [len(record.tokens) - 1 - begin, len(layers) * hidden_size]: of all tokens from
        place `begin` on but the last. A text has the same `begin` every time."""
        found = self._kept.get(record.key)
        if found is None:
            found = self._read(record.tokens[:-1].tolist())[begin:].clone()
            size = found.numel() * found.element_size()
            if size <= self._left:
                self._kept[record.key] = found
                self._left -= size
        return found

    def _read(self, tokens: list[int]) -> torch.Tensor:
        if len(tokens) > self._length:
            self._load(max(2 * self._length, len(tokens), 1024))
        result = torch.empty(len(tokens), self._taps.shape[1], dtype=torch.float16)
        for at in range(0, len(tokens), _ROWS):
            rows = tokens[at : at + _ROWS]
            pages = [range(-(-self._length // _PAGE))]
            self._model.forward(_core.make_step_plan([rows], kv_len=[at], page_table=pages))
            result[at : at + len(rows)] = torch.from_numpy(self._taps[: len(rows)])
        if not bool(torch.isfinite(result).all()):
            raise ModelError(
                f"{self._config.path}: a hidden state of layers {self._layers} is not finite in "
                "float16; a head cannot be trained on it"
            )
        return result

    def _load(self, length: int) -> None:
        length = min(length, self._config.max_position or length)
        model = load_model(
            self._config.path, max_rows=_ROWS, max_seq_len=length, model_impl="native"
        )
        assert isinstance(model, NativeModel)
        self._pages = KvPages(model, -(-length // _PAGE), _PAGE, CPU)
        model.bind_cache(*self._pages.tensors)
        self._model, self._taps, self._length = model, model.set_taps(self._layers), length

"""NativeModel: checkpoint weights in the fused decoder of the C++ core (_core.LlamaDecoder)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..config.quantization import Quantization
from ..errors import ModelError, SpecdecError
from ..log import logger
from .base import ModelInfo
from .block_checkpoint import BlockCheckpoint
from .cache_check import check_cache
from .config_reader import ModelConfig
from .draft_vocab import ScoredRows
from .fused_rows import FusedCheckpoint
from .gguf_weights import GgufCheckpoint
from .host_arrays import converted, like, take_rows
from .kv_storage import KV_SCALE_SUFFIXES, KvStorage
from .native_config import NativeShape
from .open_checkpoint import open_checkpoint
from .packed_file import PackedFile
from .place import CPU
from .quant_checkpoint import QuantCheckpoint
from .quantize import check_quantizable, quantized_loader, worst_first
from .rank_checkpoint import RankCheckpoint
from .rope import max_position, rope_parameters, rope_tables
from .shard import Shard, take_columns
from .weights import Checkpoint

if TYPE_CHECKING:
    import torch

__all__ = [
    "DERIVED_SUFFIXES",
    "IGNORED_SUFFIXES",
    "NativeModel",
    "served_positions",
    "shape_info",
]

# Rotary tables above this many positions are cut unless max_seq_len asks for more: 128 MiB at
# head_dim 128.
_DEFAULT_TABLE_POSITIONS = 1 << 18

# Tensors that old checkpoints carry and that are derived, not learned.
DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.masked_bias")
# And the scales of fp8 K/V, which kv_storage.py reads and which say nothing to K/V in floats.
IGNORED_SUFFIXES = (*DERIVED_SUFFIXES, *KV_SCALE_SUFFIXES)
# Checkpoints that know weights which are no floats.
_WITH_WIDTHS = (GgufCheckpoint, BlockCheckpoint, QuantCheckpoint, RankCheckpoint, FusedCheckpoint)
# Entries of decoder_config() that say nothing of the weights.
_OF_A_RUN = ("max_rows", "max_position", "sliding_window", "sink_tokens", "has_fast_forms")


class NativeModel:
    """A StepModel on the native decoder (`impl` "native").

    numerics        "exact"; "fast" for one of several ranks that add up partial sums, and where
                    passes of many rows round more of their inputs to bfloat16
    has_fast_forms  they do so with those of quantised weights
    weights_config  the entries of decoder_config() that packed weights depend on
    quantization_errors
                    of matrices that were narrowed at load: (name, relative error), worst first
    """

    impl = "native"
    numerics = "exact"
    place = CPU
    best_ids: np.ndarray | None = None  # see StepModel.forward

    def __init__(
        self,
        config: ModelConfig,
        shape: NativeShape,
        dtype: str,
        *,
        impl_reason: str,
        max_rows: int,
        max_seq_len: int | None = None,
        allow_pickle: bool = False,
        scored: ScoredRows | None = None,
        own_widths: bool = False,
        quantization: Quantization | None = None,
        shard: Shard | None = None,
        kv_storage: KvStorage | None = None,
        packed: PackedFile | None = None,
        fast: bool = False,
    ) -> None:
        """dtype         of K and V, and of the weights
        scored        rows of the head that are kept, None: all
        own_widths    weights stay as the GGUF file, or a converted folder, has them
        quantization  weights become blocks
        shard         the part of every projection that is loaded, of a tensor-parallel model
        kv_storage    how the pages hold K and V; None: in `dtype`
        packed        the weights of just this model, which are mapped; None: they are read and
                      packed
        fast          a row's bits may depend on how many rows a pass has, where that saves time
        """
        notes: list[str] = []
        if _core.cpu_isa() == "plain":
            _warn_of_plain_kernels()
        self.max_position = served_positions(config, max_seq_len, notes)
        self._max_rows = max_rows
        self.vocab_size = shape.vocab_size
        self.hidden_size = shape.hidden_size
        self.num_layers = shape.num_layers
        self.num_kv_heads, self.head_dim = shape.num_kv_heads, shape.head_dim
        self.layer_windows, self.sink_tokens = shape.sliding_window, shape.sink_tokens
        self.shard = shard
        if shard is not None and shard.sums:
            self.numerics = "fast"
        self.kv_dtype_name = dtype
        self.kv_storage = kv_storage or KvStorage(dtype)
        if shard is not None:
            self.num_kv_heads = shard.num_kv_heads
            own = shard.kv_heads[shard.rank], shard.kv_heads[shard.rank + 1]
            self.kv_storage = self.kv_storage.of_heads(*own)
        self._scored = scored
        self.head_ids = None if scored is None else scored.token_ids
        self.num_scores = shape.vocab_size if scored is None else len(scored.token_ids)
        expected = shape.expected_weights()
        if "lm_head.weight" in expected and scored is not None:
            expected["lm_head.weight"] = (scored.file_rows, shape.hidden_size)
        tied = ("lm_head.weight",) if shape.tie_word_embeddings else ()
        how = decoder_config(
            shape,
            "float32" if own_widths or quantization else dtype,
            max_rows,
            self.max_position,
            self.num_scores,
            shard,
        )
        how["has_fast_forms"] = fast and shard is None
        self._decoder = _core.LlamaDecoder(**how)
        self.weights_config = {name: how[name] for name in how if name not in _OF_A_RUN}
        self.quantization_errors: tuple[tuple[str, float], ...] = ()
        if packed is not None:
            packed.check_config(self.weights_config)
            ropes = packed.give(self._decoder, self.max_position)
            width = str(packed.weights.get("width"))
            notes += packed.warnings
            self.bytes_read = packed.num_bytes
        else:
            ropes, width = frozenset[int](), str(quantization or dtype)
            errors: dict[str, float] = {}
            with open_checkpoint(config, allow_pickle=allow_pickle, shard=shard) as checkpoint:
                checkpoint.check(expected, ignored=tied, ignored_suffixes=IGNORED_SUFFIXES)
                try:
                    if own_widths and isinstance(checkpoint, _WITH_WIDTHS):
                        width = checkpoint.main_format()
                        self._give_weights(shape, checkpoint.weight, expected, checkpoint)
                    else:
                        load: Callable[..., Any] = partial(checkpoint.load, dtype=dtype)
                        if quantization is not None:
                            whole: Any = partial(checkpoint.load, dtype="float32")
                            ties = shape.tie_word_embeddings
                            stay = check_quantizable(
                                config.path, expected, quantization, dtype=dtype, tied=ties
                            )
                            notes += [] if stay is None else [stay]
                            load = quantized_loader(
                                whole, quantization, errors, dtype=dtype, tied=ties
                            )
                        self._give_weights(shape, load, expected, checkpoint)
                except SpecdecError:
                    raise
                except ValueError as error:
                    raise ModelError(f"{config.path}: {error}") from error
                notes += checkpoint.warnings
                self.bytes_read = checkpoint.bytes_read
            self.quantization_errors = worst_first(errors)
            for name, lost in self.quantization_errors[:3]:
                logger.info("%s: %s: relative error %.4f", quantization, name, lost)
        for index in sorted(set(shape.rope_index) - {-1} - ropes):
            kind = shape.rope_layer_types[index]
            self._decoder.set_rope(index, *rope_tables(config.hf, self.max_position, kind))
        reason = "every row count runs through the same kernels"
        if shard is not None and shard.sums:
            reason = "sums are added up across ranks; a row's bits depend on their number alone"
        self.has_fast_forms = bool(self._decoder.has_fast_forms)
        has_fast_attention = bool(how["has_fast_forms"]) and _core.has_fast_attention(
            self.kv_storage.dtype, self.head_dim
        )
        if self.has_fast_forms or has_fast_attention:
            self.numerics = "fast"
            reason = "passes of many rows multiply in bfloat16"
        self.info = shape_info(
            config,
            shape,
            expected,
            max_position=self.max_position,
            impl=self.impl,
            impl_reason=impl_reason,
            numerics=self.numerics,
            numerics_reason=reason,
            dtype=width,
            weight_bytes=int(self._decoder.weight_bytes),
            attention=(
                f"spec_attention in the native decoder ({_core.cpu_isa()}, "
                f"{self.kv_storage.in_words})"
            ),
            warnings=tuple(notes),
        )

    def _give_weights(
        self,
        shape: NativeShape,
        load: Callable[..., Any],
        expected: Mapping[str, Any],
        checkpoint: Checkpoint | GgufCheckpoint | RankCheckpoint | FusedCheckpoint,
    ) -> None:
        """Copy the checkpoint into the decoder, one layer at a time: never all of it twice."""
        if self.shard is not None:
            load = partial(_load_part, load, self.shard, expected)
        embeds = self.shard is None or self.shard.rank == 0
        embedding: Any = load("model.embed_tokens.weight") if embeds else None
        if embeds:
            self._decoder.set_embedding(embedding)
        elif shape.tie_word_embeddings:
            self._decoder.set_head(load("model.embed_tokens.weight"))
        scored = self._scored
        if scored is not None and shape.tie_word_embeddings:
            self._decoder.set_head(_take_rows(embedding, scored.token_ids))
        elif not shape.tie_word_embeddings:
            head = load("lm_head.weight")
            self._decoder.set_head(head if scored is None else _take_rows(head, scored.places))
        self._decoder.set_final_norm(load("model.norm.weight"))
        for layer in range(shape.num_layers):
            prefix = f"model.layers.{layer}."
            names = [name for name in expected if name.startswith(prefix)]
            if self.shard is not None:
                names = [name for name in names if self.shard.holds(name)]
            self._decoder.set_layer(
                layer, {name.removeprefix(prefix): load(name) for name in names}
            )
            checkpoint.drop_pages()
            self._layer_was_read()

    def _layer_was_read(self) -> None:
        """Whoever is one of several looks after the others."""

    @property
    def core(self) -> Any:
        """The _core.LlamaDecoder: for what is built upon the target in C++."""
        return self._decoder

    @property
    def kv_dtype(self) -> torch.dtype:
        """See StepModel."""
        import torch

        dtype: torch.dtype = getattr(torch, self.kv_dtype_name)
        return dtype

    def bind_cache(self, k_pages: Any, v_pages: Any) -> None:
        """See StepModel."""
        check_cache(self, k_pages, v_pages)
        storage = self.kv_storage
        self._decoder.bind_cache(k_pages, v_pages, storage.k_scale, storage.v_scale)
        self._pages = (k_pages, v_pages)

    def set_taps(self, layers: Sequence[int], max_rows: int = 0) -> np.ndarray:
        """float32 [max_rows, len(layers) * hidden_size]: from now on each pass leaves there, by the
        rows of its plan, the residual stream as it enters these layers (num_layers: as it leaves
        the last)."""
        taps = np.zeros(
            (max(max_rows, self._max_rows), len(layers) * self.hidden_size), dtype=np.float32
        )
        self._decoder.set_taps(list(layers), taps)
        return taps

    def forward(self, plan: Any, hidden: Any = None) -> np.ndarray:
        """See StepModel."""
        if plan.needs_logits:
            scores = np.empty((plan.num_logit_rows, self.num_scores), dtype=np.float32)
            self.best_ids = np.empty(plan.num_logit_rows, dtype=np.int32)
            self._decoder.forward(plan, scores, hidden, self.best_ids)
            return scores
        ids = np.empty(plan.num_logit_rows, dtype=np.int32)
        self._decoder.forward(plan, ids, hidden)
        return ids

    def read_weights(self) -> int:
        """Read the weights as a greedy pass does and do nothing else: its floor. A checksum."""
        return int(self._decoder.read_weights())

    def embed(self, token_ids: Any) -> Any:
        """See StepModel."""
        ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        rows = np.empty((len(ids), self.hidden_size), dtype=np.float32)
        self._decoder.embed(ids, rows)
        return like(token_ids, rows)

    def head(self, hidden: Any) -> Any:
        """See StepModel."""
        states = np.ascontiguousarray(hidden)
        scores = np.empty((states.shape[0], self.num_scores), dtype=np.float32)
        self._decoder.score_rows(states, scores)
        return like(hidden, scores)

    def head_rows(self, token_ids: Any) -> Any:
        """See StepModel."""
        ids = np.ascontiguousarray(token_ids, dtype=np.int32).reshape(-1)
        rows = np.empty((len(ids), self.hidden_size), dtype=np.float32)
        self._decoder.unpack_head_rows(ids, rows)
        return like(token_ids, rows)


@functools.cache
def _warn_of_plain_kernels() -> None:
    logger.warning(
        "products run in plain C++, many times slower: this processor has no AVX2 (or "
        "SPECDEC_CPU_ISA rules it out)"
    )


def decoder_config(
    shape: NativeShape,
    dtype: str,
    max_rows: int,
    max_position: int,
    head_size: int = 0,
    shard: Shard | None = None,
) -> dict[str, Any]:
    """The arguments _core.LlamaDecoder is made from; `head_size`: 0 for the whole vocabulary."""
    owns_table = shard is None or shard.rank == 0
    whole = head_size in (0, shape.vocab_size)
    # transformers keeps sqrt(hidden) as a float32 buffer and rounds it to the embedding's dtype.
    root = np.array([shape.hidden_size**0.5], dtype=np.float32)
    rounded: Any = converted(converted(root, dtype), "float32")
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_rows": max_rows,
        "max_position": max_position,
        "rms_norm_eps": shape.rms_norm_eps,
        "activation": shape.activation,
        "attention_scale": shape.attention_scale,
        "attention_softcap": shape.attention_softcap,
        "final_softcap": shape.final_softcap,
        "embedding_scale": float(rounded[0]) if shape.scales_embedding else 1.0,
        "norm_offset": shape.norm_offset,
        "has_qk_norm": shape.has_qk_norm,
        "has_sandwich_norms": shape.has_sandwich_norms,
        # A head of some rows is a separate matrix.
        "tie_word_embeddings": shape.tie_word_embeddings and whole and owns_table,
        "head_size": head_size,
        "rope_index": list(shape.rope_index),
        "sliding_window": list(shape.sliding_window),
        "sink_tokens": shape.sink_tokens,
        **(shard.decoder_arguments() if shard is not None else {}),
    }


def _take_rows(weight: Any, rows: np.ndarray) -> Any:
    """Some rows of a float tensor, or of (blocks, format)."""
    if isinstance(weight, tuple):
        return np.ascontiguousarray(weight[0][rows]), weight[1]
    return take_rows(weight, rows)


def _load_part(load: Callable[..., Any], shard: Shard, shapes: Mapping[str, Any], name: str) -> Any:
    weight, columns = load(name, rows=shard.rows(name)), shard.columns(name)
    return weight if columns is None else take_columns(weight, columns, shapes[name][1], name)


def served_positions(config: ModelConfig, max_seq_len: int | None, notes: list[str]) -> int:
    """Positions that a decoder makes rotary tables for; a cut is noted."""
    limit = max_position(config.hf)
    stated = config.max_position or limit
    if limit < stated and (max_seq_len is None or max_seq_len > limit):
        notes.append(
            f"rope_type 'longrope': {limit} of {stated} positions are served; texts that grow "
            "longer have other frequencies from their first token on"
        )
    if max_seq_len is not None:
        return min(limit, max_seq_len)
    if limit > _DEFAULT_TABLE_POSITIONS:
        notes.append(
            f"the model has {limit} positions, {_DEFAULT_TABLE_POSITIONS} are served; set "
            "max_seq_len to use more"
        )
        return _DEFAULT_TABLE_POSITIONS
    return limit


def shape_info(
    config: ModelConfig,
    shape: NativeShape,
    weights: Mapping[str, tuple[int, ...]],
    **how: Any,
) -> ModelInfo:
    """What is to be said of a model of this shape; `how`: what its implementation knows."""
    return ModelInfo(
        path=config.path,
        architecture=config.architecture or config.model_type,
        model_type=config.model_type,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        pad_token_id=config.pad_token_id,
        tie_word_embeddings=shape.tie_word_embeddings,
        sliding_window=max(shape.sliding_window),
        rope_types=tuple(
            str(rope_parameters(config.hf, kind).get("rope_type", "default"))
            for kind in shape.rope_layer_types
        ),
        num_parameters=sum(math.prod(s) for s in weights.values()),
        **how,
    )

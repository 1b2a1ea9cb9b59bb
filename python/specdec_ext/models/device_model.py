"""DeviceModel: checkpoint weights in the decoder of a CUDA device (or of its emulation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from ..config.quantization import Quantization
from ..errors import ConfigError, ModelError
from .cache_check import check_cache
from .config_reader import ModelConfig
from .device_blocks import Loaded, some_rows
from .device_decoder import DeviceDecoder
from .device_ranks import DeviceRanks
from .device_source import DeviceSource
from .device_step import DeviceStep, PlanStaging
from .device_weights import load_weights, random_weights
from .draft_vocab import ScoredRows
from .host_rows import HostRows
from .kv_storage import KvStorage, LayerPool
from .native import IGNORED_SUFFIXES, served_positions, shape_info
from .native_config import NativeShape
from .open_checkpoint import open_checkpoint
from .place import Place
from .quantize import check_quantizable
from .shard import Shard

if TYPE_CHECKING:
    from ..parallel.team import Team

__all__ = ["DeviceModel"]

# The smallest page that the fast attention kernels take.
_FAST_PAGE = 16


class DeviceModel:
    """A StepModel on a device (`impl` "native"): plans and results lie on the host.

    numerics is "fast" (torch's matrix products may give a row other bits in a step of other size)
    unless `exact` was asked for.

    On several ranks rank 0 is the model that an engine sees; the others hold their parts, and
    engine/device_share.py runs them. K/V pages are of a rank's own heads.
    """

    impl = "native"

    def __init__(
        self,
        config: ModelConfig,
        shape: NativeShape,
        dtype: str,
        place: Place,
        *,
        impl_reason: str,
        max_rows: int,
        max_seq_len: int | None = None,
        allow_pickle: bool = False,
        scored: ScoredRows | None = None,
        random_seed: int | None = None,
        exact: bool = False,
        kv_storage: KvStorage | None = None,
        own_widths: bool = False,
        quantization: Quantization | None = None,
        shard: Shard | None = None,
        team: Team | None = None,
    ) -> None:
        """scored       rows of the head that are kept, None: all
        random_seed  random weights in the place of a checkpoint's, for measurements
        own_widths   weights stay as a GGUF file, or a quantised folder, has them, where a device
                     has kernels for that; the others become `dtype`, with one log line
        quantization  weights become blocks
        exact        a row's bits do not depend on the step it is in (device_products.py)
        kv_storage   how the pages hold K and V; None: in `dtype`
        shard, team  the part that is loaded, of a model that is spread over the team's ranks
        """
        notes: list[str] = []
        self.place = place
        self.numerics = "exact" if exact else "fast"
        self.max_position = served_positions(config, max_seq_len, notes)
        self.vocab_size, self.hidden_size = shape.vocab_size, shape.hidden_size
        self.num_layers = shape.num_layers
        self.num_kv_heads, self.head_dim = shape.num_kv_heads, shape.head_dim
        self.layer_windows, self.sink_tokens = shape.sliding_window, shape.sink_tokens
        self.kv_dtype: torch.dtype = getattr(torch, dtype)
        self.kv_storage = kv_storage or KvStorage(dtype)
        pages_dtype: torch.dtype = getattr(torch, self.kv_storage.dtype)
        attention = _attention_instance(shape, self.kv_dtype, pages_dtype, place)
        self.shard, ranks = shard, None
        if shard is not None:
            assert team is not None
            self.num_kv_heads = shard.num_kv_heads
            own = shard.kv_heads[shard.rank], shard.kv_heads[shard.rank + 1]
            self.kv_storage = self.kv_storage.of_heads(*own)
            ranks = DeviceRanks(team, shard, place, dtype=self.kv_dtype, max_rows=max_rows)
        self.head_ids = None if scored is None else torch.from_numpy(scored.token_ids)
        self.quantization_errors: tuple[tuple[str, float], ...] = ()
        expected = shape.expected_weights()
        how: dict[str, Any] = {
            "device": place.device,
            "dtype": self.kv_dtype,
            "positions": self.max_position,
        }
        if random_seed is not None:
            weights = random_weights(config, shape, seed=random_seed, **how)
        else:
            if scored is not None and "lm_head.weight" in expected:
                expected["lm_head.weight"] = (scored.file_rows, shape.hidden_size)
            tied = ("lm_head.weight",) if shape.tie_word_embeddings else ()
            with open_checkpoint(config, allow_pickle=allow_pickle, shard=shard) as checkpoint:
                checkpoint.check(expected, ignored=tied, ignored_suffixes=IGNORED_SUFFIXES)
                if quantization is not None:
                    stay = check_quantizable(
                        config.path, expected, quantization, dtype=dtype, tied=bool(tied)
                    )
                    notes += [] if stay is None else [stay]

                source = DeviceSource(
                    checkpoint,
                    self.kv_dtype,
                    own_widths=own_widths,
                    quantization=quantization,
                    tied=bool(tied),
                    shard=shard,
                    shapes=expected,
                )

                def load(name: str) -> Loaded:
                    tensor = source.load(name)
                    if name == "lm_head.weight" and scored is not None:
                        return some_rows(tensor, torch.from_numpy(scored.places))
                    return tensor

                tied_ids = self.head_ids if shape.tie_word_embeddings else None
                if team is not None:
                    how["layer_was_read"] = team.look
                weights = load_weights(config, shape, load, head_ids=tied_ids, shard=shard, **how)
                notes += checkpoint.warnings
            source.tell(config.path, place.name)
            self.quantization_errors = source.quantization_errors
        self.decoder = DeviceDecoder(
            shape,
            weights,
            place,
            dtype=self.kv_dtype,
            max_rows=max_rows,
            exact=exact,
            kv_storage=self.kv_storage,
            ranks=ranks,
        )
        self.num_scores = self.decoder.num_scores
        self._results = HostRows(place.device, None if ranks is None else ranks.watch)
        self._flags = HostRows(place.device)
        self._hidden = HostRows(place.device)
        self._staging = PlanStaging(place.device)
        self._pages: tuple[torch.Tensor, torch.Tensor] | None = None
        self._narrow_pages: tuple[int, ...] = ()
        self.info = shape_info(
            config,
            shape,
            expected,
            max_position=self.max_position,
            impl=self.impl,
            impl_reason=impl_reason,
            numerics=self.numerics,
            numerics_reason=(
                "products and attention cut every sum by its length alone"
                if exact
                else "torch's matrix products may sum in another order for another number of rows"
                + (", and ranks add up partial sums" if shard is not None else "")
            ),
            dtype=", ".join(sorted(weights.packed_formats())) or dtype,
            device=place.name,
            weight_bytes=weights.step_bytes(),
            attention=(
                f"spec_attention, kernel {attention!r} on {place.name} ({self.kv_storage.in_words})"
            ),
            warnings=tuple(notes),
        )

    @property
    def scratch_bytes(self) -> int:
        """Device memory that passes may take besides what is allocated already."""
        return self.decoder.scratch_bytes(self.max_position)

    def bind_cache(
        self, k_pages: torch.Tensor, v_pages: torch.Tensor, narrow: Sequence[LayerPool] = ()
    ) -> None:
        """See StepModel; the pages lie on the model's device. Layers of `narrow` have theirs in
        pools of their own, K and V have the others."""
        slim = sum(len(pool.layers) for pool in narrow)
        check_cache(self, k_pages, v_pages, self.place.device, self.num_layers - slim)
        for pool in narrow:
            check_cache(self, pool.k, pool.v, self.place.device, len(pool.layers))
        self.decoder.bind_cache(k_pages, v_pages, narrow)
        if self.decoder.ranks is not None:
            self.decoder.ranks.bind(int(k_pages.shape[1]), int(k_pages.shape[3]), narrow)
        self._pages = (k_pages, v_pages)
        self._narrow_pages = tuple(int(pool.k.shape[1]) for pool in narrow)

    def set_taps(self, layers: Sequence[int], max_rows: int = 0) -> torch.Tensor:
        """[max_rows, len(layers) * hidden_size] on the device, of the model's dtype: from now on
        each pass leaves there, by its rows, the residual stream as it enters these layers
        (num_layers: as it leaves the last). max_rows: of a pass, as the model was loaded for."""
        assert max_rows <= self.decoder.max_rows
        return self.decoder.set_taps(layers)

    def stage(self, plan: Any) -> DeviceStep:
        """A host plan on the device; valid until the next call."""
        if self._pages is None:
            raise ModelError("forward() before bind_cache(): the model has no K/V pages")
        return self._staging.stage(plan, self._pages[0].shape[3], self._narrow_pages)

    def forward(self, plan: Any, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """See StepModel: one copy to the device, the pass, one wait for what comes back."""
        step = self.stage(plan)
        assert step.status is not None
        with self.decoder.together():
            rows = self.decoder.forward_rows(step, scores=plan.needs_logits)
            if plan.needs_logits:
                result = self._results.take((len(rows), self.num_scores), torch.float32)
                self.decoder.step_scores(rows, result)
            else:
                result = self._results.take((len(rows),), torch.int32)
                result.copy_(self.decoder.greedy(rows), non_blocking=True)
        flags = self._flags.take((len(step.status),), torch.int32)
        flags.copy_(step.status, non_blocking=True)
        kept = hidden
        if hidden is not None and hidden.device != self.place.device:
            kept = self._hidden.take((len(rows), self.hidden_size), torch.float32)
        if kept is not None:
            kept.copy_(rows, non_blocking=True)
        self._results.wait()
        _check_flags(flags)
        if hidden is not None and kept is not None and kept is not hidden:
            hidden.copy_(kept)
        return result

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See StepModel."""
        ids = token_ids.to(self.place.device)
        return self.decoder.weights.embedding[ids.long()].float().to(token_ids.device)

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """See StepModel; in fast mode other numbers of rows may give other bits."""
        rows = hidden.to(self.place.device, self.kv_dtype)
        scores = torch.empty(len(rows), self.num_scores, dtype=torch.float32, device=rows.device)
        return self.decoder.scores(rows, scores).to(hidden.device)

    def scores_into(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """What head() gives for rows [n, hidden_size] of the model's dtype into `out` float32
        [n, V], all on the device: enqueued, nothing is made there or waited for."""
        self.decoder.scores(hidden, out)

    @torch.inference_mode()
    def embed_rows(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """embed() of int32 ids [n] on the device, into `out` [n, hidden] of the model's dtype."""
        torch.index_select(self.decoder.weights.embedding, 0, token_ids, out=out)

    @torch.inference_mode()
    def score_rows(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """head() of rows [n, hidden] on the device, into `out` float32 [n, V]."""
        self.decoder.scores(hidden, out)

    @torch.inference_mode()
    def head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See StepModel."""
        ids, head = token_ids.to(self.place.device).flatten(), self.decoder.weights.head
        if isinstance(head, ops.PackedWeight):
            return head.rows(ids, self.kv_dtype).float().to(token_ids.device)
        return head[ids.long()].float().to(token_ids.device)


def _attention_instance(
    shape: NativeShape, dtype: torch.dtype, kv_dtype: torch.dtype, place: Place
) -> str:
    """The kernel that serves the model. Raises ConfigError if the device has none."""
    problem = ops.AttentionProblem(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=_FAST_PAGE,
    )
    try:
        limits = ops.device_limits(place.backend, place.device.index or 0)
        return ops.pick_attention(problem, limits)
    except ValueError as error:
        raise ConfigError(f"device = {place.name!r} cannot run this model: {error}") from error


def _check_flags(flags: torch.Tensor) -> None:
    """Bad pages, trees and lengths are our own mistakes; a NaN shows in the ids."""
    bad = [int(flag) & ~1 for flag in flags.tolist()]
    if any(bad):
        raise ModelError(
            f"the device's kernels refused requests of this step: flags {bad} (2: page id, 4: "
            "tree, 8: lengths)"
        )

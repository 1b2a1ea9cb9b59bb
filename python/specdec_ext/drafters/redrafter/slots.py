"""ReDrafter in a step: beams from kept hidden states, their trees into the slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import _core, ops
from ...config.methods import ReDrafterDecodingConfig
from ...errors import ConfigError, ModelError
from ...models.native import NativeModel
from ...models.place import CPU
from ..shipped import folder_of
from ..slot_drafter import DraftInputs
from .checkpoint import RedrafterWeights, read_redrafter
from .packed_model import PackedRedrafter, check_target

if TYPE_CHECKING:
    from .device_beams import DeviceBeams

__all__ = ["HostBeams", "RedrafterDrafter"]


class HostBeams:
    """The search of steps that run where they are enqueued: _core.BeamDrafter, over the requests
    that may draft alone.

    max_requests  slots of the engine
    max_drafts    of a tree
    """

    def __init__(
        self, network: PackedRedrafter, *, vocab_size: int, max_requests: int, max_drafts: int
    ) -> None:
        self._core = _core.BeamDrafter(
            network.core,
            token_ids=network.token_ids,
            max_requests=max_requests,
            vocab_size=vocab_size,
        )
        self._weight_bytes = network.weight_bytes
        self.passes_made = 0  # by the last draft()
        # What drafts were chosen from, by the step's requests; made when somebody asks for it.
        self._laws: ops.DraftProbs | None = None
        self._law_arrays: dict[str, Any] = {}
        self._law_shape = (max_requests, max_drafts, _core.BEAM_SCORES)
        self._keeps_laws = False  # in this step
        self._steps = self._passes = self._rows = 0
        self._seconds = self._thread_seconds = 0.0

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        self._core.enter(slot, **options)
        if options.get("keeps_laws") and self._laws is None:
            laws = self._laws = _make_laws(self._law_shape)
            self._law_arrays = {
                "probs": laws.probs, "ids": laws.vocab_ids, "has_probs": laws.has_probs,
            }  # fmt: skip

    def draft_probs(self, num_requests: int) -> ops.DraftProbs | None:
        return self._laws.first(num_requests) if self._laws and self._keeps_laws else None

    def draft(self, inputs: DraftInputs) -> None:
        assert inputs.hidden is not None  # RedrafterDrafter.needs_hidden
        cost = self._core.draft(
            inputs.layout, inputs.slots, inputs.slot_ids, inputs.max_drafts, inputs.hidden,
            pass_price=inputs.pass_price, **self._law_arrays,
        )  # fmt: skip
        self.passes_made = cost.passes
        self._keeps_laws = False
        if cost.passes:
            if self._law_arrays:
                self._keeps_laws = bool(self._law_arrays["has_probs"].any())
            self._steps += 1
            self._passes += cost.passes
            self._rows += cost.rows
            self._seconds += cost.network_seconds
            self._thread_seconds += cost.network_thread_seconds

    def scratch_bytes(self, max_requests: int) -> int:
        del max_requests
        return 0

    def stats(self) -> dict[str, Any]:
        held = 0 if self._laws is None else 2 * self._laws.probs.nbytes
        return {
            "memory_bytes": self._weight_bytes + held,
            "draft_steps": self._steps,
            "network_passes": self._passes,
            "network_rows": self._rows,
            "network_seconds": self._seconds,
            "network_thread_seconds": self._thread_seconds,
        }


class RedrafterDrafter:
    """See SlotDrafter. The trees hold what a search on the host gives, the likeliest drafts first.

    max_requests  slots of the engine

    Raises ModelError naming the drafter's folder where it does not fit the target, ConfigError
    where the device has no room for the rows of a step.
    """

    name = "redrafter"
    needs_hidden = True

    def __init__(
        self,
        config: ReDrafterDecodingConfig,
        model: Any,
        *,
        max_requests: int,
        allow_pickle: bool = False,
    ) -> None:
        folder = folder_of(config)
        weights = read_redrafter(folder, allow_pickle=allow_pickle)
        place = getattr(model, "place", CPU)
        sizes = {"vocab_size": int(model.vocab_size), "max_requests": max_requests}
        self._beams: HostBeams | DeviceBeams
        try:
            check_target(weights.shape, model)
            if isinstance(model, NativeModel):
                packed = PackedRedrafter(weights, model)
                self._beams = HostBeams(packed, max_drafts=config.max_draft_len, **sizes)
            else:
                self._beams = _on_device(config, weights, model, **sizes)
        except ModelError as error:
            raise type(error)(f"{folder}: {error}") from None
        self._device: str = place.name

    @property
    def passes_made(self) -> int:
        """On the CPU: by the last draft()."""
        return getattr(self._beams, "passes_made", 0)

    def scratch_bytes(self, max_requests: int) -> int:
        """Device memory that a step may take besides what exists from the start."""
        return self._beams.scratch_bytes(max_requests)

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See SlotDrafter; options are those of request/speculation.py."""
        self._beams.enter(slot, options)

    def draft(self, inputs: DraftInputs) -> None:
        """See SlotDrafter."""
        self._beams.draft(inputs)

    def draft_probs(self, num_requests: int) -> ops.DraftProbs | None:
        """See SlotDrafter: of requests with acceptance 'best_beam' what each draft was chosen from,
        the softmax over the best scores of its row."""
        return self._beams.draft_probs(num_requests)

    def stats(self) -> Mapping[str, Any]:
        """See SlotDrafter; on the CPU passes are counted and timed, too."""
        return {"device": self._device, **self._beams.stats()}


def _on_device(
    config: ReDrafterDecodingConfig,
    weights: RedrafterWeights,
    model: Any,
    *,
    vocab_size: int,
    max_requests: int,
) -> DeviceBeams:
    import torch

    from .device_beams import DeviceBeams
    from .model import Redrafter

    try:
        return DeviceBeams(
            Redrafter.of_weights(weights),
            model,
            vocab_size=vocab_size,
            max_requests=max_requests,
            num_beams=config.num_beams,
            length=config.draft_len_per_beam,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"ReDrafterDecodingConfig.num_beams = {config.num_beams}: a step that runs ahead "
            f"scores so many rows for each of max_batch_size = {max_requests} requests, and "
            f"{model.place.name} has no room for them besides the model ({error}); lower one of "
            "them"
        ) from None


def _make_laws(shape: tuple[int, int, int]) -> ops.DraftProbs:
    """As device_beams.make_laws, in arrays."""
    requests = shape[0]
    return ops.DraftProbs(
        np.zeros(shape, dtype=np.float32),
        np.zeros(shape, dtype=np.int32),
        None,
        np.zeros(requests, dtype=np.uint8),
        np.ones(requests, dtype=np.uint8),
    )

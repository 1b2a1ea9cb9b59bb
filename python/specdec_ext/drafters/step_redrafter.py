"""ReDrafter for steps that run ahead: beams on the step's stream, their trees into the slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import _core, ops
from ..drafter_config import ReDrafterDecodingConfig
from ..errors import ConfigError, ModelError
from ..models.place import CPU
from .device_beams import DeviceBeams
from .redrafter import PackedRedrafter, check_target
from .redrafter_model import load_redrafter
from .shipped import shipped_folder
from .step_drafter import DraftInputs

__all__ = ["HostBeams", "StepRedrafter"]


class HostBeams:
    """The search of steps that run where they are enqueued: _core.BeamSearch, over the requests
    that may draft alone.

    max_requests  slots of the engine
    width         drafts of a tree
    """

    def __init__(
        self, network: PackedRedrafter, *, vocab_size: int, max_requests: int, width: int
    ) -> None:
        self._network, self._vocab_size = network, vocab_size
        # What the request of each slot asked for; nothing: no drafts.
        self._options: list[Mapping[str, Any]] = [{}] * max_requests
        self._search = _core.BeamSearch()

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(max_requests, *shape, dtype=torch.int32)

        self._golden, self._lens, self._room = ints(1), ints(), ints()
        self._tokens, self._parents = ints(width), ints(width)
        self._steps = self._passes = self._rows = 0
        self._seconds = 0.0

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        self._options[slot] = options

    def draft(self, inputs: DraftInputs) -> None:
        count = inputs.num_requests
        golden, room = self._golden[:count], self._room[:count]
        ops.recent_tokens(
            inputs.layout, inputs.slots, inputs.slot_ids, tokens=golden, lens=self._lens[:count],
            room=room, max_drafts=inputs.max_drafts,
        )  # fmt: skip
        slots, limits, rooms = (t.tolist() for t in (inputs.slot_ids, inputs.max_drafts, room))
        drafting = [b for b in range(count) if rooms[b] > 0 and self._options[slots[b]]]
        if not drafting:
            return
        assert inputs.hidden is not None
        beams, lengths = [], []
        for b in drafting:
            asked = self._options[slots[b]]
            # A tree of n drafts has no more than n leaves and is no deeper.
            most = limits[b] if asked["adaptive"] else asked["num_beams"] * asked["length"]
            beams.append(min(asked["num_beams"], most))
            lengths.append(min(asked["length"], rooms[b], most))
        self._search.start(beams, lengths)
        self._network.start(
            [inputs.hidden[slots[b]] for b in drafting], golden.flatten()[drafting].tolist()
        )
        cost = self._network.run(self._search, [], 0.0)
        self._steps += 1
        self._passes += cost.passes
        self._rows += cost.rows
        self._seconds += cost.network_seconds
        tokens, parents = self._tokens[:count].fill_(-1), self._parents[:count].fill_(-1)
        for i, b in enumerate(drafting):
            drafts, above, _ = self._search.proposal(i, limits[b])
            tokens[b, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
            parents[b, : len(drafts)] = torch.tensor(above, dtype=torch.int32)
        ops.bring_drafts(
            inputs.layout, inputs.slots, inputs.slot_ids, tokens, parents,
            vocab_size=self._vocab_size, status=inputs.status,
        )  # fmt: skip

    def scratch_bytes(self, max_requests: int) -> int:
        del max_requests
        return 0

    def stats(self) -> dict[str, Any]:
        return {
            "memory_bytes": self._network.weight_bytes,
            "draft_steps": self._steps,
            "network_passes": self._passes,
            "network_rows": self._rows,
            "network_seconds": self._seconds,
        }


class StepRedrafter:
    """See StepDrafter. The trees hold what _core.BeamSearch's hold, the likeliest drafts first.

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
        folder = shipped_folder("redrafter") if config.model is None else config.model
        network = load_redrafter(folder, allow_pickle=allow_pickle)
        place = getattr(model, "place", CPU)
        sizes = {"vocab_size": int(model.vocab_size), "max_requests": max_requests}
        self._beams: HostBeams | DeviceBeams
        try:
            check_target(network.shape, model)
            if place.is_cpu:
                packed = PackedRedrafter(network, model)
                self._beams = HostBeams(packed, width=config.max_draft_len, **sizes)
            else:
                self._beams = DeviceBeams(
                    network,
                    model,
                    num_beams=config.num_beams,
                    length=config.draft_len_per_beam,
                    **sizes,
                )
        except ModelError as error:
            raise type(error)(f"{folder}: {error}") from None
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"ReDrafterDecodingConfig.num_beams = {config.num_beams}: a step that runs ahead "
                f"scores so many rows for each of max_batch_size = {max_requests} requests, and "
                f"{place.name} has no room for them beside the model ({error}); lower one of them"
            ) from None
        self._device: str = place.name

    def scratch_bytes(self, max_requests: int) -> int:
        """Device memory that a step may take beside what is there from the start."""
        return self._beams.scratch_bytes(max_requests)

    def enter(self, slot: int, options: Mapping[str, Any]) -> None:
        """See StepDrafter; options are those of ReDrafterDecodingConfig.request_kwargs."""
        self._beams.enter(slot, options)

    @torch.inference_mode()
    def draft(self, inputs: DraftInputs) -> None:
        """See StepDrafter."""
        self._beams.draft(inputs)

    def stats(self) -> Mapping[str, Any]:
        """See StepDrafter; on the CPU passes are counted and timed, too."""
        return {"device": self._device, **self._beams.stats()}

"""The ranks that an engine's model is spread over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.draft_target import DraftTargetDecodingConfig
from ..config.ranks import World, world_of
from ..config.sources import method_of
from ..errors import SpecdecError, UnsupportedModelError
from ..models.config_reader import read_config
from ..models.native_config import NotNativeError, native_shape
from ..models.place import devices_of_ranks, draft_place
from ..models.rank_checkpoint import check_ranks
from ..models.shard import Shard

if TYPE_CHECKING:
    from ..config.parse import SpeculativeConfig
    from ..parallel.team import Team

__all__ = ["check_draft_device", "devices_for", "make_team"]


def devices_for(size: int, device: str) -> tuple[str, ...]:
    """The device of each of `size` ranks, LLM's `device` being all of them. Raises ConfigError
    where there are fewer; under torchrun rank 0 says it, the others end with its exit code."""
    world = world_of()
    with _said_by_rank_0(world):
        return devices_of_ranks(device, size, None if world is None else world.local_size)


def check_draft_device(config: SpeculativeConfig | None, devices: Sequence[str]) -> None:
    """Raises ConfigError where the draft model's own device cannot be had beside the target's;
    under torchrun rank 0 says it."""
    method = method_of(config)
    if isinstance(method, DraftTargetDecodingConfig) and method.device is not None:
        with _said_by_rank_0(world_of()):
            draft_place(method.device, devices)


def make_team(size: int, model: Path, model_impl: str, devices: tuple[str, ...]) -> Team:
    """Rank 0 of `size` ranks. Another rank of torchrun does not return: it serves rank 0 until that
    ends, and then its process ends.

    Before a rank is started it raises UnsupportedModelError and ConfigError for a model that cannot
    be spread over so many; then ConfigError and EngineError for ranks that do not start or do not
    fit together.
    """
    world = world_of()
    with _said_by_rank_0(world):
        _check(size, model, model_impl)
    from ..parallel.team import join, lead

    if world is not None and world.rank > 0:
        from .follower import follow

        raise SystemExit(follow(join(world)))
    team = lead(size)
    team.devices = devices
    return team


@contextlib.contextmanager
def _said_by_rank_0(world: World | None) -> Iterator[None]:
    try:
        yield
    except SpecdecError as error:
        if world is None or world.rank == 0:
            raise
        raise SystemExit(error.exit_code) from None


def _check(size: int, model: Path, model_impl: str) -> None:
    try:
        if model_impl == "transformers":
            raise NotNativeError("model_impl = 'transformers'")
        config = read_config(model)
        check_ranks(config.path, size)
        Shard.of(native_shape(config), 0, size)
    except NotNativeError as error:
        raise UnsupportedModelError(
            f"{model}: tensor_parallel_size = {size} needs the native decoder ({error}); use "
            "tensor_parallel_size = 1"
        ) from None

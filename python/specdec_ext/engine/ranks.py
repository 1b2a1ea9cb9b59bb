"""The ranks that an engine's model is spread over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..config.ranks import world_of
from ..errors import SpecdecError, UnsupportedConfigError, UnsupportedModelError
from ..models.config_reader import read_config
from ..models.native_config import NotNativeError, native_shape
from ..models.place import resolve_device
from ..models.rank_checkpoint import check_ranks
from ..models.shard import Shard

if TYPE_CHECKING:
    from ..parallel.team import Team

__all__ = ["make_team"]


def make_team(size: int, model: Path, model_impl: str, device: str) -> Team:
    """Rank 0 of `size` ranks. Another rank of torchrun does not return: it serves rank 0 until that
    ends, and then its process ends.

    Before a rank is started it raises UnsupportedConfigError for a device, UnsupportedModelError
    and ConfigError for a model that cannot be spread over so many; then ConfigError and EngineError
    for ranks that do not start or do not fit together.
    """
    world = world_of()
    try:
        _check(size, model, model_impl, device)
    except SpecdecError as error:
        if world is None or world.rank == 0:
            raise
        raise SystemExit(error.exit_code) from None  # rank 0 says it
    from ..parallel.team import join, lead

    if world is not None and world.rank > 0:
        from .follower import follow

        raise SystemExit(follow(join(world)))
    return lead(size)


def _check(size: int, model: Path, model_impl: str, device: str) -> None:
    if not resolve_device(device).is_cpu:
        raise UnsupportedConfigError(
            f"tensor_parallel_size = {size} on device = {device!r}: this version spreads a model "
            "over ranks on the CPU alone; use device='cpu', or tensor_parallel_size = 1"
        )
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

"""How many ranks a model is spread over, and which of them this process is."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from ..errors import ConfigError
from .validate import check_int

__all__ = ["World", "resolve_tensor_parallel_size", "world_of"]

MAX_RANKS = 64
MAX_PORT = 65535
# Launchers stop all ranks when the first one ends: rank 0 needs the time to say why.
SECONDS_OF_SILENCE = 5.0


@dataclass(frozen=True)
class World:
    """What torchrun, or another launcher, says of this process."""

    rank: int
    size: int
    local_size: int  # ranks on this machine


def world_of(environment: Mapping[str, str] = os.environ) -> World | None:
    """None: no launcher has started this process.

    Raises ConfigError for numbers that are none, and for a port at which nobody can be met; of the
    latter only rank 0 speaks, the other ranks end with its exit code.
    """
    if not all(
        name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    ):
        return None
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_WORLD_SIZE", size))
        port = int(environment["MASTER_PORT"])
    except ValueError as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE, MASTER_PORT: {error}; start the ranks with torchrun"
        ) from None
    if not 0 <= rank < size or local < 1:
        raise ConfigError(
            f"RANK = {rank}, WORLD_SIZE = {size}: ranks are 0..{size - 1}; start them with torchrun"
        )
    if not 1 <= port <= MAX_PORT:
        if rank > 0:
            _leave_it_to_rank_0()
        raise ConfigError(
            f"MASTER_PORT = {port}: the ranks meet at a port of 1..{MAX_PORT}, and 0 tells the "
            "others none; use torchrun --standalone, which finds a free one, or --master-port "
            "with a number"
        )
    return World(rank, size, local)


def resolve_tensor_parallel_size(size: object, world: World | None) -> int:
    """The number of ranks; None: as many as the launcher has started, or one.

    Raises ConfigError where a launcher has started another number. Only rank 0 says it: the other
    ranks end with its exit code.
    """
    if size is None:
        return 1 if world is None else world.size
    wanted = check_int("tensor_parallel_size", size, ConfigError, low=1, high=MAX_RANKS)
    if world is None or world.size == wanted:
        return wanted
    if world.rank > 0:
        _leave_it_to_rank_0()
    raise ConfigError(
        f"tensor_parallel_size = {wanted} but torchrun has started {world.size} ranks; the two "
        f"must be equal: use --nproc-per-node {wanted}, or leave tensor_parallel_size out"
    )


def _leave_it_to_rank_0() -> NoReturn:
    """End as rank 0 does, without its words, and not before it: by then we are mostly stopped."""
    time.sleep(SECONDS_OF_SILENCE)
    raise SystemExit(ConfigError.exit_code)

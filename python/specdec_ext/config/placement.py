"""Device lists of draft-target decoding as TensorRT-LLM's commands give them: [0], [1,2,3,4]."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError, UnsupportedConfigError
from .validate import check_int, show

__all__ = ["check_placement"]

_FLAG = "--draft_target_model_config"


def check_placement(
    draft: Sequence[object], target: Sequence[object], ranks: int, num_devices: int
) -> str:
    """What the log should say of them; empty: nothing.

    draft, target  the lists; an empty one says nothing
    ranks          tensor_parallel_size
    num_devices    devices that can be had; 0: everything runs on the CPU, which has no numbers

    Raises ConfigError for lists that are none, that name a device twice or one that is not there,
    a target with another number of devices than ranks, or a draft model on the device of a rank
    other than the first; UnsupportedConfigError for a draft model on several devices.
    """
    lists = {"the draft's devices": draft, "the target's devices": target}
    for what, devices in lists.items():
        for device in devices:
            check_int(
                f"{_FLAG}: {what} {show(list(devices))}: a device", device, ConfigError, low=0
            )
        if len(set(devices)) < len(devices):
            raise ConfigError(
                f"{_FLAG}: {what} {show(list(devices))} name a device twice; give each once"
            )
    if len(draft) > 1:
        raise UnsupportedConfigError(
            f"{_FLAG}: the draft's devices {show(list(draft))}: a draft model is not spread over "
            "several; give one"
        )
    if target and len(target) != ranks:
        raise ConfigError(
            f"{_FLAG}: the target's devices {show(list(target))} are {len(target)}, "
            f"tensor_parallel_size = {ranks}; use --tensor-parallel-size {len(target)}, or "
            f"{ranks} devices"
        )
    apart = bool(draft and target) and not set(draft) <= set(target)
    if num_devices == 0:
        return (
            f"{_FLAG}: draft on {show(list(draft))}, target on {show(list(target))}: nothing here "
            "has such numbers, both run on the CPU; the draft on rank 0"
            if apart
            else ""
        )
    for what, devices in lists.items():
        for device in devices:
            check_int(
                f"{_FLAG}: {what}: device", device, ConfigError, low=0, high=num_devices - 1,
                remedy=f"there are {num_devices} devices",
            )  # fmt: skip
    if draft and draft[0] in target[1:]:
        raise ConfigError(
            f"{_FLAG}: the draft's device {draft[0]} is that of the target's rank "
            f"{list(target).index(draft[0])} ({show(list(target))}); give the draft model a device "
            f"of its own, or {target[0]}, which it then shares with rank 0"
        )
    return ""

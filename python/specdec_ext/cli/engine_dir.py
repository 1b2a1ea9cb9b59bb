"""--engine_dir and --draft_engine_dir: engines of `specdec build`, as LLM's arguments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parser import usage_error

if TYPE_CHECKING:
    from ..models.place import Place

__all__ = [
    "add_engine_arguments",
    "draft_target_keys",
    "engine_heads",
    "target_device",
    "with_engine",
]


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--engine-dir", metavar="DIR",
        help="an engine that specdec build has written, in place of --model; its limits hold",
    )  # fmt: skip


def engine_heads(args: argparse.Namespace, name: str) -> Path | None:
    """The folder `name` of heads in the engine; None: there is no engine, or it has none."""
    if getattr(args, "engine_dir", None) is None:
        return None
    folder = Path(args.engine_dir).expanduser() / name
    return folder if folder.is_dir() else None


_PLACEMENT = "--draft_target_model_config"


def draft_target_keys(args: argparse.Namespace) -> dict[str, Any]:
    """Draft-target decoding as --draft_engine_dir and --draft_target_model_config say it, in the
    configuration's names; empty: they are not given."""
    from ..config.read_text import read_text
    from ..config.validate import show
    from ..errors import ConfigError

    keys: dict[str, Any] = {}
    if args.draft_engine_dir is not None:
        if args.draft_model is not None:
            usage_error(args, "--draft-engine-dir and --draft-model exclude each other")
        keys["model"] = str(Path(args.draft_engine_dir).expanduser() / "model")
    if args.draft_target_model_config is None:
        return keys
    flag, value = _PLACEMENT, read_text(args.draft_target_model_config)
    if (
        not isinstance(value, list)
        or not 1 <= len(value) <= 4
        or not all(isinstance(part, list) for part in value[1:3])
        or not isinstance((*value, False, False, False)[3], bool)
    ):
        raise ConfigError(
            f"{flag} = {show(args.draft_target_model_config)}: expected [K,[draft's devices],"
            "[target's devices],USE_LOGITS], for example [4,[0],[1],False]"
        )
    draft, target = (*value[1:3], [], [])[:2]
    if _check_devices(args, draft, target).on_cuda and draft:
        keys["device"] = f"cuda:{draft[0]}"
    keys["max_draft_len"] = value[0]
    if len(value) == 4:
        keys["use_draft_logits"] = value[3]
    return keys


def _check_devices(args: argparse.Namespace, draft: list[Any], target: list[Any]) -> Place:
    """The target's first place, as far as --device says it."""
    from ..config.placement import check_placement
    from ..config.ranks import resolve_tensor_parallel_size, world_of
    from ..log import logger
    from ..models.place import resolve_device

    place = resolve_device(args.device.partition(",")[0])
    ranks = resolve_tensor_parallel_size(args.tensor_parallel_size, world_of())
    note = check_placement(draft, target, ranks, place.num_devices)
    if note:
        logger.info(note)
    return place


def target_device(args: argparse.Namespace) -> str:
    """LLM's device: where --draft_target_model_config lists the GPUs of the target's ranks, those,
    in its order. The flag has been checked (draft_target_keys)."""
    from ..config.read_text import read_text
    from ..errors import ConfigError
    from ..models.place import resolve_device

    device: str = args.device
    text = getattr(args, "draft_target_model_config", None)
    lists: Any = [] if text is None else read_text(text)
    target = [*lists, [], [], []][2]
    if not target or not resolve_device(device.partition(",")[0]).on_cuda:
        return device
    if ":" in device:
        raise ConfigError(
            f"--device {device} and the target's devices {target} of {_PLACEMENT} both name GPUs; "
            "give one of the two"
        )
    return "cuda:" + ",".join(str(number) for number in target)


def with_engine(args: argparse.Namespace, kwargs: dict[str, Any], drafting: Any) -> dict[str, Any]:
    """LLM's arguments for the engine that is named; `kwargs` themselves where none is.

    kwargs    LLM's arguments as the other flags give them
    drafting  the configuration that the flags name, also where it drafts outside the engine

    Raises ConfigError, ModelError.
    """
    if args.draft_engine_dir is not None:
        _check_draft(args, kwargs)
    if args.engine_dir is None:
        return kwargs
    if args.model is not None:
        usage_error(args, "--engine-dir and --model exclude each other; the engine has its model")
    if kwargs["quantization"] is not None:
        usage_error(args, "--quantization with --engine-dir: weights are narrowed by "
                    "specdec convert --quantization, before the engine is built")  # fmt: skip
    from ..workflow.engine_folder import EngineFolder

    engine = EngineFolder.open(args.engine_dir)
    engine.check_dtype(kwargs["dtype"])
    checked = engine.speculation(drafting)
    inside = kwargs["speculative_config"] is not None or drafting is None
    return {
        **kwargs,
        "model": str(engine.model),
        "dtype": "auto",
        "device": engine.check_device(kwargs["device"]),
        "tensor_parallel_size": engine.check_ranks(args.tensor_parallel_size),
        "speculative_config": checked if inside else None,
        "scheduler_config": engine.scheduler(kwargs["scheduler_config"]),
        "kv_cache_config": engine.kv_cache(kwargs["kv_cache_config"]),
    }


def _check_draft(args: argparse.Namespace, kwargs: dict[str, Any]) -> None:
    """The draft engine is intact and serves as many and as long requests as the target."""
    from ..errors import ConfigError
    from ..workflow.engine_folder import EngineFolder

    draft = EngineFolder.open(args.draft_engine_dir)
    if args.engine_dir is None:
        return
    scheduler = EngineFolder.open(args.engine_dir).scheduler(kwargs["scheduler_config"])
    for name in ("max_batch_size", "max_seq_len"):
        limit, need = getattr(draft, name), getattr(scheduler, name)
        if limit < need:
            raise ConfigError(
                f"{draft.path}: the draft engine was built with {name} = {limit}, the target has "
                f"{need}; build it with --{name}={need}, or run with --{name}={limit}"
            )

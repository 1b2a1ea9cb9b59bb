"""`specdec inspect`: a model, the memory it would get, and what serves it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .common import add_llm_arguments, human_bytes, make_llm

__all__ = ["add_arguments", "run"]

# Features that few engines use: where one is off its line is left out; --json has it.
_EXTRAS = ("attention_window", "draft_", "graph_", "host_", "narrow_", "sink_", "sliding_window")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_llm_arguments(parser)


def collect(llm: Any) -> dict[str, Any]:
    """Everything that the command shows."""
    config = llm.speculative_config
    speculation: dict[str, Any] = {"method": "none", "max_draft_len": 0, "step_tokens": 1}
    if config is not None:
        speculation = {
            **config.to_dict(),
            "max_draft_len": config.max_draft_len,
            "step_tokens": config.max_draft_len + 1,
            "max_draft_path_len": config.max_draft_path_len,
        }
    draft = {} if llm.draft_model is None else {"draft_model": llm.draft_model.info.to_dict()}
    return {
        "model": llm.model.info.to_dict(),
        **draft,
        "tokenizer": type(llm.tokenizer).__name__ if llm.tokenizer is not None else None,
        "eos_token_ids": list(llm.engine.limits.eos_token_ids),
        "memory": llm.memory.to_dict(),
        "speculation": speculation,
        "kv_cache_config": llm.kv_cache_config.to_dict(),
        "scheduler_config": llm.scheduler_config.to_dict(),
        "numerics": llm.engine.numerics,
        "executor": dict(llm.engine.executor.stats()),
    }


def run(args: argparse.Namespace) -> int:
    with make_llm(args) as llm:
        report = collect(llm)
    if args.json:
        print(json.dumps(report, default=str))
        return 0
    for section in ("model", "draft_model", "memory", "speculation"):
        if section not in report:
            continue
        print(f"{section}:")
        for name, value in report[section].items():
            if value or not name.startswith(_EXTRAS):
                print(f"  {name:<25} {_text(name, value)}")
    print(f"tokenizer: {report['tokenizer']}, eos_token_ids: {report['eos_token_ids']}")
    print(f"numerics: {report['numerics']}")
    return 0


def _text(name: str, value: Any) -> str:
    if name.endswith("bytes") and isinstance(value, int):
        return f"{value} ({human_bytes(value)})"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "-"
    return str(value)

"""The files of a finished run: weights, card, log; tried out before they appear."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import ModelError, SpecdecError
from ..log import logger
from ..models.folder_cache import file_sha256
from .card import write_card
from .data import TrainingData
from .loop import Training
from .options import TrainOptions
from .sources import describe_sources
from .trial import FLAGS, try_out

__all__ = ["LOG_FILE", "finish"]

LICENCE = "Apache-2.0"
LOG_FILE = "training_log.json"


def finish(
    options: TrainOptions,
    training: Training,
    data: TrainingData,
    model: Path,
    target: Mapping[str, str],
    facts: Mapping[str, Any],
    excluded: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Write the folder, complete or not at all; returns the card.

    facts  how the run went, for the card
    Raises ModelError when the disk refuses.
    """
    output = options.output
    partial = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        card = _write(partial, options, training, data, model, target, facts, excluded)
        for path in partial.iterdir():  # safetensors writes its files private
            path.chmod(0o644)
        if output.exists():
            shutil.rmtree(output)
        partial.rename(output)
    except SpecdecError:
        raise
    except Exception as error:  # safetensors has its own type for a full disk
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        raise ModelError(
            f"{output}: cannot be written ({error}); free space, or give another --output: the "
            "checkpoint is kept, and the same command goes on from it"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return card


def _write(
    folder: Path,
    options: TrainOptions,
    training: Training,
    data: TrainingData,
    model: Path,
    target: Mapping[str, str],
    facts: Mapping[str, Any],
    excluded: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    result, product = training.result, training.product
    held_out = result.evaluations[-1][1] if result.evaluations else training.evaluate()
    notes = {
        "steps": training.step,
        "train_tokens": data.num_train_tokens,
        "held_out_tokens": data.num_held_out_tokens,
        "accuracy": held_out["accuracy"],
        # What the runtime's budget starts from: [position][rank].
        "guess_rates": held_out["rank_accuracy"],
    }
    product.save(folder, notes)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
    }
    measured = _measured(folder, options, data, model)
    last = result.losses[-50:]
    card = {
        "product": options.product,
        "version": __version__,
        "command": options.command,
        "use": f"specdec generate {FLAGS[options.product]} DIR",
        "licence": LICENCE,
        "target": dict(target),
        "files": {name: entry["bytes"] for name, entry in files.items()},
        "sha256": {name: entry["sha256"] for name, entry in files.items()},
        "data": {
            **asdict(options.collect),
            "texts": "given" if options.data else "written by the target",
            "train_texts": len(data.train),
            "train_tokens": data.num_train_tokens,
            "held_out_texts": len(data.held_out),
            "held_out_tokens": data.num_held_out_tokens,
            "dropped_texts": data.dropped,
            "excluded": list(excluded),
            "draft_vocab_size": len(data.token_ids),
            "coverage": data.coverage(),
            "sources": describe_sources(options),
        },
        "shape": product.describe(),
        "training": {
            **asdict(options.settings),
            "steps": training.step,
            "first_loss": sum(result.losses[:50]) / max(1, len(result.losses[:50])),
            "last_loss": sum(last) / max(1, len(last)),
        },
        "run": dict(facts),
        "held_out": held_out,
        "evaluations": result.evaluations,
        "measured": measured,
    }
    write_card(folder, card)
    log = {
        "benchmark": "training",
        "model": target["name"],
        "method": options.product,
        "environment": {"device": facts.get("device"), "ranks": facts.get("ranks")},
        "learning_rate": [options.settings.rate(step) for step in range(len(result.losses))],
        "losses": result.losses,
        "evaluations": result.evaluations,
        "measured": measured,
    }
    (folder / LOG_FILE).write_text(json.dumps(log) + "\n", encoding="utf-8")
    return card


def _measured(
    folder: Path, options: TrainOptions, data: TrainingData, model: Path
) -> dict[str, Any] | None:
    """What held-out prompts say; None: it was not asked for. A failure does not cost the result."""
    prompts = [r.tokens[: r.prompt_len].tolist() for r in data.held_out[: options.measure_prompts]]
    if not prompts:
        return None
    try:
        return try_out(
            options.product, folder, model, prompts,
            max_tokens=options.measure_tokens, device=options.device,
        )  # fmt: skip
    except (SpecdecError, RuntimeError, MemoryError) as error:  # torch's lack of memory, too
        logger.warning("%s: the result could not be tried out: %s", options.output, error)
        return {"error": str(error)}

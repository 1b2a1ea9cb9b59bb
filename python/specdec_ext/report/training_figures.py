"""Figures of what the trainers write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .figures import Bars, Curves, Figure

__all__ = ["training"]

_POINTS = 400


def training(data: Mapping[str, Any]) -> list[Figure]:
    """training_log.json of `specdec train-medusa`, `train-redrafter` and `train-drafter`."""
    losses = data["losses"]
    figures: list[Figure] = [
        Curves(
            "loss", "Training loss", "step", "loss", _note(len(losses)),
            series={"loss": _means(losses)},
        ),
        Curves(
            "learning-rate", "Learning rate", "step", "rate",
            series={"learning rate": _means(data["learning_rate"])},
        ),
    ]  # fmt: skip
    evaluations = data["evaluations"]
    if evaluations:
        positions = len(evaluations[0][1]["accuracy"])
        series = {
            f"position {p + 1}": [(step, at["accuracy"][p]) for step, at in evaluations]
            for p in range(positions)
        }
        figures.append(
            Curves("accuracy", "Top-1 accuracy on held-out text", "step", "share", series=series)
        )
        kinds = evaluations[-1][1].get("accuracy_by_category", {})
        if len(kinds) > 1:
            figures.append(
                Bars(
                    "accuracy-by-kind", "Accuracy of the first position by kind of text", "",
                    "share", categories=list(kinds), series={"accuracy": list(kinds.values())},
                )
            )  # fmt: skip
    measured = data.get("measured") or {}
    if "speedup" in measured:
        speed = measured["tokens_per_second"]
        figures.append(
            Bars(
                "speed", "Output tokens per second", "", "tokens/s",
                f"{measured['speedup']:.2f} times plain decoding, median of "
                f"{measured['prompts']} held-out prompts; {measured['tokens_per_pass']:.2f} tokens "
                "per pass with every draft verified",
                categories=[str(data["method"]), "plain"],
                series={"tokens/s": [speed["drafted"], speed["plain"]]},
            )
        )  # fmt: skip
    return figures


def _window(count: int) -> int:
    return max(1, -(-count // _POINTS))


def _note(count: int) -> str:
    return "" if _window(count) == 1 else f"means of {_window(count)} steps"


def _means(values: list[float]) -> list[tuple[float, float]]:
    """(last step, mean) of equal stretches: a page of a long run stays small."""
    size = _window(len(values))
    parts = ((at, values[at : at + size]) for at in range(0, len(values), size))
    return [(at + len(part), sum(part) / len(part)) for at, part in parts]

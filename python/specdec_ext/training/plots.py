"""Curves of a run as PNG; needs matplotlib, which is not a dependency of the package."""

from __future__ import annotations

from pathlib import Path

from ..extras import require
from .loop import TrainingResult

__all__ = ["write_plots"]


def write_plots(folder: Path, name: str, result: TrainingResult) -> list[Path]:
    """Write NAME-loss.png and NAME-accuracy.png; returns their paths."""
    require("matplotlib", "--plots")
    import matplotlib  # type: ignore[import-not-found,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # type: ignore[import-not-found,unused-ignore]

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-loss.png", folder / f"{name}-accuracy.png"]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(range(1, len(result.losses) + 1), result.losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss", title=f"{name}: training loss")
    figure.tight_layout()
    figure.savefig(paths[0], dpi=120)
    plt.close(figure)
    figure, axes = plt.subplots(figsize=(6, 4))
    steps = [step for step, _ in result.evaluations]
    positions = len(result.evaluations[0][1]["accuracy"]) if result.evaluations else 0
    for p in range(positions):
        values = [measures["accuracy"][p] for _, measures in result.evaluations]
        axes.plot(steps, values, marker="o", markersize=3, label=f"position {p + 1}")
    axes.set(xlabel="step", ylabel="top-1 accuracy", title=f"{name}: held-out text", ylim=(0, 1))
    if positions:
        axes.legend()
    figure.tight_layout()
    figure.savefig(paths[1], dpi=120)
    plt.close(figure)
    return paths

"""Curves of a run: two pictures that show every series."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import ConfigError
from specdec_ext.training.loop import TrainingResult
from specdec_ext.training.plots import write_plots

RESULT = TrainingResult(
    losses=[3.0, 2.5, 2.25, 2.0],
    evaluations=[(2, {"accuracy": [0.3, 0.1]}), (4, {"accuracy": [0.5, 0.2]})],
)


def test_both_pictures_are_written_with_a_curve_per_position(tmp_path: Path) -> None:
    from matplotlib import colormaps, colors
    from matplotlib import image as image_module

    paths = write_plots(tmp_path / "new", "medusa", RESULT)
    assert [path.name for path in paths] == ["medusa-loss.png", "medusa-accuracy.png"]
    for path, curves in zip(paths, (1, 2), strict=True):
        image = image_module.imread(path)
        assert image.shape[:2] == (480, 720)
        drawn = {
            tuple(p) for p in (image[:, :, :3].reshape(-1, 3) * 255).round().astype(int).tolist()
        }
        for i, rgb in enumerate(colormaps["tab10"].colors[:3]):
            wanted = tuple(round(255 * c) for c in colors.to_rgb(rgb))
            assert (wanted in drawn) == (i < curves), (path.name, i)


def test_a_run_that_was_never_evaluated_still_has_its_loss(tmp_path: Path) -> None:
    paths = write_plots(tmp_path, "drafter", TrainingResult(losses=[1.0]))
    assert all(path.stat().st_size > 1000 for path in paths)


def test_without_matplotlib_the_command_to_run_is_named(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'specdec_ext\[plots\]'"):
        write_plots(tmp_path, "drafter", RESULT)

"""Fixtures of the model tests: tiny models saved once per session."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_zoo import make_model, save_model

from specdec_ext.models import load_model
from specdec_ext.models.native import NativeModel

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@dataclass(frozen=True)
class Saved:
    """A folder, and the same model in memory (float32)."""

    folder: Path
    model: Any


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Callable[..., Saved]:
    """saved(family, **config overrides): made and saved once."""
    made: dict[str, Saved] = {}

    def get(family: str, **overrides: Any) -> Saved:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = make_model(family, **overrides)
                save_model(model, folder)
            made[key] = Saved(folder, model)
        return made[key]

    return get


@pytest.fixture(scope="session")
def native(saved: Callable[..., Saved]) -> Callable[[torch.dtype], NativeModel]:
    """native(dtype): a target of the CPU's own, loaded once."""

    @functools.cache
    def load(dtype: torch.dtype) -> NativeModel:
        name = str(dtype).removeprefix("torch.")
        return load_model(saved("llama").folder, dtype=name, model_impl="native")

    return load


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)

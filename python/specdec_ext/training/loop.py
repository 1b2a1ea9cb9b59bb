"""The training loop that all products share: schedule, checkpoints, evaluation, progress.

A batch is a function of the step and the seed, so a run that was interrupted and resumed passes
through the same states as one that was not: bit for bit on the same machine with as many threads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..config.validate import check_float, check_int
from ..errors import ConfigError, ModelError
from .cache import fingerprint
from .data import Batch, TrainingData

__all__ = ["Product", "TrainSettings", "Training", "TrainingResult"]

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class TrainSettings:
    """How to train; another value of any of these is another run.

    steps          optimizer steps
    batch_texts    texts of one step
    learning_rate  at its peak; linear warm-up over the first `warmup` steps, then a cosine to zero
    soft_share     of the target's distribution in the loss, the rest is its token
    """

    steps: int = 1500
    batch_texts: int = 8
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup: int = 50
    gradient_clip: float = 1.0
    soft_share: float = 0.5
    seed: int = 20261121
    eval_every: int = 250

    def __post_init__(self) -> None:
        for name, low, high in (
            ("steps", 1, 10_000_000),
            ("batch_texts", 1, 4096),
            ("warmup", 0, 1_000_000),
            ("seed", 0, 2**63 - 1),
            ("eval_every", 1, 10_000_000),
        ):
            check_int(f"TrainSettings.{name}", getattr(self, name), ConfigError, low=low, high=high)
        check_float("TrainSettings.learning_rate", self.learning_rate, ConfigError, above=0.0)
        check_float("TrainSettings.weight_decay", self.weight_decay, ConfigError, low=0.0)
        check_float("TrainSettings.gradient_clip", self.gradient_clip, ConfigError, above=0.0)
        check_float("TrainSettings.soft_share", self.soft_share, ConfigError, low=0.0, high=1.0)

    def rate(self, step: int) -> float:
        """The learning rate of a step (0-based)."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        span = max(1, self.steps - self.warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / span))


class Product(Protocol):
    """What is trained: a module, its loss on a batch, its measure on held-out text."""

    name: str

    @property
    def module(self) -> nn.Module: ...

    def loss(self, batch: Batch) -> torch.Tensor:
        """Scalar to minimise."""
        ...

    def evaluate(self, data: TrainingData) -> dict[str, Any]:
        """JSON-ready measures on data.held_out; has "accuracy": [top-1 per position]."""
        ...

    def describe(self) -> dict[str, Any]:
        """JSON-ready: what identifies the product's shape and data."""
        ...

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """Write the files that the runtime loads."""
        ...


@dataclass
class TrainingResult:
    """Curves of a run. losses: one per step; evaluations: (step, measures)."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


class Training:
    """One run of one product.

    folder  of the checkpoint; None: no checkpoints
    """

    def __init__(
        self,
        product: Product,
        data: TrainingData,
        settings: TrainSettings,
        *,
        folder: Path | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.product = product
        self.data = data
        self.settings = settings
        self.device = device or torch.device("cpu")
        self.step = 0
        self.result = TrainingResult()
        self._folder = folder
        self._optimizer = torch.optim.AdamW(
            [p for p in product.module.parameters() if p.requires_grad],
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            betas=(0.9, 0.98),
        )
        self._identity = fingerprint(
            {"settings": asdict(settings), "product": product.describe(), "texts": len(data.train)}
        )
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._resume(folder / CHECKPOINT)

    def run(
        self,
        on_step: Callable[[Training], None] | None = None,
        stop_after: int | None = None,
    ) -> TrainingResult:
        """Train to the last step, or to step `stop_after`; ends with a checkpoint."""
        last = self.settings.steps if stop_after is None else min(stop_after, self.settings.steps)
        while self.step < last:
            self._one_step()
            if self.step % self.settings.eval_every == 0 or self.step == self.settings.steps:
                self.evaluate()
                self.save_checkpoint()
            if on_step is not None:
                on_step(self)
        self.save_checkpoint()
        return self.result

    def evaluate(self) -> dict[str, Any]:
        self.product.module.eval()
        measures = self.product.evaluate(self.data)
        self.product.module.train()
        self.result.evaluations.append((self.step, measures))
        return measures

    def _one_step(self) -> None:
        settings = self.settings
        for group in self._optimizer.param_groups:
            group["lr"] = settings.rate(self.step)
        batch = self.data.batch(self.step, settings.batch_texts, settings.seed, self.device)
        loss = self.product.loss(batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ModelError(
                f"training of {self.product.name}: the loss is {value} at step {self.step}; lower "
                f"the learning rate (now {settings.learning_rate:g})"
            )
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.product.module.parameters(), settings.gradient_clip)
        self._optimizer.step()
        self.step += 1
        self.result.losses.append(value)

    def save_checkpoint(self) -> None:
        if self._folder is None:
            return
        path = self._folder / CHECKPOINT
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "identity": self._identity,
                "step": self.step,
                "module": self.product.module.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "losses": self.result.losses,
                "evaluations": json.dumps(self.result.evaluations),
            },
            partial,
        )
        partial.rename(path)

    def _resume(self, path: Path) -> None:
        if not path.is_file():
            return
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            identity = state["identity"]
        except Exception as error:  # torch raises many types for damaged files
            raise ModelError(
                f"{path}: not a training checkpoint ({error}); delete it to start again"
            ) from error
        if identity != self._identity:
            raise ModelError(
                f"{path}: a checkpoint of another run (settings, shape or data differ); delete it "
                "or give another --work-dir"
            )
        self.product.module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])
        self.result.losses = [float(x) for x in state["losses"]]
        self.result.evaluations = [(int(s), m) for s, m in json.loads(state["evaluations"])]

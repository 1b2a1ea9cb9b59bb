"""The training loop that all products share: schedule, checkpoints, evaluation, progress.

The texts of a step are a function of the step and the seed, so a run that was interrupted and
resumed passes through the same states as one that was not: bit for bit on the same processor with
as many threads and ranks. A step's texts are cut into parts, `accumulation` for each rank; the loss
and its gradient are those of the whole step, whatever the parts.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..config.validate import check_choice, check_float, check_int
from ..errors import ConfigError, ModelError
from .cache import fingerprint
from .data import Batch, TrainingData
from .interrupts import CHECKPOINT_SECONDS, Interrupts, Stopped
from .loss import Precision
from .ranks import ALONE, Ranks
from .work_folder import unwritable

__all__ = ["Product", "TrainSettings", "Training", "TrainingResult"]

CHECKPOINT = "checkpoint.pt"
MAX_TERMS = 16  # heads, or recurrent steps


@dataclass(frozen=True)
class TrainSettings:
    """How to train; another value of any of these is another run.

    steps          optimizer steps
    batch_texts    texts of one step, of all ranks together
    accumulation   parts that a rank takes its texts in, one after the other: less memory
    precision      "bf16" or "float32": of matrix products; weights are float32
    learning_rate  at its peak; linear warm-up over the first `warmup` steps, at most a quarter of
                   all, then a cosine to zero
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
    accumulation: int = 1
    precision: str = Precision.BF16.value

    def __post_init__(self) -> None:
        for name, low, high in (
            ("steps", 1, 10_000_000),
            ("batch_texts", 1, 4096),
            ("warmup", 0, 1_000_000),
            ("seed", 0, 2**63 - 1),
            ("eval_every", 1, 10_000_000),
            ("accumulation", 1, 4096),
        ):
            check_int(f"TrainSettings.{name}", getattr(self, name), ConfigError, low=low, high=high)
        check_float("TrainSettings.learning_rate", self.learning_rate, ConfigError, above=0.0)
        check_float("TrainSettings.weight_decay", self.weight_decay, ConfigError, low=0.0)
        check_float("TrainSettings.gradient_clip", self.gradient_clip, ConfigError, above=0.0)
        check_float("TrainSettings.soft_share", self.soft_share, ConfigError, low=0.0, high=1.0)
        kinds = tuple(p.value for p in Precision)
        check_choice("TrainSettings.precision", self.precision, kinds, ConfigError)
        if self.accumulation > self.batch_texts:
            raise ConfigError(
                f"TrainSettings.accumulation = {self.accumulation}: a step has {self.batch_texts} "
                "texts (batch_texts); choose at most as many parts"
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step (0-based)."""
        warmup = min(self.warmup, self.steps // 4)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        span = max(1, self.steps - warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / span))


class Product(Protocol):
    """What is trained: a module, its loss on a batch, its measure on held-out text."""

    name: str

    @property
    def module(self) -> nn.Module: ...

    def counts(self, batch: Batch) -> list[int]:
        """Rows of `batch` in each term of the loss (of each head, or recurrent step)."""
        ...

    def loss(self, batch: Batch, counts: Sequence[float]) -> torch.Tensor:
        """Scalar to minimise: the terms are sums over the batch's rows, divided by `counts`, those
        of the whole step."""
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
    ranks   those that share the steps; the first evaluates and writes
    """

    def __init__(
        self,
        product: Product,
        data: TrainingData,
        settings: TrainSettings,
        *,
        folder: Path | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.product = product
        self.data = data
        self.settings = settings
        self.ranks = ranks
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
            {
                "settings": asdict(settings),
                "product": product.describe(),
                "texts": [record.key for record in data.train],
            }
        )
        ranks.share_state(product.module)
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unwritable(folder, error) from error
            self._resume(folder / CHECKPOINT)

    def run(
        self,
        on_step: Callable[[Training], None] | None = None,
        *,
        stop_after: int | None = None,
        interrupts: Interrupts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> TrainingResult:
        """Train to the last step, or to step `stop_after`; saved every minute and at the end.

        Raises Stopped when it was interrupted, on every rank.
        """
        last = self.settings.steps if stop_after is None else min(stop_after, self.settings.steps)
        saved = clock()
        while self.step < last:
            asked = self._one_step(interrupts is not None and interrupts.asked)
            done = self.step == self.settings.steps
            if (done or self.step % self.settings.eval_every == 0) and self.ranks.is_first:
                self.evaluate()
            if asked:
                self.save_checkpoint()
                raise Stopped(f"stopped at step {self.step} of {self.settings.steps}")
            if done or clock() - saved > CHECKPOINT_SECONDS:
                self.save_checkpoint()
                saved = clock()
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

    def _one_step(self, asked: bool) -> bool:
        """One update of the weights; was any rank asked to stop?"""
        settings, ranks = self.settings, self.ranks
        for group in self._optimizer.param_groups:
            group["lr"] = settings.rate(self.step)
        own = slice(ranks.rank * settings.accumulation, (ranks.rank + 1) * settings.accumulation)
        parts = self.data.parts(
            self.step, settings.batch_texts, settings.seed, ranks.device,
            settings.accumulation * ranks.world, own,
        )  # fmt: skip
        counted = [self.product.counts(part) for part in parts]
        # A rank may have no texts of a step; how many terms there are the others know.
        terms = torch.zeros(MAX_TERMS + 1, dtype=torch.float64)
        for counts in counted:
            terms[: len(counts)] += torch.tensor(counts, dtype=torch.float64)
        terms[-1] = float(asked)
        ranks.sum(terms)
        whole = terms[:-1].clamp_min(1).tolist()
        self._optimizer.zero_grad(set_to_none=True)
        value = torch.zeros(1, dtype=torch.float64)
        for part, counts in zip(parts, counted, strict=True):
            loss = self.product.loss(part, whole[: len(counts)])
            value += float(loss.detach())
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        self._check_finite(float(ranks.sum(value)))
        parameters = [p for p in self.product.module.parameters() if p.requires_grad]
        ranks.sum_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, settings.gradient_clip)
        self._optimizer.step()
        self.step += 1
        self.result.losses.append(float(value))
        return bool(terms[-1])

    def _check_finite(self, value: float) -> None:
        if not math.isfinite(value):
            raise ModelError(
                f"training of {self.product.name}: the loss is {value} at step {self.step}; lower "
                f"the learning rate (now {self.settings.learning_rate:g})"
            )

    def save_checkpoint(self) -> None:
        if self._folder is None or not self.ranks.is_first:
            return
        path = self._folder / CHECKPOINT
        partial = path.with_suffix(f".{os.getpid()}.partial")  # another run has its own
        state = {
            "identity": self._identity,
            "step": self.step,
            "module": self.product.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "losses": self.result.losses,
            "evaluations": json.dumps(self.result.evaluations),
        }
        try:
            torch.save(state, partial)
            partial.replace(path)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter
            partial.unlink(missing_ok=True)
            raise unwritable(self._folder, error) from error

    def _resume(self, path: Path) -> None:
        if not path.is_file():
            return
        try:
            state = torch.load(path, map_location=self.ranks.device, weights_only=True)
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

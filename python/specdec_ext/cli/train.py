"""`specdec train-medusa`, `train-redrafter`, `train-drafter`: heads and drafters for a target."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import require
from .common import human_bytes

if TYPE_CHECKING:
    from ..training.run import TrainOptions

__all__ = ["add_arguments", "make_options", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the three commands; what a product does not have is refused in make_options."""
    parser.add_argument(
        "--output", metavar="DIR", required=True, help="folder for the result; replaced if an "
        "earlier run wrote it",
    )  # fmt: skip
    parser.add_argument(
        "--model", "--model-dir", metavar="DIR",
        help="folder of the target (default: the built-in SmolLM2-135M-Instruct)",
    )  # fmt: skip
    data = parser.add_argument_group("data (the target's own texts; collected once, resumable)")
    data.add_argument("--cache-dir", metavar="DIR", help="default: below the cache folder")
    data.add_argument("--num-prompts", type=int, metavar="N", help="texts (default: 4096)")
    data.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="tokens a text (default: 160)"
    )
    data.add_argument(
        "--collect-time-limit", type=float, metavar="MINUTES",
        help="train on what has been collected by then",
    )  # fmt: skip
    data.add_argument(
        "--exclude", nargs="+", default=[], metavar="FILE",
        help="evaluation texts (.txt, .json, .jsonl): a training text that shares 13 words with "
        "any is dropped",
    )  # fmt: skip
    shape = parser.add_argument_group("what is trained")
    shape.add_argument(
        "--draft-vocab-size", type=int, metavar="N", help="tokens that are scored (default: 8192)"
    )
    shape.add_argument("--num-heads", type=int, metavar="N", help="Medusa heads (default: 4)")
    shape.add_argument(
        "--num-layers", type=int, metavar="N",
        help="residual blocks of a head, or decoder layers of a drafter (default: 2)",
    )  # fmt: skip
    shape.add_argument(
        "--draft-len", type=int, metavar="N", help="ReDrafter: steps trained over (default: 5)"
    )
    shape.add_argument(
        "--intermediate-size", type=int, metavar="N",
        help="drafter: MLP neurons of a layer (default: 768)",
    )  # fmt: skip
    shape.add_argument(
        "--dtype", metavar="NAME", help="stored weights: float16 (default), bfloat16, float32; "
        "Medusa also int8",
    )  # fmt: skip
    train = parser.add_argument_group("training (resumable)")
    train.add_argument("--steps", type=int, metavar="N")
    train.add_argument("--batch-texts", type=int, metavar="N", help="texts of a step")
    train.add_argument("--learning-rate", type=float, metavar="X")
    train.add_argument("--seed", type=int, metavar="N", help="of training and of the data")
    train.add_argument("--work-dir", metavar="DIR", help="of the checkpoint")
    train.add_argument("--device", metavar="NAME", help="cpu (default) or cuda")
    train.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    train.add_argument("--plots", action="store_true", help="loss and accuracy curves (matplotlib)")
    train.add_argument("--quiet", action="store_true", help="no progress bar")


# Options that only some products have.
_OWN = {"num_heads": ("medusa",), "draft_len": ("redrafter",), "intermediate_size": ("drafter",)}


def make_options(args: argparse.Namespace, product: str) -> TrainOptions:
    """The options of a run. Raises ConfigError for one that the product does not have."""
    from ..errors import ConfigError
    from ..training.run import TrainOptions, default_collect, default_settings

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(args, name) for name in names if getattr(args, name) is not None}

    for name, products in _OWN.items():
        if getattr(args, name) is not None and product not in products:
            raise ConfigError(
                f"--{name.replace('_', '-')}: only train-{products[0]} has it; leave it out"
            )
    settings = dataclasses.replace(
        default_settings(product), **given("steps", "batch_texts", "learning_rate", "seed")
    )
    collect = dataclasses.replace(
        default_collect(), **given("num_prompts", "max_new_tokens", "seed")
    )
    limit = args.collect_time_limit
    folders = given("model", "cache_dir", "work_dir").items()
    paths: dict[str, Any] = {name: Path(value).expanduser() for name, value in folders}
    return TrainOptions(
        product=product,
        output=Path(args.output).expanduser(),
        collect=collect,
        collect_time_limit=None if limit is None else 60.0 * limit,
        settings=settings,
        exclude=tuple(Path(name) for name in args.exclude),
        plots=args.plots,
        command=_command(args, product),
        **paths,
        **given(
            "draft_vocab_size", "num_heads", "num_layers", "draft_len", "intermediate_size",
            "dtype", "device",
        ),
    )  # fmt: skip


def _command(args: argparse.Namespace, product: str) -> str:
    """The command line for the card: what decides the result, no folders of this machine."""
    names = (
        "num_prompts", "max_new_tokens", "draft_vocab_size", "num_heads", "num_layers", "draft_len",
        "intermediate_size", "dtype", "steps", "batch_texts", "learning_rate", "seed",
    )  # fmt: skip
    words = [f"specdec train-{product}"]
    for name in names:
        if (value := getattr(args, name)) is not None:
            words.append(f"--{name.replace('_', '-')} {value}")
    if args.exclude:
        words += ["--exclude", *(Path(name).name for name in args.exclude)]
    return " ".join(words)


class _Bars:
    """Progress on stderr: rich bars on a terminal, a line now and then elsewhere."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._quiet = quiet
        self._console = Console(stderr=True)
        self._lines = 0
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
            console=self._console, disable=quiet or not self._console.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def on_collect(self, collector: Any) -> None:
        self._show(
            "collecting", collector.num_done, collector.num_prompts,
            f"{collector.num_tokens} tokens",
        )  # fmt: skip

    def on_train(self, training: Any) -> None:
        losses = training.result.losses[-20:]
        note = f"loss {sum(losses) / len(losses):.3f}"
        if training.result.evaluations:
            accuracy = training.result.evaluations[-1][1]["accuracy"]
            note += " accuracy " + " ".join(f"{x:.3f}" for x in accuracy)
        self._show("training", training.step, training.settings.steps, note)

    def _show(self, name: str, done: int, total: int, note: str) -> None:
        if self._quiet:
            return
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, note="")
        self._bars.update(self._tasks[name], completed=done, note=note)
        part = 20 * done // max(1, total)
        if not self._console.is_terminal and part != self._lines:
            self._lines = part
            print(f"{name} {done}/{total} {note}", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    for package in ("torch", "transformers"):
        require(package, f"specdec {args.command}", "train")
    product = str(args.command).removeprefix("train-")
    options = make_options(args, product)
    if args.threads is not None:
        from ..installation import set_num_threads

        set_num_threads(args.threads)
    from ..training.run import train

    with _Bars(args.quiet) as bars:
        card = train(options, bars)
    accuracy = " ".join(f"{x:.3f}" for x in card["held_out"]["accuracy"])
    size = human_bytes(sum(card["files"].values()))
    print(f"{options.output}: {size}, held-out top-1 accuracy by position {accuracy}")
    return 0

"""`specdec train-medusa`, `train-redrafter`, `train-drafter`, `train-eagle3`: what drafts for a
target."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import require
from .common import human_bytes
from .output import write_file

if TYPE_CHECKING:
    from ..training.options import TrainOptions

__all__ = ["add_arguments", "make_options", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of all trainers; what a product does not have is refused in make_options."""
    parser.add_argument(
        "--output", metavar="DIR", required=True, help="folder for the result; replaced if an "
        "earlier run wrote it",
    )  # fmt: skip
    parser.add_argument(
        "--model", "--model-dir", metavar="DIR",
        help="folder of the target (default: the built-in SmolLM2-135M-Instruct)",
    )  # fmt: skip
    data = parser.add_argument_group("data (default: built-in prompts that the target answers)")
    data.add_argument(
        "--data", nargs="+", default=[], metavar="FILE",
        help="your texts with their answers: .jsonl or .json of messages, ShareGPT, Alpaca, prompt "
        "and completion, or text; .txt; .parquet or a folder that datasets has saved",
    )  # fmt: skip
    data.add_argument(
        "--prompts", nargs="+", default=[], metavar="FILE",
        help="the same files for their prompts alone: the target writes the answers; of a .txt "
        "file every line is a prompt",
    )  # fmt: skip
    data.add_argument(
        "--chat-template", metavar="NAME|FILE",
        help="wraps conversations: vicuna, llama2, chatml, a Jinja file, or none (default: the "
        "tokenizer's, none where it has none)",
    )  # fmt: skip
    data.add_argument(
        "--cache-dir", metavar="DIR", help="of the texts, shared by all runs for this target "
        "(default: below the cache folder)",
    )  # fmt: skip
    data.add_argument(
        "--num-prompts", type=int, metavar="N",
        help="texts: of the built-in prompts (default: 4096), or the first N of yours",
    )  # fmt: skip
    data.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="tokens of an answer (default: 160)"
    )
    data.add_argument(
        "--max-prompt-len", type=int, metavar="N",
        help="tokens of a prompt; longer ones are cut at their beginning (default: 448)",
    )  # fmt: skip
    data.add_argument(
        "--collect-batch", type=int, metavar="N",
        help="texts that the target reads or writes at once (default: 32)",
    )  # fmt: skip
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
        "--draft-len",
        type=int,
        metavar="N",
        help="ReDrafter, EAGLE-3: steps trained over (default: 5)",
    )
    shape.add_argument(
        "--intermediate-size", type=int, metavar="N",
        help="drafter: MLP neurons of a layer (default: 768)",
    )  # fmt: skip
    shape.add_argument(
        "--dtype", metavar="NAME", help="stored weights: float16 (default), bfloat16, float32; "
        "Medusa also int8",
    )  # fmt: skip
    train = parser.add_argument_group("training (resumable; torchrun starts one rank per GPU)")
    train.add_argument("--steps", type=int, metavar="N")
    train.add_argument(
        "--batch-texts", "--batch-size", type=int, metavar="N",
        help="texts of a step, of all ranks together (default: 8; drafter 4)",
    )  # fmt: skip
    train.add_argument(
        "--accumulation", "--gradient-accumulation-steps", type=int, metavar="N",
        help="parts of a step that a rank works on one after the other: less memory, the same "
        "result (default: 1)",
    )  # fmt: skip
    train.add_argument("--learning-rate", type=float, metavar="X")
    train.add_argument(
        "--precision", metavar="NAME", help="of matrix products: bf16 (default) or float32"
    )
    train.add_argument(
        "--bf16", action="store_const", const="bf16", dest="precision", help="--precision bf16"
    )
    train.add_argument("--seed", type=int, metavar="N", help="of training and of the data")
    train.add_argument(
        "--work-dir", metavar="DIR",
        help="of the checkpoint (default: below the cache folder, until the run is done)",
    )  # fmt: skip
    train.add_argument(
        "--device", metavar="NAME", help="cpu (default), cuda or cuda:N; collects and trains"
    )
    train.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    train.add_argument(
        "--measure-prompts", type=int, metavar="N",
        help="held-out prompts that the result is tried out on at the end (default: 8, 0: none)",
    )  # fmt: skip
    train.add_argument(
        "--measure-tokens", type=int, metavar="N", help="most tokens of each (default: 96)"
    )
    train.add_argument(
        "--plots", action="store_true", help="write report.html into DIR, as specdec report does"
    )
    train.add_argument("--quiet", action="store_true", help="no progress, no estimate")


# Options that only some products have.
_OWN = {
    "num_heads": ("medusa",),
    "draft_len": ("redrafter", "eagle3"),
    "intermediate_size": ("drafter", "eagle3"),
    "num_layers": ("medusa", "redrafter", "drafter"),
}


def make_options(args: argparse.Namespace, product: str) -> TrainOptions:
    """The options of a run. Raises ConfigError for one that the product does not have."""
    from ..config.build_check import check_model_path
    from ..errors import ConfigError
    from ..training.collect import CollectConfig
    from ..training.options import TrainOptions, default_settings

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(args, name) for name in names if getattr(args, name) is not None}

    for name, products in _OWN.items():
        if getattr(args, name) is not None and product not in products:
            raise ConfigError(
                f"--{name.replace('_', '-')}: an option of train-{' and train-'.join(products)}; "
                "leave it out"
            )
    settings = dataclasses.replace(
        default_settings(product),
        **given(
            "steps", "batch_texts", "learning_rate", "seed", "accumulation", "precision"
        ),
    )  # fmt: skip
    collect = CollectConfig(
        **given("num_prompts", "max_new_tokens", "max_prompt_len", "seed"),
        **({} if args.collect_batch is None else {"batch_size": args.collect_batch}),
    )
    limit = args.collect_time_limit
    if args.model is not None:
        check_model_path(args.model)
    folders = given("model", "cache_dir", "work_dir").items()
    paths: dict[str, Any] = {name: Path(value).expanduser() for name, value in folders}
    return TrainOptions(
        product=product,
        output=Path(args.output).expanduser(),
        data=tuple(Path(name) for name in args.data),
        prompts=tuple(Path(name) for name in args.prompts),
        collect=collect,
        collect_time_limit=None if limit is None else 60.0 * limit,
        settings=settings,
        exclude=tuple(Path(name) for name in args.exclude),
        command=_command(args, product),
        **paths,
        **given(
            "draft_vocab_size", "num_heads", "num_layers", "draft_len", "intermediate_size",
            "dtype", "device", "chat_template", "measure_prompts", "measure_tokens",
        ),
    )  # fmt: skip


def _command(args: argparse.Namespace, product: str) -> str:
    """The command line for the card: what decides the result, no folders of this machine."""
    names = (
        "num_prompts", "max_new_tokens", "max_prompt_len", "draft_vocab_size", "num_heads",
        "num_layers", "draft_len", "intermediate_size", "dtype", "steps", "batch_texts",
        "accumulation", "learning_rate", "precision", "seed",
    )  # fmt: skip
    words = [f"specdec train-{product}"]
    for name in ("data", "prompts", "exclude"):
        if files := getattr(args, name):
            words += [f"--{name}", *(Path(file).name for file in files)]
    if args.chat_template is not None:
        words += ["--chat-template", Path(args.chat_template).name]
    for name in names:
        if (value := getattr(args, name)) is not None:
            words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(words)


def run(args: argparse.Namespace) -> int:
    for package in ("torch", "transformers"):
        require(package, f"specdec {args.command}", "train")
    if args.plots:
        require("matplotlib", "--plots")
    product = str(args.command).removeprefix("train-")
    options = make_options(args, product)
    if args.threads is not None:
        from ..installation import set_num_threads

        set_num_threads(args.threads)
    from ..training.interrupts import Stopped
    from ..training.run import train
    from .train_progress import TrainProgress

    try:
        with TrainProgress(args.quiet or os.environ.get("RANK", "0") != "0") as progress:
            card = train(options, progress)
    except Stopped as stopped:
        print(f"{stopped}; the same command goes on from there", file=sys.stderr)
        raise
    if not card:  # of the ranks the first says it
        return 0
    if args.plots:
        _write_page(args, options.output)
    _say(card, options)
    return 0


def _write_page(args: argparse.Namespace, output: Path) -> None:
    from ..report.page import render_page
    from ..report.read import read_result
    from ..training.finish import LOG_FILE

    page = render_page(f"specdec {args.command}", [read_result(output / LOG_FILE)])
    write_file(args, output / "report.html", page)


def _say(card: dict[str, Any], options: TrainOptions) -> None:
    """What was made, what it is worth, and the command that uses it."""
    from ..training.trial import FLAGS

    accuracy = " ".join(f"{x:.3f}" for x in card["held_out"]["accuracy"])
    size = human_bytes(sum(card["files"].values()))
    print(f"{options.output}: {size}, held-out top-1 accuracy by position {accuracy}")
    measured = card["measured"] or {}
    if "error" in measured:
        print(f"not measured: {measured['error']}")
    elif measured:
        speed = measured["tokens_per_second"]
        print(
            f"{measured['prompts']} held-out prompts: {measured['tokens_per_pass']:.2f} tokens per "
            f"pass, {100 * measured['acceptance_rate']:.0f} % of drafts accepted; "
            f"{speed['drafted']:.1f} tokens/s, plain {speed['plain']:.1f} "
            f"({measured['speedup']:.2f} times); {measured['equal_to_plain']} of "
            f"{measured['prompts']} texts equal to plain"
        )
    words = ["specdec", "generate"]
    words += [] if options.model is None else ["--model", str(options.model)]
    words += [FLAGS[options.product], str(options.output), "--input_text", "..."]
    print(f"use it: {shlex.join(words)}")

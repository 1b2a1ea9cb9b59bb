"""`specdec convert-heads`: Medusa heads from one project's files into another's."""

from __future__ import annotations

import argparse
from pathlib import Path

from .parser import usage_error

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="folder or file with Medusa heads")
    parser.add_argument("target", metavar="FOLDER", help="folder to write, a new or an empty one")
    parser.add_argument(
        "--to", default="specdec", choices=("specdec", "fasterdecoding", "vllm"),
        help="whose spelling to write (default: specdec)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", default="float16", choices=("float32", "float16", "bfloat16", "int8"),
        help="of the weights (default: float16; int8 with --to specdec)",
    )  # fmt: skip
    parser.add_argument(
        "--num-medusa-heads", type=int, metavar="N", help="keep the first N heads (default: all)"
    )
    parser.add_argument(
        "--model", metavar="DIR",
        help="the target: the heads are checked against it, and its LM head is written out where "
        "the spelling needs it",
    )  # fmt: skip
    parser.add_argument(
        "--allow-pickle", action="store_true",
        help="read .pt and .bin files, which may be malicious; refused otherwise",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    _check_folder(args)
    from ..drafters.medusa.convert import first_heads, write_heads
    from ..drafters.medusa.heads import load_heads

    model = None
    if args.model is not None:
        from ..models import load_model

        model = load_model(args.model, allow_pickle=args.allow_pickle)
    heads = load_heads(args.source, model=model, allow_pickle=args.allow_pickle)
    if args.num_medusa_heads is not None:
        heads = first_heads(heads, args.num_medusa_heads)
    folder = write_heads(args.target, heads, args.to, dtype=args.dtype, model=model)
    config = heads.config
    print(
        f"{folder}: {config.num_medusa_heads} heads of {config.num_medusa_layers} layers, hidden "
        f"size {config.hidden_size}, LM head {config.lm_head!r} over {config.head_rows} of "
        f"{config.vocab_size} tokens, {args.dtype}, as {args.to}"
    )
    return 0


def _check_folder(args: argparse.Namespace) -> None:
    """config.json and model.safetensors are names that a model has, too. Raises SystemExit(2)."""
    folder = Path(args.target)
    if folder.is_dir():
        taken = next(folder.iterdir(), None)
        if taken is not None:
            usage_error(args, f"FOLDER {args.target!r} holds {taken.name!r}, which might be "
                        "overwritten; give a new or an empty one")  # fmt: skip
    elif folder.exists():
        usage_error(args, f"FOLDER {args.target!r} is no folder; give a new or an empty one")

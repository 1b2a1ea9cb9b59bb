"""`specdec convert`: a checkpoint into one folder of safetensors shards."""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import add_quantization_arguments, human_bytes, quantization_of
from .flags import ForeignFlags, add_foreign_arguments, note_foreign, stage_line

__all__ = ["add_arguments", "run"]

# Options of TensorRT-LLM's convert_checkpoint.py that have no meaning here.
_FOREIGN: ForeignFlags = {
    "--workers": ("N", {}, "shards are written one after another"),
    "--load-by-shard": (None, {}, "tensors are always read one at a time"),
    "--use-parallel-embedding": (None, {}, "rank 0 has all embeddings"),
    "--embedding-sharding-dim": ("N", {}, "rank 0 has all embeddings"),
    "--load-model-on-cpu": (None, {}, "the model is not loaded"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-dir", "--model", metavar="PATH",
        help="folder of an HF-format model, or GGUF file (default: the built-in model)",
    )  # fmt: skip
    parser.add_argument(
        "--output-dir", required=True, metavar="DIR", help="folder of the checkpoint"
    )
    parser.add_argument(
        "--dtype", default="auto",
        help="auto, float32, bfloat16 or float16 (default: auto, as the checkpoint; a GGUF file's "
        "weights keep their width)",
    )  # fmt: skip
    add_quantization_arguments(parser, "round float weights to this width (native families)")
    parser.add_argument(
        "--perplexity", nargs="?", const="", metavar="FILE",
        help="with --quantization: perplexity of a text before and after (default text: 300 news "
        "articles of the package gensim, fetched once)",
    )  # fmt: skip
    parser.add_argument(
        "--tp-size", type=int, default=1, metavar="N",
        help="ranks that the model will be spread over; each reads shards of its own (default: 1)",
    )  # fmt: skip
    parser.add_argument("--pp-size", type=int, default=1, metavar="N", help="only 1")
    parser.add_argument(
        "--medusa-model", "--medusa-model-dir", metavar="DIR", help="keep these Medusa heads by it"
    )
    parser.add_argument(
        "--redrafter-model", "--drafter-model-dir", metavar="DIR", help="keep this ReDrafter by it"
    )
    parser.add_argument(
        "--allow-pickle", action="store_true",
        help="read .bin and .pt files, which may be malicious; refused otherwise",
    )  # fmt: skip
    add_foreign_arguments(parser, _FOREIGN)


def run(args: argparse.Namespace) -> int:
    from ..workflow.convert import ConvertOptions, convert

    note_foreign(args, _FOREIGN)

    def path(text: str | None) -> Path | None:
        return None if text is None else Path(text)

    text = path(args.perplexity)
    if args.perplexity == "":
        from ..workflow.quantization_report import news_file

        text = news_file()
    options = ConvertOptions(
        dtype=args.dtype,
        quantization=quantization_of(args),
        perplexity=text,
        tp_size=args.tp_size,
        pp_size=args.pp_size,
        medusa_model=path(args.medusa_model),
        redrafter_model=path(args.redrafter_model),
        allow_pickle=args.allow_pickle,
    )
    source = args.model_dir
    if source is None:
        from ..models.default import default_model

        source = default_model()
    done = convert(source, args.output_dir, options, tell=stage_line(args))
    resumed = f", {done.num_resumed} of them from before" if done.num_resumed else ""
    shards = "1 shard" if done.num_shards == 1 else f"{done.num_shards} shards"
    print(
        f"{done.folder}: {done.num_tensors} tensors in {shards}{resumed}, "
        f"{human_bytes(done.weight_bytes)}, {done.format}"
    )
    return 0

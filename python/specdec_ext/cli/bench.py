"""`specdec bench latency | throughput | sweep | serve`: speed with speculation and without."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from . import bench_serve
from .common import add_llm_arguments, external_lookup, llm_kwargs, make_llm, usage_error
from .output import check_outputs, write_file
from .prompts import add_prompt_arguments, encode_prompt, read_prompts
from .speculation import named_speculation

__all__ = ["add_arguments", "run"]

MIN_ITERS = 5
# Mode -> its own options with their defaults; given elsewhere they are refused.
_ROUNDS = {"num_iters": MIN_ITERS, "num_iters_warmup": 2}
_MODE_OPTIONS: dict[str, dict[str, Any]] = {
    "latency": {"batch_size": 8, **_ROUNDS},
    "throughput": {"num_prompts": None, **_ROUNDS},
    "sweep": {"batch_sizes": [1, 2, 4, 8], "draft_lens": None, "triples": None, **_ROUNDS},
    "serve": bench_serve.OPTIONS,
}
_LATENCY_INPUT_LEN = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "mode", choices=tuple(_MODE_OPTIONS), metavar="MODE",
        help="latency: one batch; throughput: all prompts at once; sweep: batch sizes by draft "
        "lengths; serve: a server by HTTP",
    )  # fmt: skip
    work = parser.add_argument_group("work")
    add_prompt_arguments(work)
    work.add_argument(
        "--input-len", type=int, metavar="N",
        help=f"random prompts of N tokens, serve: of N words (default: {_LATENCY_INPUT_LEN}, "
        "serve: 64; not with --input-file)",
    )  # fmt: skip
    work.add_argument(
        "--output-len", "--max-output-len", type=int, default=128, metavar="N",
        help="output tokens of every request, end tokens ignored (default: 128)",
    )  # fmt: skip
    work.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy"
    )
    work.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of prompts and sampling"
    )
    work.add_argument("--batch-size", type=int, metavar="N", help="latency: requests (default: 8)")
    work.add_argument(
        "--num-prompts", type=int, metavar="N",
        help="throughput: requests (default: 32, or the file's prompts); serve: requests at every "
        "concurrency (default: 4 times it, at least 8)",
    )  # fmt: skip
    work.add_argument(
        "--batch-sizes", type=int, nargs="+", metavar="N", help="sweep (default: 1 2 4 8)"
    )
    work.add_argument(
        "--draft-lens", type=int, nargs="+", metavar="K",
        help="sweep: drafts per step (default: the configured number, halved down to 1)",
    )  # fmt: skip
    work.add_argument(
        "--triples", nargs="+", metavar="[W,N,G]", help="sweep of lookahead, instead of draft lens"
    )
    work.add_argument(
        "--num-iters", type=int, metavar="N",
        help=f"rounds that count, at least {MIN_ITERS} (default: {MIN_ITERS})",
    )  # fmt: skip
    work.add_argument(
        "--num-iters-warmup",
        type=int,
        metavar="N",
        help="rounds before those that count (default: 2)",
    )
    bench_serve.add_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="JSON on stdout instead of a table")
    output.add_argument("--output-json", metavar="FILE", help="write the JSON there too")
    output.add_argument("--disable-tqdm", action="store_true", help="no progress on stderr")
    add_llm_arguments(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    llm_kwargs(args)  # refused before anything is loaded
    if args.mode == "serve":
        bench_serve.check(args)
        report = bench_serve.run(args)
        _write(args, report)
        return 1 if report["failed_requests"] else 0
    params = _params(args)
    drafts = _drafts(args, named_speculation(args)) if args.mode == "sweep" else []
    prompts = None if args.input_file is None else read_prompts(args)
    if args.max_batch_size is None:
        wanted = {"latency": [args.batch_size], "sweep": args.batch_sizes}.get(args.mode)
        args.max_batch_size = max(wanted) if wanted else None
    with make_llm(args) as llm:
        items, source = _items(args, llm, prompts)
        report = _measure(args, llm, items, source, params, drafts)
    _write(args, report)
    if report["failed_requests"]:
        return 1
    exact = report["expects_plain_tokens"] and report["numerics"] == "exact"
    if exact and report["identical_to_plain"] is False:
        print("the tokens differ from those of plain decoding", file=sys.stderr)
        return 1
    return 0


def _check(args: argparse.Namespace) -> None:
    """Everything about the options that needs no model."""
    from ..config.validate import check_int
    from ..errors import ConfigError

    for mode, options in _MODE_OPTIONS.items():
        for name, default in options.items():
            flag = "--" + name.replace("_", "-")
            if name not in _MODE_OPTIONS[args.mode] and getattr(args, name) is not None:
                usage_error(args, f"{flag} belongs to 'bench {mode}', not to 'bench {args.mode}'")
            if mode == args.mode and getattr(args, name) is None:
                setattr(args, name, default)
    if args.input_len is not None and args.input_file is not None:
        usage_error(args, "--input-len and --input-file exclude each other; give one of them")
    if external_lookup(args) is not None:
        usage_error(args, "--prompt-lookup-style v1 is not measured here; use v2")
    counts = {}
    for flag, name, low in (
        ("--num-iters-warmup", "num_iters_warmup", 0), ("--num-iters", "num_iters", MIN_ITERS),
        ("--batch-size", "batch_size", 1), ("--num-prompts", "num_prompts", 1),
        ("--input-len", "input_len", 1),
    ):  # fmt: skip
        if getattr(args, name) is not None:
            counts[flag] = (getattr(args, name), low)
    for i, size in enumerate(args.batch_sizes or ()):
        counts[f"--batch-sizes[{i}]"] = (size, 1)
    for flag, (value, low) in counts.items():
        remedy = "a median of fewer rounds says little" if flag == "--num-iters" else ""
        check_int(flag, value, ConfigError, low=low, high=1_000_000, remedy=remedy)
    check_outputs(args, {"--output-json": args.output_json}, [args.input_file])


def _params(args: argparse.Namespace) -> Any:
    from ..request.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=args.output_len,
        ignore_eos=True,
        temperature=args.temperature,
        seed=args.seed,
        detokenize=False,
    )


def _drafts(args: argparse.Namespace, config: Any) -> list[Any]:
    """The sweep's draft lengths: fixed ones, and what the engine itself would choose."""
    from ..config.validate import check_int
    from ..errors import ConfigError

    if config is None:
        usage_error(args, "bench sweep needs a method of speculation; give for example "
                    '--prompt-lookup-config "[8,2]"')  # fmt: skip
    own = [None] if config.adaptive else []
    if config.method == "lookahead":
        if args.draft_lens is not None:
            usage_error(args, "--draft-lens: the length of lookahead follows from its triple; give "
                        "--triples")  # fmt: skip
        return [*own, *_triples(args, config)]
    if args.triples is not None:
        usage_error(args, "--triples needs --lookahead-config")
    lengths = args.draft_lens
    if lengths is None:
        lengths, length = [], config.max_draft_len
        while length >= 1:
            lengths.append(length)
            length //= 2
    most = config.max_draft_len
    for i, length in enumerate(lengths):
        check_int(f"--draft-lens[{i}]", length, ConfigError, low=1, high=most,
                  remedy=f"the configuration has max_draft_len = {most}")  # fmt: skip
    return [*own, *sorted(set(lengths))]


def _triples(args: argparse.Namespace, config: Any) -> list[tuple[int, int, int]]:
    """Those given, or the engine's and smaller ones."""
    from ..config.parse import parse_speculative_config
    from ..errors import ConfigError

    w, n, g = config.triple
    if args.triples is None:
        scaled = {(max(1, w * k // 4), n, max(1, g * k // 4)) for k in (1, 2, 4)}
        return sorted(scaled)
    triples = []
    for i, text in enumerate(args.triples):
        triple = parse_speculative_config(text, "lookahead")
        if triple is None or any(a > b for a, b in zip(triple.triple, config.triple, strict=True)):
            raise ConfigError(
                f"--triples[{i}] = {text}: not within --lookahead-config {config.triple}; raise "
                "that, or lower the triple"
            )
        triples.append(triple.triple)
    return triples


def _items(
    args: argparse.Namespace, llm: Any, prompts: list[Any] | None
) -> tuple[list[list[int]], str]:
    """Token ids of every request, and where they come from in words."""
    from ..bench.measure import random_prompts

    count = {"latency": args.batch_size, "throughput": args.num_prompts}.get(args.mode)
    if prompts is None:
        if args.mode == "sweep":
            count = max(args.batch_sizes)
        count = 32 if count is None else count
        length = _LATENCY_INPUT_LEN if args.input_len is None else args.input_len
        return random_prompts(llm.model.vocab_size, count, length, args.seed), "random tokens"
    encoded = [encode_prompt(llm, prompt, args)[1] for prompt in prompts]
    count = len(encoded) if count is None else count
    return [encoded[i % len(encoded)] for i in range(count)], Path(args.input_file).name


def _measure(
    args: argparse.Namespace,
    llm: Any,
    items: list[list[int]],
    source: str,
    params: Any,
    drafts: list[Any],
) -> dict[str, Any]:
    from ..bench import runs
    from ..bench.tables import print_sweep

    shown = sys.stderr.isatty() and not args.disable_tqdm

    def note(text: str) -> None:
        if shown:
            print(f"\r{text:<40}", end="", file=sys.stderr, flush=True)

    def on_call(phase: str, number: int, count: int) -> None:
        note(f"{phase} {number}/{count}")

    rounds = {"num_iters": args.num_iters, "num_iters_warmup": args.num_iters_warmup}
    try:
        if args.mode != "sweep":
            bench = runs.latency if args.mode == "latency" else runs.throughput
            return bench(llm, items, params, source=source, on_call=on_call, **rounds)
        rows: list[dict[str, Any]] = []
        try:
            return runs.sweep(
                llm, items, params, source=source, batch_sizes=args.batch_sizes, drafts=drafts,
                on_cell=lambda number, count: note(f"cell {number}/{count}"), rows=rows, **rounds,
            )  # fmt: skip
        except KeyboardInterrupt:
            name = llm.speculative_config.method
            print_sweep({"model": "interrupted", "method": name, "rows": rows}, sys.stdout)
            raise
    finally:
        note("")
        if shown:
            print("\r", end="", file=sys.stderr)


def _write(args: argparse.Namespace, report: dict[str, Any]) -> None:
    from ..bench.tables import print_pair, print_serve, print_sweep

    text = json.dumps(report, indent=2, allow_nan=False)
    if args.output_json is not None:
        write_file(args, args.output_json, text + "\n")
    if args.json:
        print(text)
    elif args.mode == "sweep":
        print_sweep(report, sys.stdout)
    elif args.mode == "serve":
        print_serve(report, sys.stdout)
    else:
        print_pair(report, sys.stdout)

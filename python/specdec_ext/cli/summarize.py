"""`specdec summarize`: ROUGE, speed and equality of tokens on articles, as in TensorRT-LLM's
summarize.py, with plain decoding beside the speculative one."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .common import add_llm_arguments, external_lookup, llm_kwargs, make_llm, usage_error
from .flags import ForeignFlags, add_foreign_arguments, note_foreign
from .output import check_outputs, write_file

__all__ = ["add_arguments", "run"]

_FOREIGN: ForeignFlags = {
    "--rouge-dir": ("DIR", {}, "rouge-score is used"),
    "--eval-task": (
        "TASK",
        dict.fromkeys(
            ("summarize_long", "code_completion", "eval_context_ppl"), "use --eval_task=summarize"
        ),
        "summarize is the only one",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("work")
    work.add_argument(
        "--test-hf", action="store_true", help="decode with transformers, on the CPU, too"
    )
    work.add_argument(
        "--test-trt-llm", "--test-specdec", action="store_true",
        help="decode with this package, plainly and with the drafts that are named",
    )  # fmt: skip
    work.add_argument(
        "--hf-model-dir", metavar="DIR",
        help="the model of --test-hf, and of the tokens (default: --model, or the built-in model)",
    )  # fmt: skip
    work.add_argument(
        "--dataset-dir", "--dataset-path", metavar="PATH",
        help="JSON lines, or a folder of such files, with article and highlights (default: the "
        "papers of aclsum, fetched once)",
    )  # fmt: skip
    work.add_argument("--batch-size", type=int, default=1, metavar="N", help="default: 1")
    work.add_argument(
        "--max-ite", type=int, default=20, metavar="N", help="batches, at most (default: 20)"
    )
    work.add_argument(
        "--output-len", "--max-output-len", type=int, default=100, metavar="N",
        help="tokens of a summary, at most (default: 100)",
    )  # fmt: skip
    work.add_argument(
        "--max-input-length", type=int, default=923, metavar="N",
        help="tokens of a prompt; longer articles lose their end (default: 923)",
    )  # fmt: skip
    work.add_argument(
        "--check-accuracy", action="store_true",
        help="exit with 1 unless ROUGE-1 of this package is above the threshold",
    )  # fmt: skip
    work.add_argument(
        "--tensorrt-llm-rouge1-threshold", "--rouge1-threshold", type=float, default=15.0,
        metavar="X", help="of --check_accuracy, of 100 (default: 15)",
    )  # fmt: skip
    work.add_argument("--json", action="store_true", help="one JSON object with all texts")
    work.add_argument("--output-json", metavar="FILE", help="write it there, too")
    add_foreign_arguments(parser, _FOREIGN)
    add_llm_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ..models.host_arrays import kv_dtype_name
    from ..workflow.articles import read_articles
    from ..workflow.summarize import rouge

    _check(args)
    note_foreign(args, _FOREIGN)
    hf_dtype = _place_dtype(args)
    config = llm_kwargs(args)["speculative_config"]
    rouge([], [])  # is it installed?
    articles = read_articles(args.dataset_dir, args.batch_size * args.max_ite)
    ours, theirs = [], None
    llm = make_llm(args)
    try:
        prompts = _prompts(args, llm, articles)
        if args.test_trt_llm:
            ours.append(_ours(args, llm, prompts, speculative=False))
            if config is not None or external_lookup(args) is not None:
                ours.append(_ours(args, llm, prompts, speculative=True))
        tokenizer, ends = llm.tokenizer, llm.engine.limits.eos_token_ids
        dtype = hf_dtype or str(kv_dtype_name(llm.model))
        model = args.hf_model_dir or str(llm.model_path)
    finally:
        llm.close()
    if args.test_hf:
        from ..workflow.summarize import run_transformers

        theirs = run_transformers(
            model, prompts, tokenizer, dtype=dtype, output_len=args.output_len,
            batch_size=args.batch_size, end_ids=ends, on_batch=_progress("transformers", prompts),
        )  # fmt: skip
    sides = [*([theirs] if theirs is not None else []), *ours]
    for side in sides:
        side.rouge = rouge(side.texts, articles)
    return _report(args, articles, sides)


def _check(args: argparse.Namespace) -> None:
    if not (args.test_hf or args.test_trt_llm):
        usage_error(args, "nothing to do: give --test_trt_llm (or --test_specdec), --test_hf, or "
                    "both")  # fmt: skip
    if args.check_accuracy and not args.test_trt_llm:
        usage_error(args, "--check_accuracy needs --test_trt_llm: its ROUGE-1 is what is checked")
    for name in ("batch_size", "max_ite", "output_len", "max_input_length"):
        if getattr(args, name) < 1:
            usage_error(args, f"--{name} = {getattr(args, name)}: expected at least 1")
    check_outputs(args, {"--output_json": args.output_json})
    if args.engine_dir is None and args.model is None:
        args.model = args.hf_model_dir
        if args.test_hf and args.model is None:  # one transformers reads, the same on both sides
            from ..models import default_model

            args.model = str(default_model())


def _place_dtype(args: argparse.Namespace) -> str | None:
    """--data_type is that of transformers where an engine has its own; None: the engine's."""
    from ..config.dtypes import normalize_dtype

    dtype = normalize_dtype("--data_type", args.dtype)
    if args.engine_dir is not None:
        args.dtype = "auto"
    return None if dtype == "auto" else dtype


def _prompts(args: argparse.Namespace, llm: Any, articles: Any) -> list[list[int]]:
    from ..errors import ConfigError
    from ..workflow.summarize import prompts_of

    if llm.tokenizer is None:
        raise ConfigError("summarize: the model has no tokenizer; name one with --tokenizer_dir")
    room = llm.memory.max_seq_len - args.output_len
    limit = min(args.max_input_length, llm.scheduler_config.max_input_len or room, room)
    if limit < args.max_input_length:
        print(f"--max_input_length = {args.max_input_length}: the engine has room for {limit} "
              "prompt tokens; articles are cut to that", file=sys.stderr)  # fmt: skip
    return prompts_of(articles, llm.tokenizer, limit)


def _ours(args: argparse.Namespace, llm: Any, prompts: Any, *, speculative: bool) -> Any:
    from ..workflow.summarize import run_ours

    decode, lookup = None, external_lookup(args)
    if speculative and lookup is not None:
        from ..orchestrate import prompt_lookup

        def decode(batch: Any, params: Any) -> Any:
            return prompt_lookup(llm, batch, params, config=lookup)

    if lookup is not None or llm.kv_cache_config.enable_block_reuse:
        llm.reset_prefix_cache()  # each way computes its own K/V
    return run_ours(
        llm, prompts, speculative=speculative, output_len=args.output_len,
        batch_size=args.batch_size, decode=decode,
        on_batch=_progress("speculative" if speculative else "plain", prompts),
    )  # fmt: skip


def _progress(name: str, prompts: Any) -> Any:
    if not sys.stderr.isatty():
        return lambda done: None

    def show(done: int) -> None:
        end = "\n" if done == len(prompts) else ""
        print(f"\r{name}: {done} of {len(prompts)} articles", end=end, file=sys.stderr, flush=True)

    return show


def _report(args: argparse.Namespace, articles: Any, sides: list[Any]) -> int:
    """Print what was found; the exit code."""
    by_name = {side.name: side for side in sides}
    plain, speculative = by_name.get("plain"), by_name.get("speculative")
    differing = []
    if plain is not None and speculative is not None:
        pairs = zip(plain.token_ids, speculative.token_ids, strict=True)
        differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    threshold = args.tensorrt_llm_rouge1_threshold
    found = 0.0
    for side in (plain, speculative):  # without a method the plain one counts
        found = side.rouge["rouge1"] if side is not None else found
    too_low = args.check_accuracy and found <= threshold
    report = {
        "benchmark": "summarize",
        "articles": [article.name for article in articles],
        "sides": {side.name: side.to_dict() for side in sides},
        "identical": None if speculative is None else len(articles) - len(differing),
        "differing": [articles[i].name for i in differing],
        "rouge1_threshold": threshold if args.check_accuracy else None,
    }
    text = json.dumps(report, ensure_ascii=False, allow_nan=False)
    if args.output_json is not None:
        write_file(args, args.output_json, text + "\n")
    if args.json:
        print(text)
    else:
        _print_table(len(articles), sides, plain, speculative, differing)
    for i in differing:
        print(f"{articles[i].name}: speculative tokens differ from plain ones", file=sys.stderr)
    if too_low:
        print(
            f"rouge1 = {found:.2f} is not above the threshold {threshold:g} "
            "(--tensorrt_llm_rouge1_threshold)",
            file=sys.stderr,
        )
    elif args.check_accuracy and not args.json:
        print(f"rouge1 = {found:.2f} is above the threshold {threshold:g}")
    return 1 if differing or too_low else 0


def _print_table(
    count: int, sides: list[Any], plain: Any, speculative: Any, differing: list[int]
) -> None:
    print(f"{'':<14}{'rouge1':>8}{'rouge2':>8}{'rougeL':>8}{'rougeLsum':>10}{'tokens':>8}"
          f"{'tok/s':>8}{'tok/pass':>10}")  # fmt: skip
    for side in sides:
        scores = side.rouge
        per_pass = "" if side.acceptance_length is None else f"{side.acceptance_length:.2f}"
        print(f"{side.name:<14}{scores['rouge1']:>8.2f}{scores['rouge2']:>8.2f}"
              f"{scores['rougeL']:>8.2f}{scores['rougeLsum']:>10.2f}{side.num_tokens:>8}"
              f"{side.tokens_per_second:>8.1f}{per_pass:>10}")  # fmt: skip
    ours = speculative or plain
    if plain is not None and speculative is not None:
        ratio = speculative.tokens_per_second / plain.tokens_per_second
        print(f"speculative / plain: {ratio:.2f} times the speed; identical: "
              f"{count - len(differing)} of {count}")  # fmt: skip
    if ours is not None and ours is not sides[0]:
        other = sides[0]
        if other is not plain:
            ratio = ours.tokens_per_second / other.tokens_per_second
            print(f"{ours.name} / {other.name}: {ratio:.2f} times the speed")

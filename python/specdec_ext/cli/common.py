"""What the commands share: options of an LLM, colours, number formats."""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from typing import IO, Any

from ..config.engine import POLICIES, KvCacheConfig, SchedulerConfig
from ..config.quantization import QUANTIZATIONS, TABLE_TYPES, Quantization
from ..errors import SyntheticAcceptanceWarning
from .engine_dir import add_engine_arguments, target_device, with_engine
from .parser import SpecdecParser, normalize_argv, usage_error
from .speculation import (
    add_speculation_arguments,
    external_lookup,
    medusa_model,
    speculative_config,
)

__all__ = [
    "SpecdecParser",
    "add_llm_arguments",
    "checked_threads",
    "external_lookup",
    "human_bytes",
    "llm_kwargs",
    "make_llm",
    "medusa_model",
    "normalize_argv",
    "refuse_engine_options",
    "usage_error",
    "use_color",
]


def add_quantization_arguments(parser: Any, what: str) -> None:
    """Options that quantization_of() reads; `what` the first one does."""
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help=f"{what} (default: as they are)"
    )
    parser.add_argument(
        "--quantization-group-size", type=int, metavar="N",
        help="elements of a row that share a scale; -1: whole rows (default: 32 of whole numbers, "
        "64 of fp8)",
    )  # fmt: skip
    parser.add_argument(
        "--quantization-embeddings", choices=TABLE_TYPES,
        help="width of the embeddings; keep: floats (default: int8)",
    )  # fmt: skip
    parser.add_argument(
        "--quantization-head", choices=TABLE_TYPES,
        help="width of the output head; keep: floats (default: int8, or as the embeddings where "
        "they are the head)",
    )  # fmt: skip


def quantization_of(args: argparse.Namespace) -> str | dict[str, Any] | None:
    """LLM's argument, of the options of add_quantization_arguments(). Raises ConfigError."""
    names = ("group_size", "embeddings", "head")
    said = {name: getattr(args, f"quantization_{name}") for name in names}
    said = {name: value for name, value in said.items() if value is not None}
    if args.quantization is None:
        for name in said:
            usage_error(args, f"--quantization-{name.replace('_', '-')} says how weights are "
                        "narrowed; give --quantization, too")  # fmt: skip
        return None
    return Quantization.of({"method": args.quantization, **said}).plain


def add_llm_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that decide which engine is built."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", "--model-dir", metavar="PATH",
        help="folder of an HF-format model, or GGUF file (default: the built-in "
        "SmolLM2-135M-Instruct)",
    )  # fmt: skip
    add_engine_arguments(model)
    model.add_argument(
        "--tokenizer-dir", "--tokenizer", metavar="DIR", help="tokenizer folder (default: MODEL)"
    )
    model.add_argument(
        "--dtype", "--data-type", default="auto",
        help="auto, float32, bfloat16 or float16 (default: auto, as the checkpoint; a GGUF file's "
        "weights keep their width)",
    )  # fmt: skip
    add_quantization_arguments(model, "round float weights to this width while they are loaded")
    model.add_argument(
        "--model-impl", default="auto", choices=("auto", "native", "transformers"),
        help="which code runs the model (default: auto, native where it can)",
    )  # fmt: skip
    model.add_argument(
        "--device", default="auto", metavar="DEVICE",
        help="auto, cpu, cuda or cuda:N; cuda:A,B,... of several ranks (default: auto, a CUDA "
        "device if one can be used)",
    )  # fmt: skip
    model.add_argument(
        "--numerics", default="auto", choices=("auto", "exact", "fast"),
        help="exact: near-ties fall as in plain decoding, and a model that cannot do this is "
        "refused; fast: they may fall differently (default: auto, exact on the CPU and fast on a "
        "device)",
    )  # fmt: skip
    model.add_argument(
        "--allow-pickle", action="store_true",
        help="read pytorch_model.bin files, which may be malicious; refused otherwise",
    )  # fmt: skip
    model.add_argument(
        "--threads", type=int, metavar="N",
        help="threads of a forward pass (default: $SPECDEC_NUM_THREADS, else all usable CPUs)",
    )  # fmt: skip
    model.add_argument(
        "--tensor-parallel-size", "--tp-size", type=int, metavar="N",
        help="ranks that share the forward pass (default: as many as torchrun has started, else 1)",
    )  # fmt: skip

    add_speculation_arguments(parser)

    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-batch-size", type=int, metavar="N",
        help="the most requests that decode at once (default: "
        f"{SchedulerConfig.max_batch_size})",
    )  # fmt: skip
    limits.add_argument(
        "--max-seq-len", type=int, metavar="N",
        help="the most prompt + output tokens of one request (default: what the model and the KV "
        "pages allow)",
    )  # fmt: skip
    limits.add_argument(
        "--max-input-len", type=int, metavar="N",
        help="the most prompt tokens of one request (default: as many as fit)",
    )  # fmt: skip
    limits.add_argument(
        "--max-num-tokens", type=int, metavar="N",
        help="the most rows of a forward pass (default: at least 1024)",
    )  # fmt: skip
    limits.add_argument(
        "--tokens-per-block", type=int, metavar="N",
        help="tokens of a KV page, a power of two up to 128 (default: "
        f"{KvCacheConfig.tokens_per_block})",
    )  # fmt: skip
    limits.add_argument(
        "--max-tokens-in-paged-kv-cache", type=int, metavar="N",
        help="tokens that all KV pages hold (default: by the free memory, at most 4 GiB on the "
        "CPU)",
    )  # fmt: skip
    limits.add_argument(
        "--kv-cache-free-gpu-memory-fraction", type=float, metavar="F",
        help="limit of the KV pages as a fraction of the free memory (default: "
        f"{KvCacheConfig.free_gpu_memory_fraction})",
    )  # fmt: skip
    limits.add_argument(
        "--max-attention-window-size", type=int, nargs="+", metavar="N",
        help="the most tokens that a row sees; several numbers: one per layer (default: the "
        "model's own)",
    )  # fmt: skip
    limits.add_argument(
        "--sink-token-length", type=int, metavar="N",
        help="first tokens of a text that rows see in addition to their window (default: 0)",
    )  # fmt: skip
    limits.add_argument(
        "--kv-cache-dtype", metavar="TYPE",
        help="auto, fp8 or int8: type of K and V in the pages (default: auto, the model's)",
    )  # fmt: skip
    limits.add_argument(
        "--kv-cache-enable-block-reuse", "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="reuse the K/V of prompt blocks that an earlier request has computed (default: on in "
        "chat and serve, else off)",
    )  # fmt: skip
    limits.add_argument(
        "--host-cache-size", type=int, metavar="BYTES",
        help="host memory for the K/V of preempted requests, with --scheduler-policy "
        "max_utilization (default: 0, K/V is computed again)",
    )  # fmt: skip
    limits.add_argument(
        "--swap-space", type=float, metavar="GIB", help="the same in GiB, as vLLM spells it"
    )
    limits.add_argument(
        "--scheduler-policy", choices=POLICIES,
        help="when a request starts: if it can finish (guaranteed_no_evict, the default), or if "
        "its prompt fits now (max_utilization)",
    )  # fmt: skip
    limits.add_argument(
        "--max-prefill-slowdown", type=float, metavar="X",
        help="reading prompts makes a step of other requests at most X times as long; inf: no "
        f"limit (default: {SchedulerConfig.max_prefill_slowdown:g})",
    )  # fmt: skip
    limits.add_argument(
        "--overlap-depth", "--run-ahead", type=_overlap_depth, metavar="N",
        help="enqueue up to N steps (0..2) while one is read (default: auto)",
    )  # fmt: skip
    limits.add_argument(
        "--enforce-eager", action=argparse.BooleanOptionalAction,
        help="on a CUDA device: the host launches every kernel; else steps are recorded as CUDA "
        "graphs (default: record them, unless there are several devices)",
    )  # fmt: skip


def _overlap_depth(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _slowdown(value: float | None) -> dict[str, float | None]:
    if value is None:
        return {}
    return {"max_prefill_slowdown": None if value == math.inf else value}


def _one_or_more(values: list[int] | None) -> int | list[int] | None:
    return values[0] if values is not None and len(values) == 1 else values


def llm_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """LLM's arguments from the options of add_llm_arguments; all checked without torch."""
    from ..config.build_check import check_build
    from ..config.ranks import resolve_tensor_parallel_size, world_of

    def chosen(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    from ..config.dtypes import normalize_dtype
    from ..config.parse import parse_kv_cache_config, parse_scheduler_config

    size = resolve_tensor_parallel_size(args.tensor_parallel_size, world_of())
    config = speculative_config(args)
    if args.engine_dir is None:
        check_build(config, args.max_draft_len, args.speculative_decoding_mode, size)
    elif args.speculative_decoding_mode is not None:
        usage_error(args, "--speculative-decoding-mode with --engine-dir: the mode is that of the "
                    "build; leave it out")  # fmt: skip
    # The loop brings the drafts and needs prefix reuse; the engine itself drafts nothing.
    outside = external_lookup(args) is not None
    reuse = args.kv_cache_enable_block_reuse
    if reuse is None and outside:
        reuse = True
    kv_cache = parse_kv_cache_config(
        chosen(
            tokens_per_block=args.tokens_per_block,
            max_tokens=args.max_tokens_in_paged_kv_cache,
            free_gpu_memory_fraction=args.kv_cache_free_gpu_memory_fraction,
            enable_block_reuse=reuse,
            dtype=args.kv_cache_dtype,
            max_attention_window=_one_or_more(args.max_attention_window_size),
            sink_token_length=args.sink_token_length,
            host_cache_size=args.host_cache_size,
            swap_space=args.swap_space,
        )
    )
    scheduler = parse_scheduler_config(
        _slowdown(args.max_prefill_slowdown)
        | chosen(
            max_batch_size=args.max_batch_size,
            max_seq_len=args.max_seq_len,
            max_input_len=args.max_input_len,
            max_num_tokens=args.max_num_tokens,
            policy=args.scheduler_policy,
            overlap_depth=args.overlap_depth,
            enforce_eager=args.enforce_eager,
        )
    )
    kwargs = {
        "model": args.model,
        "tokenizer": args.tokenizer_dir,
        "speculative_config": None if outside else config,
        "dtype": normalize_dtype("--dtype", args.dtype),
        "model_impl": args.model_impl,
        "device": target_device(args),
        "numerics": args.numerics,
        "quantization": quantization_of(args),
        "allow_pickle": args.allow_pickle,
        "max_draft_len": None if outside or args.engine_dir is not None else args.max_draft_len,
        "speculative_decoding_mode": None if outside else args.speculative_decoding_mode,
        "tensor_parallel_size": size,
        "kv_cache_config": kv_cache,
        "scheduler_config": scheduler,
    }
    return with_engine(args, kwargs, config)


def refuse_engine_options(args: argparse.Namespace) -> None:
    """--url was given: what add_llm_arguments() adds is for a model that runs here."""
    parser = SpecdecParser()
    add_llm_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        if getattr(args, name) != default:
            flag = "--" + name.replace("_", "-")
            usage_error(args, f"{flag} is an option of the server that runs here without --url; "
                        "leave it out, or start that server with it")  # fmt: skip


def checked_threads(args: argparse.Namespace) -> int | None:
    """--threads, if it was given. Raises ConfigError."""
    from ..config.limits import MAX_THREADS
    from ..config.validate import check_int
    from ..errors import ConfigError

    if args.threads is None:
        return None
    return check_int("--threads", args.threads, ConfigError, low=1, high=MAX_THREADS)


def make_llm(args: argparse.Namespace, **overrides: Any) -> Any:
    """Check the options, then load the model; `overrides` are LLM's arguments."""
    kwargs = {**llm_kwargs(args), **overrides}
    if (threads := checked_threads(args)) is not None:
        from ..installation import set_num_threads

        set_num_threads(threads)
    from ..llm import LLM

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SyntheticAcceptanceWarning)
        llm = LLM(**kwargs)
    for warning in caught:  # without the place in the source, which says nothing here
        print(f"warning: {warning.message}", file=sys.stderr)
    return llm


def use_color(mode: str, stream: IO[str]) -> bool:
    """ "always", "never", or "auto": a terminal and no NO_COLOR; FORCE_COLOR turns it on."""
    if mode != "auto":
        return mode == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"

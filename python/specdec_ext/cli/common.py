"""What the commands share: option spelling, options of an LLM, colours, number formats."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ..config_parse import SpeculativeConfig

__all__ = [
    "SpecdecParser",
    "add_llm_arguments",
    "human_bytes",
    "llm_kwargs",
    "medusa_model",
    "normalize_argv",
    "use_color",
]


def normalize_argv(argv: Sequence[str]) -> list[str]:
    """Option names with '_' spelled '-'; values and everything behind '--' stay as they are."""
    result: list[str] = []
    for i, arg in enumerate(argv):
        if arg == "--":
            return result + list(argv[i:])
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            arg = name.replace("_", "-") + equals + value
        result.append(arg)
    return result


class SpecdecParser(argparse.ArgumentParser):
    """argparse without abbreviations; names the nearest option when one is unknown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown, getattr(parsed, "command", None))
        return parsed

    def _refuse(self, unknown: list[str], command: str | None) -> NoReturn:
        owner: argparse.ArgumentParser = self
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and command in action.choices:
                owner = action.choices[command]
        options = [name for action in owner._actions for name in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        owner.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def add_llm_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that decide which engine is built."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", "--model-dir", metavar="DIR",
        help="folder of an HF-format model (default: the built-in SmolLM2-135M-Instruct)",
    )  # fmt: skip
    model.add_argument(
        "--tokenizer-dir", "--tokenizer", metavar="DIR", help="tokenizer folder (default: MODEL)"
    )
    model.add_argument(
        "--dtype", "--data-type", default="auto",
        help="auto, float32, bfloat16 or float16 (default: auto, as the checkpoint)",
    )  # fmt: skip
    model.add_argument(
        "--model-impl", default="auto", choices=("auto", "native", "transformers"),
        help="who runs the model (default: auto)",
    )  # fmt: skip
    model.add_argument(
        "--device", default="auto", metavar="DEVICE",
        help="auto, cpu, cuda or cuda:N (default: auto, a CUDA device if one can be used)",
    )  # fmt: skip
    model.add_argument(
        "--allow-pickle", action="store_true",
        help="read pytorch_model.bin files, which may be malicious; refused otherwise",
    )  # fmt: skip
    model.add_argument("--threads", type=int, metavar="N", help="threads of forward passes")
    model.add_argument(
        "--tensor-parallel-size", "--tp-size", type=int, default=1, metavar="N",
        help="only 1 in this version",
    )  # fmt: skip

    spec = parser.add_argument_group("speculation (at most one method; default: none)")
    spec.add_argument(
        "--lookahead-config", metavar="[W,N,G]",
        help="lookahead window, n-gram size, verification set size, for example [7,7,7]",
    )  # fmt: skip
    spec.add_argument(
        "--prompt-lookup-config", "--ngram-config", metavar="[K,M,[DEVICES]]",
        help='prompt lookup: K drafts, patterns of up to M tokens, for example "[10,2]"',
    )  # fmt: skip
    spec.add_argument(
        "--spec-decode-nextn", "--prompt-lookup-num-tokens", type=int, metavar="K",
        help="prompt lookup with K drafts",
    )  # fmt: skip
    spec.add_argument(
        "--max-matching-ngram-size", type=int, metavar="M",
        help="prompt lookup with patterns of up to M tokens",
    )  # fmt: skip
    spec.add_argument(
        "--prompt-lookup-style", choices=("v1", "v2"), default="v2",
        help="prompt lookup as an external loop over generate calls with prefix reuse (v1), or in "
        "the engine (v2, default); the tokens are the same",
    )  # fmt: skip
    spec.add_argument(
        "--medusa", action="store_true",
        help="Medusa with the heads that are shipped for the default model",
    )  # fmt: skip
    spec.add_argument("--medusa-model", metavar="DIR", help="Medusa with these heads")
    spec.add_argument(
        "--medusa-choices", metavar="TREE",
        help="tree of Medusa's guesses: [[0],[0,0],...], its paths only, mc_sim_7b_63 or another "
        "published name, or a file",
    )  # fmt: skip
    _add_redrafter_arguments(spec)
    spec.add_argument(
        "--draft-target", action="store_true",
        help="the small drafter that is shipped for the default model drafts",
    )  # fmt: skip
    spec.add_argument(
        "--draft-model", "--draft-model-dir", "--speculative-model", "--speculative-model-dir",
        "--speculative-draft-model", "--speculative-draft-model-path", "--spec-draft-model",
        "--assistant-model", metavar="DIR",
        help="a smaller model with the same vocabulary drafts; --max-draft-len tokens per step",
    )  # fmt: skip
    spec.add_argument(
        "--speculative-config", metavar="JSON|FILE",
        help="any method as JSON, YAML or a .yaml file",
    )  # fmt: skip
    spec.add_argument(
        "--no-adaptive", action="store_true",
        help="always draft the configured length instead of the one that pays",
    )  # fmt: skip
    spec.add_argument(
        "--max-draft-len", type=int, metavar="D",
        help="drafts per step of --draft-model (default: 4); else what the engine is built for, "
        "which must agree with the method's own number",
    )  # fmt: skip
    spec.add_argument(
        "--speculative-decoding-mode", metavar="MODE",
        help="lookahead_decoding, ngram, draft_tokens_external, ...; must agree with the method",
    )  # fmt: skip

    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-batch-size", type=int, metavar="N", help="requests at once")
    limits.add_argument(
        "--max-seq-len", type=int, metavar="N", help="prompt + output tokens of one request"
    )
    limits.add_argument("--max-num-tokens", type=int, metavar="N", help="rows of a forward pass")
    limits.add_argument("--tokens-per-block", type=int, metavar="N", help="KV page size")
    limits.add_argument(
        "--max-tokens-in-paged-kv-cache", type=int, metavar="N", help="tokens the KV pages hold"
    )
    limits.add_argument(
        "--kv-cache-free-gpu-memory-fraction", type=float, metavar="F",
        help="limit of the KV pages as a fraction of the free memory (default: 0.9)",
    )  # fmt: skip
    limits.add_argument(
        "--kv-cache-enable-block-reuse", "--enable-prefix-caching", action="store_true",
        help="take over the K/V of prompt blocks that an earlier request has computed",
    )  # fmt: skip


def _add_redrafter_arguments(spec: argparse._ArgumentGroup) -> None:
    spec.add_argument(
        "--redrafter", action="store_true", default=None,
        help="ReDrafter with the drafter that is shipped for the default model",
    )  # fmt: skip
    spec.add_argument(
        "--redrafter-model", "--drafter-model-dir", metavar="DIR",
        help="ReDrafter with this drafter (config.json, model.safetensors)",
    )  # fmt: skip
    spec.add_argument(
        "--redrafter-num-beams", type=int, metavar="N", help="beams that it keeps (default: 5)"
    )
    spec.add_argument(
        "--redrafter-draft-len-per-beam", type=int, metavar="N",
        help="drafts of each beam (default: 5)",
    )  # fmt: skip
    search = spec.add_mutually_exclusive_group()
    search.add_argument(
        "--redrafter-greedy-search", action="store_true", default=None,
        dest="redrafter_greedy_search", help="the likeliest beams, whatever the temperature",
    )  # fmt: skip
    search.add_argument(
        "--redrafter-no-greedy-search", action="store_false", default=None,
        dest="redrafter_greedy_search", help="beams at the request's temperature",
    )  # fmt: skip


def _redrafter_keys(args: argparse.Namespace) -> dict[str, Any]:
    """What the ReDrafter flags say, in the configuration's names; empty: none was given."""
    names = ("model", "num_beams", "draft_len_per_beam", "greedy_search")
    keys = {name: getattr(args, f"redrafter_{name}") for name in names}
    return {name: value for name, value in keys.items() if value is not None}


def _speculative_config(args: argparse.Namespace) -> Any:
    """The method that the flags name. Raises SystemExit(2) for two of them."""
    from ..config_parse import parse_speculative_config

    named = {
        "--lookahead-config": args.lookahead_config,
        "--prompt-lookup-config": args.prompt_lookup_config,
        "--spec-decode-nextn": args.spec_decode_nextn,
        "--medusa or --medusa-model": medusa_model(args),
        "--draft-target or --draft-model": _draft_model(args),
        "--speculative-config": args.speculative_config,
        "--redrafter": args.redrafter or _redrafter_keys(args) or None,
    }
    given = [flag for flag, value in named.items() if value is not None]
    if args.max_matching_ngram_size is not None and given not in ([], ["--spec-decode-nextn"]):
        given.append("--max-matching-ngram-size")
    if len(given) > 1:
        usage_error(args, f"{' and '.join(given)} name a method twice; give one of them")
    if args.medusa_choices is not None and medusa_model(args) is None:
        usage_error(args, "--medusa-choices needs --medusa-model or --medusa")
    size = args.tensor_parallel_size
    config: SpeculativeConfig | None = None
    if medusa_model(args) is not None:
        from ..drafter_config import MedusaDecodingConfig

        config = MedusaDecodingConfig(args.medusa_model, args.medusa_choices)
    elif args.lookahead_config is not None:
        config = parse_speculative_config(args.lookahead_config, "lookahead", size)
    elif args.prompt_lookup_config is not None:
        config = parse_speculative_config(args.prompt_lookup_config, "ngram", size)
    elif named["--redrafter"] is not None:
        config = parse_speculative_config(_redrafter_keys(args), "redrafter", size)
    elif (draft_model := _draft_model(args)) is not None:
        keys = {"speculative_model": draft_model, "max_draft_len": args.max_draft_len}
        config = parse_speculative_config(
            {k: v for k, v in keys.items() if v is not None}, "draft_target", size
        )
    elif args.speculative_config is not None:
        config = parse_speculative_config(args.speculative_config, None, size)
    elif args.spec_decode_nextn is not None or args.max_matching_ngram_size is not None:
        keys = {
            "max_draft_len": args.spec_decode_nextn,
            "max_matching_ngram_size": args.max_matching_ngram_size,
        }
        config = parse_speculative_config(
            {k: v for k, v in keys.items() if v is not None}, "ngram", size
        )
    if args.no_adaptive and config is not None:
        import dataclasses

        plain: Any = config  # the union has no common constructor
        config = dataclasses.replace(plain, adaptive=False)
    return config


def external_lookup(args: argparse.Namespace) -> Any:
    """The configuration of prompt lookup as an external loop; None: everything is in the engine."""
    if args.prompt_lookup_style == "v2":
        return None
    config = _speculative_config(args)
    if config is None or config.method != "ngram":
        usage_error(
            args,
            '--prompt-lookup-style v1 needs prompt lookup; give --prompt-lookup-config "[K,M]"',
        )
    return config


def _draft_model(args: argparse.Namespace) -> str | None:
    """The folder that --draft-model names, or the drafter that --draft-target means."""
    if args.draft_model is not None:
        return str(args.draft_model)
    if not args.draft_target:
        return None
    from ..models.default_drafter import default_drafter

    return str(default_drafter())


def medusa_model(args: argparse.Namespace) -> str | None:
    """The heads that --medusa-model names, or those that --medusa means; None: no Medusa."""
    if args.medusa_model is not None:
        return str(args.medusa_model)
    if not args.medusa:
        return None
    from ..drafter_config.medusa import SHIPPED_HEADS

    return str(SHIPPED_HEADS)


def usage_error(args: argparse.Namespace, message: str) -> NoReturn:
    print(f"specdec {args.command}: error: {message}", file=sys.stderr)
    raise UsageExit


class UsageExit(SystemExit):
    """A mistake that only shows after parsing; exit code 2 as argparse's own."""

    def __init__(self) -> None:
        super().__init__(2)


def llm_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """LLM's arguments from the options of add_llm_arguments; all checked without torch."""
    from ..speculation_check import check_build, refuse_unknown_arguments

    def chosen(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None}

    from ..config import normalize_dtype
    from ..config_parse import parse_kv_cache_config, parse_scheduler_config

    refuse_unknown_arguments({}, args.tensor_parallel_size)
    config = _speculative_config(args)
    check_build(
        config, args.max_draft_len, args.speculative_decoding_mode, args.tensor_parallel_size
    )
    # The loop brings the drafts and needs prefix reuse; the engine itself drafts nothing.
    outside = external_lookup(args) is not None
    return {
        "model": args.model,
        "tokenizer": args.tokenizer_dir,
        "speculative_config": None if outside else config,
        "dtype": normalize_dtype("--dtype", args.dtype),
        "model_impl": args.model_impl,
        "device": args.device,
        "allow_pickle": args.allow_pickle,
        "max_draft_len": None if outside else args.max_draft_len,
        "speculative_decoding_mode": None if outside else args.speculative_decoding_mode,
        "tensor_parallel_size": args.tensor_parallel_size,
        "kv_cache_config": parse_kv_cache_config(
            chosen(
                tokens_per_block=args.tokens_per_block,
                max_tokens=args.max_tokens_in_paged_kv_cache,
                free_gpu_memory_fraction=args.kv_cache_free_gpu_memory_fraction,
                enable_block_reuse=args.kv_cache_enable_block_reuse or outside or None,
            )
        ),
        "scheduler_config": parse_scheduler_config(
            chosen(
                max_batch_size=args.max_batch_size,
                max_seq_len=args.max_seq_len,
                max_num_tokens=args.max_num_tokens,
            )
        ),
    }


def make_llm(args: argparse.Namespace) -> Any:
    """Check the options, then load the model."""
    kwargs = llm_kwargs(args)
    if args.threads is not None:
        from ..errors import ConfigError
        from ..validate import check_int

        check_int("--threads", args.threads, ConfigError, low=1, high=1024)
        from ..installation import set_num_threads

        set_num_threads(args.threads)
    from ..llm import LLM

    return LLM(**kwargs)


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

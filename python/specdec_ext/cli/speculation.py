"""Which method of speculation the flags name, and its configuration."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..config.draft_target import DraftTargetDecodingConfig
from ..config.eagle3 import Eagle3DecodingConfig
from ..config.redrafter import ReDrafterDecodingConfig
from ..config.suffix import SuffixDecodingConfig
from .engine_dir import draft_target_keys, engine_heads
from .parser import usage_error

if TYPE_CHECKING:
    from ..config.parse import SpeculativeConfig

__all__ = [
    "add_speculation_arguments",
    "external_lookup",
    "medusa_model",
    "named_speculation",
    "speculative_config",
]


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that name a method and its configuration."""
    spec = parser.add_argument_group(
        "speculation",
        "Choose at most one method. The default, auto, drafts from the text itself and with the "
        "drafter shipped for the model, each only where it pays.",
    )
    spec.add_argument("--no-speculation", action="store_true", help="plain decoding")
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
        "--suffix", action="store_true", default=None,
        help="suffix decoding: drafts from what followed the text's last tokens before, as many "
        f"as are likely; --max-draft-len per step (default: {SuffixDecodingConfig.max_draft_len})",
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
    _add_eagle3_arguments(spec)
    spec.add_argument(
        "--draft-target", action="store_true",
        help="a draft model: the small one that is shipped for the default model",
    )  # fmt: skip
    spec.add_argument(
        "--draft-model", "--draft-model-dir", "--speculative-model", "--speculative-model-dir",
        "--speculative-draft-model", "--speculative-draft-model-path", "--spec-draft-model",
        "--assistant-model", metavar="DIR",
        help="a draft model: a smaller one with the same vocabulary (or see "
        "--allow-vocab-mapping); it drafts --max-draft-len tokens per step",
    )  # fmt: skip
    spec.add_argument(
        "--draft-engine-dir", metavar="DIR", help="as --draft-model, an engine of specdec build"
    )
    spec.add_argument(
        "--allow-vocab-mapping", "--use-heterogeneous-vocab", action="store_true", default=None,
        help="the draft model may have another tokenizer: it drafts the tokens that both have",
    )  # fmt: skip
    spec.add_argument(
        "--draft-target-model-config", metavar="[K,[D],[T],LOGITS]",
        help="K drafts, devices of draft and target, whether drafts are "
        "accepted by the draft model's logits: [4,[0],[1],False]",
    )  # fmt: skip
    spec.add_argument(
        "--speculative-config", metavar="JSON|FILE",
        help='any method as JSON, YAML or a .yaml file, or a list of them: ["suffix", "medusa"]',
    )  # fmt: skip
    _add_option_arguments(spec)
    spec.add_argument(
        "--no-adaptive", action="store_true",
        help="always draft the configured length instead of the one that pays",
    )  # fmt: skip
    spec.add_argument(
        "--max-draft-len", type=int, metavar="D",
        help="drafts per step of --draft-model (default: "
        f"{DraftTargetDecodingConfig.max_draft_len}), --eagle3 "
        f"({Eagle3DecodingConfig.max_draft_len}) and --suffix "
        f"({SuffixDecodingConfig.max_draft_len}); else what the engine is built for, which must "
        "agree with the method's own number",
    )  # fmt: skip
    spec.add_argument(
        "--speculative-decoding-mode", metavar="MODE",
        help="lookahead_decoding, ngram, draft_tokens_external, ...; must agree with the method",
    )  # fmt: skip


def _add_option_arguments(spec: argparse._ArgumentGroup) -> None:
    """What every method has."""
    spec.add_argument(
        "--draft-len-schedule", metavar="{N:K,...}",
        help="K drafts for up to N running requests, none beyond the last N: {4:8,16:2}",
    )  # fmt: skip
    spec.add_argument(
        "--max-concurrency", type=int, metavar="N", help="no drafts while more than N requests run"
    )
    spec.add_argument(
        "--synthetic-acceptance-length", type=float, metavar="L",
        help="MEASURING ONLY: keep drafts so that a step brings L tokens on average, whatever the "
        "model says; the text is not the model's",
    )  # fmt: skip
    spec.add_argument(
        "--synthetic-acceptance-rates", metavar="[R1,R2,...]",
        help="the same by position: Ri is the chance that a step keeps at least i drafts",
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
        "--redrafter-num-beams", type=int, metavar="N",
        help=f"beams that it keeps (default: {ReDrafterDecodingConfig.num_beams})",
    )  # fmt: skip
    spec.add_argument(
        "--redrafter-draft-len-per-beam", type=int, metavar="N",
        help=f"drafts of each beam (default: {ReDrafterDecodingConfig.draft_len_per_beam})",
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


def _add_eagle3_arguments(spec: argparse._ArgumentGroup) -> None:
    spec.add_argument(
        "--eagle3", action="store_true", default=None,
        help="EAGLE-3 with the head that is shipped for the default model",
    )  # fmt: skip
    spec.add_argument(
        "--eagle3-model", metavar="DIR",
        help="EAGLE-3 with this head (config.json and safetensors, of SpecForge or speculators); "
        "--max-draft-len nodes per step",
    )  # fmt: skip
    spec.add_argument(
        "--eagle3-top-k", "--speculative-eagle-topk", type=int, metavar="K",
        help="continuations of each node of its tree (default: "
        f"{Eagle3DecodingConfig.top_k}; 1: a chain)",
    )  # fmt: skip
    spec.add_argument(
        "--eagle3-max-draft-depth", type=int, metavar="N",
        help="levels of its tree (default: 4)",
    )  # fmt: skip


def _eagle3_keys(args: argparse.Namespace) -> dict[str, Any]:
    """What the EAGLE-3 flags say, in the configuration's names; empty: none was given."""
    names = ("model", "top_k", "max_draft_depth")
    return _given(**{name: getattr(args, f"eagle3_{name}") for name in names})


def _option_keys(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags of every method say; empty: none was given. Raises ConfigError."""
    from ..config.base import OPTION_NAMES
    from ..config.read_text import read_text

    keys = _given(**{name: getattr(args, name) for name in OPTION_NAMES})
    for name in ("draft_len_schedule", "synthetic_acceptance_rates"):
        if name in keys:
            keys[name] = read_text(_spaced(keys[name]))
    return keys


def _spaced(text: str) -> str:
    """{4:8,16:2} as YAML wants it, with a blank after each colon; values here are numbers."""
    return text.replace(":", ": ")


def _redrafter_keys(args: argparse.Namespace) -> dict[str, Any]:
    """What the ReDrafter flags say, in the configuration's names; empty: none was given."""
    names = ("model", "num_beams", "draft_len_per_beam", "greedy_search")
    return _given(**{name: getattr(args, f"redrafter_{name}") for name in names})


def speculative_config(args: argparse.Namespace) -> Any:
    """What the flags say of speculation: the method that they name, else "auto"; None: plain
    decoding, or what the engine of --engine-dir was built for. Raises SystemExit(2) for
    contradictions."""
    config = named_speculation(args)
    if not args.no_speculation:
        if config is not None or args.engine_dir is not None:
            return config
        from ..config.sources import AutoDecodingConfig

        return _with_options(args, AutoDecodingConfig())
    if config is not None:
        usage_error(args, "--no-speculation with a method of speculation; give one of them")
    if args.engine_dir is not None:
        usage_error(args, "--no-speculation with --engine-dir: what an engine drafts is decided "
                    "when it is built")  # fmt: skip
    options = _option_keys(args)
    if options or args.max_draft_len:
        flag = "--" + next(iter(options), "max_draft_len").replace("_", "-")
        usage_error(args, f"--no-speculation with {flag}; give one of them")
    return None


def _with_options(args: argparse.Namespace, config: Any) -> Any:
    """`config` with what the flags of every method say."""
    options = _option_keys(args)
    if args.no_adaptive:
        options["adaptive"] = False
    if not options:
        return config
    import dataclasses

    return dataclasses.replace(config, **options)


def named_speculation(args: argparse.Namespace) -> Any:
    """The method that the flags name; None: none. Raises SystemExit(2) for two of them."""
    from ..config.parse import parse_speculative_config

    _refuse_contradictions(args)
    value, method = _named_value(args)
    size = args.tensor_parallel_size or 1
    config: SpeculativeConfig | None = parse_speculative_config(value, method, size)
    return None if config is None else _with_options(args, config)


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Raise SystemExit(2) for flags of two methods, or of a method that no flag names."""
    named = {
        "--lookahead-config": args.lookahead_config,
        "--prompt-lookup-config": args.prompt_lookup_config,
        "--spec-decode-nextn": args.spec_decode_nextn,
        "--suffix": args.suffix,
        "--medusa" if args.medusa else "--medusa-model": medusa_model(args),
        "--draft-target" if args.draft_target else "--draft-model": _draft_model(args),
        "--speculative-config": args.speculative_config,
        "--redrafter": args.redrafter or _redrafter_keys(args) or None,
        "--eagle3": args.eagle3 or _eagle3_keys(args) or None,
    }
    given = [flag for flag, value in named.items() if value is not None]
    if args.max_matching_ngram_size is not None and given not in ([], ["--spec-decode-nextn"]):
        given.append("--max-matching-ngram-size")
    if len(given) > 1:
        usage_error(args, f"{' and '.join(given)} each name a method; give one of them")
    if args.medusa_choices is not None and medusa_model(args) is None:
        usage_error(args, "--medusa-choices needs --medusa-model, --medusa, or an --engine-dir "
                    "with heads")  # fmt: skip
    if args.draft_target_model_config is not None and _draft_model(args) is None:
        usage_error(args, "--draft-target-model-config needs --draft-engine-dir or --draft-model")
    if args.allow_vocab_mapping and _draft_model(args) is None:
        usage_error(args, "--allow-vocab-mapping needs --draft-engine-dir or --draft-model")


def _named_value(args: argparse.Namespace) -> tuple[Any, str | None]:
    """What parse_speculative_config() is to read for the flags, and the method that they name."""
    if medusa_model(args) is not None:
        from ..config.methods import MedusaDecodingConfig

        heads = args.medusa_model or engine_heads(args, "medusa")
        return MedusaDecodingConfig(heads, args.medusa_choices), "medusa"
    if args.lookahead_config is not None:
        return args.lookahead_config, "lookahead"
    if args.prompt_lookup_config is not None:
        return args.prompt_lookup_config, "ngram"
    if args.suffix:
        return _given(max_draft_len=args.max_draft_len), "suffix"
    if args.redrafter or _redrafter_keys(args):
        heads = engine_heads(args, "redrafter")
        return _given(model=heads and str(heads)) | _redrafter_keys(args), "redrafter"
    if args.eagle3 or _eagle3_keys(args):
        return _eagle3_keys(args) | _given(max_draft_len=args.max_draft_len), "eagle3"
    if (draft_model := _draft_model(args)) is not None:
        keys = {
            "model": draft_model,
            "max_draft_len": args.max_draft_len,
            "allow_vocab_mapping": args.allow_vocab_mapping,
            **draft_target_keys(args),
        }
        return _given(**keys), "draft_target"
    if args.spec_decode_nextn is not None or args.max_matching_ngram_size is not None:
        keys = _given(
            max_draft_len=args.spec_decode_nextn,
            max_matching_ngram_size=args.max_matching_ngram_size,
        )
        return keys, "ngram"
    return args.speculative_config, None


def _given(**keys: Any) -> dict[str, Any]:
    """The keys whose flags were given."""
    return {name: value for name, value in keys.items() if value is not None}


def external_lookup(args: argparse.Namespace) -> Any:
    """The configuration of prompt lookup as an external loop; None: everything is in the engine."""
    if args.prompt_lookup_style == "v2":
        return None
    config = named_speculation(args)
    if config is None or config.method != "ngram":
        usage_error(
            args,
            '--prompt-lookup-style v1 needs prompt lookup; give --prompt-lookup-config "[K,M]"',
        )
    if _option_keys(args):
        usage_error(args, "--prompt-lookup-style v1 drafts outside the engine: draft length "
                    "schedules and synthetic acceptance need v2")  # fmt: skip
    return config


def _draft_model(args: argparse.Namespace) -> str | None:
    """The folder that --draft-model names, or the drafter that --draft-target means."""
    if args.draft_model is not None:
        return str(args.draft_model)
    if args.draft_engine_dir is not None:
        return str(draft_target_keys(args)["model"])
    if not args.draft_target:
        return None
    from ..models.default_drafter import default_drafter

    return str(default_drafter())


def medusa_model(args: argparse.Namespace) -> str | None:
    """The heads that --medusa-model names, or those that --medusa means; None: no Medusa."""
    if args.medusa_model is not None:
        return str(args.medusa_model)
    if args.medusa_choices is not None and (heads := engine_heads(args, "medusa")) is not None:
        return str(heads)
    if not args.medusa:
        return None
    from ..config.medusa import SHIPPED_HEADS

    return str(SHIPPED_HEADS)

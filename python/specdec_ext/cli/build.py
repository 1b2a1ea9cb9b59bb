"""`specdec build`: an engine folder from a converted checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..config.engine import SchedulerConfig
from .flags import ForeignFlags, add_foreign_arguments, note_foreign, stage_line

__all__ = ["add_arguments", "run"]

_ALWAYS = {"disable": "it cannot be switched off here; leave it out"}
# Options of trtllm-build that have no meaning here.
_FOREIGN: ForeignFlags = {
    "--gemm-plugin": ("TYPE", {}, "kernels are chosen by device and shape"),
    "--gpt-attention-plugin": ("TYPE", {}, "kernels are chosen by device and shape"),
    "--remove-input-padding": ("SWITCH", _ALWAYS, "nothing is ever padded"),
    "--paged-kv-cache": ("SWITCH", _ALWAYS, "K/V is always paged"),
    "--kv-cache-type": (
        "TYPE",
        {"continuous": "K/V is always paged; use --kv_cache_type=paged", "disabled": "use paged"},
        "K/V is always paged",
    ),
    "--context-fmha": ("SWITCH", _ALWAYS, "attention is always fused"),
    "--use-paged-context-fmha": ("SWITCH", {}, "prompts may always reuse pages"),
    "--use-fp8-context-fmha": ("SWITCH", {}, "attention computes in the K/V's type"),
    "--workers": ("N", {}, "one engine is built at a time"),
    "--multiple-profiles": ("SWITCH", {}, "there are no profiles"),
}
_LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_draft_len",
           "speculative_decoding_mode", "tokens_per_block")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint-dir", required=True, metavar="DIR", help="what specdec convert has written"
    )
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder of the engine")
    parser.add_argument(
        "--max-batch-size", type=int, default=SchedulerConfig.max_batch_size, metavar="N",
        help=f"requests at once (default: {SchedulerConfig.max_batch_size})",
    )  # fmt: skip
    parser.add_argument(
        "--max-input-len", type=int, metavar="N",
        help="prompt tokens of one request (default: what max-seq-len leaves)",
    )  # fmt: skip
    parser.add_argument(
        "--max-seq-len", type=int, metavar="N",
        help="prompt + output tokens of one request (default: what model and memory have room for)",
    )  # fmt: skip
    parser.add_argument("--max-num-tokens", type=int, metavar="N", help="rows of a forward pass")
    parser.add_argument("--max-beam-width", type=int, default=1, metavar="N", help="only 1")
    parser.add_argument(
        "--max-draft-len", type=int, metavar="D",
        help="drafts of one step; of lookahead exactly max_draft_len(W,N,G): 83 for [7,7,7]",
    )  # fmt: skip
    parser.add_argument(
        "--speculative-decoding-mode", metavar="MODE",
        help="lookahead_decoding, draft_tokens_external (prompt lookup or a draft model), medusa, "
        "explicit_draft_tokens (ReDrafter), ngram, draft_target, suffix, auto (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--gather-generation-logits", action="store_true", help="kept with the engine; any request "
        "may ask for its logits",
    )  # fmt: skip
    parser.add_argument("--tokens-per-block", type=int, metavar="N", help="KV page size")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="auto, cpu or cuda:N")
    add_foreign_arguments(parser, _FOREIGN)


def run(args: argparse.Namespace) -> int:
    from ..workflow.build import BuildOptions, build

    note_foreign(args, _FOREIGN)
    options = BuildOptions(
        **{name: getattr(args, name) for name in _LIMITS},
        max_beam_width=args.max_beam_width,
        gather_generation_logits=args.gather_generation_logits,
        device=args.device,
    )
    given = {name: getattr(args, name) for name in _LIMITS}
    again = ["specdec", "build"]
    again += [f"--{name}={Path(getattr(args, name)).expanduser().resolve()}"
              for name in ("checkpoint_dir", "output_dir")]  # fmt: skip
    again += [f"--{name}={value}" for name, value in given.items() if value is not None]
    again += ["--gather_generation_logits"] if args.gather_generation_logits else []
    engine = build(
        args.checkpoint_dir,
        args.output_dir,
        options,
        tuple(again),
        tell=stage_line(args),
    )
    mode = engine.mode or "no speculation"
    print(
        f"{engine.path}: {mode}, max_draft_len {engine.max_draft_len}, max_batch_size "
        f"{engine.max_batch_size}, max_input_len {engine.max_input_len}, max_seq_len "
        f"{engine.max_seq_len}, max_num_tokens {engine.max_num_tokens}, {engine.dtype} on "
        f"{engine.device} {engine.isa}".rstrip()
    )
    return 0

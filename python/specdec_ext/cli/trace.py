"""`specdec trace`: one prompt, and what every step drafted, accepted and took."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .common import add_llm_arguments, external_lookup, llm_kwargs, make_llm, usage_error, use_color
from .form import add_form_arguments, structured_outputs
from .output import check_outputs, write_file
from .prompts import add_prompt_arguments, encode_prompt, read_file, read_prompts

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument_group("prompt")
    prompts.add_argument("--input-text", "--prompt", nargs=1, metavar="TEXT", help="the prompt")
    add_prompt_arguments(prompts)
    request = parser.add_argument_group("request")
    request.add_argument(
        "--max-output-len", "--output-len", "--max-tokens", "--max-new-tokens", type=int,
        default=64, metavar="N", help="output tokens (default: 64)",
    )  # fmt: skip
    request.add_argument("--ignore-eos", action="store_true", help="continue after end-of-text")
    request.add_argument(
        "--prediction", metavar="FILE", help="text that the output is expected to be"
    )
    request.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy"
    )
    request.add_argument("--seed", type=int, metavar="N", help="makes a sampled text repeatable")
    add_form_arguments(request)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object on stdout")
    output.add_argument("--output-json", metavar="FILE", help="write it there (specdec report)")
    output.add_argument("--html", metavar="FILE", help="write a page with every draft of each step")
    output.add_argument("--svg", metavar="FILE", help="write the terminal's view as a picture")
    output.add_argument(
        "--color", default="auto", choices=("auto", "always", "never"), help="default: auto"
    )
    add_llm_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from ..bench.machine import about_engine, about_machine
    from ..report.trace_record import trace_record
    from ..request.sampling_params import SamplingParams
    from ..text.metrics import describe_budget

    if external_lookup(args) is not None:
        usage_error(args, "--prompt-lookup-style v1 drafts outside the engine: its steps are calls "
                    "of it; use v2")  # fmt: skip
    outputs = {"--output-json": args.output_json, "--html": args.html, "--svg": args.svg}
    inputs = (args.input_file, args.prediction, args.json_schema, args.grammar)
    check_outputs(args, outputs, inputs)
    prediction = None
    if args.prediction is not None:
        prediction = read_file(args, "--prediction", args.prediction)
    params = SamplingParams(
        max_tokens=args.max_output_len,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        seed=args.seed,
        prediction=prediction,
        structured_outputs=structured_outputs(args),
        return_steps=True,
    )
    llm_kwargs(args)
    prompts = read_prompts(args)
    if len(prompts) != 1:
        usage_error(args, f"{len(prompts)} prompts: a trace shows one request; give one prompt")
    with make_llm(args) as llm:
        text, ids = encode_prompt(llm, prompts[0], args)
        [output] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        budget = describe_budget(llm.get_metrics()["executor"])
        about = {**about_engine(llm), "machine": about_machine(llm.device)}
        data = trace_record(output, llm.tokenizer, about, prompt=text)
    _write(args, data)
    if budget is not None and not args.json:
        print(budget, file=sys.stderr)
    if data["error"] is not None:
        print(f"the request failed: {data['error']}", file=sys.stderr)
        return 1
    return 0


def _write(args: argparse.Namespace, data: dict[str, Any]) -> None:
    from ..report.trace_page import trace_page
    from ..report.trace_text import print_trace, trace_svg

    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    title = f"specdec trace: {data['model']}, {data['method']}"
    if args.output_json is not None:
        write_file(args, args.output_json, text)
    if args.html is not None:
        write_file(args, args.html, trace_page(data, title))
    if args.svg is not None:
        write_file(args, args.svg, trace_svg(data, title))
    if args.json:
        sys.stdout.write(text)
    else:
        print_trace(data, sys.stdout, color=use_color(args.color, sys.stdout))

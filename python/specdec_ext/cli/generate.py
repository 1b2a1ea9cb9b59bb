"""`specdec generate`: decode prompts and print text or one JSON line per prompt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any, TextIO

from ..text.source_colors import colored
from .common import (
    add_llm_arguments,
    external_lookup,
    llm_kwargs,
    make_llm,
    usage_error,
    use_color,
)
from .form import add_form_arguments, structured_outputs
from .prompts import add_prompt_arguments, encode_prompt, read_file, read_prompts

if TYPE_CHECKING:
    from ..request.sampling_params import SamplingParams
    from ..text.outputs import RequestOutput

__all__ = ["add_arguments", "run"]

DEFAULT_MAX_OUTPUT_LEN = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--input-text", "--prompt", nargs="+", metavar="TEXT", help="one or more prompts"
    )
    add_prompt_arguments(prompts)

    length = parser.add_argument_group("request")
    length.add_argument(
        "--max-output-len", "--output-len", "--max-tokens", "--max-new-tokens", type=int,
        metavar="N",
        help=f"output tokens per prompt (default: {DEFAULT_MAX_OUTPUT_LEN})",
    )  # fmt: skip
    length.add_argument(
        "--min-tokens", type=int, default=0, metavar="N", help="no end before N tokens (default: 0)"
    )
    length.add_argument(
        "--stop", "--stop-words", nargs="+", metavar="TEXT", help="end before any of these texts"
    )
    length.add_argument(
        "--stop-token-ids", nargs="+", type=int, metavar="ID", help="end after any of these tokens"
    )
    length.add_argument(
        "--prediction", metavar="FILE",
        help="text that the output is expected to be, such as the file to be edited: drafts are "
        "taken from it, no token is changed",
    )  # fmt: skip
    add_form_arguments(length)
    length.add_argument("--ignore-eos", action="store_true", help="continue after end-of-text")
    length.add_argument("--bad-words", nargs="+", metavar="TEXT", help="text that must not appear")
    length.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X",
        help="above 0; more than 1 discourages tokens of prompt and output (default: 1)",
    )  # fmt: skip
    length.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="X",
        help="-2..2, subtracted once from the score of a token in the output (default: 0)",
    )  # fmt: skip
    length.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X",
        help="-2..2, subtracted for each occurrence in the output (default: 0)",
    )  # fmt: skip
    length.add_argument(
        "--logprobs", type=int, metavar="N",
        help="log-probabilities of the N best tokens at each place (with --json)",
    )  # fmt: skip
    length.add_argument(
        "--prompt-logprobs", type=int, metavar="N",
        help="log-probabilities of the prompt's tokens and the N best at each place (with --json)",
    )  # fmt: skip
    length.add_argument(
        "--seed", "--random-seed", type=int, metavar="N", help="makes sampled text repeatable"
    )
    length.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy"
    )
    length.add_argument("--top-k", type=int, default=0, metavar="N", help="0: all tokens")
    length.add_argument("--top-p", type=float, default=1.0, metavar="X", help="1: all tokens")
    length.add_argument("--min-p", type=float, default=0.0, metavar="X", help="0: all tokens")
    length.add_argument(
        "--acceptance", default="exact_match", metavar="RULE",
        help="which drafts are kept: exact_match or rejection (both keep the model's "
        "distribution), or LOSSY: typical, threshold or, with --redrafter, best_beam "
        "(default: exact_match)",
    )  # fmt: skip
    length.add_argument(
        "--posterior-threshold", type=float, metavar="X",
        help="typical acceptance (lossy): a draft of at least this probability (default: 0.09)",
    )  # fmt: skip
    length.add_argument(
        "--posterior-alpha", type=float, metavar="X",
        help="typical acceptance (lossy): or of at least X * exp(-entropy) (default: 0.3)",
    )  # fmt: skip
    length.add_argument(
        "--acceptance-threshold", type=float, metavar="X",
        help="threshold acceptance (lossy): a draft with p / q of at least X, in (0, 1]",
    )  # fmt: skip
    length.add_argument(
        "--use-draft-logits", action=argparse.BooleanOptionalAction,
        help="accept drawn drafts by the draft model's probabilities (default: as the engine)",
    )  # fmt: skip
    length.add_argument(
        "--num-beams", type=int, default=1, metavar="N", help="only 1: no beam search"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON line per prompt")
    output.add_argument(
        "--stats", action="store_true", help="statistics per prompt on stderr at the end"
    )
    output.add_argument(
        "--verify", action="store_true",
        help="decode plainly too; exit 1 if any token differs",
    )  # fmt: skip
    output.add_argument(
        "--color-accepted", nargs="?", const="auto", default="never",
        choices=("auto", "always", "never"), help="colour accepted drafts by their source",
    )  # fmt: skip
    output.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_llm_arguments(parser)


def run(args: argparse.Namespace) -> int:
    # Everything that can be wrong without the model is found before the model is loaded.
    params = _sampling_params(args)
    config = llm_kwargs(args)["speculative_config"]
    if args.verify:
        _refuse_verification(args, params, config)
    if params.acceptance != "exact_match" and config is None:
        usage_error(args, f"--acceptance {params.acceptance}: there are no drafts to accept; name "
                    "a method of speculation or remove it")  # fmt: skip
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(args, name) is not None and not args.json:
            flag = "--" + name.replace("_", "-")
            usage_error(args, f"{flag} without --json: only JSON lines carry them; add --json")
    prompts = read_prompts(args)
    with make_llm(args) as llm:
        return _Job(args, llm, params).run(prompts)


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    from ..request.sampling_params import SamplingParams

    refused: dict[str, Any] = {"beam_width": args.num_beams}
    prediction = None
    if args.prediction is not None:
        prediction = read_file(args, "--prediction", args.prediction)
    return SamplingParams(
        prediction=prediction,
        structured_outputs=structured_outputs(args),
        max_tokens=DEFAULT_MAX_OUTPUT_LEN if args.max_output_len is None else args.max_output_len,
        min_tokens=args.min_tokens,
        stop=args.stop,
        stop_token_ids=args.stop_token_ids,
        ignore_eos=args.ignore_eos,
        bad_words=args.bad_words,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logprobs=args.logprobs,
        prompt_logprobs=args.prompt_logprobs,
        # Plain decoding has to draw from the same stream to be compared.
        seed=0 if args.verify and args.seed is None else args.seed,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        acceptance=args.acceptance,
        posterior_threshold=args.posterior_threshold,
        posterior_alpha=args.posterior_alpha,
        acceptance_threshold=args.acceptance_threshold,
        speculative_config={"use_draft_logits": args.use_draft_logits},
        **refused,
    )


def _refuse_verification(args: argparse.Namespace, params: SamplingParams, config: Any) -> None:
    """Verification compares tokens with plain decoding; some rules do not promise equal tokens."""
    from ..config.methods import DrafterConfig
    from ..request.speculation import with_defaults

    if config is not None and config.synthetic_rates:
        usage_error(args, "--verify with synthetic acceptance: the text is not the model's by "
                    "intention; remove one of them")  # fmt: skip
    params = with_defaults(params, config)
    if not params.lossless:
        usage_error(args, f"--verify with --acceptance {params.acceptance}: that rule is lossy, "
                    "the text may differ; use exact_match or rejection")  # fmt: skip
    # Drafts without probabilities are decided by the draw that plain sampling makes.
    drawn = isinstance(config, DrafterConfig) and not params.greedy
    if params.acceptance == "rejection" and drawn:
        usage_error(args, "--verify with --acceptance rejection and temperature > 0: the text has "
                    "the law of plain sampling, not its tokens; use exact_match")  # fmt: skip


class _Job:
    """One run of the command over a loaded model."""

    def __init__(self, args: argparse.Namespace, llm: Any, params: SamplingParams) -> None:
        self.args = args
        self.llm = llm
        self.params = params
        self.color = use_color(args.color_accepted, sys.stdout)
        self.lookup = external_lookup(args)

    def run(self, prompts: list[Any]) -> int:
        items = [encode_prompt(self.llm, prompt, self.args) for prompt in prompts]
        # One prompt as text is shown while it is decoded; everything else when it is complete.
        stream_to = sys.stdout if len(items) == 1 and not self.args.json else None
        outputs, interrupted = self._decode(items, self.params, stream_to)
        plain: list[RequestOutput] | None = None
        if self.args.verify and not interrupted:
            import dataclasses

            off = dataclasses.replace(self.params, speculative_config=False, prediction=None)
            if self.lookup is not None:
                self.llm.reset_prefix_cache()  # the comparison computes its own K/V
            plain, interrupted = self._decode(items, off, None)
        identical = None
        if plain is not None and not interrupted:
            identical = [
                a.outputs[0].token_ids == b.outputs[0].token_ids
                for a, b in zip(outputs, plain, strict=True)
            ]
        self._print(prompts, outputs, identical, streamed=stream_to is not None)
        self._explain_empty_texts(items, outputs)
        self._explain_default_length(outputs)
        if self.args.stats:
            _print_stats(outputs, sys.stderr, self.color)
            from ..text.metrics import describe_budget, describe_preemptions

            stats = self.llm.get_metrics()["executor"]
            for line in (describe_budget(stats), describe_preemptions(stats)):
                if line is not None:
                    print(line, file=sys.stderr)
        for i, output in enumerate(outputs):
            if output.outputs[0].error is not None and not interrupted:
                print(f"prompt {i + 1} failed: {output.outputs[0].error}", file=sys.stderr)
        if interrupted:
            raise KeyboardInterrupt
        failed = any(o.outputs[0].finish_reason == "error" for o in outputs)
        return 1 if failed or (identical is not None and not all(identical)) else 0

    def _decode(
        self, items: list[Any], params: SamplingParams, stream_to: TextIO | None
    ) -> tuple[list[RequestOutput], bool]:
        """Outputs, complete or as far as they got, and whether Ctrl-C cut them short."""
        if self.lookup is not None and params.speculative_config is not False:
            return self._decode_outside(items, params, stream_to)
        groups = self.llm._submit_all(items, [params] * len(items))
        try:
            if stream_to is not None:
                last = None
                for last in self.llm._stream(groups[0]):
                    self._write_segments(last.outputs[0].delta_segments, stream_to)
                stream_to.write("\n")
                return [last], False  # type: ignore[list-item]
            self.llm._run(groups, not self.args.disable_tqdm)
        except KeyboardInterrupt:
            if stream_to is not None:
                stream_to.write("\n")
            return [group.snapshot() for group in groups], True
        return [group.snapshot() for group in groups], False

    def _decode_outside(
        self, items: list[Any], params: SamplingParams, stream_to: TextIO | None
    ) -> tuple[list[RequestOutput], bool]:
        """As _decode(), by prompt lookup as a loop over generate calls."""
        from ..orchestrate import prompt_lookup_loop

        prompts = [
            {"prompt_token_ids": ids} if text is None else {"prompt": text, "prompt_token_ids": ids}
            for text, ids in items
        ]
        loop = prompt_lookup_loop(self.llm, prompts, params, config=self.lookup)
        try:
            while loop.step():
                if stream_to is not None:
                    self._write_segments(loop.snapshots()[0].outputs[0].delta_segments, stream_to)
        except KeyboardInterrupt:
            return loop.snapshots(), True
        finally:
            if stream_to is not None:
                stream_to.write("\n")
        return loop.snapshots(), False

    def _explain_empty_texts(self, items: list[Any], outputs: list[RequestOutput]) -> None:
        """An instruction model often ends at once when its prompt is not in a chat template."""
        empty = [
            text is not None and out.outputs[0].finish_reason == "stop" and not out.outputs[0].text
            for (text, _), out in zip(items, outputs, strict=True)
        ]
        wrapped = self.args.chat or self.args.chat_template or self.args.system_prompt
        if any(empty) and not wrapped and getattr(self.llm.tokenizer, "chat_template", None):
            hint = "hint: the model ended without a text; --chat applies its chat template"
            print(hint, file=sys.stderr)

    def _explain_default_length(self, outputs: list[RequestOutput]) -> None:
        """Somebody who named no length is told where it cut the text; JSON lines say it anyway."""
        if self.args.max_output_len is not None or self.args.json:
            return
        firsts = [out.outputs[0] for out in outputs]
        count = sum(
            first.finish_reason == "length" and first.num_tokens == DEFAULT_MAX_OUTPUT_LEN
            for first in firsts  # not those that the context or the pages have ended
        )
        if count:
            what = "stopped" if len(outputs) == 1 else f"{count} of {len(outputs)} texts stopped"
            print(f"note: {what} at {DEFAULT_MAX_OUTPUT_LEN} tokens, the default of "
                  "--max-output-len", file=sys.stderr)  # fmt: skip

    def _write_segments(self, segments: list[tuple[str, str | None]], stream: TextIO) -> None:
        for text, source in segments:
            stream.write(colored(text, source) if self.color else text)
        stream.flush()

    def _print(
        self,
        prompts: list[Any],
        outputs: list[RequestOutput],
        identical: list[bool] | None,
        *,
        streamed: bool,
    ) -> None:
        for i, output in enumerate(outputs):
            same = None if identical is None else identical[i]
            if self.args.json:
                line = output.to_json_dict()
                if same is not None:
                    line["identical"] = same
                print(json.dumps(line, ensure_ascii=False, allow_nan=False))
                continue
            if not streamed:
                # As it was given: a template's first line is the same for all.
                given = prompts[i] if isinstance(prompts[i], str) else output.prompt
                head = (given or f"{len(output.prompt_token_ids)} token ids").strip()
                first = head.splitlines()[0] if head else ""
                print(f"=== {i + 1}/{len(outputs)}: {first[:72]}")
                self._write_segments(output.outputs[0].delta_segments, sys.stdout)
                print()
            if same is not None:
                print(f"prompt {i + 1}: identical: {'yes' if same else 'no'}")


def _print_stats(outputs: list[RequestOutput], stream: TextIO, color: bool) -> None:
    print(
        f"{'prompt':>6} {'tokens':>7} {'passes':>7} {'tok/pass':>8} {'accept len':>10} "
        f"{'drafts':>7} {'accepted':>8} {'ttft ms':>8} {'tok/s':>8}  end",
        file=stream,
    )
    for i, output in enumerate(outputs):
        m = output.metrics
        if not m:
            continue
        spec = m["speculative_decoding"]
        print(
            f"{i + 1:>6} {m['num_generated_tokens']:>7} {m['num_forward_passes']:>7} "
            f"{m['tokens_per_forward_pass']:>8.2f} {spec['mean_acceptance_length']:>10.2f} "
            f"{spec['num_draft_tokens']:>7} {spec['num_accepted_draft_tokens']:>8} "
            f"{m['time_to_first_token_ms'] or 0.0:>8.1f} {m['tokens_per_second'] or 0.0:>8.1f}  "
            f"{output.outputs[0].finish_reason}",
            file=stream,
        )
        for source, count in m["draft_sources"].items():
            name = colored(source, source) if color else source
            print(
                f"       from {name}: {count['drafts']} drafts, {count['accepted']} accepted",
                file=stream,
            )
    if outputs and outputs[0].metrics:
        about = outputs[0].metrics
        print(
            f"numerics: {about['numerics']}, model_impl: {about['model_impl']}, "
            f"acceptance: {about['acceptance']}",
            file=stream,
        )

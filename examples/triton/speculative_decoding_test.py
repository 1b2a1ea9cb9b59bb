"""Sends a file of requests to a Triton server, with and without speculation, and compares.

python examples/triton/speculative_decoding_test.py --dataset=input_data.json --num-draft-tokens=4

The options are those of TensorRT-LLM's script of this name. A plain answer is the target model's
own. A speculative one is that of the model specdec_bls (--execute-bls-speculative-decoding), or of
a loop in this script, which asks the draft model for drafts and has the target verify them; the two
may be on different servers. The file is a list of {"input", "instruction", "output"}: the prompt is
the instruction and the input, and an answer is as long as `output` has words between single blanks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from specdec_ext import SamplingParams
from specdec_ext.errors import SpecdecError
from specdec_ext.orchestrate import draft_target
from specdec_ext.serve.triton.client import TritonClient
from specdec_ext.serve.triton.remote import RemoteError, RemoteLLM
from specdec_ext.serve.triton.tensors import row

FIELDS = ("input", "instruction", "output")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--dataset", required=True, metavar="FILE", help="JSON: input, instruction, output")
    add("--max-input-len", type=int, default=2048, metavar="N", help="longer prompts are left out")
    add("--num-draft-tokens", type=int, default=4, metavar="K", help="drafts of a round")
    add("--output-len", type=int, metavar="N", help="tokens of an answer, whatever `output` has")
    add("--url-target", default="localhost:8001", metavar="HOST:PORT", help="gRPC of the target")
    add(
        "--url-draft", default="localhost:8001", metavar="HOST:PORT", help="gRPC of the draft model"
    )
    for ours, theirs, default in (
        ("--target-model-name", "--target-tensorrt-llm-model-name", "specdec"),
        ("--draft-model-name", "--draft-tensorrt-llm-model-name", "specdec_draft"),
        ("--bls-model-name", "--bls-speculative-tensorrt-llm-model-name", "specdec_bls"),
        ("--preprocessing-model-name", "--preprocessor-model-name", "preprocessing"),
        ("--postprocessing-model-name", "--postprocessor-model-name", "postprocessing"),
    ):
        add(ours, theirs, default=default, metavar="NAME", help=f"default: {default}")
    add(
        "--execute-bls-speculative-decoding", "--bls", action="store_true", dest="bls",
        help="speculative answers are those of the BLS model",
    )  # fmt: skip
    add("--stream", action="store_true", help="with --bls: read the answer part by part")
    add("--disable-output-comparison", action="store_true", help="differences are no failure")
    add("--verbose", action="store_true", help="print prompts and both answers")
    return parser


def read_requests(path: str) -> list[tuple[str, int]]:
    """(prompt, length of the answer) of each entry."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, list) or not content:
        raise SystemExit(f"{path}: expected a list of requests")
    found = []
    for i, entry in enumerate(content):
        for field in FIELDS:
            if not isinstance(entry, dict) or not isinstance(entry.get(field), str):
                raise SystemExit(f"{path}: entry {i}: {field} is missing, or no string")
        words = [entry["instruction"], entry["input"]]
        found.append((" ".join(filter(None, words)), len(entry["output"].split(" "))))
    return found


class Texts:
    """Text to ids and back, by the server's models."""

    def __init__(self, client: TritonClient, args: argparse.Namespace) -> None:
        self._before = client.model(args.preprocessing_model_name)
        self._after = client.model(args.postprocessing_model_name)

    def ids(self, text: str) -> list[int]:
        (answer,) = self._before({"QUERY": row(text.encode(), np.object_)})
        ids: list[int] = answer["INPUT_ID"].reshape(-1).tolist()
        return ids

    def text(self, ids: list[int]) -> str:
        request = {
            "TOKENS_BATCH": row([ids], np.int32),
            "SEQUENCE_LENGTH": row(len(ids), np.int32),
        }
        (answer,) = self._after(request)
        return string(answer["OUTPUT"])


def string(tensor: Any) -> str:
    value: bytes = tensor.reshape(-1)[0]
    return value.decode()


def by_bls(
    client: TritonClient, args: argparse.Namespace, prompt: str, length: int
) -> tuple[list[int], str, dict[str, Any]]:
    """The answer of the BLS model: tokens, text, metrics."""
    request = {
        "text_input": row(prompt.encode(), np.object_),
        "max_tokens": row(length, np.int32),
        "num_draft_tokens": row(args.num_draft_tokens, np.int32),
        "stream": row(args.stream, np.bool_),
    }
    parts = list(client.model(args.bls_model_name)(request))
    ids = [token for part in parts for token in part["output_ids"].reshape(-1).tolist()]
    text = "".join(string(part["text_output"]) for part in parts)
    return ids, text, json.loads(string(parts[-1]["report"]))["metrics"]


def by_loop(
    models: tuple[RemoteLLM, RemoteLLM], count: int, ids: list[int], params: SamplingParams
) -> tuple[list[int], dict[str, Any]]:
    """The loop of the document: drafts from one model, verified by the other, call by call."""
    target, draft = models
    (output,) = draft_target(
        target, draft, [{"prompt_token_ids": ids}], params, num_draft_tokens=count
    )
    check(output.outputs[0].error)
    return output.outputs[0].token_ids, output.metrics


def check(error: str | None) -> None:
    if error is not None:
        raise RemoteError(error)


def run(args: argparse.Namespace, at_target: TritonClient, at_draft: TritonClient) -> int:
    texts = Texts(at_target, args)
    target = RemoteLLM(at_target.model(args.target_model_name))
    draft = None if args.bls else RemoteLLM(at_draft.model(args.draft_model_name))
    same = sent = 0
    for number, (prompt, words) in enumerate(read_requests(args.dataset)):
        ids = texts.ids(prompt)
        if len(ids) > args.max_input_len:
            print(f"request {number}: {len(ids)} tokens, over --max-input-len; left out")
            continue
        sent += 1
        params = SamplingParams(
            max_tokens=args.output_len or words, detokenize=False, speculative_config=False
        )
        begin = time.perf_counter()
        (output,) = target.generate([{"prompt_token_ids": ids}], [params])
        check(output.outputs[0].error)
        plain = output.outputs[0].token_ids
        middle = time.perf_counter()
        if draft is None:
            tokens, text, metrics = by_bls(at_target, args, prompt, args.output_len or words)
        else:
            loop_params = SamplingParams(max_tokens=params.max_tokens, detokenize=False)
            tokens, metrics = by_loop((target, draft), args.num_draft_tokens, ids, loop_params)
            text = texts.text(tokens)
        end = time.perf_counter()
        plain_text = texts.text(plain)
        equal = tokens == plain and text == plain_text
        same += equal
        steps = metrics["speculative_decoding"]["num_spec_steps"]
        print(
            f"request {number}: {len(tokens)} tokens, {'identical' if equal else 'DIFFERENT'}, "
            f"plain {1e3 * (middle - begin):.1f} ms, speculative {1e3 * (end - middle):.1f} ms, "
            f"{steps} speculative steps"
        )
        if args.verbose:
            for name, said in (("prompt", prompt), ("plain", plain_text), ("speculative", text)):
                print(f"  {name}: {said!r}")
    print(f"identical: {same} of {sent}")
    return 0 if args.disable_output_comparison or same == sent else 1


def main() -> int:
    args = make_parser().parse_args()
    try:
        with TritonClient(args.url_target) as target, TritonClient(args.url_draft) as draft:
            return run(args, target, draft)
    except (SpecdecError, RemoteError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    if code := main():
        sys.exit(code)

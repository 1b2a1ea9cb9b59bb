"""The 2,000 requests of the corpus: what each asks for, with which engine, beside which others.

Everything is explicit: model folder, data type, prompt ids, seeds, lengths of drafts. A group is
one engine and its calls of generate(). Its texts may not depend on how drafts are made, so the
rules whose texts do (rejection, typical, threshold) occur only where the request or a drafter that
is a function of the text alone says what is drafted. best_beam, whose drafts come out of a search,
does not occur.

Only public names of specdec_ext are used, in spellings that stay: the same file runs against the
commit that was recorded and against today's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from corpus_models import FOLLOWS, VOCAB

from specdec_ext import (
    DraftTargetDecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    ReDrafterDecodingConfig,
    UserDrafterConfig,
)

DTYPES = ("float32", "bfloat16")
Folders = Mapping[str, Path]
Options = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """One prompt and the keywords of its SamplingParams."""

    kind: str
    prompt: tuple[int, ...]
    options: Options


@dataclass(frozen=True)
class Group:
    """One engine and what it is asked: `calls` of generate(), each a list of requests.

    spec    (folders) -> speculative_config
    model   a name of corpus_models.TARGETS, or "default" for the built-in model
    engine  further keywords of LLM
    drafts  some drafts are accepted: a group that decodes plainly where it should not is a failure
    """

    name: str
    method: str
    model: str
    dtype: str
    spec: Callable[[Folders], Any]
    calls: list[list[Request]]
    engine: Options = field(default_factory=dict)
    drafts: bool = True

    @property
    def requests(self) -> list[Request]:
        return [request for call in self.calls for request in call]


# -- what a request may ask for -------------------------------------------------------------------


def favour(token_ids: list[int], scores: Any) -> Any:
    """A processor: a token that depends on the last two gets a bonus."""
    before = token_ids[-2] if len(token_ids) > 1 else 0
    scores[(7 * token_ids[-1] + before) % VOCAB] += 2.5
    return scores


def no_repeats(token_ids: list[int], scores: Any) -> Any:
    """A processor: none of the last three tokens."""
    for token in token_ids[-3:]:
        scores[token] = -float("inf")
    return scores


GREEDY: dict[str, Options] = {
    "greedy": {},
    "greedy-2": {},
    "plain": {"speculative": False},
    "stop-ids": {"stop_token_ids": [0, 9, 29, 44, 57]},
    "min-tokens": {"stop_token_ids": [0, 9, 29, 44, 57], "min_tokens": 7},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {3: 2.0, 17: -6.0, 28: -3.0, 58: 1.5}},
    "bad-words": {"bad_words": [[28, 29], [5], [40, 5, 25], [44, 53]]},
    "allowed": {"allowed_token_ids": [t for t in range(VOCAB) if t % 5]},
    "processor": {"logits_processors": [favour]},
    "processors": {"logits_processors": [favour, no_repeats], "repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
    "prompt-logprobs": {"prompt_logprobs": 3, "logprobs": 0},
    "logits": {"return_generation_logits": True},
}
SAMPLED: dict[str, Options] = {
    "cool": {"temperature": 0.6},
    "warm": {"temperature": 1.0},
    "hot": {"temperature": 1.6},
    "top-k": {"temperature": 1.2, "top_k": 4},
    "top-p": {"temperature": 1.1, "top_p": 0.8},
    "min-p": {"temperature": 1.4, "min_p": 0.05},
    "cut": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "sampled-penalties": {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "sampled-processor": {"temperature": 0.9, "logits_processors": [favour], "top_p": 0.95},
    "sampled-stops": {"temperature": 1.0, "stop_token_ids": [2, 13, 31, 50], "min_tokens": 3,
                      "bad_words": [[8, 50], [17]]},
    "sampled-logprobs": {"temperature": 0.8, "logprobs": 4, "logit_bias": {11: 1.5}},
    "two-outputs": {"temperature": 0.9, "n": 2},
}  # fmt: skip
KINDS = {**GREEDY, **SAMPLED}


def make_request(
    kind: str, seed: str, *, start: Sequence[int] = (), tokens: int | None = None, **more: Any
) -> Request:
    """A request of a kind; its prompt, length and seed follow from `seed`."""
    rng = random.Random(f"{kind} {seed}")
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 5, 9, 17, 33, 58)))]
    if rng.random() < 0.4:  # something to look up
        prompt = (prompt * 9)[: max(18, len(prompt))]
    options = {
        "max_tokens": tokens or rng.choice((9, 24, 33, 40, 48)),
        "detokenize": False,
        **KINDS[kind],
        **more,
    }
    if options.get("temperature"):
        options["seed"] = rng.randrange(1 << 40)
    if options.get("min_tokens", 0) > options["max_tokens"]:
        options["min_tokens"] = options["max_tokens"]
    return Request(kind, (*start, *prompt), options)


# -- drafts that are a function of the text -------------------------------------------------------


class TableDrafter:
    """A user's drafter: the successor table's chain, or a tree with a second guess at each level.

    Every seventh guess is another token. probs: where each guess of a chain is said to be from.
    """

    def __init__(self, *, tree: bool = False, probs: bool = False) -> None:
        self.tree, self.probs = tree, probs

    def propose(self, history: list[int], budget: int) -> Any:
        length = min(budget, 8 if self.tree else 5)
        tokens, parents, last, parent = [], [], history[-1], -1
        for i in range(length):
            second = self.tree and i % 2 == 1
            guess = (FOLLOWS[last] + second) % VOCAB
            if (len(history) + i) % 7 == 0:
                guess = (guess + 5) % VOCAB
            tokens.append(guess)
            parents.append(parent)
            if not self.tree or second:
                last, parent = tokens[i - second], i - second
        if self.tree:
            return tokens, parents
        return (tokens, None, draft_law(tokens)) if self.probs else tokens


def draft_law(tokens: Sequence[int]) -> Any:
    """float32 [drafts, V]: 3/4 on the draft, the rest spread evenly."""
    rows = np.full((len(tokens), VOCAB), 0.25 / VOCAB, np.float32)
    rows[np.arange(len(tokens)), list(tokens)] += np.float32(0.75)
    return rows


def chain(last: int, length: int, wrong: int | None = None) -> list[int]:
    """The table's tokens behind `last`, one of them another."""
    tokens = []
    for i in range(length):
        last = FOLLOWS[last]
        tokens.append((last + 1) % VOCAB if i == wrong else last)
    return tokens


# -- engines --------------------------------------------------------------------------------------

Spec = Callable[[Folders, str], Any]


def lookahead(w: int, n: int, g: int) -> Spec:
    return lambda folders, model: LookaheadDecodingConfig(w, n, g, adaptive=False)


def ngram(length: int, size: int, **options: Any) -> Spec:
    return lambda folders, model: NGramDecodingConfig(length, size, adaptive=False, **options)


def draft_target(draft: str, length: int, **options: Any) -> Spec:
    return lambda folders, model: DraftTargetDecodingConfig(
        str(folders[f"{model}-{draft}"]), max_draft_len=length, adaptive=False, **options
    )


def medusa(choices: Any) -> Spec:
    return lambda folders, model: MedusaDecodingConfig(
        str(folders[f"{model}-medusa"]), choices, adaptive=False
    )


def redrafter(beams: int, length: int, **options: Any) -> Spec:
    return lambda folders, model: ReDrafterDecodingConfig(
        str(folders[f"{model}-redrafter"]), beams, length, adaptive=False, **options
    )


def user(length: int, **options: Any) -> Spec:
    return lambda folders, model: UserDrafterConfig(
        TableDrafter(**options), max_draft_len=length, adaptive=False
    )


def plain(folders: Folders, model: str) -> None:
    return None


SMALL_TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]
# Method, setting, configuration, the requests' own narrower setting.
SETTINGS: list[tuple[str, str, Spec, Options]] = [
    ("plain", "plain", plain, {}),
    ("lookahead", "4-3-4", lookahead(4, 3, 4),
     {"lookahead_config": LookaheadDecodingConfig(2, 3, 2, adaptive=False)}),
    ("lookahead", "7-7-7", lookahead(7, 7, 7),
     {"lookahead_config": LookaheadDecodingConfig(5, 4, 3, adaptive=False)}),
    ("lookahead", "2-2-1", lookahead(2, 2, 1), {}),
    ("lookahead", "5-4-3", lookahead(5, 4, 3), {}),
    ("lookahead", "3-5-0", lookahead(3, 5, 0), {}),
    ("prompt-lookup", "4-2", ngram(4, 2), {"max_draft_len": 2}),
    ("prompt-lookup", "10-2", ngram(10, 2), {}),
    ("prompt-lookup", "8-4-newest", ngram(8, 4, is_use_oldest=False), {}),
    ("prompt-lookup", "6-3-one", ngram(6, 3, is_keep_all=False), {}),
    ("prompt-lookup", "5-2-public", ngram(5, 2, is_public_pool=True), {}),
    ("draft-target", "near-4", draft_target("near", 4), {"max_draft_len": 2}),
    ("draft-target", "far-6", draft_target("far", 6), {}),
    ("draft-target", "confident-7", draft_target("near", 7, min_confidence=0.3), {}),
    ("draft-target", "tree-9", draft_target("near", 9, top_k=3, max_draft_depth=4), {}),
    ("medusa", "63", medusa("mc_sim_7b_63"), {"medusa_choices": [[0], [0, 0], [1]]}),
    ("medusa", "8", medusa(SMALL_TREE), {}),
    ("medusa", "chain", medusa([[0], [0, 0], [0, 0, 0]]), {}),
    ("redrafter", "5x5", redrafter(5, 5), {"redrafter_num_beams": 2}),
    ("redrafter", "2x4", redrafter(2, 4), {}),
    ("redrafter", "3x3-sampled", redrafter(3, 3, greedy_search=False), {}),
    ("user", "chain", user(5), {"max_draft_len": 3}),
    ("user", "tree", user(8, tree=True), {}),
    ("user", "chain-128", user(127), {}),
]  # fmt: skip
# One setting of each method, for what is not repeated with all of them.
FIRST = {s[0]: s for s in reversed(SETTINGS)}


def engine_options(number: int, **more: Any) -> Options:
    """Page sizes, batch sizes and rows per step that vary from group to group."""
    scheduler: Options = {"max_batch_size": (8, 3, 5, 2)[number % 4], "max_seq_len": 128}
    if number % 3 == 1:
        scheduler["max_num_tokens"] = 100  # prompts are read in chunks, drafts are cut
    return {
        "kv_cache_config": {"tokens_per_block": (16, 4, 32, 1)[number % 4], "max_tokens": 4096},
        "scheduler_config": scheduler,
        **more,
    }


def bind(spec: Spec, model: str) -> Callable[[Folders], Any]:
    return lambda folders: spec(folders, model)

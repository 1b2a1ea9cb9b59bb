"""The groups of the corpus: methods x settings x data types, in batches, alone, with reuse."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from corpus_cases import (
    DTYPES,
    FIRST,
    KINDS,
    SETTINGS,
    Folders,
    Group,
    Options,
    Request,
    bind,
    chain,
    draft_law,
    engine_options,
    make_request,
    plain,
    user,
)
from corpus_models import VOCAB

from specdec_ext import (
    DraftTargetDecodingConfig,
    ExternalDraftTokensConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    ReDrafterDecodingConfig,
)

ALONE = ("greedy", "processor", "warm", "cut")
SHORT = ("greedy", "presence", "logprobs", "hot", "top-p", "sampled-processor")
REUSING = ("greedy", "warm", "processor", "logprobs", "top-k")


def settings() -> Iterator[Group]:
    """Every setting of every method: all kinds in one in-flight batch, then some alone."""
    for number, (method, setting, spec, narrower) in enumerate(SETTINGS):
        for dtype in DTYPES:
            seed = f"batch {number % 12}"  # so that settings share texts, and not all of them
            mixed = [make_request(kind, seed) for kind in KINDS]
            if narrower:
                mixed[1] = make_request("greedy-2", seed, **narrower)
                mixed[16] = make_request("warm", seed, **narrower)
            random.Random(number).shuffle(mixed)
            alone = [[make_request(kind, f"alone {number % 12}")] for kind in ALONE]
            yield Group(
                f"{method}-{setting}-{dtype}", method, "llama", dtype, bind(spec, "llama"),
                [mixed, *alone], engine_options(number), drafts=method != "plain",
            )  # fmt: skip


def shapes() -> Iterator[Group]:
    """The other targets: a sliding window over one K/V head, norms of queries and keys."""
    for model in ("mistral", "qwen3"):
        for number, (method, (_, _, spec, _)) in enumerate(FIRST.items()):
            for dtype in DTYPES:
                calls = [[make_request(kind, model) for kind in SHORT]]
                yield Group(
                    f"{model}-{method}-{dtype}", method, model, dtype, bind(spec, model),
                    calls, engine_options(number), drafts=method != "plain",
                )  # fmt: skip


def reuse() -> Iterator[Group]:
    """Prompts that share their beginning, with and without a salt, in later calls."""
    rng = random.Random("reuse")
    start = [rng.randrange(VOCAB) for _ in range(37)]
    for number, (method, (_, _, spec, _)) in enumerate(FIRST.items()):
        for dtype in DTYPES:
            calls = [
                [make_request(kind, f"reuse {salt}", start=start, cache_salt=salt, tokens=24)]
                for salt in ("", "tenant")
                for kind in REUSING
            ]
            # Two at once, at last.
            calls[-2:] = [calls[-2] + calls[-1]]
            options = engine_options(number)
            options["kv_cache_config"] = {
                "tokens_per_block": (4, 8, 16)[number % 3],
                "max_tokens": 4096,
                "enable_block_reuse": True,
            }
            yield Group(
                f"reuse-{method}-{dtype}", method, "llama", dtype, bind(spec, "llama"), calls,
                options, drafts=method != "plain",
            )  # fmt: skip


def bring(request: Request, tokens: list[int], *rest: Any) -> Request:
    """The request with drafts of its own; rest: their logits, a threshold, whether it goes on."""
    draft = ExternalDraftTokensConfig(tokens, *rest)
    return Request(request.kind, request.prompt, {**request.options, "external_draft": draft})


def with_drafts(request: Request, length: int, wrong: int | None, *rest: Any) -> Request:
    """bring() with the table's chain behind the prompt, wrong at one place."""
    return bring(request, chain(request.prompt[-1], length, wrong), *rest)


def external() -> Iterator[Group]:
    """Drafts behind a prompt: the request ends with that pass, or goes on (the fourth field)."""
    kinds = ("greedy", "stop-ids", "processor", "logprobs", "repetition", "cool", "warm", "top-k",
             "sampled-processor", "sampled-logprobs")  # fmt: skip
    for number, method in enumerate(("plain", "prompt-lookup", "lookahead")):
        for dtype in DTYPES:
            requests = [
                with_drafts(make_request(kind, f"external {goes_on}"), length, wrong, None, None,
                            goes_on)
                for goes_on in (False, True)
                for kind, length, wrong in zip(
                    kinds, (1, 3, 6, 9, 20, 2, 4, 5, 8, 40),
                    (None, 1, None, 4, 7, None, 2, None, 3, 11), strict=True,
                )
            ]  # fmt: skip
            yield Group(
                f"external-{method}-{dtype}", "external", "llama", dtype,
                bind(FIRST[method][2], "llama"), [requests[::2], requests[1::2]],
                engine_options(2 * number),
            )  # fmt: skip


def pinned() -> Iterator[Group]:
    """Rules whose text depends on the drafts, with drafts that do not depend on the engine."""
    rules: list[Options] = [
        {"acceptance": "rejection"},
        {"acceptance": "threshold", "acceptance_threshold": 0.4},
        {"acceptance": "typical"},
    ]
    for dtype in DTYPES:
        requests = []
        for i, kind in enumerate(("warm", "top-p", "hot", "cool", "top-k")):
            request = make_request(kind, "pinned")
            tokens = chain(request.prompt[-1], 6, 3)
            logits = 1.5 * draft_law(tokens)
            logits[:, i] += 1.0
            threshold = 0.3 if i in (1, 4) else None
            requests.append(with_drafts(request, 6, 3, logits, threshold, i == 2))
        for kind in ("warm", "cut", "top-p"):
            request = make_request(kind, "typical", acceptance="typical")
            requests.append(with_drafts(request, 8, 5))
        yield Group(
            f"pinned-external-{dtype}", "external", "llama", dtype, bind(plain, ""),
            [requests[:4], requests[4:]], engine_options(0),
        )  # fmt: skip
        for number, rule in enumerate(rules):
            requests = [make_request(kind, "rules", **rule) for kind in ("warm", "top-k")]
            yield Group(
                f"pinned-user-{rule['acceptance']}-{dtype}", "user", "llama", dtype,
                bind(user(5, probs=True), ""), [requests], engine_options(number),
            )  # fmt: skip


# -- the built-in model ---------------------------------------------------------------------------

# "The capital of France is Paris. ... The capital of Spain is"; three functions in Python; "Once
# upon a time ..."; "1, 2, 3, ...". As ids: a tokenizer's release may not change the corpus.
TEXTS: dict[str, tuple[int, ...]] = {
    "capitals": (504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 7158, 314, 7268, 30, 378,
                 3575, 282, 7476, 314),
    "functions": (1604, 803, 24, 81, 28, 278, 727, 472, 1003, 253, 1232, 278, 198, 198, 1604, 840,
                  24, 81, 28, 278, 727, 472, 1003, 253, 731, 278, 198, 198, 1604, 14907, 24, 81,
                  28, 278, 727, 198),
    "story": (6403, 1980, 253, 655, 665, 436, 253, 1165, 6560, 411, 260, 3426, 28, 837),
    "numbers": (33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28, 216, 38, 28, 216, 39,
                28, 216, 40, 28, 216, 33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28),
}  # fmt: skip


def default_model() -> Iterator[Group]:
    """A few requests on the built-in model, with the drafters that are shipped for it."""
    asked: list[Options] = [
        {},
        {"repetition_penalty": 1.2, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.95, "seed": 5},
        {"stop": ["9", "\n"], "include_stop_str_in_output": True},
    ]
    requests = [
        Request(kind, tuple(ids), {"max_tokens": 20, **options})
        for (kind, ids), options in zip(TEXTS.items(), asked, strict=True)
    ]

    def own(folders: Folders) -> Any:
        return DraftTargetDecodingConfig(str(folders["default"]), max_draft_len=3, adaptive=False)

    methods: dict[str, Any] = {
        "plain": lambda folders: None,
        "lookahead": lambda folders: LookaheadDecodingConfig(4, 3, 4, adaptive=False),
        "prompt-lookup": lambda folders: NGramDecodingConfig(10, 2, adaptive=False),
        "draft-target": own,
        "medusa": lambda folders: MedusaDecodingConfig(adaptive=False),
        "redrafter": lambda folders: ReDrafterDecodingConfig(num_beams=2, draft_len_per_beam=3,
                                                             adaptive=False),
        "external": lambda folders: None,
    }  # fmt: skip
    for method, spec in methods.items():
        calls = [requests]
        if method == "external":  # what stands a little before the prompt's end comes again
            calls = [[bring(r, list(r.prompt[-9:-5]), None, None, True) for r in requests]]
        for dtype in DTYPES:
            yield Group(
                f"default-{method}-{dtype}", method, "default", dtype, spec, calls,
                {
                    "kv_cache_config": {"max_tokens": 2048},
                    "scheduler_config": {"max_batch_size": 4, "max_seq_len": 128},
                },
                drafts=method != "plain",
            )  # fmt: skip


def all_groups() -> list[Group]:
    """The whole corpus, in the order of the recording."""
    parts = (settings, shapes, reuse, external, pinned, default_model)
    return [group for part in parts for group in part()]

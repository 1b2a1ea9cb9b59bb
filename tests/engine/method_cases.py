"""One target, every method that drafts for it, every place and depth at which its steps run."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_cases import save_trained
from medusa_models import VOCAB, save_heads, save_target
from safetensors.torch import load_file, save_file
from stream_driver import FakeRecorder
from transformers import LlamaForCausalLM

from emulators import EMULATED, needs_cuda
from model.redrafter_cases import trained_drafter
from specdec_ext import (
    LLM,
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    LookaheadDecodingConfig,
    MedusaDecodingConfig,
    NGramDecodingConfig,
    ReDrafterDecodingConfig,
    SamplingParams,
    SuffixDecodingConfig,
    UserDrafterConfig,
)
from specdec_ext.engine import build
from specdec_ext.engine.overlap import make_buckets

Folders = dict[str, Path]
COUNT = 24
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.8, top_p=0.9, seed=5)
PROMPTS = [[random.Random(seed).randrange(VOCAB) for _ in range(1 + 7 * seed)] for seed in range(6)]
PROMPTS[3] = PROMPTS[3][:5] * 4  # one that repeats itself
# Level by level: what is too deep for the end of a text is the last of it.
CHOICES = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0, 0]]


class Guesses:
    """Trees from the history: what stood behind its last token before, and a wrong sibling."""

    def propose(self, history: list[int], budget: int) -> tuple[list[int], list[int]]:
        at = max((i for i, t in enumerate(history[:-1]) if t == history[-1]), default=-1)
        chain = history[at + 1 : at + 1 + (budget - 1) // 2] if at >= 0 else [1]
        parents = [-1, -1, *range(1, len(chain))]
        return [VOCAB - 1, *chain], parents


def save_models(root: Path) -> Folders:
    """A target, and what drafts for it: right now and then, and often wrong."""
    target = save_target(root / "target")
    shutil.copytree(target, root / "near")
    weights = load_file(root / "near" / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    noisy = {n: w + 0.03 * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    save_file(noisy, root / "near" / "model.safetensors", metadata={"format": "pt"})
    with LLM(target, speculative_config=None) as llm:
        texts = [p + t for p, t in zip(PROMPTS, texts_of(llm, GREEDY), strict=True)]
    return {
        "target": target,
        "near": root / "near",
        "heads": save_heads(root / "heads", lm_head="target", scale=0.02),
        "network": trained_drafter(
            root / "network", LlamaForCausalLM.from_pretrained(target), texts
        ),
        "eagle3": save_trained(root / "eagle3", target, texts, steps=80),
    }


# -- methods --------------------------------------------------------------------------------------

METHODS: dict[str, Callable[[Folders], Any]] = {
    "none": lambda f: None,
    "lookahead": lambda f: LookaheadDecodingConfig(4, 3, 4, adaptive=False),
    "ngram": lambda f: NGramDecodingConfig(4, 1, adaptive=False),
    "suffix": lambda f: SuffixDecodingConfig(6, min_token_prob=0.05, adaptive=False),
    "suffix past": lambda f: SuffixDecodingConfig(
        6, min_token_prob=0.05, max_cached_requests=4, adaptive=False
    ),
    "public": lambda f: NGramDecodingConfig(4, 1, is_public_pool=True, adaptive=False),
    "user": lambda f: UserDrafterConfig(Guesses(), 7, adaptive=False),
    "medusa": lambda f: MedusaDecodingConfig(f["heads"], CHOICES, adaptive=False),
    "redrafter": lambda f: ReDrafterDecodingConfig(f["network"], 3, 4, adaptive=False),
    "redrafter-law": lambda f: ReDrafterDecodingConfig(
        f["network"], 3, 4, adaptive=False, greedy_search=False
    ),
    "chain": lambda f: DraftTargetDecodingConfig(f["near"], max_draft_len=4, adaptive=False),
    "tree": lambda f: DraftTargetDecodingConfig(
        f["near"], max_draft_len=9, top_k=3, max_draft_depth=4, adaptive=False
    ),
    "eagle3": lambda f: Eagle3DecodingConfig(
        f["eagle3"], max_draft_len=9, top_k=3, max_draft_depth=4, adaptive=False
    ),
    "eagle3-chain": lambda f: Eagle3DecodingConfig(
        f["eagle3"], max_draft_len=4, top_k=1, adaptive=False
    ),
}
HOSTED = ["eagle3", "eagle3-chain"]  # no step on a stream has them
DRAFTING = [name for name in METHODS if name not in ("none", "redrafter-law", *HOSTED)]
NETWORKS = ["medusa", "redrafter", "chain", "tree"]  # SlotDrafters
# Whose drafts are made by the step itself, recorded or not.
ENQUEUED = ["none", "lookahead", "ngram", "suffix", *NETWORKS]


def methods(names: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("method", names)


# -- places and depths ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Where:
    """place  "host": the host runs the steps; "stream": the row of operations that a device runs,
    over the CPU's buffers; else a device
    depth  steps that are enqueued while one is read
    """

    place: str
    depth: int = 0

    @property
    def device(self) -> str:
        return "cpu" if self.place in ("host", "stream") else self.place


def _param(place: str, depth: int) -> Any:
    marks = {"cuda": [needs_cuda], "cuda-emu-fast": [EMULATED], "cuda-emu": [EMULATED]}
    name = place.removeprefix("cuda-")
    return pytest.param(Where(place, depth), id=f"{name}-{depth}", marks=marks.get(place, []))


HOST = Where("host")
# Options of a scheduler whose steps a test looks at while they are enqueued, or records itself.
WATCHED = {"enforce_eager": True}
DEVICES = [_param("cuda-emu-fast", 2), _param("cuda", 2)]
STREAMS = [_param("stream", 0), _param("stream", 1), _param("stream", 2)]
ahead = pytest.mark.parametrize("where", [*STREAMS, *DEVICES])
everywhere = pytest.mark.parametrize("where", [_param("host", 0), *STREAMS, *DEVICES])
# What is no work of a device's.
at_every_depth = pytest.mark.parametrize("where", [_param("host", 0), *STREAMS])
# One depth at each place, for what no depth decides.
each_place = pytest.mark.parametrize(
    "where", [_param("host", 0), _param("stream", 1), _param("cuda-emu-fast", 1), _param("cuda", 1)]
)
enqueued = pytest.mark.parametrize(
    "where", [_param("stream", 1), _param("cuda-emu-fast", 1), _param("cuda", 1)]
)
on_devices = pytest.mark.parametrize("where", [_param("cuda-emu-fast", 1), _param("cuda", 1)])
checked = pytest.mark.parametrize("where", [_param("cuda-emu", 1)])


def open_llm(folders: Folders, spec: Any, where: Where = HOST, **options: Any) -> LLM:
    """spec  a configuration or a name of METHODS"""
    if isinstance(spec, str):
        spec = METHODS[spec](folders)
    scheduler = {"max_batch_size": 3, "max_seq_len": 96, "overlap_depth": where.depth}
    settings: dict[str, Any] = {
        "scheduler_config": {**scheduler, **options.pop("scheduler", {})},
        "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 1600},
        "device": where.device,
        "dtype": "float32",
        **options,
    }
    with placed(where):
        return LLM(folders["target"], speculative_config=spec, **settings)


@contextmanager
def placed(where: Where) -> Iterator[None]:
    """Engines that are built inside enqueue their steps where `where` says so."""
    with pytest.MonkeyPatch.context() as patched:
        if where.place == "stream":
            patched.setattr(build.EngineBuilder, "_on_stream", True)
        yield


def pipeline_of(llm: LLM) -> Any:
    return llm.engine._pipeline  # type: ignore[attr-defined]


def drafter_of(llm: LLM) -> Any:
    """Whether steps are enqueued or the host runs them."""
    engine: Any = llm.engine
    return getattr(engine, "_pipeline", engine._drafting).drafter


def record_steps(llm: LLM, rows: int = 48) -> FakeRecorder:
    """Steps are recorded from now on, and replayed with poisoned padding."""
    pipeline, recorder = pipeline_of(llm), FakeRecorder()
    recorder.buffers, pipeline._recorder = pipeline.buffers, recorder
    most = pipeline.executor.max_rows_per_request
    pipeline.buckets = make_buckets(pipeline.buffers.staging.requests, most, rows)
    return recorder


# -- what is said ---------------------------------------------------------------------------------


def prompts_for(where: Where) -> list[list[int]]:
    """Fewer for the emulation, which is slow."""
    return PROMPTS if where.device in ("cpu", "cuda") else PROMPTS[1:4]


def texts_of(llm: LLM, params: Any, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outputs]


def check(llm: LLM, failures: bool = False) -> dict[str, Any]:
    """Nothing is left over; the metrics of drafts."""
    metrics = llm.get_metrics()
    drafter, stats = metrics["drafter"] or {"failures": 0}, metrics["executor"]
    assert bool(drafter["failures"]) == failures
    assert stats["free_pages"] == stats["total_pages"]
    assert stats["in_flight"] == stats["retiring"] == 0
    return dict(metrics["speculative_decoding"])


def counts_of(llm: LLM) -> dict[str, Any]:
    """What must not depend on where and how early steps run."""
    found, metrics = check(llm), llm.get_metrics()
    names = ("rows", "prefill_rows", "num_draft_tokens", "num_accepted_tokens", "generated_tokens")
    counts = {name: metrics["executor"][name] for name in names}
    keys = ("prompt_tokens", "generation_tokens", "request_success")
    counts.update({key: metrics[key] for key in keys})
    return {**counts, "histogram": found["acceptance_histogram"]}

"""KvCacheConfig.max_attention_window and sink_token_length behind LLM.

Plain text is held against transformers in float64 with a mask of its own for each layer; every
method, policy, place and depth against plain text. Before each step every page that nobody holds is
filled with NaN, so that a row that reads behind its window is no number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from method_cases import (
    DRAFTING,
    GREEDY,
    HOST,
    HOSTED,
    METHODS,
    PROMPTS,
    SAMPLED,
    Folders,
    Where,
    check,
    counts_of,
    methods,
    on_devices,
    open_llm,
    texts_of,
)
from transformers import LlamaForCausalLM

from model.model_zoo import make_model, save_model
from specdec_ext import (
    LLM,
    CapacityError,
    ConfigError,
    SamplingParams,
    _core,
)
from specdec_ext.models.host_arrays import as_torch
from specdec_ext.models.native import NativeModel
from tensor_parallel import started_team

PAGE = 4
CASES: dict[str, dict[str, Any]] = {
    "nine": {"max_attention_window": 9},
    "sinks": {"max_attention_window": 6, "sink_token_length": 3},
    "itself": {"max_attention_window": 1, "sink_token_length": 5},
    "thirty": {"max_attention_window": 30},
    "layers": {"max_attention_window": [13, 5], "sink_token_length": 2},
    "one full": {"max_attention_window": [1 << 20, 5]},
}
# What the pages of a text must hold: the widest window, none where a layer sees everything.
WIDEST = {"nine": 9, "sinks": 6, "itself": 1, "thirty": 30, "layers": 13, "one full": 1 << 20}


def pages(case: str, **more: Any) -> dict[str, Any]:
    return {"tokens_per_block": PAGE, "max_tokens": 1600, **CASES[case], **more}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Fills what no request holds with NaN before each step; the pages that were filled."""
    latest: list[
        tuple[Any, bool, set[int]]
    ] = []  # the executor, whether it publishes, its requests
    # Each model's, from its first pass on: another engine may be made while this one is in use.
    of_model: WeakKeyDictionary[NativeModel, tuple[Any, bool, set[int]]] = WeakKeyDictionary()
    filled: set[int] = set()
    make, forward = _core.Executor, NativeModel.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        # What is published is nobody's, and yet needed.
        latest[:] = [(make(*args, **kwargs), bool(kwargs.get("enable_block_reuse")), set())]
        return latest[0][0]

    def poisoning(model: NativeModel, plan: Any, hidden: Any = None) -> Any:
        if latest:
            executor, publishes, ids = of_model.setdefault(model, latest[0])
            ids |= {int(i) for i in plan.request_ids}
            if not publishes and 0 not in ids:
                held = {page for i in ids for page in executor.pages(i)}
                k, v = (as_torch(part) for part in model._pages)
                free = [page for page in range(k.shape[1]) if page not in held]
                k[:, free] = v[:, free] = torch.nan
                filled.update(free)
        return forward(model, plan, hidden)

    monkeypatch.setattr(_core, "Executor", noted)
    monkeypatch.setattr(NativeModel, "forward", poisoning)
    yield filled


def visible(length: int, window: int, sinks: int) -> torch.Tensor:
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
    near = (rows - columns < window) | (columns < sinks)
    return near & (columns <= rows)


def reference_texts(folder: Path, count: int, windows: list[int], sinks: int) -> list[list[int]]:
    """Greedy texts of PROMPTS by transformers, computed anew for every token, in float64."""
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    for layer, block in enumerate(model.model.layers):
        window = windows[layer % len(windows)]

        def masked(module: Any, args: Any, kwargs: Any, window: int = window) -> Any:
            length = args[0].shape[1]
            mask = torch.zeros(length, length, dtype=torch.float64)
            mask[~visible(length, window, sinks)] = torch.finfo(torch.float64).min
            return args, {**kwargs, "attention_mask": mask[None, None]}

        block.register_forward_pre_hook(masked, with_kwargs=True)
    texts = []
    for prompt in PROMPTS:
        text = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                scores = model(torch.tensor([text]), use_cache=False).logits[0, -1]
                text.append(int(scores.argmax()))
        texts.append(text[len(prompt) :])
    return texts


def windows_of(case: str) -> tuple[list[int], int]:
    window = CASES[case].get("max_attention_window")
    sinks = CASES[case].get("sink_token_length", 0)
    return (window if isinstance(window, list) else [window]), sinks


@pytest.fixture(scope="module")
def plain(models: Folders) -> Callable[[str], dict[str, list[list[int]]]]:
    """Texts without drafts under a case's window."""

    @functools.cache
    def texts(case: str) -> dict[str, list[list[int]]]:
        with open_llm(models, None, kv_cache_config=pages(case)) as llm:
            return {"greedy": texts_of(llm, GREEDY), "sampled": texts_of(llm, SAMPLED)}

    return texts


@pytest.mark.parametrize("case", CASES)
def test_plain_text_is_that_of_transformers(
    models: Folders, plain: Any, plain_texts: Any, case: str
) -> None:
    windows, sinks = windows_of(case)
    found = plain(case)["greedy"]
    assert found == reference_texts(models["target"], len(found[0]), windows, sinks)
    assert found != plain_texts["greedy"], "the window changes nothing: the test says nothing"


def test_the_reference_without_a_window_is_plain_decoding(
    models: Folders, plain_texts: Any
) -> None:
    texts = plain_texts["greedy"]
    assert reference_texts(models["target"], len(texts[0]), [1 << 20], 0) == texts


@methods([*DRAFTING, *HOSTED])
@pytest.mark.parametrize("case", CASES)
def test_text_is_plain(
    models: Folders, plain: Any, case: str, method: str, poisoned: set[int]
) -> None:
    with open_llm(models, method, kv_cache_config=pages(case)) as llm:
        assert texts_of(llm, GREEDY) == plain(case)["greedy"]
        if method != "redrafter-law":
            assert texts_of(llm, SAMPLED) == plain(case)["sampled"]
        counts = counts_of(llm)
    assert counts["num_accepted_tokens"] > 0
    assert poisoned


@pytest.mark.parametrize("depth", [0, 1, 2])
@methods(["none", "lookahead", "tree"])
@pytest.mark.parametrize("case", ["nine", "layers"])
def test_enqueued_steps(models: Folders, plain: Any, case: str, method: str, depth: int) -> None:
    where = Where("stream", depth)
    with open_llm(models, method, where, kv_cache_config=pages(case)) as llm:
        assert texts_of(llm, GREEDY) == plain(case)["greedy"]
        check(llm)


@methods(["none", "ngram", "lookahead", "tree"])
@pytest.mark.parametrize("rows", [3, 17, 1024])
def test_chunks_of_a_prompt(models: Folders, plain: Any, method: str, rows: int) -> None:
    """Prompts longer than the window, in steps of a few rows and of many."""
    scheduler = {"max_num_tokens": max(rows, 3 if method == "none" else 48)}
    with open_llm(models, method, kv_cache_config=pages("sinks"), scheduler=scheduler) as llm:
        assert texts_of(llm, GREEDY) == plain("sinks")["greedy"]


@methods(["none", "lookahead", "medusa", "chain"])
@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
def test_preemption(models: Folders, plain: Any, method: str, reuse: bool) -> None:
    """A pool that holds one text and a little: who has to go computes its K/V again."""
    scheduler = {"policy": "max_utilization", "max_num_tokens": 40, "max_batch_size": 6}
    scarce = pages("thirty", max_tokens=24 * PAGE, enable_block_reuse=reuse)
    with open_llm(models, method, kv_cache_config=scarce, scheduler=scheduler) as llm:
        assert texts_of(llm, GREEDY) == plain("thirty")["greedy"]
        check(llm)
        assert llm.get_metrics()["executor"]["preemptions"] > 0


@methods(["none", "lookahead", "redrafter", "tree"])
@pytest.mark.parametrize("case", ["nine", "sinks", "layers"])
def test_reuse(models: Folders, plain: Any, method: str, case: str) -> None:
    """The second time a prompt comes its pages are there, but for those that have given way."""
    for tokens in (1600, 160):
        cache = pages(case, max_tokens=tokens, enable_block_reuse=True)
        with open_llm(models, method, kv_cache_config=cache) as llm:
            for _ in range(2):
                assert texts_of(llm, GREEDY) == plain(case)["greedy"]
            stats = llm.get_metrics()["executor"]
            check(llm)
        assert stats["cached_tokens"] > 0
        assert (stats["evicted_pages"] > 0) == (tokens == 160)


def test_cancelled_requests_leave_nothing(models: Folders, plain: Any) -> None:
    with open_llm(models, "lookahead", kv_cache_config=pages("sinks")) as llm:
        for rounds in range(4):
            states = [llm.engine.submit(llm.engine.resolve(prompt, GREEDY)) for prompt in PROMPTS]
            for _ in range(2 + 3 * rounds):
                llm.engine.step()
            for state in states:
                llm.engine.cancel(state)
            while llm.engine.step():
                pass
        assert texts_of(llm, GREEDY) == plain("sinks")["greedy"]
        check(llm)


def test_a_window_as_long_as_the_text_has_the_bits_of_none(models: Folders) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, return_generation_logits=True)

    def bits(**cache: Any) -> list[Any]:
        base = {"tokens_per_block": PAGE, "max_tokens": 1600}
        with open_llm(models, "lookahead", kv_cache_config={**base, **cache}) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            return [np.asarray(out.outputs[0].generation_logits).tobytes() for out in outputs]

    assert bits(max_attention_window=96, sink_token_length=7) == bits()


# -- what is held ---------------------------------------------------------------------------------


def most_held(llm: LLM, prompts: list[list[int]], count: int) -> int:
    """Pages that requests hold after any step, at most."""
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    states = [llm.engine.submit(llm.engine.resolve(prompt, params)) for prompt in prompts]
    most = 0
    while not all(state.finished for state in states):
        llm.engine.step()
        stats = llm.get_metrics()["executor"]
        most = max(most, stats["total_pages"] - stats["free_pages"])
    return most


@methods(["none", "ngram", "lookahead"])
@pytest.mark.parametrize("case", ["nine", "sinks", "itself", "layers"])
def test_pages_behind_the_window_are_given_back(models: Folders, case: str, method: str) -> None:
    with open_llm(
        models, method, kv_cache_config=pages(case), scheduler={"max_seq_len": 256}
    ) as llm:
        held = most_held(llm, [PROMPTS[3]], 220)
        drafts = 0 if llm.speculative_config is None else llm.speculative_config.max_draft_len
    _, sinks = windows_of(case)
    # The window from any place in a page on, the pages of the sink tokens, a step's rows.
    after_prompt = -(-(WIDEST[case] - 1 + 1 + drafts + PAGE - 1) // PAGE) + -(-sinks // PAGE)
    prompt = -(-(len(PROMPTS[3]) + drafts) // PAGE)
    assert 0 < held <= max(after_prompt, prompt + 1)
    assert held < 240 // PAGE


def test_one_full_layer_keeps_everything(models: Folders) -> None:
    with open_llm(models, None, kv_cache_config=pages("one full")) as llm:
        assert most_held(llm, [[1] * 10], 60) >= 69 // PAGE


def test_a_pool_smaller_than_the_text(models: Folders) -> None:
    """300 tokens in pages of 88: only the window is promised. With reuse a prompt is whole."""
    scheduler = {"max_seq_len": 320, "max_batch_size": 1}
    params = SamplingParams(max_tokens=280, ignore_eos=True)
    long = [(7 * i) % 40 for i in range(20)]

    def text(**more: Any) -> list[int]:
        with open_llm(models, "ngram", kv_cache_config=pages("sinks", **more),
                      scheduler=scheduler) as llm:  # fmt: skip
            return texts_of(llm, params, [long])[0]

    assert text(max_tokens=88) == text(max_tokens=88, enable_block_reuse=True) == text()
    tiny = {"tokens_per_block": PAGE, "max_tokens": 16, "max_attention_window": 64}
    with open_llm(models, None, kv_cache_config=tiny, scheduler=scheduler) as llm:
        assert len(texts_of(llm, SamplingParams(max_tokens=12, ignore_eos=True), [[1, 2]])[0]) == 12
        with pytest.raises(
            CapacityError, match="needs 20 KV pages of 4 tokens, the whole pool has 4"
        ):
            llm.generate([long], SamplingParams(max_tokens=60), use_tqdm=False)


@pytest.mark.parametrize(
    ("family", "more", "whole"),
    [
        ("mistral_window", {}, False),
        ("qwen2_window", {}, True),  # its first layer sees everything
        ("qwen2_window", {"max_attention_window": 11}, False),
        ("gemma3", {}, True),
        ("gemma3", {"max_attention_window": 16}, False),
        ("llama", {}, True),
        ("starcoder2", {}, False),  # by the adapter
        ("gpt_neox", {"max_attention_window": 9, "sink_token_length": 2}, False),
    ],
)
def test_models_with_windows_of_their_own(
    tmp_path: Path, family: str, more: dict[str, Any], whole: bool
) -> None:
    """What a model's layers cannot see is not held, asked for or not."""
    folder = save_model(make_model(family), tmp_path / family)
    cache = {"tokens_per_block": PAGE, "max_tokens": 1600, **more}
    prompts = [[3 + i % 50 for i in range(40)], [9] * 4]
    scheduler = {"max_batch_size": 2, "max_seq_len": 128}
    texts = []
    for config in (None, {"method": "ngram", "max_draft_len": 5, "adaptive": False}):
        with LLM(folder, speculative_config=config, kv_cache_config=cache, device="cpu",
                 scheduler_config=scheduler, dtype="float32") as llm:  # fmt: skip
            texts.append(texts_of(llm, SamplingParams(max_tokens=50, ignore_eos=True), prompts))
            held = most_held(llm, [[5] * 4], 80)
    assert texts[0] == texts[1]
    assert (held >= 72 // PAGE) == whole


# -- devices -------------------------------------------------------------------------------------


@on_devices
@methods(["lookahead", "medusa"])
@pytest.mark.parametrize("case", ["nine", "sinks", "itself", "layers"])
def test_windows_on_a_device(
    models: Folders, plain: Any, case: str, method: str, where: Where
) -> None:
    for spec in (None, method):
        with open_llm(models, spec, where, kv_cache_config=pages(case), numerics="exact") as llm:
            assert texts_of(llm, GREEDY, PROMPTS[1:3]) == plain(case)["greedy"][1:3]
            check(llm)


@on_devices
@methods(["none", "chain", "tree"])
def test_sink_tokens_of_drafters_on_a_device(
    models: Folders, plain: Any, method: str, where: Where
) -> None:
    """A pool that holds little more than what is seen: pages behind the window are others' soon."""
    for more in ({"max_tokens": 240}, {"enable_block_reuse": True}):
        with open_llm(models, method, where, kv_cache_config=pages("sinks", **more)) as llm:
            for _ in range(2):
                assert texts_of(llm, GREEDY) == plain("sinks")["greedy"]
            stats = llm.get_metrics()["executor"]
            check(llm)
        assert (stats["cached_tokens"] > 0) == ("enable_block_reuse" in more)


@on_devices
def test_sink_tokens_through_the_adapter_on_a_device(tmp_path: Path, where: Where) -> None:
    folder = save_model(make_model("gpt_neox"), tmp_path / "model")
    prompts = [[3 + i % 50 for i in range(40)], [9] * 4]
    texts = []
    for device, sinks in (("cpu", 2), (where.device, 2), (where.device, 0)):
        cache = {
            "tokens_per_block": PAGE, "max_tokens": 1600, "max_attention_window": 9,
            "sink_token_length": sinks,
        }  # fmt: skip
        with LLM(folder, kv_cache_config=cache, device=device, dtype="float32",
                 scheduler_config={"max_batch_size": 2, "max_seq_len": 128}) as llm:  # fmt: skip
            texts.append(texts_of(llm, SamplingParams(max_tokens=30, ignore_eos=True), prompts))
    assert texts[0] == texts[1] != texts[2]


def test_two_ranks(models: Folders, plain: Any) -> None:
    with started_team():
        for case, method in (("layers", "lookahead"), ("sinks", "tree")):
            with open_llm(models, method, kv_cache_config=pages(case),
                          tensor_parallel_size=2) as llm:  # fmt: skip
                assert texts_of(llm, GREEDY) == plain(case)["greedy"]


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"max_attention_window": 0}, r"max_attention_window = 0: out of range, allowed 1\.\."),
        ({"max_attention_window": [4, 0]}, r"max_attention_window\[1\] = 0: out of range"),
        ({"max_attention_window": []}, r"max_attention_window = \[\]: give one window"),
        ({"max_attention_window": 1.5}, "max_attention_window = 1.5: expected an integer"),
        ({"max_attention_window": [4, 5, 6]}, "has 3 entries, .* has 2 layers; give one window"),
        ({"sink_token_length": 4}, "sink_token_length = 4: no layer of .* has a window"),
        ({"sink_token_length": -1}, r"sink_token_length = -1: out of range, allowed 0\.\."),
    ],
)  # fmt: skip
def test_refusals(models: Folders, cache: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(models, None, HOST, kv_cache_config=cache)


def test_other_spellings(models: Folders) -> None:
    base = {"tokens_per_block": PAGE, "max_tokens": 1600}
    names = ("max_attention_window", "max_attention_window_size", "max_attention_window_vec")
    texts = []
    for name in names:
        with open_llm(models, None, kv_cache_config={**base, name: 9}) as llm:
            assert llm.kv_cache_config.max_attention_window == 9
            assert llm.memory.attention_window == 9
            texts.append(texts_of(llm, GREEDY))
    assert texts[0] == texts[1] == texts[2]


def test_every_method_is_here() -> None:
    assert {*DRAFTING, *HOSTED, "none", "redrafter-law"} == set(METHODS)

"""EAGLE-3: the target's text whatever the head says, and drafts that are the reference's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_target_cases import GREEDY, PROMPTS, SAMPLED, VOCAB, make_model, run, tokens_of
from eagle3_cases import as_speculators, save_trained, states_of
from method_cases import DEVICES, HOST, Where, drafter_of, placed
from safetensors.torch import load_file
from test_draft_target_sampling import check_output_law
from transformers import LlamaForCausalLM

from reference.eagle3_reference import Head, draft_tree
from specdec_ext import LLM, Eagle3DecodingConfig, RequestError, SamplingParams
from specdec_ext.drafters.eagle3.shape import default_taps
from specdec_ext.models.host_arrays import as_torch

Folders = dict[str, Path]
IDS = [token for token in range(VOCAB) if token % 5]  # of the reduced head
CHAIN: dict[str, Any] = {"max_draft_len": 4, "top_k": 1, "adaptive": False}
TREE: dict[str, Any] = {"max_draft_len": 9, "top_k": 3, "max_draft_depth": 4, "adaptive": False}
SPECS: list[dict[str, Any]] = [
    CHAIN, TREE, {}, {"top_k": 1},
    {"max_draft_len": 30, "top_k": 4, "max_draft_depth": 4, "adaptive": False},
    {"max_draft_len": 12, "top_k": 12, "max_draft_depth": 1, "adaptive": False},
    {"max_draft_len": 1, "adaptive": False},
]  # fmt: skip
HEADS = ["whole", "reduced", "residual", "speculators"]
each_place_but_streams = pytest.mark.parametrize("where", [pytest.param(HOST, id="host"), *DEVICES])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("eagle3")
    target = make_model(root / "target", 11, num_hidden_layers=4)
    with LLM(target, speculative_config=None, scheduler_config={"max_seq_len": 200}) as llm:
        outputs = tokens_of(llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False))
    texts = [p + t for p, t in zip(PROMPTS, outputs, strict=False)]
    heads = {
        "whole": save_trained(root / "whole", target, texts),
        "reduced": save_trained(root / "reduced", target, texts, ids=IDS, taps=(1, 3, 4)),
        "residual": save_trained(
            root / "residual", target, texts, steps=60, norm_before_residual=True,
            attention_bias=True,
        ),
    }  # fmt: skip
    heads["speculators"] = as_speculators(root / "speculators", heads["reduced"], 4)
    return {"target": target, **heads}


def open_llm(
    folders: Folders, head: str | None, batch: int = 3, where: Where = HOST, **kwargs: Any
) -> LLM:
    spec = kwargs.pop("spec", CHAIN)
    config = None if head is None else Eagle3DecodingConfig(folders[head], **spec)
    scheduler = {
        "max_batch_size": batch, "max_seq_len": 200, "overlap_depth": where.depth,
        **kwargs.pop("scheduler", {}),
    }  # fmt: skip
    with placed(where):
        return LLM(
            folders["target"], speculative_config=config, scheduler_config=scheduler,
            device=where.device, dtype="float32", **kwargs,
        )  # fmt: skip


@pytest.fixture(scope="module")
def plain(folders: Folders) -> dict[str, list[list[int]]]:
    with open_llm(folders, None) as llm:
        return {
            "greedy": run(llm, PROMPTS, GREEDY),
            "sampled": run(llm, PROMPTS, SAMPLED),
        }


def reference_of(folder: Path, target: Any) -> tuple[Head, tuple[int, ...]]:
    """The head, and its taps."""
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("transformer_layer_config", {})}
    tensors = load_file(folder / "model.safetensors")
    named = {n.replace("layers.0.", "midlayer."): t.numpy() for n, t in tensors.items()}
    embedding = target.model.embed_tokens.weight.detach().numpy()
    taps = config.get("eagle_aux_hidden_state_layer_ids")
    if taps is None:
        own = config["eagle_config"].get("eagle_aux_hidden_state_layer_ids")
        taps = default_taps(4) if own is None else [tap + 1 for tap in own]
    return Head(config, named, embedding), tuple(taps)


# Every head with every shape; each pair at one depth, which depends on it.
CASES = [
    (head, spec, (i + j) % 3) for i, head in enumerate(HEADS) for j, spec in enumerate(SPECS)
    if i == 0 or (i + j) % 2
]  # fmt: skip


@pytest.mark.parametrize(("head", "spec", "depth"), CASES, ids=str)
def test_the_output_is_that_of_plain_decoding(
    folders: Folders, plain: dict[str, Any], head: str, spec: dict[str, Any], depth: int
) -> None:
    """Every head and shape, batches of 1, 3 and 16, steps that are read late."""
    batch = (1, 3, 16)[(HEADS.index(head) + SPECS.index(spec) + depth) % 3]
    n = 4 if batch == 1 else len(PROMPTS)
    scheduler = {"overlap_depth": depth}
    with open_llm(folders, head, batch, spec=spec, scheduler=scheduler) as llm:
        assert run(llm, PROMPTS[:n], GREEDY) == plain["greedy"][:n]
        assert run(llm, PROMPTS[:n], SAMPLED) == plain["sampled"][:n]
        metrics = llm.get_metrics()
    assert metrics["memory"]["draft_num_pages"] == metrics["memory"]["num_pages"]
    if spec.get("adaptive") is False:
        assert metrics["speculative_decoding"]["num_draft_tokens"] > 70
        assert metrics["drafter"]["features"] > 40 * n


@each_place_but_streams
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_every_draft_is_the_references(
    folders: Folders, head: str, spec: dict[str, Any], where: Where
) -> None:
    """Tokens, parents and order of all steps of a text, from the target's states in float64."""
    target = LlamaForCausalLM.from_pretrained(folders["target"], dtype=torch.float64)
    reference, taps = reference_of(folders[head], target)
    params = dataclasses.replace(GREEDY, max_tokens=20, return_steps=True)
    depth = spec.get("max_draft_depth", 4)
    with open_llm(folders, head, where=where, spec=spec) as llm:
        outputs = llm.generate(PROMPTS[:4], params, use_tqdm=False)
    drafted = 0
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        text = list(prompt)
        [completion] = output.outputs
        for record in completion.steps:
            if record.drafts:
                states = states_of(target, text[:-1], taps).numpy()
                room = len(text) + depth < len(prompt) + 20  # else drafts are cut
                if room:
                    wanted = draft_tree(
                        reference, text, states,
                        top_k=spec["top_k"], depth=depth, nodes=spec["max_draft_len"],
                    )  # fmt: skip
                    assert paths_of(record.drafts) == [path for path, _ in wanted]
                    drafted += len(wanted)
            text += record.token_ids
    assert drafted > 40


def paths_of(drafts: Any) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for draft in drafts:
        above = paths[draft.parent] if draft.parent >= 0 else ()
        paths.append((*above, draft.token_id))
    return paths


def test_a_trained_head_is_right_often(folders: Folders) -> None:
    """Else what the others say of acceptance would say nothing; and a tree is right more often."""
    passes = {}
    for name, spec in (("chain", CHAIN), ("tree", {**TREE, "max_draft_len": 16})):
        with open_llm(folders, "whole", spec=spec) as llm:
            outputs = llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
        passes[name] = sum(out.metrics["num_forward_passes"] for out in outputs)
    assert passes["tree"] <= passes["chain"] < 0.6 * 40 * 6


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_what_is_kept_of_a_text_is_a_function_of_the_text(
    folders: Folders, spec: dict[str, Any]
) -> None:
    """K, V and features behind a decoded text are, bit for bit, those of the text read as a prompt:
    drafts have left nothing, accepted or not."""
    length = 40
    with open_llm(folders, "whole", 1, spec=spec) as llm:
        [text] = run(llm, [PROMPTS[0]], GREEDY)
        whole = PROMPTS[0] + text
        decoded = [state[:, : len(whole) - 2].clone() for state in states_in(llm, len(whole))]
        assert llm.get_metrics()["speculative_decoding"]["num_accepted_draft_tokens"] > 5
    with open_llm(folders, "whole", 1, spec=spec) as llm:
        run(llm, [whole], dataclasses.replace(GREEDY, max_tokens=1))
        read = [state[:, : len(whole) - 2] for state in states_in(llm, len(whole))]
    assert len(text) == length
    for mine, fresh in zip(decoded, read, strict=True):
        assert mine.abs().sum() > 0
        # The last tokens that were accepted are read when the request drafts again.
        end = len(PROMPTS[0]) + length - 6
        assert torch.equal(mine[:, 1:end], fresh[:, 1:end])


def states_in(llm: LLM, length: int) -> list[torch.Tensor]:
    """K and V [heads, tokens, dim] and features [1, tokens, hidden] of the pool's first request."""
    drafter = drafter_of(llm)
    k, v = (as_torch(pages)[0] for pages in drafter._pages)
    pages = -(-length // k.shape[2])
    features = as_torch(drafter._features)
    order = [i for i, page in enumerate(features) if bool(page.abs().sum() > 0)]
    if bool(k[order[0], :, 0].abs().sum() > 0):
        order.reverse()
    # Nothing is written at position 0.
    assert len(order) == pages and not bool(k[order[0], :, 0].abs().sum() > 0)
    states = [pool[order].transpose(0, 1).flatten(1, 2) for pool in (k, v)]
    return [*states, features[order].flatten(0, 1)[None]]


def test_prefix_reuse_brings_features_along(folders: Folders, plain: dict[str, Any]) -> None:
    """The head reads what is new alone, and guesses as well as in a text that it has read."""
    text, begun = plain["greedy"][3], dataclasses.replace(GREEDY, max_tokens=12)
    rest, longer = dataclasses.replace(GREEDY, max_tokens=28), PROMPTS[3] + text[:12]
    counts = []
    for reuse in (False, True):
        cache = {"tokens_per_block": 4, "enable_block_reuse": reuse}
        with open_llm(folders, "whole", spec=TREE, kv_cache_config=cache) as llm:
            assert run(llm, [PROMPTS[3]], begun) == [text[:12]]
            before = llm.get_metrics()["drafter"]["features"]
            [output] = llm.generate([longer], rest, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == text[12:]
            read = llm.get_metrics()["drafter"]["features"] - before
        assert (read < 30 + 28) == reuse
        counts.append(output.metrics["speculative_decoding"]["num_accepted_draft_tokens"])
    # The head may have read none of a page's last tokens before its request ended.
    assert abs(counts[0] - counts[1]) <= 3 < counts[0]


@pytest.mark.parametrize("rows", [17, 30])
def test_chunked_prompts_and_preemption(folders: Folders, plain: dict[str, Any], rows: int) -> None:
    """Prompts in pieces, and a pool so small that requests have to go and come back: as many drafts
    are accepted as with room for all."""
    accepted = []
    for scarce in (False, True):
        options: dict[str, Any] = {"kv_cache_config": {"tokens_per_block": 8}}
        if scarce:
            options = {
                "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 160},
                "scheduler": {"policy": "max_utilization", "max_num_tokens": rows,
                              "max_seq_len": 120},
            }  # fmt: skip
        with open_llm(folders, "whole", 6, spec=CHAIN, **options) as llm:
            assert run(llm, PROMPTS[:8], GREEDY) == plain["greedy"][:8]
            metrics = llm.get_metrics()
        assert (metrics["executor"]["preemptions"] > 0) == scarce
        counts = metrics["speculative_decoding"]
        accepted.append(counts["num_accepted_draft_tokens"] / counts["num_draft_tokens"])
    assert abs(accepted[0] - accepted[1]) < 0.1 and accepted[0] > 0.2


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_heads_nan_never_reaches_a_text(
    folders: Folders, plain: dict[str, Any], value: str
) -> None:
    """In its scores, and in its pages."""
    cache = {"tokens_per_block": 4, "enable_block_reuse": True}
    with open_llm(folders, "whole", spec=TREE, kv_cache_config=cache) as llm:
        drafter = drafter_of(llm)
        forward, calls = drafter.side.model.forward, 0

        def poisoned(plan: Any) -> Any:
            nonlocal calls
            calls += 1
            scores = forward(plan)
            if scores is not None and calls % 2:
                scores[::2, calls % VOCAB] = float(value)
            return scores

        drafter.side.model.forward = poisoned
        assert run(llm, PROMPTS[:6], SAMPLED) == plain["sampled"][:6]
        for pages in (*drafter._pages, drafter._features):
            as_torch(pages)[:] = float("nan")
        assert run(llm, PROMPTS[:6], GREEDY) == plain["greedy"][:6]


def test_a_request_chooses_less(folders: Folders, plain: dict[str, Any]) -> None:
    def params(**kwargs: Any) -> SamplingParams:
        return SamplingParams(max_tokens=40, ignore_eos=True, **kwargs)

    each = [params(), params(speculative=False), params(max_draft_len=2), params(max_draft_len=0)]
    with open_llm(folders, "whole", 4) as llm:
        outputs = llm.generate(PROMPTS[:4], each, use_tqdm=False)
        with pytest.raises(RequestError, match="max_draft_len = 5 is greater than the engine's 4"):
            llm.generate([1], params(max_draft_len=5), use_tqdm=False)
    assert tokens_of(outputs) == plain["greedy"][:4]
    drafted = [out.metrics["speculative_decoding"]["num_draft_tokens"] > 0 for out in outputs]
    assert drafted == [True, False, True, False]
    assert set(outputs[0].metrics["draft_sources"]) == {"eagle3"}


def test_beside_suffix_decoding(folders: Folders, plain: dict[str, Any]) -> None:
    config = ["suffix", {"method": "eagle3", "model": str(folders["whole"]), **TREE}]
    with LLM(folders["target"], speculative_config=config, max_batch_size=3,
             max_seq_len=200) as llm:  # fmt: skip
        assert run(llm, PROMPTS, GREEDY) == plain["greedy"]
        assert run(llm, PROMPTS, SAMPLED) == plain["sampled"]
        sources = llm.get_metrics()["draft_sources"]
    assert sources["eagle3"]["accepted"] > 20


def test_the_mode_names_the_method(folders: Folders, plain: dict[str, Any]) -> None:
    config = {"model": str(folders["whole"]), "method": "eagle3"}
    with LLM(folders["target"], speculative_config=config, speculative_decoding_mode="eagle3",
             max_seq_len=200) as llm:  # fmt: skip
        assert run(llm, PROMPTS[:2], GREEDY) == plain["greedy"][:2]
        assert llm.get_metrics()["drafter"]["name"] == "eagle3"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A target of five tokens, and a head of four of them."""
    root = tmp_path_factory.mktemp("small")
    target = make_model(root / "target", 31, vocab_size=5)
    with LLM(target, speculative_config=None, max_seq_len=64) as llm:
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=1)
        outputs = tokens_of(llm.generate([[i, 4, 2] for i in range(5)] * 3, params, use_tqdm=False))
    texts = [[i % 5, 4, 2, *text] for i, text in enumerate(outputs)]
    return {
        "target": target,
        "whole": save_trained(root / "whole", target, texts, steps=40),
        "reduced": save_trained(root / "reduced", target, texts, ids=[0, 1, 3, 4], steps=40),
    }


LAWS = [
    (CHAIN, {"acceptance": "rejection"}),
    ({"max_draft_len": 4, "top_k": 1}, {"acceptance": "rejection"}),
    (CHAIN, {"acceptance": "rejection", "use_draft_logits": False}),
    (TREE, {"acceptance": "rejection"}),
    (CHAIN, {}),
]
LAW_NAMES = ["q", "adaptive", "one-hot", "tree", "exact-match"]


def check_law(
    small: Folders, head: str, spec: dict[str, Any], options: dict[str, Any], draws: int
) -> None:
    with open_llm(small, head, 32, spec=spec, scheduler={"max_seq_len": 16}) as llm:
        check_output_law(llm, small["target"], options, draws, drafts_differ=spec is CHAIN)


@pytest.mark.parametrize(("spec", "options"), LAWS, ids=LAW_NAMES)
def test_the_output_has_the_targets_law(
    small: Folders, spec: dict[str, Any], options: dict[str, Any]
) -> None:
    check_law(small, "whole", spec, options, draws=20_000 if options else 5_000)


def test_the_output_of_a_reduced_head_has_the_targets_law(small: Folders) -> None:
    check_law(small, "reduced", *LAWS[0], draws=20_000)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["whole", "reduced"])
@pytest.mark.parametrize(("spec", "options"), LAWS, ids=LAW_NAMES)
def test_the_output_has_the_targets_law_in_full(
    small: Folders, head: str, spec: dict[str, Any], options: dict[str, Any]
) -> None:
    check_law(small, head, spec, options, draws=1_000_000)


@pytest.mark.parametrize("head", ["whole", "reduced"])
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_target_in_the_adapter_is_tapped_as_the_native_one(
    folders: Folders, head: str, spec: dict[str, Any]
) -> None:
    """The same drafts, but for near-ties: texts, and how many were accepted."""
    accepted = []
    for impl in ("native", "transformers"):
        with open_llm(folders, None, model_impl=impl) as llm:
            plain = run(llm, PROMPTS[:4], GREEDY)
        with open_llm(folders, head, spec=spec, model_impl=impl) as llm:
            assert run(llm, PROMPTS[:4], GREEDY) == plain
            counts = llm.get_metrics()["speculative_decoding"]
        accepted.append(counts["num_accepted_draft_tokens"])
    assert accepted[0] > 40 and abs(accepted[0] - accepted[1]) <= 3

"""The decoder of a device against transformers, and what its pass may do.

On the emulation the tensors lie on the CPU and the kernels are those of cuda/; where there is a
GPU the same tests run on it.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from model_zoo import NATIVE
from plan_builder import Driver, Sequence, hf_greedy, hf_scores, prompt_ids
from safetensors.torch import load_file, save_file
from test_native import ROPE

from dispatch_recorder import Recorder, no_synchronisation
from emulators import devices, needs_cuda
from specdec_ext import _core
from specdec_ext.errors import ConfigError, ModelError, UnsupportedConfigError
from specdec_ext.models import StepModel, load_model
from specdec_ext.models.device_decoder import EXACT_DRAFT_DEPTH
from specdec_ext.models.device_step import PlanStaging, Upload
from specdec_ext.models.place import resolve_device

NUM_TOKENS = 8


def load(folder: Any, device: str, **options: Any) -> Any:
    model = load_model(folder, place=resolve_device(device), **{"max_rows": 64, **options})
    numerics = "exact" if options.get("numerics") == "exact" else "fast"
    assert (model.impl, model.numerics, model.info.numerics) == ("native", numerics, numerics)
    return model


@devices
@pytest.mark.parametrize("family", sorted(NATIVE))
def test_greedy_equals_transformers(saved: Any, device: str, family: str) -> None:
    """Prompts read at once and in chunks, several in a batch; other pages each time."""
    reference = saved(family)
    prompts = [prompt_ids(length, seed) for seed, length in enumerate((1, 9, 23))]
    expected = [hf_greedy(reference.model, prompt, NUM_TOKENS) for prompt in prompts]
    model = load(reference.folder, device)
    assert Driver(model).greedy(prompts, NUM_TOKENS) == expected
    assert Driver(model, page_size=16, seed=5).greedy(prompts, NUM_TOKENS, chunk=5) == expected


@devices
@pytest.mark.parametrize("family", ["gpt2", "olmo2", "cohere2", "granite", "gpt_oss"])
def test_the_adapter_on_a_device(saved: Any, device: str, family: str) -> None:
    """Sinks, windows, scales and heads of classes that only transformers has."""
    reference = saved(family)
    model = load_model(reference.folder, place=resolve_device(device))
    assert (model.impl, model.numerics, model.info.device) == (
        "transformers",
        "fast",
        model.place.name,
    )
    prompts = [prompt_ids(length, seed) for seed, length in enumerate((1, 9, 23))]
    expected = [hf_greedy(reference.model, prompt, NUM_TOKENS) for prompt in prompts]
    driver = Driver(model)
    assert driver.greedy(prompts, NUM_TOKENS, chunk=5) == expected
    plan = driver._plan([(Sequence(), prompts[2])], None, False, True)
    hidden = torch.full((1, model.hidden_size), float("nan"))
    scores = model.forward(plan, hidden).clone()
    assert torch.allclose(model.head(hidden), scores, atol=1e-4)
    ids = torch.tensor([3, 0], dtype=torch.int32)
    table = reference.model.get_input_embeddings().weight
    assert torch.equal(model.embed(ids), table[ids.long()])
    assert model.head_rows(ids).shape == (2, model.hidden_size)


@devices
@pytest.mark.parametrize("name", sorted(ROPE))
def test_rope_types_beyond_the_original_length(saved: Any, device: str, name: str) -> None:
    length = 128 if name == "llama3" else 24  # llama3 states its full length
    reference = saved("llama", rope_parameters=ROPE[name], max_position_embeddings=length)
    prompt = prompt_ids(20, 3)
    expected = hf_greedy(reference.model, prompt, 12)
    assert Driver(load(reference.folder, device)).greedy([prompt], 12) == [expected]


@devices
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_scores_are_as_close_as_torch(saved: Any, device: str, family: str, dtype: str) -> None:
    """err(ours) <= 2 err(torch in the same dtype) + rounding, both against float64 on the weights
    as the dtype holds them."""
    torch_dtype = getattr(torch, dtype)
    rounded = copy.deepcopy(saved(family).model).to(torch_dtype)
    ids = prompt_ids(30, 7)
    theirs = hf_scores(rounded, ids).double()
    exact = hf_scores(rounded.double(), ids)
    model = load(saved(family).folder, device, dtype=dtype)
    assert model.kv_dtype == torch_dtype and model.info.dtype == dtype
    ours = Driver(model, page_size=16).scores([(Sequence(), ids)])[0].double()
    limit = 2 * (theirs - exact).abs().max()
    limit += 2 * torch.finfo(torch_dtype).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= limit


@devices
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_path_of_a_tree_scores_as_it_does_alone(saved: Any, device: str, family: str) -> None:
    reference = saved(family)
    prompt, nodes = prompt_ids(9, 1), prompt_ids(5, 2)
    driver = Driver(load(reference.folder, device))
    sequence = Sequence()
    driver.scores([(sequence, prompt)])
    tree = driver.scores([(sequence, nodes)], [[-1, 0, 0, 1, 2]], keep=False)[0]
    for path in ([0, 1, 3], [0, 2, 4]):
        alone = hf_scores(reference.model, prompt + [nodes[i] for i in path])[len(prompt) :]
        assert torch.allclose(tree[path], alone, atol=1e-3, rtol=1e-3)


@devices
def test_many_rows_are_scored_in_parts(
    saved: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's buffer holds a few rows only; ids, scores and hidden states are the same."""
    prompt = prompt_ids(13, 4)
    driver = Driver(load(saved("gemma2").folder, device))
    whole = driver.scores([(Sequence(), prompt)])[0]
    monkeypatch.setattr("specdec_ext.models.device_decoder._SCORE_BYTES", 4 * 199 * 4)
    model = load(saved("gemma2").folder, device)
    assert model.decoder._score_rows == 4
    driver = Driver(model)
    parts = driver.scores([(Sequence(), prompt)])[0]
    assert torch.allclose(whole, parts, atol=1e-4)
    plan = _core.make_step_plan([prompt], kv_len=[0], page_table=[[1, 2, 3, 4]], needs_logits=False)
    assert torch.equal(model.forward(plan), parts.argmax(-1).int())


@devices
def test_hidden_states_and_the_head(saved: Any, device: str) -> None:
    model = load(saved("gemma2").folder, device)
    assert isinstance(model, StepModel)
    driver = Driver(model)
    prompt = prompt_ids(7, 5)
    plan = driver._plan([(Sequence(), prompt)], None, False, True)  # the last row alone
    hidden = torch.full((1, model.hidden_size), float("nan"))
    scores = model.forward(plan, hidden).clone()
    assert torch.allclose(model.head(hidden), scores, atol=1e-4)
    reference = saved("gemma2").model
    inside = reference.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    assert torch.allclose(hidden[0], inside, atol=1e-3, rtol=1e-3)
    ids = torch.tensor([3, 198, 0], dtype=torch.int32)
    table = reference.get_input_embeddings().weight
    assert torch.equal(model.embed(ids), table[ids.long()])
    assert torch.equal(model.head_rows(ids), reference.lm_head.weight[ids.long()])


@devices
def test_a_nan_stays_in_its_row(saved: Any, device: str, tmp_path: Any) -> None:
    folder = shutil.copytree(saved("llama").folder, tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder, device)
    assert "NaN" in model.info.warnings[0]
    Driver(model)
    plan = _core.make_step_plan(
        [[5, 77], [5, 6]], kv_len=[0, 0], page_table=[[4], [9]], needs_logits=False
    )
    ids = model.forward(plan).tolist()
    clean = _core.make_step_plan([[5, 6]], kv_len=[0], page_table=[[9]], needs_logits=False)
    assert ids[1] == -1
    assert [ids[0], *ids[2:]] == [ids[2], *model.forward(clean).tolist()]


# -- What a pass is made of ------------------------------------------------------------------------

# Enqueued on a device without a look at its results; everything else of a pass is a kernel of ours.
PRODUCTS = {"aten::mm.out", "aten::addmm.out"}  # in exact mode they are kernels of ours too
ENQUEUED = PRODUCTS | {"aten::index_select.out", "aten::mul_.Scalar", "aten::mul_.Tensor"}
# They make a view or a number of the host.
VIEWS = {
    "aten::slice.Tensor", "aten::view", "aten::t", "aten::select.int", "aten::transpose.int",
    "aten::as_strided", "aten::_unsafe_view", "aten::alias", "aten::detach",
}  # fmt: skip


@devices
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama_biased", "bfloat16"),
        ("llama_biased", "float32"),
        ("llama_head_64", "bfloat16"),
        ("gemma2", "bfloat16"),
        ("gemma2", "float32"),
    ],
)
def test_exact_rows_have_the_bits_they_have_alone(
    saved: Any, device: str, family: str, dtype: str
) -> None:
    """In a step of 140 rows (more than one product has), in chunks, one by one, as tree nodes."""
    model = load(saved(family).folder, device, dtype=dtype, numerics="exact", max_rows=150)
    driver = Driver(model, page_size=16)
    tokens, others = prompt_ids(30, 1), prompt_ids(110, 2)
    company = driver.scores([(Sequence(), others), (Sequence(), tokens)])[1]
    sequence, parts = Sequence(), []
    for first, end in ((0, 11), (11, 12), (12, 29), (29, 30)):
        parts += driver.scores([(sequence, tokens[first:end])])
    assert torch.equal(torch.cat(parts), company)
    path = [7, 8, 9]
    tree = driver.scores([(sequence, [7, 50, 8, 51, 9])], [[-1, 0, 0, 2, 2]], keep=False)[0]
    alone = [driver.scores([(sequence, [token])])[0] for token in path]
    assert torch.equal(tree[[0, 2, 4]], torch.cat(alone))


@devices
def test_exact_rows_are_no_deeper_than_the_bound(saved: Any, device: str) -> None:
    """The kernels know it, too: what comes deeper has no bits that hold, and is refused."""
    tokens = prompt_ids(EXACT_DRAFT_DEPTH + 3, 1)
    path = [-1, *range(EXACT_DRAFT_DEPTH + 1)]  # and a sibling of the first draft: a tree
    for numerics in ("exact", "fast"):
        model = load(saved("llama_head_64").folder, device, dtype="bfloat16", numerics=numerics)
        driver, sequence = Driver(model, page_size=16), Sequence()
        driver.scores([(sequence, tokens)])
        fits = [(sequence, tokens[: EXACT_DRAFT_DEPTH + 2])]
        assert driver.scores(fits, [[*path[:-1], 0]], keep=False)[0].isfinite().all()
        deeper = [(sequence, tokens)]
        if numerics == "exact":
            with pytest.raises(ModelError, match=r"refused requests of this step: flags \[4\]"):
                driver.scores(deeper, [[*path, 0]], keep=False)
        else:
            assert driver.scores(deeper, [[*path, 0]], keep=False)[0].isfinite().all()


@devices
@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("family", ["llama_biased", "gemma3", "qwen3"])
def test_a_pass_reads_nothing_on_the_host(
    saved: Any, device: str, family: str, numerics: str
) -> None:
    """No copy to the host, no size that depends on data, no temporary: by the list of what runs."""
    model = load(saved(family).folder, device, dtype="bfloat16", numerics=numerics)
    driver = Driver(model, page_size=16)
    parents = [[-1, 0, 0], []]
    plan = driver._plan([(Sequence(), [5, 6, 7]), (Sequence(), [8, 9])], parents, False, False)
    step = model.stage(plan)
    model.decoder.greedy(model.decoder.forward_rows(step))  # grows its scratch
    with no_synchronisation(device), Recorder() as seen:
        ids = model.decoder.greedy(model.decoder.forward_rows(step))
    assert seen.names <= (ENQUEUED if numerics == "fast" else ENQUEUED - PRODUCTS) | VIEWS
    assert torch.equal(ids.cpu(), model.forward(plan))


@devices
def test_buffers_stay_where_they_are(saved: Any, device: str) -> None:
    """Steps of any size use the same memory, so that a pass can be captured."""
    model = load(saved("llama").folder, device)
    driver = Driver(model)
    places = set()
    for count in (1, 40, 3):
        plan = driver._plan([(Sequence(), prompt_ids(count, 1))], None, True, False)
        rows = model.decoder.forward_rows(model.stage(plan))
        places.add((rows.data_ptr(), model.decoder.greedy(rows).data_ptr()))
    assert len(places) == 1


@devices
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padding_is_inert(saved: Any, device: str, family: str) -> None:
    """Rows behind the last request: they write no page and change nobody's result."""
    padding = 5
    results = []
    for padded in (False, True):
        model = load(saved(family).folder, device)
        driver = Driver(model, page_size=16)
        requests = [(Sequence(), [5, 6, 7]), (Sequence(), prompt_ids(20, 1))]
        step = model.stage(driver._plan(requests, [[-1, 0, 0], []], False, False))
        if padded:

            def grown(rows: torch.Tensor, value: int) -> torch.Tensor:
                more = torch.full((padding, *rows.shape[1:]), value, dtype=rows.dtype)
                return torch.cat([rows, more.to(rows.device)])

            step = dataclasses.replace(
                step,
                tokens=grown(step.tokens, 7),
                positions=grown(step.positions, -99),
                mask=grown(step.mask, -1),
                logit_rows=None,
            )
        else:
            step = dataclasses.replace(step, logit_rows=None)
        ids = model.decoder.greedy(model.decoder.forward_rows(step))
        assert step.status is not None and not bool(step.status.any())
        results.append([t.cpu() for t in (ids[:23].clone(), driver.k, driver.v)])
    for alone, beside in zip(*results, strict=True):
        assert torch.equal(alone.nan_to_num(77.0), beside.nan_to_num(77.0))


@needs_cuda
def test_a_captured_pass_gives_what_a_called_one_gives(saved: Any) -> None:
    model = load(saved("gemma3").folder, "cuda", dtype="bfloat16")
    driver = Driver(model, page_size=16)
    plan = driver._plan([(Sequence(), prompt_ids(9, 1))], None, False, False)
    step = model.stage(plan)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.inference_mode():
        expected = model.decoder.greedy(model.decoder.forward_rows(step)).clone()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            ids = model.decoder.greedy(model.decoder.forward_rows(step))
        ids.fill_(-7)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(ids, expected)


# -- Staging ---------------------------------------------------------------------------------------


def test_a_staged_plan_says_what_the_plan_says() -> None:
    plan = _core.make_step_plan(
        [[5, 6, 7], [8]],
        parents=[[-1, 0, 0], []],
        kv_len=[9, 30],
        page_table=[[3, 1, 2], [4, 5, 6]],
        logits_for_all_rows=False,
    )
    step = PlanStaging(torch.device("cpu")).stage(plan, 16)
    for name in ("tokens", "positions", "cu_rows", "kv_len", "is_tree"):
        assert getattr(step, name).tolist() == getattr(plan, name).tolist()
    assert step.mask.view(torch.uint32).tolist() == plan.mask.tolist()
    assert step.page_table.tolist() == [[3, 1], [4, 5]]  # as far as 31 tokens reach
    assert (step.max_rows, step.max_kv_len) == (3, 31)
    assert step.logit_rows is not None and step.logit_rows.tolist() == plan.logit_rows.tolist()
    assert (step.num_rows, step.num_logit_rows) == (4, plan.num_logit_rows)
    assert step.status is not None and step.status.tolist() == [0, 0]


def test_an_upload_grows_and_keeps_every_array() -> None:
    upload = Upload(torch.device("cpu"), 64)
    for size in (3, 50, 7):
        arrays = [
            np.arange(size, dtype=np.int32),
            np.full(size, 7, dtype=np.uint8),
            np.arange(2 * size, dtype=np.uint32).reshape(2, size),
        ]
        sent = upload.send(arrays)
        assert [t.dtype for t in sent] == [torch.int32, torch.uint8, torch.int32]
        assert [t.tolist() for t in sent] == [a.tolist() for a in arrays]


# -- Refusals --------------------------------------------------------------------------------------


def test_what_is_no_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="device = 'gpu': expected 'auto', 'cpu', 'cuda'"):
        resolve_device("gpu")
    with pytest.raises(ConfigError, match="device = 'cuda:x'"):
        resolve_device("cuda:x")
    assert resolve_device("cpu").is_cpu


@pytest.mark.parametrize(
    ("seen", "torch_sees", "name", "message"),
    [
        (["one"], 0, "cuda", "torch .* sees no CUDA device although this package does"),
        (["one"], 1, "cuda:1", r"devices of this machine are cuda:0\.\.cuda:0"),
        (["one", "two"], 1, "cuda:1", r"devices of this machine are cuda:0\.\.cuda:0"),
        ([], 1, "cuda:0", "cannot be used: no driver; use device='cpu'"),
    ],
)
def test_why_a_gpu_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, seen: list[str], torch_sees: int, name: str, message: str
) -> None:
    info = {"compiled": True, "devices": seen, "reason": "" if seen else "no driver"}
    monkeypatch.setattr(_core, "cuda_info", lambda: info)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_sees > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: torch_sees)
    with pytest.raises(UnsupportedConfigError, match=message):
        resolve_device(name)
    usable = bool(seen) and torch_sees > 0
    assert resolve_device("auto").name == ("cuda:0" if usable else "cpu")
    if usable:
        assert resolve_device("cuda") == resolve_device("cuda:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be used here")
def test_cuda_is_refused_with_the_reason_and_auto_is_the_cpu() -> None:
    reason = _core.cuda_info()["reason"]
    with pytest.raises(ConfigError) as refused:
        resolve_device("cuda:1")
    assert reason in str(refused.value) and "use device='cpu'" in str(refused.value)
    assert resolve_device("auto").is_cpu


@devices
def test_refusals_of_a_model(saved: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(saved("llama").folder, device, max_rows=4)
    plan = _core.make_step_plan([prompt_ids(5, 0)], kv_len=[0], page_table=[[0, 1]])
    with pytest.raises(ModelError, match=r"before bind_cache"):
        model.forward(plan)
    driver = Driver(model)
    with pytest.raises(ModelError, match=r"a step of 5 rows: .* max_rows = 4"):
        model.forward(plan)
    with pytest.raises(ModelError, match=r"k_pages is float16, the model needs float32"):
        model.bind_cache(driver.k.half(), driver.v.half())
    if device != "cuda":
        monkeypatch.setenv("SPECDEC_EMU_LIMITS", "7.5,4,65536")
        with pytest.raises(ConfigError, match=r"cannot run this model: .*8\.0"):
            load(saved("llama").folder, device)

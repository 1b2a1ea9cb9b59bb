"""Whole steps with the model: an 8B-shaped decoder of random bf16 weights, made on the device.

pass    forward and greedy choice of a step's rows, captured as a graph: T(rows)
decode  the engine end to end, the host's share included
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import problem as problems
from benchmarks.gpu import timing
from benchmarks.gpu.attention import describe, figures
from benchmarks.gpu.cells import MAX_DEPTH
from benchmarks.gpu.engine_cells import ModelCell
from benchmarks.gpu.run import Target
from specdec_ext import _core

WALL_ROUNDS = 10


def config_of(cell: ModelCell) -> dict[str, Any]:
    """config.json of a Llama with the cell's sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": cell.vocab,
        "hidden_size": cell.hidden,
        "intermediate_size": cell.intermediate,
        "num_hidden_layers": cell.layers,
        "num_attention_heads": cell.num_heads,
        "num_key_value_heads": cell.num_kv_heads,
        "head_dim": cell.head_dim,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }


def random_model(cell: ModelCell, target: Target, max_rows: int) -> Any:
    """A DeviceModel of the cell's sizes without pages."""
    from specdec_ext.models.config_reader import read_config
    from specdec_ext.models.device_model import DeviceModel
    from specdec_ext.models.native_config import native_shape
    from specdec_ext.models.place import resolve_device

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(cell)))
        config = read_config(folder)
        return DeviceModel(
            config,
            native_shape(config),
            "bfloat16",
            resolve_device(target.backend),
            impl_reason="random weights",
            max_rows=max_rows,
            random_seed=0,
            exact=cell.numerics == "exact",
        )


class Models:
    """One random model, kept for the cells that share its sizes and numerics."""

    def __init__(self, target: Target, max_rows: int) -> None:
        self.target = target
        self._max_rows = max_rows
        self._model: Any = None

    def get(self, cell: ModelCell) -> Any:
        if self._model is not None and self._model.numerics != cell.numerics:
            self.drop()
        if self._model is None:
            self._model = random_model(cell, self.target, self._max_rows)
        return self._model

    def drop(self) -> None:
        self._model = None
        gc.collect()
        if not self.target.emulated:
            torch.cuda.empty_cache()


def make_pages(cell: ModelCell, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    pages = cell.requests * -(-(cell.context + cell.rows) // cell.page_size)
    shape = (cell.layers, pages, cell.num_kv_heads, cell.page_size, cell.head_dim)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device=target.device) for _ in range(2))
    return k, v


def make_plan(cell: ModelCell) -> Any:
    """A tree of the cell's rows for each request, after its context; pages shuffled."""
    generator = torch.Generator().manual_seed(2)
    width = -(-(cell.context + cell.rows) // cell.page_size)
    order = torch.randperm(cell.requests * width, generator=generator).view(cell.requests, width)
    tokens = torch.randint(cell.vocab, (cell.requests, cell.rows), generator=generator)
    tree = problems.random_tree(cell.rows, MAX_DEPTH, seed=1)
    return _core.make_step_plan(
        tokens.tolist(),
        parents=[tree] * cell.requests,
        kv_len=[cell.context] * cell.requests,
        page_table=order.tolist(),
        needs_logits=False,
    )


def measure_pass(
    cell: ModelCell, target: Target, timer: timing.Timer, models: Models
) -> dict[str, Any]:
    """Returns the record of one pass: as a graph (us), its matrix products alone, and called from
    the host with the copies of a step around it (wall_us)."""
    model = models.get(cell)
    model.bind_cache(*make_pages(cell, target))
    plan = make_plan(cell)
    expected = model.forward(plan).clone()
    if bool((expected < 0).any()) or bool((expected >= cell.vocab).any()):
        raise ArithmeticError(f"greedy ids of a pass: {expected.tolist()}")
    step, decoder = model.stage(plan), model.decoder

    def one_pass(_: int) -> torch.Tensor:
        return decoder.greedy(decoder.forward_rows(step))

    with torch.inference_mode():
        rounds = timer.measure({"ours": one_pass, "products": products(decoder, cell)}, 1)
    if "ours" in timer.failures:
        raise RuntimeError(timer.failures["ours"])
    if not torch.equal(one_pass(0).cpu(), expected):
        raise ArithmeticError("a later pass over the same rows gives other ids")
    work = cell.work()
    record = {**cell.describe(), **describe(work), "status": "ok"}
    record |= figures(work, rounds.get("ours", []))
    record["others"] = {"products": figures(work, rounds.get("products", []))}
    if not target.emulated:
        record["wall_us"] = round(statistics.median(walls(model, plan)), 1)
    return record


def products(decoder: Any, cell: ModelCell) -> timing.Program:
    """The pass's matrix products and nothing else: what torch takes for them."""
    weights, rows = decoder.weights, cell.requests * cell.rows

    def inputs(width: int) -> torch.Tensor:
        return torch.randn(rows, width, dtype=decoder.dtype, device=weights.head.device)

    matrices = [m for layer in weights.layers for m in (layer.qkv, layer.o, layer.gate_up,
                                                        layer.down)] + [weights.head]  # fmt: skip
    given = {width: inputs(width) for width in {m.shape[1] for m in matrices}}
    taken = {width: inputs(width) for width in {m.shape[0] for m in matrices}}

    def run(_: int) -> None:
        for matrix in matrices:
            outputs, width = matrix.shape
            torch.mm(given[width], matrix.t(), out=taken[outputs])

    return run


def walls(model: Any, plan: Any) -> Iterator[float]:
    """Microseconds of the host for a step: staging, pass, wait for the ids."""
    for _ in range(3):
        model.forward(plan)
    for _ in range(WALL_ROUNDS):
        start = time.perf_counter()
        model.forward(plan)
        yield (time.perf_counter() - start) * 1e6


@contextmanager
def engine_of(cell: ModelCell, target: Target, speculative_config: Any = None) -> Iterator[Any]:
    """The engine of LLM(device=...) around a random model."""
    from specdec_ext.config.engine import KvCacheConfig, SchedulerConfig
    from specdec_ext.engine.build import EngineBuilder
    from specdec_ext.engine.model_options import ModelOptions

    def load(_path: Path, **options: Any) -> Any:
        return random_model(cell, target, options["max_rows"])

    tokens = cell.context + cell.new_tokens
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(cell)))
        options = ModelOptions(
            path=Path(folder),
            speculative_config=speculative_config,
            kv_cache_config=KvCacheConfig(
                tokens_per_block=cell.page_size, max_tokens=cell.requests * (tokens + 192)
            ),
            scheduler_config=SchedulerConfig(
                max_batch_size=cell.requests,
                max_seq_len=tokens,
                overlap_depth="auto" if cell.overlap_depth is None else cell.overlap_depth,
                enforce_eager="auto" if cell.overlap_depth is None else not cell.graphs,
            ),
            dtype="bfloat16",
            model_impl="native",
            allow_pickle=False,
            device=target.backend,
            loader=load,
        )
        parts = EngineBuilder(options, tokenizer=None, seed=0).build()
        try:
            yield parts.engine
        finally:
            parts.engine.close()


def measure_decode(cell: ModelCell, target: Target) -> dict[str, Any]:
    """Returns the record of plain decoding through the engine: time of a step, the host's share;
    seconds that building took, and the graphs that were made meanwhile."""
    from specdec_ext import SamplingParams

    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(cell.vocab, (cell.requests, cell.context), generator=generator)
    record: dict[str, Any] = {**cell.describe(), "status": "ok", "us": None}
    begin = time.perf_counter()
    with engine_of(cell, target) as engine:
        record["build_s"] = None if target.emulated else round(time.perf_counter() - begin, 2)
        warm_up(cell, engine)
        params = SamplingParams(max_tokens=cell.new_tokens, ignore_eos=True)
        states = [engine.submit(engine.resolve(prompt, params)) for prompt in prompts.tolist()]
        while any(not state.token_ids for state in states):  # their prompts
            engine.step()
        before = engine.get_metrics()
        start = time.perf_counter()
        engine.run(states)
        seconds = time.perf_counter() - start
        after = engine.get_metrics()
        lengths = [len(state.token_ids) for state in states]
        if lengths != [cell.new_tokens] * cell.requests:
            raise ArithmeticError(f"{lengths} tokens of {cell.new_tokens}: {states[0].error}")
    if target.emulated:
        return record
    steps = after["num_forward_passes"] - before["num_forward_passes"]
    host = after["time"]["host_overhead_s"] - before["time"]["host_overhead_s"]
    record["us"] = round(seconds / steps * 1e6, 1)
    record["host_us"] = round(host / steps * 1e6, 1)
    record["graphs_made"] = after["overlap"]["num_graphs"]
    record["graph_bytes"] = after["overlap"]["graph_bytes"]
    record["graph_bytes_planned"] = after["memory"]["graph_bytes"]
    return record


def warm_up(cell: ModelCell, engine: Any) -> None:
    """As many requests as the cell has: steps are recorded when they are first needed."""
    from specdec_ext import SamplingParams

    params = SamplingParams(max_tokens=min(cell.new_tokens, 24), ignore_eos=True)
    engine.run([engine.submit(engine.resolve([1, 2, 3], params)) for _ in range(cell.requests)])

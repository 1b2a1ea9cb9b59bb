"""The number of threads may change while requests run: passes that have begun keep theirs."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_target_cases import make_model

import specdec_ext
from specdec_ext import LLM, SamplingParams, _core, set_num_threads
from specdec_ext.models import load_model


@pytest.mark.parametrize("spec", [None, "auto"], ids=["plain", "auto"])
def test_threads_change_while_requests_run(tmp_path: Path, spec: str | None) -> None:
    shape = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = make_model(tmp_path / "model", 3, max_position_embeddings=512, **shape)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=1)
    prompts = [[1 + (7 * i + j) % 50 for j in range(200 + 35 * i)] for i in range(8)]
    before, ends = specdec_ext.get_num_threads(), threading.Event()

    def change() -> None:
        for turn in itertools.count():
            if ends.is_set():
                return
            set_num_threads(1 if turn % 2 else 24)

    with LLM(model, speculative_config=spec, max_seq_len=512) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        changing = threading.Thread(target=change)
        changing.start()
        try:
            for _ in range(3):
                llm.reset_prefix_cache()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert [o.outputs[0].token_ids for o in outputs] == expected
        finally:
            ends.set()
            changing.join()
            set_num_threads(before)


@pytest.mark.parametrize("needs_logits", [False, True], ids=["ids", "logits"])
def test_a_change_waits_for_the_end_of_a_pass(tmp_path: Path, needs_logits: bool) -> None:
    """It would otherwise come between two of a pass's many phases, again and again."""
    shape = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 64}
    folder = make_model(tmp_path / "model", 3, max_position_embeddings=512, **shape)
    model: Any = load_model(folder, max_rows=256)
    pages = torch.zeros(64, 8, model.num_kv_heads, 32, model.head_dim, dtype=model.kv_dtype)
    model.bind_cache(pages, pages.clone())
    plan = _core.make_step_plan(
        [[1 + i % 50 for i in range(256)]], kv_len=[0], page_table=[list(range(8))],
        needs_logits=needs_logits,
    )  # fmt: skip
    before, least = specdec_ext.get_num_threads(), 1 << 30
    try:
        for _ in range(5):
            begins, ends = threading.Event(), threading.Event()

            def work(begins: threading.Event = begins, ends: threading.Event = ends) -> None:
                begins.set()
                model.forward(plan)
                ends.set()

            running = threading.Thread(target=work)
            running.start()
            begins.wait()
            changes = 0
            while not ends.is_set():
                _core.set_num_threads(1 + changes % 2)
                changes += 1
            running.join()
            least = min(least, changes)
    finally:
        set_num_threads(before)
    # Some may come in front of the pass and behind it.
    assert least < 10

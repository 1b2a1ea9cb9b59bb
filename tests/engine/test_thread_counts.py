"""The number of threads may change while requests run: passes that have begun keep theirs."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

import specdec_ext
from specdec_ext import LLM, SamplingParams, set_num_threads

from .draft_target_cases import make_model


@pytest.mark.parametrize("spec", [None, "auto"], ids=["plain", "auto"])
def test_threads_change_while_requests_run(tmp_path: Path, spec: str | None) -> None:
    model = make_model(tmp_path / "model", 3)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=1)
    prompts = [[1 + (7 * i + j) % 50 for j in range(60 + 40 * i)] for i in range(8)]
    before, ends = specdec_ext.get_num_threads(), threading.Event()

    def change() -> None:
        for turn in itertools.count():
            if ends.is_set():
                return
            set_num_threads(1 + turn % 5)

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

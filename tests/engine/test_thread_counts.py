"""The number of threads may change while requests run: texts stay, and nobody waits for ever.

tests/cpp/test_thread_pool.cc shows that the number stays while scratch memory was made for it.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
from draft_target_cases import make_model

import specdec_ext
from specdec_ext import LLM, SamplingParams, set_num_threads


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

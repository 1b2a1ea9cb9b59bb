"""On the CPU the native decoder and its drafters generate without torch and transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import save_tiny

METHODS = {
    "plain": "None",
    "prompt lookup": "{'method': 'ngram'}",
    "lookahead": "{'method': 'lookahead'}",
    "draft model": "{'method': 'draft_target', 'model': folder}",
    "sampled": "None",
}
SCRIPT = """
import sys
from specdec_ext import LLM, SamplingParams
folder, sampled = sys.argv[1], {sampled}
llm = LLM(folder, dtype="bfloat16", speculative_config={config}, max_seq_len=64)
params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0 if sampled else 0.0)
for output in llm.generate(["ab ab ab ab", "hello"], params, use_tqdm=False):
    assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].text
llm.get_metrics()
llm.close()
heavy = {{"torch", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("method", METHODS)
def test_methods(folder: Path, method: str) -> None:
    script = SCRIPT.format(config=METHODS[method], sampled=method == "sampled")
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()

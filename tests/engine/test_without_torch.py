"""On the CPU the native decoder and its drafters generate without torch and transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eagle3_cases import head_shape
from transformers import AutoModelForCausalLM

from specdec_ext.drafters.eagle3.model import Eagle3, save_eagle3
from specdec_ext.drafters.medusa.heads import MedusaHeads, MedusaHeadsConfig, save_medusa_heads
from specdec_ext.drafters.redrafter.model import Redrafter, RedrafterShape, save_redrafter
from tiny_models import save_tiny

HEADS = "{'method': 'medusa', 'model': folder + '/heads'}"
EAGLE3 = "{'method': 'eagle3', 'model': folder + '/eagle3', 'adaptive': False}"
REDRAFTER = "{'method': 'redrafter', 'model': folder + '/redrafter'}"
# (speculative_config, what the requests ask for besides)
METHODS = {
    "plain": ("None", ""),
    "prompt lookup": ("{'method': 'ngram'}", ""),
    "lookahead": ("{'method': 'lookahead'}", ""),
    "draft model": ("{'method': 'draft_target', 'model': folder}", ""),
    "a draft model's own tokenizer": (
        "{'method': 'draft_target', 'model': folder + '/other', 'allow_vocab_mapping': True}",
        "",
    ),
    "Medusa": (HEADS, ""),
    "ReDrafter": (REDRAFTER, ""),
    "EAGLE-3": (EAGLE3, ""),
    "EAGLE-3, sampled": (EAGLE3, "temperature=1.0, acceptance='rejection'"),
    "auto": ("'auto'", ""),
    "several sources": (f"['suffix', {REDRAFTER}]", ""),
    "sampled": ("None", "temperature=1.0"),
    "Medusa, sampled": (HEADS, "temperature=1.0, acceptance='typical'"),
    "ReDrafter, sampled": (REDRAFTER, "temperature=1.0, acceptance='best_beam'"),
}
SCRIPT = """
import sys
from specdec_ext import LLM, SamplingParams
folder = sys.argv[1]
llm = LLM(folder, dtype="bfloat16", speculative_config={config}, max_seq_len=64)
params = SamplingParams(max_tokens=8, ignore_eos=True, {asked})
for output in llm.generate(["ab ab ab ab", "hello"], params, use_tqdm=False):
    assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].text
drafter = llm.get_metrics()["drafter"]
assert drafter is None or drafter["failures"] == 0, drafter
llm.close()
heavy = {{"torch", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and within it heads and a recurrent drafter for it."""
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    content = json.loads((folder / "config.json").read_text())
    hidden, vocab = content["hidden_size"], content["vocab_size"]
    ids = torch.arange(0, vocab, 2)
    config = MedusaHeadsConfig(hidden, vocab, 3, draft_vocab_size=len(ids))
    save_medusa_heads(folder / "heads", MedusaHeads(config, ids), dtype="int8")
    save_tiny(folder / "other", seed=6, backwards=True, num_hidden_layers=1)
    shape = RedrafterShape(vocab, hidden, hidden, 1, True, tie_lm_head=True)
    save_redrafter(Redrafter(shape), folder / "redrafter", dtype=torch.bfloat16)
    target = AutoModelForCausalLM.from_pretrained(folder)
    head = Eagle3(head_shape(target, draft_vocab_size=len(ids)), ids.tolist(), 64)
    save_eagle3(head, folder / "eagle3")
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_methods(folder: Path, method: str) -> None:
    config, asked = METHODS[method]
    script = SCRIPT.format(config=config, asked=asked)
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


BLOCKED = """
import sys
sys.modules.update(torch=None, transformers=None)
sys.path.insert(0, {tests!r})
from pathlib import Path
import wheel_smoke
wheel_smoke.run(Path(sys.argv[1]))
"""


def test_an_environment_that_has_neither(tmp_path: Path) -> None:
    """Everything that the native path offers works, the rest names the extra that it needs."""
    script = BLOCKED.format(tests=str(Path(__file__).resolve().parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "smoke")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "specdec train-medusa needs torch" in done.stderr
    assert "pip install 'specdec_ext[train]'" in done.stderr

"""A repository of examples/triton, filled in for two tiny models, as docs/triton.md does it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from docs_pages import ROOT
from tiny_models import save_tiny

TRITON = ROOT / "examples" / "triton"
MODELS = ("preprocessing", "postprocessing", "specdec", "specdec_draft", "specdec_bls", "ensemble")


def save_models(root: Path) -> tuple[Path, Path]:
    """A target, and a draft model that agrees with it now and then."""
    target = save_tiny(root / "target")
    draft = shutil.copytree(target, root / "draft")
    (draft / "config.json").write_text(
        (draft / "config.json").read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.5')
    )
    return target, draft


def fill(path: Path, python: str = sys.executable, **values: object) -> str:
    """Runs fill_template.py; returns what it has said. Raises CalledProcessError."""
    words = ",".join(f"{name}:{value}" for name, value in values.items())
    command = [python, str(TRITON / "fill_template.py"), "-i", str(path), words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def make_repository(
    folder: Path, target: Path, draft: Path, python: str = sys.executable, **values: object
) -> Path:
    """values  parameters of the engines besides those of this file"""
    shutil.copytree(TRITON / "model_repository", folder)
    decoupled = values.pop("decoupled_mode", "true")

    def put(model: str, **more: object) -> None:
        fill(folder / model / "config.pbtxt", python, triton_max_batch_size=4, **more)

    put("ensemble")
    put("preprocessing", tokenizer_dir=target, preprocessing_instance_count=1)
    put("postprocessing", tokenizer_dir=target, postprocessing_instance_count=1)
    put("specdec_bls", tokenizer_dir=target, decoupled_mode=decoupled, bls_instance_count=1,
        accumulate_tokens="false")  # fmt: skip
    engine = {
        "decoupled_mode": decoupled, "enable_kv_cache_reuse": "true",
        "exclude_input_in_output": "true", "max_tokens_in_paged_kv_cache": 4096, **values,
    }  # fmt: skip
    put("specdec", engine_dir=target, **engine)
    put("specdec_draft", engine_dir=draft, **engine)
    return folder

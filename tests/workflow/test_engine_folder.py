"""Engine folders: what is in them, and what is not what it was."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_cases import LIMITS, Capture, generate, make, tokens_of

from specdec_ext import (
    ModelError,
    SamplingParams,
    UnsupportedConfigError,
    _core,
)
from specdec_ext.cli import main
from specdec_ext.engine import served_cost
from specdec_ext.engine.served_cost import ServedCost, cost_key, shipped
from specdec_ext.llm import LLM
from specdec_ext.workflow.build import BuildOptions
from specdec_ext.workflow.convert import ConvertOptions, convert
from specdec_ext.workflow.engine_folder import EngineFolder

# -- folders that are not what they were ----------------------------------------------------------


@pytest.fixture
def copy(external: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(external, tmp_path / "copy"))


def edit(engine: Path, **values: Any) -> None:
    """Change engine.json, and the manifest with it."""
    from specdec_ext.models.folder_cache import file_entries, write_manifest

    content = {**json.loads((engine / "engine.json").read_text()), **values}
    (engine / "engine.json").write_text(json.dumps(content))
    manifest = json.loads((engine / "manifest.json").read_text())
    (engine / "manifest.json").unlink()
    write_manifest(engine, {**manifest, "files": file_entries(engine)})


def test_a_copy_is_an_engine(copy: Path) -> None:
    """Readable for whom the others' files are, and built again where it lies now."""
    assert generate(copy) == 0
    assert (copy / "model" / "step_cost.json").stat().st_mode & 0o777 == 0o644
    assert f"--output_dir={copy.resolve()}" in EngineFolder.open(copy).command


def test_a_quiet_build_and_conversion(long_tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    """--log_level=error, as the documents' build has it."""
    folder = tmp_path / "ckpt"
    command = ["convert", f"--model_dir={long_tiny}", f"--output_dir={folder}"]
    assert main([*command, "--workers=2", "--log_level=error"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and " in 1 shard, " in said.out
    make(folder, tmp_path / "engine", "--gemm_plugin=float16", "--log_level=error")
    assert capsys.readouterr().err == ""


def test_the_times_of_a_build_reach_to_many_rows(external: Path) -> None:
    rows = json.loads((external / "model" / "step_cost.json").read_text())["rows"]
    assert rows[0] == 1 and rows[-1] == 96  # the pages hold no 128 behind the context


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("half", "manifest.json is missing: not a complete engine"),
        ("shard", "model-00001.safetensors: is missing; build it again: specdec build"),
        ("checksum", "config.json: is not the file that was written"),
        ("version", "built for specdec_ext '0.0.1', this is"),
        ("isa", "built for instruction set 'avx1024', this is"),
        ("format", "version = 99, this specdec_ext reads 2"),
        ("field", "max_seq_len is missing"),
    ],
)
def test_a_damaged_or_foreign_engine_is_refused(
    damage: str, words: str, copy: Path, capsys: Capture
) -> None:
    if damage == "half":
        (copy / "manifest.json").unlink()
    elif damage == "shard":
        (copy / "model" / "model-00001.safetensors").unlink()
    elif damage == "checksum":
        config = copy / "model" / "config.json"
        config.write_text(config.read_text().replace("32", "33", 1))
    elif damage == "version":
        edit(copy, built_by="0.0.1")
    elif damage == "isa":
        edit(copy, isa="avx1024")
    elif damage == "format":
        edit(copy, version=99)
    else:
        content = json.loads((copy / "engine.json").read_text())
        del content["max_seq_len"]
        (copy / "engine.json").write_text(json.dumps(content))
    assert generate(copy) == 4
    said = capsys.readouterr().err
    assert words in said and "build" in said


@pytest.mark.parametrize("what", ["nothing", "file", "model", "checkpoint"])
def test_what_is_no_engine(
    what: str, long_tiny: Path, checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "file").write_text("")
    folder = {"model": long_tiny, "checkpoint": checkpoint}.get(what, tmp_path / what)
    assert generate(folder) == 4
    said = capsys.readouterr().err
    remedy = {
        "model": f"a model, not an engine; name it with --model, or .* --model_dir={folder} ",
        "checkpoint": f"a checkpoint, not an engine; .*specdec build --checkpoint_dir={folder} ",
    }
    assert re.search(remedy.get(what, "specdec build"), said)
    command = ["build", f"--checkpoint_dir={folder}", f"--output_dir={tmp_path / 'engine'}"]
    if what != "checkpoint":
        assert main(command) == 4
        source = folder if what in ("model", "file") else "MODEL"
        said = capsys.readouterr().err
        assert f"specdec convert --model_dir={source} --output_dir=" in said


def test_an_engine_is_no_checkpoint(external: Path, tmp_path: Path, capsys: Capture) -> None:
    command = ["build", f"--checkpoint_dir={external}", f"--output_dir={tmp_path / 'engine'}"]
    assert main(command) == 4
    said = capsys.readouterr().err
    assert "not a checkpoint: it is an engine" in said and "--output_dir=CHECKPOINT" in said


def test_two_models_are_one_too_many(external: Path, capsys: Capture) -> None:
    assert generate(external, "--model=x") == 2
    assert generate(external, "--quantization=int8") == 2
    assert "before the engine is built" in capsys.readouterr().err


# -- step times -----------------------------------------------------------------------------------


def test_the_engine_brings_its_step_times(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_cost, "cache_root", lambda: tmp_path)
    with LLM(EngineFolder.open(external).model) as llm:
        told: list[Any] = []
        served = ServedCost(llm.model, told.append)
        served.start()
        table = shipped(llm.model.info.path, cost_key(llm.model))
        assert table is not None and not served.is_guess
        assert told[0].columns == table.columns
        _core.set_num_threads(_core.num_threads() + 1)
        try:  # of another machine it is no prior
            assert shipped(llm.model.info.path, cost_key(llm.model)) is None
            assert ServedCost(llm.model, told.append).is_guess
        finally:
            _core.set_num_threads(_core.num_threads() - 1)


def test_refusals_have_the_documented_classes(external: Path) -> None:
    with pytest.raises(ModelError):
        EngineFolder.open(external / "model")
    with pytest.raises(UnsupportedConfigError):
        BuildOptions(max_beam_width=4)


def test_an_engine_is_not_taken_for_a_model(external: Path) -> None:
    with pytest.raises(ModelError, match=r"is an engine folder.*--engine_dir"):
        LLM(external)


def test_an_engine_decodes_without_torch(external: Path) -> None:
    script = """
import sys
from specdec_ext.cli import main
command = ["generate", "--engine_dir", sys.argv[1], "--input_text", "abc", "--max_output_len=4"]
assert main([*command, "--prompt_lookup_config=[4,2]"]) == 0
assert not {"torch", "transformers"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script, str(external)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("drafts", [[], ["--max_draft_len=12"]])
def test_an_engine_that_drafts_by_itself(
    drafts: list[str], checkpoint: Path, tmp_path: Path, plain_tokens: list[int], capsys: Capture
) -> None:
    """Mode auto: suffix decoding and predictions, as LLM() drafts a model without a drafter."""
    engine = make(checkpoint, tmp_path / "auto", "--speculative_decoding_mode=auto", *drafts)
    assert EngineFolder.open(engine).max_draft_len == (12 if drafts else 24)
    capsys.readouterr()
    for asked in ([], ["--suffix", "--max_draft_len=5"], ["--prompt_lookup_config=[10,2,[0]]"]):
        assert generate(engine, *asked) == 0
        said = capsys.readouterr().out
        assert tokens_of(said) == plain_tokens
        metrics = json.loads(said.splitlines()[-1])["metrics"]
        assert "speculative_decoding" in metrics
    assert generate(engine, "--lookahead_config=[2,2,2]") == 4
    assert "asked for lookahead" in capsys.readouterr().err


# -- packed weights -------------------------------------------------------------------------------


def test_an_engine_maps_its_packed_weights(external: Path, plain_tokens: list[int]) -> None:
    engine = EngineFolder.open(external)
    with engine.load() as llm:
        (output,) = llm.generate("abcabc", SamplingParams(max_tokens=12), use_tqdm=False)
        maps = Path("/proc/self/maps").read_text()
        assert str(engine.model / "packed.bin") in maps
        assert str(engine.model / "model-00001.safetensors") not in maps
    assert list(output.outputs[0].token_ids) == plain_tokens


@pytest.mark.parametrize("how", ["truncated", "altered", "layout"])
def test_packed_weights_that_are_not_what_they_were(how: str, copy: Path, capsys: Capture) -> None:
    path = copy / "model" / "packed.bin"
    data = bytearray(path.read_bytes())
    if how == "layout":  # built by another version that has the same number, as a developer's has
        data[12] = 99
        path.write_bytes(data)
        edit(copy)
    elif how == "altered":
        data[-100] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(data[:-64])
    assert generate(copy) == 4
    said = capsys.readouterr().err
    assert "packed.bin" in said and "build it again: specdec build --checkpoint_dir" in said
    assert ("layout of packs 99, this specdec_ext reads 1" in said) == (how == "layout")


def test_narrow_weights_are_packed_as_they_are(long_tiny: Path, tmp_path: Path) -> None:
    options = ConvertOptions(quantization="int4")
    folder = convert(long_tiny, tmp_path / "ckpt", options).folder
    engine = EngineFolder.open(make(folder, tmp_path / "engine"))
    params = SamplingParams(max_tokens=12)
    with engine.load() as llm, LLM(long_tiny, quantization="int4") as narrowed:
        outputs = [m.generate("abcabc", params, use_tqdm=False)[0] for m in (llm, narrowed)]
        assert llm.model.info.dtype == "q4_1"
        assert str(engine.model / "packed.bin") in Path("/proc/self/maps").read_text()
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


FULL = """
import resource, sys
from specdec_ext.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_leaves_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    """The weights are links; the packed ones do not fit any more."""
    target = tmp_path / "above" / "engine"
    command = ["build", f"--checkpoint_dir={checkpoint}", f"--output_dir={target}", *LIMITS]
    done = subprocess.run([sys.executable, "-c", FULL, *command], capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "cannot be written (File too large); free space, or name another folder" in last
    assert not (tmp_path / "above").exists()
    assert generate(make(checkpoint, tmp_path / "engine")) == 0  # the checkpoint is what it was


def test_an_engine_is_built_without_torch(checkpoint: Path, tmp_path: Path) -> None:
    script = """
import sys
from specdec_ext.cli import main
command = ["build", f"--checkpoint_dir={sys.argv[1]}", f"--output_dir={sys.argv[2]}"]
assert main([*command, "--max_batch_size=2", "--max_seq_len=1024"]) == 0
assert not {"torch", "transformers"} & set(sys.modules)
"""
    target = tmp_path / "engine"
    done = subprocess.run([sys.executable, "-c", script, checkpoint, target], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert (target / "model" / "step_cost.json").is_file()

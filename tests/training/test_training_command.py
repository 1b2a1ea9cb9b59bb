"""The commands as a user types them: their own messages in, a drafter out, used by the next."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from workshop import sentences

from specdec_ext.cli import main
from specdec_ext.errors import ModelError
from specdec_ext.report.read import read_result
from specdec_ext.training.work_folder import own_work_folder

SMALL = {
    "medusa": ["--num-heads", "2"],
    "redrafter": ["--draft-len", "3"],
    "drafter": ["--intermediate-size", "32"],
    "eagle3": ["--intermediate-size", "32", "--draft-len", "3"],
}


def command(product: str, target: Path, folder: Path, *more: str) -> list[str]:
    return [
        f"train-{product}", "--model", str(target), "--output", str(folder / product),
        "--cache_dir", str(folder / "cache"), "--work-dir", str(folder / f"work-{product}"),
        "--max-new-tokens", "24", "--max-prompt-len", "48", "--steps", "30", "--learning-rate",
        "0.01", "--draft-vocab-size", "64", "--measure-prompts", "2", "--measure-tokens", "16",
        *SMALL[product], *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.mark.parametrize("product", ["medusa", "redrafter", "drafter", "eagle3"])
def test_messages_in_a_drafter_out_and_the_next_command_uses_it(
    product: str,
    target: Path,
    messages: Path,
    shared: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(shared / "root"))
    plots = ["--plots"] if product == "medusa" else []
    assert main(command(product, target, shared, "--data", str(messages), *plots)) == 0
    said = capsys.readouterr()
    assert "estimate: collecting: about " in said.err and "training 30/30" in said.err
    # The first command has collected for all.
    assert ("collecting 60/60" in said.err) == (product == "medusa")
    lines = said.out.splitlines()
    assert "held-out top-1 accuracy by position" in lines[0]
    assert "2 held-out prompts: " in lines[1] and "2 of 2 texts equal to plain" in lines[1]
    words = shlex.split(lines[2].removeprefix("use it: "))
    assert words[:2] == ["specdec", "generate"] and words[-1] == "..."
    assert main([*words[1:-1], "the cat sat", "--max_output_len", "12", "--verify"]) == 0
    assert "identical: yes" in capsys.readouterr().out

    folder = shared / product
    card = json.loads((folder / "training_card.json").read_text())
    assert card["data"]["train_texts"] == 57 and card["data"]["texts"] == "given"
    assert card["training"]["last_loss"] < card["training"]["first_loss"] + 1e-9
    assert card["measured"]["equal_to_plain"] == 2 and card["run"]["ranks"] == 1
    [(name, source)] = card["data"]["sources"].items()
    assert name == "mine.jsonl" and source.startswith("the user's own data: given with its answers")
    assert str(shared) not in json.dumps(card)
    text = (folder / "TRAINING_CARD.md").read_text()
    assert "tokens per pass with every draft verified" in text and card["use"] in text
    log = read_result(folder / "training_log.json")
    assert {"loss", "learning-rate", "accuracy", "speed"} <= {f.slug for f in log.figures}
    assert (folder / "report.html").is_file() == bool(plots)


def test_prompts_alone_are_answered_by_the_target(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(sentences(3, 30, 3)))
    (tmp_path / "evaluation.txt").write_text("What nothing may be trained on.")
    arguments = command(
        "medusa", target, tmp_path, "--prompts", str(prompts), "--chat-template", "none",
        "--exclude", str(tmp_path / "evaluation.txt"), "--measure-prompts", "0", "--seed", "3",
    )  # fmt: skip
    assert main(arguments) == 0
    card = json.loads((tmp_path / "medusa" / "training_card.json").read_text())
    assert card["data"]["texts"] == "written by the target" and card["measured"] is None
    made = card["command"]
    assert made.startswith("specdec train-medusa --prompts prompts.txt --exclude evaluation.txt")
    assert "--chat-template none" in made and made.endswith("--seed 3")
    capsys.readouterr()
    assert main([*arguments, "--draft-len", "3"]) == 4
    assert "--draft-len: an option of train-redrafter and train-eagle3;" in capsys.readouterr().err


def test_runs_do_not_get_in_each_others_way(
    target: Path, messages: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Without folders of their own: other data and settings are another run, and nothing of a
    finished one stays but its texts."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "root"))
    for more in (["--num-prompts", "40"], ["--num-prompts", "50"], ["--learning-rate", "0.1"]):
        words = [
            "train-medusa", "--model", str(target), "--output", str(tmp_path / "heads"), "--data",
            str(messages), "--steps", "2", "--draft-vocab-size", "64", "--max-new-tokens", "24",
            "--measure-prompts", "0", *more,
        ]  # fmt: skip
        assert main(words) == 0
    [cache] = (tmp_path / "root" / "training").iterdir()
    assert cache.name.startswith("target") and len(list(cache.glob("shard-*"))) == 3


def test_another_output_goes_on_from_the_same_checkpoint(
    target: Path, messages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "root"))
    folders: list[Path] = []

    def collect(prepared: Any, *_: Any) -> None:
        folders.append(prepared.work_dir)
        raise ModelError("enough")

    monkeypatch.setattr("specdec_ext.training.run._collect", collect)
    for more in (["--output", "one"], ["--output", "two"], ["--output", "one", "--steps", "3"]):
        words = ["train-medusa", "--model", str(target), "--data", str(messages), *more]
        assert main([*words, "--draft-vocab-size", "64", "--max-new-tokens", "24"]) == 4
    assert folders[0] == folders[1] != folders[2]


def test_one_run_at_a_time_has_a_work_folder(
    target: Path, messages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command("medusa", target, tmp_path, "--data", str(messages), "--measure-prompts", "0")
    work = tmp_path / "work-medusa"
    with own_work_folder(work):
        assert main(words) == 4
    said = capsys.readouterr()
    assert f"{work}: another run with the same data and settings" in said.err
    assert "--work-dir" in said.err and "collecting" not in said.err
    assert list(tmp_path.iterdir()) == []  # nothing is left of either
    assert main(words) == 0
    said = capsys.readouterr()
    assert "training 30/30" in said.err and "measuring" not in said.err


def test_a_work_folder_that_cannot_be_made(
    target: Path, messages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "work-medusa").write_text("a file")
    words = command("medusa", target, tmp_path, "--data", str(messages))
    assert main(words) == 4
    assert "the checkpoint cannot be written" in capsys.readouterr().err


def test_bad_data_are_one_message_and_nothing_is_written(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "Hi?"}]}\n')
    assert main(command("medusa", target, tmp_path, "--data", str(bad))) == 4
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert f"{bad}, line 1: a conversation without an answer" in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


# As the command itself; then each rank says which threads of Gloo are left.
RANK = """
import sys
from pathlib import Path
from specdec_ext.cli import main
status = main(sys.argv[1:])
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
sys.stderr.write(f"left: {sum('gloo' in name for name in names)}\\n")
sys.exit(status)
"""


def test_two_ranks_train_as_one_process_does(target: Path, messages: Path, tmp_path: Path) -> None:
    """torchrun over Gloo: both collect, the loss of every step is that of one process on the same
    texts, and so are the weights, but for sums in another order. No thread of Gloo is left beside
    an interpreter that ends: it could abort the process."""
    logs, weights = [], []
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        words = command(
            "medusa", target, folder, "--data", str(messages), "--batch-texts", "6", "--steps",
            "8", "--precision", "float32", "--measure-prompts", "0", "--threads", "1",
        )  # fmt: skip
        if name == "one":
            assert main(words) == 0
        else:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            run = subprocess.run(
                [sys.executable, *launch, str(script), *words],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert run.returncode == 0, run.stderr
            assert run.stderr.count("left: 0\n") == 2, run.stderr
            assert run.stdout.count("held-out top-1") == 1  # the first rank speaks
        card = json.loads((folder / "medusa" / "training_card.json").read_text())
        assert card["run"]["ranks"] == (1 if name == "one" else 2)
        logs.append(json.loads((folder / "medusa" / "training_log.json").read_text())["losses"])
        names = sorted(path.name for path in (folder / "cache").iterdir())
        weights.append(names)
    assert weights[0] == weights[1] and not any("pending" in name for name in weights[0])
    assert len(logs[0]) == 8
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)


@pytest.mark.slow
def test_two_thousand_messages(
    default_model_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
) -> None:
    """A drafter for the default model from 2,000 messages by one command, used by the next."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "root"))
    data = tmp_path / "mine.jsonl"
    with data.open("w") as file:
        for i in range(1000):  # two messages each
            a, b, c = i % 97, i % 89 + 2, i % 13 + 2
            turns = [
                {"role": "user", "content": f"What is {a} + {b} * {c}?"},
                {"role": "assistant", "content": f"{b} * {c} = {b * c}, so it is {a + b * c}."},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    words = [
        "train-drafter", "--model", str(default_model_path), "--data", str(data), "--output",
        str(tmp_path / "drafter"), "--steps", "300", "--cache-dir", str(tmp_path / "cache"),
        "--work-dir", str(tmp_path / "work"),
    ]  # fmt: skip
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    card = json.loads((tmp_path / "drafter" / "training_card.json").read_text())
    with capsys.disabled():
        print("\n".join(said), json.dumps(card["run"], indent=1), card["held_out"]["accuracy"])
    assert card["data"]["train_texts"] + card["data"]["held_out_texts"] == 1000
    # Most tokens of such regular answers can be told; an untrained drafter tells next to none.
    assert card["held_out"]["accuracy"][0] > 0.5
    assert card["measured"]["equal_to_plain"] == card["measured"]["prompts"] == 8
    words = shlex.split(said[-1].removeprefix("use it: "))
    assert main([*words[1:-1], "What is 5 + 7 * 3?", "--max_output_len", "40", "--verify"]) == 0
    assert "identical: yes" in capsys.readouterr().out

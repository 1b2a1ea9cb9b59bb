"""Ranks that die, hang, differ or do not fit: one message, and no process is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec_ext import LLM, SamplingParams, _core
from specdec_ext.errors import ConfigError, EngineError, ModelError
from specdec_ext.models import load as load_module
from specdec_ext.parallel import team as team_module
from tiny_models import save_tiny

LIMIT = 120  # seconds; a hang, not a measurement
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("lost"))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = _core.num_threads()
    yield
    _core.set_num_threads(before)


def open_two(folder: Path) -> LLM:
    return LLM(folder, tensor_parallel_size=2, speculative_config=None, device="cpu")


def follower_of(llm: LLM) -> int:
    assert llm._team is not None
    return int(llm._team._processes[0].pid)


def wait_gone(pid: int) -> bool:
    """No such process, or one that has ended and waits for its parent to look; within 200 looks."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped(
    folder: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team_module, "HEARTBEAT_S", 1.0)
    with open_two(folder) as llm:
        pid = follower_of(llm)
        stream = llm.stream("one two", LONG)
        assert next(stream).outputs[0].token_ids
        os.kill(pid, how)
        expected = "killed by SIGKILL" if how == signal.SIGKILL else "no heartbeat for 1 s"
        with pytest.raises(EngineError, match=f"rank 1 of 2 .*{expected}") as lost:
            for _ in stream:
                pass
        assert wait_gone(pid)  # a stopped one, too
        with pytest.raises(EngineError):
            llm.generate("three", LONG, use_tqdm=False)
        with pytest.raises(EngineError) as again:
            llm.model.forward(_core.make_step_plan([[1]], kv_len=[0], page_table=[[0]]))
        assert str(again.value) == str(lost.value)


def test_a_rank_that_is_stopped_while_it_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no step to miss: its heartbeat stops."""
    monkeypatch.setattr(team_module, "HEARTBEAT_S", 2.0)
    started: list[Any] = []
    load = team_module.Team.load

    def stopping(team: Any, arguments: dict[str, Any]) -> None:
        started.append(team._processes[0])
        os.kill(started[0].pid, signal.SIGSTOP)
        load(team, arguments)

    monkeypatch.setattr(team_module.Team, "load", stopping)
    with pytest.raises(EngineError, match="no heartbeat for 2 s while it was loading"):
        open_two(folder)
    assert started[0].poll() is not None


def test_a_rank_that_dies_while_rank_0_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is seen behind the next layer, not behind the last."""
    read: list[int] = []
    load, look = team_module.Team.load, team_module.Team.look

    def killing(team: Any, arguments: dict[str, Any]) -> None:
        load(team, arguments)
        team._processes[0].kill()
        team._processes[0].wait()

    monkeypatch.setattr(team_module.Team, "load", killing)
    monkeypatch.setattr(team_module.Team, "look", lambda team: (read.append(1), look(team)))
    with pytest.raises(EngineError, match=r"killed by SIGKILL.* while it was loading its weights"):
        open_two(folder)
    assert read == [1]


def test_a_rank_that_is_stopped_before_it_speaks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team_module, "HEARTBEAT_S", 1.0)
    started: list[Any] = []
    popen = subprocess.Popen

    def stopped(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        os.kill(started[0].pid, signal.SIGSTOP)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", stopped)
    with pytest.raises(EngineError, match="no heartbeat for 1 s while it was starting"):
        open_two(folder)
    assert started[0].poll() is not None


def test_a_rank_that_loads_slowly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats are all that is asked of it."""
    monkeypatch.setattr(team_module, "HEARTBEAT_S", 2.0)
    script = (
        "import sys, time; from specdec_ext.engine import follower; from specdec_ext.parallel "
        "import team; team.HEARTBEAT_S = 2.0; load = follower.load_model; follower.load_model = "
        "lambda *a, **k: (time.sleep(5.0), load(*a, **k))[1]; "
        "sys.exit(follower.main(*map(int, sys.argv[1:])))"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda a, **k: popen([a[0], "-c", script, *a[3:]], **k)
    )
    with open_two(folder) as llm:
        assert llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=False)


def test_a_rank_says_why_it_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_two(folder) as llm:
        pid = follower_of(llm)
        assert llm._team is not None
        llm._team.tell(team_module.FORWARD, b"\1\0\0\0")  # no plan
        with pytest.raises(EngineError, match="rank 1 of 2 failed: ValueError: plan packet"):
            llm.generate("three", LONG, use_tqdm=False)
        assert wait_gone(pid)


def test_ranks_with_other_files_or_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(load_module, "model_fingerprint", lambda _: "other")
        with pytest.raises(
            ModelError, match=r"rank 1 of 2: .* holds other files here.*copy the same"
        ):
            open_two(folder)
    started: list[Any] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    monkeypatch.setattr(team_module, "program_fingerprint", lambda: "specdec_ext 0.0")
    with pytest.raises(ConfigError, match=r"rank 1 runs specdec_ext .*rank 0 runs specdec_ext 0.0"):
        open_two(folder)
    assert [wait_gone(process.pid) for process in started] == [True]


SCRIPT = """
import sys
from specdec_ext import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, speculative_config=None, device="cpu")
print(llm._team._processes[0].pid, flush=True)
if sys.argv[2] != "idle":
    llm.generate(["one two"] * 200, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("how", "state"), [(signal.SIGKILL, "idle"), (signal.SIGKILL, "busy"), (signal.SIGINT, "busy")]
)
def test_nothing_is_left_of_rank_0(folder: Path, how: signal.Signals, state: str) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), state],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        time.sleep(0.3)
        os.killpg(run.pid, how)  # as a terminal sends it
        _, errors = run.communicate(timeout=LIMIT)
        assert wait_gone(pid)
        if how == signal.SIGINT:
            assert run.returncode == -signal.SIGINT
            assert errors.count("Traceback") == 1 and "KeyboardInterrupt" in errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def run_torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--standalone", "-m", "specdec_ext", "generate", "--model", str(folder),
         "--device", "cpu", "--max-tokens", "20", "--prompt", "ab", "--json",
         *arguments],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip


def test_torchrun(folder: Path) -> None:
    with LLM(folder, speculative_config=None, device="cpu") as llm:
        text = llm.generate("ab", SamplingParams(max_tokens=20), use_tqdm=False)[0].outputs[0].text
    run = run_torchrun(folder)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["text"] == text


def test_a_port_that_says_nothing(folder: Path) -> None:
    """Not two minutes in which the ranks look for each other."""
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--master-port", "0", "-m", "specdec_ext", "generate", "--model", str(folder),
         "--device", "cpu", "--prompt", "ab"],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert run.returncode != 0 and not run.stdout
    assert run.stderr.count("MASTER_PORT = 0: ") == 1 and "--standalone" in run.stderr


def test_a_port_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = subprocess.run(
            [sys.executable, "-m", "specdec_ext", "generate", "--model", str(folder),
             "--device", "cpu", "--prompt", "ab"],
            env={**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(taken.getsockname()[1])},
            capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
    assert run.returncode == ConfigError.exit_code, run.stderr
    assert "cannot meet the others at 127.0.0.1:" in run.stderr
    assert "choose a free port" in run.stderr


@pytest.mark.slow
def test_torchrun_in_fast_mode(folder: Path) -> None:
    """Gloo gathers what shared memory does."""
    with LLM(folder, tensor_parallel_size=2, speculative_config=None, device="cpu",
             numerics="fast") as llm:  # fmt: skip
        text = llm.generate("ab", SamplingParams(max_tokens=20), use_tqdm=False)[0].outputs[0].text
    run = run_torchrun(folder, "--numerics", "fast")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["text"] == text


@pytest.mark.slow
def test_torchrun_with_another_number_of_ranks(folder: Path) -> None:
    run = run_torchrun(folder, "--tensor-parallel-size", "4")
    assert run.returncode != 0 and not run.stdout
    assert run.stderr.count("tensor_parallel_size = 4 but torchrun has started 2 ranks") == 1

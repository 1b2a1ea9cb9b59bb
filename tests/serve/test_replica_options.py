"""What `specdec serve --replicas` asks of Ray, with a stand-in for Ray: each replica's threads."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from specdec_ext import ConfigError
from specdec_ext.cli import main
from specdec_ext.serve.settings import ServerSettings


class Deployment:
    """Keeps what it is bound to."""

    def __init__(self, made: type) -> None:
        self.made = made
        self.bound: tuple[Any, ...] = ()

    def options(self, **_: Any) -> Deployment:
        return Deployment(self.made)

    def bind(self, *arguments: Any) -> Deployment:
        self.bound = arguments
        return self


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """specdec_ext.serve.ray over the stand-in."""
    serve, config, handle = (ModuleType(f"ray.serve{name}") for name in ("", ".config", ".handle"))
    stand_in: Any = ModuleType("ray")
    stand_in.serve = serve
    serve.deployment = lambda **_: Deployment  # type: ignore[attr-defined]
    serve.Application = Deployment  # type: ignore[attr-defined]
    for name in ("AutoscalingConfig", "RequestRouterConfig"):
        setattr(config, name, dict)
    handle.DeploymentHandle = object  # type: ignore[attr-defined]
    for module in (stand_in, serve, config, handle):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "specdec_ext.serve.ray", raising=False)
    yield importlib.import_module("specdec_ext.serve.ray")
    sys.modules.pop("specdec_ext.serve.ray", None)


def test_each_replica_takes_its_threads(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(ray, "set_num_threads", done.append)
    monkeypatch.setattr(ray, "LLM", lambda **_: done.append("engine"))
    monkeypatch.setattr(ray, "create_app", lambda llm, settings: None)
    settings = ServerSettings(served_model_names=["m"])
    for threads in (3, None):
        app = ray.make_app({}, settings, ray.ReplicaOptions(2, num_threads=threads))
        replicas = app.bound[0]
        replicas.made(*replicas.bound)
    assert done == [3, "engine", "engine"]
    by_name = ray.app({"num_threads": "2"}).bound[0]
    assert by_name.bound[-1] == 2
    with pytest.raises(ConfigError, match=r"num_threads = 257: out of range, allowed 1\.\.256"):
        ray.ReplicaOptions(num_threads=257)


def test_the_command_passes_threads_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "specdec_ext.serve.replicas.run_replicas", lambda *_, scaling, **__: seen.append(scaling)
    )
    assert main(["serve", "--replicas", "2", "--threads", "3"]) == 0
    assert seen == [{"num_replicas": 2, "num_threads": 3}]
    assert main(["serve", "--replicas", "2", "--threads", "0"]) == 4
    assert "--threads = 0: out of range" in capsys.readouterr().err

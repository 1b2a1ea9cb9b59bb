"""The processor's name: what is measured on one generation is not taken for another's."""

from __future__ import annotations

import io
import platform

import pytest

from specdec_ext import installation

ZEN_4 = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n"
ZEN_5 = "processor\t: 1\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (ZEN_4, "AMD EPYC, family 25, model 17"),
        (ZEN_5 + ZEN_4, "AMD EPYC, family 26, model 2"),
        ("model name\t: Some CPU\n", "Some CPU"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", platform.processor() or platform.machine()),
        ("", platform.processor() or platform.machine()),
    ],
)
def test_generations_of_one_name_differ(
    monkeypatch: pytest.MonkeyPatch, text: str, name: str
) -> None:
    monkeypatch.setattr(
        installation, "open", lambda *args, **kwargs: io.StringIO(text), raising=False
    )
    assert installation.cpu_name() == name


def test_a_system_without_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> io.StringIO:
        raise FileNotFoundError

    monkeypatch.setattr(installation, "open", refuse, raising=False)
    assert installation.cpu_name() == (platform.processor() or platform.machine())

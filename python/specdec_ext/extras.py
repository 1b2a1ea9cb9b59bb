"""Packages that only parts of this one need, and the extra of pyproject.toml that brings each."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .errors import ConfigError

__all__ = ["EXTRA_OF", "MissingPackageError", "missing", "named_extras", "require"]

# Import name -> (distribution, extra).
EXTRA_OF: Mapping[str, tuple[str, str]] = {
    "torch": ("torch", "torch"),
    "transformers": ("transformers", "transformers"),
    "matplotlib": ("matplotlib", "plots"),
    "pyarrow": ("pyarrow", "data"),
    "rouge_score": ("rouge-score", "summarize"),
    "openai": ("openai", "chat"),
    "prompt_toolkit": ("prompt-toolkit", "chat"),
    "aiperf": ("aiperf", "bench"),
    "guidellm": ("guidellm", "bench"),
}


class MissingPackageError(ConfigError):
    """What was asked for needs a package of an extra that is not installed."""


def missing(package: str, who: str, extra: str | None = None) -> MissingPackageError:
    """The error that names package, extra and the command that installs it.

    package  its import name
    who      what needs it, as the beginning of a sentence: "--png"
    extra    one that brings more of what `who` needs; None: the package's own
    """
    distribution, own = EXTRA_OF[package]
    return MissingPackageError(
        f"{who} needs {distribution}, which is not installed: "
        f"pip install 'specdec_ext[{extra or own}]'"
    )


def require(package: str, who: str, extra: str | None = None) -> None:
    """Raises MissingPackageError unless the package can be imported; see missing()."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if _package_of(error) != package:
            raise
        raise missing(package, who, extra) from None


@contextmanager
def named_extras(who: str) -> Iterator[None]:
    """Imports below that fail for want of an extra's package raise MissingPackageError."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = _package_of(error)
        if package not in EXTRA_OF:
            raise
        raise missing(package, who) from error


def _package_of(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]

"""The typed errors of the package.

Every refusal is one of these classes and its text names the field or file, the value, the limit
and the remedy. `exit_code` is what the command line returns for the class (docs/usage.md).
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "CapacityError",
    "ConfigError",
    "EngineError",
    "ModelError",
    "QueueFullError",
    "RequestError",
    "SpecdecError",
    "SyntheticAcceptanceWarning",
    "UnsupportedConfigError",
    "UnsupportedModelError",
    "UnsupportedRequestError",
]


class SpecdecError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code: ClassVar[int] = 1


class SyntheticAcceptanceWarning(UserWarning):
    """This engine's text is not the model's: drafts are kept at given rates, to measure speed."""


class ConfigError(SpecdecError, ValueError):
    """A configuration that contradicts itself, another one, or the limits of the engine."""

    exit_code: ClassVar[int] = 4


class UnsupportedConfigError(ConfigError):
    """A configuration that is well formed but asks for something this version does not do."""

    exit_code: ClassVar[int] = 3


class RequestError(SpecdecError, ValueError):
    """A request that is malformed or does not fit the engine; other requests are not affected."""

    exit_code: ClassVar[int] = 2


class UnsupportedRequestError(RequestError):
    """A request that is well formed but asks for something this version does not do."""

    exit_code: ClassVar[int] = 3


class CapacityError(RequestError):
    """A request that could never run: it needs more KV pages or positions than the engine has."""

    exit_code: ClassVar[int] = 1


class QueueFullError(RequestError):
    """The engine holds as many unfinished requests as it may; send the same request later."""

    exit_code: ClassVar[int] = 1


class ModelError(SpecdecError, ValueError):
    """A checkpoint, tokenizer or model folder that is missing, damaged or inconsistent."""

    exit_code: ClassVar[int] = 4


class UnsupportedModelError(ModelError):
    """A sound model that the chosen implementation cannot run faithfully."""

    exit_code: ClassVar[int] = 3


class EngineError(SpecdecError, RuntimeError):
    """The engine cannot serve: it is closed, or a request failed while it ran."""

    exit_code: ClassVar[int] = 1

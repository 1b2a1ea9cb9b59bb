"""What an operator chooses for a server; everything about the model is LLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ..config.validate import check_bool, check_choice, check_float, check_int, check_str, show
from ..errors import ConfigError
from ..models.default import MODEL_NAME

__all__ = ["PER_REQUEST_METRICS", "ServerSettings", "name_of_model"]

PER_REQUEST_METRICS = ("none", "summary", "detailed")
MIN_KEY_CHARS = 8
DAY = 86400.0


def _check_origin(where: str, text: str) -> None:
    """Raises ConfigError for what no browser sends as a page's origin."""
    if text in ("*", "null"):
        return
    try:
        parts = urlsplit(text)
        origin = f"{parts.scheme}://{parts.netloc}".lower()
    except ValueError:  # half of an IPv6 address
        parts, origin = urlsplit(""), ""
    if not parts.scheme or not parts.netloc:
        raise ConfigError(
            f"{where} = {show(text)}: expected an origin such as http://127.0.0.1:3000, or *"
        )
    if text != origin:
        raise ConfigError(
            f"{where} = {show(text)}: an origin has no path, no slash at its end and no capitals; "
            f"give {origin}"
        )


def name_of_model(model: str | Path | None) -> str:
    """What requests call a model, LLM's argument, where nothing else is said."""
    return MODEL_NAME if model is None else Path(model).resolve().name


@dataclass(frozen=True)
class ServerSettings:
    """Names, limits and keys of one server. Raises ConfigError.

    served_model_names   what requests may call the model; the first is the one that answers carry
    api_keys             a request needs one of them; none: every request is served. Each key is a
                         tenant: no cached prompt and no pool is shared between two
    max_body_bytes       of a request's body; more is a 413
    body_seconds         for the body of a request to arrive; more is a 408
    request_seconds      for an answer, from submission on; more is a 504, or a stream's last event
    send_seconds         for a client to take an event; one that does not is disconnected
    drain_seconds        for answers that are running when the server is told to stop
    default_temperature  of requests that name none; OpenAI's is 1
    cors_origins         origins whose pages may call the server, "http://127.0.0.1:3000", or "*";
                         none: CORS is off
    per_request_metrics  `metrics` in answers: "none", "summary", or "detailed" (lists per step)
    log_prompts          write prompts and answers into the access log
    """

    served_model_names: Sequence[str]
    api_keys: Sequence[str] = field(default=(), repr=False)
    max_body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    send_seconds: float = 30.0
    drain_seconds: float = 30.0
    default_temperature: float = 1.0
    cors_origins: Sequence[str] = ()
    per_request_metrics: str = "summary"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        where = "ServerSettings."
        if not self.served_model_names:
            raise ConfigError(f"{where}served_model_names is empty: requests need a name to use")
        for name in ("served_model_names", "api_keys", "cors_origins"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"{where}{name} is one text: give a list of them")
            for i, text in enumerate(getattr(self, name)):
                check_str(f"{where}{name}[{i}]", text, ConfigError, max_len=512)
        if "" in self.served_model_names:
            raise ConfigError(
                f"{where}served_model_names has an empty name, which no request could use; give "
                "one, or none for the folder's"
            )
        for i, origin in enumerate(self.cors_origins):
            _check_origin(f"{where}cors_origins[{i}]", origin)
        for i, key in enumerate(self.api_keys):
            if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"{where}api_keys[{i}] has {len(key)} characters: a key is at least "
                    f"{MIN_KEY_CHARS} printable ASCII characters; make one that nobody can guess"
                )
        check_int(where + "max_body_bytes", self.max_body_bytes, ConfigError, low=1024)
        for name in ("body_seconds", "request_seconds", "send_seconds"):
            check_float(
                where + name, getattr(self, name), ConfigError, above=0.0, high=DAY,
                remedy="seconds",
            )  # fmt: skip
        check_float(where + "drain_seconds", self.drain_seconds, ConfigError, low=0.0, high=DAY)
        check_float(where + "default_temperature", self.default_temperature, ConfigError, low=0.0)
        check_choice(
            where + "per_request_metrics", self.per_request_metrics, PER_REQUEST_METRICS,
            ConfigError,
        )  # fmt: skip
        check_bool(where + "log_prompts", self.log_prompts, ConfigError)

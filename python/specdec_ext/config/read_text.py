"""What a JSON or YAML string, or a file of either, holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .validate import show

__all__ = ["read_text"]

MAX_TEXT_CHARS = 64 * 1024


def _no_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ConfigError(f"configuration: key {show(key)} is given twice; keep one")
        result[key] = value
    return result


# Words that YAML takes for something else than themselves.
_YAML_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "null"))


_NOTHING = ("null", "~")


def _load_yaml(text: str, source: str) -> object:
    if text.isascii() and text.isalpha() and text.lower() not in _YAML_WORDS:
        return text  # a method's name: known without the library
    import yaml

    class Loader(yaml.SafeLoader):
        """SafeLoader that refuses a key given twice; YAML itself would keep the last."""

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        return _no_duplicates(
            [
                (loader.construct_object(k, deep=True), loader.construct_object(v, deep=True))
                for k, v in node.value
            ]
        )

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{source}: neither JSON nor YAML ({reason}); write for example "
            '{"method": "ngram", "max_draft_len": 10}'
        ) from None


def read_text(text: str) -> object:
    """The object that a JSON or YAML string, or a file that it names, holds.

    Raises ConfigError for text that cannot be read or holds nothing.
    """
    source = f"configuration {show(text)}"
    stripped = text.strip()
    if len(stripped) < 4096 and "\n" not in stripped and stripped[:1] not in ("{", "["):
        path = Path(stripped).expanduser()
        if path.suffix.lower() in (".yaml", ".yml", ".json"):
            source = f"configuration file {str(path)!r}"
            try:
                if path.stat().st_size > MAX_TEXT_CHARS:
                    raise ConfigError(
                        f"{source} has {path.stat().st_size} bytes, limit {MAX_TEXT_CHARS}; "
                        "is it a configuration?"
                    )
                stripped = path.read_text(encoding="utf-8-sig").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{source} cannot be read ({error}); give the path of a UTF-8 YAML or JSON file"
                ) from None
    if len(stripped) > MAX_TEXT_CHARS:
        raise ConfigError(
            f"configuration text has {len(stripped)} characters, limit {MAX_TEXT_CHARS}; "
            "is it a configuration?"
        )
    try:
        loaded: object = json.loads(stripped, object_pairs_hook=_no_duplicates)
    except (json.JSONDecodeError, RecursionError):
        loaded = _load_yaml(stripped, source)
    # A variable that is not set must not mean "none" to whoever passes it on.
    if loaded is None and stripped.lower() not in _NOTHING:
        raise ConfigError(
            f"{source} holds nothing; leave it out, write null for the value that means nothing, "
            'or write for example {"method": "ngram", "max_draft_len": 10}'
        )
    return loaded

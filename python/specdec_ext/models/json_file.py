"""JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelError

__all__ = ["read_json"]

_MAX_JSON_BYTES = 64 << 20


def read_json(
    path: Path, what: str, *, remedy: str = "give a Hugging Face model folder"
) -> dict[str, Any]:
    """The object in a JSON file; ModelError for a missing, oversized or malformed one.

    what    names the file in a message
    remedy  what to do where it is missing
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{path}: {path.stat().st_size} bytes, limit {_MAX_JSON_BYTES}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: {what} is missing; {remedy}") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: {what} cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{path}: {what} is not valid JSON (line {error.lineno}: {error.msg}); "
            "copy the file again"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: {what} must be a JSON object, got {type(content).__name__}")
    return content

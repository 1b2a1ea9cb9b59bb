"""Which requests should meet the same replica: those that can reuse each other's prompts.

A prefix cache is a replica's own, and is shared within one salt and one key of the server. What
stays the same over the turns of a conversation is its beginning, up to the first message that is a
user's; conversations with one system prompt differ there, and so spread over the replicas.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

__all__ = ["affinity_key"]

# The beginning of a prompt without turns: several pages of the cache.
PREFIX_CHARS = 512
PREFIX_TOKENS = 128


def affinity_key(scope: Mapping[str, Any], body: bytes) -> str:
    """Equal for requests that share a beginning, a salt and an API key; random for one that has no
    prompt. A body that is not valid gets a key as well: the replica words the error."""
    try:
        content = json.loads(body) if body else None
    except (ValueError, RecursionError):
        content = None
    beginning = _beginning(content) if isinstance(content, dict) else None
    if beginning is None:
        return secrets.token_hex(16)
    assert isinstance(content, dict)
    tenant = next((v for name, v in scope["headers"] if name.lower() == b"authorization"), b"")
    text = json.dumps([beginning, content.get("cache_salt")], sort_keys=True)
    digest = hashlib.blake2b(text.encode(), key=hashlib.sha256(tenant).digest(), digest_size=16)
    return digest.hexdigest()


def _beginning(content: Mapping[str, Any]) -> Any:
    """What the next turn of the same conversation has in common with this one."""
    if isinstance(messages := content.get("messages"), list):
        return _turns(messages)
    if (prompt := content.get("input")) is not None:  # /v1/responses
        turns = _turns(prompt) if isinstance(prompt, list) else str(prompt)[:PREFIX_CHARS]
        return [content.get("instructions"), turns]
    prompt = content.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # of several prompts the first
    if isinstance(prompt, str):
        return prompt[:PREFIX_CHARS]
    return prompt[:PREFIX_TOKENS] if isinstance(prompt, list) else None


def _turns(messages: list[Any]) -> list[Any]:
    """Up to the first user's, role and text alone."""
    found = []
    for message in messages:
        if not isinstance(message, dict):
            break
        found.append([message.get("role"), message.get("content")])
        if message.get("role") == "user":
            break
    return found

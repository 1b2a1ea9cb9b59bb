"""API keys and the salts that keep their owners apart."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

__all__ = ["ApiKeys"]


class ApiKeys:
    """The keys of a server; empty: every request is served, as tenant 0."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]
        # Made anew in each process: a salt says nothing about the key it came from.
        self._secret = secrets.token_bytes(32)

    def tenant(self, authorization: str | None) -> int | None:
        """The number of the key in an Authorization header; None: it has none of them.

        Every key is compared, in time that does not depend on where a difference is.
        """
        if not self._keys:
            return 0
        scheme, _, given = (authorization or "").partition(" ")
        token = given.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""
        found = None
        for i, key in enumerate(self._keys):
            if hmac.compare_digest(token, key):
                found = i
        return found

    def cache_salt(self, tenant: int, asked: str | None) -> str:
        """The engine's salt for a tenant's request that asks for the salt `asked`.

        Without keys it is what was asked; else tenants with equal wishes get unequal salts.
        """
        if not self._keys:
            return asked or ""
        message = self._keys[tenant] + b"\0" + (asked or "").encode("utf-8", "replace")
        return hashlib.blake2b(message, key=self._secret, digest_size=16).hexdigest()

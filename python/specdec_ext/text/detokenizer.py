"""Token ids to text, incrementally.

The concatenation of the pieces equals `tokenizer.decode(all ids)` (without clean-up of spaces), no
piece ends inside a UTF-8 character, and the cost is linear in the number of tokens.

Byte-level BPE and SentencePiece-style tokenizers with byte fallback decode token by token: each
token is a fixed byte string, joined by an incremental UTF-8 decoder (about 1 us per token, which
the step budget needs). Whether a tokenizer really is of that kind is checked once against its own
decode(); any other one decodes a short window of tokens. One difference is deliberate: where a byte
fallback run is not valid UTF-8, decode() replaces the run's valid characters too; a stream has
already delivered those.
"""

from __future__ import annotations

import codecs
import json
import random
from functools import cached_property
from typing import Any, Protocol

__all__ = ["Detokenizer", "DetokenizerFactory"]

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so 3 byte tokens can wait for a fourth. Text that still
# ends in U+FFFD after more is wrong, not unfinished; waiting longer would cost quadratic time.
MAX_HELD_TOKENS = 4


class Detokenizer(Protocol):
    """One request's decoder."""

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; empty while a character is unfinished."""

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, or nothing."""

    def save(self) -> Any:
        """Where it stands, for restore()."""

    def restore(self, saved: Any) -> None:
        """Go back to where it stood."""


def _byte_alphabet() -> dict[str, int]:
    """Characters that byte-level BPE writes for the 256 bytes.

    Printable Latin-1 bytes stand for themselves, the others for U+0100 onwards in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


class _TokenBytes:
    """Byte string of each token, filled in as tokens occur."""

    def __init__(self, backend: Any, kind: str, special_ids: frozenset[int]) -> None:
        self._id_to_token = backend.id_to_token
        self._kind = kind
        self._alphabet = _byte_alphabet() if kind == "byte_level" else {}
        self._special_ids = special_ids
        self._bytes: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})

    def get(self, token_id: int, skip_special_tokens: bool) -> bytes:
        cache = self._bytes[skip_special_tokens]
        known = cache.get(token_id)
        if known is None:
            known = cache[token_id] = self._make(token_id, skip_special_tokens)
        return known

    def _make(self, token_id: int, skip_special_tokens: bool) -> bytes:
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        token: str | None = self._id_to_token(token_id)
        if token is None:  # an id of a padded vocabulary; decode() drops it too
            return b""
        if self._kind == "byte_level":
            try:
                return bytes(map(self._alphabet.__getitem__, token))
            except KeyError:  # an added token
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


class _BytesDetokenizer:
    def __init__(self, table: _TokenBytes, skip_special_tokens: bool, strip_first: bool) -> None:
        self._table = table
        self._skip = skip_special_tokens
        self._strip_first = strip_first
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        text = self._utf8.decode(self._table.get(token_id, self._skip))
        return self._strip(text) if self._strip_first and text else text

    def finish(self) -> str:
        text = self._utf8.decode(b"", final=True)
        return self._strip(text) if self._strip_first and text else text

    def save(self) -> Any:
        return self._utf8.getstate(), self._strip_first

    def restore(self, saved: Any) -> None:
        state, self._strip_first = saved
        self._utf8.setstate(state)

    def _strip(self, text: str) -> str:
        """SentencePiece puts one space before the first word."""
        self._strip_first = False
        return text[1:] if text.startswith(" ") else text


class _WindowDetokenizer:
    """For any tokenizer: decode a window that starts at a token whose text is already out."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._num_out = 0  # tokens at the window's start whose text is out
        self._text_out = ""  # their text, as decoded alone

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        held = len(self._window) - self._num_out
        if text.endswith(REPLACEMENT) and held <= MAX_HELD_TOKENS:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        return self._emit(self._decode(self._window)) if self._window else ""

    def save(self) -> Any:
        return list(self._window), self._num_out, self._text_out

    def restore(self, saved: Any) -> None:
        self._window, self._num_out, self._text_out = saved

    def _emit(self, text: str) -> str:
        new = text[len(self._text_out) :]
        if not new:  # a skipped special token: no context for what follows
            del self._window[self._num_out :]
            return ""
        del self._window[: self._num_out]
        self._num_out = len(self._window)
        self._text_out = self._decode(self._window)
        return new


class DetokenizerFactory:
    """Makes the decoders of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._table: _TokenBytes | None = None
        self._strip_first = False
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            self._detect(backend)

    def make(self, skip_special_tokens: bool = True) -> Detokenizer:
        if self._table is not None:
            return _BytesDetokenizer(self._table, skip_special_tokens, self._strip_first)
        return _WindowDetokenizer(self._tokenizer, skip_special_tokens)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """The texts of the tokenizer's special tokens, by their ids."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            ids = getattr(self._tokenizer, "all_special_ids", ())
            return {token_id: self.token_text(token_id) for token_id in ids}
        added = backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    def token_text(self, token_id: int) -> str:
        """A single token's text, for logprobs; may hold U+FFFD."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """A single token's bytes, perhaps of a part of a character; None: this tokenizer has no
        bytes of single tokens."""
        return self._table.get(token_id, False) if self._table is not None else None

    def _detect(self, backend: Any) -> None:
        try:
            state = backend.decoder.__getstate__() if backend.decoder is not None else b"{}"
            decoder = json.loads(state)
            added = backend.get_added_tokens_decoder()
        except Exception:  # a custom decoder cannot be written down, so it is of no known kind
            return
        steps = decoder.get("decoders", [decoder]) if decoder else []
        kinds = [step.get("type") for step in steps]
        strip_first = False
        if kinds == ["ByteLevel"]:
            kind = "byte_level"
        elif "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            kind = "byte_fallback"
            strip_first = "Strip" in kinds
        else:
            return
        special = frozenset(number for number, token in added.items() if token.special)
        self._table = _TokenBytes(backend, kind, special)
        self._strip_first = strip_first
        if not self._agrees(backend.get_vocab_size(with_added_tokens=True)):
            self._table = None

    def _agrees(self, vocab_size: int) -> bool:
        """Compare with decode() on fixed random ids; bytes that are no text are left out."""
        draw = random.Random(0)
        for trial in range(24):
            ids = [draw.randrange(vocab_size) for _ in range(12)]
            skip = trial % 2 == 0
            want = self._tokenizer.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            decoder = self.make(skip)
            got = "".join([decoder.push(i) for i in ids]) + decoder.finish()
            if got != want and REPLACEMENT not in want:
                return False
        return True

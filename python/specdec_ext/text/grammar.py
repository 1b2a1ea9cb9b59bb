"""Grammars over a tokenizer's tokens, by llguidance (the extra `grammar`).

A grammar is compiled once and kept for later requests; each output walks a matcher of its own.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..config.validate import show
from ..errors import RequestError
from ..request.finite_schema import never_ends
from ..request.structured_outputs import FIELD, StructuredOutputs

__all__ = ["Grammar", "GrammarCompiler"]

COMPILE_SECONDS = 5.0
_KEPT_GRAMMARS = 64
# JSON as models write it on one line, if whitespace is not left to them.
_SEPARATORS = {"item_separator": ", ", "key_separator": ": "}


class Grammar:
    """A compiled grammar.

    end_ids      tokens that end a text; where the grammar can only end, the first one is all that
                 it allows
    beginning    tokens that every text begins with, as far as they are forced
    words        32-bit words of a mask: bits by token id, least significant first
    """

    def __init__(self, matcher: Any, end_ids: Sequence[int], words: int) -> None:
        self._matcher = matcher
        self._lock = threading.Lock()
        self.end_ids = tuple(end_ids)
        self.words = words
        self.beginning: list[int] = [] if matcher.is_stopped() else matcher.compute_ff_tokens()

    def matcher(self) -> Any:
        """An llguidance.LLMatcher at the beginning of a text, the caller's own."""
        with self._lock:
            return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles constraints for one tokenizer and one model.

    tokenizer   of the `tokenizers` library or around one (`backend_tokenizer`); None: there is none
    vocab_size  of the model's scores; tokens that the tokenizer does not have are never allowed
    end_ids     tokens that end a text
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)
        self._lock = threading.Lock()
        self._tokens: Any = None  # llguidance's tokenizer, once it is needed
        self._kept: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()

    def compile(self, constraint: StructuredOutputs) -> Grammar:
        """The grammar of a constraint. Raises RequestError for what cannot be compiled, allows
        nothing, or takes longer than COMPILE_SECONDS."""
        with self._lock:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
                return self._kept[constraint]
            tokens = self._token_table()
        grammar = self._compile(tokens, constraint)
        with self._lock:
            self._kept[constraint] = grammar
            while len(self._kept) > _KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

    def _token_table(self) -> Any:
        if self._tokens is not None:
            return self._tokens
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise RequestError(
                f"{FIELD} needs llguidance, which is not installed; run: pip install "
                "specdec_ext[grammar]"
            ) from None
        backend = getattr(self._tokenizer, "backend_tokenizer", self._tokenizer)
        if not hasattr(backend, "to_str"):
            raise RequestError(
                f"{FIELD} needs a tokenizer of the tokenizers library (tokenizer.json), this "
                f"model has {type(self._tokenizer).__name__}; load it with one"
            )
        if not self._end_ids:
            raise RequestError(
                f"{FIELD}: this model has no end token, which a grammar ends with; name it as "
                "eos_token_id in its generation_config.json"
            )
        described = json.loads(backend.to_str())
        described["padding"] = described["truncation"] = None
        try:
            self._tokens = LLTokenizer(
                json.dumps(described), n_vocab=self._vocab_size, eos_token=list(self._end_ids)
            )
        except Exception as error:
            raise RequestError(
                f"{FIELD}: llguidance cannot read this model's tokenizer ({show(str(error))}); "
                "leave structured_outputs out"
            ) from None
        return self._tokens

    def _compile(self, tokens: Any, constraint: StructuredOutputs) -> Grammar:
        name = f"{FIELD}.{constraint.kind}"
        if constraint.kind == "json" and never_ends(json.loads(constraint.text)):
            raise RequestError(
                f"{name} = {show(constraint.text)}: no finite text has this schema: it is "
                "false, or requires itself without end; make what refers to itself optional"
            )
        done: list[Any] = []

        def work() -> None:
            try:
                done.append(self._match(tokens, constraint))
            except Exception as error:
                done.append(error)

        # llguidance compiles without the interpreter's lock and within limits of its own: who is
        # not waited for ends, too.
        thread = threading.Thread(target=work, name="specdec-grammar", daemon=True)
        thread.start()
        thread.join(COMPILE_SECONDS)
        if not done:
            raise RequestError(
                f"{name} = {show(constraint.text)}: compiling it takes longer than "
                f"{COMPILE_SECONDS} seconds; make it simpler"
            )
        (result,) = done
        if isinstance(result, RequestError):
            raise result
        error = str(result) if isinstance(result, Exception) else result.get_error()
        if error:
            raise RequestError(
                f"{name} = {show(constraint.text)} cannot be compiled: {_first_line(error)}; "
                "correct it"
            )
        return self._checked(name, constraint, result)

    def _match(self, tokens: Any, constraint: StructuredOutputs) -> Any:
        from llguidance import LLMatcher

        return LLMatcher(tokens, _described(LLMatcher, constraint), log_level=0)

    def _checked(self, name: str, constraint: StructuredOutputs, matcher: Any) -> Grammar:
        words = (self._vocab_size + 31) // 32
        mask = np.zeros(words, dtype=np.int32)
        copy = matcher.deep_copy()
        copy.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        stopped = copy.is_stopped() and not copy.is_accepting()
        if copy.is_error() or stopped or not mask.any():
            why = f" ({_first_line(copy.get_error())})" if copy.is_error() and not stopped else ""
            raise RequestError(
                f"{name} = {show(constraint.text)} allows no text at all{why}; correct it"
            )
        return Grammar(matcher, self._end_ids, words)


def _described(matcher: Any, constraint: StructuredOutputs) -> str:
    """The constraint in llguidance's own form."""
    kind, text = constraint.kind, constraint.text
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "choice":
        rules = " | ".join(json.dumps(choice) for choice in json.loads(text))
        return str(matcher.grammar_from_lark(f"start: {rules}"))
    if kind == "grammar":
        if "::=" in text:
            from llguidance.gbnf_to_lark import gbnf_to_lark

            text = gbnf_to_lark(text)
        return str(matcher.grammar_from_lark(text))
    schema = '{"type": "object"}' if kind == "json_object" else text
    options: dict[str, Any] = {"whitespace_flexible": constraint.flexible_whitespace}
    if constraint.whitespace_pattern is not None:
        options.update(whitespace_flexible=True, whitespace_pattern=constraint.whitespace_pattern)
    elif not constraint.flexible_whitespace:
        options.update(_SEPARATORS)
    return str(matcher.grammar_from_json_schema(schema, defaults=options))


def _first_line(error: str) -> str:
    """The sentence of an error of llguidance's, without its state after it."""
    return " ".join(error.split("<state>")[0].split())[:300]

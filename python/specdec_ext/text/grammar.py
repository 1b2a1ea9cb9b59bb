"""Grammars over a tokenizer's tokens, by llguidance (the extra `grammar`).

A grammar is compiled once and kept for later requests; each output walks a matcher of its own.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..config.validate import show
from ..errors import RequestError
from ..request.finite_schema import never_ends
from ..request.structured_outputs import FIELD, StructuredOutputs

__all__ = ["Grammar", "GrammarCompiler"]

COMPILE_SECONDS = 5.0
_KEPT_GRAMMARS = 64
# llguidance recurses along references and rules: some kilobytes for each. Address space, of which
# only what is used becomes memory.
_STACK_BYTES = 512 << 20
_MAX_GBNF_RULES = 500  # the reader of GBNF, in Python, takes the square of them
_GBNF = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)
_NO_TEXT = "NoExtensionBias"  # how llguidance calls it
_RENEWED_SECONDS = 0.1  # what took longer to compile is not compiled again between two steps
# JSON as models write it on one line, if whitespace is not left to them.
_SEPARATORS = {"item_separator": ", ", "key_separator": ": "}


class Grammar:
    """A compiled grammar.

    end_ids      tokens that end a text; where the grammar can only end, the first one is all that
                 it allows
    beginning    tokens that every text begins with, as far as they are forced
    words        32-bit words of a mask: bits by token id, least significant first
    make         compiles it once more; None: that takes too long between two steps
    """

    def __init__(
        self,
        matcher: Any,
        end_ids: Sequence[int],
        words: int,
        beginning: Sequence[int] = (),
        make: Callable[[], Any] | None = None,
    ) -> None:
        self._matcher = matcher
        self._lock = threading.Lock()
        self.end_ids = tuple(end_ids)
        self.words = words
        self.beginning = list(beginning)
        self._make = make
        self.is_spoilt = False

    def matcher(self) -> Any:
        """An llguidance.LLMatcher at the beginning of a text, the caller's own but for what it
        learns of the grammar: copies share that."""
        with self._lock:
            return self._matcher.deep_copy()

    def own_matcher(self) -> Any:
        """A matcher that shares nothing; None: it would take too long to make. What a text has
        brought the shared one to is then no matter of this one's."""
        self.is_spoilt = True  # and not for later requests, whoever they are of
        return self._make() if self._make is not None else None


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
            kept = self._kept.get(constraint)
            if kept is not None and not kept.is_spoilt:
                self._kept.move_to_end(constraint)
                return kept
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
        try:
            done: Grammar = _deep_in_time(lambda: self._compiled(name, tokens, constraint))
        except TimeoutError:
            raise RequestError(
                f"{name} = {show(constraint.text)}: compiling it takes longer than "
                f"{COMPILE_SECONDS} seconds; make it simpler"
            ) from None
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"{name} = {show(constraint.text)} cannot be compiled: {_first_line(str(error))}; "
                "correct it"
            ) from None
        return done

    def _compiled(self, name: str, tokens: Any, constraint: StructuredOutputs) -> Grammar:
        if constraint.kind == "json" and never_ends(json.loads(constraint.text)):
            raise RequestError(
                f"{name} = {show(constraint.text)}: no finite text has this schema: it is "
                "false, or requires itself without end; make what refers to itself optional"
            )
        began = time.monotonic()
        matcher = self._match(tokens, constraint)
        if error := matcher.get_error():
            raise ValueError(error)

        def make() -> Any:
            return _deep_in_time(lambda: self._match(tokens, constraint))

        again = make if time.monotonic() - began < _RENEWED_SECONDS else None
        return self._checked(name, tokens, constraint, matcher, again)

    def _match(self, tokens: Any, constraint: StructuredOutputs) -> Any:
        from llguidance import LLMatcher

        return LLMatcher(tokens, _described(LLMatcher, constraint), log_level=0)

    def _checked(
        self, name: str, tokens: Any, constraint: StructuredOutputs, matcher: Any, make: Any
    ) -> Grammar:
        """It allows a text, and can say so: at its beginning, and behind what that forces."""
        words = (self._vocab_size + 31) // 32
        copy = matcher.deep_copy()
        for _ in range(2):
            mask = np.zeros(words, dtype=np.int32)
            copy.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            error = copy.get_error() if copy.is_error() else ""
            if error and not error.startswith(_NO_TEXT):
                raise RequestError(
                    f"{name} = {show(constraint.text)} is too large or too ambiguous "
                    f"({_first_line(error)}); make it simpler"
                )
            if error or (copy.is_stopped() and not copy.is_accepting()) or not mask.any():
                raise RequestError(
                    f"{name} = {show(constraint.text)} allows no text at all; correct it"
                )
            if copy.is_stopped() or not (forced := copy.compute_ff_bytes()):
                break
            copy.try_consume_tokens(tokens.tokenize_bytes(forced))
        copy = matcher.deep_copy()
        beginning = [] if copy.is_stopped() else copy.compute_ff_tokens()
        return Grammar(matcher, self._end_ids, words, beginning, make)


def _described(matcher: Any, constraint: StructuredOutputs) -> str:
    """The constraint in llguidance's own form."""
    kind, text = constraint.kind, constraint.text
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "choice":
        # One terminal: as rules they would be as many items of each row of the parser.
        texts = " | ".join(json.dumps(choice) for choice in json.loads(text))
        return str(matcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}"))
    if kind == "grammar":
        if rules := len(_GBNF.findall(text)):
            from llguidance.gbnf_to_lark import gbnf_to_lark

            if rules > _MAX_GBNF_RULES:
                raise RequestError(
                    f"{FIELD}.grammar has {rules} rules in GBNF, limit {_MAX_GBNF_RULES}; write it "
                    "in Lark, or make it smaller"
                )
            text = gbnf_to_lark(text)
        return str(matcher.grammar_from_lark(text))
    schema = '{"type": "object"}' if kind == "json_object" else text
    options: dict[str, Any] = {"whitespace_flexible": constraint.flexible_whitespace}
    if constraint.whitespace_pattern is not None:
        options.update(whitespace_flexible=True, whitespace_pattern=constraint.whitespace_pattern)
    elif not constraint.flexible_whitespace:
        options.update(_SEPARATORS)
    return str(matcher.grammar_from_json_schema(schema, defaults=options))


def _deep_in_time(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises, on a deep stack. TimeoutError after COMPILE_SECONDS."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except Exception as error:
            done.append((None, error))

    # llguidance compiles without the interpreter's lock and within limits of its own: who is not
    # waited for ends, too.
    thread = threading.Thread(target=run, name="specdec-grammar", daemon=True)
    with _stack_lock:  # the size is the process's; other threads may get it meanwhile
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(COMPILE_SECONDS)
    if not done:
        raise TimeoutError
    ((result, error),) = done
    if error is not None:
        raise error
    return result


_stack_lock = threading.Lock()


def _first_line(error: str) -> str:
    """The sentence of an error of llguidance's, without its state after it."""
    return " ".join(error.split("<state>")[0].split())[:300]

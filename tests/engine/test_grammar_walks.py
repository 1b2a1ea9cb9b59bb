"""Walks over draft trees under a grammar: what is cut, what is masked, where matchers stand."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from driver import best_of
from grammar_forms import END, FORMS, form_tokenizer
from medusa_models import VOCAB

from specdec_ext import _core
from specdec_ext.engine import grammar_masks
from specdec_ext.request.structured_outputs import check_structured_outputs
from specdec_ext.text.grammar import Grammar, GrammarCompiler


@functools.cache
def compiled_of(form: str) -> Grammar:
    compiler = GrammarCompiler(form_tokenizer(), VOCAB, [END])
    return compiler.compile(check_structured_outputs(FORMS[form]))


@pytest.mark.parametrize("form", FORMS)
def test_a_token_is_allowed_where_its_bit_is_set(form: str) -> None:
    """At every place of random texts, for every token: forced text, too, has one token alone."""
    rng = np.random.default_rng(3)
    for _ in range(4):
        output = grammar_masks._Output(compiled_of(form), True)
        for _ in range(30):
            tree = SimpleNamespace(tokens=[0], parents=[-1], fixed=1)
            walk = grammar_masks._TreeWalk(output, tree)
            walk.run(fill=True)
            bits = np.unpackbits(walk.masks[0].view(np.uint8), bitorder="little")[:VOCAB]
            for token in range(VOCAB):
                probe = grammar_masks._TreeWalk(output, tree)
                assert probe._allows([], token) == bool(bits[token])
            token = int(rng.choice(np.flatnonzero(bits)))
            if token == END:
                break
            output.follow([token])


def mask_behind(compiled: Grammar, text: list[int]) -> np.ndarray:
    """What may follow a text, one bool per token, by a matcher that has seen nothing else."""
    matcher = compiled.matcher()
    assert matcher.consume_tokens(text)
    if matcher.is_stopped():
        return np.arange(VOCAB) == END
    words = np.zeros(compiled.words, dtype=np.uint32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)


def grown_tree(rng: np.random.Generator, compiled: Grammar, text: list[int]) -> Any:
    """Up to 12 drafts, mostly tokens that are allowed; siblings differ."""
    tokens, parents, paths = [text[-1] if text else 0], [-1], [[]]
    for _ in range(int(rng.integers(0, 13))):
        parent = int(rng.integers(max(0, len(tokens) - 3), len(tokens)))
        mask = np.zeros(VOCAB, dtype=bool)
        if paths[parent] is not None and END not in paths[parent]:
            mask = mask_behind(compiled, text + paths[parent])
        choice = np.flatnonzero(mask) if mask.any() and rng.random() < 0.8 else np.arange(VOCAB)
        token = int(rng.choice(choice))
        if any(parents[i] == parent and tokens[i] == token for i in range(1, len(tokens))):
            continue
        paths.append(paths[parent] + [token] if mask[token] else None)
        tokens.append(token)
        parents.append(parent)
    return SimpleNamespace(tokens=tokens, parents=parents, paths=paths, fixed=1)


def kept_of(tree: Any, kept: list[int]) -> Any:
    """The tree that a cut leaves."""
    nodes = [i for i, k in enumerate(kept) if k]
    parents = [-1, *(nodes.index(tree.parents[i]) for i in nodes[1:])]
    return SimpleNamespace(
        tokens=[tree.tokens[i] for i in nodes], parents=parents,
        paths=[tree.paths[i] for i in nodes], fixed=1,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_walks_are_those_of_fresh_matchers(form: str) -> None:
    """A matcher that stays where the last walk left it: cuts, masks and what is forced are those
    of matchers that begin with the text each time."""
    rng = np.random.default_rng(11)
    compiled = compiled_of(form)
    masked = followed = 0
    for _ in range(30):
        output, text = grammar_masks._Output(compiled, True), []
        while END not in text and len(text) < 40:
            fresh = grammar_masks._Output(compiled, True)
            fresh.follow(text)
            if rng.random() < 0.5:
                assert output.chain() == fresh.chain()
            tree = grown_tree(rng, compiled, text)
            kept = grammar_masks._TreeWalk(output, tree).run(fill=False)
            assert kept == [int(path is not None) for path in tree.paths]
            if rng.random() < 0.5:  # a step that was interrupted begins again
                assert output.chain() == fresh.chain()
            tree = kept_of(tree, kept)

            if rng.random() < 0.2:  # where tokens are drawn
                walk = grammar_masks._TreeWalk(output, tree)
                assert all(walk.run(fill=True))
                for node, path in enumerate(tree.paths):
                    bits = np.unpackbits(walk.masks[node].view(np.uint8), bitorder="little")
                    wanted = np.arange(VOCAB) == END
                    if END not in path:
                        wanted = mask_behind(compiled, text + path)
                    assert np.array_equal(bits[:VOCAB].astype(bool), wanted)

            # Scores that mostly favour drafts, some of them tokens that are not allowed.
            scores = rng.standard_normal((len(tree.tokens), VOCAB)).astype(np.float32)
            for node, parent in enumerate(tree.parents[1:], 1):
                scores[parent, tree.tokens[node]] += 4
            walk = grammar_masks._TreeWalk(output, tree)
            walk.follow_best(scores)
            again = grammar_masks._TreeWalk(output, tree)
            again.follow_best(scores, scores.argmax(axis=1).tolist())
            assert np.array_equal(again.masks, walk.masks)
            node, path, chosen = 0, [], []
            while node >= 0:
                wanted = mask_behind(compiled, text + path)
                best = int(np.where(wanted, scores[node], -np.inf).argmax())
                bits = np.ones(VOCAB, dtype=bool)
                if len(walk.masks):
                    row = np.unpackbits(walk.masks[node].view(np.uint8), bitorder="little")
                    bits = row[:VOCAB].astype(bool)
                if not bits.all():
                    assert np.array_equal(bits, wanted)
                    masked += 1
                assert int(np.where(bits, scores[node], -np.inf).argmax()) == best
                chosen.append(best)
                path = [*path, best]
                node = -1 if best == END else next(
                    (i for i, mine in enumerate(tree.paths) if mine == path), -1
                )  # fmt: skip
            followed += len(chosen) > 1
            output.follow(chosen)
            text = text + chosen
    assert masked > 20 and followed > 20


def test_best_allowed() -> None:
    """Against NumPy: words of all bits, of none and of some; equal scores; the vocabulary's end."""
    rng = np.random.default_rng(5)
    for vocab in (1, 31, 32, 33, 48, 1000, 4099):
        words = -(-vocab // 32)
        for _ in range(40):
            scores = rng.integers(-3, 3, vocab).astype(np.float32)
            kinds = rng.integers(0, 3, words)
            mask = np.where(kinds == 0, 0, np.where(kinds == 1, -1, rng.integers(1, 2**31, words)))
            mask = mask.astype(np.int32)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab].astype(bool)
            expected = int(np.where(bits, scores, -np.inf).argmax()) if bits.any() else None
            assert _core.best_allowed(scores, mask) == expected
            if bits.any():
                for bad in (np.nan, np.inf):
                    spoilt = scores.copy()
                    spoilt[rng.choice(np.flatnonzero(bits))] = bad
                    assert _core.best_allowed(spoilt, mask) is None
                scores[bits] = -np.inf
                assert _core.best_allowed(scores, mask) is None
            scores[~bits] = np.nan  # not looked at
            scores[bits] = 1.0
            assert _core.best_allowed(scores, mask) == (bits.argmax() if bits.any() else None)
    with pytest.raises(ValueError, match="a bit for each"):
        _core.best_allowed(np.zeros(33, dtype=np.float32), np.zeros(1, dtype=np.int32))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("bad", "rows"), [(np.nan, 2), (np.inf, 2), (5.0, 0)])
def test_a_row_without_a_best_token_is_masked(bad: float, rows: int, known: bool) -> None:
    """NaN has no order: what the executor chooses there and below has to be allowed."""
    compiled = compiled_of("regex")
    (token, *_), other = np.flatnonzero(mask_behind(compiled, [])), END
    path = [int(token)]
    tree = SimpleNamespace(tokens=[0, *path], parents=[-1, 0], fixed=1)
    scores = np.zeros((2, VOCAB), dtype=np.float32)
    scores[0, token] = bad
    scores[1, np.flatnonzero(mask_behind(compiled, path))[0]] = 5.0
    walk = grammar_masks._TreeWalk(grammar_masks._Output(compiled, True), tree)
    walk.follow_best(scores, best_of(scores).tolist() if known else None)
    assert len(walk.masks) == rows
    for mask, text in zip(walk.masks, ([], path), strict=False):
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
        assert np.array_equal(bits, mask_behind(compiled, text)) and not bits[other]

"""Grammars of running requests: what they force, which drafts they allow, a mask for every node.

A step asks three times. Before it is planned, force() proposes the tokens that a grammar leaves no
choice about. When its drafts are made, constrain() walks each tree once: drafts that the grammar
does not allow are cut, and each node that is left gets the mask of what may follow it. commit()
hands the masks to the executor, which applies them where it chooses tokens.

Matchers follow the output as the executor has it, so that a step that was interrupted is walked
again as if for the first time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..text.grammar import Grammar

__all__ = ["GrammarMasks"]

_MOST_FORCED = 16  # drafts of one step: kKnownDrafts in engine/prediction.h


class _Output:
    """One output's place in its grammar."""

    def __init__(self, grammar: Grammar, speculative: bool) -> None:
        self.grammar = grammar
        self.matcher = grammar.matcher()
        self.speculative = speculative
        self.consumed = 0  # tokens of the output

    def follow(self, tokens: list[int]) -> None:
        """The output has gone on by `tokens`."""
        self.consumed += len(tokens)
        self.matcher.consume_tokens(tokens)

    def forced(self) -> list[int]:
        """The tokens that alone may come next, the end of the text included."""
        if self.matcher.is_stopped():
            return list(self.grammar.end_ids[:1])
        tokens: list[int] = self.matcher.compute_ff_tokens()[:_MOST_FORCED]
        if 0 < len(tokens) < _MOST_FORCED:
            count = self.matcher.try_consume_tokens(tokens)
            ends = count == len(tokens) and self.matcher.is_stopped()
            self.matcher.rollback(count)
            tokens = tokens[:count] + list(self.grammar.end_ids[:1] if ends else ())
        return tokens

    def error(self) -> str | None:
        """What went wrong with the grammar, if something did."""
        if not self.matcher.is_error():
            return None
        message = str(self.matcher.get_error()).split("<state>")[0].strip()
        return f"the grammar of structured_outputs failed: {message}"


class GrammarMasks:
    """The grammars of an engine's requests. Called from the stepping thread, but for start() and
    end()."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._outputs: dict[int, _Output] = {}
        self.masks: dict[int, np.ndarray] = {}  # of the trees that were walked last
        self.errors: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def start(self, request_id: int, grammar: Grammar, *, speculative: bool) -> None:
        """A request with a grammar was submitted."""
        self._outputs[request_id] = _Output(grammar, speculative)

    def end(self, request_id: int) -> None:
        """A request has ended; unknown ids are ignored."""
        self._outputs.pop(request_id, None)

    def force(self) -> None:
        """Propose what grammars leave no choice about, for the step that is planned next."""
        for request_id, output in list(self._outputs.items()):
            if not output.speculative:
                continue
            output.follow(self._executor.output(request_id, output.consumed))
            if output.consumed and (tokens := output.forced()):
                self._executor.force(request_id, tokens)

    def plan(self, drafting: Any) -> Any:
        """The executor's next plan, with the drafts in it that grammars force and without those
        that they do not allow.

        drafting  SlotDrafting, which stands between stage() and build(); anything else: nobody does
        """
        self.force()
        if hasattr(drafting, "before_build"):
            drafting.before_build = self.constrain
            return self._executor.plan()
        if self._executor.stage() is None:
            return None
        self.constrain()
        return self._executor.build()

    def constrain(self) -> None:
        """Cut the drafts of the step that was staged, and make the masks of what is left."""
        self._walk(self._executor.draft(), cuts=True)

    def mask(self, trees: Iterable[Any]) -> None:
        """Make the masks of trees whose rows have been computed already."""
        self._walk(trees, cuts=False)

    def _walk(self, trees: Iterable[Any], *, cuts: bool) -> None:
        self.masks, self.errors = {}, {}
        for tree in trees:
            output = self._outputs.get(tree.request_id)
            if output is None or not tree.masked:
                continue  # it was cancelled meanwhile
            output.follow(tree.output(output.consumed))
            kept, masks = _TreeWalk(output, tree).run()
            if (error := output.error()) is not None:
                self.errors[tree.request_id] = error
            if cuts and not all(kept):
                self._executor.cut(tree.request_id, kept)
                masks = masks[np.flatnonzero(kept)]
            self.masks[tree.request_id] = masks


class _TreeWalk:
    """One pass over a draft tree, root first: what is allowed, and what may follow it."""

    def __init__(self, output: _Output, tree: Any) -> None:
        self._matcher, self._ends = output.matcher, output.grammar.end_ids
        self._tokens, self._fixed = tree.tokens, tree.fixed
        count, words = len(self._tokens), output.grammar.words
        self._children: list[list[int]] = [[] for _ in range(count)]
        for node, parent in enumerate(tree.parents[1:], 1):
            self._children[parent].append(node)
        # A node that no grammar cuts and that is not allowed is never reached: it needs no mask.
        self._masks = np.full((count, words), -1, dtype=np.int32)
        self._rows = self._masks.data.cast("B").cast("I")
        self._words = words
        self._kept = [int(node < self._fixed) for node in range(count)]

    def run(self) -> tuple[list[int], np.ndarray]:
        """(1 for each node that stays, masks [nodes, words])"""
        consumed = 0  # tokens of the path that the matcher stands behind
        waiting = [(0, 0)]  # (node, its depth), the deepest last
        while waiting:
            node, depth = waiting.pop()
            if node > 0:
                if consumed >= depth:  # back to its parent; a chain never goes back
                    self._matcher.rollback(consumed - depth + 1)
                    consumed = depth - 1
                if not self._matcher.consume_token(self._tokens[node]):
                    break  # the matcher says why
                consumed = depth
            self._kept[node] = 1
            self._fill(node)
            for child in reversed(self._children[node]):
                token = self._tokens[child]
                if not self._rows[node * self._words + (token >> 5)] >> (token & 31) & 1:
                    continue
                if token in self._ends:
                    self._kept[child] = 1
                    self._only_end(child)
                else:
                    waiting.append((child, depth + 1))
        self._matcher.rollback(consumed)
        return self._kept, self._masks

    def _fill(self, node: int) -> None:
        if self._matcher.is_stopped():
            self._only_end(node)
            return
        row_bytes = self._words * 4
        address = self._masks.ctypes.data + node * row_bytes
        self._matcher.unsafe_compute_mask_ptr(address, row_bytes)

    def _only_end(self, node: int) -> None:
        end = self._ends[0]
        self._masks[node] = 0
        self._rows[node * self._words + (end >> 5)] = 1 << (end & 31)

"""Grammars of running requests: what they force, which drafts they allow, masks for their nodes.

A step asks three times. Before it is planned, force() proposes the tokens that a grammar leaves no
choice about. When its drafts are made, constrain() walks each tree once and cuts the drafts that
the grammar does not allow. When its scores are there, mask() gives the nodes the masks of what may
follow them, and the executor applies those where it chooses tokens.

A greedy request needs few masks: where the best of all tokens is allowed it is the best of those
that are. Only the path that is chosen is walked, and those of its nodes are masked whose best token
is not allowed. Where tokens are drawn every mask changes the law, so that constrain() makes them
all when it cuts.

Matchers follow the output as the executor has it, so that a step that was interrupted is walked
again as if for the first time. In between they stay where the last walk has left them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from .. import _core
from ..config.limits import MAX_KNOWN_DRAFTS
from ..text.grammar import Grammar

__all__ = ["GrammarMasks"]


class _Output:
    """One output's place in its grammar.

    The matcher may stand behind more than the output: behind a path of drafts, where the last walk
    left it. The next walk, and the output itself, mostly go the same way.
    """

    def __init__(self, grammar: Grammar, speculative: bool) -> None:
        self.grammar = grammar
        self.matcher = grammar.matcher()
        self.speculative = speculative
        self._is_own = False  # the matcher shares nothing with those of other outputs
        self.consumed = 0  # tokens of the output
        self._path: list[int] = []  # tokens behind the output that the matcher has consumed
        # forced() behind the output, behind one token of the path, ...; None: not asked yet
        self._forced: list[list[int] | None] = [None]

    def follow(self, tokens: list[int]) -> None:
        """The output has gone on by `tokens`."""
        self.consumed += len(tokens)
        known = self._common(tokens)
        if known < len(tokens):  # the path went another way, or not so far
            self._leave_at(known)
            self.matcher.consume_tokens(tokens[known:])
            self._path, self._forced = [], [None]
        else:
            del self._path[:known], self._forced[:known]

    def stand_behind(self, path: list[int]) -> None:
        """Move to behind the output and `path`, whose tokens are allowed."""
        if self._path == path:  # as a rule
            return
        self._leave_at(known := self._common(path))
        if known < len(path):
            self.go_on(path[known:])

    def go_on(self, tokens: list[int]) -> bool:
        """Go on by tokens, up to one that is not allowed. True: all of them are."""
        added: int = self.matcher.try_consume_tokens(tokens)
        self._path += tokens[:added]
        self._forced += [None] * added
        return added == len(tokens)

    def forced(self) -> list[int]:
        """The tokens that alone may follow where the matcher stands."""
        tokens = self._forced[-1]
        if tokens is None:
            # Most places force no text, and to tell that takes a fraction of finding the tokens.
            some = self.matcher.compute_ff_bytes()
            tokens = self._forced[-1] = self.matcher.compute_ff_tokens() if some else []
        return tokens

    def only(self) -> int | None:
        """The token that alone may follow where the matcher stands, the end included, as far as
        that is known; None: to be computed."""
        if self.matcher.is_stopped():
            return self.grammar.end_ids[0]
        return self._forced[-1][0] if self._forced[-1] else None

    def chain(self) -> list[int]:
        """The tokens that alone may follow the output, the end of the text included."""
        self.stand_behind([])
        if self.matcher.is_stopped():
            return list(self.grammar.end_ids[:1])
        tokens = self.forced()[:MAX_KNOWN_DRAFTS]
        if 0 < len(tokens) < MAX_KNOWN_DRAFTS:
            ends = self.go_on(tokens) and self.matcher.is_stopped()
            tokens = self._path + list(self.grammar.end_ids[:1] if ends else ())
        return tokens

    def renew(self, output: list[int]) -> bool:
        """After an error: a matcher of its own in the place of one that shares what it has learnt,
        which another request may have brought to its limits. False: it had one.

        output  all tokens of the output
        """
        if self._is_own:
            return False
        self._is_own = True
        try:
            matcher = self.grammar.own_matcher()
        except Exception:  # what has compiled before; the error that there was is told
            return False
        if matcher is None:
            return False
        matcher.try_consume_tokens(output)
        self.matcher, self.consumed = matcher, len(output)
        self._path, self._forced = [], [None]
        return True

    def error(self) -> str | None:
        """What went wrong with the grammar, if something did."""
        if not self.matcher.is_error():
            return None
        message = str(self.matcher.get_error()).split("<state>")[0].strip()
        return f"the grammar of structured_outputs failed: {message}"

    def _common(self, path: list[int]) -> int:
        """How many tokens the matcher's path and `path` begin with alike."""
        most = min(len(self._path), len(path))
        if self._path[:most] == path[:most]:
            return most
        return next(i for i in range(most) if self._path[i] != path[i])

    def _leave_at(self, depth: int) -> None:
        """Go back to where the path has `depth` tokens."""
        if len(self._path) > depth:
            self.matcher.rollback(len(self._path) - depth)
            del self._path[depth:], self._forced[depth + 1 :]


class GrammarMasks:
    """The grammars of an engine's requests. Called from the stepping thread, but for start() and
    end()."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._outputs: dict[int, _Output] = {}
        # By request id, of the trees that were walked last.
        self.masks: dict[int, np.ndarray] = {}
        self.errors: dict[int, str] = {}
        self.undecided = False  # the step's scores decide of some trees which masks they need

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
            if output.consumed and (tokens := output.chain()):
                self._executor.force(request_id, tokens)

    def plan(self, drafting: Any) -> Any:
        """The executor's next plan, without the drafts in it that grammars do not allow.

        drafting  SlotDrafting, which stands between stage() and build(); anything else: nobody does
        """
        if hasattr(drafting, "before_build"):
            drafting.before_build = self.constrain
            return self._executor.plan()
        if self._executor.stage() is None:
            return None
        self.constrain()
        return self._executor.build()

    def constrain(self) -> None:
        """Cut the drafts of the staged step; make the masks of trees that are drawn from."""
        self.masks, self.errors, self.undecided = {}, {}, False
        for tree, output in self._followed(self._executor.draft()):
            walk, kept = _walked(output, tree, partial(_TreeWalk.run, fill=not tree.greedy))
            self._keep(tree, output, None if tree.greedy else walk.masks[np.flatnonzero(kept)])
            self.undecided |= tree.greedy
            if tree.request_id not in self.errors and not all(kept):
                self._executor.cut(tree.request_id, kept)

    def mask(
        self, trees: Iterable[Any], scores: Any, *, drawn: bool, best: np.ndarray | None = None
    ) -> None:
        """The masks of trees, now that their rows' scores are there.

        scores  [rows, vocabulary] of the step, before processors
        drawn   also those of trees that are drawn from, which constrain() has not seen
        best    [rows] the best token of each, -1 where one is NaN; None: not known
        """
        if drawn:
            self.masks, self.errors = {}, {}
        for tree, output in self._followed(trees):
            if not tree.greedy and not drawn:
                continue
            rows = slice(tree.first, tree.first + len(tree.tokens))
            known = None if best is None else best[rows].tolist()

            def run(walk: _TreeWalk, tree: Any = tree, rows: Any = rows, known: Any = known) -> Any:
                return walk.follow_best(scores[rows], known) if tree.greedy else walk.run(True)

            walk, _ = _walked(output, tree, run)
            self._keep(tree, output, walk.masks)

    def _followed(self, trees: Iterable[Any]) -> Iterator[tuple[Any, _Output]]:
        """The trees with a grammar, their matchers behind what has been written."""
        for tree in trees:
            output = self._outputs.get(tree.request_id)
            if output is not None and tree.masked:  # else it was cancelled meanwhile
                output.follow(tree.output(output.consumed))
                yield tree, output

    def _keep(self, tree: Any, output: _Output, masks: np.ndarray | None) -> None:
        if (error := output.error()) is not None:
            self.errors[tree.request_id] = error
        if masks is not None:
            self.masks[tree.request_id] = masks


def _walked(output: _Output, tree: Any, run: Callable[[_TreeWalk], Any]) -> tuple[_TreeWalk, Any]:
    """The walk of a tree, and what `run` makes of it: once more if the matcher that it shares with
    others has failed."""
    walk = _TreeWalk(output, tree)
    found = run(walk)
    if output.matcher.is_error() and output.renew(tree.output(0)):
        walk = _TreeWalk(output, tree)
        found = run(walk)
    return walk, found


class _TreeWalk:
    """One pass over a draft tree, root first: what is allowed, and what may follow it.

    masks   int32 [nodes, words]; [0, words] as long as none has been needed
    """

    def __init__(self, output: _Output, tree: Any) -> None:
        self._output, self._matcher, self._ends = output, output.matcher, output.grammar.end_ids
        self._tokens, self._parents, self._fixed = tree.tokens, tree.parents, tree.fixed
        self._words = output.grammar.words
        self._children: list[list[int]] = [[] for _ in self._tokens]
        for node, parent in enumerate(self._parents[1:], 1):
            self._children[parent].append(node)
        self.masks = np.empty((0, self._words), dtype=np.int32)

    def run(self, fill: bool) -> list[int]:
        """1 for each node that stays. fill: masks of all that are allowed."""
        kept = [int(node < self._fixed) for node in range(len(self._tokens))]
        self._descend(0, [], kept, fill)
        return kept

    def follow_best(self, scores: Any, best: list[int] | None = None) -> None:
        """Masks of the nodes of the path that is chosen at which the best token, first of equals,
        is not allowed.

        scores  [nodes, vocabulary]
        best    [nodes] the best tokens, -1 behind a row with a NaN; None: to be found
        """
        node = 0
        path: list[int] = []
        while True:
            row = scores[node]
            token = int(row.argmax()) if best is None else best[node]
            child = self._child(node, token)
            known = child >= self._fixed  # else constrain() had cut it
            is_number = token >= 0 and math.isfinite(float(row[token]))
            if not (is_number and (known or self._allows(path, token))):
                self._fill(node, path, False)
                if not self._children[node]:
                    return
                allowed = _core.best_allowed(_on_host(row), self.masks[node])
                if allowed is None:  # NaN, nothing finite: masks decide, here and below
                    self._descend(node, path, [0] * len(self._tokens), True)
                    return
                token, child = allowed, self._child(node, allowed)
            if child < 0 or token in self._ends:
                return
            node = child
            path.append(token)

    def _allows(self, path: list[int], token: int, *, known: bool = False) -> bool:
        """True: the token may follow the path, and the matcher stands behind it, unless it is an
        end. known: that it may, from the mask."""
        self._output.stand_behind(path)
        if self._matcher.is_stopped():
            return token == self._ends[0]
        # Where text is forced a mask has its first token alone, no other token of the same bytes.
        if not known and (forced := self._output.forced()) and token != forced[0]:
            return False
        if token in self._ends:
            return known or bool(self._matcher.validate_tokens([token]))
        return self._output.go_on([token])

    def _descend(self, top: int, top_path: list[int], kept: list[int], fill: bool) -> None:
        """What is allowed of `top`, which `top_path` leads to, and below it."""
        waiting = [(top, top_path)]  # (node, the path to it), the next last
        while waiting:
            node, path = waiting.pop()
            token = self._tokens[node]
            if node != top:
                if fill and not self._has_bit(self._parents[node], token):
                    continue
                if not self._allows(path, token, known=fill):
                    continue
                path = [*path, token]
            kept[node] = 1
            ended = node != top and token in self._ends
            if fill:
                self._fill(node, path, ended)
            if not ended:
                waiting += [(child, path) for child in reversed(self._children[node])]

    def _child(self, node: int, token: int) -> int:
        """The node of `token` behind `node`; -1: the tree has none."""
        for child in self._children[node]:
            if self._tokens[child] == token:
                return child
        return -1

    def _has_bit(self, node: int, token: int) -> bool:
        """Whether the node's mask, which is there, has the token."""
        return bool(int(self.masks[node, token >> 5]) >> (token & 31) & 1)

    def _fill(self, node: int, path: list[int], ended: bool) -> None:
        if not len(self.masks):
            # A node that no grammar cuts and that is not allowed is never reached: no mask.
            self.masks = np.full((len(self._tokens), self._words), -1, dtype=np.int32)
        only: int | None = self._ends[0]
        if not ended:
            self._output.stand_behind(path)
            only = self._output.only()
        if only is None:
            row_bytes = self._words * 4
            address = self.masks.ctypes.data + node * row_bytes
            self._matcher.unsafe_compute_mask_ptr(address, row_bytes)
            return
        self.masks[node] = 0
        self.masks.view(np.uint32)[node, only >> 5] = 1 << (only & 31)


def _on_host(row: Any) -> np.ndarray:
    """A row of scores, a tensor's or an array's, as float32."""
    return row if isinstance(row, np.ndarray) else np.asarray(row.float().cpu())

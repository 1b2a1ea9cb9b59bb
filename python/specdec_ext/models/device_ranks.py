"""A device's model on several ranks: what goes from rank to rank in a step.

Rank 0 makes a step: its device alone knows the drafted tokens, their tree and what was accepted. So
its host sends sizes, in a packet, and what the step's operations have made follows in the stream
(TensorLink): nobody's host waits for a device. K/V pages have the same ids on all ranks.

Axis letters: B requests, R rows, L rows whose scores are needed, V vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import _core
from ..errors import ModelError
from ..parallel.device_links import link_for
from ..parallel.team import BIND, COPIES, FORWARD, MOVES, Team
from ..parallel.tensor_link import TensorLink
from .device_moves import KvMoves
from .device_step import DeviceStep
from .shard import Shard

if TYPE_CHECKING:
    from .kv_storage import LayerPool
    from .place import Place

__all__ = ["Bounds", "DeviceRanks", "StepPacket"]

# How ranks share out columns: rank r has bounds[r] to bounds[r + 1].
Bounds = tuple[int, ...]
# Scores of so many rows are brought together at once: what they take is a buffer of every rank.
_SCORED_ROWS = 128
_ALIGN = 16  # bytes
_INT, _BYTE = torch.int32, torch.uint8


@dataclass(frozen=True)
class StepPacket:
    """What the host says of a step: sizes of its arrays, and bounds.

    chosen     rows whose scores are needed; -1: all of them, in their order
    scores     1: rank 0 wants scores, 0: the best token of each row
    every_row  1: the last layer computes all rows, whatever is needed
    """

    requests: int
    rows: int
    pages: int
    tables: int
    chosen: int
    max_rows: int
    max_kv_len: int
    scores: int
    every_row: int

    @classmethod
    def of(cls, step: DeviceStep, *, scores: bool, every_row: bool) -> StepPacket:
        chosen = -1 if step.logit_rows is None else len(step.logit_rows)
        requests, pages = step.page_table.shape
        return cls(
            requests, step.num_rows, pages, len(step.tables), chosen,
            step.max_rows, step.max_kv_len, int(scores), int(every_row),
        )  # fmt: skip

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Those of tokens, positions, mask, cu_rows, kv_len, is_tree, tables, logit_rows."""
        b, r = self.requests, self.rows
        found: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((r,), _INT), ((r,), _INT), ((r, _core.MASK_WORDS), _INT), ((b + 1,), _INT),
            ((b,), _INT), ((b,), _BYTE), *[((b, self.pages), _INT)] * self.tables,
        ]  # fmt: skip
        return found + ([((self.chosen,), _INT)] if self.chosen >= 0 else [])


class _Arrays:
    """Memory for arrays that travel together, at a fixed address once it is large enough."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.zeros(1 << 14, dtype=torch.uint8, device=device)
        self._kept: list[torch.Tensor] = []  # what was too small; recorded steps may read it

    def __call__(
        self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The bytes of all, and each; valid until the next call."""
        offsets, end = [], 0
        for shape, dtype in shapes:
            offsets.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
        if end > self._memory.numel():
            self._kept.append(self._memory)
            self._memory = torch.zeros(2 * end, dtype=torch.uint8, device=self._device)
        arrays = [
            self._memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for at, (shape, dtype) in zip(offsets, shapes, strict=True)
        ]
        return self._memory[:end], arrays


class _Chooser:
    """Buffers of DeviceRanks.choose(), made once: a pair of a row is its best score and, in the
    bits of the other float, the token."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, n = size, _SCORED_ROWS
        self._own = torch.zeros(n, 2, device=device)
        self._best = torch.zeros(size * n * 2, device=device)
        self._place = torch.zeros(n, dtype=torch.int64, device=device)
        self._bad = torch.zeros(n, dtype=torch.bool, device=device)
        self._least, self._token = (torch.zeros(n, dtype=_INT, device=device) for _ in range(2))
        self._values: dict[torch.dtype, torch.Tensor] = {}  # one: scores are of one dtype

    def __call__(
        self, link: TensorLink, scores: torch.Tensor, ids: torch.Tensor, first_token: int
    ) -> None:
        n = len(ids)
        own, place, bad = self._own[:n], self._place[:n], self._bad[:n]
        if scores.dtype not in self._values:
            self._values[scores.dtype] = scores.new_zeros(_SCORED_ROWS, 1)
        values = self._values[scores.dtype][:n]
        place.copy_(ids)
        place.clamp_(min=0)
        torch.gather(scores, 1, place.unsqueeze(1), out=values)
        own[:, :1].copy_(values)
        tokens = own.view(_INT)[:, 1]
        tokens.copy_(ids)
        tokens.add_(first_token)
        torch.lt(ids, 0, out=bad)
        tokens.masked_fill_(bad, -1)
        best = self._best[: self._size * n * 2].view(self._size, n, 2)
        link.gather(own, best, to_rank_0=True)
        if link.rank > 0:
            return
        # The first of equal ones is the lowest rank's, whose tokens come first.
        torch.argmax(best[:, :, 0], 0, out=place)
        tokens, token, least = best.view(_INT)[:, :, 1], self._token[:n], self._least[:n]
        torch.gather(tokens, 0, place.unsqueeze(0), out=token.unsqueeze(0))
        torch.amin(tokens, 0, out=least)
        torch.lt(least, 0, out=bad)
        ids.copy_(token)
        ids.masked_fill_(bad, -1)


class DeviceRanks:
    """This rank's device among the others'.

    shard  what it computes
    heads, hidden, ffn, vocab  the ranks' shares of columns: of attention's output, of the residual
           stream, of the gated activation, of the scores
    before_packet  rank 0: called once, before the next packet of a step
    """

    before_packet: Callable[[], None] | None = None

    def __init__(
        self, team: Team, shard: Shard, place: Place, *, dtype: torch.dtype, max_rows: int
    ) -> None:
        self.shard, self.rank, self.size, self.sums = shard, shard.rank, shard.size, shard.sums
        self._team, self._place = team, place
        self.heads: Bounds = tuple(bound * shard.queries for bound in shard.kv_heads)
        self.hidden, self.ffn, self.vocab = shard.hidden, shard.ffn, shard.head
        self._link: TensorLink | None = None
        self._arrays = _Arrays(place.device)
        joined = [] if self.sums else [self.heads, self.hidden, self.ffn]
        # One after another in the stream: one piece of memory for all.
        most = max([max_rows * _widest(b) for b in joined] + [_SCORED_ROWS * _widest(self.vocab)])
        self._sent = torch.zeros(most, dtype=dtype, device=place.device)
        self._got = torch.zeros(self.size * most, dtype=dtype, device=place.device)
        self._chooser = _Chooser(self.size, place.device)

    @property
    def link(self) -> TensorLink:
        """Raises ModelError before bind_cache()."""
        if self._link is None:
            raise ModelError("forward before bind_cache(): the ranks are not connected")
        return self._link

    # -- rank 0 tells --------------------------------------------------------------------------

    @property
    def watch(self) -> Callable[[], None] | None:
        """What the host does while it waits for this device, which may wait for other ranks'; None:
        it just waits, as an emulated device looks after them itself."""
        return self._team.watch if self.rank == 0 and self._place.on_cuda else None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A step's calls belong together: on rank 0 a lost rank is an EngineError."""
        if self.rank > 0:
            yield
            return
        with self._team.step():
            yield

    def bind(self, num_pages: int, page_size: int, narrow: Sequence[LayerPool]) -> None:
        """The ranks make pages of their heads, as many as rank 0, and meet."""
        words = [num_pages, page_size]
        for pool in narrow:
            words += [int(pool.k.shape[1]), len(pool.layers), *pool.layers]
        if self.rank == 0:
            self.tell(BIND, *words)
        self.connect()

    def connect(self) -> None:
        """All ranks at once. Raises ConfigError where devices cannot reach each other."""
        self._link = link_for(self._team, self._place.device)

    def tell(self, kind: int, *words: int) -> None:
        """Rank 0: a packet of numbers."""
        self._team.tell(kind, np.array(words, dtype=np.int32))

    def _announce(self, kind: int, words: Sequence[int]) -> None:
        if (call := self.before_packet) is not None:
            self.before_packet = None
            call()
        self._team.link.tell(kind, np.array(words, dtype=np.int32))

    def tell_step(self, step: DeviceStep, *, scores: bool, every_row: bool) -> None:
        """Rank 0: the step comes; sizes by the host, arrays in the stream."""
        packet = StepPacket.of(step, scores=scores, every_row=every_row)
        self._announce(FORWARD, astuple(packet))
        chosen = [] if step.logit_rows is None else [step.logit_rows]
        self._spread(
            packet.shapes,
            (step.tokens, step.positions, step.mask, step.cu_rows, step.kv_len, step.is_tree,
             *step.tables, *chosen),
        )  # fmt: skip

    def tell_moves(self, moves: KvMoves) -> None:
        """Rank 0: K/V of accepted drafts is moved; every rank has its own heads of it."""
        requests, pages = moves.tables[0].shape
        sizes = (requests, pages, len(moves.tables), moves.num_rows, moves.max_kv_len)
        with self.together():
            self._announce(MOVES, sizes)
            self._spread(
                _move_shapes(*sizes[:3]),
                (moves.kv_len, moves.cu_rows, moves.path, moves.path_len, *moves.tables),
            )

    def tell_copies(self, copies: Sequence[tuple[bool, int, int, Sequence[int]]]) -> None:
        """Rank 0: pages go to the host's pool (True), or come from it: page, page of the pool, and
        the page's numbers in pools of narrow windows."""
        words: list[int] = []
        for to_host, page, host_page, parts in copies:
            words += [int(to_host), page, host_page, len(parts), *parts]
        self.tell(COPIES, *words)

    # -- the others hear -----------------------------------------------------------------------

    def hear(self) -> tuple[int, np.ndarray]:
        """The next packet and its words."""
        kind, words, _ = self._team.link.hear()
        return kind, words.view(np.int32)

    def hear_step(self, words: np.ndarray) -> tuple[DeviceStep, StepPacket]:
        """The step that rank 0's packet announces; valid until the next."""
        packet = StepPacket(*(int(word) for word in words))
        arrays = self._receive(packet.shapes)
        tokens, positions, mask, cu_rows, kv_len, is_tree, *rest = arrays
        step = DeviceStep(
            tokens=tokens,
            positions=positions,
            mask=mask,
            cu_rows=cu_rows,
            kv_len=kv_len,
            is_tree=is_tree,
            page_table=rest[0],
            narrow_tables=tuple(rest[1 : packet.tables]),
            logit_rows=rest[packet.tables] if packet.chosen >= 0 else None,
            status=None,  # rank 0's kernels see the same
            max_rows=packet.max_rows,
            max_kv_len=packet.max_kv_len,
        )
        return step, packet

    def hear_moves(self, words: np.ndarray) -> KvMoves:
        """The moves that rank 0's packet announces; valid until the next packet."""
        requests, pages, tables, num_rows, max_kv_len = (int(word) for word in words)
        arrays = self._receive(_move_shapes(requests, pages, tables))
        kv_len, cu_rows, path, path_len, *found = arrays
        return KvMoves(tuple(found), kv_len, cu_rows, path, path_len, num_rows, max_kv_len)

    # -- all ranks -----------------------------------------------------------------------------

    def own(self, bounds: Bounds, rows: int) -> torch.Tensor:
        """[rows, this rank's share]: where it may be computed, so that join() copies nothing."""
        width = _widest(bounds)
        sent = self._sent[: rows * width].view(rows, width)
        return sent[:, : bounds[self.rank + 1] - bounds[self.rank]]

    def join(
        self, own: torch.Tensor, bounds: Bounds, whole: torch.Tensor, *, to_rank_0: bool = False
    ) -> torch.Tensor:
        """Every rank's columns [R, share] into whole [R, bounds[-1]], contiguous, of every rank;
        returns it.

        to_rank_0  the others' `whole` stays as it is
        """
        rows, width = len(own), _widest(bounds)
        sent = self._sent[: rows * width].view(rows, width)
        place = sent[:, : own.shape[1]]
        if own.data_ptr() != place.data_ptr():
            place.copy_(own)
        # What is behind a narrower share is nobody's.
        got = self._got[: self.size * rows * width].view(self.size, rows, width)
        self.link.gather(sent, got, to_rank_0=to_rank_0)
        if self.rank > 0 and to_rank_0:
            return whole
        if bounds[-1] == self.size * width:  # even shares: one copy
            whole.view(rows, self.size, width).copy_(got.transpose(0, 1))
            return whole
        for rank, (first, last) in enumerate(itertools.pairwise(bounds)):
            whole[:, first:last].copy_(got[rank, :, : last - first])
        return whole

    def choose(self, scores: torch.Tensor, ids: torch.Tensor) -> None:
        """scores [n, share] of this rank and the best of each row, ids int32 [n] (-1: a NaN), n <=
        score_rows: on rank 0 ids become the best of all ranks' scores, the first of equal ones."""
        self._chooser(self.link, scores, ids, self.vocab[self.rank])

    @property
    def score_rows(self) -> int:
        """Rows whose scores are brought together at once."""
        return _SCORED_ROWS

    def _spread(
        self,
        shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        whole, arrays = self._arrays(shapes)
        for array, tensor in zip(arrays, tensors, strict=True):
            array.copy_(tensor)
        self.link.spread(whole)

    def _receive(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
        whole, arrays = self._arrays(shapes)
        self.link.spread(whole)
        return arrays


def _widest(bounds: Bounds) -> int:
    return max(high - low for low, high in itertools.pairwise(bounds))


def _move_shapes(
    requests: int, pages: int, tables: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Those of kv_len, cu_rows, path, path_len and the tables."""
    return [
        ((requests,), _INT), ((requests + 1,), _INT), ((requests, _core.MAX_STEP_TOKENS), _INT),
        ((requests,), _INT), *[((requests, pages), _INT)] * tables,
    ]  # fmt: skip

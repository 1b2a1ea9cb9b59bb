"""Trees of a draft model that grow level by level on a step's stream.

the model's pass over the texts, torch.topk, grow_drafts(begins=True)
per further level: pack_drafts, build_step, the model's pass, torch.topk, grow_drafts
propose_growths
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec_ext import _core
from specdec_ext.ops._where import stream_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec_ext._core import SlotLayout


def make_growths(num_requests: int, device: str | torch.device = "cpu") -> Tensor:
    """[num_requests, bytes] uint8 of empty trees."""
    import torch

    return torch.zeros(num_requests, _core.GROWTH_BYTES, dtype=torch.uint8, device=device)


def grow_drafts(
    growths: Tensor,
    shares: Tensor,
    columns: Tensor,
    limits: Tensor,
    *,
    num_columns: int,
    max_open: int,
    begins: bool = False,
    token_ids: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Add a level to each request's tree: children of the nodes that the last pass read.

    Shapes   growths [D, bytes] uint8 (``make_growths``); shares [D, places, width] float32,
             columns [D, places, width] int64: the likeliest columns of each row of that pass, best
             first, and the share that the model gave them; the first level has one row per request,
             the golden token's. limits [D] int32: the most nodes of the tree; 0: no tree is wanted.
             token_ids [num_columns] int32: the token of each column, None: the column.
    Kept     a node's worth is the product of the shares on its path. The most valuable nodes stay,
             up to the limit; on ties earlier ones. A share that is not above 0, rises, or belongs
             to no column ends its row. The max_open most valuable nodes of this level that stay are
             opened: the next pass reads them. max_open 0: this level is the last.
    Writes   growths.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.grow_drafts(
        growths,
        shares,
        columns,
        limits,
        num_columns=num_columns,
        max_open=max_open,
        begins=begins,
        token_ids=token_ids,
        backend=backend,
        stream=stream_of(growths),
    )


def pack_drafts(
    growths: Tensor,
    golden: Tensor,
    *,
    tokens: Tensor,
    parents: Tensor,
    cu_rows: Tensor,
    logit_rows: Tensor,
    sources: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Write the rows of the next pass: each golden token again, then all opened nodes.

    Shapes   golden [D] int32.
    Writes   tokens, parents [R] int32, parents within the request; token 0 and parent -1 after the
             last; cu_rows [D + 1] int32; logit_rows [D, places] int32: the rows of the newest
             level's nodes, filled up with 0. A request whose tree is complete, or whose rows do not
             fit, has no rows. sources [R] int32: the row that each row's parent had in the pass
             before, within its request; -1 for golden tokens and after the last row.
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.pack_drafts(
        growths,
        golden,
        tokens=tokens,
        parents=parents,
        cu_rows=cu_rows,
        logit_rows=logit_rows,
        sources=sources,
        backend=backend,
        stream=stream_of(growths),
    )


def propose_growths(
    layout: SlotLayout,
    slots: Tensor,
    slot_ids: Tensor,
    growths: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Put the trees into the requests' slots, as ``propose_drafts`` does.

    The most valuable drafts come first; a draft's worth is its estimate.

    Shapes   slots, slot_ids [D] as in ``propose_drafts``; growths [D, bytes].
    Raises   ValueError or TypeError naming the argument, what it is and what it has to be.
    """
    _core.propose_growths(
        layout, slots, slot_ids, growths, backend=backend, stream=stream_of(growths)
    )

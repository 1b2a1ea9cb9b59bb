"""Mutants of holding drafts while rows are weighed."""

from __future__ import annotations

from mutants.accept import ACCEPT, ROWS
from mutants.model import Mutant

HELD = "cuda/accept/row_held.cuh"

MUTANTS = [
    Mutant(
        "held-1",
        "probabilities that are none are summed as if they were",
        HELD,
        "if (faulty) atomicOr(&held.faults, 1u);",
        "",
    ),
    Mutant(
        "held-2",
        "every sibling is held by the first one's number",
        HELD,
        "accept_uniform_at(drafted, depth, earlier)",
        "accept_uniform_at(drafted, depth, 0)",
    ),
    Mutant(
        "held-3",
        "what earlier siblings took from a draft's probabilities is forgotten",
        HELD,
        "draft_mass(q, shared->earlier, remove ? earlier : 0)",
        "draft_mass(q, shared->earlier, 0)",
    ),
    Mutant(
        "held-4",
        "of several rejected siblings the first alone is subtracted",
        HELD,
        "for (int i = 0; i < count; ++i) { RowChunks",
        "for (int i = 0; i < min(count, 1); ++i) { RowChunks",
    ),
    Mutant(
        "held-5",
        "a later sibling is held against the mass of the row's whole law",
        HELD,
        "earlier == 0 ? law.cut.total",
        "true ? law.cut.total",
    ),
    Mutant(
        "held-6",
        "a draft is held before both that it takes are there",
        HELD,
        "return count_piece(&held->joined, 2, shared);",
        "return count_piece(&held->joined, 1, shared);",
    ),
    Mutant(
        "held-7",
        "a kept draft's row counts as one that no path leads to",
        HELD,
        "return child > node ? kRowUnused | kNeverHeld : 0u;",
        "return child >= node ? kRowUnused | kNeverHeld : 0u;",
    ),
    Mutant(
        "held-8",
        "what lies below a rejected draft's siblings is left out",
        HELD,
        "return child == owner.node ? kRowUnused : 0u;",
        "return child >= owner.node ? kRowUnused : 0u;",
    ),
    Mutant(
        "held-11",
        "what is left of a law with top_k or top_p is that of the whole row",
        HELD,
        "cut.keeps(order_key(score), token) ? weights.of(score) : 0.0f",
        "weights.of(score)",
    ),
    Mutant(
        "held-12",
        "the first draft's number decides what is drawn from what is left",
        HELD,
        "uniform_of(p, owner_of(p, row), row, shared)",
        "uniform_of(p, owner, at, shared)",
    ),
    Mutant(
        "held-13",
        "blocks leave while rejected drafts wait",
        ROWS,
        "if (holds) empty_queue<T>(p, tickets, pieces, piece_chunks, shared);",
        "",
        harmless="slower, the same tokens: what nobody has subtracted the walk subtracts itself",
    ),
    Mutant(
        "held-14",
        "the walk follows drafts of which it is not known what comes after them",
        ACCEPT,
        "shared->known = shared->next[node] == kNoDraft;",
        "shared->known = true;",
    ),
    Mutant(
        "held-15",
        "a mark says nothing: all rows are weighed, all drafts summed",
        HELD,
        "if (bits == 0) return;",
        "return;",
        harmless="marks save work, and no more: the tokens are the same",
    ),
    Mutant(
        "held-16",
        "pieces weighed are counted on from those searched: no row is drawn beforehand",
        ROWS,
        "count_piece(p.laws.done + 2 * row + 1, pieces + (owner.cuts ? 1 : 0), shared)",
        "count_piece(p.laws.done + 2 * row, pieces + (owner.cuts ? 1 : 0), shared)",
    ),
    Mutant(
        "held-17",
        "what is left along a list has what top_k and top_p cut",
        HELD,
        "return law.cut.keeps(c.key, c.id) ? c.weight : 0.0f;",
        "return c.weight;",
    ),
    Mutant(
        "held-18",
        "along a list the first rejected sibling alone is subtracted",
        HELD,
        "for (int i = 0; i < law.count; ++i) { float q",
        "for (int i = 0; i < min(law.count, 1); ++i) { float q",
    ),
    Mutant(
        "held-19",
        "the list's place is drawn, not its token",
        HELD,
        "return on_list.of(i); })] .id;",
        "return on_list.of(i); })] .id - 1;",
    ),
    Mutant(
        "held-20",
        "every piece of a rejected draft goes along the whole list",
        HELD,
        "if (owner.cuts && begin > 0) return;",
        "",
    ),
    Mutant(
        "held-21",
        "a list is left without the weights that its row was drawn by",
        "cuda/accept/row_listed.cuh",
        "if (p.holds()) write_list(p, row, made, shared->list);",
        "",
    ),
]

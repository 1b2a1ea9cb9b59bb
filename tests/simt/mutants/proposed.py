"""Mutants of the drafts that operations bring, and of what drafters read in slots."""

from __future__ import annotations

from mutants.model import Mutant

DRAFTS = "cuda/step/proposed_drafts.cu"
TEXT = "cpp/algo/proposed_draft.h"
SLOT = "cpp/algo/slot.h"
PARAMS = "cpp/backend/slot_ops.h"

MUTANTS = [
    Mutant(
        "proposed-1",
        "every request is told what the first one is",
        DRAFTS,
        "const std::int64_t first = std::int64_t{b} * p.width;",
        "const std::int64_t first = 0;",
    ),
    Mutant(
        "proposed-2",
        "counts are not looked at",
        DRAFTS,
        "p.counts == nullptr ? p.width : p.counts[b];",
        "p.width;",
    ),
    Mutant(
        "proposed-3",
        "parents are not looked at",
        DRAFTS,
        "p.parents == nullptr ? nullptr : p.parents + first,",
        "nullptr,",
    ),
    Mutant(
        "proposed-4",
        "what is no draft is not reported",
        DRAFTS,
        "if (misplaced && team.rank() == 0) report(p.exec.status, b, kStatusBadTree);",
        "",
    ),
    Mutant(
        "proposed-5",
        "good entries behind a bad one count",
        TEXT,
        "team.scan(is_good && bad_before == 0 ? 1 : 0, &total);",
        "team.scan(is_good ? 1 : 0, &total);",
    ),
    Mutant(
        "proposed-6",
        "the walk goes on behind a turn that held a bad entry",
        TEXT,
        "first < count && kept == first; first += team.size()",
        "first < count; first += team.size()",
    ),
    Mutant(
        "proposed-7",
        "a draft may hang under one that comes after it",
        TEXT,
        "parent(i) >= -1 && parent(i) < i;",
        "parent(i) >= -1 && parent(i) < count;",
    ),
    Mutant(
        "proposed-8",
        "drafts of another history are taken",
        TEXT,
        "const std::int32_t proposed = from->len == len ? from->count : 0;",
        "const std::int32_t proposed = from->count;",
    ),
    Mutant(
        "proposed-9",
        "drafts past the text's end are taken",
        TEXT,
        "if (team.any(too_deep)) {",
        "if (false) {",
    ),
    Mutant(
        "proposed-10",
        "the step's limit is not looked at",
        TEXT,
        "std::int32_t count = proposed < max_drafts ? proposed : max_drafts;",
        "std::int32_t count = proposed;",
    ),
    Mutant(
        "proposed-11",
        "no barrier between the choice of shallow drafts and their tokens",
        TEXT,
        "take_shallow(from, max_drafts, max_depth, tree);\n    team.sync();",
        "take_shallow(from, max_drafts, max_depth, tree);",
    ),
    Mutant(
        "proposed-12",
        "what a slot's last request was told still counts",
        SLOT,
        "slot->proposed_draft()->len = -1;",
        ";",
    ),
    Mutant(
        "proposed-13",
        "a request at its last token is drafted for",
        SLOT,
        "slot_draft_room(slot) > 0 && max_drafts > 0;",
        "slot_draft_room(slot) >= 0 && max_drafts > 0;",
    ),
    Mutant(
        "proposed-14",
        "the tokens are those before the last ones",
        DRAFTS,
        "slot->history()[len - p.width + i] : 0;",
        "slot->history()[len - p.width + i - 1] : 0;",
    ),
    Mutant(
        "proposed-15",
        "a row's last words are not copied",
        DRAFTS,
        "i < words; i += kKeepThreads",
        "i + 1 < words; i += kKeepThreads",
    ),
    Mutant(
        "proposed-16",
        "rows are copied in vectors that do not fit",
        DRAFTS,
        "return p.row_bytes % 16 == 0 && p.hidden_stride % 16 == 0 && is_aligned(p.hidden) &&\n"
        "         is_aligned(p.kept);",
        "return true;",
    ),
    Mutant(
        "proposed-17",
        "the row is the golden token's, whatever was accepted",
        PARAMS,
        "moved > 0 ? path[std::int64_t{b} * kMaxStepTokens + moved - 1] : tokens - 1;",
        "0;",
    ),
    Mutant(
        "proposed-18",
        "a path that was moved is taken for one in front",
        PARAMS,
        "moved > 0 ? path[std::int64_t{b} * kMaxStepTokens + moved - 1] : tokens - 1;",
        "tokens - 1;",
    ),
    Mutant(
        "proposed-19",
        "a text that has ended leaves its row",
        PARAMS,
        "slots.at(slot_ids[b])->frozen() ||",
        "",
    ),
    Mutant(
        "proposed-20",
        "parents stand where they stood in the whole tree",
        TEXT,
        "tree->parents[kept] = from->parents[i] < 0 ? 0 : low + 1;",
        "tree->parents[kept] = from->parents[i] + 1;",
    ),
    Mutant(
        "proposed-21",
        "near the end the step's limit is not looked at",
        TEXT,
        "i < from->count && kept < max_drafts; ++i",
        "i < from->count; ++i",
    ),
    Mutant(
        "proposed-22",
        "every request has the estimates of the first one",
        DRAFTS,
        "p.survival == nullptr ? nullptr : p.survival + first, count,",
        "p.survival, count,",
    ),
    Mutant(
        "proposed-23",
        "a number that is no chance is taken for one",
        TEXT,
        "to->survival[i] = chance >= 0.0f && chance <= 1.0f ? chance : kUnknownSurvival;",
        "to->survival[i] = chance;",
    ),
]

"""Mutants of drafting and accepting on slots."""

from __future__ import annotations

from mutants.model import Mutant

DRAFT = "cuda/step/draft_step.cu"
COMMIT = "cuda/step/commit_step.cu"

MUTANTS = [
    Mutant(
        "slots-1",
        "the tree's size is not kept for the commit",
        DRAFT,
        "if (team.rank() == 0) slot->tree.size = tree->size;",
        "",
    ),
    Mutant(
        "slots-2",
        "parents are not kept for the commit",
        DRAFT,
        "    slot->tree.parents[i] = tree->parents[i];\n",
        "",
    ),
    Mutant(
        "slots-3",
        "rows counted without the last warp's",
        DRAFT,
        "for (int w = 0; w < kGatherThreads / 32; ++w) sum += partial[w];",
        "for (int w = 0; w + 1 < kGatherThreads / 32; ++w) sum += partial[w];",
    ),
    Mutant(
        "slots-4",
        "no barrier before warps' sums are read",
        DRAFT,
        "partial[threadIdx.x / 32] = value;\n  __syncthreads();",
        "partial[threadIdx.x / 32] = value;",
    ),
    Mutant(
        "slots-5",
        "a request that just fits is left out",
        DRAFT,
        "const bool fits = first + rows <= p.num_rows;",
        "const bool fits = first + rows < p.num_rows;",
    ),
    Mutant(
        "slots-6",
        "rows behind the last request keep what was there",
        DRAFT,
        "      p.parents[row] = -1;\n",
        "",
    ),
    Mutant(
        "slots-7",
        "the golden token's row counts as cached",
        DRAFT,
        "p.kv_len[b] = len > 0 ? len - 1 : 0;",
        "p.kv_len[b] = len;",
    ),
    Mutant(
        "slots-8",
        "another number of choices than nodes is taken",
        COMMIT,
        "rows == 0 || rows != expected ||",
        "rows == 0 ||",
    ),
    Mutant(
        "slots-9",
        "every request reads the first one's choices",
        COMMIT,
        "shared.sampled[i] = p.sampled[first + i];",
        "shared.sampled[i] = p.sampled[i];",
    ),
    Mutant(
        "slots-10",
        "paths of all requests in one place",
        COMMIT,
        "p.path[std::int64_t{b} * kMaxStepTokens + i]",
        "p.path[i]",
    ),
    Mutant(
        "slots-11",
        "the stop token is not reported",
        COMMIT,
        "  out.stop_token = result.stop_token;\n",
        "",
    ),
    Mutant(
        "slots-12",
        "what accept_step kept is not looked at",
        COMMIT,
        "if (p.accepted.given()) {",
        "if (false) {",
    ),
    Mutant(
        "slots-13",
        "a path that is none of the tree is followed",
        COMMIT,
        "if (!is_accepted_path(team, &shared.tree, &shared.accepted)) {",
        "if (false) {",
    ),
    Mutant(
        "slots-14",
        "every request keeps what the first one does",
        COMMIT,
        "p.accepted.load(team, b, &shared.accepted);",
        "p.accepted.load(team, 0, &shared.accepted);",
    ),
    Mutant(
        "enter-1",
        "the first occurrence is whichever came first to the entry",
        "cuda/step/enter_prompt.cuh",
        "if (!is_new) atomicMin(&entry->first, e);",
        "",
    ),
    Mutant(
        "enter-2",
        "the last occurrence is whichever came last to the entry",
        "cuda/step/enter_prompt.cuh",
        "atomicMax(&entry->last, e); return true;",
        "atomicExch(&entry->last, e); return true;",
        unseen="without a seed the emulator's threads come to an entry in the order of positions",
    ),
    Mutant(
        "enter-3",
        "an entry has no tag",
        "cuda/step/enter_prompt.cuh",
        "if (is_new) entry->tag = pattern.tag;",
        "",
    ),
    Mutant(
        "enter-4",
        "a crowded table stays as the block has filled it",
        "cuda/step/enter_prompt.cuh",
        "const bool good = fits && !crowded(team, index);",
        "const bool good = true;",
    ),
    Mutant(
        "enter-5",
        "warps end before all have read the slot",
        "cuda/step/commit_step.cu",
        "__syncthreads();  // all have read the slot\n",
        "",
    ),
    Mutant(
        "enter-6",
        "a block leaves the last token out of the index that it makes",
        "cuda/step/commit_step.cu",
        "slot->history(), slot->len); } }",
        "slot->history(), slot->len - 1); } }",
        harmless="ngram_extend() goes on where the index ends",
    ),
    Mutant(
        "enter-7",
        "the entries are not looked at behind a barrier",
        "cuda/step/enter_prompt.cuh",
        "team.sync(); const bool good",
        "const bool good",
    ),
]

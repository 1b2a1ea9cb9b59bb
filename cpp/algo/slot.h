// A request that lives in a backend's memory: history, limits, stop rules, drafter and the draft
// tree of the step in flight, in one block without pointers. Three verbs over it are all that a
// step needs besides the model:
//
//   slot_draft   before the forward pass: the tree of this step
//   slot_accept  after it: greedy acceptance along the tree. Requests with other rules bring what
//                accept_step decided for them (backend/accept_ops.h)
//   slot_commit  apply the stop rules token by token, advance the history and the drafter
//
// The host writes a slot when a request enters (slot_write) and then need not read it again: what
// was delivered comes as a SlotResult. A slot that has ended is frozen: it drafts no rows and
// delivers nothing, so steps may be enqueued before the host knows.
//
// Block: Slot, history [max_seq_len], then the LookaheadState, NgramIndex, SuffixState or
// ProposedDraft (8-byte aligned).
#pragma once

#include <cstddef>
#include <cstdint>

#include "algo/accept.h"
#include "algo/lookahead.h"
#include "algo/ngram_index.h"
#include "algo/proposed_draft.h"
#include "algo/sampling_law.h"
#include "algo/stop_rules.h"
#include "algo/suffix_draft.h"
#include "algo/team.h"
#include "base/types.h"
#include "tree/draft_tree.h"

namespace specdec {

// kProposed: operations in front of the step bring the drafts (proposed_draft.h).
enum class SlotMethod : std::int32_t { kNone, kLookahead, kNgram, kProposed, kSuffix };

// End tokens and stop ids of one request, together.
inline constexpr std::int32_t kMaxSlotStopIds = 256;

// What all slots of a pool share: where the parts of a block lie, and upper bounds for requests.
struct SlotLayout {
  SlotMethod method = SlotMethod::kNone;
  std::int32_t max_seq_len = 0;
  LookaheadConfig lookahead;    // kLookahead: the largest triple
  std::int32_t pool_grams = 0;  // kLookahead: entries of a request's n-gram pool
  std::int32_t max_ngram = 0;   // kNgram: longest pattern M
  std::int64_t drafter_offset = 0;
  std::int64_t bytes = 0;  // of one slot
};

struct Slot {
  std::int32_t len;      // tokens of the history; the last one is the golden token
  std::int32_t begun;    // 0: the next commit is that of the prompt's last row
  std::int32_t finish;   // FinishReason; not kNone: frozen
  std::int32_t max_len;  // of the history
  SlotMethod method;     // kNone: this request is decoded plainly
  LookaheadConfig lookahead;
  std::int32_t pool_grams;
  std::int32_t max_ngram;
  NgramLookup ngram;
  NgramMatch match;  // scratch of a lookup
  SuffixLookup suffix;
  std::uint64_t seed;
  std::int64_t drafter_offset;  // from the start of the block
  std::int32_t num_eos, num_stop_ids;
  TokenId stop_ids[kMaxSlotStopIds];  // end tokens first
  DraftTree tree;                     // of the step in flight; size 0: no rows

  SPECDEC_HD TokenId* history() { return reinterpret_cast<TokenId*>(this + 1); }
  SPECDEC_HD LookaheadState* lookahead_state() {
    return reinterpret_cast<LookaheadState*>(reinterpret_cast<std::byte*>(this) + drafter_offset);
  }
  SPECDEC_HD NgramIndex* ngram_index() {
    return reinterpret_cast<NgramIndex*>(reinterpret_cast<std::byte*>(this) + drafter_offset);
  }
  SPECDEC_HD SuffixState* suffix_state() {
    return reinterpret_cast<SuffixState*>(reinterpret_cast<std::byte*>(this) + drafter_offset);
  }
  SPECDEC_HD ProposedDraft* proposed_draft() {
    return reinterpret_cast<ProposedDraft*>(reinterpret_cast<std::byte*>(this) + drafter_offset);
  }
  SPECDEC_HD bool frozen() const {
    return finish != static_cast<std::int32_t>(FinishReason::kNone) || len == 0;
  }
};

// What one step delivered to one request.
struct SlotResult {
  std::int32_t num_tokens;
  std::int32_t num_drafts;    // drafts verified
  std::int32_t num_accepted;  // of the tokens, how many were accepted drafts
  std::int32_t finish;        // FinishReason
  TokenId stop_token;         // kNoStopToken: none
  std::int32_t bad_row;       // it ended because a row of scores holds a NaN (1), no token (2)
  TokenId tokens[kMaxStepTokens];
};

// Rows of the model's result that a commit of this slot takes, with a tree of `tree_size` nodes in
// flight; 0: none.
SPECDEC_HD inline std::int32_t slot_logit_rows(const Slot* slot, std::int32_t tree_size) {
  if (slot->frozen()) return 0;
  return slot->begun == 0 ? 1 : tree_size;
}

// What one step may draft, at most; window rows and guesses count for lookahead.
struct DraftShare {
  std::int32_t max_drafts = kMaxDraftLen;
  std::int32_t window_rows = LookaheadBudget::kAll, guesses = LookaheadBudget::kAll;
};

// Drafts on the longest path that its text has room for; the token behind them takes the last
// place.
SPECDEC_HD inline std::int32_t slot_draft_room(const Slot* slot) {
  return slot->max_len - slot->len - 1;
}

// The tree of this step, within `share`; size 0 for a slot that is frozen. `tree` is in memory that
// all ranks see: the slot's own, or faster memory that is copied there afterwards.
template <Team TeamT>
SPECDEC_HD inline void slot_draft(const TeamT& team, Slot* slot, const DraftShare& share,
                                  DraftTree* tree) {
  // Every rank reads before one of them writes.
  const bool frozen = slot->frozen(), begun = slot->begun != 0;
  const std::int32_t len = slot->len, room = slot_draft_room(slot);
  const std::int32_t max_drafts = share.max_drafts;
  const std::int32_t drafts = max_drafts < room ? max_drafts : room;  // a chain's depth is its size
  team.sync();
  if (frozen || !begun) {
    if (team.rank() == 0) tree->size = 0;
    team.sync();
    return;
  }
  const TokenId golden = slot->history()[len - 1];
  if (slot->method == SlotMethod::kLookahead && max_drafts > 0 && room > 0) {
    LookaheadBudget budget;
    budget.window_rows = share.window_rows;
    budget.guesses = share.guesses;
    budget.max_drafts = max_drafts;
    budget.max_depth = room;
    lookahead_draft(team, slot->lookahead_state(), golden, budget, tree);
    return;
  }
  if (slot->method == SlotMethod::kNgram && drafts > 0) {
    ngram_lookup(team, slot->ngram_index(), slot->history(), len, slot->ngram, &slot->match);
    const std::int32_t count = slot->match.length < drafts ? slot->match.length : drafts;
    for (std::int32_t i = team.rank(); i < count; i += team.size()) {
      tree->tokens[i + 1] = slot->history()[slot->match.source + i];
      tree->parents[i + 1] = i;
    }
    if (team.rank() == 0) {
      tree->reset(golden);
      tree->size = 1 + count;
    }
    team.sync();
    return;
  }
  if (slot->method == SlotMethod::kSuffix && drafts > 0) {
    suffix_draft(team, slot->suffix_state(), slot->history(), len, slot->suffix, max_drafts, room,
                 tree);
    return;
  }
  if (slot->method == SlotMethod::kProposed && drafts > 0) {
    take_proposed_draft(team, slot->proposed_draft(), len, golden, max_drafts, room, tree);
    return;
  }
  if (team.rank() == 0) tree->reset(golden);
  team.sync();
}

// Tokens of a history that wants drafts brought for its next step, `max_drafts` at most; 0: none.
SPECDEC_HD inline std::int32_t slot_len_to_draft(const Slot* slot, std::int32_t max_drafts) {
  const bool wants = slot->method == SlotMethod::kProposed && !slot->frozen() && slot->begun != 0 &&
                     slot_draft_room(slot) > 0 && max_drafts > 0;
  return wants ? slot->len : 0;
}

// The result of a slot that had no rows in the step.
template <Team TeamT>
SPECDEC_HD inline void slot_no_result(const TeamT& team, const Slot* slot, SlotResult* result,
                                      std::int32_t* path_len) {
  if (team.rank() == 0) {
    *result = SlotResult{};
    result->finish = slot->finish;
    result->stop_token = kNoStopToken;
    *path_len = 0;
  }
  team.sync();
}

// Brings the drafter up to date with `num_new` tokens at the end of the history. `entered`: its
// index of the prompt has been made (cuda/step/enter_prompt.cuh).
template <Team TeamT>
SPECDEC_HD inline void slot_feed_drafter(const TeamT& team, Slot* slot, const DraftTree* tree,
                                         const TokenId* sampled, bool first, bool own_tree,
                                         bool entered, std::int32_t len, std::int32_t num_new) {
  const TokenId* decided = slot->history() + len - num_new;
  if (slot->method == SlotMethod::kLookahead) {
    LookaheadState* state = slot->lookahead_state();
    if (first) {
      lookahead_init(team, state, slot->lookahead, slot->pool_grams, slot->history(), len - num_new,
                     slot->seed);
    } else if (!own_tree) {
      if (team.rank() == 0) state->emitted_rows = 0;  // what it drafted did not run
      team.sync();
    }
    const bool drafted = !first && own_tree;
    lookahead_update(team, state, drafted ? tree->tokens : nullptr, drafted ? sampled : nullptr,
                     decided, num_new);
  } else if (slot->method == SlotMethod::kNgram) {
    if (first && !entered) {
      ngram_init(team, slot->ngram_index(), slot->max_len, ngrams_up_to(slot->max_ngram));
    }
    ngram_extend(team, slot->ngram_index(), slot->history(), len);
  } else if (slot->method == SlotMethod::kSuffix) {
    if (first) suffix_init(team, slot->suffix_state(), slot->max_len);
    suffix_extend(team, slot->suffix_state(), slot->history(), len);
  } else if (slot->method == SlotMethod::kProposed && first && team.rank() == 0) {
    slot->proposed_draft()->len = -1;  // what the slot's last request left continues no history
  }
}

// The step's tree as acceptance sees it: that of the prompt's last row is its token alone. `tree`
// is where all ranks see it, here and below.
template <Team TeamT>
SPECDEC_HD inline void slot_begin_tree(const TeamT& team, Slot* slot, DraftTree* tree) {
  team.sync();
  if (team.rank() == 0 && slot->begun == 0) tree->reset(slot->history()[slot->len - 1]);
  team.sync();
}

// Greedy acceptance. `sampled[i]`: the target's choice after node i of the tree, -1 for scores that
// hold a NaN.
template <Team TeamT>
SPECDEC_HD inline void slot_accept(const TeamT& team, const DraftTree* tree, const TokenId* sampled,
                                   AcceptResult* accepted) {
  accept_greedy(team, tree->tokens, tree->parents, tree->size, sampled, kMaxDraftLen, accepted);
}

// Is this a path down the tree with its tokens, and at most one token after it? What accept_step
// wrote is moved K/V along, so it is not believed. A result without tokens is a bad row's.
template <Team TeamT>
SPECDEC_HD inline bool is_accepted_path(const TeamT& team, const DraftTree* tree,
                                        const AcceptResult* accepted) {
  const std::int32_t length = accepted->path_len, size = tree->size;
  const std::int32_t emitted = accepted->num_emitted;
  const bool counted = length >= 0 && length < size && (emitted == length || emitted == length + 1);
  bool bad = !counted || (emitted > length && accepted->emitted[length] < 0);
  for (std::int32_t i = team.rank(); counted && i < length; i += team.size()) {
    const std::int32_t node = accepted->path[i], above = i == 0 ? 0 : accepted->path[i - 1];
    const bool inside = node > 0 && node < size;
    bad = bad || !inside || tree->parents[node] != above ||
          tree->tokens[node] != accepted->emitted[i];
  }
  return !team.any(bad);
}

// `sampled[i]`: the target's choice after node i of the tree (after the prompt's last row, if the
// slot has not begun), negative for a row that has none; drafters read those of rejected nodes too.
// `accepted`: what is kept of `tree`; `own_tree`: the slot's drafter drafted it. The K/V of the
// first *path_len nodes of path has to move: node path[i] belongs at slot i + 1 of the step; 0 when
// all of it lies there already.
template <Team TeamT>
SPECDEC_HD inline void slot_commit(const TeamT& team, Slot* slot, const DraftTree* tree,
                                   const TokenId* sampled, const AcceptResult* accepted,
                                   SlotResult* result, std::int32_t* path, std::int32_t* path_len,
                                   bool own_tree = true, bool entered = false) {
  const bool first = slot->begun == 0;
  const std::int32_t len = slot->len;
  team.sync();
  if (team.rank() == 0) {
    const StopRules rules{slot->stop_ids, slot->num_eos, slot->stop_ids + slot->num_eos,
                          slot->num_stop_ids, slot->max_len};
    FinishReason finish = FinishReason::kNone;
    result->stop_token = kNoStopToken;
    std::int32_t delivered = 0;
    while (delivered < accepted->num_emitted && finish == FinishReason::kNone) {
      const TokenId token = accepted->emitted[delivered];
      result->tokens[delivered] = token;
      slot->history()[len + delivered] = token;
      ++delivered;
      finish = finish_after(rules, token, len + delivered, &result->stop_token);
    }
    // Deeper rows may be spoilt by a draft that plain decoding would never see: only a bad row
    // right after the golden token ends the request.
    const bool bad = delivered == 0;
    if (bad) finish = FinishReason::kError;
    const std::int32_t kept = delivered > 0 ? delivered - 1 : 0;
    for (std::int32_t i = 0; i < kept; ++i) path[i] = accepted->path[i];
    const bool in_place = kept == 0 || accepted->path[kept - 1] == kept;
    *path_len = finish == FinishReason::kNone && !in_place ? kept : 0;
    result->num_tokens = delivered;
    result->num_drafts = tree->num_drafts();
    result->num_accepted = delivered < accepted->path_len ? delivered : accepted->path_len;
    result->finish = static_cast<std::int32_t>(finish);
    result->bad_row = !bad ? 0 : sampled[0] == kNothingAllowed ? 2 : 1;
    slot->len = len + delivered;
    slot->finish = result->finish;
    slot->begun = 1;
  }
  team.sync();
  const std::int32_t delivered = result->num_tokens;
  const bool goes_on = result->finish == static_cast<std::int32_t>(FinishReason::kNone);
  if (goes_on)
    slot_feed_drafter(team, slot, tree, sampled, first, own_tree, entered, len + delivered,
                      delivered);
}

}  // namespace specdec

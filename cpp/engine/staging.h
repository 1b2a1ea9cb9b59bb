// What the host stages for a step, and where it reads what a step brought: rings of the caller's
// memory (pinned for CUDA), of depth + 2 places each. A place is written again only after the event
// of the step that used it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/types.h"
#include "kv/host_pages.h"

namespace specdec {

// Where the parts of one place of the staging ring lie, in int32 words from its start. Requests of
// a step are ordered: those that read their prompt, then those that decode.
struct StagingLayout {
  StagingLayout() = default;
  StagingLayout(int max_requests, int max_rows, int max_pages_per_request, int num_narrow = 0);

  int requests = 0, rows = 0, pages_per_request = 0;
  int narrow = 0;       // windows narrower than others (kv/page_parts.h)
  int slot_ids = 0;     // [B] -1 behind the last request
  int commit_ids = 0;   // [B] the same, -1 for requests that the host decides
  int max_drafts = 0;   // [B]
  int window_rows = 0;  // [B] of lookahead, as DraftStepParams
  int guesses = 0;      // [B]
  int kv_len = 0;       // [B] of prompts: tokens in the cache
  int cu_rows = 0;      // [B + 1] of prompts
  int cu_logits = 0;    // [B + 1] of prompts: first choice of each
  // Laws and acceptance rules as accept_step takes them, [B] each; but for the seeds they are
  // written for steps that need scores, greedy behind the last request.
  int temperature = 0, top_p = 0, min_p = 0;                                   // float
  int top_k = 0;                                                               // int
  int seed = 0;                                                                // uint64
  int acceptance = 0;                                                          // uint8
  int posterior_threshold = 0, posterior_alpha = 0, acceptance_threshold = 0;  // float
  int page_table = 0;      // [B, pages_per_request] -1 behind the pages that are held
  int narrow_tables = 0;   // [narrow, B, pages_per_request] the parts of those pages, the same way
  int logit_rows = 0;      // [R] rows whose choices are needed; those of decoding are the last rows
  int prompt_tokens = 0;   // [R]
  int prompt_parents = 0;  // [R]
  int choice_parents = 0;  // [R] of the choices of prompts, counted from a request's first choice
  // [B] each, of requests whose K/V is to be moved before the step, as CompactKvParams takes it
  int move_kv_len = 0, move_cu_rows = 0, move_path = 0, move_path_len = 0;
  int words = 0;
};

// The start of a slot, to be copied there before the step's operations; no bytes where the host has
// written the slot itself.
struct SlotEntry {
  int slot = 0;
  RequestId request = 0;
  std::int64_t offset = 0, bytes = 0;  // within the step's place of the ring of entries
  std::int64_t at = 0;                 // where in the slot
  bool enters = true;                  // else the slot is the request's already
};

// A tree that a device drafts and the host decides on: of the step's decoding request `decode`.
struct StagedTree {
  int decode = 0;
  int rows = 0;  // at most
  int slot = 0;
};

// Rows of scores that the host reads, of one request of the step whose rows it knows. `slot`: what
// its last token is chosen after is kept for a drafter; -1: it is not.
struct StagedChoices {
  int first = 0, count = 0, slot = -1;
};

// What the host knows of a step. Decoding requests have at most max_decode_rows rows together; the
// device packs those that there are.
struct StagedStep {
  std::int64_t index = -1;
  int ring = 0;  // its place in the rings
  int num_prompts = 0, num_decodes = 0;
  int num_prompt_rows = 0, num_prompt_logits = 0;
  int max_decode_rows = 0;
  int most_asked = 0;                // drafts of one request that its drafter is to make
  int max_rows = 0, max_kv_len = 0;  // of any one request, upper bounds
  // The scores that the host reads go into the ring, in this order; then those of the trees.
  std::vector<StagedChoices> host_choices;
  std::vector<StagedTree> host_trees;
  // Slots for which a drafter keeps a row of what the last step of their request left.
  std::vector<std::pair<int, int>> kept_rows;
  double second_worth = 0.0;  // tokens that a second of drafting has to bring; 0: any
  bool needs_scores = false;  // somebody samples: best tokens are not enough
  bool moves = false;         // K/V is to be moved before it
  // To be made before everything else of the step, in this order.
  std::vector<PageOrder> page_orders;
  std::vector<SlotEntry> entries;
};

struct StepRings {
  std::int32_t* staging = nullptr;        // [depth + 2, StagingLayout::words]
  std::byte* entries = nullptr;           // [depth + 2, entry_bytes()]
  const std::int32_t* results = nullptr;  // [depth + 2, result_words()]
  const float* scores = nullptr;          // [depth + 2, max_host_rows(), vocab_size]
  const std::int32_t* trees = nullptr;    // [depth + 2, max_batch_size, words of a DraftTree]
};

}  // namespace specdec

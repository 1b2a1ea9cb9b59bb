// The run-ahead executor's private records: a request, and a step in flight.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algo/fault.h"
#include "engine/run_ahead.h"

namespace specdec {

// A step in flight, as far as it concerns one request.
struct RunAheadExecutor::Part {
  std::int64_t step = 0;
  int prompt_end = 0;  // > 0: reads the prompt up to there
  int rows = 0;        // decoding: rows at most
  int tokens = 0;      // tokens that it delivers at most; at least one, if any
  int arm = -1;        // of the shares that it chose from
};

struct RunAheadExecutor::Request {
  RequestId id = 0;
  SlotRequest slot_request;  // its prompt is dropped once it has been staged
  int prompt_len = 0;
  int max_len = 0;     // the history never grows beyond this
  int max_drafts = 0;  // of one step
  int max_path = 0;    // of them, how many can be accepted
  SamplingLaw law;
  AcceptanceParams acceptance;
  bool chain = false;     // drafts are no tree: one position less left, one draft less
  bool adaptive = false;  // it drafts what pays
  std::optional<LookaheadArms> arms;
  std::optional<SizeArms> sizes;  // of drafts from outside
  AheadChain lookup;
  int chain_limit = 0;  // drafts of the step to be planned
  std::int64_t promised_pages = 0;
  std::unique_ptr<HostChoice> host;  // null: the device chooses its tokens
  std::string cache_salt;
  bool whole_prompt = false;  // nothing of it is taken over
  // Prompt and delivered tokens, for a choice of the host's and for prefix reuse; else empty.
  std::vector<TokenId> text;

  int slot = -1;
  bool entered = false;  // the slot's start has been staged
  int prefilled = 0;     // prompt tokens whose rows were planned, or that were taken over
  int num_cached = 0;    // of them, how many lay in published pages
  int known_len = 0;     // of the history, as far as results were read
  std::deque<Part> parts;
  std::int64_t last_step = -1;  // the last one that names it
  bool cancelled = false, ended = false;

  DraftArms* any_arms() {
    if (arms) return &*arms;
    return sizes ? &*sizes : nullptr;
  }

  // Prompt tokens that may come from published pages: the row of the last one decides a token.
  int reusable() const { return whole_prompt ? 0 : prompt_len - 1; }
  // No row of its own was planned yet.
  bool untouched() const { return prefilled == num_cached && last_step < 0; }
  bool in_prefill() const { return prefilled < prompt_len; }

  // The history before the next step, if every step in flight brings as few tokens as it may.
  int least_len() const {
    int len = known_len;
    for (const Part& part : parts) len += part.tokens > 0;
    return len;
  }
  // Drafts that can still be delivered before the last token, at most.
  int room() const { return max_len - least_len() - 1; }
  // Every token is decided by the steps in flight at the latest.
  bool surely_complete() const { return least_len() >= max_len; }

  // Tokens that must have a place in pages: those in the cache, and whatever the steps in flight
  // may write. A step whose history is `len` tokens long writes from len - 1 on, M rows at most; a
  // request that has not ended is at most max_len - 1 long.
  std::int64_t tokens_to_hold() const {
    std::int64_t hold = known_len == prompt_len ? 0 : known_len - 1;
    std::int64_t len = known_len;
    for (const Part& part : parts) {
      if (part.prompt_end > 0) {
        hold = std::max<std::int64_t>(hold, part.prompt_end);
      } else {
        const std::int64_t before = std::min<std::int64_t>(len, max_len - 1) - 1;
        const int rows = fault(Fault::kHoldWithoutDrafts) ? 1 : part.rows;
        hold = std::max(hold, before + rows);
      }
      if (!fault(Fault::kHoldWithoutFlight)) len += part.tokens;
    }
    // While the prompt is read nothing is delivered, but what was planned is, or will be, there.
    return std::max<std::int64_t>(hold, prefilled);
  }
};

struct RunAheadExecutor::Flight {
  struct Place {
    Request* request = nullptr;
    bool is_prefill = false, decides = false;  // decides: its last row chooses a token
    int rows = 0;                              // of a prompt, or of a choice of the host's
  };
  std::int64_t step = 0;
  int ring = 0;
  bool failed = false;
  std::vector<Place> places;  // in the step's order
};

}  // namespace specdec

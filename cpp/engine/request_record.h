// The executor's private records: a request, its share of a step, and a step in flight.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "algo/draft_probs.h"
#include "algo/fault.h"
#include "algo/slot.h"
#include "engine/budget_bandit.h"
#include "engine/chain_history.h"
#include "engine/draft_offer.h"
#include "engine/prediction.h"
#include "engine/request.h"
#include "engine/score_processor.h"
#include "engine/staging.h"
#include "engine/suffix_past.h"
#include "tree/draft_tree.h"

namespace specdec {

// Slots in the host's memory are mapped as they are used.
struct FreeSlots {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using HostSlots = std::unique_ptr<std::byte[], FreeSlots>;

// Zeroed memory of `count` slots of `bytes` each.
inline HostSlots make_host_slots(std::int64_t count, std::int64_t bytes) {
  HostSlots memory(static_cast<std::byte*>(
      std::calloc(static_cast<std::size_t>(count), static_cast<std::size_t>(bytes))));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// A step in flight, as far as it concerns one request.
struct StepShare {
  std::int64_t step = 0;
  int prompt_end = 0;  // > 0: reads the prompt, and drafts behind it, up to there
  int rows = 0;        // decoding: rows at most
  int tokens = 0;      // tokens that it delivers at most; at least one, if any
  int arm = -1;        // of the shares that it chose from
};

// What a request held whose K/V was copied to the host. Everything else of it stays as it was.
struct SwappedOut {
  int first = 0;               // blocks before it were others', too, and were not copied
  int kept_from = 0;           // blocks before it lay behind the window (PageTable::kept_from)
  std::int64_t length = 0;     // tokens that have a place
  std::int64_t final_len = 0;  // of them, whose K/V is final: it may be found published
  std::vector<std::vector<std::uint8_t>> seen;  // PageTable::seen
};

// Drafts handed in by propose(), or that came with the request; node 0 of the tree is unused.
struct Proposal {
  DraftTree tree;
  DraftProbs probs;
  std::int32_t source[kMaxStepTokens] = {};  // once it is cut: the draft that a node was
};

struct RequestRecord {
  RequestRecord(RequestParams request_params, int vocab_size)
      : params(std::move(request_params)),
        processor(params, vocab_size),
        prompt_len(static_cast<int>(params.prompt.size())),
        text(std::move(params.prompt)),
        read_to(prompt_len),
        known_len(prompt_len) {}

  RequestId id = 0;
  RequestParams params;  // its prompt is in `text`
  ScoreProcessor processor;
  int prompt_len = 0;
  int max_len = 0;        // the history never grows beyond this
  int max_drafts = 0;     // of one step
  int method_drafts = 0;  // of them, the method's; the others are of suffix decoding beside it
  int max_path = 0;       // of the method's, how many can be accepted
  bool chain = false;     // drafts are no tree: one position less left, one draft less

  bool adaptive = false;  // it drafts what pays
  std::optional<LookaheadBandit> arms;
  std::optional<SizeBandit> sizes;  // of drafts from outside
  // What the requests with this salt and law have shown (engine/per_salt.h).
  std::shared_ptr<SourceRates> shared_rates;
  std::shared_ptr<std::map<int, SizeBandit>> shared_sizes;
  ChainHistory lookup;   // where the match behind a draft is not known
  SourceRates rates;     // where it is
  bool weighed = false;  // the step's drafts are weighed before it, those of `offer` if
  std::optional<Prediction> prediction;
  std::optional<Prediction> prompt_edits;  // of the prompt, beside suffix decoding on the host
  std::vector<TokenId> forced;             // all that a grammar allows next
  int known_drafts = 0;                    // of one step, of prediction and grammar, at most
  DraftOffer offer;                        // the slot is the host's: what was found for the step
  int draft_limit = 0;                     // weighed: drafts of the step to be planned
  int asked = 0;                           // weighed: drafts that the method is asked for, too
  HostSlots suffix_memory;                 // suffix decoding beside the method: its SuffixState
  std::shared_ptr<SuffixPast> past;        // of its salt, where that is searched, too
  std::array<SourceBits, kMaxStepTokens> sources{};  // of the nodes of the step's tree
  bool own_tree = false;                             // which the slot's own drafter has drafted
  std::vector<double> survival;                      // of drafts that operations proposed
  int published = 0;                        // tokens of the history that the public pool has
  std::unique_ptr<Proposal> external;       // drafts behind the prompt, until they are planned
  std::unique_ptr<Proposal> proposal;       // for the next decode step
  bool takes_proposal = false;              // the step that is planned drafts it
  std::unique_ptr<Proposal> step_proposal;  // of the step in flight
  // The draft that each node was, in a step on the host whose drafts a grammar has cut.
  std::vector<std::int32_t> uncut;

  std::int64_t promised_pages = 0;  // at once
  std::int64_t most_blocks = 0;     // of its text
  // With an attention window: rows in one step, at most, of its prompt, and of its text where that
  // is read again; 0: any. A prompt that is to be published keeps its pages until it is.
  int prompt_chunk = 0, text_chunk = 0;
  bool publishes_prompt = false;
  bool by_host = false;  // the step runs on a device and the host chooses this request's tokens
  // Prompt and delivered tokens, as far as somebody on the host needs them (host_slot null).
  std::vector<TokenId> text;
  // Where the host runs the step or chooses the tokens: the request's slot.
  Slot* host_slot = nullptr;
  HostSlots own_slot;  // by_host: its memory
  // by_host: rows whose K/V is not where it belongs until the next step moves it there. Row
  // unmoved[i] of the last step goes to place i + 1 behind unmoved_at, where that step began.
  std::vector<std::int32_t> unmoved;
  int unmoved_at = 0;
  // by_host: operations in front of the step bring the drafts, into a slot of the device that is
  // kept like the host's. Tokens of the history that it has; the row of the last step that the last
  // token was chosen after.
  bool device_drafts = false;
  int mirrored = 0;
  int kept_row = -1;

  int slot = -1;
  bool entered = false;  // the slot's start has been written, or staged
  int read_to = 0;       // tokens to be read before it decodes: the prompt's; of a request that
                         // computes its K/V again all but the last
  int prefilled = 0;     // of them, whose rows were planned, or that were taken over
  int restored = 0;      // tokens that came back from the host's pool, some of them behind those
                         // that are read again
  int scored_to = 0;     // prompt tokens whose logprobs were planned
  int num_cached = 0;    // of them, how many lay in published pages
  int known_len = 0;     // of the history, as far as results were read
  std::deque<StepShare> shares;
  std::int64_t last_step = -1;  // the last one that names it
  bool cancelled = false, ended = false;

  // kMaxUtilization
  bool preempted = false;             // it has no pages
  std::optional<SwappedOut> swapped;  // its K/V is the host's pool's meanwhile
  bool sits_out = false;              // it lacks pages for the step at hand
  int page_room = kMaxDraftLen;       // drafts of the step at hand that its pages have room for

  const TokenId* tokens() const { return host_slot ? host_slot->history() : text.data(); }
  // Where its slot is the host's: tokens as far as steps have run.
  int output_so_far() const { return host_slot->begun != 0 ? host_slot->len - prompt_len : 0; }

  // Drafts of suffix decoding beside the method's, at most.
  int suffix_drafts() const { return max_drafts - method_drafts; }
  // What suffix decoding knows of the text, where it drafts beside the method.
  SuffixState* suffix_state() const { return reinterpret_cast<SuffixState*>(suffix_memory.get()); }

  // There is something in the prediction for the token after the history.
  bool predicts() const { return !predicted().empty(); }
  // Guesses are for those who weigh them.
  std::span<const TokenId> predicted() const {
    return prediction ? prediction->following(adaptive) : std::span<const TokenId>();
  }
  // Drafts for the next step are there, whatever the method drafts.
  bool knows_drafts() const { return predicts() || !forced.empty(); }
  // Drafts of a step, whoever makes them.
  int most_drafts() const { return std::max(max_drafts, known_drafts); }

  // What chances are made of; null: drafts are fixed and shall not depend on what others got.
  const SourceRates* learnt() const { return adaptive ? &rates : nullptr; }

  // The method is asked beside what is at hand, where that is not worth more.
  bool asks() const { return weighed && suffix_memory != nullptr && method_drafts > 0; }

  BudgetBandit* any_arms() {
    if (arms) return &*arms;
    return sizes ? &*sizes : nullptr;
  }

  // Prompt tokens that may come from published pages: the last one is always computed, because its
  // row decides the first token. Logprobs of the prompt need all its rows.
  int reusable() const {
    return params.compute_whole_prompt || params.prompt_logprobs ? 0 : prompt_len - 1;
  }
  // No row of its own was planned yet.
  bool untouched() const { return prefilled == num_cached && last_step < 0; }
  bool in_prefill() const { return prefilled < read_to; }
  // Pages behind the window are given back while it reads what it has to.
  bool sheds_pages() const { return begun() || !publishes_prompt; }
  // Rows that it reads in a step, at most; 0: as many as there is room for.
  int chunk() const { return begun() ? text_chunk : (sheds_pages() ? prompt_chunk : 0); }
  // Its first token is known, so that what it reads is read again.
  bool begun() const { return known_len > prompt_len; }
  // Drafts that came with the request, as many as it could still deliver.
  int external_drafts() const {
    if (begun()) return 0;
    return std::min(static_cast<int>(params.external_drafts.size()), max_len - prompt_len - 1);
  }

  // The history before the next step, if every step in flight brings as few tokens as it may.
  int least_len() const {
    int len = known_len;
    for (const StepShare& share : shares) len += share.tokens > 0;
    return len;
  }
  // Drafts that can still be delivered before the last token, at most.
  int room() const {
    return host_slot != nullptr ? slot_draft_room(host_slot) : max_len - least_len() - 1;
  }
  // Every token is decided by the steps in flight at the latest.
  bool surely_complete() const {
    const bool frozen = host_slot != nullptr && host_slot->frozen();
    return least_len() >= max_len || frozen;
  }

  // The most that a step behind the prompt writes, where its history may be longest: a request
  // that has not ended is at most max_len - 1 long. What a prediction or a grammar drafts is cut to
  // the room that there is, so it takes no more.
  std::int64_t last_written() const { return std::int64_t{max_len} - 1 + max_drafts; }
  // Tokens that must have a place in pages: those in the cache, and whatever the steps in flight
  // may write. A step whose history is `len` tokens long writes from len - 1 on, M rows at most. Of
  // a text that is read again only what was read is in the cache.
  std::int64_t tokens_to_hold() const {
    std::int64_t hold = !begun() || in_prefill() ? 0 : known_len - 1;
    std::int64_t len = known_len;
    for (const StepShare& share : shares) {
      if (share.prompt_end > 0) {
        hold = std::max<std::int64_t>(hold, share.prompt_end);
      } else {
        const std::int64_t before = std::min<std::int64_t>(len, max_len - 1) - 1;
        const int rows = fault(Fault::kHoldWithoutDrafts) ? 1 : share.rows;
        hold = std::max(hold, std::min(before + rows, last_written()));
      }
      if (!fault(Fault::kHoldWithoutFlight)) len += share.tokens;
    }
    if (!unmoved.empty()) hold = std::max<std::int64_t>(hold, unmoved_at + unmoved.back() + 1);
    // While the prompt is read nothing is delivered, but what was planned is, or will be, there;
    // and what was copied back lies behind a gap.
    return std::max<std::int64_t>(hold, in_prefill() ? std::max(prefilled, restored) : prefilled);
  }
  // What it has to read, or of that the next chunk behind the first `known` tokens.
  std::int64_t tokens_to_read(std::int64_t known) const {
    const std::int64_t all = read_to + external_drafts();
    return chunk() > 0 ? std::min(all, known + chunk()) : all;
  }
  // The same after a next step of it: what it has to read, or a row and as many drafts.
  std::int64_t tokens_to_hold_with(int drafts) const {
    if (in_prefill()) return std::max(tokens_to_hold(), tokens_to_read(prefilled));
    std::int64_t len = known_len;
    for (const StepShare& share : shares) len += share.tokens;
    len = std::min<std::int64_t>(len, max_len - 1);
    return std::max(tokens_to_hold(), std::min(len + drafts, last_written()));
  }
  // The least position that a row still to be read has, of a step in flight or a later one.
  std::int64_t first_row() const {
    if (shares.empty()) return in_prefill() ? prefilled : known_len - 1;
    const StepShare& share = shares.front();
    return share.prompt_end > 0 ? share.prompt_end - share.rows : known_len - 1;
  }
};

struct InFlightStep {
  struct Place {
    RequestRecord* request = nullptr;
    bool is_prefill = false, decides = false;  // decides: its last row chooses a token
    int start = 0, rows = 0;                   // of a prompt, or of a choice of the host's
    int drafts = 0;                            // behind them
    int tree = -1;                             // in the ring of trees; else the host has placed it
    int choices = 0;  // rows whose scores or best tokens are needed; of drafts on a device, at most
    StepOutput out = {};  // what the host's acceptance said besides the result
    int root_draw = -1;   // the request's among those of the step that is committed; -1: none
  };
  std::int64_t step = 0;
  int ring = 0;
  bool failed = false;
  std::vector<Place> places;      // in the step's order
  std::vector<RequestId> copied;  // whose pages are copied in front of it, by a device
};

}  // namespace specdec

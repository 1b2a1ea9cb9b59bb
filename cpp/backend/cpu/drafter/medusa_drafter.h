// Medusa in a step whose requests lie in host memory: heads on their hidden states, trees of the
// guesses into their slots, and what is learnt of the guesses when the text behind them is known.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "algo/guess_tree.h"
#include "backend/cpu/drafter/medusa_heads.h"
#include "backend/cpu/drafter/slot_requests.h"
#include "base/types.h"

namespace specdec::cpu {

// What was done since the drafter was made.
struct MedusaStats {
  std::int64_t steps = 0;                 // that asked the heads
  std::int64_t proposals = 0, nodes = 0;  // requests that got drafts, and how many
  std::int64_t idle = 0;                  // requests of a step that got none
  double head_seconds = 0.0;              // of the heads and the choice of their best guesses
  double head_thread_seconds = 0.0;       // of them, processor time of the calling thread
};

class MedusaDrafter {
 public:
  // Guesses of a head that are held against the text, where a tree needs fewer.
  static constexpr std::int32_t kSeenRanks = 10;

  // prior [heads->num_heads(), num_ranks]: how often each head's guess of each rank is right, to
  // start from. `heads` outlives this object.
  MedusaDrafter(MedusaHeads* heads, std::vector<double> prior, std::int32_t num_ranks,
                std::int32_t max_requests, std::int32_t vocab_size);

  // A request takes a slot; no choices: it wants no drafts. An adaptive one has the nodes first
  // that are likeliest by what was seen of it, any other has them in their own order. Errors:
  // std::invalid_argument, see guess_nodes().
  void enter(std::int32_t slot, const std::vector<std::vector<std::int32_t>>& choices,
             bool adaptive);
  // Drafts for the requests that may draft, into their slots.
  void draft(const SlotRequests& step);

  const MedusaStats& stats() const { return stats_; }
  // Over all requests so far, from nothing.
  const GuessRates& measured() const { return measured_; }
  std::int32_t seen_ranks() const;

 private:
  // What the heads said behind `start` tokens; head h is about token start + h.
  struct Guesses {
    std::int32_t start = 0, num_heads = 0, top_k = 0, next_head = 0;
    std::vector<TokenId> ids;  // [num_heads, top_k]
  };
  struct Request {
    Request(std::vector<GuessNode> nodes_given, bool is_adaptive, GuessRates first_rates)
        : given(std::move(nodes_given)), adaptive(is_adaptive), rates(std::move(first_rates)) {}

    std::vector<GuessNode> given;  // in the order of its choices
    bool adaptive;
    std::int64_t steps = 0;
    GuessRates rates;
    std::deque<Guesses> pending;
    // As they stand by now.
    std::vector<GuessNode> nodes;
    std::vector<float> worth;                // [n]
    std::vector<std::int32_t> heads, ranks;  // [n]: what the first n + 1 nodes need
  };
  // A request that drafts in the step at hand.
  struct Drafting {
    std::int32_t b = 0, len = 0, count = 0, num_heads = 0, top_k = 0;
    Request* request = nullptr;
  };

  void arrange(Request* request) const;
  void learn(Request* request, const TokenId* text, std::int32_t len);
  void choose(const SlotRequests& step);
  void propose(const SlotRequests& step, const Drafting& one, const TokenId* ids,
               std::int32_t num_heads, std::int32_t top_k);

  MedusaHeads* heads_;
  std::vector<double> prior_;
  std::int32_t num_ranks_, vocab_size_;
  std::vector<std::optional<Request>> requests_;  // by slot
  GuessRates measured_;
  MedusaStats stats_;
  std::vector<Drafting> drafting_;
  std::vector<const float*> hidden_;  // of drafting_
  std::vector<TokenId> ids_;          // [drafting, num_heads, top_k]
};

}  // namespace specdec::cpu

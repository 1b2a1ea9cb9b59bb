// ReDrafter in a step whose requests lie in host memory: one beam search for those that may draft,
// their trees into the slots.
#pragma once

#include <cstdint>
#include <vector>

#include "algo/beam_search_host.h"
#include "backend/cpu/drafter/recurrent_drafter.h"
#include "backend/cpu/drafter/slot_requests.h"
#include "base/types.h"

namespace specdec::cpu {

// What the request of a slot asked for.
struct BeamOptions {
  std::int32_t num_beams = 0;  // 0: no drafts
  std::int32_t length = 0;     // of a beam
  float temperature = 1.0f;
  bool adaptive = false;    // the search is no wider and deeper than the step's drafts
  bool keeps_laws = false;  // what its drafts are chosen from is asked for
};

// Room for what the drafts of a step were chosen from, by its requests; a node's law are the kKept
// best scores of its row. Null: nobody asks.
struct BeamLaws {
  float* probs = nullptr;             // [B, drafts, BeamSearch::kKept]
  TokenId* ids = nullptr;             // the same
  std::uint8_t* has_probs = nullptr;  // [B]: 1 where a law was written
  std::int64_t drafts = 0;
};

class BeamDrafter {
 public:
  // token_ids [network->num_scores()]: the token of each score; empty: the same number. `network`
  // outlives this object.
  BeamDrafter(RecurrentDrafter* network, std::vector<TokenId> token_ids, std::int32_t max_requests,
              std::int32_t vocab_size);

  // A request takes a slot. Errors: std::invalid_argument.
  void enter(std::int32_t slot, const BeamOptions& options);
  // Drafts for the requests that may draft, into their slots.
  //
  // pass_price: tokens that a pass after the first has to bring where all requests are adaptive; 0:
  // passes are free.
  SearchCost draft(const SlotRequests& step, double pass_price, const BeamLaws& laws);

 private:
  struct Drafting {
    std::int32_t b = 0, len = 0;
    const BeamOptions* asked = nullptr;
  };

  std::int32_t start(const SlotRequests& step);
  void propose(const SlotRequests& step, std::int32_t r, const BeamLaws& laws);

  RecurrentDrafter* network_;
  std::vector<TokenId> token_ids_;
  std::int32_t vocab_size_;
  std::vector<BeamOptions> options_;  // by slot
  BeamSearch search_;
  std::vector<Drafting> drafting_;
  std::vector<BeamShape> shapes_;  // of drafting_, here and below
  std::vector<const float*> hidden_;
  std::vector<TokenId> tokens_;
};

}  // namespace specdec::cpu

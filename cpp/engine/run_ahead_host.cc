#include "engine/run_ahead_host.h"

#include "algo/sampling_law.h"
#include "backend/backend.h"

namespace specdec {

TokenId HostChoice::choose(const std::vector<TokenId>& text, const float* scores, int vocab_size) {
  const bool active = processor.active(num_output);
  if (active) {
    row.assign(scores, scores + vocab_size);
    processor.apply(row.data(), text, nullptr, 0);
    scores = row.data();
  }
  if (!params.sampling.greedy()) {
    return sampler.draw(scores, vocab_size, params.sampling,
                        token_uniform(params.seed, text.size()));
  }
  TokenId best = kBadRow;
  ArgmaxParams best_of;
  best_of.scores = scores;
  best_of.row_stride = vocab_size;
  best_of.rows = 1;
  best_of.vocab = vocab_size;
  best_of.ids = &best;
  cpu_backend().argmax(best_of);
  const bool processed = active || params.needs_scores;
  return processed && best >= 0 && scores[best] == kForbiddenScore ? kNothingAllowed : best;
}

}  // namespace specdec

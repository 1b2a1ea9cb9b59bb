// Beam search on a step's stream, on the host: the text of algo/beam_search.h.
#include "algo/beam_search.h"
#include "backend/cpu/step/step_ops.h"

namespace specdec::cpu {

void grow_beams(const GrowBeamsParams& p) {
  BeamScratch scratch;
  for (std::int32_t b = 0; b < p.num_requests; ++b) {
    specdec::grow_beams(SerialTeam{}, p.scores_of(b), p.limits_of(b), p.depth, p.beams.at(b),
                        p.beams.reached + b, p.next_of(b), &scratch);
  }
}

void merge_beams(const MergeBeamsParams& p) {
  BeamMergeScratch scratch;
  for (std::int32_t b = 0; b < p.num_requests; ++b) {
    p.counts[b] =
        specdec::merge_beams(SerialTeam{}, p.beams.at(b), p.beams.reached[b], p.tokens + p.first(b),
                             p.parents + p.first(b), p.sources_of(b), &scratch);
  }
}

}  // namespace specdec::cpu

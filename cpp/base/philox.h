// Philox4x32-10 counter-based random numbers (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011). A draw is a pure function of (request seed, absolute position, purpose, draw
// index): never of the batch slot, the step count or who shares the batch.
#pragma once

#include <cstdint>

#include "base/types.h"

namespace specdec {

enum class RandomPurpose : std::uint32_t {
  kLookaheadWindow = 1,
  kLookaheadPrefill = 2,
  kToken = 3,     // the token at a position: a plain draw, or one from a residual
  kAccept = 4,    // whether a draft at a position is kept; draw index: which sibling
  kDraft = 5,     // for drafters that draw their drafts; draw index: which sibling
  kSynthetic = 6  // how many drafts a step keeps in measurements (algo/synthetic_acceptance.h)
};

struct Philox {
  std::uint32_t v[4];
};

SPECDEC_HD inline Philox philox4x32(std::uint64_t seed, std::uint64_t position,
                                    RandomPurpose purpose, std::uint32_t draw) {
  std::uint32_t c0 = static_cast<std::uint32_t>(position);
  std::uint32_t c1 = static_cast<std::uint32_t>(position >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(purpose);
  std::uint32_t c3 = draw;
  std::uint32_t k0 = static_cast<std::uint32_t>(seed);
  std::uint32_t k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0;
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Philox{{c0, c1, c2, c3}};
}

// Uniform in [0, 1), a multiple of 2^-53.
SPECDEC_HD inline double philox_uniform(std::uint64_t seed, std::uint64_t position,
                                        RandomPurpose purpose, std::uint32_t draw) {
  const Philox r = philox4x32(seed, position, purpose, draw);
  const std::uint64_t bits = (std::uint64_t{r.v[0]} << 21) | (r.v[1] >> 11);
  return static_cast<double>(bits) * 0x1.0p-53;
}

// Uniform integer in [0, n), n >= 1, by the multiply-high method (bias < n / 2^32, irrelevant here:
// it chooses which drafts to try, never which token to emit).
SPECDEC_HD inline std::uint32_t philox_below(std::uint64_t seed, std::uint64_t position,
                                             RandomPurpose purpose, std::uint32_t draw,
                                             std::uint32_t n) {
  const Philox r = philox4x32(seed, position, purpose, draw);
  return static_cast<std::uint32_t>((std::uint64_t{r.v[0]} * n) >> 32);
}

}  // namespace specdec

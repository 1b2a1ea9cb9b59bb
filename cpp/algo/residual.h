// What is left of a target's law after drafts were rejected, and how drafts are held against it.
//
// A law is a row of weights w[v] >= 0 with the sum `total`: token v has probability w[v] / total.
// Sums are taken over fixed blocks of token ids, each in one fixed order, then over the blocks: the
// result has the same bits for a team of any size.
//
// Recursive rejection (Leviathan et al. 2023, Chen et al. 2023; for siblings Miao et al. 2024,
// Yang et al. 2024): siblings are held, in order, against r, which starts as the target's law p.
// Sibling x, drawn from q, is kept with probability min(1, r(x) / q(x)); else r becomes
// max(r - q, 0), renormalised, and the next one follows. When all are rejected the token is drawn
// from r. It then has the law p, for any q that the drafts were really drawn from.
#pragma once

#include <algorithm>
#include <cstdint>

#include "algo/fault.h"
#include "algo/team.h"
#include "base/types.h"

namespace specdec {

inline constexpr std::int32_t kMassBlock = 64;

SPECDEC_HD constexpr std::int32_t mass_blocks(std::int32_t n) {
  return (n + kMassBlock - 1) / kMassBlock;
}

// In four chains: the order is part of the result.
SPECDEC_HD inline double sum_in_order(const float* w, std::int32_t n) {
  double chains[4] = {};
  std::int32_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int j = 0; j < 4; ++j) chains[j] += static_cast<double>(w[i + j]);
  }
  for (; i < n; ++i) chains[0] += static_cast<double>(w[i]);
  return (chains[0] + chains[1]) + (chains[2] + chains[3]);
}

// A law over a vocabulary. Every rank has its own copy of the struct; the memory is shared.
struct WeightedLaw {
  float* weights;  // [vocab_size]
  double* mass;    // [mass_blocks(vocab_size)] sums of the blocks
  std::int32_t vocab_size;
  double total;
};

// Recomputes mass and total from the weights.
template <Team TeamT>
SPECDEC_HD inline void sum_law(const TeamT& team, WeightedLaw* law) {
  const std::int32_t blocks = mass_blocks(law->vocab_size);
  team.sync();
  for (std::int32_t b = team.rank(); b < blocks; b += team.size()) {
    const std::int32_t first = b * kMassBlock, left = law->vocab_size - first;
    law->mass[b] = sum_in_order(law->weights + first, left < kMassBlock ? left : kMassBlock);
  }
  team.sync();
  double total = 0.0;
  for (std::int32_t b = 0; b < blocks; ++b) total += law->mass[b];
  law->total = total;
}

// The first token, by id, at which the distribution function exceeds u in [0, 1); only tokens of
// some weight are drawn. -1: there is none. One rank's work.
SPECDEC_HD inline TokenId draw_from_law(const WeightedLaw& law, double u) {
  const std::int32_t blocks = mass_blocks(law.vocab_size);
  double rest = u * law.total;
  TokenId last = -1;  // should rounding leave a rest behind the last token
  for (std::int32_t b = 0; b < blocks; ++b) {
    if (rest >= law.mass[b] && b + 1 < blocks) {
      rest -= law.mass[b];
      continue;
    }
    const std::int32_t first = b * kMassBlock;
    for (TokenId v = first; v < first + kMassBlock && v < law.vocab_size; ++v) {
      if (law.weights[v] <= 0.0f) continue;
      if (rest < static_cast<double>(law.weights[v])) return v;
      rest -= static_cast<double>(law.weights[v]);
      last = v;
    }
  }
  for (TokenId v = law.vocab_size - 1; last < 0 && v >= 0; --v) {
    if (law.weights[v] > 0.0f) last = v;
  }
  return last;
}

// The distribution that one draft was drawn from: probs[i] / mass is the probability of token i, or
// of ids[i] for a reduced vocabulary; every other token has probability 0.
struct DraftLaw {
  const float* probs;  // [columns]
  const TokenId* ids;  // null: column = token
  std::int32_t columns;
  std::int32_t column;  // of the draft itself
  double mass;          // sum of probs
};

// q(draft), when the columns of `earlier` siblings were taken away before it was drawn. Rounding
// must not make it larger than 1.
SPECDEC_HD inline double draft_mass(const DraftLaw& q, const std::int32_t* earlier,
                                    std::int32_t num_earlier) {
  double mass = q.mass;
  for (std::int32_t i = 0; i < num_earlier; ++i) mass -= static_cast<double>(q.probs[earlier[i]]);
  const double own = static_cast<double>(q.probs[q.column]);
  return mass > own ? mass : own;
}

// r = max(r - q, 0); `law` is r and stays unnormalised. `mass`: what normalises q. The columns of
// earlier siblings need no exception: what was rejected has weight 0 in r.
template <Team TeamT>
SPECDEC_HD inline void subtract_draft(const TeamT& team, const DraftLaw& q, double mass,
                                      WeightedLaw* law) {
  const double scale = law->total / mass;
  team.sync();
  for (std::int32_t i = team.rank(); i < q.columns; i += team.size()) {
    float& weight = law->weights[q.ids == nullptr ? i : q.ids[i]];
    const double rest = static_cast<double>(weight) - static_cast<double>(q.probs[i]) * scale;
    weight = rest > 0.0 ? static_cast<float>(rest) : 0.0f;
  }
  sum_law(team, law);
}

}  // namespace specdec

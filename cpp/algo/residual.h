// What is left of a target's law after drafts were rejected, and how drafts are accepted by it.
//
// A law is a row of weights w[v] >= 0 on the grid of algo/law_mass.h: token v has probability
// w[v] / total. Masses are integers, so sums over blocks of tokens, over ranks of a team or token
// by token are the same number.
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
#include "algo/law_mass.h"
#include "algo/team.h"
#include "base/types.h"

namespace specdec {

inline constexpr std::int32_t kMassBlock = 64;

SPECDEC_HD constexpr std::int32_t mass_blocks(std::int32_t n) {
  return (n + kMassBlock - 1) / kMassBlock;
}

// The mass of at most kMassBlock weights of at most 2. In float64 the sum of so few is exact, and
// the four chains become vector code.
SPECDEC_HD inline Mass block_mass(const float* w, std::int32_t n) {
  double chains[4] = {};
  std::int32_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int j = 0; j < 4; ++j) chains[j] += static_cast<double>(to_grid(w[i + j]));
  }
  for (; i < n; ++i) chains[0] += static_cast<double>(to_grid(w[i]));
  return static_cast<Mass>(((chains[0] + chains[1]) + (chains[2] + chains[3])) * 0x1p43);
}

// A law over a vocabulary. Every rank has its own copy of the struct; the memory is shared.
struct WeightedLaw {
  float* weights;  // [vocab_size]
  Mass* mass;      // [mass_blocks(vocab_size)] sums of the blocks
  std::int32_t vocab_size;
  Mass total;
};

// Recomputes mass and total from the weights.
template <Ranks TeamT>
SPECDEC_HD inline void sum_law(const TeamT& team, WeightedLaw* law) {
  const std::int32_t blocks = mass_blocks(law->vocab_size);
  team.sync();
  for (std::int32_t b = team.rank(); b < blocks; b += team.size()) {
    const std::int32_t first = b * kMassBlock, left = law->vocab_size - first;
    law->mass[b] = block_mass(law->weights + first, left < kMassBlock ? left : kMassBlock);
  }
  team.sync();
  Mass total = 0;
  for (std::int32_t b = 0; b < blocks; ++b) total += law->mass[b];
  law->total = total;
}

// The first token, by id, at which the distribution function exceeds u in [0, 1); only tokens of
// some weight are drawn. -1: there is none. One rank's work.
SPECDEC_HD inline TokenId draw_from_law(const WeightedLaw& law, double u) {
  if (law.total == 0) return -1;
  Mass rest = drawn_unit(u, law.total);
  std::int32_t block = 0;
  while (rest >= law.mass[block]) rest -= law.mass[block++];
  TokenId v = block * kMassBlock;
  for (Mass own; rest >= (own = mass_of(law.weights[v])); ++v) rest -= own;
  return v;
}

// probs[v]: the probability of token v.
inline void write_law(const WeightedLaw& law, float* probs) {
  const double total = weight_of(law.total);
  for (std::int32_t v = 0; v < law.vocab_size; ++v) {
    probs[v] = static_cast<float>(static_cast<double>(law.weights[v]) / total);
  }
}

// The distribution that one draft was drawn from: probs[i] / mass is the probability of token i, or
// of ids[i] for a reduced vocabulary; every other token has probability 0.
struct DraftLaw {
  const float* probs;  // [columns]
  const TokenId* ids;  // null: column = token; -1: of no token
  std::int32_t columns;
  std::int32_t column;  // of the draft itself
  double mass;          // sum of probs
};

// A softmax in float32 over 128k tokens is off by less; a row of logits or of half precision that
// nobody normalised is off by more.
inline constexpr double kDraftMassTolerance = 1e-3;

SPECDEC_HD constexpr bool is_probability(float p) { return p >= 0.0f && p <= 2.0f; }

SPECDEC_HD inline bool sums_to_one(double mass) {
  return mass >= 1.0 - kDraftMassTolerance && mass <= 1.0 + kDraftMassTolerance;
}

// An earlier sibling: its token, and the column where that stood in its own row.
struct EarlierSibling {
  TokenId token;
  std::int32_t column;
};

// What q says of another draft's token. Rows of siblings mostly have the same columns; where they
// do not, it is looked for.
SPECDEC_HD inline double prob_of(const DraftLaw& q, const EarlierSibling& sibling) {
  std::int32_t column = sibling.column;
  if (q.ids != nullptr && q.ids[column] != sibling.token) {
    for (column = q.columns - 1; column >= 0 && q.ids[column] != sibling.token;) --column;
  }
  return column < 0 ? 0.0 : static_cast<double>(q.probs[column]);
}

// q(draft), when the tokens of `earlier` siblings were taken away before it was drawn. Rounding
// must not make it larger than 1.
SPECDEC_HD inline double draft_mass(const DraftLaw& q, const EarlierSibling* earlier,
                                    std::int32_t num_earlier) {
  double mass = q.mass;
  for (std::int32_t i = 0; i < num_earlier; ++i) mass -= prob_of(q, earlier[i]);
  const double own = static_cast<double>(q.probs[q.column]);
  return mass > own ? mass : own;
}

// One weight of max(r - q, 0); `scale`: the law's total over the mass that normalises q.
SPECDEC_HD inline float residual_weight(float weight, float prob, double scale) {
  const double rest = static_cast<double>(weight) - static_cast<double>(prob) * scale;
  return rest > 0.0 ? to_grid(static_cast<float>(rest)) : 0.0f;
}

// r = max(r - q, 0); `law` is r and stays unnormalised. `mass`: what normalises q. The columns of
// earlier siblings need no exception: what was rejected has weight 0 in r.
template <Ranks TeamT>
SPECDEC_HD inline void subtract_draft(const TeamT& team, const DraftLaw& q, double mass,
                                      WeightedLaw* law) {
  const double scale = weight_of(law->total) / mass;
  team.sync();
  for (std::int32_t i = team.rank(); i < q.columns; i += team.size()) {
    const TokenId token = q.ids == nullptr ? i : q.ids[i];
    if (token < 0) continue;  // a column of nothing
    law->weights[token] = residual_weight(law->weights[token], q.probs[i], scale);
  }
  sum_law(team, law);
}

}  // namespace specdec

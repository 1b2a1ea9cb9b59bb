// What top_k and top_p leave of a law: one text for the host (algo/sample.cc) and for a block of a
// device (cuda/accept/block_row.cuh). Which cuts there are: algo/sample.h.
//
// Tokens are ordered by the key of their score, then by id. A cut keeps a first part of that order,
// so it is a key and a token id, found by bisection, two bits a round, over exact sums of integers
// (algo/law_mass.h). Whoever walks the tokens in whichever order finds the same cut.
//
// A row gives
//   cut()             its LawCut
//   list(law)         makes a list of its likeliest tokens, as many as it likes, and answers how
//                     many tokens it has in all: those of some weight that min_p keeps
//   listed()          tokens of the list
//   for_tokens(visit) each token that the cut keeps, from the list if it is on_list, divided over
//                     the ranks of its team
//   sum(x)            Mass x[n]: over the ranks, for all of them
#pragma once

#include <bit>
#include <cstdint>

#include "algo/law_mass.h"
#include "algo/sampling_law.h"
#include "base/types.h"

namespace specdec {

inline constexpr int kTokenBits = 20;
static_assert(kMaxLawTokens == 1 << kTokenBits);

// Rises with the score; -0 and 0 have one key.
SPECDEC_HD inline std::uint32_t order_key(float score) {
  const auto bits = std::bit_cast<std::uint32_t>(score + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

SPECDEC_HD inline float score_of_key(std::uint32_t key) {
  return std::bit_cast<float>((key >> 31) != 0 ? key & 0x7fffffffu : ~key);
}

struct Candidate {
  std::uint32_t key;
  float weight;
  TokenId id;
};

struct LawCut {
  std::uint32_t key_floor = 0;   // keys below are cut
  TokenId id_floor = INT32_MAX;  // and of that key, tokens behind this one
  bool on_list = false;          // all tokens that are kept are in the row's list
  Mass total = 0;                // of what is kept, where it is known; else 0

  SPECDEC_HD bool keeps(std::uint32_t key, TokenId id) const {
    return key > key_floor || (key == key_floor && id <= id_floor);
  }
};

// The largest key such that the values of tokens from it on reach `wanted`, which all do.
template <class Row, class Value>
SPECDEC_HD inline std::uint32_t find_key(Row& row, Mass wanted, Value value) {
  std::uint32_t key = 0;
  for (int shift = 30; shift >= 0; shift -= 2) {
    Mass reached[3] = {};
    row.for_tokens([&](const Candidate& c) {
#pragma unroll
      for (std::uint32_t i = 0; i < 3; ++i) {
        if (c.key >= key + ((i + 1) << shift)) reached[i] += value(c);
      }
    });
    row.sum(reached);
    std::uint32_t digit = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) digit += reached[i] >= wanted ? 1 : 0;
    key += digit << shift;
  }
  return key;
}

// The token whose value brings the sum in order of ids to `wanted`.
template <class Row, class Value>
SPECDEC_HD inline TokenId find_id(Row& row, Mass wanted, Value value) {
  std::uint32_t id = 0;
  for (int shift = kTokenBits - 2; shift >= 0; shift -= 2) {
    Mass before[3] = {};
    row.for_tokens([&](const Candidate& c) {
#pragma unroll
      for (std::uint32_t i = 0; i < 3; ++i) {
        if (static_cast<std::uint32_t>(c.id) < id + ((i + 1) << shift)) before[i] += value(c);
      }
    });
    row.sum(before);
    std::uint32_t digit = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) digit += before[i] < wanted ? 1 : 0;
    id += digit << shift;
  }
  return static_cast<TokenId>(id);
}

template <class Row>
SPECDEC_HD inline Mass kept_mass(Row& row) {
  Mass mass[1] = {};
  row.for_tokens([&](const Candidate& c) { mass[0] += mass_of(c.weight); });
  row.sum(mass);
  return mass[0];
}

// Keeps the first tokens whose mass reaches `wanted`.
template <class Row>
SPECDEC_HD inline void cut_top_p(Row& row, Mass wanted) {
  LawCut& cut = row.cut();
  if (!cut.on_list) {
    cut.on_list = true;
    cut.on_list = kept_mass(row) >= wanted;
  }
  const std::uint32_t key =
      find_key(row, wanted, [](const Candidate& c) { return mass_of(c.weight); });
  Mass sums[3] = {};  // mass above the key, mass and number of its own tokens
  row.for_tokens([&](const Candidate& c) {
    if (c.key > key) sums[0] += mass_of(c.weight);
    if (c.key == key) {
      sums[1] += mass_of(c.weight);
      ++sums[2];
    }
  });
  row.sum(sums);
  const Mass own = sums[1] / sums[2], ties = (wanted - sums[0] + own - 1) / own;
  TokenId last = INT32_MAX;
  if (ties < sums[2]) {
    last = find_id(row, ties, [key](const Candidate& c) { return Mass{c.key == key ? 1u : 0u}; });
  }
  cut.key_floor = key;
  cut.id_floor = last;
  cut.total = sums[0] + ties * own;
}

// Finds the row's cut, which was none, and its total where the kept tokens are on the list.
template <class Row>
SPECDEC_HD inline void cut_law(Row& row, const SamplingLaw& law) {
  LawCut& cut = row.cut();
  const auto k = static_cast<Mass>(law.top_k);
  const Mass kept = row.list(law), listed = row.listed();
  cut.on_list = kept == listed;
  if (k > 0 && k < kept) {
    cut.on_list = k <= listed;
    cut.key_floor = find_key(row, k, [](const Candidate&) { return Mass{1}; });
    cut.total = 0;
  }
  if (cut.total == 0 && (cut.on_list || law.top_p < 1.0f)) cut.total = kept_mass(row);
  // After other cuts top_p is a share of what they left.
  if (law.top_p < 1.0f) cut_top_p(row, wanted_mass(law.top_p, cut.total));
}

}  // namespace specdec

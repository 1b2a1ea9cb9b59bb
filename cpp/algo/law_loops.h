// The loops over a whole row of scores that a draw takes most of its time in, for the widest
// vectors that cpu_isa() allows. The numbers are the same with any of them: each element is
// computed for itself, sums are exact or decide nothing.
#pragma once

#include <cstdint>

#include "algo/law_mass.h"

namespace specdec {

// Masses of weights from 4^-1, 4^-2, ... 4^-kMassSteps on.
inline constexpr int kMassSteps = 12;

struct LawLoops {
  const char* name;
  // The largest score; NaN if one of them is NaN.
  float (*largest)(const float* scores, std::int32_t n);
  // The law of a row before any cut: weights [n], and of each block of kMassBlock the mass and the
  // largest score. Returns how many weights are at least `floor`.
  std::int32_t (*weigh)(const float* scores, std::int32_t n, float best, float inverse_temperature,
                        float floor, float* weights, Mass* mass, float* block_best);
  // sums[i]: of the weights from 4^-(i + 1) on, rounded.
  void (*sum_by_size)(const float* weights, std::int32_t n, double* sums);
};

// Those that cpu_isa() allows; and all narrower ones, too, for tests.
int num_law_loops();
const LawLoops& law_loops_at(int index);  // the widest last
inline const LawLoops& law_loops() { return law_loops_at(num_law_loops() - 1); }

}  // namespace specdec

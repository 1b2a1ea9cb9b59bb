// Where a matrix instruction keeps elements in registers, by the PTX ISA. g = lane / 4, t = lane
// % 4.
#pragma once
#include "ptx/elements.h"

namespace ptx {

constexpr unsigned kMaxDepth = 32;

inline unsigned element_of(Element type, std::uint32_t bits, unsigned i) {
  return type == Element::e4m3 ? bits >> 8 * i & 0xff : bits >> 16 * i & 0xffff;
}
// A, 16 rows of k: registers 0 and 1 are rows g and g + 8 of the first half of k, 2 and 3 of the
// second; a lane holds neighbours from t times their number on.
inline void fragment_a(Element type, const std::uint32_t* const (&registers)[4],
                       float (*a)[kMaxDepth]) {
  const unsigned per = type == Element::e4m3 ? 4 : 2;
  for (unsigned r = 0; r < 4; r++) {
    for (unsigned l = 0; l < 32; l++) {
      for (unsigned h = 0; h < per; h++) {
        a[l / 4 + (r & 1) * 8][(r >> 1) * 4 * per + l % 4 * per + h] =
            widened(type, element_of(type, registers[r][l], h));
      }
    }
  }
}
// D: register i is row g, or g + 8 for the third and fourth of four, columns 8 (i / 4) + 2t and
// + 1.
inline unsigned d_row(unsigned lane, unsigned i) { return lane / 4 + (i % 4 >= 2 ? 8 : 0); }
inline unsigned d_column(unsigned lane, unsigned i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

// To fp32, towards zero.
inline float cut(double x) {
  return float(std::bit_cast<double>(std::bit_cast<std::uint64_t>(x) & ~((1ull << 29) - 1)));
}

}  // namespace ptx

// How the files ops_*.cc write down instructions: a table from an instruction's whole name, all
// modifiers included, to the function that executes it. What is not in the table does not exist.
#pragma once
#include <bit>
#include <utility>

#include "ptx/machine.h"

namespace ptx {

using Table = std::unordered_map<std::string, Opcode>;
void add_integers(Table&);
void add_floats(Table&);
void add_conversions(Table&);
void add_memory(Table&);
void add_control(Table&);
void add_warp_operations(Table&);
void add_async(Table&);
void add_matrices(Table&);
void add_warpgroup_products(Table&);

inline void put(Table& t, const std::string& name, Opcode opcode) {
  if (!t.emplace(name, std::move(opcode)).second) throw Error("PTX table: " + name + " twice");
}

// The letter of an operand of a C++ type.
template <class T>
constexpr char letter() {
  return sizeof(T) == 2 ? 'h' : sizeof(T) == 4 ? 'w' : 'x';
}

// For each active lane: d = f(sources). All 32 at once where all are active: that is most of the
// time.
template <class F, class D, class... S>
void for_each_lane(std::uint32_t active, F f, D* d, const S*... s) {
  if (active == ~0u) {
    for (unsigned l = 0; l < 32; l++) d[l] = f(s[l]...);
  } else {
    for (std::uint32_t m = active; m; m &= m - 1) {
      const unsigned l = unsigned(std::countr_zero(m));
      d[l] = f(s[l]...);
    }
  }
}
template <class F, class D, class... S, std::size_t... I>
void map_lanes(Warp& w, const Op& o, std::index_sequence<I...>) {
  for_each_lane(w.active, F{}, w.at<D>(o.x[0]), w.at<const S>(o.x[1 + I])...);
}
template <class F, class D, class... S>
void map_op(Warp& w, const Op& o) {
  map_lanes<F, D, S...>(w, o, std::index_sequence_for<S...>());
}
// F: a class whose call takes S... and gives D.
template <class F, class D, class... S>
void put_map(Table& t, const std::string& name) {
  put(t, name, {map_op<F, D, S...>, std::string{letter<D>(), letter<S>()...}});
}

// The lanes of a mask in order: f(lane).
template <class F>
void lanes_of(std::uint32_t mask, F f) {
  for (; mask; mask &= mask - 1) f(unsigned(std::countr_zero(mask)));
}

}  // namespace ptx

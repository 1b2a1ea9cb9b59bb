// K/V moves that wait, as the arrays that ops.compact_kv takes.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "base/types.h"
#include "engine/kv_moves.h"

namespace specdec {

// A dictionary of int32 arrays by argument name; None if there is nothing to move.
inline pybind11::object moves_or_none(const KvMoves& moves) {
  if (moves.empty()) return pybind11::none();
  using Array = pybind11::array_t<std::int32_t>;
  const auto requests = static_cast<pybind11::ssize_t>(moves.num_requests());
  auto flat = [](const std::vector<std::int32_t>& values) {
    return Array(static_cast<pybind11::ssize_t>(values.size()), values.data());
  };
  pybind11::dict arrays;
  arrays["page_table"] =
      flat(moves.page_table()).reshape({requests, pybind11::ssize_t{moves.max_pages()}});
  arrays["kv_len"] = flat(moves.kv_len);
  arrays["cu_rows"] = flat(moves.cu_rows);
  arrays["path"] = flat(moves.path).reshape({requests, pybind11::ssize_t{kMaxStepTokens}});
  arrays["path_len"] = flat(moves.path_len);
  return arrays;
}

}  // namespace specdec

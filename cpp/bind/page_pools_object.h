// PagePools together with the Python objects whose memory it points into.
#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <utility>
#include <vector>

#include "bind/dlpack_convert.h"
#include "engine/page_pools.h"

namespace specdec {

class PagePoolsObject {
 public:
  explicit PagePoolsObject(const std::vector<std::pair<pybind11::object, pybind11::object>>& given);

  PagePools pools;
  int num_copies = 0;

 private:
  std::deque<BorrowedTensor> held_;
};

}  // namespace specdec

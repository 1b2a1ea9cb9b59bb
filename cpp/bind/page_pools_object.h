// PagePools together with the Python objects whose memory it points into.
#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "bind/dlpack_convert.h"
#include "engine/page_pools.h"
#include "engine/window_memory.h"

namespace specdec {

class PagePoolsObject {
 public:
  PagePoolsObject(const std::vector<std::pair<pybind11::object, pybind11::object>>& given,
                  const pybind11::object& k_pages, const pybind11::object& v_pages,
                  const std::vector<int>& narrow_windows);

  PagePools pools;
  std::unique_ptr<WindowMemory> windows;  // null: no layer has a narrow one
  int num_copies = 0;

 private:
  std::deque<BorrowedTensor> held_;
};

}  // namespace specdec

// Pages in the host's memory and their copies in the host's pool (engine/page_pools.h).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <utility>
#include <vector>

#include "backend/cache_view.h"
#include "base/check.h"
#include "bind/array_argument.h"
#include "bind/page_pools_object.h"
#include "bind/registers.h"
#include "engine/step_plan.h"

namespace py = pybind11;

namespace specdec {
namespace {

PagePool make_pool(const TensorView& pages, const TensorView& copies) {
  SPECDEC_REQUIRE(copies.ndim >= 3 && pages.is_contiguous() && copies.is_contiguous() &&
                      pages.dtype == copies.dtype,
                  "PagePools: copies must be contiguous, [H, layers, ...] of the pages' dtype");
  SPECDEC_REQUIRE(pages.device == DeviceType::kCpu && copies.device == DeviceType::kCpu,
                  "PagePools: pages on a device are copied on its stream");
  PagePool pool;
  pool.pages = static_cast<std::byte*>(pages.data);
  pool.copies = static_cast<std::byte*>(copies.data);
  pool.layers = copies.shape[1];
  std::int64_t each = 1;
  for (int axis = 2; axis < copies.ndim; ++axis) each *= copies.shape[axis];
  const std::int64_t row = pool.layers * each;
  SPECDEC_REQUIRE(row > 0 && pages.numel() % row == 0, "PagePools: pages of ", pages.numel(),
                  " elements are no whole number of pages of ", pool.layers, " x ", each);
  pool.num_pages = pages.numel() / row;
  pool.bytes = each * static_cast<std::int64_t>(dtype_bytes(pages.dtype));
  return pool;
}

}  // namespace

PagePoolsObject::PagePoolsObject(const std::vector<std::pair<py::object, py::object>>& given,
                                 const py::object& k_pages, const py::object& v_pages,
                                 const std::vector<int>& narrow_windows) {
  std::vector<PagePool> made;
  for (const auto& [pages, copies] : given) {
    const TensorView& from = held_.emplace_back(pages, "pages", true).view();
    const TensorView& to = held_.emplace_back(copies, "copies", true).view();
    made.push_back(make_pool(from, to));
    const int count = static_cast<int>(to.shape[0]);
    SPECDEC_REQUIRE(made.size() == 1 || count == num_copies, "PagePools: copies for ", count,
                    " and for ", num_copies, " pages: give the same to each pool");
    num_copies = count;
  }
  pools = PagePools(std::move(made));
  if (narrow_windows.empty()) return;
  const TensorView& k = held_.emplace_back(k_pages, "k_pages", true).view();
  const TensorView& v = held_.emplace_back(v_pages, "v_pages", true).view();
  windows = std::make_unique<WindowMemory>(cache_view(k, v), narrow_windows);
}

void register_page_pools(py::module_& m) {
  py::class_<PagePoolsObject>(m, "PagePools",
                              "Pools of pages on the host that go by one number, with their copies "
                              "in the host's pool. See cpp/engine/page_pools.h.")
      .def(py::init<const std::vector<std::pair<py::object, py::object>>&, const py::object&,
                    const py::object&, const std::vector<int>&>(),
           py::arg("pools"), py::arg("k_pages") = py::none(), py::arg("v_pages") = py::none(),
           py::arg("narrow_windows") = std::vector<int>{},
           "pools: (pages, copies) of each; pages [layers, P, ...], copies [H, layers, ...]; both "
           "are kept alive. k_pages, v_pages: those of a model whose layers have narrow_windows, "
           "as Executor takes them.")
      .def(
          "follow",
          [](const PagePoolsObject& self, const ArrayArgument<std::int32_t>& orders) {
            SPECDEC_REQUIRE(orders.ndim() == 2 && orders.shape(1) == 3,
                            "orders: shape must be [N, 3]");
            for (py::ssize_t i = 0; i < orders.shape(0); ++i) {
              const std::int32_t* order = orders.data() + 3 * i;
              if (order[0] == kLeftPage) {
                SPECDEC_REQUIRE(self.windows && order[1] >= 0 &&
                                    order[1] < self.windows->num_pages() && order[2] >= 0 &&
                                    order[2] < self.windows->num_groups(),
                                "orders[", i, "] = ", order[0], ", ", order[1], ", ", order[2],
                                ": no page of a narrow window");
                self.windows->leave(order[2], order[1]);
                continue;
              }
              SPECDEC_REQUIRE(order[1] >= 0 && order[2] >= 0 && order[2] < self.num_copies,
                              "orders[", i, "] = ", order[0], ", ", order[1], ", ", order[2],
                              ": pages are not negative, those of the host's pool less than ",
                              self.num_copies);
              self.pools.copy({.page = order[1], .host_page = order[2], .to_host = order[0] != 0});
            }
          },
          py::arg("orders"),
          "orders: int32 [N, 3] of StepPlan.page_orders, in this order: (1: a copy to the host's "
          "pool, 0: from there; page; page of the host's pool), or (2; page; narrow window, whose "
          "layers give its memory back).");
}

}  // namespace specdec

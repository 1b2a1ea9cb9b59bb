// _core.SharedCounters: counters in memory that processes share.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

#include "base/check.h"
#include "base/shared_counters.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

struct CountersObject {
  explicit CountersObject(const py::buffer& buffer)
      : kept(buffer.request(true)),
        counters(kept.ptr, static_cast<int>(kept.size * kept.itemsize /
                                            static_cast<py::ssize_t>(SharedCounters::kBytes))) {
    SPECDEC_REQUIRE(counters.count() >= 1, "memory: a counter takes ", SharedCounters::kBytes,
                    " bytes");
  }
  py::buffer_info kept;  // the view, and so the memory
  SharedCounters counters;
};

}  // namespace

void register_shared_counters(py::module_& m) {
  py::class_<CountersObject>(m, "SharedCounters",
                             "Counters that processes share, a cache line each: one adds, the "
                             "others wait. What was written "
                             "before add() is seen behind wait().")
      .def(py::init<const py::buffer&>(), py::arg("memory"),
           "memory: writable bytes of a shared mapping, zeros at first.")
      .def(
          "add", [](const CountersObject& self, int index) { self.counters.add(index); },
          py::arg("index"))
      .def(
          "wait",
          [](const CountersObject& self, int index, std::uint32_t target, double seconds) {
            const py::gil_scoped_release release;
            return self.counters.wait(index, target, seconds);
          },
          py::arg("index"), py::arg("target"), py::arg("seconds"),
          "Until the counter has been added to `target` times (modulo 2^32); False: it was not "
          "within "
          "`seconds`. Releases the GIL.");
}

}  // namespace specdec

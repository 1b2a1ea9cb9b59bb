// Which backends there are, and plug-ins.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backend/registry.h"
#include "base/check.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

py::dict cuda_info_dict() {
  const CudaInfo info = cuda_info();
  py::dict out;
  out["compiled"] = info.compiled;
  out["runtime_version"] = info.runtime_version;
  out["driver_version"] = info.driver_version;
  out["devices"] = info.devices;
  out["reason"] = info.reason;
  return out;
}

DeviceLimits device_limits(const std::string& name, int device) {
  const Backend& backend = find_backend(name);
  SPECDEC_REQUIRE(backend.limits != nullptr, "backend = \"", name,
                  "\": has no device limits, its kernels suit any machine");
  return backend.limits(device);
}

}  // namespace

void register_backends(py::module_& m) {
  py::class_<DeviceLimits>(m, "DeviceLimits",
                           "What a kernel choice may depend on besides the problem.")
      .def(py::init([](int major, int minor, int num_sms, int shared_bytes, std::int64_t l2_bytes) {
             SPECDEC_REQUIRE(major >= 0 && minor >= 0 && num_sms >= 1 && shared_bytes >= 0,
                             "DeviceLimits(", major, ", ", minor, ", ", num_sms, ", ", shared_bytes,
                             "): at least one SM, nothing negative");
             return DeviceLimits{major, minor, num_sms, shared_bytes, l2_bytes};
           }),
           py::arg("major"), py::arg("minor"), py::arg("num_sms"), py::arg("shared_bytes"),
           py::arg("l2_bytes"))
      .def_readonly("major", &DeviceLimits::major, "compute capability, before the dot")
      .def_readonly("minor", &DeviceLimits::minor, "compute capability, after the dot")
      .def_readonly("num_sms", &DeviceLimits::num_sms)
      .def_readonly("shared_bytes", &DeviceLimits::shared_bytes,
                    "shared memory that one block can have")
      .def_readonly("l2_bytes", &DeviceLimits::l2_bytes);
  m.def("cuda_info", &cuda_info_dict,
        "What the CUDA side of this build is, and which devices it sees.");
  m.def("backend_names", &backend_names, "Names of the backends that can run operations here.");
  m.def("load_backend", &load_backend, py::arg("name"), py::arg("path"),
        "Opens a shared library that exports specdec_backend() and registers it as `name`.");
  m.def(
      "backend_memory",
      [](const std::string& name) {
        return find_backend(name).memory == DeviceType::kCpu ? "cpu" : "cuda";
      },
      py::arg("backend"), "Where a backend takes its tensors from: \"cpu\" or \"cuda\".");
  m.def("device_limits", &device_limits, py::arg("backend"), py::arg("device") = 0,
        "DeviceLimits of one device of a backend that chooses its kernels by device.");
}

}  // namespace specdec

// specdec_ext._core: a list of registers, nothing else.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backend/backend.h"
#include "bind/registers.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, m) {
  m.doc() = "Compiled core of specdec_ext. Use the specdec_ext package; this module is its engine.";
  m.attr("__version__") = SPECDEC_VERSION;
  m.def(
      "cuda_info",
      [] {
        const specdec::CudaInfo info = specdec::cuda_info();
        py::dict out;
        out["compiled"] = info.compiled;
        out["runtime_version"] = info.runtime_version;
        out["devices"] = info.devices;
        out["reason"] = info.reason;
        return out;
      },
      "What the CUDA side of this build is, and which devices it sees.");
  specdec::register_plan(m);  // first: its StepPlan is in the signatures of others
  specdec::register_ops(m);
  specdec::register_executor(m);
  specdec::register_linear(m);
  specdec::register_decoder(m);
  specdec::register_algo(m);
}

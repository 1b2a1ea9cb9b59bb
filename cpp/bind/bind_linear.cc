// _core.PackedLinear: our few-row linear layer on Python tensors, for the adapter that swaps
// nn.Linear.
#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

#include "backend/cpu/linear/linear_call.h"
#include "backend/cpu/linear/packed_linear.h"
#include "base/check.h"
#include "base/cpu_features.h"
#include "base/thread_pool.h"
#include "bind/dlpack_convert.h"
#include "bind/registers.h"
#include "bind/weight_argument.h"

namespace py = pybind11;

namespace specdec {
namespace {

constexpr const char* kRunDoc = R"(Write ``x @ weight.T + bias`` into ``out``.

Parameters
----------
x : tensor [R, K]
    float32, bfloat16 or float16, CPU, inner dimension contiguous. Rounded to bfloat16 if the weight
    is bfloat16 or e4m3 (f8_a8: to e4m3 then, with a scale for the row), to 8 bits in blocks of 32 if
    it is quantised; used as float32 otherwise.
out : tensor [R, N]
    Any of the three dtypes, CPU, inner dimension contiguous. Accumulation is float32.
fast : bool
    On processors with tiles, if R is ``many_rows`` or more and the weight is quantised: its elements
    and ``x`` are rounded to bfloat16, and ``out`` is that of a bfloat16 weight.

Otherwise a row of ``out`` depends only on its row of ``x``: not on R, not on threads.
Raises ValueError for shapes, strides and devices, TypeError for dtypes.)";

// out[N, K] float32 = the values of a quantised weight.
void dequantize(const py::object& weight, const py::object& out_tensor) {
  const WeightArgument argument(weight, "weight");
  const BorrowedTensor out(out_tensor, "out", true);
  const cpu::WeightView& view = argument.view();
  SPECDEC_REQUIRE(cpu::is_block_format(view.type) && view.view.ndim == 2 && view.columns() >= 0,
                  "weight: give uint8 [N, whole blocks] and the name of the format");
  check_contiguous(view.view, "weight");
  check_cpu(out.view(), "out");
  check_contiguous(out.view(), "out");
  check_dtype(out.view(), "out", {DType::kF32});
  check_shape(out.view(), "out", "[N, K]", {view.view.shape[0], view.columns()});
  py::gil_scoped_release release;
  const std::int64_t groups = view.columns() / cpu::kGroup;
  ThreadPool::global().run_items(view.view.shape[0], view.columns(), [&](Range range, int) {
    for (std::int64_t row = range.begin; row < range.end; ++row) {
      const std::byte* blocks =
          static_cast<const std::byte*>(view.view.data) + row * view.view.shape[1];
      float* values = static_cast<float*>(out->data) + row * view.columns();
      for (std::int64_t g = 0; g < groups; ++g) {
        cpu::group_values(view.type, cpu::read_group(view.type, blocks, g),
                          values + g * cpu::kGroup);
      }
    }
  });
}

}  // namespace

void register_linear(py::module_& m) {
  using cpu::PackedLinear;
  py::class_<PackedLinear>(m, "PackedLinear",
                           "A linear layer for few rows: weights packed once, streamed per call.")
      .def(
          py::init([](const py::object& weight, const py::object& bias) {
            const WeightArgument w(weight, "weight");
            BorrowedTensor b;
            if (!bias.is_none()) b = BorrowedTensor(bias, "bias");
            py::gil_scoped_release release;
            return std::make_unique<PackedLinear>(std::vector<cpu::WeightView>{w.view()},
                                                  std::vector<TensorView>{b.view()});
          }),
          py::arg("weight"), py::arg("bias") = py::none(),
          "weight [N, K] and bias [N] (CPU, float32, bfloat16 or float16) are copied. A quantised "
          "weight is a pair: its blocks, uint8 [N, bytes of a row], and their format's name: q8_0, "
          "q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, q4_g, q8_g, f8_g or f8_a8.")
      .def(
          "run",
          [](const PackedLinear& self, const py::object& x_tensor, const py::object& out_tensor,
             bool fast) {
            const BorrowedTensor x(x_tensor, "x");
            const BorrowedTensor out(out_tensor, "out", true);
            const auto floats = {DType::kF32, DType::kBF16, DType::kF16};
            check_cpu(x.view(), "x");
            check_cpu(out.view(), "out");
            check_dtype(x.view(), "x", floats);
            check_dtype(out.view(), "out", floats);
            check_shape(x.view(), "x", "[R, K]", {kAny, self.k()});
            check_shape(out.view(), "out", "[R, N]", {x->shape[0], self.n()});
            check_last_axis_contiguous(x.view(), "x");
            check_last_axis_contiguous(out.view(), "out");
            check_rows_apart(out.view(), "out");
            check_disjoint(out.view(), "out", x.view(), "x");
            if (x->shape[0] == 0) return;
            py::gil_scoped_release release;
            cpu::run_linear(self, x.view(), out.view(), fast);
          },
          py::arg("x"), py::arg("out"), py::arg("fast") = false, kRunDoc)
      .def(
          "unpack_rows",
          [](const PackedLinear& self, const py::object& ids_tensor, const py::object& out_tensor) {
            const BorrowedTensor ids(ids_tensor, "ids"), out(out_tensor, "out", true);
            check_cpu(ids.view(), "ids");
            check_contiguous(ids.view(), "ids");
            check_dtype(ids.view(), "ids", {DType::kI32});
            check_shape(ids.view(), "ids", "[n]", {kAny});
            check_cpu(out.view(), "out");
            check_contiguous(out.view(), "out");
            check_dtype(out.view(), "out", {DType::kF32});
            check_shape(out.view(), "out", "[n, K]", {ids->shape[0], self.k()});
            const auto* rows = static_cast<const std::int32_t*>(ids->data);
            for (std::int64_t i = 0; i < ids->shape[0]; ++i) {
              SPECDEC_REQUIRE(rows[i] >= 0 && rows[i] < self.n(), "ids[", i, "] = ", rows[i],
                              ": rows are 0..", self.n() - 1);
            }
            py::gil_scoped_release release;
            for (std::int64_t i = 0; i < ids->shape[0]; ++i) {
              self.unpack_row(rows[i], static_cast<float*>(out->data) + i * self.k());
            }
          },
          py::arg("ids"), py::arg("out"),
          "Write rows ``ids`` int32 [n] of the weight into ``out`` float32 [n, K].")
      .def(
          "read",
          [](const PackedLinear& self) {
            py::gil_scoped_release release;
            return self.read();
          },
          "Read the packed weights and do nothing else: the floor of ``run``. Returns a checksum.")
      .def_property_readonly("weight_bytes", &PackedLinear::bytes,
                             "Bytes of packed weights and bias, padding included.")
      .def_property_readonly("many_rows", &PackedLinear::many_rows,
                             "From so many rows on ``run(fast=True)`` differs; 0: never.")
      .def_property_readonly("out_features", &PackedLinear::n)
      .def_property_readonly("in_features", &PackedLinear::k)
      .def_property_readonly(
          "dtype", [](const PackedLinear& self) { return weight_type_name(self.type()); });
  m.def("dequantize", &dequantize, py::arg("weight"), py::arg("out"),
        "Write the values of a quantised weight (uint8 [N, bytes of a row], format name) into "
        "``out`` float32 [N, K], contiguous.");
  m.def(
      "cpu_isa", [] { return cpu_isa_name(cpu_isa()); },
      "Instruction set of the CPU kernels: plain, avx2, avx512, avx512_bf16 or "
      "amx (SPECDEC_CPU_ISA caps it).");
}

}  // namespace specdec

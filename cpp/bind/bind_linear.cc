// _core.PackedLinear: our few-row linear layer on Python tensors, for the adapter that swaps
// nn.Linear.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <vector>

#include "backend/cpu/cpu_features.h"
#include "backend/cpu/decoder/row_ops.h"
#include "backend/cpu/linear/packed_linear.h"
#include "base/check.h"
#include "base/thread_pool.h"
#include "bind/dlpack_convert.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

// Rows converted at a time: bounds the scratch of a long prefill.
constexpr std::int64_t kChunkRows = 256;

// Memory of one calling thread, reused by all its calls.
std::byte* scratch(std::vector<std::byte>& buffer, std::int64_t bytes) {
  if (static_cast<std::int64_t>(buffer.size()) < bytes) buffer.resize(bytes);
  return buffer.data();
}

void convert_row(const std::byte* from, DType from_dtype, std::int64_t n, std::byte* to,
                 DType to_dtype, float* wide) {
  const cpu::RowOps& ops = cpu::row_ops();
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, n * dtype_bytes(to_dtype));
    return;
  }
  const float* values = reinterpret_cast<const float*>(from);
  if (from_dtype != DType::kF32) {
    float* target = to_dtype == DType::kF32 ? reinterpret_cast<float*>(to) : wide;
    const auto* bits = reinterpret_cast<const std::uint16_t*>(from);
    from_dtype == DType::kBF16 ? ops.bf16_to_f32(bits, n, target) : ops.f16_to_f32(bits, n, target);
    values = target;
  }
  if (to_dtype == DType::kBF16) ops.f32_to_bf16(values, n, reinterpret_cast<std::uint16_t*>(to));
  if (to_dtype == DType::kF16) ops.f32_to_f16(values, n, reinterpret_cast<std::uint16_t*>(to));
}

// y = x W^T + b in any mix of dtypes. The linear itself sees its own input dtype and float32 out;
// where the caller's tensors are not that, rows go through scratch.
void run_linear(const cpu::PackedLinear& linear, const TensorView& x, const TensorView& out) {
  static thread_local std::vector<std::byte> x_buffer, y_buffer;
  const std::int64_t rows = x.shape[0], k = linear.k(), n = linear.n();
  const DType in = linear.input_dtype();
  const auto in_bytes = static_cast<std::int64_t>(dtype_bytes(in));
  const auto x_bytes = static_cast<std::int64_t>(dtype_bytes(x.dtype));
  const auto out_bytes = static_cast<std::int64_t>(dtype_bytes(out.dtype));
  // The kernels read x in words of 4 bytes, and an odd K needs a pad that the caller's rows lack.
  const bool words = reinterpret_cast<std::uintptr_t>(x.data) % 4 == 0 &&
                     (rows <= 1 || x.strides[0] * x_bytes % 4 == 0);
  const bool x_direct = x.dtype == in && linear.k_padded() == k && words;
  const bool y_direct = out.dtype == DType::kF32;
  const std::int64_t chunk = x_direct && y_direct ? rows : std::min(rows, kChunkRows);
  // The odd stride in cache lines keeps the rows of a tile out of each other's cache sets.
  const std::int64_t scratch_stride = linear.k_padded() + 64 / in_bytes;
  std::byte* x_scratch = x_direct ? nullptr : scratch(x_buffer, chunk * scratch_stride * in_bytes);
  float* y_scratch =
      y_direct ? nullptr : reinterpret_cast<float*>(scratch(y_buffer, chunk * n * 4));
  ThreadPool& pool = ThreadPool::global();
  std::vector<float> wide(x_direct ? 0 : static_cast<std::size_t>(pool.size()) * k);
  for (std::int64_t first = 0; first < rows; first += chunk) {
    const std::int64_t count = std::min(chunk, rows - first);
    const std::byte* x_rows =
        static_cast<const std::byte*>(x.data) + first * x.strides[0] * x_bytes;
    std::byte* out_rows = static_cast<std::byte*>(out.data) + first * out.strides[0] * out_bytes;
    pool.run([&](int rank) {
      const auto range = pool.part(count, rank);
      if (!x_direct) {
        for (std::int64_t r = range.begin; r < range.end; ++r) {
          std::byte* row = x_scratch + r * scratch_stride * in_bytes;
          convert_row(x_rows + r * x.strides[0] * x_bytes, x.dtype, k, row, in,
                      wide.data() + rank * k);
          std::memset(row + k * in_bytes, 0, (linear.k_padded() - k) * in_bytes);
        }
        pool.barrier();
      }
      linear.run_part(x_direct ? x_rows : x_scratch, x_direct ? x.strides[0] : scratch_stride,
                      count, y_direct ? reinterpret_cast<float*>(out_rows) : y_scratch,
                      y_direct ? out.strides[0] : n, rank, pool.size());
      if (y_direct) return;
      pool.barrier();
      for (std::int64_t r = range.begin; r < range.end; ++r) {
        convert_row(reinterpret_cast<const std::byte*>(y_scratch + r * n), DType::kF32, n,
                    out_rows + r * out.strides[0] * out_bytes, out.dtype, nullptr);
      }
    });
  }
}

constexpr const char* kRunDoc = R"(Write ``x @ weight.T + bias`` into ``out``.

Parameters
----------
x : tensor [R, K]
    float32, bfloat16 or float16, CPU, inner dimension contiguous. Rounded to bfloat16 if the weight
    is bfloat16; used as float32 otherwise.
out : tensor [R, N]
    Any of the three dtypes, CPU, inner dimension contiguous. Accumulation is float32.

A row of ``out`` depends only on its row of ``x``: not on R, not on threads.
Raises ValueError for shapes, strides and devices, TypeError for dtypes.)";

}  // namespace

void register_linear(py::module_& m) {
  using cpu::PackedLinear;
  py::class_<PackedLinear>(m, "PackedLinear",
                           "A linear layer for few rows: weights packed once, streamed per call.")
      .def(py::init([](const py::object& weight, const py::object& bias) {
             const BorrowedTensor w(weight, "weight");
             check_cpu(w.view(), "weight");
             check_dtype(w.view(), "weight", {DType::kF32, DType::kBF16, DType::kF16});
             BorrowedTensor b;
             if (!bias.is_none()) b = BorrowedTensor(bias, "bias");
             py::gil_scoped_release release;
             return std::make_unique<PackedLinear>(std::vector<TensorView>{w.view()},
                                                   std::vector<TensorView>{b.view()});
           }),
           py::arg("weight"), py::arg("bias") = py::none(),
           "weight [N, K] and bias [N] (CPU, float32, bfloat16 or float16) are copied.")
      .def(
          "run",
          [](const PackedLinear& self, const py::object& x_tensor, const py::object& out_tensor) {
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
            if (x->shape[0] == 0) return;
            py::gil_scoped_release release;
            run_linear(self, x.view(), out.view());
          },
          py::arg("x"), py::arg("out"), kRunDoc)
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
            ThreadPool& pool = ThreadPool::global();
            std::atomic<std::uint64_t> sum{0};
            pool.run([&](int rank) { sum += self.read_part(rank, pool.size()); });
            return sum.load();
          },
          "Read the packed weights and do nothing else: the floor of ``run``. Returns a checksum.")
      .def_property_readonly("weight_bytes", &PackedLinear::bytes,
                             "Bytes of packed weights and bias, padding included.")
      .def_property_readonly("out_features", &PackedLinear::n)
      .def_property_readonly("in_features", &PackedLinear::k)
      .def_property_readonly("dtype",
                             [](const PackedLinear& self) { return dtype_name(self.dtype()); });
  m.def(
      "cpu_isa", [] { return cpu_isa_name(cpu_isa()); },
      "Instruction set of the CPU kernels: plain, avx2, avx512 or avx512_bf16 "
      "(SPECDEC_CPU_ISA caps it).");
}

}  // namespace specdec

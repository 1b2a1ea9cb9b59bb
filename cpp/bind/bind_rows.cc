// The operations on rows of a decoder: between its matrix products, and those.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "backend/row_ops.h"
#include "base/check.h"
#include "bind/left_sums.h"
#include "bind/op_call.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

constexpr std::int64_t kMaxLinearColumns = 1 << 24;
constexpr std::int64_t kMaxDepth = 1 << 30;
constexpr std::initializer_list<DType> kRowTypes = {DType::kF32, DType::kBF16, DType::kF16};

// [rows, columns] of `dtype` (the first argument of a call brings it), columns contiguous.
BorrowedTensor matrix(OpCall& call, py::handle tensor, const char* name, const char* axes,
                      std::int64_t rows, std::int64_t columns, const DType* dtype, bool writable) {
  BorrowedTensor borrowed(tensor, name, writable);
  check_shape(borrowed.view(), name, axes, {rows, columns});
  call.add(borrowed.view(), name, writable);
  if (dtype != nullptr) {
    check_dtype(borrowed.view(), name, {*dtype});
  } else {
    check_dtype(borrowed.view(), name, kRowTypes);
  }
  check_last_axis_contiguous(borrowed.view(), name);
  if (writable) check_rows_apart(borrowed.view(), name);
  return borrowed;
}

BorrowedTensor weights(OpCall& call, py::handle tensor, const char* name, const TensorView& x) {
  BorrowedTensor borrowed(tensor, name);
  check_shape(borrowed.view(), name, "[columns]", {x.shape[1]});
  call.add(borrowed.view(), name);
  check_dtype(borrowed.view(), name, {x.dtype});
  check_contiguous(borrowed.view(), name);
  return borrowed;
}

void check_columns(const TensorView& x) {
  SPECDEC_REQUIRE(x.shape[1] >= 1 && x.shape[1] <= kMaxDepth && x.shape[0] <= INT32_MAX,
                  "x has shape [", x.shape[0], ", ", x.shape[1], "]: give 1..", kMaxDepth,
                  " columns and at most ", INT32_MAX, " rows");
}

void rms_norm(py::handle x, py::handle weight, py::handle out, py::handle added,
              py::handle added_weight, const SumsArgument& sums, double eps, bool norm_plus_one,
              py::object backend, std::uint64_t stream) {
  const CallOptions where{std::move(backend), stream, py::none(), py::none()};
  OpCall call("rms_norm", where);
  const bool adds = !added.is_none() || sums;
  SPECDEC_REQUIRE(added.is_none() || !sums, "added and sums are given: give one");
  const BorrowedTensor rows = matrix(call, x, "x", "[rows, columns]", kAny, kAny, nullptr, adds);
  check_columns(rows.view());
  const DType dtype = rows->dtype;
  RmsNormParams p;
  p.x = rows->data;
  p.x_row_stride = rows->strides[0];
  p.rows = static_cast<std::int32_t>(rows->shape[0]);
  p.columns = static_cast<std::int32_t>(rows->shape[1]);
  p.dtype = dtype;
  SPECDEC_REQUIRE(eps >= 0.0, "eps = ", eps, ": give 0 or more");
  p.eps = static_cast<float>(eps);
  p.plus_one = norm_plus_one;
  const BorrowedTensor factor = weights(call, weight, "weight", rows.view());
  p.weight = factor->data;
  const BorrowedTensor result =
      matrix(call, out, "out", "[rows, columns]", p.rows, p.columns, &dtype, true);
  p.out = result->data;
  p.out_row_stride = result->strides[0];
  BorrowedTensor addend, addend_factor;
  SPECDEC_REQUIRE(!adds || p.out != p.x, "out is x: with ", sums ? "sums" : "added",
                  ", x holds the sum afterwards");
  if (sums) p.sums = (*sums)->use(call, p.rows, p.columns, p.dtype);
  if (!added.is_none()) {
    addend = matrix(call, added, "added", "[rows, columns]", p.rows, p.columns, &dtype, false);
    p.added = addend->data;
    p.added_row_stride = addend->strides[0];
  }
  if (!added_weight.is_none()) {
    SPECDEC_REQUIRE(!added.is_none(), "added_weight is given: it needs added");
    addend_factor = weights(call, added_weight, "added_weight", rows.view());
    p.added_weight = addend_factor->data;
  }
  if (p.rows == 0) return;
  p.exec = call.context(0);
  call.run(&Backend::rms_norm, p);
}

const PackedLayout& packed_layout_named(const std::string& format) {
  const PackedLayout* layout = find_packed_layout(format);
  SPECDEC_REQUIRE(layout != nullptr, "format = '", format,
                  "': give q8_0, q4_0, q4_1, q4_g, q4_k, q8_g, q5_k, q6_k, f8_g or f8_a8");
  return *layout;
}

// Kernels read 16 bytes of a row at a time.
void check_rows_aligned(const TensorView& x, const char* needed_by) {
  const std::int64_t rows = x.shape[0], stride = x.strides[0];
  // A row alone has no stride to speak of.
  const bool aligned =
      reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && (rows <= 1 || stride % 8 == 0);
  SPECDEC_REQUIRE(rows == 0 || aligned,
                  "x has rows that do not begin at multiples of 16 bytes (stride ", stride,
                  "): ", needed_by, " needs that; give a contiguous copy");
}

// Tiles of a weight [columns, depth] in this layout.
BorrowedTensor packed_tiles(OpCall& call, py::handle tensor, const PackedLayout& layout,
                            std::int64_t columns, std::int64_t depth) {
  SPECDEC_REQUIRE(columns >= 1 && columns <= kMaxLinearColumns, "weight has ", columns,
                  " rows: give 1..", kMaxLinearColumns);
  BorrowedTensor borrowed(tensor, "weight");
  const std::int64_t bytes = layout.bytes(columns, depth);
  check_shape(borrowed.view(), "weight", "[bytes]", {kAny});
  call.add(borrowed.view(), "weight");
  check_dtype(borrowed.view(), "weight", {DType::kU8});
  check_contiguous(borrowed.view(), "weight");
  SPECDEC_REQUIRE(borrowed->shape[0] == bytes, "weight has ", borrowed->shape[0],
                  " bytes: ", layout.name, " [", columns, ", ", depth, "] takes ", bytes);
  SPECDEC_REQUIRE(reinterpret_cast<std::uintptr_t>(borrowed->data) % 16 == 0,
                  "weight does not begin at a multiple of 16 bytes");
  return borrowed;
}

// The same as the weight of a product with x: `p` becomes a call on it.
BorrowedTensor packed_weight(OpCall& call, py::handle tensor, const std::string& format,
                             std::int64_t columns, const TensorView& x, LinearParams& p) {
  const PackedLayout& layout = packed_layout_named(format);
  SPECDEC_REQUIRE(p.depth % layout.group == 0, "x has ", p.depth, " columns: a weight in ", format,
                  " has whole groups of ", layout.group);
  check_rows_aligned(x, "a packed weight");
  BorrowedTensor borrowed = packed_tiles(call, tensor, layout, columns, p.depth);
  p.weight = borrowed->data;
  p.columns = static_cast<std::int32_t>(columns);
  p.format = layout.format;
  return borrowed;
}

TensorView flat_view(TensorView like, const void* data, std::int64_t count, DType dtype) {
  like.data = const_cast<void*>(data);
  like.dtype = dtype;
  like.ndim = 1;
  like.shape[0] = count;
  like.strides[0] = 1;
  return like;
}

// Returns what a call with leave_sums has left, if it has.
std::optional<LeftSums> linear(py::handle x, py::handle weight, py::handle out, py::handle bias,
                               bool constant_weight, py::object backend, std::uint64_t stream,
                               py::object workspace, const std::optional<std::string>& format,
                               std::int64_t columns, std::int64_t cut_columns, bool leave_sums) {
  const CallOptions where{std::move(backend), stream, std::move(workspace), py::none()};
  OpCall call("linear", where);
  const BorrowedTensor rows = matrix(call, x, "x", "[R, K]", kAny, kAny, nullptr, false);
  check_columns(rows.view());
  const DType dtype = rows->dtype;
  LinearParams p;
  p.x = rows->data;
  p.x_row_stride = rows->strides[0];
  p.rows = static_cast<std::int32_t>(rows->shape[0]);
  p.depth = static_cast<std::int32_t>(rows->shape[1]);
  p.dtype = dtype;
  p.constant_weight = constant_weight;
  BorrowedTensor factor;
  if (format) {
    check_dtype(rows.view(), "x", {DType::kBF16, DType::kF16});
    factor = packed_weight(call, weight, *format, columns, rows.view(), p);
  } else {
    factor = matrix(call, weight, "weight", "[N, K]", kAny, p.depth, &dtype, false);
    SPECDEC_REQUIRE(factor->shape[0] >= 1 && factor->shape[0] <= kMaxLinearColumns, "weight has ",
                    factor->shape[0], " rows: give 1..", kMaxLinearColumns);
    p.weight = factor->data;
    p.weight_row_stride = factor->strides[0];
    p.columns = static_cast<std::int32_t>(factor->shape[0]);
  }
  SPECDEC_REQUIRE(
      cut_columns == 0 || (cut_columns >= p.columns && cut_columns <= kMaxLinearColumns),
      "cut_columns = ", cut_columns, ": give 0, or ", p.columns, "..", kMaxLinearColumns,
      ": the rows of the matrix that weight is a part of");
  p.cut_columns = static_cast<std::int32_t>(cut_columns);
  const BorrowedTensor result = matrix(call, out, "out", "[R, N]", p.rows, p.columns, &dtype, true);
  p.out = result->data;
  p.out_row_stride = result->strides[0];
  BorrowedTensor addend;
  if (!bias.is_none()) {
    addend = BorrowedTensor(bias, "bias");
    check_shape(addend.view(), "bias", "[N]", {p.columns});
    call.add(addend.view(), "bias");
    check_dtype(addend.view(), "bias", {dtype});
    check_contiguous(addend.view(), "bias");
    p.bias = addend->data;
  }
  if (p.rows == 0) return std::nullopt;
  SPECDEC_REQUIRE(result->data != rows->data && result->data != factor->data, "out begins where ",
                  result->data == rows->data ? "x" : "weight",
                  " does: it is written while that is read");
  const auto ask = call.backend().linear_scratch_bytes;
  const ScratchBytes scratch =
      ask == nullptr ? ScratchBytes{} : ask(p.rows, p.columns, p.depth, p.dtype, p.format);
  p.exec = call.context(0, scratch.needed, scratch.wanted);
  LeftSums left{{}, p.rows, p.columns, dtype, &call.backend(), {}, {}};
  if (leave_sums) p.left = &left.sums;
  call.run(&Backend::linear, p);
  const LinearSums& sums = left.sums;
  if (sums.units == nullptr) return std::nullopt;
  const std::int64_t floats = (sums.num_units - 1) * sums.unit_stride + p.rows * sums.row_stride;
  left.memory.push_back(flat_view(result.view(), sums.units, floats, DType::kF32));
  if (sums.row_scales != nullptr) {
    left.memory.push_back(flat_view(result.view(), sums.row_scales, p.rows, DType::kF32));
  }
  if (sums.bias != nullptr) left.memory.push_back(addend.view());
  left.keep = {where.workspace, py::reinterpret_borrow<py::object>(bias)};
  return left;
}

std::int64_t linear_scratch_bytes(std::int32_t rows, std::int32_t columns, std::int32_t depth,
                                  const std::string& dtype, const std::string& backend,
                                  const std::optional<std::string>& format) {
  const Backend& where = find_backend(backend);
  SPECDEC_REQUIRE(rows >= 0, "rows = ", rows, ": give 0 or more");
  SPECDEC_REQUIRE(columns >= 1 && columns <= kMaxLinearColumns, "columns = ", columns, ": give 1..",
                  kMaxLinearColumns);
  SPECDEC_REQUIRE(depth >= 1 && depth <= kMaxDepth, "depth = ", depth, ": give 1..", kMaxDepth);
  const PackedLayout* layout = format ? &packed_layout_named(*format) : nullptr;
  for (const DType type : kRowTypes) {
    if (dtype != dtype_name(type)) continue;
    if (where.linear_scratch_bytes == nullptr) return 0;
    const WeightFormat kept = layout == nullptr ? WeightFormat::kElements : layout->format;
    return where.linear_scratch_bytes(rows, columns, depth, type, kept).wanted;
  }
  throw py::value_error(detail::join("dtype = '", dtype, "': give float32, bfloat16 or float16"));
}

// A matrix that is written in vectors of 16 bytes, and read by libraries that want it dense.
BorrowedTensor dense_result(OpCall& call, py::handle tensor, const char* name, const char* axes,
                            std::int64_t rows, std::int64_t columns) {
  BorrowedTensor borrowed(tensor, name, /*writable=*/true);
  check_shape(borrowed.view(), name, axes, {rows, columns});
  call.add(borrowed.view(), name, /*writable=*/true);
  check_contiguous(borrowed.view(), name);
  SPECDEC_REQUIRE(reinterpret_cast<std::uintptr_t>(borrowed->data) % 16 == 0, name,
                  " does not begin at a multiple of 16 bytes");
  return borrowed;
}

void unpack_weight(py::handle weight, py::handle out, const std::string& format,
                   std::int64_t columns, std::int64_t first, py::object backend,
                   std::uint64_t stream) {
  const CallOptions where{std::move(backend), stream, py::none(), py::none()};
  OpCall call("unpack_weight", where);
  const BorrowedTensor result = dense_result(call, out, "out", "[columns, K]", kAny, kAny);
  const PackedLayout& layout = packed_layout_named(format);
  UnpackWeightParams p;
  p.out = result->data;
  p.depth = static_cast<std::int32_t>(result->shape[1]);
  p.format = layout.format;
  SPECDEC_REQUIRE(p.depth >= 1 && p.depth % layout.group == 0, "out has ", result->shape[1],
                  " columns: a weight in ", format, " has whole groups of ", layout.group);
  const bool has_numbers =
      layout.format == WeightFormat::kF8_G || layout.format == WeightFormat::kF8_A8;
  if (has_numbers) {
    check_dtype(result.view(), "out", {DType::kBF16, DType::kF16, DType::kU8});
  } else {
    check_dtype(result.view(), "out", {DType::kBF16, DType::kF16});
  }
  p.dtype = result->dtype == DType::kU8 ? DType::kF8E4M3 : result->dtype;
  const BorrowedTensor tiles = packed_tiles(call, weight, layout, columns, p.depth);
  p.weight = tiles->data;
  const std::int64_t count = result->shape[0];
  SPECDEC_REQUIRE(first >= 0 && first % PackedLayout::kColumns == 0 && first + count <= columns,
                  "first = ", first, " and ", count, " rows of out: give a multiple of ",
                  PackedLayout::kColumns, " and at most the weight's ", columns, " rows");
  p.first = static_cast<std::int32_t>(first);
  p.columns = static_cast<std::int32_t>(count);
  if (p.columns == 0) return;
  p.exec = call.context(0);
  call.run(&Backend::unpack_weight, p);
}

void e4m3_rows(py::handle x, py::handle numbers, py::handle scales, py::object backend,
               std::uint64_t stream) {
  const CallOptions where{std::move(backend), stream, py::none(), py::none()};
  OpCall call("e4m3_rows", where);
  const BorrowedTensor rows = matrix(call, x, "x", "[R, K]", kAny, kAny, nullptr, false);
  check_columns(rows.view());
  check_dtype(rows.view(), "x", {DType::kBF16, DType::kF16});
  SPECDEC_REQUIRE(rows->shape[1] % 16 == 0, "x has ", rows->shape[1],
                  " columns: give a multiple of 16");
  check_rows_aligned(rows.view(), "e4m3_rows");
  E4m3RowsParams p;
  p.x = rows->data;
  p.x_row_stride = rows->strides[0];
  p.rows = static_cast<std::int32_t>(rows->shape[0]);
  p.depth = static_cast<std::int32_t>(rows->shape[1]);
  p.dtype = rows->dtype;
  const BorrowedTensor result = dense_result(call, numbers, "numbers", "[R, K]", p.rows, p.depth);
  check_dtype(result.view(), "numbers", {DType::kU8});
  p.numbers = result->data;
  BorrowedTensor factors(scales, "scales", /*writable=*/true);
  check_shape(factors.view(), "scales", "[R]", {p.rows});
  call.add(factors.view(), "scales", /*writable=*/true);
  check_dtype(factors.view(), "scales", {DType::kF32});
  check_contiguous(factors.view(), "scales");
  p.scales = static_cast<float*>(factors->data);
  if (p.rows == 0) return;
  p.exec = call.context(0);
  call.run(&Backend::e4m3_rows, p);
}

void gated_activation(py::handle x, py::handle out, const std::string& activation,
                      py::object backend, std::uint64_t stream) {
  const CallOptions where{std::move(backend), stream, py::none(), py::none()};
  OpCall call("gated_activation", where);
  const BorrowedTensor rows =
      matrix(call, x, "x", "[rows, 2 * columns]", kAny, kAny, nullptr, false);
  check_columns(rows.view());
  SPECDEC_REQUIRE(rows->shape[1] % 2 == 0, "x has ", rows->shape[1],
                  " columns: two halves are needed, the gate and what it multiplies");
  const DType dtype = rows->dtype;
  GatedActivationParams p;
  p.x = rows->data;
  p.x_row_stride = rows->strides[0];
  p.rows = static_cast<std::int32_t>(rows->shape[0]);
  p.columns = static_cast<std::int32_t>(rows->shape[1] / 2);
  p.dtype = dtype;
  SPECDEC_REQUIRE(activation == "silu" || activation == "gelu_tanh", "activation = '", activation,
                  "': give 'silu' or 'gelu_tanh'");
  p.activation = activation == "silu" ? GateActivation::kSilu : GateActivation::kGeluTanh;
  const BorrowedTensor result =
      matrix(call, out, "out", "[rows, columns]", p.rows, p.columns, &dtype, true);
  p.out = result->data;
  p.out_row_stride = result->strides[0];
  if (p.rows == 0) return;
  p.exec = call.context(0);
  call.run(&Backend::gated_activation, p);
}

}  // namespace

void register_rows(py::module_& m) {
  py::class_<LeftSums>(
      m, "LinearSums",
      "A product that ``linear`` left in pieces in its workspace, to be read before "
      "the workspace is used again.")
      .def_property_readonly(
          "shape", [](const LeftSums& left) { return py::make_tuple(left.rows, left.columns); });
  m.def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::kw_only(), py::arg("out"),
        py::arg("added") = py::none(), py::arg("added_weight") = py::none(),
        py::arg("sums") = py::none(), py::arg("eps") = 1e-6, py::arg("norm_plus_one") = false,
        py::arg("backend") = py::none(), py::arg("stream") = 0, "See specdec_ext.ops.rms_norm.");
  m.def("linear", &linear, py::arg("x"), py::arg("weight"), py::kw_only(), py::arg("out"),
        py::arg("bias") = py::none(), py::arg("constant_weight") = false,
        py::arg("backend") = py::none(), py::arg("stream") = 0, py::arg("workspace") = py::none(),
        py::arg("format") = py::none(), py::arg("columns") = 0, py::arg("cut_columns") = 0,
        py::arg("leave_sums") = false, "See specdec_ext.ops.linear.");
  m.def("linear_scratch_bytes", &linear_scratch_bytes, py::arg("rows"), py::arg("columns"),
        py::arg("depth"), py::arg("dtype"), py::arg("backend"), py::arg("format") = py::none(),
        "See specdec_ext.ops.linear_scratch_bytes.");
  m.def("unpack_weight", &unpack_weight, py::arg("weight"), py::kw_only(), py::arg("out"),
        py::arg("format"), py::arg("columns"), py::arg("first") = 0,
        py::arg("backend") = py::none(), py::arg("stream") = 0,
        "See specdec_ext.ops.unpack_weight.");
  m.def("e4m3_rows", &e4m3_rows, py::arg("x"), py::kw_only(), py::arg("numbers"), py::arg("scales"),
        py::arg("backend") = py::none(), py::arg("stream") = 0, "See specdec_ext.ops.e4m3_rows.");
  m.def("gated_activation", &gated_activation, py::arg("x"), py::kw_only(), py::arg("out"),
        py::arg("activation") = "silu", py::arg("backend") = py::none(), py::arg("stream") = 0,
        "See specdec_ext.ops.gated_activation.");
}

}  // namespace specdec

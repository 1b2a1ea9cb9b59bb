// _core.ShardedStep: the forward pass of a decoder that holds a shard, part by part.
#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "bind/array_argument.h"
#include "bind/decoder_object.h"
#include "bind/dlpack_convert.h"
#include "bind/registers.h"
#include "engine/step_plan.h"

namespace py = pybind11;

namespace specdec {
namespace {

using cpu::RowBest;
static_assert(sizeof(RowBest) == 8, "ranks exchange it as a float and an int");

// A step that has begun. Its plan and its decoder outlive it.
struct ShardedStep {
  DecoderObject& target;
  StepView step;
};

// Contiguous bytes on the host, at least `needed` of them.
std::byte* bytes_of(const BorrowedTensor& tensor, const char* name, std::int64_t needed) {
  check_cpu(tensor.view(), name);
  check_contiguous(tensor.view(), name);
  check_dtype(tensor.view(), name, {DType::kU8});
  SPECDEC_REQUIRE(tensor->numel() >= needed, name, " has ", tensor->numel(), " bytes, needs ",
                  needed);
  return static_cast<std::byte*>(tensor->data);
}

std::unique_ptr<ShardedStep> begin(DecoderObject& target, const StepPlan& plan,
                                   const py::object& embedded) {
  std::optional<BorrowedTensor> rows;
  const float* data = nullptr;
  if (!embedded.is_none()) {
    rows.emplace(embedded, "embedded");
    check_cpu(rows->view(), "embedded");
    check_contiguous(rows->view(), "embedded");
    check_dtype(rows->view(), "embedded", {DType::kF32});
    check_shape(rows->view(), "embedded", "[R, hidden_size]",
                {plan.num_rows, target.decoder.config().hidden_size});
    data = static_cast<const float*>((*rows)->data);
  }
  auto step = std::make_unique<ShardedStep>(ShardedStep{target, plan.view()});
  py::gil_scoped_release release;
  target.decoder.begin_parts(step->step, data);
  return step;
}

void run_part(ShardedStep& self, int part, const py::object& gathered, const py::object& chunk) {
  cpu::LlamaDecoder& decoder = self.target.decoder;
  const std::int64_t rows = self.step.num_rows;
  const BorrowedTensor out(chunk, "chunk", true);
  std::byte* to = bytes_of(out, "chunk", decoder.chunk_bytes(part, rows));
  std::optional<BorrowedTensor> in;
  const std::byte* from = nullptr;
  if (part > 0) {
    in.emplace(gathered, "gathered");
    from = bytes_of(*in, "gathered", decoder.chunk_bytes(part - 1, rows) * decoder.num_ranks());
  }
  py::gil_scoped_release release;
  decoder.run_part(self.step, part, from, to);
}

void finish(ShardedStep& self, const py::object& gathered, const py::object& out,
            const py::object& hidden) {
  cpu::LlamaDecoder& decoder = self.target.decoder;
  const StepView& step = self.step;
  const BorrowedTensor in(gathered, "gathered"), scores(out, "out", true);
  const std::byte* from =
      bytes_of(in, "gathered",
               decoder.chunk_bytes(decoder.num_parts() - 1, step.num_rows) * decoder.num_ranks());
  std::optional<BorrowedTensor> states;
  float* hidden_data = nullptr;
  if (!hidden.is_none()) {
    states.emplace(hidden, "hidden", true);
    check_cpu(states->view(), "hidden");
    check_contiguous(states->view(), "hidden");
    check_dtype(states->view(), "hidden", {DType::kF32});
    check_shape(states->view(), "hidden", "[L, hidden_size]",
                {step.num_logit_rows, decoder.config().hidden_size});
    hidden_data = static_cast<float*>((*states)->data);
  }
  check_cpu(scores.view(), "out");
  check_contiguous(scores.view(), "out");
  check_dtype(scores.view(), "out", {DType::kF32, DType::kU8});
  const bool best = scores->dtype == DType::kU8;
  const std::int64_t width = best ? sizeof(RowBest) : decoder.num_own_scores();
  check_shape(scores.view(), "out", best ? "[L, 8]" : "[L, own scores]",
              {step.num_logit_rows, width});
  py::gil_scoped_release release;
  if (best) {
    decoder.finish_best(step, from, static_cast<RowBest*>(scores->data), hidden_data);
  } else {
    decoder.finish_logits(step, from, static_cast<float*>(scores->data), hidden_data);
  }
}

// ids[L] of parts uint8 [ranks, L, 8].
void merge_best(const py::object& parts, const py::object& ids) {
  const BorrowedTensor in(parts, "parts"), out(ids, "ids", true);
  check_shape(in.view(), "parts", "[ranks, L, 8]", {kAny, kAny, sizeof(RowBest)});
  const std::int64_t ranks = in->shape[0], rows = in->shape[1];
  const std::byte* from = bytes_of(in, "parts", 0);
  check_cpu(out.view(), "ids");
  check_contiguous(out.view(), "ids");
  check_dtype(out.view(), "ids", {DType::kI32});
  check_shape(out.view(), "ids", "[L]", {rows});
  std::vector<RowBest> copy(static_cast<std::size_t>(ranks * rows)), best(rows);
  std::memcpy(copy.data(), from, copy.size() * sizeof(RowBest));
  cpu::merge_best(copy.data(), static_cast<int>(ranks), rows, best.data());
  for (std::int64_t i = 0; i < rows; ++i) static_cast<TokenId*>(out->data)[i] = best[i].index;
}

}  // namespace

void register_sharded_step(py::module_& m) {
  py::class_<ShardedStep>(m, "ShardedStep",
                          "A forward pass of a decoder that holds a shard. run_part() for each "
                          "part in order, the ranks' "
                          "chunks gathered in between, then finish(). Raises ValueError.")
      .def(py::init(&begin), py::arg("decoder"), py::arg("plan"), py::arg("embedded") = py::none(),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
           "embedded: float32 [R, hidden_size], what embedded_rows() of rank 0 gave; rank 0 needs "
           "none.")
      .def(
          "embedded_rows",
          [](const ShardedStep& self) {
            const py::ssize_t width = self.target.decoder.config().hidden_size;
            return py::array_t<float>({py::ssize_t{self.step.num_rows}, width},
                                      self.target.decoder.embedded_rows());
          },
          "A copy of the rows that the first layer reads, before the first part.")
      .def_property_readonly(
          "num_parts", [](const ShardedStep& self) { return self.target.decoder.num_parts(); })
      .def(
          "chunk_bytes",
          [](const ShardedStep& self, int part) {
            return self.target.decoder.chunk_bytes(part, self.step.num_rows);
          },
          py::arg("part"), "Bytes of each rank's chunk behind a part, for the longest of them.")
      .def("run_part", &run_part, py::arg("part"), py::arg("gathered"), py::arg("chunk"),
           "gathered: uint8, the ranks' chunks behind the part before, one after another (None for "
           "part 0). chunk: uint8, receives this rank's. Releases the GIL.")
      .def("finish", &finish, py::arg("gathered"), py::arg("out"), py::arg("hidden") = py::none(),
           "out: float32 [L, own scores], or uint8 [L, 8] for the best score of each row and its "
           "id, "
           "to be merged. hidden: as LlamaDecoder.forward's. Releases the GIL.");
  m.def("merge_best", &merge_best, py::arg("parts"), py::arg("ids"),
        "ids int32 [L] of what finish() gave on each rank, uint8 [ranks, L, 8]: the first largest "
        "score, -1 for a row with a NaN.");
  m.def(
      "move_kv",
      [](DecoderObject& target, const ArrayArgument<std::int32_t>& moves) {
        SPECDEC_REQUIRE(moves.ndim() == 2 && moves.shape(1) == 2, "moves: shape must be [M, 2]");
        target.decoder.move_kv(moves.data(), moves.shape(0));
      },
      py::arg("decoder"), py::arg("moves"), "Repeat the StepPlan.kv_moves of rank 0 in own pages.");
}

}  // namespace specdec

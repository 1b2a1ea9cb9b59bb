// Operations of beam search on a step's stream.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "backend/beam_ops.h"
#include "base/check.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

struct BeamTensors {
  py::handle tokens, parents, log_probs, reached;
};

// tokens, parents, log_probs [D, length, width]; reached [D].
class BeamsArgument {
 public:
  BeamsArgument(OpCall& call, const BeamTensors& tensors, bool writable) {
    const BorrowedTensor sizes(tensors.tokens, "tokens", writable);
    constexpr const char* kWhat = "[D, length, width]";
    check_shape(sizes.view(), "tokens", kWhat, {kAny, kAny, kAny});
    const std::int64_t requests = sizes->shape[0], length = sizes->shape[1],
                       width = sizes->shape[2];
    SPECDEC_REQUIRE(length >= 1 && width >= 1 && length <= kMaxDraftLen && width <= kMaxDraftLen &&
                        length * width <= kMaxDraftLen,
                    "tokens has ", width, " beams of ", length,
                    " drafts: give at least one of each, at most ", kMaxDraftLen, " in all");
    SPECDEC_REQUIRE(requests <= 65534, "tokens has ", requests, " requests: at most 65534");
    const auto nodes = [&](py::handle tensor, const char* name, DType dtype) {
      return tensor_argument(call, tensor, name, kWhat, dtype, {requests, length, width}, writable);
    };
    tokens_ = nodes(tensors.tokens, "tokens", DType::kI32);
    parents_ = nodes(tensors.parents, "parents", DType::kI32);
    log_probs_ = nodes(tensors.log_probs, "log_probs", DType::kF32);
    reached_ =
        vector_argument(call, tensors.reached, "reached", DType::kI32, "[D]", requests, writable);
    requests_ = static_cast<std::int32_t>(requests);
    view_.tokens = static_cast<TokenId*>(tokens_->data);
    view_.parents = static_cast<std::int32_t*>(parents_->data);
    view_.log_probs = static_cast<float*>(log_probs_->data);
    view_.reached = static_cast<std::int32_t*>(reached_->data);
    view_.length = static_cast<std::int32_t>(length);
    view_.width = static_cast<std::int32_t>(width);
  }
  const BeamPoolView& view() const { return view_; }
  std::int32_t num_requests() const { return requests_; }

 private:
  BorrowedTensor tokens_, parents_, log_probs_, reached_;
  BeamPoolView view_;
  std::int32_t requests_ = 0;
};

struct GrowTensors {
  py::handle scores, columns, num_beams, lengths, temperatures, token_ids, next_rows, next_tokens;
};

void grow_beams(const GrowTensors& in, const BeamTensors& tensors, int depth, int num_scores,
                const CallOptions& where) {
  OpCall call("grow_beams", where);
  const BeamsArgument beams(call, tensors, true);
  const BeamPoolView& view = beams.view();
  SPECDEC_REQUIRE(depth >= 0 && depth < view.length, "depth = ", depth, ": give 0..",
                  view.length - 1);
  SPECDEC_REQUIRE(num_scores >= 1, "num_scores = ", num_scores, ": at least 1");
  GrowBeamsParams p;
  p.beams = view;
  p.depth = depth;
  p.num_scores = num_scores;
  p.num_requests = beams.num_requests();
  const std::int64_t requests = p.num_requests, rows = requests * p.rows();
  const BorrowedTensor sizes(in.scores, "scores");
  check_shape(sizes.view(), "scores", "[rows, k]", {rows, kAny});
  const std::int64_t count = sizes->shape[1];
  SPECDEC_REQUIRE(count >= 1 && count <= kMaxBeamScores, "scores has ", count, " columns: give 1..",
                  kMaxBeamScores);
  const BorrowedTensor scores =
      tensor_argument(call, in.scores, "scores", "[rows, k]", DType::kF32, {rows, count}, false);
  const BorrowedTensor columns =
      tensor_argument(call, in.columns, "columns", "[rows, k]", DType::kI64, {rows, count}, false);
  const BorrowedTensor asked =
      vector_argument(call, in.num_beams, "num_beams", DType::kI32, "[D]", requests);
  const BorrowedTensor lengths =
      vector_argument(call, in.lengths, "lengths", DType::kI32, "[D]", requests);
  BorrowedTensor temperatures, ids;
  if (!in.temperatures.is_none()) {
    temperatures =
        vector_argument(call, in.temperatures, "temperatures", DType::kF32, "[D]", requests);
    p.temperatures = static_cast<const float*>(temperatures->data);
  }
  if (!in.token_ids.is_none()) {
    ids = vector_argument(call, in.token_ids, "token_ids", DType::kI32, "[num_scores]", num_scores);
    p.token_ids = static_cast<const TokenId*>(ids->data);
  }
  const BorrowedTensor next_rows = tensor_argument(call, in.next_rows, "next_rows", "[D, width]",
                                                   DType::kI32, {requests, view.width}, true);
  const BorrowedTensor next_tokens = tensor_argument(
      call, in.next_tokens, "next_tokens", "[D, width]", DType::kI32, {requests, view.width}, true);
  p.scores = static_cast<const float*>(scores->data);
  p.columns = static_cast<const std::int64_t*>(columns->data);
  p.num_beams = static_cast<const std::int32_t*>(asked->data);
  p.lengths = static_cast<const std::int32_t*>(lengths->data);
  p.count = static_cast<std::int32_t>(count);
  p.next_rows = static_cast<std::int32_t*>(next_rows->data);
  p.next_tokens = static_cast<TokenId*>(next_tokens->data);
  p.exec = call.context(requests);
  call.run(&Backend::grow_beams, p);
}

void merge_beams(const BeamTensors& tensors, py::handle draft_tokens, py::handle draft_parents,
                 py::handle draft_nodes, py::handle counts, const CallOptions& where) {
  OpCall call("merge_beams", where);
  const BeamsArgument beams(call, tensors, false);
  MergeBeamsParams p;
  p.beams = beams.view();
  p.num_requests = beams.num_requests();
  const std::int64_t requests = p.num_requests, most = p.beams.length * p.beams.width;
  constexpr const char* kWhat = "[D, length * width]";
  const BorrowedTensor tokens = tensor_argument(call, draft_tokens, "draft_tokens", kWhat,
                                                DType::kI32, {requests, most}, true);
  const BorrowedTensor parents = tensor_argument(call, draft_parents, "draft_parents", kWhat,
                                                 DType::kI32, {requests, most}, true);
  BorrowedTensor nodes;
  if (!draft_nodes.is_none()) {
    nodes = tensor_argument(call, draft_nodes, "draft_nodes", kWhat, DType::kI32, {requests, most},
                            true);
    p.sources = static_cast<std::int32_t*>(nodes->data);
  }
  const BorrowedTensor sizes =
      vector_argument(call, counts, "counts", DType::kI32, "[D]", requests, true);
  p.tokens = static_cast<TokenId*>(tokens->data);
  p.parents = static_cast<std::int32_t*>(parents->data);
  p.counts = static_cast<std::int32_t*>(sizes->data);
  p.exec = call.context(requests);
  call.run(&Backend::merge_beams, p);
}

}  // namespace

void register_beam_ops(py::module_& m) {
  m.def(
      "grow_beams",
      [](py::handle scores, py::handle columns, py::handle tokens, py::handle parents,
         py::handle log_probs, py::handle reached, int depth, int num_scores, py::handle num_beams,
         py::handle lengths, py::handle next_rows, py::handle next_tokens, py::handle temperatures,
         py::handle token_ids, py::object backend, std::uint64_t stream) {
        const CallOptions where{std::move(backend), stream, py::none(), py::none()};
        grow_beams(
            {scores, columns, num_beams, lengths, temperatures, token_ids, next_rows, next_tokens},
            {tokens, parents, log_probs, reached}, depth, num_scores, where);
      },
      py::arg("scores"), py::arg("columns"), py::kw_only(), py::arg("tokens"), py::arg("parents"),
      py::arg("log_probs"), py::arg("reached"), py::arg("depth"), py::arg("num_scores"),
      py::arg("num_beams"), py::arg("lengths"), py::arg("next_rows"), py::arg("next_tokens"),
      py::arg("temperatures") = py::none(), py::arg("token_ids") = py::none(),
      py::arg("backend") = py::none(), py::arg("stream") = 0, "See specdec_ext.ops.grow_beams.");
  m.def(
      "merge_step_beams",
      [](py::handle tokens, py::handle parents, py::handle log_probs, py::handle reached,
         py::handle draft_tokens, py::handle draft_parents, py::handle counts,
         py::handle draft_nodes, py::object backend, std::uint64_t stream) {
        const CallOptions where{std::move(backend), stream, py::none(), py::none()};
        merge_beams({tokens, parents, log_probs, reached}, draft_tokens, draft_parents, draft_nodes,
                    counts, where);
      },
      py::arg("tokens"), py::arg("parents"), py::arg("log_probs"), py::arg("reached"),
      py::kw_only(), py::arg("draft_tokens"), py::arg("draft_parents"), py::arg("counts"),
      py::arg("draft_nodes") = py::none(), py::arg("backend") = py::none(), py::arg("stream") = 0,
      "See specdec_ext.ops.merge_beams.");
}

}  // namespace specdec

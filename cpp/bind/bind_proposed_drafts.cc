// Operations of drafters on the step's stream: drafts into slots, tokens and hidden rows out of
// them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "base/check.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"
#include "bind/slots_argument.h"

namespace py = pybind11;

namespace specdec {
namespace {

const std::int32_t* ints(const BorrowedTensor& tensor) {
  return static_cast<const std::int32_t*>(tensor->data);
}

void propose_drafts(const SlotLayout& layout, py::handle slots, py::handle slot_ids,
                    py::handle tokens, py::handle parents, py::handle survival, py::handle counts,
                    int vocab_size, const CallOptions& where) {
  OpCall call("propose_drafts", where);
  const SlotsArgument pool(call, layout, slots);
  std::int64_t requests = 0;
  const BorrowedTensor ids = slot_ids_argument(call, slot_ids, pool.view(), &requests);
  const BorrowedTensor sizes(tokens, "tokens");
  check_shape(sizes.view(), "tokens", "[B, width]", {requests, kAny});
  const std::int64_t width = sizes->shape[1];
  SPECDEC_REQUIRE(width >= 1 && width <= kMaxDraftLen, "tokens has ", width,
                  " drafts of each request: give 1..", kMaxDraftLen);
  SPECDEC_REQUIRE(vocab_size >= 1, "vocab_size = ", vocab_size, ": at least 1");
  const BorrowedTensor drafts =
      tensor_argument(call, tokens, "tokens", "[B, width]", DType::kI32, {requests, width}, false);
  ProposeDraftsParams p;
  BorrowedTensor tree, chances, number;
  if (!parents.is_none()) {
    tree = tensor_argument(call, parents, "parents", "[B, width]", DType::kI32, {requests, width},
                           false);
    p.parents = ints(tree);
  }
  if (!survival.is_none()) {
    chances = tensor_argument(call, survival, "survival", "[B, width]", DType::kF32,
                              {requests, width}, false);
    p.survival = static_cast<const float*>(chances->data);
  }
  if (!counts.is_none()) {
    number = vector_argument(call, counts, "counts", DType::kI32, "[B]", requests);
    p.counts = ints(number);
  }
  p.slots = pool.view();
  p.slot_ids = ints(ids);
  p.tokens = ints(drafts);
  p.width = static_cast<std::int32_t>(width);
  p.vocab_size = vocab_size;
  p.num_requests = static_cast<std::int32_t>(requests);
  p.exec = call.context(requests);
  call.run(&Backend::propose_drafts, p);
}

void recent_tokens(const SlotLayout& layout, py::handle slots, py::handle slot_ids,
                   py::handle tokens, py::handle lens, py::handle room, py::handle max_drafts,
                   const CallOptions& where) {
  OpCall call("recent_tokens", where);
  const SlotsArgument pool(call, layout, slots);
  std::int64_t requests = 0;
  const BorrowedTensor ids = slot_ids_argument(call, slot_ids, pool.view(), &requests);
  const BorrowedTensor sizes(tokens, "tokens", true);
  check_shape(sizes.view(), "tokens", "[B, width]", {requests, kAny});
  const std::int64_t width = sizes->shape[1];
  SPECDEC_REQUIRE(width >= 1 && width <= layout.max_seq_len, "tokens has ", width,
                  " columns: give 1..", layout.max_seq_len);
  const BorrowedTensor to =
      tensor_argument(call, tokens, "tokens", "[B, width]", DType::kI32, {requests, width}, true);
  const BorrowedTensor lengths =
      vector_argument(call, lens, "lens", DType::kI32, "[B]", requests, true);
  RecentTokensParams p;
  BorrowedTensor most, depths;
  if (!room.is_none()) {
    depths = vector_argument(call, room, "room", DType::kI32, "[B]", requests, true);
    p.room = static_cast<std::int32_t*>(depths->data);
  }
  if (!max_drafts.is_none()) {
    most = vector_argument(call, max_drafts, "max_drafts", DType::kI32, "[B]", requests);
    p.max_drafts = ints(most);
  }
  p.slots = pool.view();
  p.slot_ids = ints(ids);
  p.width = static_cast<std::int32_t>(width);
  p.num_requests = static_cast<std::int32_t>(requests);
  p.tokens = static_cast<TokenId*>(to->data);
  p.lens = static_cast<std::int32_t*>(lengths->data);
  p.exec = call.context(requests);
  call.run(&Backend::recent_tokens, p);
}

struct CommitTensors {
  py::handle cu_logits, results, path, path_len;
};

void keep_hidden(const SlotLayout& layout, py::handle slots, py::handle slot_ids,
                 const CommitTensors& commit, py::handle hidden, py::handle kept,
                 const CallOptions& where) {
  OpCall call("keep_hidden", where);
  const SlotsArgument pool(call, layout, slots);
  std::int64_t requests = 0;
  const BorrowedTensor ids = slot_ids_argument(call, slot_ids, pool.view(), &requests);
  const BorrowedTensor firsts =
      vector_argument(call, commit.cu_logits, "cu_logits", DType::kI32, "[B + 1]", requests + 1);
  const BorrowedTensor decided =
      tensor_argument(call, commit.results, "results", "[B, result words]", DType::kI32,
                      {requests, kResultWords}, false);
  const BorrowedTensor paths = tensor_argument(call, commit.path, "path", "[B, 128]", DType::kI32,
                                               {requests, kMaxStepTokens}, false);
  const BorrowedTensor lengths =
      vector_argument(call, commit.path_len, "path_len", DType::kI32, "[B]", requests);
  const BorrowedTensor from(hidden, "hidden"), to(kept, "kept", true);
  check_shape(from.view(), "hidden", "[L, hidden_size]", {kAny, kAny});
  check_shape(to.view(), "kept", "[num_slots, hidden_size]", {pool.view().count, from->shape[1]});
  call.add(from.view(), "hidden", false);
  call.add(to.view(), "kept", true);
  check_dtype(from.view(), "hidden", {DType::kF32, DType::kF16, DType::kBF16});
  check_dtype(to.view(), "kept", {from->dtype});
  check_contiguous(to.view(), "kept");
  check_contiguous(from.view(), "hidden");
  SPECDEC_REQUIRE(from->shape[0] <= INT32_MAX, "hidden has ", from->shape[0], " rows");
  KeepHiddenParams p;
  p.slots = pool.view();
  p.slot_ids = ints(ids);
  p.cu_logits = ints(firsts);
  p.results = static_cast<const SlotResult*>(decided->data);
  p.path = ints(paths);
  p.path_len = ints(lengths);
  p.hidden = static_cast<const std::byte*>(from->data);
  p.kept = static_cast<std::byte*>(to->data);
  p.row_bytes = from->shape[1] * dtype_bytes(from->dtype);
  p.hidden_stride = p.row_bytes;
  p.num_rows = static_cast<std::int32_t>(from->shape[0]);
  p.num_requests = static_cast<std::int32_t>(requests);
  p.exec = call.context(requests);
  call.run(&Backend::keep_hidden, p);
}

}  // namespace

void register_proposed_drafts(py::module_& m) {
  m.def(
      "propose_drafts",
      [](const SlotLayout& layout, py::handle slots, py::handle slot_ids, py::handle tokens,
         py::handle parents, py::handle survival, py::handle counts, int vocab_size,
         py::object backend, std::uint64_t stream, py::object status) {
        const CallOptions where{std::move(backend), stream, py::none(), std::move(status)};
        propose_drafts(layout, slots, slot_ids, tokens, parents, survival, counts, vocab_size,
                       where);
      },
      py::arg("layout"), py::arg("slots"), py::arg("slot_ids"), py::arg("tokens"),
      py::arg("parents") = py::none(), py::kw_only(), py::arg("survival") = py::none(),
      py::arg("counts") = py::none(), py::arg("vocab_size"), py::arg("backend") = py::none(),
      py::arg("stream") = 0, py::arg("status") = py::none(), "See specdec_ext.ops.propose_drafts.");
  m.def(
      "recent_tokens",
      [](const SlotLayout& layout, py::handle slots, py::handle slot_ids, py::handle tokens,
         py::handle lens, py::handle room, py::handle max_drafts, py::object backend,
         std::uint64_t stream) {
        const CallOptions where{std::move(backend), stream, py::none(), py::none()};
        recent_tokens(layout, slots, slot_ids, tokens, lens, room, max_drafts, where);
      },
      py::arg("layout"), py::arg("slots"), py::arg("slot_ids"), py::kw_only(), py::arg("tokens"),
      py::arg("lens"), py::arg("room") = py::none(), py::arg("max_drafts") = py::none(),
      py::arg("backend") = py::none(), py::arg("stream") = 0, "See specdec_ext.ops.recent_tokens.");
  m.def(
      "keep_hidden",
      [](const SlotLayout& layout, py::handle slots, py::handle slot_ids, py::handle cu_logits,
         py::handle results, py::handle path, py::handle path_len, py::handle hidden,
         py::handle kept, py::object backend, std::uint64_t stream) {
        const CallOptions where{std::move(backend), stream, py::none(), py::none()};
        keep_hidden(layout, slots, slot_ids, {cu_logits, results, path, path_len}, hidden, kept,
                    where);
      },
      py::arg("layout"), py::arg("slots"), py::arg("slot_ids"), py::arg("cu_logits"), py::kw_only(),
      py::arg("results"), py::arg("path"), py::arg("path_len"), py::arg("hidden"), py::arg("kept"),
      py::arg("backend") = py::none(), py::arg("stream") = 0, "See specdec_ext.ops.keep_hidden.");
}

}  // namespace specdec

// Operations of draft trees that grow on a step's stream.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "backend/growth_ops.h"
#include "base/check.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"
#include "bind/slots_argument.h"

namespace py = pybind11;

namespace specdec {
namespace {

constexpr auto kGrowthBytes = static_cast<std::int64_t>(sizeof(DraftGrowth));

// growths [D, GROWTH_BYTES] uint8.
class GrowthsArgument {
 public:
  GrowthsArgument(OpCall& call, py::handle growths, bool writable)
      : tensor_(growths, "growths", writable) {
    check_shape(tensor_.view(), "growths", "[D, GROWTH_BYTES]", {kAny, kGrowthBytes});
    call.add(tensor_.view(), "growths", writable);
    check_dtype(tensor_.view(), "growths", {DType::kU8});
    check_contiguous(tensor_.view(), "growths");
    SPECDEC_REQUIRE(reinterpret_cast<std::uintptr_t>(tensor_->data) % alignof(DraftGrowth) == 0,
                    "growths begins at an address that is no multiple of ", alignof(DraftGrowth));
    SPECDEC_REQUIRE(tensor_->shape[0] <= 65534, "growths has ", tensor_->shape[0],
                    " requests: at most 65534");
  }
  DraftGrowth* data() const { return static_cast<DraftGrowth*>(tensor_->data); }
  std::int64_t requests() const { return tensor_->shape[0]; }

 private:
  BorrowedTensor tensor_;
};

void grow_trees(py::handle growths, py::handle shares, py::handle columns, py::handle limits,
                int num_columns, int max_open, bool begins, py::handle token_ids,
                const CallOptions& where) {
  OpCall call("grow_drafts", where);
  const GrowthsArgument trees(call, growths, true);
  const std::int64_t requests = trees.requests();
  const BorrowedTensor sizes(shares, "shares");
  constexpr const char* kWhat = "[D, places, width]";
  check_shape(sizes.view(), "shares", kWhat, {requests, kAny, kAny});
  const std::int64_t places = sizes->shape[1], width = sizes->shape[2];
  SPECDEC_REQUIRE(places >= 1 && width >= 1 && places <= kMaxDraftChildren &&
                      width <= kMaxDraftChildren && (!begins || places == 1),
                  "shares has ", places, " nodes of ", width, " children: give 1..",
                  kMaxDraftChildren, " of each, one node for the first level");
  SPECDEC_REQUIRE(max_open >= 0 && max_open <= kMaxDraftChildren, "max_open = ", max_open,
                  ": give 0..", kMaxDraftChildren);
  SPECDEC_REQUIRE(num_columns >= 1, "num_columns = ", num_columns, ": at least 1");
  const BorrowedTensor said =
      tensor_argument(call, shares, "shares", kWhat, DType::kF32, {requests, places, width}, false);
  const BorrowedTensor where_from = tensor_argument(call, columns, "columns", kWhat, DType::kI64,
                                                    {requests, places, width}, false);
  const BorrowedTensor most = vector_argument(call, limits, "limits", DType::kI32, "[D]", requests);
  GrowDraftsParams p;
  BorrowedTensor ids;
  if (!token_ids.is_none()) {
    ids = vector_argument(call, token_ids, "token_ids", DType::kI32, "[num_columns]", num_columns);
    p.token_ids = static_cast<const TokenId*>(ids->data);
  }
  p.growths = trees.data();
  p.begins = begins;
  p.shares = static_cast<const float*>(said->data);
  p.columns = static_cast<const std::int64_t*>(where_from->data);
  p.limits = static_cast<const std::int32_t*>(most->data);
  p.places = static_cast<std::int32_t>(places);
  p.width = static_cast<std::int32_t>(width);
  p.num_columns = num_columns;
  p.num_requests = static_cast<std::int32_t>(requests);
  p.max_open = max_open;
  p.exec = call.context(requests);
  call.run(&Backend::grow_drafts, p);
}

void pack_trees(py::handle growths, py::handle golden, py::handle tokens, py::handle parents,
                py::handle cu_rows, py::handle logit_rows, py::handle sources,
                const CallOptions& where) {
  OpCall call("pack_drafts", where);
  const GrowthsArgument trees(call, growths, false);
  const std::int64_t requests = trees.requests();
  const BorrowedTensor last = vector_argument(call, golden, "golden", DType::kI32, "[D]", requests);
  const BorrowedTensor sizes(tokens, "tokens", true);
  check_shape(sizes.view(), "tokens", "[R]", {kAny});
  const std::int64_t rows = sizes->shape[0];
  SPECDEC_REQUIRE(rows <= INT32_MAX, "tokens has ", rows, " rows");
  const BorrowedTensor to = vector_argument(call, tokens, "tokens", DType::kI32, "[R]", rows, true);
  const BorrowedTensor above =
      vector_argument(call, parents, "parents", DType::kI32, "[R]", rows, true);
  const BorrowedTensor firsts =
      vector_argument(call, cu_rows, "cu_rows", DType::kI32, "[D + 1]", requests + 1, true);
  const BorrowedTensor needed(logit_rows, "logit_rows", true);
  check_shape(needed.view(), "logit_rows", "[D, places]", {requests, kAny});
  const std::int64_t places = needed->shape[1];
  SPECDEC_REQUIRE(places >= 1 && places <= kMaxDraftChildren, "logit_rows has ", places,
                  " places: give 1..", kMaxDraftChildren);
  const BorrowedTensor rows_of = tensor_argument(call, logit_rows, "logit_rows", "[D, places]",
                                                 DType::kI32, {requests, places}, true);
  PackDraftsParams p;
  BorrowedTensor before;
  if (!sources.is_none()) {
    before = vector_argument(call, sources, "sources", DType::kI32, "[R]", rows, true);
    p.sources = static_cast<std::int32_t*>(before->data);
  }
  p.growths = trees.data();
  p.golden = static_cast<const TokenId*>(last->data);
  p.tokens = static_cast<TokenId*>(to->data);
  p.parents = static_cast<std::int32_t*>(above->data);
  p.cu_rows = static_cast<std::int32_t*>(firsts->data);
  p.logit_rows = static_cast<std::int32_t*>(rows_of->data);
  p.places = static_cast<std::int32_t>(places);
  p.num_rows = static_cast<std::int32_t>(rows);
  p.num_requests = static_cast<std::int32_t>(requests);
  p.exec = call.context(requests);
  call.run(&Backend::pack_drafts, p);
}

void propose_growths(const SlotLayout& layout, py::handle slots, py::handle slot_ids,
                     py::handle growths, const CallOptions& where) {
  OpCall call("propose_growths", where);
  const SlotsArgument pool(call, layout, slots);
  std::int64_t requests = 0;
  const BorrowedTensor ids = slot_ids_argument(call, slot_ids, pool.view(), &requests);
  const GrowthsArgument trees(call, growths, false);
  SPECDEC_REQUIRE(trees.requests() == requests, "growths has ", trees.requests(),
                  " requests, slot_ids ", requests);
  ProposeGrowthsParams p;
  p.slots = pool.view();
  p.slot_ids = static_cast<const std::int32_t*>(ids->data);
  p.growths = trees.data();
  p.num_requests = static_cast<std::int32_t>(requests);
  p.exec = call.context(requests);
  call.run(&Backend::propose_growths, p);
}

}  // namespace

void register_growth_ops(py::module_& m) {
  m.attr("GROWTH_BYTES") = kGrowthBytes;
  m.def(
      "grow_drafts",
      [](py::handle growths, py::handle shares, py::handle columns, py::handle limits,
         int num_columns, int max_open, bool begins, py::handle token_ids, py::object backend,
         std::uint64_t stream) {
        const CallOptions where{std::move(backend), stream, py::none(), py::none()};
        grow_trees(growths, shares, columns, limits, num_columns, max_open, begins, token_ids,
                   where);
      },
      py::arg("growths"), py::arg("shares"), py::arg("columns"), py::arg("limits"), py::kw_only(),
      py::arg("num_columns"), py::arg("max_open"), py::arg("begins"),
      py::arg("token_ids") = py::none(), py::arg("backend") = py::none(), py::arg("stream") = 0,
      "See specdec_ext.ops.grow_drafts.");
  m.def(
      "pack_drafts",
      [](py::handle growths, py::handle golden, py::handle tokens, py::handle parents,
         py::handle cu_rows, py::handle logit_rows, py::handle sources, py::object backend,
         std::uint64_t stream) {
        const CallOptions where{std::move(backend), stream, py::none(), py::none()};
        pack_trees(growths, golden, tokens, parents, cu_rows, logit_rows, sources, where);
      },
      py::arg("growths"), py::arg("golden"), py::kw_only(), py::arg("tokens"), py::arg("parents"),
      py::arg("cu_rows"), py::arg("logit_rows"), py::arg("sources") = py::none(),
      py::arg("backend") = py::none(), py::arg("stream") = 0, "See specdec_ext.ops.pack_drafts.");
  m.def(
      "propose_growths",
      [](const SlotLayout& layout, py::handle slots, py::handle slot_ids, py::handle growths,
         py::object backend, std::uint64_t stream) {
        const CallOptions where{std::move(backend), stream, py::none(), py::none()};
        propose_growths(layout, slots, slot_ids, growths, where);
      },
      py::arg("layout"), py::arg("slots"), py::arg("slot_ids"), py::arg("growths"), py::kw_only(),
      py::arg("backend") = py::none(), py::arg("stream") = 0,
      "See specdec_ext.ops.propose_growths.");
}

}  // namespace specdec

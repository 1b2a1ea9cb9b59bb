// DraftPasses: the passes of a draft model on the CPU. Every call holds the GIL: it takes
// microseconds.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "bind/dlpack_convert.h"
#include "bind/registers.h"
#include "engine/draft_passes.h"

namespace py = pybind11;

namespace specdec {
namespace {

// The passes together with the tensors that they point into.
struct BoundDraftPasses {
  explicit BoundDraftPasses(const DraftPassesConfig& config) : passes(config) {}

  TensorView hold(py::handle tensor, const char* name, DType dtype, const char* what,
                  std::initializer_list<std::int64_t> shape, bool writable = false) {
    held.emplace_back(tensor, name, writable);
    const TensorView& view = held.back().view();
    check_cpu(view, name);
    check_dtype(view, name, {dtype});
    check_shape(view, name, what, shape);
    check_contiguous(view, name);
    return view;
  }
  template <typename T>
  T* vector(py::handle tensor, const char* name, DType dtype, std::int64_t size) {
    return static_cast<T*>(hold(tensor, name, dtype, "[requests]", {size}).data);
  }

  DraftPasses passes;
  std::vector<BorrowedTensor> held;   // of the round
  std::vector<BorrowedTensor> probs;  // for good
  int num_logit_rows = 0;             // of the plan in flight
};

DraftPick parse_pick(const std::string& name) {
  if (name == "best") return DraftPick::kBest;
  if (name == "coupled") return DraftPick::kCoupled;
  SPECDEC_REQUIRE(name == "own", "mode = '", name, "': give 'best', 'coupled' or 'own'");
  return DraftPick::kOwn;
}

void begin_round(BoundDraftPasses& self, const SlotLayout& layout, py::handle slots,
                 py::handle slot_ids, py::handle max_drafts, py::handle page_table, py::handle laws,
                 bool gives_scores, double pass_price) {
  self.held.clear();
  DraftRound round;
  round.pass_price = pass_price;
  const TensorView pool =
      self.hold(slots, "slots", DType::kU8, "[num_slots, slot_bytes]", {kAny, layout.bytes}, true);
  SPECDEC_REQUIRE(reinterpret_cast<std::uintptr_t>(pool.data) % 16 == 0,
                  "slots begins at an address that is no multiple of 16");
  round.slots = {static_cast<std::byte*>(pool.data), layout.bytes,
                 static_cast<std::int32_t>(pool.shape[0])};
  const TensorView ids = self.hold(slot_ids, "slot_ids", DType::kI32, "[D]", {kAny});
  const std::int64_t requests = ids.shape[0];
  round.slot_ids = static_cast<const std::int32_t*>(ids.data);
  round.num_requests = static_cast<int>(requests);
  round.max_drafts =
      self.vector<const std::int32_t>(max_drafts, "max_drafts", DType::kI32, requests);
  const TensorView table =
      self.hold(page_table, "page_table", DType::kI32, "[D, pages]", {requests, kAny});
  round.page_table = static_cast<const std::int32_t*>(table.data);
  round.max_pages = static_cast<int>(table.shape[1]);
  if (!laws.is_none()) {
    const auto take = [&]<typename T>(const char* name, DType dtype, const T** to) {
      *to = self.vector<const T>(laws.attr(name), name, dtype, requests);
    };
    take("temperature", DType::kF32, &round.laws.temperature);
    take("top_k", DType::kI32, &round.laws.top_k);
    take("top_p", DType::kF32, &round.laws.top_p);
    take("min_p", DType::kF32, &round.laws.min_p);
    take("seed", DType::kI64, &round.laws.seed);
  }
  self.passes.begin(round, gives_scores);
}

const StepPlan* pass_of(BoundDraftPasses& self, const StepPlan* plan) {
  self.num_logit_rows = plan == nullptr ? 0 : plan->num_logit_rows;
  return plan;
}

const StepPlan* plan_prompt_pass(BoundDraftPasses& self, py::handle tokens, py::handle slot_ids,
                                 py::handle kv_len, py::handle cu_rows, py::handle page_table) {
  self.held.clear();
  PromptPieces p;
  const TensorView text = self.hold(tokens, "tokens", DType::kI32, "[R]", {kAny});
  const TensorView ids = self.hold(slot_ids, "slot_ids", DType::kI32, "[P]", {kAny});
  const std::int64_t requests = ids.shape[0];
  p.tokens = static_cast<const TokenId*>(text.data);
  p.num_rows = static_cast<int>(text.shape[0]);
  p.slot_ids = static_cast<const std::int32_t*>(ids.data);
  p.num_requests = static_cast<int>(requests);
  p.kv_len = self.vector<const std::int32_t>(kv_len, "kv_len", DType::kI32, requests);
  p.cu_rows = self.vector<const std::int32_t>(cu_rows, "cu_rows", DType::kI32, requests + 1);
  for (std::int64_t b = 0; b < requests; ++b) {
    SPECDEC_REQUIRE(p.cu_rows[b] >= 0 && p.cu_rows[b] <= p.cu_rows[b + 1] &&
                        p.cu_rows[b + 1] <= p.num_rows && p.kv_len[b] >= 0,
                    "plan_prompts: request ", b, " has rows ", p.cu_rows[b], "..", p.cu_rows[b + 1],
                    " of ", p.num_rows, " after ", p.kv_len[b], " tokens");
  }
  const TensorView table =
      self.hold(page_table, "page_table", DType::kI32, "[P, pages]", {requests, kAny});
  p.page_table = static_cast<const std::int32_t*>(table.data);
  p.max_pages = static_cast<int>(table.shape[1]);
  return pass_of(self, self.passes.plan_prompts(p));
}

void take_pass(BoundDraftPasses& self, py::handle result) {
  const BorrowedTensor tensor(result, "result");
  const TensorView& view = tensor.view();
  check_cpu(view, "result");
  if (view.ndim == 1) {
    check_contiguous(view, "result");
    check_dtype(view, "result", {DType::kI32});
    check_shape(view, "result", "[num_logit_rows]", {self.num_logit_rows});
    return self.passes.take_ids(static_cast<const TokenId*>(view.data));
  }
  check_dtype(view, "result", {DType::kF32});
  check_shape(view, "result", "[num_logit_rows, V]", {self.num_logit_rows, kAny});
  check_last_axis_contiguous(view, "result");
  SPECDEC_REQUIRE(view.shape[1] >= self.passes.config().num_scores, "scores have ", view.shape[1],
                  " columns, num_scores is ", self.passes.config().num_scores);
  self.passes.take_scores(static_cast<const float*>(view.data), view.strides[0]);
}

void bind_pass_probs(BoundDraftPasses& self, py::handle probs, py::handle columns,
                     py::handle drawn) {
  const DraftPassesConfig& config = self.passes.config();
  std::vector<BorrowedTensor> kept;
  kept.swap(self.held);
  const std::int64_t requests = config.num_slots, drafts = config.max_drafts;
  auto* q = static_cast<float*>(self.hold(probs, "probs", DType::kF32,
                                          "[num_slots, max_drafts, num_scores]",
                                          {requests, drafts, config.num_scores}, true)
                                    .data);
  auto* at =
      static_cast<std::int32_t*>(self.hold(columns, "columns", DType::kI32,
                                           "[num_slots, max_drafts]", {requests, drafts}, true)
                                     .data);
  auto* flags = static_cast<std::uint8_t*>(
      self.hold(drawn, "drawn", DType::kU8, "[num_slots]", {requests}, true).data);
  self.passes.bind_probs(q, at, flags);
  self.probs.swap(self.held);
  self.held.swap(kept);
}

}  // namespace

void register_draft_passes(py::module_& m) {
  py::class_<BoundDraftPasses>(
      m, "DraftPasses",
      "The passes of a draft model in steps that run where they are enqueued. See "
      "cpp/engine/draft_passes.h.")
      .def(py::init([](int vocab_size, int num_scores, int num_slots, int max_rows, int max_len,
                       int max_drafts, int top_k, int max_depth, float min_confidence,
                       std::vector<TokenId> input_ids, std::vector<TokenId> output_ids,
                       bool takes_features) {
             DraftPassesConfig c;
             c.vocab_size = vocab_size;
             c.num_scores = num_scores;
             c.num_slots = num_slots;
             c.max_rows = max_rows;
             c.max_len = max_len;
             c.max_drafts = max_drafts;
             c.top_k = top_k;
             c.max_depth = max_depth;
             c.min_confidence = min_confidence;
             c.input_ids = std::move(input_ids);
             c.output_ids = std::move(output_ids);
             c.takes_features = takes_features;
             return std::make_unique<BoundDraftPasses>(c);
           }),
           py::kw_only(), py::arg("vocab_size"), py::arg("num_scores"), py::arg("num_slots"),
           py::arg("max_rows"), py::arg("max_len"), py::arg("max_drafts"), py::arg("top_k") = 1,
           py::arg("max_depth") = 0, py::arg("min_confidence") = 0.0f,
           py::arg("input_ids") = std::vector<TokenId>{},
           py::arg("output_ids") = std::vector<TokenId>{}, py::arg("takes_features") = false)
      .def(
          "bind_pages",
          [](BoundDraftPasses& self, int page_size, int num_pages) {
            self.passes.bind_pages(page_size, num_pages);
          },
          py::arg("page_size"), py::arg("num_pages"))
      .def("bind_probs", &bind_pass_probs, py::arg("probs"), py::arg("columns"), py::arg("drawn"),
           "Where mode 'own' leaves what it drew from, by the step's requests: float32 [num_slots, "
           "max_drafts, num_scores], int32 [num_slots, max_drafts], uint8 [num_slots].")
      .def(
          "enter",
          [](BoundDraftPasses& self, int slot, const std::string& mode, bool adaptive) {
            self.passes.enter(slot, parse_pick(mode), adaptive);
          },
          py::arg("slot"), py::arg("mode"), py::arg("adaptive") = true,
          "A request takes a slot; mode: how its drafts are chosen if it samples, 'best', "
          "'coupled' or 'own'; adaptive: it drafts no deeper than passes pay.")
      .def("begin", &begin_round, py::arg("layout"), py::arg("slots"), py::arg("slot_ids"),
           py::arg("max_drafts"), py::arg("page_table"), py::arg("laws"), py::arg("gives_scores"),
           py::arg("pass_price") = 0.0,
           "A step's drafts; the tensors of drafters.DraftInputs, laws None where nobody samples; "
           "pass_price: tokens that a pass after the first has to bring, which needs scores.")
      .def(
          "plan", [](BoundDraftPasses& self) { return pass_of(self, self.passes.plan()); },
          py::return_value_policy::reference_internal,
          "The next pass; None: there is none, and the drafts lie in the slots.")
      .def(
          "sources",
          [](const BoundDraftPasses& self, const StepPlan& plan) {
            SPECDEC_REQUIRE(self.passes.config().takes_features,
                            "sources: these passes take no features");
            return py::array_t<std::int32_t>(plan.num_rows, self.passes.sources());
          },
          py::arg("plan"),
          "int32 [R], with takes_features: the row of the pass before whose result is the row's "
          "feature; -1: the feature of the position before it, by the target.")
      .def("take", &take_pass, py::arg("result"), "What a pass gave: ids [L] or scores [L, V].")
      .def("plan_prompts", &plan_prompt_pass, py::return_value_policy::reference_internal,
           py::arg("tokens"), py::arg("slot_ids"), py::arg("kv_len"), py::arg("cu_rows"),
           py::arg("page_table"),
           "The pass that reads a step's rows of prompts, or None; take_prompts() after it.")
      .def("take_prompts", [](BoundDraftPasses& self) { self.passes.take_prompts(); })
      .def(
          "num_read",
          [](const BoundDraftPasses& self, int slot) { return self.passes.num_read(slot); },
          py::arg("slot"), "Tokens of the slot's text whose K/V is in place.")
      .def_property_readonly(
          "draws", [](const BoundDraftPasses& self) { return self.passes.draws(); },
          "Drafts of this round are drawn from what the model said.")
      .def_property_readonly(
          "memory_bytes", [](const BoundDraftPasses& self) { return self.passes.memory_bytes(); });
}

}  // namespace specdec

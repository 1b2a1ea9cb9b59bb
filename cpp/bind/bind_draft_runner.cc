// DraftRunner: the bookkeeping of a draft model. Every call holds the GIL: it takes microseconds.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "base/check.h"
#include "bind/cache_view.h"
#include "bind/dlpack_convert.h"
#include "bind/moves_arrays.h"
#include "bind/registers.h"
#include "engine/draft_runner.h"

namespace py = pybind11;

namespace specdec {
namespace {

DraftMode parse_draft_mode(const std::string& name) {
  if (name == "best") return DraftMode::kBest;
  if (name == "coupled") return DraftMode::kCoupled;
  SPECDEC_REQUIRE(name == "own", "mode = '", name, "': give 'best', 'coupled' or 'own'");
  return DraftMode::kOwn;
}

// The runner together with the Python objects whose memory it points into.
struct BoundDraftRunner {
  BoundDraftRunner(py::object k, py::object v, const DraftRunnerConfig& config)
      : k_pages(std::move(k)),
        v_pages(std::move(v)),
        runner(config,
               cache_view(to_view(k_pages, "k_pages", true), to_view(v_pages, "v_pages", true),
                          config.defer_moves),
               cpu_backend()) {}

  py::object k_pages, v_pages;
  BorrowedTensor probs;
  DraftRunner runner;
  int num_logit_rows = 0;  // of the plan in flight
};

const float* scores_of(const BoundDraftRunner& self, const TensorView& view) {
  check_cpu(view, "result");
  SPECDEC_REQUIRE(view.ndim == 2 && view.dtype == DType::kF32 && view.strides[1] == 1,
                  "result: float32 scores [num_logit_rows, V] with contiguous rows are needed");
  SPECDEC_REQUIRE(view.shape[0] == self.num_logit_rows, "result has ", view.shape[0],
                  " rows, the plan asks for ", self.num_logit_rows);
  SPECDEC_REQUIRE(view.shape[1] >= self.runner.config().num_scores, "scores have ", view.shape[1],
                  " columns, num_scores is ", self.runner.config().num_scores);
  return static_cast<const float*>(view.data);
}

void take(BoundDraftRunner& self, const py::object& result) {
  const BorrowedTensor tensor(result, "result");
  const TensorView& view = tensor.view();
  if (view.ndim != 1) {
    const float* scores = scores_of(self, view);
    self.runner.take_scores(scores, view.strides[0]);
    return;
  }
  check_cpu(view, "result");
  check_contiguous(view, "result");
  check_dtype(view, "result", {DType::kI32});
  check_shape(view, "result", "[num_logit_rows]", {self.num_logit_rows});
  self.runner.take_ids(static_cast<const TokenId*>(view.data));
}

void take_level(BoundDraftRunner& self, const py::object& result, int top_k) {
  const BorrowedTensor tensor(result, "result");
  const float* scores = scores_of(self, tensor.view());
  self.runner.take_level(scores, tensor->strides[0], top_k);
}

void bind_probs(BoundDraftRunner& self, const py::object& probs) {
  BorrowedTensor tensor(probs, "probs", true);
  const DraftRunnerConfig& config = self.runner.config();
  check_cpu(tensor.view(), "probs");
  check_contiguous(tensor.view(), "probs");
  check_dtype(tensor.view(), "probs", {DType::kF32});
  check_shape(tensor.view(), "probs", "[max_requests, drafts, num_scores]",
              {config.max_requests, kAny, config.num_scores});
  self.runner.bind_probs(static_cast<float*>(tensor->data), static_cast<int>(tensor->shape[1]));
  self.probs = std::move(tensor);
}

using Nodes = std::tuple<std::vector<TokenId>, std::vector<std::int32_t>, std::vector<float>>;

// (tokens, parents, confidences) of the most valuable nodes.
Nodes best_tree(const BoundDraftRunner& self, int slot, int count) {
  const std::vector<DraftNode>& nodes = self.runner.nodes(slot);
  const std::vector<std::int32_t> chosen = self.runner.best_nodes(slot, count);
  std::vector<std::int32_t> place(nodes.size(), -1);
  Nodes result;
  auto& [tokens, parents, confidences] = result;
  for (const std::int32_t i : chosen) {
    place[i] = static_cast<std::int32_t>(tokens.size());
    tokens.push_back(nodes[i].token);
    parents.push_back(nodes[i].parent < 0 ? -1 : place[nodes[i].parent]);
    confidences.push_back(nodes[i].confidence);
  }
  return result;
}

constexpr const char* kPlanDoc =
    R"(The next pass for these slots, or None if there is nothing to read (see ``statuses``).

A slot with more than a few unread tokens gets rows out of ``prefill_rows``, which all such slots
share. needs_scores: the model shall give scores, not greedy ids.)";

constexpr const char* kStatusesDoc =
    R"(For each slot of the last plan: the token just drafted (take), how many nodes the next pass
expands (take_level), or NO_DRAFT, STILL_READING, NO_PAGES, TOO_LONG.)";

}  // namespace

void register_draft_runner(py::module_& m) {
  py::class_<BoundDraftRunner> runner(
      m, "DraftRunner",
      "The bookkeeping of a draft model: what it has read of which request, where its K/V lies, "
      "what it proposes. See cpp/engine/draft_runner.h.");
  runner.attr("NO_DRAFT") = static_cast<int>(kNoDraft);
  runner.attr("STILL_READING") = static_cast<int>(kStillReading);
  runner.attr("NO_PAGES") = static_cast<int>(kNoPages);
  runner.attr("TOO_LONG") = static_cast<int>(kTooLong);
  runner
      .def(py::init([](py::object k_pages, py::object v_pages, int vocab_size, int num_scores,
                       int max_requests, int max_rows, int max_len, std::vector<TokenId> input_ids,
                       std::vector<TokenId> output_ids, bool enable_block_reuse, bool defer_moves) {
             DraftRunnerConfig c;
             c.vocab_size = vocab_size;
             c.num_scores = num_scores;
             c.max_requests = max_requests;
             c.max_rows = max_rows;
             c.max_len = max_len;
             c.input_ids = std::move(input_ids);
             c.output_ids = std::move(output_ids);
             c.enable_block_reuse = enable_block_reuse;
             c.defer_moves = defer_moves;
             return std::make_unique<BoundDraftRunner>(std::move(k_pages), std::move(v_pages), c);
           }),
           py::arg("k_pages"), py::arg("v_pages"), py::kw_only(), py::arg("vocab_size"),
           py::arg("num_scores"), py::arg("max_requests"), py::arg("max_rows"), py::arg("max_len"),
           py::arg("input_ids") = std::vector<TokenId>{},
           py::arg("output_ids") = std::vector<TokenId>{}, py::arg("enable_block_reuse") = false,
           py::arg("defer_moves") = false)
      .def(
          "open",
          [](BoundDraftRunner& self, std::vector<TokenId> tokens, const std::string& mode,
             float temperature, int top_k, float top_p, float min_p, std::uint64_t seed,
             std::string salt) {
            return self.runner.open(std::move(tokens),
                                    SamplingLaw{temperature, top_k, top_p, min_p}, seed,
                                    parse_draft_mode(mode), std::move(salt));
          },
          py::arg("tokens"), py::kw_only(), py::arg("mode") = "best", py::arg("temperature") = 0.0f,
          py::arg("top_k") = 0, py::arg("top_p") = 1.0f, py::arg("min_p") = 0.0f,
          py::arg("seed") = 0, py::arg("cache_salt") = "",
          "A slot for a request whose last token is the golden one; -1: none is free.")
      .def(
          "close", [](BoundDraftRunner& self, int slot) { self.runner.close(slot); },
          py::arg("slot"))
      .def(
          "extend",
          [](BoundDraftRunner& self, int slot, const std::vector<TokenId>& tokens) {
            return self.runner.extend(slot, tokens);
          },
          py::arg("slot"), py::arg("tokens"),
          "Append decided tokens; returns (confidence, came true) of the drafts they speak of.")
      .def(
          "plan",
          [](BoundDraftRunner& self, const std::vector<int>& slots, int prefill_rows,
             bool needs_scores) {
            const StepPlan* plan = self.runner.plan(slots, prefill_rows, needs_scores);
            self.num_logit_rows = plan == nullptr ? 0 : plan->num_logit_rows;
            return plan;
          },
          py::return_value_policy::reference_internal, py::arg("slots"), py::arg("prefill_rows"),
          py::arg("needs_scores"), kPlanDoc)
      .def("take", &take, py::arg("result"),
           "One more draft of each chain, from greedy ids [L] or scores [L, V].")
      .def("take_level", &take_level, py::arg("result"), py::arg("top_k"),
           "One more level of each tree, from scores [L, V].")
      .def_property_readonly(
          "statuses", [](const BoundDraftRunner& self) { return self.runner.statuses(); },
          kStatusesDoc)
      .def_property_readonly(
          "confidences", [](const BoundDraftRunner& self) { return self.runner.confidences(); },
          "Of the tokens in ``statuses``, as the draft model sees it.")
      .def(
          "drafts",
          [](const BoundDraftRunner& self, int slot, int count) {
            std::vector<TokenId> tokens;
            for (const DraftNode& node : self.runner.nodes(slot)) {
              if (static_cast<int>(tokens.size()) == count) break;
              tokens.push_back(node.token);
            }
            return tokens;
          },
          py::arg("slot"), py::arg("count"), "The first ``count`` tokens of the slot's chain.")
      .def(
          "take_moves",
          [](BoundDraftRunner& self) { return moves_or_none(self.runner.take_moves()); },
          "With defer_moves, before plan(): arguments of ops.compact_kv, int32 arrays, or None. "
          "They "
          "have to be made before any later pass runs.")
      .def("best_tree", &best_tree, py::arg("slot"), py::arg("count"),
           "(tokens, parents, confidences) of the ``count`` nodes likeliest to come true.")
      .def("bind_probs", &bind_probs, py::arg("probs"),
           "float32 [max_requests, drafts, num_scores]: where mode 'own' leaves what it drew from.")
      .def(
          "cached", [](const BoundDraftRunner& self, int slot) { return self.runner.cached(slot); },
          py::arg("slot"), "Tokens of the request whose K/V is in place.")
      .def(
          "pages", [](const BoundDraftRunner& self, int slot) { return self.runner.pages(slot); },
          py::arg("slot"), "The slot's page ids in token order.")
      .def("check_integrity", [](const BoundDraftRunner& self) { self.runner.check_integrity(); })
      .def_property_readonly("free_pages",
                             [](const BoundDraftRunner& self) { return self.runner.free_pages(); })
      .def_property_readonly("total_pages",
                             [](const BoundDraftRunner& self) { return self.runner.total_pages(); })
      .def_property_readonly(
          "reused_pages",
          [](const BoundDraftRunner& self) { return self.runner.reuse_stats().attached_pages; },
          "Pages that requests took over from earlier ones instead of computing them.")
      .def_property_readonly(
          "memory_bytes", [](const BoundDraftRunner& self) { return self.runner.memory_bytes(); },
          "Bytes of step buffers and histories, pages not included.");
}

}  // namespace specdec

// Executor and StepOutput. Arguments are converted, the call is made without the GIL, that is all.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "backend/backend.h"
#include "base/check.h"
#include "bind/acceptance_arguments.h"
#include "bind/cache_view.h"
#include "bind/dlpack_convert.h"
#include "bind/executor_arguments.h"
#include "bind/moves_arrays.h"
#include "bind/registers.h"
#include "engine/executor.h"

namespace py = pybind11;

namespace specdec {
namespace {

// The executor together with the Python objects whose memory it points into.
struct BoundExecutor {
  BoundExecutor(py::object k, py::object v, const ExecutorConfig& config)
      : k_pages(std::move(k)),
        v_pages(std::move(v)),
        executor(config,
                 cache_view(to_view(k_pages, "k_pages", true), to_view(v_pages, "v_pages", true),
                            config.defer_moves),
                 cpu_backend()) {}

  RequestId submit(RequestParams params, const ProposedProbs& external_probs) {
    return executor.submit(std::move(params), external_probs);
  }

  py::object k_pages, v_pages;
  Executor executor;
};

py::list logprobs_list(const std::vector<TokenLogprobs>& entries) {
  py::list list;
  for (const TokenLogprobs& entry : entries) {
    list.append(py::make_tuple(entry.logprob, entry.rank, py::cast(entry.top)));
  }
  return list;
}

std::vector<StepOutput> commit(BoundExecutor& self, const StepPlan& plan, const py::object& result,
                               const py::object& raw, std::map<RequestId, std::string> errors) {
  const TensorView view = to_view(result, "result");
  SPECDEC_REQUIRE(view.device == DeviceType::kCpu,
                  "result is on a CUDA device: copy it to the CPU");
  const TokenId* ids = nullptr;
  const float* scores = nullptr;
  std::int64_t row_stride = 0;
  if (view.ndim == 1) {
    SPECDEC_REQUIRE(view.dtype == DType::kI32 && view.is_contiguous(),
                    "greedy ids must be a contiguous int32 tensor [num_logit_rows], got ",
                    dtype_name(view.dtype));
    ids = static_cast<const TokenId*>(view.data);
  } else {
    SPECDEC_REQUIRE(view.ndim == 2 && view.dtype == DType::kF32 && view.strides[1] == 1,
                    "scores must be a float32 tensor [num_logit_rows, vocab_size] with contiguous "
                    "rows, got ",
                    view.ndim, " axes of ", dtype_name(view.dtype));
    SPECDEC_REQUIRE(view.shape[1] == self.executor.config().vocab_size, "scores have ",
                    view.shape[1], " columns, vocab_size is ", self.executor.config().vocab_size);
    scores = static_cast<const float*>(view.data);
    row_stride = view.strides[0];
  }
  SPECDEC_REQUIRE(view.shape[0] == plan.num_logit_rows, "result has ", view.shape[0],
                  " rows, the plan asks for ", plan.num_logit_rows);
  ScoreChanges changes;
  changes.errors = std::move(errors);
  if (!raw.is_none()) {
    const TensorView model = to_view(raw, "raw");
    SPECDEC_REQUIRE(scores != nullptr && model.device == DeviceType::kCpu &&
                        model.dtype == DType::kF32 && model.ndim == 2 && model.strides[1] == 1 &&
                        model.shape[0] == view.shape[0] && model.shape[1] == view.shape[1],
                    "raw: expected the model's float32 scores in the shape of result");
    changes.raw = static_cast<const float*>(model.data);
    changes.raw_stride = model.strides[0];
  }
  py::gil_scoped_release release;
  return self.executor.commit(plan, ids, scores, row_stride, changes);
}

}  // namespace

void register_executor(py::module_& m) {
  py::class_<StepOutput>(m, "StepOutput", "What one step delivered to one request.")
      .def_readonly("request_id", &StepOutput::request_id)
      .def_readonly("is_prefill", &StepOutput::is_prefill)
      .def_readonly("tokens", &StepOutput::tokens)
      .def_readonly("num_rows", &StepOutput::num_rows)
      .def_readonly("num_cached_tokens", &StepOutput::num_cached_tokens)
      .def_readonly("num_drafts", &StepOutput::num_drafts)
      .def_readonly("num_accepted", &StepOutput::num_accepted)
      .def_readonly("max_path", &StepOutput::max_path)
      .def_readonly("last_logit_row", &StepOutput::last_logit_row)
      .def_readonly("logit_rows", &StepOutput::logit_rows)
      .def_property_readonly("finish_reason",
                             [](const StepOutput& out) -> std::optional<std::string> {
                               if (out.finish_reason == FinishReason::kNone) return std::nullopt;
                               return finish_reason_name(out.finish_reason);
                             })
      .def_readonly("stop_reason", &StepOutput::stop_token)
      .def_property_readonly("error",
                             [](const StepOutput& out) -> std::optional<std::string> {
                               if (out.error.empty()) return std::nullopt;
                               return out.error;
                             })
      .def_property_readonly("logprobs",
                             [](const StepOutput& out) { return logprobs_list(out.logprobs); })
      .def_property_readonly("prompt_logprobs", [](const StepOutput& out) {
        return logprobs_list(out.prompt_logprobs);
      });

  py::class_<BoundExecutor> executor(
      m, "Executor",
      "The step machine: plan() -> the caller's forward pass -> commit(). "
      "See cpp/engine/executor.h.");
  def_submit(executor);
  executor
      .def(py::init([](py::object k_pages, py::object v_pages, int vocab_size, int max_batch_size,
                       int max_seq_len, int max_num_tokens, const std::string& method,
                       const LookaheadTriple& lookahead, const py::dict& ngram,
                       int external_max_draft_len, bool adaptive, bool enable_chunked_prefill,
                       bool enable_block_reuse, bool check_integrity, bool defer_moves,
                       DraftLenSchedule draft_len_schedule,
                       std::vector<double> synthetic_acceptance_rates) {
             ExecutorConfig c;
             c.vocab_size = vocab_size;
             c.max_batch_size = max_batch_size;
             c.max_seq_len = max_seq_len;
             c.max_num_tokens = max_num_tokens;
             c.method = parse_method(method);
             c.lookahead = to_lookahead(lookahead);
             c.ngram = parse_ngram(ngram);
             c.external_max_draft_len = external_max_draft_len;
             c.adaptive = adaptive;
             c.enable_chunked_prefill = enable_chunked_prefill;
             c.enable_block_reuse = enable_block_reuse;
             c.check_integrity = check_integrity;
             c.defer_moves = defer_moves;
             c.draft_len_schedule = std::move(draft_len_schedule);
             c.synthetic_acceptance_rates = std::move(synthetic_acceptance_rates);
             return std::make_unique<BoundExecutor>(std::move(k_pages), std::move(v_pages), c);
           }),
           py::arg("k_pages"), py::arg("v_pages"), py::kw_only(), py::arg("vocab_size"),
           py::arg("max_batch_size") = 32, py::arg("max_seq_len"), py::arg("max_num_tokens"),
           py::arg("method") = "none", py::arg("lookahead") = LookaheadTriple{1, 1, 0},
           py::arg("ngram") = py::dict(), py::arg("external_max_draft_len") = kMaxDraftLen,
           py::arg("adaptive") = true, py::arg("enable_chunked_prefill") = true,
           py::arg("enable_block_reuse") = false, py::arg("check_integrity") = false,
           py::arg("defer_moves") = false, py::arg("draft_len_schedule") = DraftLenSchedule{},
           py::arg("synthetic_acceptance_rates") = std::vector<double>{})
      .def(
          "set_step_cost",
          [](BoundExecutor& self, std::vector<int> rows, std::vector<double> seconds,
             double context_len, std::vector<double> growth) {
            self.executor.set_step_cost(std::move(rows), std::move(seconds), context_len,
                                        std::move(growth));
          },
          py::arg("rows"), py::arg("seconds"), py::arg("context_len") = 0.0,
          py::arg("growth") = std::vector<double>{},
          "T(rows) of the model on this machine; adaptive draft lengths need it. seconds: with\n"
          "context_len tokens in the cache; growth: seconds that each token more adds, by rows.")
      .def(
          "plan", [](BoundExecutor& self) { return self.executor.plan(); },
          py::return_value_policy::reference_internal, py::call_guard<py::gil_scoped_release>(),
          "The next step, or None when there is nothing to run.")
      .def("commit", &commit, py::arg("plan"), py::arg("result"), py::kw_only(),
           py::arg("raw") = py::none(), py::arg("errors") = std::map<RequestId, std::string>{},
           "result: int32 greedy ids [L], or float32 scores [L, V] if plan.needs_logits. Where the "
           "caller changed scores: raw, the model's own [L, V], for logprobs; errors, by request "
           "id: those requests end with that message.")
      .def(
          "take_moves",
          [](BoundExecutor& self) { return moves_or_none(self.executor.take_moves()); },
          "With defer_moves, after each commit(): arguments of ops.compact_kv, int32 arrays, or "
          "None "
          "if nothing moves. They have to be made before any later step runs.")
      .def(
          "fail",
          [](BoundExecutor& self, const StepPlan& plan, const std::string& message) {
            return self.executor.fail(plan, message);
          },
          py::arg("plan"), py::arg("message"), py::call_guard<py::gil_scoped_release>(),
          "The forward pass failed: the plan's requests end with an error, others go on.")
      .def(
          "cancel", [](BoundExecutor& self, RequestId id) { return self.executor.cancel(id); },
          py::arg("request_id"), py::call_guard<py::gil_scoped_release>())
      .def(
          "reset_prefix_cache",
          [](BoundExecutor& self) { return self.executor.reset_prefix_cache(); },
          py::call_guard<py::gil_scoped_release>(),
          "Forgets the published pages that no running request holds; returns how many.")
      .def(
          "propose",
          [](BoundExecutor& self, RequestId id, const std::vector<TokenId>& tokens,
             std::optional<std::vector<std::int32_t>> parents, const py::object& probs,
             const py::object& vocab_ids, bool replacement) {
            if (!parents) {
              parents.emplace(tokens.size());
              for (std::size_t i = 0; i < tokens.size(); ++i) {
                (*parents)[i] = static_cast<std::int32_t>(i) - 1;
              }
            }
            const BorrowedProbs borrowed(probs, vocab_ids, replacement);
            py::gil_scoped_release release;
            self.executor.propose(id, tokens, *parents, borrowed.proposed());
          },
          py::arg("request_id"), py::arg("tokens"), py::arg("parents") = py::none(),
          py::arg("probs") = py::none(), py::kw_only(), py::arg("vocab_ids") = py::none(),
          py::arg("replacement") = false,
          R"(Drafts for the request's next decode step, used once.

parents[i] is an index among the drafts, -1 for the golden token; None: a chain. probs: float32
[n, V], row i is the distribution that draft i was drawn from, copied; None: the drafts were chosen
without chance. vocab_ids: int [V'], the tokens of probs' columns [n, V'], every other token has
probability 0. Siblings were drawn in their order, one after another, without replacement (each from
its row less the earlier siblings, renormalised) unless `replacement`.)")
      .def(
          "history", [](BoundExecutor& self, RequestId id) { return self.executor.history(id); },
          py::arg("request_id"))
      .def(
          "decoding", [](BoundExecutor& self, RequestId id) { return self.executor.decoding(id); },
          py::arg("request_id"))
      .def(
          "draft_len_limit", [](BoundExecutor& self) { return self.executor.draft_len_limit(); },
          "Drafts of one request that draft_len_schedule allows for the requests that run now.")
      .def("stats", [](BoundExecutor& self) { return stats_dict(self.executor.stats()); })
      .def_property_readonly("num_unfinished",
                             [](BoundExecutor& self) { return self.executor.num_unfinished(); });
}

}  // namespace specdec

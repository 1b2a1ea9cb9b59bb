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
#include "bind/moves_arrays.h"
#include "bind/registers.h"
#include "engine/executor.h"

namespace py = pybind11;

namespace specdec {
namespace {

DraftMethod parse_method(const std::string& name) {
  if (name == "none") return DraftMethod::kNone;
  if (name == "lookahead") return DraftMethod::kLookahead;
  if (name == "ngram") return DraftMethod::kNgram;
  if (name == "external") return DraftMethod::kExternal;
  SPECDEC_REQUIRE(false, "method = '", name,
                  "': give 'none', 'lookahead', 'ngram' or 'external' (drafts from propose())");
  return DraftMethod::kNone;
}

NgramParams parse_ngram(const py::dict& dict) {
  NgramParams p;
  for (const auto& [key, value] : dict) {
    const std::string name = py::cast<std::string>(key);
    if (name == "max_draft_len") {
      p.max_draft_len = py::cast<int>(value);
    } else if (name == "max_matching_ngram_size") {
      p.max_matching_ngram_size = py::cast<int>(value);
    } else if (name == "is_keep_all") {
      p.is_keep_all = py::cast<bool>(value);
    } else if (name == "is_use_oldest") {
      p.is_use_oldest = py::cast<bool>(value);
    } else if (name == "is_public_pool") {
      p.is_public_pool = py::cast<bool>(value);
    } else {
      SPECDEC_REQUIRE(false, "ngram['", name,
                      "']: unknown; the fields are max_draft_len, "
                      "max_matching_ngram_size, is_keep_all, is_use_oldest, is_public_pool");
    }
  }
  return p;
}

using Triple = std::tuple<int, int, int>;

LookaheadConfig to_lookahead(const Triple& t) {
  return LookaheadConfig{std::get<0>(t), std::get<1>(t), std::get<2>(t)};
}

py::dict stats_dict(const ExecutorStats& s) {
  py::dict d;
  d["steps"] = s.steps;
  d["rows"] = s.rows;
  d["prefill_rows"] = s.prefill_rows;
  d["num_drafts"] = s.num_drafts;
  d["num_draft_tokens"] = s.num_draft_tokens;
  d["num_accepted_tokens"] = s.num_accepted_tokens;
  d["generated_tokens"] = s.generated_tokens;
  d["finished"] = s.finished;
  d["cancelled"] = s.cancelled;
  d["failed"] = s.failed;
  d["shortened_steps"] = s.shortened_steps;
  d["unspeculated_steps"] = s.unspeculated_steps;
  d["draft_len_limit"] = s.draft_len_limit;
  d["running"] = s.running;
  d["waiting"] = s.waiting;
  d["free_pages"] = s.free_pages;
  d["total_pages"] = s.total_pages;
  d["promised_pages"] = s.promised_pages;
  d["pool_bytes"] = s.pool_bytes;
  d["history_bytes"] = s.history_bytes;
  d["draft_prob_bytes"] = s.draft_prob_bytes;
  d["plan_bytes"] = s.plan_bytes;
  d["reuse_queries"] = s.reuse_queries;
  d["reuse_hits"] = s.reuse_hits;
  d["cached_tokens"] = s.cached_tokens;
  d["cached_pages"] = s.cached_pages;
  d["attached_pages"] = s.reuse.attached_pages;
  d["published_pages"] = s.reuse.published_pages;
  d["deduplicated_pages"] = s.reuse.deduplicated_pages;
  d["evicted_pages"] = s.reuse.evicted_pages;
  d["index_bytes"] = s.index_bytes;
  return d;
}

// The executor together with the Python objects whose memory it points into.
struct BoundExecutor {
  BoundExecutor(py::object k, py::object v, const ExecutorConfig& config)
      : k_pages(std::move(k)),
        v_pages(std::move(v)),
        executor(config,
                 cache_view(to_view(k_pages, "k_pages", true), to_view(v_pages, "v_pages", true),
                            config.defer_moves),
                 cpu_backend()) {}

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

  py::class_<BoundExecutor>(m, "Executor",
                            "The step machine: plan() -> the caller's forward pass -> commit(). "
                            "See cpp/engine/executor.h.")
      .def(py::init([](py::object k_pages, py::object v_pages, int vocab_size, int max_batch_size,
                       int max_seq_len, int max_num_tokens, const std::string& method,
                       const Triple& lookahead, const py::dict& ngram, int external_max_draft_len,
                       bool adaptive, bool enable_chunked_prefill, bool enable_block_reuse,
                       bool check_integrity, bool defer_moves, DraftLenSchedule draft_len_schedule,
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
           py::arg("method") = "none", py::arg("lookahead") = Triple{1, 1, 0},
           py::arg("ngram") = py::dict(), py::arg("external_max_draft_len") = kMaxDraftLen,
           py::arg("adaptive") = true, py::arg("enable_chunked_prefill") = true,
           py::arg("enable_block_reuse") = false, py::arg("check_integrity") = false,
           py::arg("defer_moves") = false, py::arg("draft_len_schedule") = DraftLenSchedule{},
           py::arg("synthetic_acceptance_rates") = std::vector<double>{})
      .def(
          "set_step_cost",
          [](BoundExecutor& self, std::vector<int> rows, std::vector<double> seconds) {
            self.executor.set_step_cost(std::move(rows), std::move(seconds));
          },
          py::arg("rows"), py::arg("seconds"),
          "T(rows) of the model on this machine; adaptive draft lengths need it.")
      .def(
          "submit",
          [](BoundExecutor& self, std::vector<TokenId> prompt_ids, int max_tokens, int min_tokens,
             std::vector<TokenId> eos_token_ids, std::vector<TokenId> stop_token_ids,
             bool ignore_eos, bool speculative, const std::optional<Triple>& lookahead,
             std::optional<int> max_draft_len, std::optional<bool> adaptive, std::uint64_t seed,
             float temperature, int top_k, float top_p, float min_p, const std::string& acceptance,
             float posterior_threshold, float posterior_alpha, float acceptance_threshold,
             float repetition_penalty, float presence_penalty, float frequency_penalty,
             const std::map<TokenId, float>& logit_bias,
             std::vector<std::vector<TokenId>> bad_words,
             std::optional<std::vector<TokenId>> allowed_token_ids, std::optional<int> logprobs,
             std::optional<int> prompt_logprobs, bool needs_scores, std::string cache_salt,
             bool return_logits, std::vector<TokenId> external_drafts, bool end_after_drafts,
             const py::object& external_probs, bool compute_whole_prompt) {
            RequestParams p;
            p.prompt = std::move(prompt_ids);
            p.max_tokens = max_tokens;
            p.min_tokens = min_tokens;
            p.eos_token_ids = std::move(eos_token_ids);
            p.stop_token_ids = std::move(stop_token_ids);
            p.ignore_eos = ignore_eos;
            p.speculative = speculative;
            if (lookahead) p.lookahead = to_lookahead(*lookahead);
            p.max_draft_len = max_draft_len;
            p.adaptive = adaptive;
            p.seed = seed;
            p.sampling = SamplingLaw{temperature, top_k, top_p, min_p};
            p.acceptance = to_acceptance(acceptance, posterior_threshold, posterior_alpha,
                                         acceptance_threshold);
            p.processors.repetition_penalty = repetition_penalty;
            p.processors.presence_penalty = presence_penalty;
            p.processors.frequency_penalty = frequency_penalty;
            p.processors.logit_bias.assign(logit_bias.begin(), logit_bias.end());
            p.processors.bad_words = std::move(bad_words);
            SPECDEC_REQUIRE(!allowed_token_ids || !allowed_token_ids->empty(),
                            "allowed_token_ids is empty: name at least one token, or leave it out");
            if (allowed_token_ids) p.processors.allowed_token_ids = std::move(*allowed_token_ids);
            p.logprobs = logprobs;
            p.prompt_logprobs = prompt_logprobs;
            p.needs_scores = needs_scores;
            p.cache_salt = std::move(cache_salt);
            p.return_logits = return_logits;
            p.external_drafts = std::move(external_drafts);
            p.end_after_drafts = end_after_drafts;
            p.compute_whole_prompt = compute_whole_prompt;
            const BorrowedProbs borrowed(external_probs, py::none(), false);
            py::gil_scoped_release release;
            return self.executor.submit(std::move(p), borrowed.proposed());
          },
          py::arg("prompt_ids"), py::kw_only(), py::arg("max_tokens"), py::arg("min_tokens") = 0,
          py::arg("eos_token_ids") = std::vector<TokenId>{},
          py::arg("stop_token_ids") = std::vector<TokenId>{}, py::arg("ignore_eos") = false,
          py::arg("speculative") = true, py::arg("lookahead") = py::none(),
          py::arg("max_draft_len") = py::none(), py::arg("adaptive") = py::none(),
          py::arg("seed") = 0, py::arg("temperature") = 0.0f, py::arg("top_k") = 0,
          py::arg("top_p") = 1.0f, py::arg("min_p") = 0.0f, py::arg("acceptance") = "exact_match",
          py::arg("posterior_threshold") = 0.09f, py::arg("posterior_alpha") = 0.3f,
          py::arg("acceptance_threshold") = 1.0f, py::arg("repetition_penalty") = 1.0f,
          py::arg("presence_penalty") = 0.0f, py::arg("frequency_penalty") = 0.0f,
          py::arg("logit_bias") = std::map<TokenId, float>{},
          py::arg("bad_words") = std::vector<std::vector<TokenId>>{},
          py::arg("allowed_token_ids") = py::none(), py::arg("logprobs") = py::none(),
          py::arg("prompt_logprobs") = py::none(), py::arg("needs_scores") = false,
          py::arg("cache_salt") = "", py::arg("return_logits") = false,
          py::arg("external_drafts") = std::vector<TokenId>{}, py::arg("end_after_drafts") = false,
          py::arg("external_probs") = py::none(), py::arg("compute_whole_prompt") = false)
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

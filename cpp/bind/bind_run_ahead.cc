// RunAheadExecutor and the layouts of what it stages.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "bind/dlpack_convert.h"
#include "bind/executor_arguments.h"
#include "bind/registers.h"
#include "engine/run_ahead.h"

namespace py = pybind11;

namespace specdec {
namespace {

// The executor together with the rings that it points into.
struct BoundRunAhead {
  explicit BoundRunAhead(const RunAheadConfig& config) : executor(config) {}

  RequestId submit(RequestParams params, const ProposedProbs& external_probs) {
    SPECDEC_REQUIRE(external_probs.data == nullptr,
                    "external_probs: run_ahead takes no drafts from outside");
    return executor.submit(std::move(params));
  }

  void bind_rings(py::handle staging_ring, py::handle entry_ring, py::handle result_ring,
                  py::handle score_ring) {
    BorrowedTensor to(staging_ring, "staging", true), slots(entry_ring, "entries", true),
        from(result_ring, "results", true);
    const auto check = [&](const BorrowedTensor& tensor, const char* name, DType dtype,
                           std::int64_t columns) {
      check_cpu(tensor.view(), name);
      check_contiguous(tensor.view(), name);
      check_dtype(tensor.view(), name, {dtype});
      check_shape(tensor.view(), name, "[ring_size, words]", {executor.ring_size(), columns});
    };
    check(to, "staging", DType::kI32, executor.staging_layout().words);
    check(slots, "entries", DType::kU8, executor.entry_bytes());
    check(from, "results", DType::kI32, executor.result_words());
    BorrowedTensor rows(score_ring, "scores", true);
    check_cpu(rows.view(), "scores");
    check_contiguous(rows.view(), "scores");
    check_dtype(rows.view(), "scores", {DType::kF32});
    check_shape(rows.view(), "scores", "[ring_size, max_host_rows, vocab_size]",
                {executor.ring_size(), executor.max_host_rows(), executor.config().vocab_size});
    executor.bind_rings({static_cast<std::int32_t*>(to->data), static_cast<std::byte*>(slots->data),
                         static_cast<const std::int32_t*>(from->data),
                         static_cast<const float*>(rows->data)});
    scores = std::move(rows);
    staging = std::move(to);
    entries = std::move(slots);
    results = std::move(from);
  }

  RunAheadExecutor executor;
  BorrowedTensor staging, entries, results, scores;
};

std::vector<StepOutput> deliver(BoundRunAhead& self, const py::object& scores,
                                std::map<RequestId, std::string> errors) {
  HostScores changed;
  changed.errors = std::move(errors);
  std::optional<BorrowedTensor> rows;
  if (!scores.is_none()) {
    rows.emplace(scores, "scores");
    check_cpu(rows->view(), "scores");
    check_contiguous(rows->view(), "scores");
    check_dtype(rows->view(), "scores", {DType::kF32});
    const auto count = static_cast<std::int64_t>(self.executor.host_requests().size());
    check_shape(rows->view(), "scores", "[host choices, vocab_size]",
                {count, self.executor.config().vocab_size});
    changed.rows = static_cast<const float*>((*rows)->data);
    changed.row_stride = self.executor.config().vocab_size;
  }
  py::gil_scoped_release release;
  return self.executor.deliver(changed);
}

py::dict run_ahead_stats(const RunAheadStats& stats) {
  py::dict d = stats_dict(stats.executor);
  d["in_flight"] = stats.in_flight;
  d["retiring"] = stats.retiring;
  d["late_results"] = stats.late_results;
  d["empty_steps"] = stats.empty_steps;
  return d;
}

}  // namespace

void register_run_ahead(py::module_& m) {
  py::class_<StagingLayout>(m, "StagingLayout",
                            "Offsets, in int32 words, of the parts of one place of the staging "
                            "ring (cpp/engine/run_ahead.h).")
      .def_readonly("requests", &StagingLayout::requests)
      .def_readonly("rows", &StagingLayout::rows)
      .def_readonly("pages_per_request", &StagingLayout::pages_per_request)
      .def_readonly("slot_ids", &StagingLayout::slot_ids)
      .def_readonly("max_drafts", &StagingLayout::max_drafts)
      .def_readonly("window_rows", &StagingLayout::window_rows)
      .def_readonly("guesses", &StagingLayout::guesses)
      .def_readonly("kv_len", &StagingLayout::kv_len)
      .def_readonly("cu_rows", &StagingLayout::cu_rows)
      .def_readonly("cu_logits", &StagingLayout::cu_logits)
      .def_readonly("temperature", &StagingLayout::temperature)
      .def_readonly("top_p", &StagingLayout::top_p)
      .def_readonly("min_p", &StagingLayout::min_p)
      .def_readonly("top_k", &StagingLayout::top_k)
      .def_readonly("seed", &StagingLayout::seed)
      .def_readonly("acceptance", &StagingLayout::acceptance)
      .def_readonly("posterior_threshold", &StagingLayout::posterior_threshold)
      .def_readonly("posterior_alpha", &StagingLayout::posterior_alpha)
      .def_readonly("acceptance_threshold", &StagingLayout::acceptance_threshold)
      .def_readonly("page_table", &StagingLayout::page_table)
      .def_readonly("logit_rows", &StagingLayout::logit_rows)
      .def_readonly("prompt_tokens", &StagingLayout::prompt_tokens)
      .def_readonly("prompt_parents", &StagingLayout::prompt_parents)
      .def_readonly("words", &StagingLayout::words);
  py::class_<SlotEntry>(m, "SlotEntry", "The start of a slot, within the ring of entries.")
      .def_readonly("slot", &SlotEntry::slot)
      .def_readonly("request_id", &SlotEntry::request)
      .def_readonly("offset", &SlotEntry::offset)
      .def_readonly("bytes", &SlotEntry::bytes);
  py::class_<RunAheadStep>(m, "RunAheadStep", "What the host knows of a step that it enqueues.")
      .def_readonly("index", &RunAheadStep::index)
      .def_readonly("ring", &RunAheadStep::ring, "Its place in the rings.")
      .def_readonly("num_prompts", &RunAheadStep::num_prompts)
      .def_readonly("num_decodes", &RunAheadStep::num_decodes)
      .def_readonly("num_prompt_rows", &RunAheadStep::num_prompt_rows)
      .def_readonly("num_prompt_logits", &RunAheadStep::num_prompt_logits)
      .def_readonly("max_decode_rows", &RunAheadStep::max_decode_rows,
                    "Rows of all decoding requests, an upper bound.")
      .def_readonly("max_rows", &RunAheadStep::max_rows, "Of any one request, an upper bound.")
      .def_readonly("max_kv_len", &RunAheadStep::max_kv_len,
                    "Tokens and rows of any one request, an upper bound.")
      .def_readonly("needs_scores", &RunAheadStep::needs_scores,
                    "Somebody samples: the model's best tokens are not enough.")
      .def_readonly("host_choices", &RunAheadStep::host_choices,
                    "Of the step's choices, those that the host makes.")
      .def_readonly("entries", &RunAheadStep::entries);

  py::class_<BoundRunAhead> executor(
      m, "RunAheadExecutor",
      "Plans steps before earlier ones were read; state lives in slots. See "
      "cpp/engine/run_ahead.h.");
  def_submit(executor);
  executor
      .def(py::init([](int vocab_size, int max_batch_size, int max_seq_len, int max_num_tokens,
                       int num_pages, int page_size, int depth, const std::string& method,
                       const LookaheadTriple& lookahead, const py::dict& ngram,
                       int external_max_draft_len, int external_max_path, bool adaptive,
                       bool pads_rows, bool enable_chunked_prefill, bool enable_block_reuse,
                       bool check_integrity, DraftLenSchedule draft_len_schedule) {
             RunAheadConfig c;
             c.draft_len_schedule = std::move(draft_len_schedule);
             c.vocab_size = vocab_size;
             c.max_batch_size = max_batch_size;
             c.max_seq_len = max_seq_len;
             c.max_num_tokens = max_num_tokens;
             c.num_pages = num_pages;
             c.page_size = page_size;
             c.depth = depth;
             c.method = parse_method(method);
             c.lookahead = to_lookahead(lookahead);
             c.ngram = parse_ngram(ngram);
             c.external_max_draft_len = external_max_draft_len;
             c.external_max_path = external_max_path;
             c.adaptive = adaptive;
             c.pads_rows = pads_rows;
             c.enable_chunked_prefill = enable_chunked_prefill;
             c.enable_block_reuse = enable_block_reuse;
             c.check_integrity = check_integrity;
             return std::make_unique<BoundRunAhead>(c);
           }),
           py::kw_only(), py::arg("vocab_size"), py::arg("max_batch_size") = 32,
           py::arg("max_seq_len"), py::arg("max_num_tokens"), py::arg("num_pages"),
           py::arg("page_size"), py::arg("depth") = 1, py::arg("method") = "none",
           py::arg("lookahead") = LookaheadTriple{1, 1, 0}, py::arg("ngram") = py::dict(),
           py::arg("external_max_draft_len") = kMaxDraftLen,
           py::arg("external_max_path") = kMaxDraftLen, py::arg("adaptive") = true,
           py::arg("pads_rows") = false, py::arg("enable_chunked_prefill") = true,
           py::arg("enable_block_reuse") = false, py::arg("check_integrity") = false,
           py::arg("draft_len_schedule") = DraftLenSchedule{})
      .def_property_readonly("depth",
                             [](const BoundRunAhead& self) { return self.executor.config().depth; })
      .def_property_readonly("ring_size",
                             [](const BoundRunAhead& self) { return self.executor.ring_size(); })
      .def_property_readonly(
          "max_rows_per_request",
          [](const BoundRunAhead& self) { return self.executor.max_rows_per_request(); },
          "Rows of a decoding request in one step, at most.")
      .def_property_readonly("entry_bytes",
                             [](const BoundRunAhead& self) { return self.executor.entry_bytes(); })
      .def_property_readonly("result_words",
                             [](const BoundRunAhead& self) { return self.executor.result_words(); })
      .def_property_readonly("slot_layout",
                             [](const BoundRunAhead& self) { return self.executor.slot_layout(); })
      .def_property_readonly(
          "staging_layout",
          [](const BoundRunAhead& self) { return self.executor.staging_layout(); })
      .def("bind_rings", &BoundRunAhead::bind_rings, py::kw_only(), py::arg("staging"),
           py::arg("entries"), py::arg("results"), py::arg("scores"),
           "Host memory that the executor writes and reads: staging [ring_size, words] int32, "
           "entries [ring_size, entry_bytes] uint8, results [ring_size, result_words] int32, "
           "scores [ring_size, max_host_rows, vocab_size] float32.")
      .def(
          "set_step_cost",
          [](BoundRunAhead& self, std::vector<int> rows, std::vector<double> seconds,
             double context_len, std::vector<double> growth) {
            self.executor.set_step_cost(std::move(rows), std::move(seconds), context_len,
                                        std::move(growth));
          },
          py::arg("rows"), py::arg("seconds"), py::arg("context_len") = 0.0,
          py::arg("growth") = std::vector<double>{}, "As Executor.set_step_cost.")
      .def(
          "set_draft_cost",
          [](BoundRunAhead& self, double fixed, double each) {
            self.executor.set_draft_cost({fixed, each});
          },
          py::arg("fixed"), py::arg("each") = 0.0,
          "Seconds that drafting costs a step beside the rows of the drafts: if it drafts at all, "
          "and for each draft.")
      .def(
          "plan",
          [](BoundRunAhead& self) -> std::optional<RunAheadStep> {
            const RunAheadStep* step = nullptr;
            {
              py::gil_scoped_release release;
              step = self.executor.plan();
            }
            if (step == nullptr) return std::nullopt;
            return *step;
          },
          "The next step, or None when there is nothing to enqueue now.")
      .def(
          "deliver", &deliver, py::arg("scores") = py::none(),
          py::arg("errors") = std::map<RequestId, std::string>{},
          "What the oldest step in flight brought; its event must have completed. Where the caller "
          "changed the scores of the host's choices: scores [len(host_requests()), vocab_size] "
          "float32; errors, by request id: those requests end with that message.")
      .def(
          "host_requests", [](const BoundRunAhead& self) { return self.executor.host_requests(); },
          "Of the oldest step in flight: the ids of the requests whose tokens the host chooses, in "
          "the order of their rows of scores; 0 for one that has ended.")
      .def_property_readonly(
          "oldest_ring", [](const BoundRunAhead& self) { return self.executor.oldest_ring(); },
          "The place of the oldest step in flight in the rings.")
      .def_property_readonly(
          "max_host_rows", [](const BoundRunAhead& self) { return self.executor.max_host_rows(); },
          "Rows of one step that the host may choose from.")
      .def_property_readonly(
          "vocab_size", [](const BoundRunAhead& self) { return self.executor.config().vocab_size; })
      .def(
          "fail",
          [](BoundRunAhead& self, std::int64_t index, const std::string& message) {
            return self.executor.fail(index, message);
          },
          py::arg("index"), py::arg("message"), py::call_guard<py::gil_scoped_release>(),
          "The step could not be enqueued: its requests end with an error. It is still delivered.")
      .def(
          "cancel", [](BoundRunAhead& self, RequestId id) { return self.executor.cancel(id); },
          py::arg("request_id"), py::call_guard<py::gil_scoped_release>())
      .def(
          "pages", [](BoundRunAhead& self, RequestId id) { return self.executor.pages(id); },
          py::arg("request_id"), "Pages that the request holds, in order.")
      .def(
          "reset_prefix_cache",
          [](BoundRunAhead& self) { return self.executor.reset_prefix_cache(); },
          py::call_guard<py::gil_scoped_release>(),
          "Forgets the published pages that no request holds; returns how many.")
      .def("stats", [](BoundRunAhead& self) { return run_ahead_stats(self.executor.stats()); })
      .def_property_readonly("in_flight",
                             [](const BoundRunAhead& self) { return self.executor.in_flight(); })
      .def_property_readonly("num_unfinished", [](const BoundRunAhead& self) {
        return self.executor.num_unfinished();
      });
}

}  // namespace specdec

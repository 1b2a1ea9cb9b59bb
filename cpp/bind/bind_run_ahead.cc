// RunAheadExecutor, and a step plan from the arrays that a step on slots leaves behind.
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
#include "engine/step_plan.h"

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

// Arrays of one step as its operations left them; see fill_step_plan's text.
struct StepArrays {
  const std::int32_t *tokens, *positions, *parents, *cu_rows, *kv_len, *page_table, *logit_rows,
      *cu_logits;
  const std::uint32_t* mask;
  const std::uint8_t* is_tree;
  std::int64_t requests, rows, pages, choices;
};

void fill_step_plan(StepPlan& plan, const StepArrays& a, int page_size, int num_pages,
                    bool needs_logits) {
  SPECDEC_REQUIRE(a.requests < static_cast<std::int64_t>(plan.cu_rows.size()) &&
                      a.rows <= static_cast<std::int64_t>(plan.tokens.size()) &&
                      a.pages <= plan.page_table_stride,
                  "fill_step_plan: ", a.requests, " requests, ", a.rows, " rows and ", a.pages,
                  " pages do not fit into the plan's ", plan.kv_len.size(), ", ",
                  plan.tokens.size(), " and ", plan.page_table_stride);
  SPECDEC_REQUIRE(a.cu_rows[0] == 0 && a.cu_logits[0] == 0,
                  "fill_step_plan: cu_rows and cu_logits begin with 0");
  int kept = 0;
  plan.cu_rows[0] = plan.cu_logits[0] = 0;
  for (std::int64_t b = 0; b < a.requests; ++b) {
    const std::int32_t first = a.cu_rows[b], end = a.cu_rows[b + 1];
    const std::int32_t choices = a.cu_logits[b + 1] - a.cu_logits[b];
    SPECDEC_REQUIRE(end >= first && end <= a.rows && choices >= 0 && choices <= end - first &&
                        a.cu_logits[b + 1] <= a.choices,
                    "fill_step_plan: request ", b, " has rows ", first, "..", end, " of ", a.rows,
                    " and ", choices, " choices");
    if (end == first) continue;  // frozen, or padding: the model never sees it
    const std::int64_t tokens = std::int64_t{a.kv_len[b]} + (end - first);
    const std::int64_t used = (tokens + page_size - 1) / page_size;
    SPECDEC_REQUIRE(a.kv_len[b] >= 0 && used <= a.pages, "fill_step_plan: request ", b, " has ",
                    tokens, " tokens, its page table has ", a.pages, " pages of ", page_size);
    const std::int32_t* pages = a.page_table + b * a.pages;
    for (std::int64_t i = 0; i < used; ++i) {
      SPECDEC_REQUIRE(pages[i] >= 0 && pages[i] < num_pages, "fill_step_plan: page_table[", b, ", ",
                      i, "] = ", pages[i], ": page ids are 0..", num_pages - 1);
    }
    std::copy(pages, pages + used,
              plan.page_table.begin() + std::ptrdiff_t{kept} * plan.page_table_stride);
    plan.kv_len[kept] = a.kv_len[b];
    plan.is_tree[kept] = a.is_tree[b];
    plan.slot[kept] = static_cast<std::int32_t>(b);
    ++kept;
    plan.cu_rows[kept] = end;
    plan.cu_logits[kept] = a.cu_logits[b + 1];
  }
  const std::int32_t rows = a.cu_rows[a.requests], choices = a.cu_logits[a.requests];
  std::copy_n(a.tokens, rows, plan.tokens.begin());
  std::copy_n(a.positions, rows, plan.positions.begin());
  std::copy_n(a.parents, rows, plan.parents.begin());
  std::copy_n(a.mask, std::size_t(rows) * kMaskWords, plan.mask.begin());
  for (std::int32_t i = 0; i < choices; ++i) {
    SPECDEC_REQUIRE(a.logit_rows[i] >= 0 && a.logit_rows[i] < rows, "fill_step_plan: logit_rows[",
                    i, "] = ", a.logit_rows[i], ": rows are 0..", rows - 1);
    plan.logit_rows[i] = a.logit_rows[i];
  }
  plan.num_requests = kept;
  plan.num_rows = rows;
  plan.num_logit_rows = choices;
  plan.num_prefill_rows = 0;
  plan.needs_logits = needs_logits;
  ++plan.generation;
}

void bind_fill_step_plan(py::module_& m) {
  m.def(
      "fill_step_plan",
      [](StepPlan& plan, py::handle tokens, py::handle positions, py::handle parents,
         py::handle mask, py::handle cu_rows, py::handle kv_len, py::handle is_tree,
         py::handle page_table, py::handle logit_rows, py::handle cu_logits, int page_size,
         int num_pages, bool needs_logits) {
        const BorrowedTensor table(page_table, "page_table"), lengths(kv_len, "kv_len"),
            firsts(cu_rows, "cu_rows"), choices(cu_logits, "cu_logits"), ids(tokens, "tokens"),
            at(positions, "positions"), from(parents, "parents"), words(mask, "mask"),
            trees(is_tree, "is_tree"), wanted(logit_rows, "logit_rows");
        const auto check = [](const BorrowedTensor& t, const char* name, DType dtype,
                              const char* what, std::initializer_list<std::int64_t> shape) {
          check_cpu(t.view(), name);
          check_contiguous(t.view(), name);
          check_dtype(t.view(), name, {dtype});
          check_shape(t.view(), name, what, shape);
        };
        check(table, "page_table", DType::kI32, "[B, max_pages]", {kAny, kAny});
        StepArrays a;
        a.requests = table->shape[0];
        a.pages = table->shape[1];
        check(ids, "tokens", DType::kI32, "[R]", {kAny});
        a.rows = ids->shape[0];
        check(lengths, "kv_len", DType::kI32, "[B]", {a.requests});
        check(trees, "is_tree", DType::kU8, "[B]", {a.requests});
        check(firsts, "cu_rows", DType::kI32, "[B + 1]", {a.requests + 1});
        check(choices, "cu_logits", DType::kI32, "[B + 1]", {a.requests + 1});
        check(at, "positions", DType::kI32, "[R]", {a.rows});
        check(from, "parents", DType::kI32, "[R]", {a.rows});
        check(words, "mask", DType::kI32, "[R, 4]", {a.rows, kMaskWords});
        check(wanted, "logit_rows", DType::kI32, "[L]", {kAny});
        a.choices = wanted->shape[0];
        const auto data = [](const BorrowedTensor& t) {
          return static_cast<const std::int32_t*>(t->data);
        };
        a.tokens = data(ids);
        a.positions = data(at);
        a.parents = data(from);
        a.cu_rows = data(firsts);
        a.kv_len = data(lengths);
        a.page_table = data(table);
        a.logit_rows = data(wanted);
        a.cu_logits = data(choices);
        a.mask = static_cast<const std::uint32_t*>(words->data);
        a.is_tree = static_cast<const std::uint8_t*>(trees->data);
        SPECDEC_REQUIRE(page_size >= 1, "page_size = ", page_size, ": at least 1");
        fill_step_plan(plan, a, page_size, num_pages, needs_logits);
      },
      py::arg("plan"), py::kw_only(), py::arg("tokens"), py::arg("positions"), py::arg("parents"),
      py::arg("mask"), py::arg("cu_rows"), py::arg("kv_len"), py::arg("is_tree"),
      py::arg("page_table"), py::arg("logit_rows"), py::arg("cu_logits"), py::arg("page_size"),
      py::arg("num_pages"), py::arg("needs_logits") = false,
      "Copies the arrays of a step into a plan, for a model that takes plans. Requests without "
      "rows "
      "are left out; the rows behind the last request are padding. plan.slot says which request of "
      "the arrays each one is.");
}

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
  bind_fill_step_plan(m);
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
                       const LookaheadTriple& lookahead, const py::dict& ngram, bool adaptive,
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
           py::arg("adaptive") = true, py::arg("pads_rows") = false,
           py::arg("enable_chunked_prefill") = true, py::arg("enable_block_reuse") = false,
           py::arg("check_integrity") = false, py::arg("draft_len_schedule") = DraftLenSchedule{})
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

// Executor. Arguments are converted, the call is made without the GIL, that is all.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "backend/cache_view.h"
#include "base/check.h"
#include "bind/acceptance_arguments.h"
#include "bind/bound_executor.h"
#include "bind/executor_arguments.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

// The pages of steps that the host runs, or None of both: steps run on a device.
std::unique_ptr<BoundExecutor> make_executor(const py::object& k_pages, const py::object& v_pages,
                                             ExecutorConfig config) {
  SPECDEC_REQUIRE(k_pages.is_none() == v_pages.is_none(),
                  "k_pages and v_pages: give both, or neither");
  if (k_pages.is_none()) return std::make_unique<BoundExecutor>(config);
  const KvCacheView cache =
      cache_view(to_view(k_pages, "k_pages", true), to_view(v_pages, "v_pages", true));
  config.num_pages = cache.num_pages;
  config.page_size = cache.page_size;
  auto bound = std::make_unique<BoundExecutor>(config);
  bound->k_pages = k_pages;
  bound->v_pages = v_pages;
  bound->executor.run_on_host(cache, cpu_backend());
  return bound;
}

void def_make(py::class_<BoundExecutor>& executor) {
  executor.def(
      py::init([](const py::object& k_pages, const py::object& v_pages, int vocab_size,
                  int max_batch_size, int max_seq_len, int max_num_tokens, int num_pages,
                  int page_size, int overlap_depth, const std::string& method,
                  const LookaheadTriple& lookahead, const py::dict& ngram, const py::dict& suffix,
                  bool with_suffix, int suffix_cached_requests, int proposed_max_draft_len,
                  std::optional<int> proposed_max_path, bool proposed_by_host, int max_draft_depth,
                  bool adaptive, bool pads_rows, bool enable_chunked_prefill,
                  double max_prefill_slowdown, const std::string& policy, bool enable_block_reuse,
                  bool check_integrity, DraftLenSchedule draft_len_schedule,
                  std::vector<double> synthetic_acceptance_rates, std::int64_t attention_window,
                  std::int64_t sink_tokens, std::vector<int> narrow_windows,
                  std::int64_t narrow_sink_tokens, std::vector<int> narrow_pages,
                  int num_host_pages, std::int64_t host_page_bytes, double host_bytes_per_second) {
        ExecutorConfig c;
        c.vocab_size = vocab_size;
        c.max_batch_size = max_batch_size;
        c.max_seq_len = max_seq_len;
        c.max_num_tokens = max_num_tokens;
        c.num_pages = num_pages;
        c.page_size = page_size;
        c.overlap_depth = overlap_depth;
        c.method = parse_method(method);
        c.lookahead = to_lookahead(lookahead);
        c.ngram = parse_ngram(ngram);
        c.suffix = parse_suffix(suffix);
        c.with_suffix = with_suffix;
        c.suffix_cached_requests = suffix_cached_requests;
        c.proposed_max_draft_len = proposed_max_draft_len;
        c.proposed_max_path = proposed_max_path.value_or(proposed_max_draft_len);
        c.proposed_by_host = proposed_by_host;
        c.max_draft_depth = max_draft_depth;
        c.adaptive = adaptive;
        c.pads_rows = pads_rows;
        c.enable_chunked_prefill = enable_chunked_prefill;
        c.max_prefill_slowdown = max_prefill_slowdown;
        c.policy = parse_policy(policy);
        c.enable_block_reuse = enable_block_reuse;
        c.check_integrity = check_integrity;
        c.draft_len_schedule = std::move(draft_len_schedule);
        c.synthetic_acceptance_rates = std::move(synthetic_acceptance_rates);
        c.attention = {attention_window, sink_tokens};
        c.narrow_windows = std::move(narrow_windows);
        c.narrow_sink_tokens = narrow_sink_tokens;
        c.narrow_pages = std::move(narrow_pages);
        c.num_host_pages = num_host_pages;
        c.host_link = {host_bytes_per_second, host_page_bytes};
        return make_executor(k_pages, v_pages, std::move(c));
      }),
      py::arg("k_pages") = py::none(), py::arg("v_pages") = py::none(), py::kw_only(),
      py::arg("vocab_size"), py::arg("max_batch_size") = 32, py::arg("max_seq_len"),
      py::arg("max_num_tokens"), py::arg("num_pages") = 0, py::arg("page_size") = 0,
      py::arg("overlap_depth") = 0, py::arg("method") = "none",
      py::arg("lookahead") = LookaheadTriple{1, 1, 0}, py::arg("ngram") = py::dict(),
      py::arg("suffix") = py::dict(), py::arg("with_suffix") = false,
      py::arg("suffix_cached_requests") = 0, py::arg("proposed_max_draft_len") = kMaxDraftLen,
      py::arg("proposed_max_path") = py::none(), py::arg("proposed_by_host") = false,
      py::arg("max_draft_depth") = kMaxDraftLen, py::arg("adaptive") = true,
      py::arg("pads_rows") = false, py::arg("enable_chunked_prefill") = true,
      py::arg("max_prefill_slowdown") = 0.0, py::arg("policy") = "guaranteed_no_evict",
      py::arg("enable_block_reuse") = false, py::arg("check_integrity") = false,
      py::arg("draft_len_schedule") = DraftLenSchedule{},
      py::arg("synthetic_acceptance_rates") = std::vector<double>{},
      py::arg("attention_window") = 0, py::arg("sink_tokens") = 0,
      py::arg("narrow_windows") = std::vector<int>{}, py::arg("narrow_sink_tokens") = 0,
      py::arg("narrow_pages") = std::vector<int>{}, py::arg("num_host_pages") = 0,
      py::arg("host_page_bytes") = 0, py::arg("host_bytes_per_second") = 0.0,
      R"(k_pages, v_pages: pages on the CPU: the host runs the steps, plan() -> forward pass -> commit(). Without them the caller enqueues the steps on a device, between
stage() and deliver(), over the rings that bind_rings() names; num_pages and page_size say what there
is. attention_window, sink_tokens: what a row of the model sees at most, whatever its layer; pages
behind it are given back. 0: everything. narrow_windows: one per layer, 0 for none; layers with one, and
narrow_sink_tokens, hold their part of a page while it does not lie behind theirs; narrow_pages: for how many
parts there is room, by distinct window, ascending (default: all). Pages on the CPU are LazyZeros then, of which
a layer's part is whole pages of the operating system; on a device parts have tables of their own (StagingLayout).
max_draft_depth: predictions draft no deeper.
num_host_pages: pages of the host's pool for requests that are preempted, host_page_bytes of all that
goes by a page's number, host_bytes_per_second of the way there; 0: not known.)");
}

// What the host may ask and say at any time.
void def_requests(py::class_<BoundExecutor>& executor) {
  executor
      .def(
          "outputs", [](const BoundExecutor& self) { return self.outputs.kept(); },
          "What steps have delivered since the last one was planned; their calls returned it, too.")
      .def(
          "held",
          [](const BoundExecutor& self, RequestId id, std::int64_t after) {
            return self.outputs.held(id, after);
          },
          py::arg("request_id"), py::arg("after"),
          "What steps have delivered to a request with outputs_at_once and no call has returned "
          "yet, "
          "behind the output of number `after`; None: nothing.")
      .def(
          "cancel",
          [](BoundExecutor& self, RequestId id) {
            const bool ran = self.executor.cancel(id);
            self.outputs.drop(id);
            return ran;
          },
          py::arg("request_id"), py::call_guard<py::gil_scoped_release>(),
          "Ends a request; what held() would show of it is gone. False: it had ended.")
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
          "force",
          [](BoundExecutor& self, RequestId id, std::vector<TokenId> tokens) {
            self.executor.force(id, std::move(tokens));
          },
          py::arg("request_id"), py::arg("tokens"),
          "What a grammar leaves no choice about: drafts for the request's next decode step.")
      .def(
          "output",
          [](const BoundExecutor& self, RequestId id, int first) {
            return self.executor.output(id, first);
          },
          py::arg("request_id"), py::arg("first"),
          "The output from index `first` on; [] while a step in flight decides more of it.")
      .def(
          "history",
          [](const BoundExecutor& self, RequestId id) { return self.executor.history(id); },
          py::arg("request_id"), "Prompt and tokens, as far as steps have run.")
      .def(
          "decoding",
          [](const BoundExecutor& self, RequestId id) { return self.executor.decoding(id); },
          py::arg("request_id"),
          "Past its prompt, and no step in flight decides the token after history().")
      .def(
          "choice_trees", [](BoundExecutor& self) { return self.executor.choice_trees(); },
          "The trees whose scores the caller's own processors or grammars change: of plan()'s "
          "step, "
          "or of the oldest step in flight on a device.")
      .def(
          "draft_len_limit",
          [](const BoundExecutor& self) { return self.executor.draft_len_limit(); },
          "Drafts of one request that draft_len_schedule allows for the requests that run now.")
      .def(
          "set_step_cost",
          [](BoundExecutor& self, std::vector<int> rows, std::vector<double> seconds,
             double context_len, std::vector<double> growth, std::pair<double, double> prefill) {
            self.executor.set_step_cost(std::move(rows), std::move(seconds), context_len,
                                        std::move(growth), {prefill.first, prefill.second});
          },
          py::arg("rows"), py::arg("seconds"), py::arg("context_len") = 0.0,
          py::arg("growth") = std::vector<double>{}, py::arg("prefill") = std::pair(1.0, 1.0),
          "T(rows) of the model on this machine; adaptive draft lengths need it. seconds: with\n"
          "context_len tokens in the cache; growth: seconds that each token more adds, by rows;\n"
          "prefill: how rows of prompts compare with both (StepCost).")
      .def(
          "set_draft_cost",
          [](BoundExecutor& self, double fixed, double each) {
            self.executor.set_draft_cost({fixed, each});
          },
          py::arg("fixed"), py::arg("each") = 0.0,
          "Seconds that drafting costs a step besides the rows of the drafts: if it drafts at all, "
          "and for each draft.")
      .def(
          "reset_prefix_cache",
          [](BoundExecutor& self) { return self.executor.reset_prefix_cache(); },
          py::call_guard<py::gil_scoped_release>(),
          "Forgets the published pages that no running request holds; returns how many.")
      .def(
          "bind_host_pages",
          [](BoundExecutor& self, const py::object& pools) {
            self.executor.bind_host_pages(pools.cast<const PagePoolsObject&>().pools);
            self.page_pools = pools;
          },
          py::arg("pools"),
          "Where the host runs the steps: what is copied of preempted requests, a PagePools.")
      .def(
          "pages", [](const BoundExecutor& self, RequestId id) { return self.executor.pages(id); },
          py::arg("request_id"),
          "Pages that the request holds, by block of its text; -1: given back, behind the "
          "attention window.")
      .def("stats", [](const BoundExecutor& self) { return stats_dict(self.executor.stats()); })
      .def_property_readonly("in_flight",
                             [](const BoundExecutor& self) { return self.executor.in_flight(); })
      .def_property_readonly("num_unfinished", [](const BoundExecutor& self) {
        return self.executor.num_unfinished();
      });
}

}  // namespace

void register_executor(py::module_& m) {
  m.def(
      "pages_in_window",
      [](std::int64_t attention_window, std::int64_t sink_tokens, int page_size, int max_num_tokens,
         int overlap_depth, bool enable_chunked_prefill, bool enable_block_reuse,
         std::int64_t prompt, std::int64_t step) {
        ExecutorConfig c;
        c.attention = {attention_window, sink_tokens};
        c.page_size = page_size;
        c.max_num_tokens = max_num_tokens;
        c.overlap_depth = overlap_depth;
        c.enable_chunked_prefill = enable_chunked_prefill;
        c.enable_block_reuse = enable_block_reuse;
        return pages_in_window(c, prompt, step);
      },
      py::kw_only(), py::arg("attention_window"), py::arg("sink_tokens"), py::arg("page_size"),
      py::arg("max_num_tokens"), py::arg("overlap_depth"), py::arg("enable_chunked_prefill"),
      py::arg("enable_block_reuse"), py::arg("prompt"), py::arg("step"),
      "Pages that a text holds at once, at most, within an attention window: of a prompt of so "
      "many "
      "tokens, in steps of so many rows.");
  py::class_<BoundExecutor> executor(
      m, "Executor",
      "Who takes part in which step, and what a step brought. See cpp/engine/executor.h.");
  def_make(executor);
  def_submit(executor);
  def_requests(executor);
  def_host_steps(executor);
  def_device_steps(executor);
}

}  // namespace specdec

// A step plan from the arrays that a step on slots leaves behind.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/pages.h"
#include "bind/dlpack_convert.h"
#include "bind/registers.h"
#include "engine/step_plan.h"

namespace py = pybind11;

namespace specdec {
namespace {

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
    const std::int64_t used = pages_for(tokens, page_size);
    SPECDEC_REQUIRE(a.kv_len[b] >= 0 && used <= a.pages, "fill_step_plan: request ", b, " has ",
                    tokens, " tokens, its page table has ", a.pages, " pages of ", page_size);
    const std::int32_t* pages = a.page_table + b * a.pages;
    for (std::int64_t i = 0; i < used; ++i) {
      SPECDEC_REQUIRE(pages[i] >= 0 && pages[i] < num_pages, "fill_step_plan: page_table[", b, ", ",
                      i, "] = ", pages[i], ": page ids are 0..", num_pages - 1);
    }
    if (a.is_tree[b] != 0) {
      SPECDEC_REQUIRE(end - first <= kMaxStepTokens, "fill_step_plan: request ", b,
                      " is a tree of ", end - first, " rows: at most ", kMaxStepTokens);
      for (std::int32_t i = 0; i < end - first; ++i) {
        check_mask_row(a.mask + std::int64_t{first + i} * kMaskWords, i, b);
      }
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
  plan.num_prompts = plan.num_prefill_rows = 0;
  plan.needs_logits = needs_logits;
  ++plan.generation;
}

}  // namespace

void register_fill_step_plan(py::module_& m) {
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
      "are left out; the rows after the last request are padding. plan.slot says which request of "
      "the arrays each one is.");
}

}  // namespace specdec

// Slots: a pool's layout, what a request's slot holds when it enters, and the two operations of a
// step on them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "algo/slot_host.h"
#include "base/check.h"
#include "bind/executor_arguments.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"
#include "bind/slots_argument.h"

namespace py = pybind11;

namespace specdec {
namespace {

using Triple = std::tuple<int, int, int>;

LookaheadConfig triple_of(const Triple& t) {
  return LookaheadConfig{std::get<0>(t), std::get<1>(t), std::get<2>(t)};
}

SlotMethod slot_method(const std::string& name) {
  if (name == "none") return SlotMethod::kNone;
  if (name == "lookahead") return SlotMethod::kLookahead;
  if (name == "proposed") return SlotMethod::kProposed;
  if (name == "suffix") return SlotMethod::kSuffix;
  SPECDEC_REQUIRE(name == "ngram", "method = '", name,
                  "': give 'none', 'lookahead', 'ngram', 'suffix' or 'proposed'");
  return SlotMethod::kNgram;
}

void draft_step(const SlotLayout& layout, py::handle slots, py::handle slot_ids, py::handle tokens,
                py::handle parents, py::handle cu_rows, py::handle kv_len, py::handle max_drafts,
                py::handle window_rows, py::handle guesses, const CallOptions& where) {
  OpCall call("draft_step", where);
  const SlotsArgument pool(call, layout, slots);
  std::int64_t requests = 0;
  const BorrowedTensor ids = slot_ids_argument(call, slot_ids, pool.view(), &requests);
  const BorrowedTensor to(tokens, "tokens", true);
  check_shape(to.view(), "tokens", "[R]", {kAny});
  const std::int64_t rows = to->shape[0];
  SPECDEC_REQUIRE(rows <= INT32_MAX, "tokens has ", rows, " rows");
  const auto out = [&](py::handle tensor, const char* name, const char* what, std::int64_t size) {
    return vector_argument(call, tensor, name, DType::kI32, what, size, true);
  };
  const BorrowedTensor token_rows = out(tokens, "tokens", "[R]", rows);
  const BorrowedTensor parent_rows = out(parents, "parents", "[R]", rows);
  const BorrowedTensor firsts = out(cu_rows, "cu_rows", "[B + 1]", requests + 1);
  const BorrowedTensor lengths = out(kv_len, "kv_len", "[B]", requests);
  DraftStepParams p;
  p.slots = pool.view();
  p.slot_ids = static_cast<const std::int32_t*>(ids->data);
  const auto limit = [&](BorrowedTensor& held, py::handle tensor, const char* name) {
    if (tensor.is_none()) return static_cast<const std::int32_t*>(nullptr);
    held = vector_argument(call, tensor, name, DType::kI32, "[B]", requests);
    return static_cast<const std::int32_t*>(held->data);
  };
  BorrowedTensor most, rows_most, guesses_most;
  p.max_drafts = limit(most, max_drafts, "max_drafts");
  p.window_rows = limit(rows_most, window_rows, "window_rows");
  p.guesses = limit(guesses_most, guesses, "guesses");
  p.num_requests = static_cast<std::int32_t>(requests);
  p.num_rows = static_cast<std::int32_t>(rows);
  p.tokens = static_cast<TokenId*>(token_rows->data);
  p.parents = static_cast<std::int32_t*>(parent_rows->data);
  p.cu_rows = static_cast<std::int32_t*>(firsts->data);
  p.kv_len = static_cast<std::int32_t*>(lengths->data);
  p.exec = call.context(requests);
  call.run(&Backend::draft_step, p);
}

// What accept_step wrote, tensors or None.
struct AcceptedTensors {
  py::handle path, path_len, emitted, num_emitted;
};

void commit_step(const SlotLayout& layout, py::handle slots, py::handle slot_ids,
                 py::handle cu_logits, py::handle sampled, const AcceptedTensors& accepted,
                 py::handle results, py::handle path, py::handle path_len,
                 const CallOptions& where) {
  OpCall call("commit_step", where);
  const SlotsArgument pool(call, layout, slots);
  std::int64_t requests = 0;
  const BorrowedTensor ids = slot_ids_argument(call, slot_ids, pool.view(), &requests);
  const BorrowedTensor firsts =
      vector_argument(call, cu_logits, "cu_logits", DType::kI32, "[B + 1]", requests + 1);
  const BorrowedTensor from(sampled, "sampled");
  check_shape(from.view(), "sampled", "[L]", {kAny});
  const std::int64_t choices = from->shape[0];
  const BorrowedTensor chosen =
      vector_argument(call, sampled, "sampled", DType::kI32, "[L]", choices);
  if (call.reads_values()) {
    const auto* first = static_cast<const std::int32_t*>(firsts->data);
    SPECDEC_REQUIRE(first[0] == 0, "cu_logits[0] = ", first[0], ": it begins with 0");
    for (std::int64_t b = 0; b < requests; ++b) {
      SPECDEC_REQUIRE(first[b + 1] >= first[b] && first[b + 1] <= choices, "cu_logits[", b + 1,
                      "] = ", first[b + 1], ": it never decreases and ends within the ", choices,
                      " entries of sampled");
    }
  }
  const auto matrix = [&](py::handle tensor, const char* name, const char* what,
                          std::int64_t columns, bool writable) {
    return tensor_argument(call, tensor, name, what, DType::kI32, {requests, columns}, writable);
  };
  const BorrowedTensor out = matrix(results, "results", "[B, result words]", kResultWords, true);
  const BorrowedTensor paths = matrix(path, "path", "[B, 128]", kMaxStepTokens, true);
  const BorrowedTensor lengths =
      vector_argument(call, path_len, "path_len", DType::kI32, "[B]", requests, true);
  CommitStepParams p;
  std::vector<BorrowedTensor> held;
  if (!accepted.path.is_none()) {
    const auto table = [&](py::handle tensor, const char* name) {
      held.push_back(matrix(tensor, name, "[B, 128]", kMaxStepTokens, false));
      return static_cast<const std::int32_t*>(held.back()->data);
    };
    const auto counts = [&](py::handle tensor, const char* name) {
      held.push_back(vector_argument(call, tensor, name, DType::kI32, "[B]", requests));
      return static_cast<const std::int32_t*>(held.back()->data);
    };
    p.accepted.path = table(accepted.path, "accepted.path");
    p.accepted.path_len = counts(accepted.path_len, "accepted.path_len");
    p.accepted.emitted = table(accepted.emitted, "accepted.emitted");
    p.accepted.num_emitted = counts(accepted.num_emitted, "accepted.num_emitted");
  }
  p.slots = pool.view();
  p.slot_ids = static_cast<const std::int32_t*>(ids->data);
  p.cu_logits = static_cast<const std::int32_t*>(firsts->data);
  p.sampled = static_cast<const TokenId*>(chosen->data);
  p.num_sampled = static_cast<std::int32_t>(choices);
  p.num_requests = static_cast<std::int32_t>(requests);
  p.results = static_cast<SlotResult*>(out->data);
  p.path = static_cast<std::int32_t*>(paths->data);
  p.path_len = static_cast<std::int32_t*>(lengths->data);
  p.exec = call.context(requests);
  call.run(&Backend::commit_step, p);
}

// What a request's slot holds when it enters, as bytes for the start of its row.
py::bytes slot_bytes(const SlotLayout& layout, const SlotRequest& request) {
  const auto block = std::make_unique<std::uint64_t[]>(
      static_cast<std::size_t>(written_slot_bytes(request) / 8 + 1));
  write_slot(layout, request, block.get());
  return py::bytes(reinterpret_cast<const char*>(block.get()),
                   static_cast<std::size_t>(written_slot_bytes(request)));
}

SlotRequest slot_request(std::vector<TokenId> prompt_ids, int max_tokens,
                         std::vector<TokenId> eos_token_ids, std::vector<TokenId> stop_token_ids,
                         bool speculative, const Triple& lookahead, int max_draft_len,
                         bool is_keep_all, bool is_use_oldest, const SuffixLookup& suffix,
                         std::uint64_t seed) {
  SlotRequest r;
  r.prompt = std::move(prompt_ids);
  r.max_tokens = max_tokens;
  r.eos_token_ids = std::move(eos_token_ids);
  r.stop_token_ids = std::move(stop_token_ids);
  r.speculative = speculative;
  r.lookahead = triple_of(lookahead);
  SPECDEC_REQUIRE(max_draft_len >= 0 && max_draft_len <= kMaxDraftLen,
                  "slot.max_draft_len = ", max_draft_len, ": give 0..", kMaxDraftLen);
  r.ngram = NgramLookup{max_draft_len, is_keep_all, is_use_oldest};
  r.suffix = suffix;
  r.suffix.max_draft_len = max_draft_len;
  r.seed = seed;
  return r;
}

}  // namespace

void register_slots(py::module_& m) {
  py::class_<SlotLayout>(m, "SlotLayout",
                         "What the slots of a pool have in common (cpp/algo/slot.h).")
      .def(py::init([](const std::string& method, int max_seq_len, const Triple& lookahead,
                       int max_matching_ngram_size) {
             return make_slot_layout(slot_method(method), max_seq_len, triple_of(lookahead),
                                     max_matching_ngram_size);
           }),
           py::kw_only(), py::arg("method"), py::arg("max_seq_len"),
           py::arg("lookahead") = Triple{1, 1, 0}, py::arg("max_matching_ngram_size") = 2)
      .def_readonly("max_seq_len", &SlotLayout::max_seq_len)
      .def_readonly("slot_bytes", &SlotLayout::bytes, "Bytes of one slot.")
      .def_property_readonly(
          "result_words", [](const SlotLayout&) { return kResultWords; },
          "int32 words of what commit_step writes for one request.")
      .def_property_readonly(
          "history_offset", [](const SlotLayout&) { return sizeof(Slot); },
          "Bytes before a slot's history, int32 [max_seq_len]: its prompt from the start on.")
      .def(
          "request_bytes",
          [](const SlotLayout& layout, std::vector<TokenId> prompt_ids, int max_tokens,
             std::vector<TokenId> eos_token_ids, std::vector<TokenId> stop_token_ids,
             bool speculative, const Triple& lookahead, int max_draft_len, bool is_keep_all,
             bool is_use_oldest, const py::dict& suffix, std::uint64_t seed) {
            return slot_bytes(
                layout,
                slot_request(std::move(prompt_ids), max_tokens, std::move(eos_token_ids),
                             std::move(stop_token_ids), speculative, lookahead, max_draft_len,
                             is_keep_all, is_use_oldest, parse_suffix(suffix), seed));
          },
          py::arg("prompt_ids"), py::kw_only(), py::arg("max_tokens"),
          py::arg("eos_token_ids") = std::vector<TokenId>{},
          py::arg("stop_token_ids") = std::vector<TokenId>{}, py::arg("speculative") = true,
          py::arg("lookahead") = Triple{1, 1, 0}, py::arg("max_draft_len") = 4,
          py::arg("is_keep_all") = true, py::arg("is_use_oldest") = true,
          py::arg("suffix") = py::dict(), py::arg("seed") = 0,
          "The start of the slot of a request that enters.");
  m.def(
      "draft_step",
      [](const SlotLayout& layout, py::handle slots, py::handle slot_ids, py::handle tokens,
         py::handle parents, py::handle cu_rows, py::handle kv_len, py::handle max_drafts,
         py::handle window_rows, py::handle guesses, py::object backend, std::uint64_t stream,
         py::object status) {
        const CallOptions where{std::move(backend), stream, py::none(), std::move(status)};
        draft_step(layout, slots, slot_ids, tokens, parents, cu_rows, kv_len, max_drafts,
                   window_rows, guesses, where);
      },
      py::arg("layout"), py::arg("slots"), py::arg("slot_ids"), py::kw_only(), py::arg("tokens"),
      py::arg("parents"), py::arg("cu_rows"), py::arg("kv_len"), py::arg("max_drafts") = py::none(),
      py::arg("window_rows") = py::none(), py::arg("guesses") = py::none(),
      py::arg("backend") = py::none(), py::arg("stream") = 0, py::arg("status") = py::none(),
      "See specdec_ext.ops.draft_step.");
  m.def(
      "commit_step",
      [](const SlotLayout& layout, py::handle slots, py::handle slot_ids, py::handle cu_logits,
         py::handle sampled, py::handle results, py::handle path, py::handle path_len,
         py::handle accepted_path, py::handle accepted_path_len, py::handle emitted,
         py::handle num_emitted, py::object backend, std::uint64_t stream, py::object status) {
        const CallOptions where{std::move(backend), stream, py::none(), std::move(status)};
        commit_step(layout, slots, slot_ids, cu_logits, sampled,
                    {accepted_path, accepted_path_len, emitted, num_emitted}, results, path,
                    path_len, where);
      },
      py::arg("layout"), py::arg("slots"), py::arg("slot_ids"), py::arg("cu_logits"),
      py::arg("sampled"), py::kw_only(), py::arg("results"), py::arg("path"), py::arg("path_len"),
      py::arg("accepted_path") = py::none(), py::arg("accepted_path_len") = py::none(),
      py::arg("emitted") = py::none(), py::arg("num_emitted") = py::none(),
      py::arg("backend") = py::none(), py::arg("stream") = 0, py::arg("status") = py::none(),
      "See specdec_ext.ops.commit_step.");
}

}  // namespace specdec

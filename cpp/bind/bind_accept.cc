// Drawing tokens and accepting drafts where a step's scores are.
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "base/check.h"
#include "bind/decided_argument.h"
#include "bind/op_arguments.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

constexpr std::int32_t kMostRequests = 65535;  // of a call

// scores [R, V], cu_logits [B + 1], positions [R].
class ScoresArgument {
 public:
  ScoresArgument(OpCall& call, py::handle scores, py::handle cu_logits, py::handle positions)
      : scores_(scores, "scores") {
    const TensorView& view = scores_.view();
    check_shape(view, "scores", "[R, V]", {kAny, kAny});
    call.add(view, "scores");
    check_dtype(view, "scores", {DType::kF32, DType::kBF16, DType::kF16});
    check_last_axis_contiguous(view, "scores");
    SPECDEC_REQUIRE(view.shape[1] >= 1 && view.shape[1] <= kMaxLawTokens, "scores has ",
                    view.shape[1], " columns: 1..", kMaxLawTokens, " tokens can be drawn from");
    SPECDEC_REQUIRE(view.shape[0] <= INT32_MAX, "scores has ", view.shape[0], " rows");
    const BorrowedTensor firsts(cu_logits, "cu_logits");
    check_shape(firsts.view(), "cu_logits", "[B + 1]", {kAny});
    SPECDEC_REQUIRE(firsts->shape[0] >= 1 && firsts->shape[0] <= kMostRequests + 1,
                    "cu_logits has ", firsts->shape[0],
                    " entries: one more than requests, of which ", kMostRequests, " are served");
    firsts_ =
        vector_argument(call, cu_logits, "cu_logits", DType::kI32, "[B + 1]", firsts->shape[0]);
    positions_ = vector_argument(call, positions, "positions", DType::kI32, "[R]", view.shape[0]);
    rows_.scores = view.data;
    rows_.row_stride = view.strides[0];
    rows_.rows = static_cast<std::int32_t>(view.shape[0]);
    rows_.vocab = static_cast<std::int32_t>(view.shape[1]);
    rows_.dtype = view.dtype;
    rows_.num_requests = static_cast<std::int32_t>(firsts_->shape[0] - 1);
    rows_.cu_logits = static_cast<const std::int32_t*>(firsts_->data);
    rows_.positions = static_cast<const std::int32_t*>(positions_->data);
    if (call.reads_values()) check_values();
  }
  const ScoreRows& view() const { return rows_; }

 private:
  void check_values() const {
    const std::int32_t* first = rows_.cu_logits;
    SPECDEC_REQUIRE(first[0] == 0, "cu_logits[0] = ", first[0], ": it begins with 0");
    for (std::int32_t b = 0; b < rows_.num_requests; ++b) {
      SPECDEC_REQUIRE(has_rows(rows_, b), "cu_logits[", b + 1, "] = ", first[b + 1],
                      ": it never decreases and ends within the ", rows_.rows, " rows of scores");
    }
  }

  BorrowedTensor scores_, firsts_, positions_;
  ScoreRows rows_;
};

// What Python gives as the laws of requests.
struct SamplingTensors {
  py::handle temperature, top_k, top_p, min_p, seed;
};

class SamplingArgument {
 public:
  SamplingArgument(OpCall& call, const SamplingTensors& tensors, std::int64_t requests) {
    const auto take = [&](py::handle tensor, const char* name, DType dtype) {
      held_.push_back(vector_argument(call, tensor, name, dtype, "[B]", requests));
      return held_.back()->data;
    };
    view_.temperature =
        static_cast<const float*>(take(tensors.temperature, "temperature", DType::kF32));
    view_.top_k = static_cast<const std::int32_t*>(take(tensors.top_k, "top_k", DType::kI32));
    view_.top_p = static_cast<const float*>(take(tensors.top_p, "top_p", DType::kF32));
    view_.min_p = static_cast<const float*>(take(tensors.min_p, "min_p", DType::kF32));
    view_.seed = static_cast<const std::uint64_t*>(take(tensors.seed, "seed", DType::kI64));
    if (!call.reads_values()) return;
    for (std::int64_t b = 0; b < requests; ++b) {
      const SamplingLaw law = view_.law(static_cast<std::int32_t>(b));
      SPECDEC_REQUIRE(law.valid(), "request ", b, " has temperature = ", law.temperature,
                      ", top_k = ", law.top_k, ", top_p = ", law.top_p, ", min_p = ", law.min_p,
                      ": temperature >= 0 and finite, top_k >= 0, top_p in (0, 1] and min_p in "
                      "[0, 1] are needed");
    }
  }
  const SamplingView& view() const { return view_; }

 private:
  std::vector<BorrowedTensor> held_;
  SamplingView view_;
};

std::int64_t laws_bytes(const OpCall& call, const ScoreRows& rows) {
  return call.is_cpu() ? 0 : row_laws_bytes(rows.rows, rows.vocab);
}

void sample_rows(py::handle scores, py::handle cu_logits, py::handle positions,
                 const SamplingTensors& sampling, py::handle out, py::handle probs,
                 const std::string& purpose, const CallOptions& where) {
  OpCall call("sample_rows", where);
  const ScoresArgument rows(call, scores, cu_logits, positions);
  const SamplingArgument laws(call, sampling, rows.view().num_requests);
  SampleRowsParams p;
  p.rows = rows.view();
  p.sampling = laws.view();
  SPECDEC_REQUIRE(purpose == "token" || purpose == "draft", "purpose = '", purpose,
                  "': give 'token' or 'draft'");
  p.purpose = purpose == "token" ? RandomPurpose::kToken : RandomPurpose::kDraft;
  const BorrowedTensor ids =
      vector_argument(call, out, "out", DType::kI32, "[R]", p.rows.rows, true);
  p.ids = static_cast<TokenId*>(ids->data);
  BorrowedTensor laws_out;
  if (!probs.is_none()) {
    laws_out = BorrowedTensor(probs, "probs", true);
    check_shape(laws_out.view(), "probs", "[B, V]", {p.rows.num_requests, p.rows.vocab});
    call.add(laws_out.view(), "probs", true);
    check_dtype(laws_out.view(), "probs", {DType::kF32});
    check_last_axis_contiguous(laws_out.view(), "probs");
    p.probs = static_cast<float*>(laws_out->data);
    p.probs_stride = laws_out->strides[0];
  }
  p.exec = call.context(p.rows.num_requests, 0, laws_bytes(call, p.rows));
  if (p.rows.rows == 0) return;
  call.run(&Backend::sample_rows, p);
}

// What Python gives as the drafts of a step and the rules for them; optional ones may be None.
struct DraftTensors {
  py::handle tokens, parents, acceptance;
  py::handle posterior_threshold, posterior_alpha, acceptance_threshold;
  py::handle probs, vocab_ids, draft_columns, has_probs, replacement;
  py::handle synthetic_rates;
};

class DraftsArgument {
 public:
  DraftsArgument(OpCall& call, const DraftTensors& given, AcceptStepParams* p)
      : call_(call), requests_(p->rows.num_requests), rows_(p->rows.rows) {
    p->tokens = of_rows<TokenId>(given.tokens, "tokens");
    p->parents = of_rows<std::int32_t>(given.parents, "parents");
    p->rule = of_requests<std::uint8_t>(given.acceptance, "acceptance", DType::kU8);
    p->posterior_threshold = optional_number(given.posterior_threshold, "posterior_threshold");
    p->posterior_alpha = optional_number(given.posterior_alpha, "posterior_alpha");
    p->threshold = optional_number(given.acceptance_threshold, "acceptance_threshold");
    take_probs(given, p);
    if (!given.synthetic_rates.is_none()) {
      held_.push_back(rates_argument(call, given.synthetic_rates, &p->synthetic));
    }
    if (call.reads_values()) check_values(*p);
  }

 private:
  template <typename T>
  const T* take(py::handle tensor, const char* name, DType dtype, const char* what,
                std::int64_t size) {
    held_.push_back(vector_argument(call_, tensor, name, dtype, what, size));
    return static_cast<const T*>(held_.back()->data);
  }
  template <typename T>
  const T* of_rows(py::handle tensor, const char* name) {
    return take<T>(tensor, name, DType::kI32, "[R]", rows_);
  }
  template <typename T>
  const T* of_requests(py::handle tensor, const char* name, DType dtype) {
    return take<T>(tensor, name, dtype, "[B]", requests_);
  }
  const float* optional_number(py::handle tensor, const char* name) {
    return tensor.is_none() ? nullptr : of_requests<float>(tensor, name, DType::kF32);
  }

  void take_probs(const DraftTensors& given, AcceptStepParams* p) {
    if (given.probs.is_none()) {
      SPECDEC_REQUIRE(given.vocab_ids.is_none() && given.draft_columns.is_none() &&
                          given.has_probs.is_none() && given.replacement.is_none(),
                      "vocab_ids, draft_columns, has_probs or replacement without probs: they say "
                      "what probs mean");
      return;
    }
    BorrowedTensor probs(given.probs, "probs");
    const bool by_draft = probs->ndim == 3;
    if (by_draft) {
      check_shape(probs.view(), "probs", "[drafting requests, drafts, columns]",
                  {kAny, kAny, kAny});
      SPECDEC_REQUIRE(
          probs->shape[0] <= requests_ && probs->shape[1] >= 1 && probs->shape[1] <= kMaxDraftLen,
          "probs has ", probs->shape[0], " requests of ", probs->shape[1], " drafts: at most ",
          requests_, " requests, 1..", kMaxDraftLen, " drafts");
      check_contiguous(probs.view(), "probs");
      p->drafts_each = static_cast<std::int32_t>(probs->shape[1]);
      p->first_drafted = static_cast<std::int32_t>(requests_ - probs->shape[0]);
    } else {
      check_shape(probs.view(), "probs", "[R, columns]", {rows_, kAny});
    }
    call_.add(probs.view(), "probs");
    check_dtype(probs.view(), "probs", {DType::kF32});
    check_last_axis_contiguous(probs.view(), "probs");
    const std::int64_t columns = probs->shape[by_draft ? 2 : 1];
    const std::int64_t places = by_draft ? probs->shape[0] * probs->shape[1] : rows_;
    take_columns(given, columns, places, by_draft, p);
    const std::int64_t drafting = requests_ - p->first_drafted;
    const auto flags = [&](py::handle tensor, const char* name) {
      return take<std::uint8_t>(tensor, name, DType::kU8, by_draft ? "[requests of probs]" : "[B]",
                                drafting);
    };
    if (!given.has_probs.is_none()) p->has_probs = flags(given.has_probs, "has_probs");
    if (!given.replacement.is_none()) p->replacement = flags(given.replacement, "replacement");
    p->probs = static_cast<const float*>(probs->data);
    p->probs_stride = probs->strides[by_draft ? 1 : 0];
    p->columns = static_cast<std::int32_t>(columns);
    held_.push_back(std::move(probs));
  }

  // What the columns of probabilities mean. `places`: rows of probabilities.
  void take_columns(const DraftTensors& given, std::int64_t columns, std::int64_t places,
                    bool by_draft, AcceptStepParams* p) {
    if (given.vocab_ids.is_none()) {
      SPECDEC_REQUIRE(columns == p->rows.vocab, "probs has ", columns, " columns, scores ",
                      p->rows.vocab,
                      ": give one column per token, or vocab_ids for a reduced vocabulary");
    } else {
      BorrowedTensor ids(given.vocab_ids, "vocab_ids");
      p->own_ids = by_draft && ids->ndim == 3;
      // Rows of ids of their own may be wider than a small vocabulary: -1 pads them.
      SPECDEC_REQUIRE(columns >= 1 && (p->own_ids || columns <= p->rows.vocab), "probs has ",
                      columns, " columns: with vocab_ids 1..", p->rows.vocab, " (the vocabulary)");
      if (p->own_ids) {
        ids = tensor_argument(call_, given.vocab_ids, "vocab_ids", "[that of probs]", DType::kI32,
                              {requests_ - p->first_drafted, p->drafts_each, columns}, false);
      } else {
        ids = vector_argument(call_, given.vocab_ids, "vocab_ids", DType::kI32,
                              "[columns of probs]", columns);
      }
      p->vocab_ids = static_cast<const TokenId*>(ids->data);
      held_.push_back(std::move(ids));
    }
    if (!p->own_ids) {
      SPECDEC_REQUIRE(given.vocab_ids.is_none() == given.draft_columns.is_none(),
                      "vocab_ids and draft_columns belong together: where in a reduced vocabulary "
                      "each draft stands");
    }
    if (!given.draft_columns.is_none()) {
      p->draft_columns = take<std::int32_t>(given.draft_columns, "draft_columns", DType::kI32,
                                            by_draft ? "[drafts of probs]" : "[R]", places);
    }
  }

  void check_values(const AcceptStepParams& p) const {
    for (std::int32_t b = 0; b < p.rows.num_requests; ++b) {
      SPECDEC_REQUIRE(p.rule[b] <= static_cast<std::uint8_t>(AcceptanceRule::kBestBeam),
                      "acceptance[", b, "] = ", static_cast<int>(p.rule[b]),
                      ": an index into ops.ACCEPTANCE_RULES is needed");
      const AcceptanceParams rule = p.acceptance(b);
      SPECDEC_REQUIRE(
          rule.valid(), "request ", b, " has posterior_threshold = ", rule.posterior_threshold,
          ", posterior_alpha = ", rule.posterior_alpha, ", acceptance_threshold = ", rule.threshold,
          ": numbers in (0, 1] are needed");
    }
    std::vector<bool> taken(p.vocab_ids == nullptr ? 0 : static_cast<std::size_t>(p.rows.vocab));
    const bool listed = p.vocab_ids != nullptr && !p.own_ids;
    for (std::int32_t i = 0; listed && i < p.columns; ++i) {
      const TokenId id = p.vocab_ids[i];
      SPECDEC_REQUIRE(id >= 0 && id < p.rows.vocab, "vocab_ids[", i, "] = ", id,
                      ": token ids are 0..", p.rows.vocab - 1);
      SPECDEC_REQUIRE(!taken[id], "vocab_ids[", i, "] = ", id,
                      " is there twice: every token has one column");
      taken[id] = true;
    }
  }

  OpCall& call_;
  std::int64_t requests_, rows_;
  std::vector<BorrowedTensor> held_;
};

void accept_step(py::handle scores, py::handle cu_logits, py::handle positions,
                 const SamplingTensors& sampling, const DraftTensors& drafts,
                 const DecidedTensors& results, const CallOptions& where) {
  OpCall call("accept_step", where);
  const ScoresArgument rows(call, scores, cu_logits, positions);
  AcceptStepParams p;
  p.rows = rows.view();
  const std::int64_t requests = p.rows.num_requests;
  const SamplingArgument laws(call, sampling, requests);
  p.sampling = laws.view();
  const DraftsArgument held(call, drafts, &p);
  const DecidedArgument accepted(call, results, p.rows.rows, requests, &p);
  const std::int64_t scratch =
      call.is_cpu() ? 0
                    : accept_scratch_bytes(p.rows.num_requests, p.rows.vocab, p.probs != nullptr);
  p.exec = call.context(requests, scratch, scratch + laws_bytes(call, p.rows));
  call.run(&Backend::accept_step, p);
}

}  // namespace

void register_accept(py::module_& m) {
  m.def(
      "sample_rows",
      [](py::handle scores, py::handle cu_logits, py::handle positions, py::handle temperature,
         py::handle top_k, py::handle top_p, py::handle min_p, py::handle seed, py::handle out,
         py::handle probs, const std::string& purpose, py::object backend, std::uint64_t stream,
         py::object workspace, py::object status) {
        const CallOptions where{std::move(backend), stream, std::move(workspace),
                                std::move(status)};
        sample_rows(scores, cu_logits, positions, {temperature, top_k, top_p, min_p, seed}, out,
                    probs, purpose, where);
      },
      py::arg("scores"), py::arg("cu_logits"), py::arg("positions"), py::kw_only(),
      py::arg("temperature"), py::arg("top_k"), py::arg("top_p"), py::arg("min_p"), py::arg("seed"),
      py::arg("out"), py::arg("probs") = py::none(), py::arg("purpose") = "token",
      py::arg("backend") = py::none(), py::arg("stream") = 0, py::arg("workspace") = py::none(),
      py::arg("status") = py::none(), "See specdec_ext.ops.sample_rows.");
  m.def(
      "accept_step",
      [](py::handle scores, py::handle cu_logits, py::handle positions, py::handle tokens,
         py::handle parents, py::handle acceptance, py::handle temperature, py::handle top_k,
         py::handle top_p, py::handle min_p, py::handle seed, py::handle posterior_threshold,
         py::handle posterior_alpha, py::handle acceptance_threshold, py::handle probs,
         py::handle vocab_ids, py::handle draft_columns, py::handle has_probs,
         py::handle replacement, py::handle synthetic_rates, py::handle sampled, py::handle path,
         py::handle path_len, py::handle emitted, py::handle num_emitted, py::object backend,
         std::uint64_t stream, py::object workspace, py::object status) {
        const CallOptions where{std::move(backend), stream, std::move(workspace),
                                std::move(status)};
        accept_step(scores, cu_logits, positions, {temperature, top_k, top_p, min_p, seed},
                    {tokens, parents, acceptance, posterior_threshold, posterior_alpha,
                     acceptance_threshold, probs, vocab_ids, draft_columns, has_probs, replacement,
                     synthetic_rates},
                    {sampled, path, path_len, emitted, num_emitted}, where);
      },
      py::arg("scores"), py::arg("cu_logits"), py::arg("positions"), py::arg("tokens"),
      py::arg("parents"), py::arg("acceptance"), py::kw_only(), py::arg("temperature"),
      py::arg("top_k"), py::arg("top_p"), py::arg("min_p"), py::arg("seed"),
      py::arg("posterior_threshold") = py::none(), py::arg("posterior_alpha") = py::none(),
      py::arg("acceptance_threshold") = py::none(), py::arg("probs") = py::none(),
      py::arg("vocab_ids") = py::none(), py::arg("draft_columns") = py::none(),
      py::arg("has_probs") = py::none(), py::arg("replacement") = py::none(),
      py::arg("synthetic_rates") = py::none(), py::arg("sampled"), py::arg("path"),
      py::arg("path_len"), py::arg("emitted"), py::arg("num_emitted"),
      py::arg("backend") = py::none(), py::arg("stream") = 0, py::arg("workspace") = py::none(),
      py::arg("status") = py::none(), "See specdec_ext.ops.accept_step.");
  m.def(
      "accept_scratch_bytes",
      [](std::int32_t num_requests, std::int32_t vocab_size, bool has_probs) {
        SPECDEC_REQUIRE(num_requests >= 0 && num_requests <= kMostRequests,
                        "num_requests = ", num_requests, ": 0..", kMostRequests);
        SPECDEC_REQUIRE(vocab_size >= 0 && vocab_size <= kMaxLawTokens, "vocab_size = ", vocab_size,
                        ": 0..", kMaxLawTokens, " tokens can be drawn from");
        return accept_scratch_bytes(num_requests, vocab_size, has_probs);
      },
      py::arg("num_requests"), py::arg("vocab_size"), py::arg("has_probs"),
      "See specdec_ext.ops.accept_scratch_bytes.");
}

}  // namespace specdec

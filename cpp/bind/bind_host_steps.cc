// The steps that the host runs: plan() -> the caller's forward pass -> commit().
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "bind/bound_executor.h"

namespace py = pybind11;

namespace specdec {
namespace {

const HostSteps& host_of(const BoundExecutor& self) {
  const HostSteps* host = self.executor.host();
  SPECDEC_REQUIRE(host != nullptr, "the steps of this executor run on a device");
  return *host;
}

const StepPlan* plan(BoundExecutor& self) {
  const HostSteps& host = host_of(self);
  py::gil_scoped_release release;
  if (host.stage != HostSteps::Stage::kIdle) return self.executor.build();  // interrupted before
  self.outputs.clear();
  return self.executor.plan() == nullptr ? nullptr : self.executor.build();
}

// Steps that are due: all but `overlap_depth` of them.
std::vector<StepOutput> deliver_due(Executor& executor) {
  std::vector<StepOutput> outputs;
  while (executor.in_flight() > executor.config().overlap_depth) {
    std::vector<StepOutput> more = executor.deliver();
    std::move(more.begin(), more.end(), std::back_inserter(outputs));
  }
  return outputs;
}

// ops.DraftProbs of the step's decoding requests, in their second form, on the CPU; kept alive.
struct DrawnArgument {
  explicit DrawnArgument(const py::object& given) {
    if (given.is_none()) return;
    BorrowedTensor& probs = hold(given.attr("probs"), "probs", DType::kF32);
    SPECDEC_REQUIRE(probs->ndim == 3, "draft_probs.probs: expected [requests, drafts, columns]");
    const std::int64_t places = probs->shape[0] * probs->shape[1];
    view.probs = static_cast<const float*>(probs->data);
    view.requests = static_cast<std::int32_t>(probs->shape[0]);
    view.drafts_each = static_cast<std::int32_t>(probs->shape[1]);
    view.columns = static_cast<std::int32_t>(probs->shape[2]);
    if (const py::object ids = given.attr("vocab_ids"); !ids.is_none()) {
      const BorrowedTensor& tensor = hold(ids, "vocab_ids", DType::kI32);
      view.own_ids = tensor->ndim == 3;
      require_size(tensor, "vocab_ids", view.own_ids ? places * view.columns : view.columns);
      view.vocab_ids = static_cast<const TokenId*>(tensor->data);
    }
    if (const py::object columns = given.attr("draft_columns"); !columns.is_none()) {
      const BorrowedTensor& tensor = hold(columns, "draft_columns", DType::kI32);
      require_size(tensor, "draft_columns", places);
      view.draft_columns = static_cast<const std::int32_t*>(tensor->data);
    }
    view.has_probs = flags(given.attr("has_probs"), "has_probs");
    view.replacement = flags(given.attr("replacement"), "replacement");
  }

  StepDraftProbs view;

 private:
  BorrowedTensor& hold(const py::object& tensor, const char* name, DType dtype) {
    held_.emplace_back(tensor, name);
    check_cpu(held_.back().view(), name);
    check_contiguous(held_.back().view(), name);
    check_dtype(held_.back().view(), name, {dtype});
    return held_.back();
  }
  static void require_size(const BorrowedTensor& tensor, const char* name, std::int64_t wanted) {
    std::int64_t size = 1;
    for (int axis = 0; axis < tensor->ndim; ++axis) size *= tensor->shape[axis];
    SPECDEC_REQUIRE(size == wanted, "draft_probs.", name, " has ", size, " entries, probs say ",
                    wanted);
  }
  const std::uint8_t* flags(const py::object& tensor, const char* name) {
    if (tensor.is_none()) return nullptr;
    const BorrowedTensor& held = hold(tensor, name, DType::kU8);
    require_size(held, name, view.requests);
    return static_cast<const std::uint8_t*>(held->data);
  }

  std::deque<BorrowedTensor> held_;
};

HiddenRows hidden_rows(const py::object& hidden, const py::object& kept, std::int64_t rows,
                       std::int64_t slots) {
  if (hidden.is_none()) return {};
  const TensorView from = to_view(hidden, "hidden"), to = to_view(kept, "kept", true);
  const std::int64_t width = from.ndim == 2 ? from.shape[1] : 0;
  SPECDEC_REQUIRE(from.device == DeviceType::kCpu && from.ndim == 2 && from.shape[0] == rows &&
                      from.strides[1] == 1,
                  "hidden: expected a CPU tensor [num_logit_rows, hidden_size]");
  SPECDEC_REQUIRE(
      to.device == DeviceType::kCpu && to.ndim == 2 && to.shape[0] == slots &&
          to.shape[1] == width && to.dtype == from.dtype && to.is_contiguous(),
      "kept: expected a contiguous CPU tensor [max_batch_size, hidden_size] of hidden's "
      "dtype");
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(from.dtype));
  return {static_cast<const std::byte*>(from.data), static_cast<std::byte*>(to.data),
          from.strides[0] * bytes, width * bytes};
}

Outputs commit(BoundExecutor& self, const StepPlan& plan, const py::object& result,
               const py::object& raw, std::map<RequestId, std::string> errors,
               const std::map<RequestId, py::object>& masks, const py::object& hidden,
               const py::object& kept, const py::object& draft_probs, const py::object& best) {
  const int vocab_size = self.executor.config().vocab_size;
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
    SPECDEC_REQUIRE(view.shape[1] == vocab_size, "scores have ", view.shape[1],
                    " columns, vocab_size is ", vocab_size);
    scores = static_cast<const float*>(view.data);
    row_stride = view.strides[0];
  }
  SPECDEC_REQUIRE(view.shape[0] == plan.num_logit_rows, "result has ", view.shape[0],
                  " rows, the plan asks for ", plan.num_logit_rows);
  if (!best.is_none()) {
    const TensorView known = to_view(best, "best");
    SPECDEC_REQUIRE(scores != nullptr && known.device == DeviceType::kCpu && known.ndim == 1 &&
                        known.dtype == DType::kI32 && known.is_contiguous() &&
                        known.shape[0] == plan.num_logit_rows,
                    "best: expected a contiguous int32 CPU tensor [num_logit_rows] beside scores");
    ids = static_cast<const TokenId*>(known.data);
  }
  ScoreChanges changes;
  const HostWordsArgument words(std::move(errors), masks);
  changes.words = words.view;
  if (!raw.is_none()) {
    const TensorView model = to_view(raw, "raw");
    SPECDEC_REQUIRE(scores != nullptr && model.device == DeviceType::kCpu &&
                        model.dtype == DType::kF32 && model.ndim == 2 && model.strides[1] == 1 &&
                        model.shape[0] == view.shape[0] && model.shape[1] == view.shape[1],
                    "raw: expected the model's float32 scores in the shape of result");
    changes.raw = static_cast<const float*>(model.data);
    changes.raw_stride = model.strides[0];
  }
  const HiddenRows rows =
      hidden_rows(hidden, kept, plan.num_logit_rows, self.executor.config().max_batch_size);
  const DrawnArgument drawn(draft_probs);
  py::gil_scoped_release release;
  self.executor.commit(plan, ids, scores, row_stride, changes, rows, drawn.view);
  return self.outputs.keep(deliver_due(self.executor));
}

Outputs fail(BoundExecutor& self, const StepPlan& plan, const std::string& message) {
  std::vector<StepOutput> outputs = self.executor.fail_planned(plan, message);
  std::vector<StepOutput> more = deliver_due(self.executor);
  std::move(more.begin(), more.end(), std::back_inserter(outputs));
  return self.outputs.keep(std::move(outputs));
}

}  // namespace

void def_host_steps(py::class_<BoundExecutor>& executor) {
  executor
      .def("plan", &plan, py::return_value_policy::reference_internal,
           "The next step, or None when there is nothing to run: stage() and build() in one call. "
           "Before commit() or fail() it is the same step again, so that whoever was interrupted "
           "can resume it.")
      .def(
          "build", [](BoundExecutor& self) { return self.executor.build(); },
          py::return_value_policy::reference_internal, py::call_guard<py::gil_scoped_release>(),
          "The arrays of the step that stage() opened, with the drafts that its slots have.")
      .def(
          "draft", [](BoundExecutor& self) { return self.executor.draft(); },
          "Between stage() and build(): makes the step's drafts. Returns the ChoiceTrees of "
          "requests "
          "with a grammar.")
      .def(
          "cut",
          [](BoundExecutor& self, RequestId id, const std::vector<std::uint8_t>& kept) {
            self.executor.cut(id, kept);
          },
          py::arg("request_id"), py::arg("kept"),
          "Between draft() and build(): takes the nodes out of a request's tree that `kept` "
          "[nodes] "
          "is 0 of, and what is below them. The first ChoiceTree.fixed stay.")
      .def(
          "commit", &commit, py::arg("plan"), py::arg("result"), py::kw_only(),
          py::arg("raw") = py::none(), py::arg("errors") = std::map<RequestId, std::string>{},
          py::arg("masks") = std::map<RequestId, py::object>{}, py::arg("hidden") = py::none(),
          py::arg("kept") = py::none(), py::arg("draft_probs") = py::none(),
          py::arg("best") = py::none(),
          "result: int32 greedy ids [L], or float32 scores [L, V] if plan.needs_logits. Where the "
          "caller changed scores: raw, the model's own [L, V], for logprobs; errors, by request "
          "id: those requests end with that message. masks, by request id, of every tree with a "
          "grammar: int32 [nodes, words], a bit for each token that may follow the node; no nodes "
          "where no mask changes a choice. hidden "
          "[L, H], the head's inputs of the rows: "
          "the "
          "one that each request's last token was chosen after is copied to its slot's row of kept "
          "[max_batch_size, H]. draft_probs: what the drafts of the step's decoding requests were "
          "drawn from, ops.DraftProbs in their second form. best: beside scores, int32 [L], the "
          "best "
          "token of each row as the model gave it, -1 where one is NaN, if it is known. Returns "
          "what is due: the step's own "
          "outputs "
          "at overlap_depth 0, those of the step `overlap_depth` before it else.")
      .def("fail", &fail, py::arg("plan"), py::arg("message"),
           py::call_guard<py::gil_scoped_release>(),
           "The forward pass failed: the plan's requests end with an error, others go on.")
      .def_property_readonly(
          "host_slots",
          [](const py::object& self) {
            const HostSteps& host = host_of(self.cast<const BoundExecutor&>());
            const std::vector<py::ssize_t> shape{host.slots.count,
                                                 static_cast<py::ssize_t>(host.slots.bytes)};
            return py::array_t<std::uint8_t>(
                shape, reinterpret_cast<const std::uint8_t*>(host.memory.get()), self);
          },
          "uint8 [max_batch_size, slot_layout.slot_bytes], the executor's own memory.")
      .def_property_readonly(
          "host_staging",
          [](const py::object& self) {
            const auto& bound = self.cast<const BoundExecutor&>();
            const HostSteps& host = host_of(bound);
            const std::vector<py::ssize_t> shape{bound.executor.ring_size(),
                                                 bound.executor.staging_layout().words};
            return py::array_t<std::int32_t>(shape, host.staging.data(), self);
          },
          "int32 [ring_size, staging_layout.words], the executor's own memory.");
}

}  // namespace specdec

// The steps that a caller enqueues on a device: stage() -> operations on a stream -> deliver().
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "bind/bound_executor.h"

namespace py = pybind11;

namespace specdec {
namespace {

void bind_rings(BoundExecutor& self, py::handle staging, py::handle entries, py::handle results,
                py::handle scores, py::handle trees) {
  Executor& executor = self.executor;
  const auto ring = [&](py::handle given, const char* name, DType dtype, const char* axes,
                        std::initializer_list<std::int64_t> shape) {
    BorrowedTensor tensor(given, name, true);
    check_cpu(tensor.view(), name);
    check_contiguous(tensor.view(), name);
    check_dtype(tensor.view(), name, {dtype});
    check_shape(tensor.view(), name, axes, shape);
    return tensor;
  };
  const std::int64_t size = executor.ring_size();
  const char* words = "[ring_size, words]";
  BorrowedTensor to =
      ring(staging, "staging", DType::kI32, words, {size, executor.staging_layout().words});
  BorrowedTensor slots =
      ring(entries, "entries", DType::kU8, words, {size, executor.entry_bytes()});
  BorrowedTensor from =
      ring(results, "results", DType::kI32, words, {size, executor.result_words()});
  BorrowedTensor rows =
      ring(scores, "scores", DType::kF32, "[ring_size, max_host_rows, vocab_size]",
           {size, executor.max_host_rows(), executor.config().vocab_size});
  BorrowedTensor drafted = ring(trees, "trees", DType::kI32, "[ring_size, max_batch_size, words]",
                                {size, executor.config().max_batch_size, executor.tree_words()});
  executor.bind_rings({static_cast<std::int32_t*>(to->data), static_cast<std::byte*>(slots->data),
                       static_cast<const std::int32_t*>(from->data),
                       static_cast<const float*>(rows->data),
                       static_cast<const std::int32_t*>(drafted->data)});
  self.staging = std::move(to);
  self.entries = std::move(slots);
  self.results = std::move(from);
  self.scores = std::move(rows);
  self.trees = std::move(drafted);
}

Outputs deliver(BoundExecutor& self, const py::object& scores,
                std::map<RequestId, std::string> errors,
                const std::map<RequestId, py::object>& masks) {
  std::optional<BorrowedTensor> rows;
  if (!scores.is_none()) {
    rows.emplace(scores, "scores");
    check_cpu(rows->view(), "scores");
    check_contiguous(rows->view(), "scores");
    check_dtype(rows->view(), "scores", {DType::kF32});
    check_shape(rows->view(), "scores", "[oldest_host_rows, vocab_size]",
                {self.executor.oldest_host_rows(), self.executor.config().vocab_size});
  }
  const HostWordsArgument words(std::move(errors), masks);
  py::gil_scoped_release release;
  return self.outputs.keep(
      self.executor.deliver(rows ? static_cast<const float*>((*rows)->data) : nullptr, words.view));
}

}  // namespace

void def_device_steps(py::class_<BoundExecutor>& executor) {
  executor
      .def_property_readonly(
          "overlap_depth",
          [](const BoundExecutor& self) { return self.executor.config().overlap_depth; })
      .def_property_readonly("ring_size",
                             [](const BoundExecutor& self) { return self.executor.ring_size(); })
      .def_property_readonly(
          "max_rows_per_request",
          [](const BoundExecutor& self) { return self.executor.max_rows_per_request(); },
          "Rows of a decoding request in one step, at most.")
      .def_property_readonly("entry_bytes",
                             [](const BoundExecutor& self) { return self.executor.entry_bytes(); })
      .def_property_readonly("result_words",
                             [](const BoundExecutor& self) { return self.executor.result_words(); })
      .def_property_readonly("slot_layout",
                             [](const BoundExecutor& self) { return self.executor.slot_layout(); })
      .def_property_readonly(
          "staging_layout",
          [](const BoundExecutor& self) { return self.executor.staging_layout(); })
      .def("bind_rings", &bind_rings, py::kw_only(), py::arg("staging"), py::arg("entries"),
           py::arg("results"), py::arg("scores"), py::arg("trees"),
           "Host memory that the executor writes and reads: staging [ring_size, words] int32, "
           "entries [ring_size, entry_bytes] uint8, results [ring_size, result_words] int32, "
           "scores [ring_size, max_host_rows, vocab_size] float32, trees [ring_size, "
           "max_batch_size, tree_words] int32.")
      .def_property_readonly(
          "tree_words", [](const BoundExecutor& self) { return self.executor.tree_words(); },
          "Words of a draft tree in a slot.")
      .def_property_readonly(
          "tree_offset", [](const BoundExecutor&) { return offsetof(Slot, tree); },
          "Where a slot's draft tree lies, in bytes.")
      .def(
          "stage",
          [](BoundExecutor& self) -> std::optional<StagedStep> {
            const HostSteps* host = self.executor.host();
            if (host != nullptr && host->stage != HostSteps::Stage::kIdle) {
              return self.executor.newest();  // its caller was interrupted
            }
            const StagedStep* step = nullptr;
            {
              py::gil_scoped_release release;
              self.outputs.clear();
              step = self.executor.plan();
            }
            if (step == nullptr) return std::nullopt;
            return *step;
          },
          "The next step, or None when there is nothing to enqueue now.")
      .def(
          "newest", [](const BoundExecutor& self) { return self.executor.newest(); },
          "The step that stage() brought last, again.")
      .def_property_readonly(
          "steps_in_flight",
          [](const BoundExecutor& self) { return self.executor.steps_in_flight(); },
          "The indices of the steps in flight, oldest first.")
      .def(
          "deliver", &deliver, py::arg("scores") = py::none(),
          py::arg("errors") = std::map<RequestId, std::string>{},
          py::arg("masks") = std::map<RequestId, py::object>{},
          "What the oldest step in flight brought; its event must have completed. Where the caller "
          "changed the scores that the host reads: scores [oldest_host_rows, vocab_size] float32; "
          "errors, by request id: those requests end with that message. masks: as commit() takes "
          "them.")
      .def_property_readonly(
          "oldest_host_rows",
          [](const BoundExecutor& self) { return self.executor.oldest_host_rows(); },
          "Rows of scores that the host reads of the oldest step in flight.")
      .def_property_readonly(
          "oldest_ring", [](const BoundExecutor& self) { return self.executor.oldest_ring(); },
          "The place of the oldest step in flight in the rings.")
      .def_property_readonly(
          "max_host_rows", [](const BoundExecutor& self) { return self.executor.max_host_rows(); },
          "Rows of one step whose scores the host reads, at most.")
      .def_property_readonly(
          "vocab_size", [](const BoundExecutor& self) { return self.executor.config().vocab_size; })
      .def(
          "fail_step",
          [](BoundExecutor& self, std::int64_t index, const std::string& message) {
            return self.outputs.keep(self.executor.fail(index, message));
          },
          py::arg("index"), py::arg("message"), py::call_guard<py::gil_scoped_release>(),
          "The step could not be enqueued: its requests end with an error. It is still delivered.");
}

}  // namespace specdec

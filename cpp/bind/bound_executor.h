// The executor together with the Python objects whose memory it points into.
#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <map>
#include <string>
#include <utility>

#include "base/check.h"
#include "bind/dlpack_convert.h"
#include "bind/page_pools_object.h"
#include "engine/executor.h"
#include "engine/output_queue.h"

namespace specdec {

struct BoundExecutor {
  explicit BoundExecutor(const ExecutorConfig& config) : executor(config) {}

  RequestId submit(RequestParams params, const ProposedProbs& external_probs) {
    const int at_once = params.outputs_at_once;
    const RequestId id = executor.submit(std::move(params), external_probs);
    outputs.hold(id, at_once);  // a step that came first has delivered each by itself
    return id;
  }

  pybind11::object k_pages, v_pages;
  pybind11::object page_pools;  // a PagePoolsObject
  Executor executor;
  OutputQueue outputs;
  BorrowedTensor staging, entries, results, scores, trees;
};

// HostWords of Python's dictionaries; masks are int32 or uint32 [nodes, words] on the CPU, kept
// alive.
struct HostWordsArgument {
  HostWordsArgument(std::map<RequestId, std::string> errors,
                    const std::map<RequestId, pybind11::object>& masks) {
    view.errors = std::move(errors);
    for (const auto& [id, rows] : masks) {
      const BorrowedTensor& tensor = held_.emplace_back(rows, "masks");
      check_cpu(tensor.view(), "masks");
      check_contiguous(tensor.view(), "masks");
      check_dtype(tensor.view(), "masks", {DType::kI32});
      SPECDEC_REQUIRE(tensor->ndim == 2, "masks: expected [nodes, words] for each request");
      view.masks[id] = {static_cast<const std::uint32_t*>(tensor->data),
                        static_cast<int>(tensor->shape[0]), static_cast<int>(tensor->shape[1])};
    }
  }

  HostWords view;

 private:
  std::deque<BorrowedTensor> held_;
};

// The step as the host runs it, and as a device's caller enqueues it.
void def_host_steps(pybind11::class_<BoundExecutor>& executor);
void def_device_steps(pybind11::class_<BoundExecutor>& executor);

}  // namespace specdec

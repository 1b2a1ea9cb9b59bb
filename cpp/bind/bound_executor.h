// The executor together with the Python objects whose memory it points into.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "bind/dlpack_convert.h"
#include "engine/executor.h"
#include "engine/output_queue.h"

namespace specdec {

struct BoundExecutor {
  explicit BoundExecutor(const ExecutorConfig& config) : executor(config) {}

  RequestId submit(RequestParams params, const ProposedProbs& external_probs) {
    return executor.submit(std::move(params), external_probs);
  }

  pybind11::object k_pages, v_pages;
  Executor executor;
  OutputQueue outputs;
  BorrowedTensor staging, entries, results, scores, trees;
};

// The step as the host runs it, and as a device's caller enqueues it.
void def_host_steps(pybind11::class_<BoundExecutor>& executor);
void def_device_steps(pybind11::class_<BoundExecutor>& executor);

}  // namespace specdec

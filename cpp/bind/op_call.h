// One call of a device operation from Python: which backend runs it, where its tensors lie, what
// its kernels may touch. Arguments are converted through it (op_arguments.h), then run() calls.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backend/registry.h"
#include "base/tensor_view.h"
#include "bind/dlpack_convert.h"

namespace specdec {

// The keywords that every operation takes: where and how it runs, not what it computes.
struct CallOptions {
  pybind11::object backend;    // name, or None: by the tensors' device
  std::uint64_t stream = 0;    // cudaStream_t as an integer; 0: the default stream
  pybind11::object workspace;  // tensor of any dtype, a function from bytes to one, or None
  pybind11::object status;     // [B] uint32 or int32 StatusFlag bits, OR-ed in; or None
};

class OpCall {
 public:
  // `operation` is the Python function's name, for error texts.
  OpCall(const char* operation, const CallOptions& options);

  // Every tensor of the call, in the order in which they are converted. The first decides the
  // device; ValueError if one of the others lies elsewhere or the backend takes none from there.
  void add(const TensorView& view, const char* name, bool writable = false);

  // After the first add(): the backend, and whether lengths, page ids, masks and paths can be
  // checked value by value. Device memory is not read, so its kernels check for themselves.
  const Backend& backend() const { return *backend_; }
  bool reads_values() const { return backend_->reads_values_on_host; }
  bool is_cpu() const { return reads_values(); }
  int device_index() const { return device_index_; }

  // Where the operation runs, with `status` checked against the number of requests. A workspace
  // must have `needed` bytes; a function is asked for the larger of `needed` and `wanted`.
  ExecutionContext context(std::int64_t num_requests, std::int64_t needed = 0,
                           std::int64_t wanted = 0);

  // For an emulated backend: of all that was named so far, what is enqueued right before the call
  // writes this alone, or does it by kernels of the same backend.
  void settle_all_but(std::string_view name);

  // Calls the operation without the GIL. RuntimeError if the backend does not have it.
  template <typename Params>
  void run(void (*Backend::*operation)(const Params&), const Params& params) {
    void (*const function)(const Params&) = backend_->*operation;
    if (function == nullptr) refuse_missing();
    pybind11::gil_scoped_release release;
    const Exposure exposure(*this);
    function(params);
  }

 private:
  struct Memory {
    const char* name;
    const void* data;
    std::int64_t bytes;
    bool writable;
    bool settled;
  };
  // Shows the call's memory to an emulated backend, one call at a time; nothing elsewhere.
  class Exposure {
   public:
    explicit Exposure(const OpCall& call);
    ~Exposure();

   private:
    const Backend& backend_;
  };

  [[noreturn]] void refuse_missing() const;

  const char* operation_;
  const CallOptions& options_;
  const Backend* backend_ = nullptr;
  DeviceType device_ = DeviceType::kCpu;
  int device_index_ = 0;
  std::vector<Memory> memory_;
  BorrowedTensor workspace_, status_;
};

}  // namespace specdec

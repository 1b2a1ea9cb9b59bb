#include "bind/op_call.h"

#include <algorithm>
#include <mutex>
#include <string_view>

#include "base/check.h"

namespace py = pybind11;

namespace specdec {
namespace {

std::string place_of(DeviceType device, int index) {
  return device == DeviceType::kCpu ? "the CPU" : detail::join("cuda:", index);
}

// An emulator is one per process: its calls come one after another.
std::mutex& emulation_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

OpCall::OpCall(const char* operation, const CallOptions& options)
    : operation_(operation), options_(options) {
  if (!options.backend.is_none()) {
    if (!py::isinstance<py::str>(options.backend)) {
      throw py::type_error(detail::join("backend is a ", Py_TYPE(options.backend.ptr())->tp_name,
                                        ": give a name or None"));
    }
    backend_ = &find_backend(options.backend.cast<std::string>());
  }
}

void OpCall::add(const TensorView& view, const char* name, bool writable) {
  if (memory_.empty()) {
    if (backend_ == nullptr) {
      if (view.device == DeviceType::kCuda && cuda_backend() == nullptr) {
        throw py::value_error(detail::join(
            name, " is on ", place_of(view.device, view.device_index), ": ", cuda_info().reason));
      }
      backend_ = view.device == DeviceType::kCuda ? cuda_backend() : &cpu_backend();
    }
    SPECDEC_REQUIRE(view.device == backend_->memory, name, " is on ",
                    place_of(view.device, view.device_index), ": backend \"", backend_->name,
                    "\" takes tensors on ",
                    backend_->memory == DeviceType::kCpu ? "the CPU" : "a CUDA device");
    device_ = view.device;
    device_index_ = view.device_index;
  }
  SPECDEC_REQUIRE(view.device == device_ && view.device_index == device_index_, name, " is on ",
                  place_of(view.device, view.device_index), ", ", memory_.front().name, " on ",
                  place_of(device_, device_index_), ": all tensors of a call are on one device");
  const TensorView::Span span = view.span();
  const auto element = static_cast<std::int64_t>(dtype_bytes(view.dtype));
  memory_.push_back({name, static_cast<const char*>(view.data) + span.begin * element,
                     (span.end - span.begin) * element, writable, false});
}

void OpCall::settle_all_but(std::string_view name) {
  for (Memory& m : memory_) m.settled = m.name != name;
}

ExecutionContext OpCall::context(std::int64_t num_requests, std::int64_t needed,
                                 std::int64_t wanted) {
  ExecutionContext exec;
  exec.stream = reinterpret_cast<void*>(static_cast<std::uintptr_t>(options_.stream));
  exec.device = device_index_;
  if (!options_.status.is_none()) {
    status_ = BorrowedTensor(options_.status, "status", true);
    check_shape(status_.view(), "status", "[B]", {num_requests});
    check_dtype(status_.view(), "status", {DType::kU32, DType::kI32});
    check_contiguous(status_.view(), "status");
    add(status_.view(), "status", true);
    exec.status = static_cast<std::uint32_t*>(status_->data);
  }
  py::object scratch = options_.workspace;
  if (PyCallable_Check(scratch.ptr()) != 0) {
    const std::int64_t bytes = std::max(needed, wanted);
    scratch = bytes > 0 ? scratch(bytes) : py::none();
  }
  if (!scratch.is_none()) {
    workspace_ = BorrowedTensor(scratch, "workspace", true);
    check_contiguous(workspace_.view(), "workspace");
    add(workspace_.view(), "workspace", true);
    // Kernels want it to begin at a multiple of 256 bytes; not every allocator gives that.
    const std::int64_t bytes =
        workspace_->numel() * static_cast<std::int64_t>(dtype_bytes(workspace_->dtype));
    const auto address = reinterpret_cast<std::uintptr_t>(workspace_->data);
    const auto skipped = static_cast<std::int64_t>((256 - address % 256) % 256);
    if (bytes > skipped) {
      exec.workspace = static_cast<char*>(workspace_->data) + skipped;
      exec.workspace_bytes = bytes - skipped;
    }
  }
  SPECDEC_REQUIRE(exec.workspace_bytes >= needed, "workspace has ", exec.workspace_bytes,
                  " bytes from its first multiple of 256 on: ", operation_, " needs ", needed,
                  " here",
                  std::string_view(operation_) == "spec_attention" ? " (ops.plan_workspace)" : "");
  return exec;
}

void OpCall::refuse_missing() const {
  throw std::runtime_error(detail::join("backend \"", backend_->name, "\" has no ", operation_));
}

OpCall::Exposure::Exposure(const OpCall& call) : backend_(*call.backend_) {
  if (backend_.expose == nullptr) return;
  emulation_mutex().lock();
  // If a call names memory twice (q_out may be q) the first mention counts: what it may write.
  for (const bool writable : {true, false}) {
    for (const Memory& m : call.memory_) {
      if (m.writable == writable) backend_.expose(m.data, m.bytes, m.name, writable, m.settled);
    }
  }
}

OpCall::Exposure::~Exposure() {
  if (backend_.expose == nullptr) return;
  backend_.conceal();
  emulation_mutex().unlock();
}

}  // namespace specdec

// Stands in for CUDA's runtime library: a device that runs the PTX of the program it is linked
// with. Host code that nvcc compiled registers its fat binaries and launches kernels here;
// everything that it calls is below, and nothing else, so that a new call is an undefined symbol.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "ptx/machine.h"
#include "ptx/tensor_map.h"
#include "simt/emulated_device.h"

namespace ptx {
namespace {

struct FatBinary {
  const char* bytes;
  std::map<int, std::string_view> texts;  // by the target's number
  std::map<int, std::unique_ptr<Module>> modules;
};
struct Kernel {
  FatBinary* binary;
  std::string name;
  std::map<int, std::unique_ptr<Program>> programs;
};

// Blocks of a fat binary: a header of 16 bytes, then entries, each with a header of its own. PTX is
// an entry of kind 1; it is text because the build asks for no compression.
template <class T>
T field(const char* at) {
  T value;
  memcpy(&value, at, sizeof value);
  return value;
}
void read_texts(FatBinary& f) {
  if (field<std::uint32_t>(f.bytes) != 0xba55ed50) throw Error("not a fat binary");
  const char* at = f.bytes + field<std::uint16_t>(f.bytes + 6);
  const char* const end = at + field<std::uint64_t>(f.bytes + 8);
  while (at < end) {
    const auto header = field<std::uint32_t>(at + 4);
    const auto size = field<std::uint64_t>(at + 8);
    if (field<std::uint16_t>(at) == 1) {
      const std::string_view text(at + header, size);
      const std::size_t target = text.find(".target sm_");
      if (target == text.npos) throw Error("compressed PTX: build with -no-compress");
      f.texts[std::atoi(text.data() + target + 11)] = text.substr(0, text.find('\0'));
    }
    at += header + size;
  }
}

struct Runtime {
  std::mutex mutex;
  std::map<void**, std::unique_ptr<FatBinary>> binaries;
  std::unordered_map<const void*, Kernel> kernels;
  std::map<std::string, unsigned> launches;
  std::set<cudaStream_t> streams;  // that were given something since synchronize()
  std::uint64_t seed = 0;
  std::string message = "no error";
  ~Runtime() {
    const char* path = std::getenv("SPECDEC_PTX_LAUNCHES");
    if (path == nullptr) return;
    if (std::FILE* file = std::fopen(path, "a")) {
      for (const auto& [name, n] : launches) std::fprintf(file, "%u %s\n", n, name.c_str());
      std::fclose(file);
    }
  }
};
Runtime& runtime() {
  static Runtime r;
  return r;
}

cudaError_t fail(const std::string& what) {
  runtime().message = what;
  return cudaErrorLaunchFailure;
}

// As a driver chooses: the newest that the device can run; 0: none.
int best_target(const FatBinary& f) {
  const auto limits = specdec::emulated_limits();
  int best = 0;
  for (const auto& [target, text] : f.texts) {
    if (target <= limits.major * 10 + limits.minor) best = std::max(best, target);
  }
  return best;
}

Program& program_of(Kernel& k, int target) {
  std::unique_ptr<Program>& program = k.programs[target];
  if (program == nullptr) {
    std::unique_ptr<Module>& module = k.binary->modules[target];
    if (module == nullptr) module = parse(k.binary->texts.at(target));
    program = link(*module, k.name, kSharedBase);
  }
  return *program;
}
Kernel& kernel_of(const void* function) {
  const auto found = runtime().kernels.find(function);
  if (found == runtime().kernels.end()) throw Error("not a kernel");
  return found->second;
}

cudaError_t launch(const void* function, const cudaLaunchConfig_t& config, void** arguments) {
  Runtime& r = runtime();
  const std::lock_guard lock(r.mutex);
  try {
    Kernel& k = kernel_of(function);
    const auto limits = specdec::emulated_limits();
    if (config.dynamicSmemBytes > std::size_t(limits.shared_bytes)) {
      throw Error(k.name + ": more shared memory than the device has");
    }
    const int target = best_target(*k.binary);
    r.launches[k.name + " sm_" + std::to_string(target)]++;
    r.streams.insert(config.stream);
    Launch l;
    l.grid = {config.gridDim.x, config.gridDim.y, config.gridDim.z};
    l.block = {config.blockDim.x, config.blockDim.y, config.blockDim.z};
    l.dynamic_bytes = unsigned(config.dynamicSmemBytes);
    l.arguments = arguments, l.seed = r.seed;
    const auto start = std::chrono::steady_clock::now();
    run(program_of(k, target), l);
    if (std::getenv("SPECDEC_PTX_TIMES")) {
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      std::fprintf(stderr, "%7.3f s, %u blocks of %u: %s\n", took.count(),
                   l.grid.x * l.grid.y * l.grid.z, l.block.x * l.block.y * l.block.z,
                   k.name.c_str());
    }
    return cudaSuccess;
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}

CUresult encode_tensor_map(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* base,
                           const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                           const cuuint32_t* every, CUtensorMapInterleave,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                           CUtensorMapFloatOOBfill) {
  TensorMap t = {};
  t.magic = kTensorMapMagic, t.base = reinterpret_cast<std::uint64_t>(base);
  t.rank = std::uint8_t(rank);
  t.element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8    ? 1
              : type == CU_TENSOR_MAP_DATA_TYPE_UINT16 ? 2
              : type == CU_TENSOR_MAP_DATA_TYPE_UINT32 ? 4
                                                       : 0;
  t.span = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE   ? 0
           : swizzle == CU_TENSOR_MAP_SWIZZLE_32B  ? 32
           : swizzle == CU_TENSOR_MAP_SWIZZLE_64B  ? 64
           : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128
                                                   : 1;
  if (t.element == 0 || t.span == 1 || rank < 1 || rank > 5 || t.base % 16) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (unsigned i = 0; i < 5; i++) {
    t.dims[i] = 1, t.box[i] = 1;
    if (i == 0) t.strides[0] = t.element;
    if (i >= rank) continue;
    if (!dims[i] || dims[i] > 1ull << 32 || !box[i] || box[i] > 256 || every[i] != 1) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    t.dims[i] = std::uint32_t(std::min<std::uint64_t>(dims[i], ~0u));
    t.box[i] = std::uint16_t(box[i]);
    if (i == 0) continue;
    t.strides[i] = strides[i - 1];
    if (t.strides[i] % 16 || t.strides[i] >> 40) return CUDA_ERROR_INVALID_VALUE;
  }
  const unsigned inner = box[0] * t.element;
  // A box narrower than its swizzle is not what any kernel here uses: rows would be padded.
  if (inner % 16 || (t.span && inner != t.span)) return CUDA_ERROR_INVALID_VALUE;
  memcpy(static_cast<void*>(out), &t, sizeof t);
  return CUDA_SUCCESS;
}

}  // namespace

void seed(std::uint64_t s) { runtime().seed = s; }

std::size_t synchronize(std::uintptr_t* streams, std::size_t room) {
  std::size_t n = 0;
  for (const cudaStream_t stream : runtime().streams) {
    if (n < room) streams[n] = reinterpret_cast<std::uintptr_t>(stream);
    n++;
  }
  runtime().streams.clear();
  return n;
}

}  // namespace ptx

using ptx::runtime;

extern "C" {

// ---- what nvcc's host code calls ----------------------------------------------------------------
void** __cudaRegisterFatBinary(void* wrapper) {
  auto binary = std::make_unique<ptx::FatBinary>();
  binary->bytes = ptx::field<const char*>(static_cast<const char*>(wrapper) + 8);
  ptx::read_texts(*binary);
  const auto handle = static_cast<void**>(wrapper);
  runtime().binaries[handle] = std::move(binary);
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  runtime().kernels[host] = {runtime().binaries.at(handle).get(), name, {}};
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { std::abort(); }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return ptx::fail("<<<>>> is not used: gpu::launch");
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return ptx::fail("<<<>>> is not used: gpu::launch");
}

// ---- CUDA's interface ---------------------------------------------------------------------------
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  return ptx::launch(function, *config, arguments);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  try {
    *attributes = {};
    attributes->ptxVersion = ptx::best_target(*ptx::kernel_of(function).binary);
    return attributes->ptxVersion == 0 ? cudaErrorNoKernelImageForDevice : cudaSuccess;
  } catch (const std::exception& error) {
    return ptx::fail(error.what());
  }
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  const int most = specdec::emulated_limits().shared_bytes;
  return value <= most ? cudaSuccess : ptx::fail("more shared memory than the device has");
}
cudaError_t cudaFuncGetName(const char** name, const void* function) {
  const auto found = runtime().kernels.find(function);
  if (found == runtime().kernels.end()) return cudaErrorInvalidDeviceFunction;
  *name = found->second.name.c_str();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const specdec::DeviceLimits limits = specdec::emulated_limits();
  *value = which == cudaDevAttrComputeCapabilityMajor ? limits.major : limits.minor;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
const char* cudaGetErrorString(cudaError_t) { return runtime().message.c_str(); }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMallocManaged(void** out, size_t bytes, unsigned) {
  *out = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  ptx::expose(*out, bytes, "managed memory", true);
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::string(symbol) == "cuTensorMapEncodeTiled";
  *entry = known ? reinterpret_cast<void*>(ptx::encode_tensor_map) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"

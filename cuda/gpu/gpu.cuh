// The instructions that CUDA C++ has no name for, and launches. Kernels use these and have no asm
// of their own, so that the same source also runs on the CPU: tests/simt/ptx_sm80.h holds the other
// body of each. This file and hopper.cuh are the only ones that know which compiler reads them.
#pragma once
#if !defined(__CUDACC__)
#include "simt/ptx_sm80.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "backend/cuda_versions.h"

namespace specdec::gpu {

// The block's dynamic shared memory.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return reinterpret_cast<T*>(bytes);
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// (a & mask) | bits as one instruction; of two immediates the compiler makes two.
__device__ __forceinline__ std::uint32_t and_or(std::uint32_t a, std::uint32_t mask,
                                                std::uint32_t bits) {
  std::uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

// Starts copying 16 bytes from global to shared memory, or zeros when not valid (src is then not
// read, but has to be a pointer into the same array).
__device__ __forceinline__ void cp_async_16(void* dst, const void* src, bool valid = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(dst)),
               "l"(src), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ std::uint64_t l2_evict_normal() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ std::uint64_t l2_evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Has L2 fetch what lies at an address, for a later load. It reads no value, so it needs no wait
// for whoever may still write there.
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane 8i+r passes the address of row r of matrix i.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
}

// Two matrices: lanes 0..15 pass the addresses of their rows, those of the others are ignored.
__device__ __forceinline__ void ldmatrix_x2(std::uint32_t (&d)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(shared_address(row))
               : "memory");
}

// c += a b, with a 16x16, b 16x8, c 16x8; T is __nv_bfloat16 or __half.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const std::uint32_t (&a)[4],
                                             std::uint32_t b0, std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// 2^x by the special function unit; 2^-inf = 0, 2^0 = 1 exactly.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Words that blocks hand to each other. A release makes what the thread wrote (or learned at a
// barrier) before it visible to whoever acquires its value; relaxed orders nothing.
__device__ __forceinline__ unsigned load_relaxed(const unsigned* p) {
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release(unsigned* p, unsigned v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ unsigned atomic_add_acq_rel(unsigned* p, unsigned v) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}

// Programmatic dependent launch. A kernel launched with `dependent` may start while the one before
// it on the stream still runs: it calls grid_dependency_wait() before it reads what that one wrote.
// launch_dependents() says that the next may start.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The same if `needed`: a branch would have the compiler copy what follows.
__device__ __forceinline__ void grid_dependency_wait_if(bool needed) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p griddepcontrol.wait;\n"
      "}\n" ::"r"(needed ? 1 : 0)
      : "memory");
#else
  (void)needed;
#endif
}
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct LaunchOptions {
  bool dependent = false;
};

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

// The current device, its driver and this package, where these do not fit together.
inline std::string image_fault_here() {
  int device = 0, major = 0, minor = 0, driver = 0, runtime = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  return image_fault(major, minor, driver, runtime);
}

// The same for a kernel, by name: an error that an earlier one left behind is told here as well.
inline void check_kernel(cudaError_t error, const void* kernel) {
  if (error == cudaSuccess) return;
  const char* name = nullptr;
  if (cudaFuncGetName(&name, kernel) != cudaSuccess) name = "a kernel";
  const std::string what = std::string("launch of ") + name;
  const bool no_image = error == cudaErrorNoKernelImageForDevice ||
                        error == cudaErrorUnsupportedPtxVersion || error == cudaErrorInvalidPtx;
  if (no_image) throw std::runtime_error(what + ": " + image_fault_here());
  check(error, what.c_str());
}

// What has to be known of a kernel before its first launch on a device: looked up once.
struct KernelTraits {
  bool waits;  // was it compiled with grid_dependency_wait()? That of 8.0, PTX too, has none.
  std::size_t smem_bytes;
};
inline KernelTraits& kernel_traits(const void* kernel, std::size_t smem_bytes) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, KernelTraits> known;
  int device = 0;
  check(cudaGetDevice(&device), "current device");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [place, is_new] = known.try_emplace({device, kernel}, KernelTraits{false, 48 << 10});
  if (is_new) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) {  // that of a device for which the package was not compiled
      known.erase(place);
      check_kernel(error, kernel);
    }
    place->second.waits = attributes.ptxVersion >= 90;
  }
  if (smem_bytes > place->second.smem_bytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(smem_bytes)),
          "shared memory of a kernel");
    place->second.smem_bytes = smem_bytes;
  }
  return place->second;
}

// Raises the kernel's shared memory limit if it has to, launches, checks. A kernel that would not
// wait for the one before it is never launched as its dependent.
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, std::size_t smem_bytes, void* stream,
            LaunchOptions options, A&&... args) {
  const KernelTraits& traits = kernel_traits(reinterpret_cast<const void*>(kernel), smem_bytes);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = options.dependent && traits.waits ? 1 : 0;
  check_kernel(cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...),
               reinterpret_cast<const void*>(kernel));
}

}  // namespace specdec::gpu
#endif

namespace specdec {

inline constexpr unsigned kAllLanes = 0xffffffffu;  // of a warp

namespace gpu {

// Over the warp, over kLanes neighbours of it, or over the 4 lanes that share a row of a matrix
// fragment. The order of a sum is a fixed butterfly: it depends on nothing but the lane.
template <int kLanes = 32, class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
// In a quad, word j of lane i becomes word i of lane j.
__device__ __forceinline__ void quad_transpose(std::uint32_t (&w)[4]) {
  const unsigned lane = threadIdx.x;
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (lane & static_cast<unsigned>(step)) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      const std::uint32_t got = __shfl_xor_sync(kAllLanes, upper ? w[i] : w[i + step], step);
      (upper ? w[i] : w[i + step]) = got;
    }
  }
}

// The sum over the lanes of the warp up to and with this one.
template <class T>
__device__ __forceinline__ T warp_scan(T x) {
#pragma unroll
  for (unsigned delta = 1; delta < 32; delta *= 2) {
    const T below = __shfl_up_sync(kAllLanes, x, delta);
    if (threadIdx.x % 32 >= delta) x += below;
  }
  return x;
}

}  // namespace gpu
}  // namespace specdec

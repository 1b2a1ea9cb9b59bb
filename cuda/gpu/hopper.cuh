// What sm_90a adds to gpu.cuh: transaction barriers, the bulk tensor copy engine, warpgroup matrix
// instructions, register hand-over between warpgroups. Only kernels of the Hopper family include
// it; tests/simt/ptx_sm90.h holds the other body of each name.
#pragma once
#include "gpu/gpu.cuh"

namespace specdec::gpu {

// How 16-byte chunks of a tile are permuted in shared memory: within a span of that many bytes, the
// chunk's number is XORed with the number of the 128-byte line (see wgmma_descriptor).
enum class Swizzle { none, b32, b64, b128 };

}  // namespace specdec::gpu

#if !defined(__CUDACC__)
#include "simt/ptx_sm90.h"
#else
#include <cuda.h>

#include "gpu/wgmma.cuh"

namespace specdec::gpu {

// ---- transaction barriers (mbarrier) ----------------------------------------------------------

// A phase ends when `count` threads have arrived and all bytes announced in it have landed. One
// thread initialises, calls mbarrier_init_fence() after the last one, then the block synchronises.
__device__ __forceinline__ void mbarrier_init(std::uint64_t* bar, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count)
               : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
// Arrives and announces bytes that copies into this phase will bring.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(std::uint64_t* bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)),
               "r"(bytes)
               : "memory");
}
// Waits for the end of the phase of this parity: 0 for the first, then 1, 0, ... Parity 1 of a
// fresh barrier counts as ended.
__device__ __forceinline__ void mbarrier_wait(std::uint64_t* bar, unsigned parity) {
  std::uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(bar)), "r"(parity)
        : "memory");
  } while (!done);
}

// Shared memory written by ordinary stores or cp_async_16 is visible to wgmma and to the copy
// engine after this, called by each writer before the barrier that hands the data over.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Named barriers 1..15 (0 is __syncthreads); `threads` counts all that sync, in warps.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// True in one lane of a converged warp, always the same one.
__device__ __forceinline__ bool elect_one() {
  std::uint32_t is_leader;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(is_leader));
  return is_leader;
}

// Registers per thread of a warpgroup: give back (dec) or take (inc); a multiple of 8 in 24..240.
template <int kCount>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- bulk copies ------------------------------------------------------------------------------

// Describes a tensor in global memory and the box that one copy takes from it. A kernel receives it
// as `const __grid_constant__ TensorMap`.
struct TensorMap {
  CUtensorMap map;
};

// elem_bytes: 1, 2 or 4. dims[i]: elements, innermost first; strides_bytes[i]: of dimension i + 1
// (rank - 1 of them), multiples of 16; box[i]: elements of one copy, at most 256. The innermost box
// may span at most the swizzle's bytes. Elements outside of the tensor arrive as zeros.
inline TensorMap encode_tensor_map(int elem_bytes, const void* base, int rank,
                                   const std::uint64_t* dims, const std::uint64_t* strides_bytes,
                                   const std::uint32_t* box, Swizzle swizzle) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  // Asked of the driver at run time: linking libcuda would make the library need it to load.
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                           cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<Encode>(entry);
  }();
  const CUtensorMapDataType type = elem_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : elem_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  const CUtensorMapSwizzle mode = swizzle == Swizzle::none  ? CU_TENSOR_MAP_SWIZZLE_NONE
                                  : swizzle == Swizzle::b32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                  : swizzle == Swizzle::b64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                            : CU_TENSOR_MAP_SWIZZLE_128B;
  const cuuint32_t every_element[5] = {1, 1, 1, 1, 1};
  TensorMap result;
  const CUresult error =
      encode(&result.map, type, rank, const_cast<void*>(base), dims, strides_bytes, box,
             every_element, CU_TENSOR_MAP_INTERLEAVE_NONE, mode, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(error));
  }
  return result;
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One thread starts the copy of the box at (x, y, ...), x innermost, in elements, possibly
// negative; x has to be a multiple of 16 bytes (else an illegal instruction). Its bytes, those
// outside of the tensor too, count on `bar`. dst: aligned to 128 bytes, with a swizzle to eight
// times its span. policy: l2_evict_first() and the like.
__device__ __forceinline__ void tma_load_2d(void* dst, const TensorMap& map, std::uint64_t* bar,
                                            int x, int y,
                                            std::uint64_t policy = l2_evict_normal()) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(dst)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(bar)), "l"(policy)
      : "memory");
}
// The copy of `bytes` successive bytes, with the same barrier. dst, src, bytes: multiples of 16.
__device__ __forceinline__ void bulk_load(void* dst, const void* src, unsigned bytes,
                                          std::uint64_t* bar,
                                          std::uint64_t policy = l2_evict_normal()) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(dst)),
      "l"(src), "r"(bytes), "r"(shared_address(bar)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d(void* dst, const TensorMap& map, std::uint64_t* bar,
                                            int x, int y, int z, int w,
                                            std::uint64_t policy = l2_evict_normal()) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(dst)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(bar)), "l"(policy)
      : "memory");
}

}  // namespace specdec::gpu
#endif

namespace specdec::gpu {

// Names an operand of wgmma in shared memory. Its layout consists of groups of 8 lines:
//   k contiguous (K-major): a line is a row m or n, `swizzle` bytes of k. stride_bytes leads from 8
//     rows to the next 8; leading_bytes is unused. Without swizzle a line is 16 bytes, and
//     leading_bytes leads from 16 bytes of k to the next 16.
//   n contiguous (kTransB): a line is a k, `swizzle` bytes of n. stride_bytes leads from 8 k to the
//     next 8, leading_bytes from one span of n to the next. (Without swizzle the two swap roles.)
// The group starts at a multiple of its size (1024 bytes with the 128-byte swizzle), as a copy by
// tma_load leaves it. ptr may point into the first line, to step along k by 32 bytes, and to any
// group of 8 lines.
__device__ __forceinline__ std::uint64_t wgmma_descriptor(const void* ptr, Swizzle swizzle,
                                                          unsigned leading_bytes,
                                                          unsigned stride_bytes) {
  const std::uint64_t mode = swizzle == Swizzle::none ? 0 : 4 - static_cast<unsigned>(swizzle);
  return std::uint64_t{shared_address(ptr) >> 4 & 0x3fff} |
         std::uint64_t{leading_bytes >> 4 & 0x3fff} << 16 |
         std::uint64_t{stride_bytes >> 4 & 0x3fff} << 32 | mode << 62;
}

// The same operand `bytes` further on, a multiple of 16. One addition: a descriptor made anew takes
// three dependent instructions of the uniform unit, as long as the tensor cores take for 64 x 64.
__device__ __forceinline__ std::uint64_t wgmma_behind(std::uint64_t descriptor, unsigned bytes) {
  const std::uint32_t low = static_cast<std::uint32_t>(descriptor) + (bytes >> 4);
  return (descriptor >> 32 << 32) | low;
}

}  // namespace specdec::gpu

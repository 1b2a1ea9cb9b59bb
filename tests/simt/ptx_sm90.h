// The other body of cuda/gpu/hopper.cuh: the same names and arguments.
#pragma once
#include "simt/async.h"
#include "simt/ptx_sm80.h"

namespace specdec::gpu {

inline void mbarrier_init(uint64_t* bar, unsigned count, SIMT_HERE) {
  simt::mbarrier_init(bar, count, here);
}
inline void mbarrier_init_fence() { simt::mbarrier_init_fence(); }
inline void mbarrier_arrive(uint64_t* bar, SIMT_HERE) { simt::mbarrier_arrive(bar, 0, here); }
inline void mbarrier_arrive_expect_tx(uint64_t* bar, unsigned bytes, SIMT_HERE) {
  simt::mbarrier_arrive(bar, bytes, here);
}
inline void mbarrier_wait(uint64_t* bar, unsigned parity, SIMT_HERE) {
  simt::mbarrier_wait(bar, parity, here);
}

inline void fence_proxy_async() { simt::check::proxy_fence(); }

inline void named_barrier_sync(int id, int threads, SIMT_HERE) {
  simt::barrier(id, unsigned(threads), "bar.sync", here);
}

inline bool elect_one(SIMT_HERE) {
  simt::gather(~0u, 0, "elect_one", here);
  return simt::lane() == simt::elected();
}

template <int kCount>
void setmaxnreg_inc(SIMT_HERE) {
  simt::registers::set(kCount, true, here);
}
template <int kCount>
void setmaxnreg_dec(SIMT_HERE) {
  simt::registers::set(kCount, false, here);
}

struct TensorMap {
  simt::TensorShape shape;
};
inline TensorMap encode_tensor_map(int elem_bytes, const void* base, int rank, const uint64_t* dims,
                                   const uint64_t* strides_bytes, const uint32_t* box,
                                   Swizzle swizzle) {
  const unsigned span = swizzle == Swizzle::none ? 0 : 16u << int(swizzle);
  return {simt::tensor_shape(elem_bytes, base, rank, dims, strides_bytes, box, span)};
}
inline void prefetch_tensor_map(const TensorMap&) {}
inline void bulk_load(void* dst, const void* src, unsigned bytes, uint64_t* bar, uint64_t = 0,
                      SIMT_HERE) {
  simt::bulk_copy(dst, src, bytes, bar, here);
}
inline void tma_load_2d(void* dst, const TensorMap& map, uint64_t* bar, int x, int y, uint64_t = 0,
                        SIMT_HERE) {
  simt::tensor_copy(dst, map.shape, bar, {x, y}, here);
}
inline void tma_load_4d(void* dst, const TensorMap& map, uint64_t* bar, int x, int y, int z, int w,
                        uint64_t = 0, SIMT_HERE) {
  simt::tensor_copy(dst, map.shape, bar, {x, y, z, w}, here);
}

inline void wgmma_fence(SIMT_HERE) { simt::wgmma_fence(here); }
inline void wgmma_commit(SIMT_HERE) { simt::wgmma_commit(here); }
template <int kPending>
void wgmma_wait(SIMT_HERE) {
  simt::wgmma_wait(kPending, here);
}
template <class T, int kCount>
void wgmma_hold(T (&)[kCount]) {}

template <class T, int N, bool kTransB = false>
void wgmma_m64k16(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate, SIMT_HERE) {
  simt::wgmma({element_of<T>(), N, kTransB, accumulate, false, a, b}, d, nullptr, here);
}
template <class T, int N, bool kTransB = false>
void wgmma_rs_m64k16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                     SIMT_HERE) {
  simt::wgmma({element_of<T>(), N, kTransB, accumulate, true, 0, b}, d, a, here);
}
template <int N>
void wgmma_rs_m64k32_e4m3(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                          SIMT_HERE) {
  simt::wgmma({simt::Element::e4m3, N, false, accumulate, true, 0, b}, d, a, here);
}

}  // namespace specdec::gpu

// The other body of cuda/gpu/gpu.cuh: the same names and arguments, from the PTX ISA's tables.
#pragma once
#include "simt/async.h"

namespace specdec::gpu {

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(simt::dynamic_shared());
}

inline uint32_t shared_address(const void* p) {
  const auto offset = static_cast<const char*>(p) - static_cast<char*>(simt::dynamic_shared());
  if (offset < 0 || size_t(offset) > simt::dynamic_shared_bytes()) {
    simt::fail("not an address in dynamic shared memory");
  }
  return simt::kSharedBase + uint32_t(offset);
}

inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) { return (a & mask) | bits; }

inline void cp_async_16(void* dst, const void* src, bool valid = true, SIMT_HERE) {
  simt::cp_async(dst, src, 16, valid ? 16 : 0, here);
}
inline uint64_t l2_evict_normal() { return 0; }
inline uint64_t l2_evict_first() { return 0; }
inline void prefetch_l2(const void*) {}
inline void cp_async_commit() { simt::cp_async_commit(); }
template <int kPending>
void cp_async_wait() {
  simt::cp_async_wait(kPending);
}

// Lane 8i + r names row r of 8x8 matrix i; lane l gets of each matrix row l / 4, columns 2(l % 4)
// and the next, or with .trans column l / 4, rows 2(l % 4) and the next.
template <int kMatrices>
auto ldmatrix_rows(const void* row, simt::Site here) {
  if (simt::lane() < 8 * kMatrices && uintptr_t(row) % 16) simt::fail("ldmatrix: misaligned row");
  return simt::gather(~0u, row, "ldmatrix", here, [](void* p) {
    simt::Slots<const char*> rows{static_cast<char*>(p)};
    for (int i = 0; i < kMatrices; i++) {  // each matrix is one pass over the 32 banks
      unsigned seen = 0;
      for (int r = 0; r < 8; r++) seen |= 1u << (uintptr_t(rows[8 * i + r]) / 16 % 8);
      simt::stats().ldmatrix++, simt::stats().ldmatrix_conflicts += seen != 0xff;
    }
  });
}
template <int kMatrices>
void ldmatrix(uint32_t (&d)[kMatrices], const void* row, simt::Site here) {
  auto rows = ldmatrix_rows<kMatrices>(row, here);
  const unsigned l = simt::lane();
  for (unsigned i = 0; i < kMatrices; i++) {
    d[i] = static_cast<const uint32_t*>(rows[8 * i + l / 4])[l % 4];
  }
}
template <int kMatrices>
void ldmatrix_trans(uint32_t (&d)[kMatrices], const void* row, simt::Site here) {
  auto rows = ldmatrix_rows<kMatrices>(row, here);
  const unsigned l = simt::lane();
  for (unsigned i = 0; i < kMatrices; i++) {
    const uint32_t low = static_cast<const uint16_t*>(rows[8 * i + l % 4 * 2])[l / 4];
    const uint32_t high = static_cast<const uint16_t*>(rows[8 * i + l % 4 * 2 + 1])[l / 4];
    d[i] = low | high << 16;
  }
}
inline void ldmatrix_x4(uint32_t (&d)[4], const void* row, SIMT_HERE) { ldmatrix(d, row, here); }
inline void ldmatrix_x2(uint32_t (&d)[2], const void* row, SIMT_HERE) { ldmatrix(d, row, here); }
inline void ldmatrix_x4_trans(uint32_t (&d)[4], const void* row, SIMT_HERE) {
  ldmatrix_trans(d, row, here);
}

template <class T>
constexpr simt::Element element_of() {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
  return std::is_same_v<T, __half> ? simt::Element::f16 : simt::Element::bf16;
}
template <class T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIMT_HERE) {
  simt::mma(element_of<T>(), c, a, b0, b1, here);
}

inline float exp2_approx(float x) { return exp2f(x); }

// An atomic orders between fences: before it for a release, behind it for an acquire.
inline unsigned load_relaxed(const unsigned* p, SIMT_HERE) {
  simt::yield();
  return simt::rmw(const_cast<unsigned*>(p), here, [](unsigned v) { return v; });
}
inline unsigned load_acquire(const unsigned* p, SIMT_HERE) {
  const unsigned v = load_relaxed(p, here);
  simt::check::fence();
  return v;
}
inline void store_release(unsigned* p, unsigned v, SIMT_HERE) {
  simt::check::fence();
  simt::rmw(p, here, [v](unsigned) { return v; });
}
inline unsigned atomic_add_acq_rel(unsigned* p, unsigned v, SIMT_HERE) {
  simt::check::fence();
  const unsigned old = simt::rmw(p, here, [v](unsigned o) { return o + v; });
  simt::check::fence();
  return old;
}

// Kernels run one after another here, but the checker holds what a dependent one does before its
// wait against what the one before it did.
inline void grid_dependency_wait() { simt::check::dependency_wait(); }
inline void grid_dependency_wait_if(bool needed) {
  if (needed) grid_dependency_wait();
}
inline void launch_dependents() { simt::check::begin_dependents(); }
struct LaunchOptions {
  bool dependent = false;
};
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem_bytes, void* stream,
            LaunchOptions options, A&&... args) {
  const auto* name = reinterpret_cast<const void*>(kernel);
  simt::launch(kernel, {name, grid, block, smem_bytes, stream, options.dependent},
               std::forward<A>(args)...);
}

}  // namespace specdec::gpu

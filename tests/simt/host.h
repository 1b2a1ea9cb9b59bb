// Host side of the programs that both compilers build: memory, waiting, digests. The outputs of an
// emulated run and of one on a GPU are compared by `diff`.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace specdec::host {

inline int failures = 0;

// Zeroed memory for n values that kernels may touch; lives as long as the program.
template <class T>
T* alloc(size_t n) {
  T* p;
#if defined(__CUDACC__)
  if (cudaMallocManaged(&p, n * sizeof(T))) exit(2);
#else
  p = static_cast<T*>(aligned_alloc(256, (n * sizeof(T) + 255) / 256 * 256));
  simt::expose(p, n * sizeof(T), "buffer");
#endif
  memset(static_cast<void*>(p), 0, n * sizeof(T));
  return p;
}

inline void wait() {
#if defined(__CUDACC__)
  if (auto e = cudaDeviceSynchronize()) {
    printf("error: %s\n", cudaGetErrorString(e));
    exit(1);
  }
#endif
}

// One line: a name, a digest of the bytes (FNV-1a), the first values.
template <class T>
void show(const char* name, const T* p, size_t n) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(p);
  uint64_t h = 1469598103934665603ull;
  for (size_t i = 0; i < n * sizeof(T); i++) h = (h ^ bytes[i]) * 1099511628211ull;
  printf("%-34s %016llx ", name, static_cast<unsigned long long>(h));
  for (size_t i = 0; i < (n < 6 ? n : 6); i++) printf(" %g", double(p[i]));
  printf("\n");
}

// Counts a failure unless two results are equal.
inline void expect_equal(const char* name, double got, double want) {
  if (got == want) return;
  failures++;
  printf("FAIL %s: got %g, expected %g\n", name, got, want);
}

}  // namespace specdec::host

// Runs CUDA kernels on the CPU, one fiber for each CUDA thread. README.md beside it says what is
// modelled.
//
// A kernel written in CUDA C++ and the wrappers of cuda/gpu compiles under this header as plain
// C++20. The threads of a block are fibers of one OS thread; a fiber runs until it meets a barrier,
// a warp collective or its end, and which one runs next is drawn from a seed (0: in order). Blocks
// run one after another, in seeded order.
//
// Adversarial where CUDA leaves room: shared memory starts as NaN, asynchronous copies and matrix
// products leave NaN until they are waited for and then read their operands, one warp may run ahead
// to the next barrier before another has started, __activemask() names only the caller. check.cc
// adds happens-before race, bounds and initialisation checks.
#pragma once

// One block runs at a time. Prefer dynamic_shared(), which is bounds-checked and starts as NaN.
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

inline uint3 threadIdx;  // of the fiber that runs: the scheduler sets it at every switch
inline uint3 blockIdx;
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace simt {

// ---- for tests ----------------------------------------------------------------------------------

// What a launch throws: race, deadlock, divergence, out of bounds...
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Stats {  // since the program started
  uint64_t launches, blocks, switches, mma, wgmma, ldmatrix, ldmatrix_conflicts, cp_async,
      bulk_copies;
};
Stats& stats();
void seed(uint64_t s);  // schedule of later launches; at first that of the variable SIMT_SEED

// Host memory that kernels may touch. With none exposed, global accesses are not bounds-checked.
// settled: no launch in flight writes it, as far as this goes by what the checker saw itself. What
// is not, a dependent launch may only touch behind its grid_dependency_wait(), but for those that
// follow another launch until conceal(): that one has waited for whoever wrote it.
void expose(const void* p, size_t bytes, const char* name, bool writable = true,
            bool settled = true);
void conceal();  // forgets all

// ---- for the emulated instructions --------------------------------------------------------------

// The kernel line that called; taken through default arguments, so that inlining cannot move it.
struct Site {
  const char* file;
  int line;
  bool operator==(const Site& o) const {
    return line == o.line && (file == o.file || !strcmp(file, o.file));
  }
};
#define SIMT_HERE ::simt::Site here = {__builtin_FILE(), __builtin_LINE()}
std::string at(Site);

struct LaunchShape {
  const void* kernel;
  dim3 grid, block;
  size_t smem;
  const void* stream;
  bool dependent;  // may it begin before the launch before it on the stream has ended?
};

[[noreturn]] void fail(const std::string& what);  // ends the launch with an Error
[[noreturn]] void fail_lane(const char* op, unsigned lane);
unsigned rank();     // of the running thread in its block
bool block_ended();  // have all threads of the block?
unsigned lane();
unsigned elected();  // the lane that elect.sync names
void* dynamic_shared();
size_t dynamic_shared_bytes();
void barrier(int id, unsigned count, const char* op, Site);    // count 0: the whole block
int barrier_reduce(bool pred, int how, const char* op, Site);  // 0 count, 1 and, 2 or
void yield();

// Stops the running thread until another one, or an asynchronous operation, wakes it.
void park(const char* op, Site);
void unpark(unsigned rank);
// Something that hardware does on its own: runs at some later moment, at the latest when no thread
// can run, and not in the order of the calls.
void later(std::function<void()> operation);

// Lets the lanes of `mask` meet: each leaves `in`, the last runs `leader` over all 32 places, each
// gets the places, which keep their content until the lane meets again.
inline constexpr unsigned kSlot = 64;
void* meet(unsigned mask, const void* in, unsigned bytes, void (*leader)(void*), const char* op,
           Site);
void sync_warp(unsigned mask, Site);

template <class T>
struct Slots {
  char* base;
  T& operator[](unsigned i) const { return *reinterpret_cast<T*>(base + i * kSlot); }
};
template <class T>
Slots<T> gather(unsigned mask, const T& mine, const char* op, Site here,
                void (*leader)(void*) = nullptr) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kSlot);
  return {static_cast<char*>(meet(mask, &mine, sizeof(T), leader, op, here))};
}

void cp_async(void* dst, const void* src, unsigned bytes, unsigned src_bytes, Site);
void cp_async_commit();
void cp_async_wait(unsigned pending_groups);

// Hooks of the checker; empty (no_check.cc) unless check.cc is linked. Besides the threads of a
// block there are actors, which work asynchronously: one for each warp (its wgmma) and one for each
// mbarrier (the copies that count on it). Actors use the async proxy: they see what a thread wrote
// only after that thread's fence_proxy_async().
namespace check {
inline bool active;  // a kernel's own code runs, not the emulator's: instrumented accesses count
inline constexpr unsigned kBarrierActors = 32;
// in_flight: the destination of a copy not yet waited for.
enum Kind { plain, atomically, in_flight };

void begin_launch(unsigned blocks, unsigned threads, const LaunchShape&);
void end_launch();
// room: the bytes of shared memory and the no man's land behind them.
void begin_block(unsigned block, void* shared, size_t bytes, size_t room);
void resume(unsigned rank, const void* stack, size_t bytes);
void ignore(const void* p, size_t bytes);  // the emulator's own memory

void access(const void* p, unsigned bytes, bool write, Kind, Site);
void instrumented(const void* p, unsigned bytes, bool write, const void* pc);
void atomic(const void* p, unsigned bytes, Site);
void sync(const unsigned* threads, unsigned n);  // a barrier among them
void fence();
void proxy_fence();
void dependency_wait();
void begin_dependents();

// Channels carry what one side knew at release() to the other at acquire(), once flip() has ended
// the phase in which it was released.
void release(uintptr_t channel);
void flip(uintptr_t channel);
void acquire(uintptr_t channel);

unsigned warp_actor(unsigned warp);
unsigned barrier_actor(unsigned index);
void follow(unsigned actor, unsigned rank);  // the actor works after what the thread did so far
void access_as(unsigned actor, const void* p, unsigned bytes, bool write, Kind, Site);
uint32_t step(unsigned actor);  // ends a piece of its work; names it for learn()
void learn(unsigned rank, unsigned actor, uint32_t step);
void release_as(unsigned actor, uint32_t step, uintptr_t channel);
}  // namespace check

struct Quiet {  // in emulator code that kernels call: its own accesses do not count
  Quiet() { check::active = false; }
  ~Quiet() { check::active = true; }
};

void run(const LaunchShape&, void (*body)(void*), void* args);

template <class... P, class... A>
void launch(void (*kernel)(P...), const LaunchShape& shape, A&&... a) {
  struct Call {
    void (*kernel)(P...);
    std::tuple<P...> args;
  } call{kernel, {static_cast<P>(std::forward<A>(a))...}};
  run(
      shape,
      [](void* p) {
        auto& c = *static_cast<Call*>(p);
        std::apply(c.kernel, c.args);
      },
      &call);
}

template <class T, class F>
__attribute__((no_sanitize("thread"))) T rmw(T* p, Site here, F f) {
  check::atomic(p, sizeof(T), here);
  T old = *p;
  *p = f(old);
  return old;
}
template <class T>
T pick(const Slots<T>& s, unsigned mask, unsigned src, const char* op) {
  if (!(mask >> src & 1)) fail_lane(op, src);
  return s[src];
}
template <class T, class F>
T reduce(unsigned mask, T v, F f, const char* op, Site here) {
  auto s = gather(mask, v, op, here);
  bool first = true;
  T r{};
  for (unsigned i = 0; i < 32; i++) {
    if (mask >> i & 1) r = first ? s[i] : f(r, s[i]), first = false;
  }
  return r;
}
}  // namespace simt

// ---- CUDA's own names ---------------------------------------------------------------------------
inline void __syncthreads(SIMT_HERE) { simt::barrier(0, 0, "__syncthreads", here); }
inline int __syncthreads_count(int p, SIMT_HERE) {
  return simt::barrier_reduce(p, 0, "__syncthreads_count", here);
}
inline int __syncthreads_and(int p, SIMT_HERE) {
  return simt::barrier_reduce(p, 1, "__syncthreads_and", here);
}
inline int __syncthreads_or(int p, SIMT_HERE) {
  return simt::barrier_reduce(p, 2, "__syncthreads_or", here);
}
inline void __syncwarp(unsigned mask = ~0u, SIMT_HERE) { simt::sync_warp(mask, here); }
inline void __threadfence() { simt::check::fence(); }
inline void __threadfence_block() { simt::check::fence(); }
inline void __threadfence_system() { simt::check::fence(); }
inline void __nanosleep(unsigned) { simt::yield(); }
[[noreturn]] inline void __trap() { simt::fail("__trap()"); }
inline unsigned __activemask() { return 1u << simt::lane(); }

template <class T>
T __shfl_sync(unsigned m, T v, int src, int width = 32, SIMT_HERE) {
  unsigned l = simt::lane(), base = l & ~(width - 1u);
  return simt::pick(simt::gather(m, v, "__shfl_sync", here), m, base | (src & (width - 1)),
                    "__shfl_sync");
}
template <class T>
T __shfl_xor_sync(unsigned m, T v, int x, int width = 32, SIMT_HERE) {
  unsigned l = simt::lane(), j = l ^ x;
  auto s = simt::gather(m, v, "__shfl_xor_sync", here);
  return j / width > l / width ? v : simt::pick(s, m, j, "__shfl_xor_sync");
}
template <class T>
T __shfl_up_sync(unsigned m, T v, unsigned d, int width = 32, SIMT_HERE) {
  unsigned l = simt::lane();
  auto s = simt::gather(m, v, "__shfl_up_sync", here);
  return (l & (width - 1)) < d ? v : simt::pick(s, m, l - d, "__shfl_up_sync");
}
template <class T>
T __shfl_down_sync(unsigned m, T v, unsigned d, int width = 32, SIMT_HERE) {
  unsigned l = simt::lane();
  auto s = simt::gather(m, v, "__shfl_down_sync", here);
  return (l & (width - 1)) + d >= unsigned(width) ? v : simt::pick(s, m, l + d, "__shfl_down_sync");
}
inline unsigned __ballot_sync(unsigned m, int p, SIMT_HERE) {
  return simt::reduce(m, p ? 1u << simt::lane() : 0u, std::bit_or<>(), "__ballot_sync", here);
}
inline int __any_sync(unsigned m, int p, SIMT_HERE) { return __ballot_sync(m, p, here) != 0; }
inline int __all_sync(unsigned m, int p, SIMT_HERE) { return __ballot_sync(m, p, here) == m; }
template <class T>
unsigned __match_any_sync(unsigned m, T v, SIMT_HERE) {
  auto s = simt::gather(m, v, "__match_any_sync", here);
  unsigned r = 0;
  for (unsigned i = 0; i < 32; i++) r |= unsigned((m >> i & 1) && s[i] == v) << i;
  return r;
}
#define SIMT_REDUCE(name, expr)                                               \
  template <class T>                                                          \
  T name(unsigned m, T v, SIMT_HERE) {                                        \
    return simt::reduce(m, v, [](T a, T b) { return T(expr); }, #name, here); \
  }
SIMT_REDUCE(__reduce_add_sync, a + b)
SIMT_REDUCE(__reduce_min_sync, a < b ? a : b)
SIMT_REDUCE(__reduce_max_sync, a < b ? b : a)
SIMT_REDUCE(__reduce_and_sync, a& b)
SIMT_REDUCE(__reduce_or_sync, a | b)

#define SIMT_ATOMIC(name, expr)                              \
  template <class T>                                         \
  T name(T* p, std::type_identity_t<T> v, SIMT_HERE) {       \
    return simt::rmw(p, here, [v](T o) { return T(expr); }); \
  }
SIMT_ATOMIC(atomicAdd, o + v)
SIMT_ATOMIC(atomicSub, o - v)
SIMT_ATOMIC(atomicExch, ((void)o, v))
SIMT_ATOMIC(atomicMin, v < o ? v : o)
SIMT_ATOMIC(atomicMax, o < v ? v : o)
SIMT_ATOMIC(atomicAnd, o& v)
SIMT_ATOMIC(atomicOr, o | v)
SIMT_ATOMIC(atomicXor, o ^ v)
SIMT_ATOMIC(atomicInc, o >= v ? 0 : o + 1)
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v, SIMT_HERE) {
  simt::yield();
  return simt::rmw(p, here, [=](T o) { return o == expected ? v : o; });
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, T v) {
  *p = v;
}
template <class T>
void __stcs(T* p, T v) {
  *p = v;
}
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
  const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; i++) {
    const unsigned pick = select >> 4 * i & 15, byte = unsigned(both >> 8 * (pick & 7)) & 0xff;
    result |= (pick & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return result;
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fdiv_rn(float a, float b) { return a / b; }

// What kernels owe each other and their launch: a dependent kernel waits before it touches what the
// one before it touched; warpgroups hand over the registers that the block owns.
#include <memory>

#include "gpu/hopper.cuh"
#include "simt/expect.h"

namespace specdec {
namespace {

using simt_test::expect;
using simt_test::expect_launch;

// ---- dependent launches -------------------------------------------------------------------------

__global__ void write_first(int* o, const int* in) {
  gpu::grid_dependency_wait();
  if (threadIdx.x < 32) o[threadIdx.x] = in[threadIdx.x];
}

enum class Wait { before, none, after, one_thread, one_thread_no_barrier };
template <Wait kWait, bool kWrites>
__global__ void follow(int* o, const int* in) {
  if (kWait == Wait::before) gpu::grid_dependency_wait();
  if (kWait == Wait::one_thread || kWait == Wait::one_thread_no_barrier) {
    if (threadIdx.x == 0) gpu::grid_dependency_wait();
    if (kWait == Wait::one_thread) __syncthreads();
  }
  if (kWrites) {
    o[threadIdx.x] = 1;
  } else {
    o[64 + threadIdx.x] = in[threadIdx.x];
  }
  if (kWait == Wait::after) gpu::grid_dependency_wait();
}

// Copies that an engine makes count as those of the thread that asked for them.
template <bool kWaits>
__global__ void follow_by_copy(int* o, const int* in) {
  int* x = gpu::dynamic_shared<int>();
  if (kWaits) gpu::grid_dependency_wait();
  if (threadIdx.x < 8) gpu::cp_async_16(x + 4 * threadIdx.x, in + 4 * threadIdx.x);
  gpu::cp_async_commit();
  gpu::cp_async_wait<0>();
  __syncthreads();
  o[64 + threadIdx.x] = x[threadIdx.x];
}

void dependents(int* o, const int* in) {
  const auto after_write = [&](const char* what, const char* want, void (*kernel)(int*, const int*),
                               const int* read, bool dependent = true, size_t smem = 0) {
    expect("the one before", "ok", write_first, 1, 32, 0, o, in);
    expect_launch(what, want, {.dependent = dependent}, kernel, 1, 32, smem, o, read);
  };
  const char* early = "before grid_dependency_wait";
  after_write("waits", "ok", follow<Wait::before, false>, o);
  after_write("reads too early", early, follow<Wait::none, false>, o);
  after_write("waits too late", early, follow<Wait::after, false>, o);
  after_write("not dependent", "ok", follow<Wait::none, false>, o, false);
  after_write("one waits for all", "ok", follow<Wait::one_thread, false>, o);
  after_write("one waits for itself", early, follow<Wait::one_thread_no_barrier, false>, o);
  // Constants may be read at any time: nobody wrote them.
  after_write("reads constants early", "ok", follow<Wait::none, false>, in);
  after_write("writes what was written", early, follow<Wait::none, true>, in);
  after_write("copies too early", early, follow_by_copy<false>, o, true, 128);
  after_write("copies behind the wait", "ok", follow_by_copy<true>, o, true, 128);
  // What the last but one wrote is complete: the last has waited for it.
  expect("the first", "ok", write_first, 1, 32, 0, o, in);
  expect("another", "ok", write_first, 1, 32, 0, o + 128, in);
  expect_launch("reads what is old", "ok", {.dependent = true}, follow<Wait::none, false>, 1, 32, 0,
                o, static_cast<const int*>(o));
}

// ---- registers ----------------------------------------------------------------------------------

template <int kGive, int kTake, int kGroups>
__global__ void hand_over() {
  if (threadIdx.x < 128) {
    gpu::setmaxnreg_dec<kGive>();
  } else if (threadIdx.x < 128 * kGroups) {
    gpu::setmaxnreg_inc<kTake>();
  }
}
__global__ void half_a_group_takes() {
  if (threadIdx.x < 64) gpu::setmaxnreg_dec<24>();
}
__global__ void gives_by_taking() { gpu::setmaxnreg_inc<40>(); }
__global__ void takes_by_giving() { gpu::setmaxnreg_dec<240>(); }

void registers() {
  expect("two consumers", "ok", hand_over<24, 240, 3>, 1, 384, 0);
  expect("two smaller consumers", "ok", hand_over<56, 224, 3>, 1, 384, 0);
  expect("three consumers", "ok", hand_over<32, 160, 4>, 1, 512, 0);
  expect("one consumer", "ok", hand_over<24, 240, 2>, 1, 384, 0);
  const char* hangs = "a warp waits for ever";
  // What these kernels once did: 512 registers for three threads that own 504.
  expect("two consumers, too much", hangs, hand_over<32, 240, 3>, 1, 384, 0);
  expect("two smaller ones, too much", hangs, hand_over<64, 224, 3>, 1, 384, 0);
  expect("as another project's hang", hangs, hand_over<48, 232, 3>, 1, 384, 0);
  expect("three consumers, too much", hangs, hand_over<32, 168, 4>, 1, 512, 0);
  expect("three consumers, too little given", hangs, hand_over<40, 160, 4>, 1, 512, 0);
  expect("half a warpgroup", "set different numbers", half_a_group_takes, 1, 384, 0);
  expect("inc to fewer", "inc from 168 to 40", gives_by_taking, 1, 384, 0);
  expect("dec to more", "dec from 168 to 240", takes_by_giving, 1, 384, 0);
  expect("no multiple", "no multiple of 8", hand_over<25, 240, 3>, 1, 384, 0);
  expect("below the least", "no multiple of 8 from 24", hand_over<16, 240, 3>, 1, 384, 0);
}

}  // namespace
}  // namespace specdec

int main() {
  const std::unique_ptr<int[]> o(new int[256]()), in(new int[64]());
  simt::expose(o.get(), 1024, "o");
  simt::expose(in.get(), 256, "in", false);
  for (int seed = 0; seed < 5; seed++) {
    simt::seed(seed);
    specdec::dependents(o.get(), in.get());
    specdec::registers();
  }
  return specdec::simt_test::finish();
}

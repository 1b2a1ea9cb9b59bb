// What kernels owe each other and their launch: a dependent kernel waits before it touches what the
// one before it touched; warpgroups hand over the registers that the block owns; a launch fits the
// device.
#include <cstdlib>
#include <memory>

#include "gpu/hopper.cuh"
#include "simt/expect.h"
#include "simt/limits.h"

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

enum class Begins { behind_the_wait, before_it };
template <Begins kBegins>
__global__ void begin_the_next(int* o, const int* in) {
  if (kBegins == Begins::before_it) gpu::launch_dependents();
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  if (threadIdx.x < 32) o[threadIdx.x] = in[threadIdx.x];
}

__global__ void first_block_waits(int*, const int*) {
  if (blockIdx.x == 0) gpu::grid_dependency_wait();
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
  after_write("waits too late", early, follow<Wait::after, false>, o);
  after_write("never waits", early, follow<Wait::none, false>, o);
  after_write("waits for nothing", "ends without grid_dependency_wait", follow<Wait::none, false>,
              in);
  after_write("not dependent", "ok", follow<Wait::none, false>, o, false);
  after_write("one waits for all", "ok", follow<Wait::one_thread, false>, o);
  after_write("one waits for itself", early, follow<Wait::one_thread_no_barrier, false>, o);
  // Constants may be read at any time: nobody wrote them.
  after_write("reads constants early", "ok", follow<Wait::after, false>, in);
  after_write("writes what was written", early, follow<Wait::after, true>, in);
  after_write("copies too early", early, follow_by_copy<false>, o, true, 128);
  after_write("copies behind the wait", "ok", follow_by_copy<true>, o, true, 128);
  // What the last but one wrote is complete if the last has waited for it before this one began.
  const auto after_two = [&](const char* what, const char* want, auto last) {
    expect("the first", "ok", write_first, 1, 32, 0, o, in);
    expect_launch("the second", "ok", {.dependent = true}, last, 1, 32, 0, o + 128, in);
    expect_launch(what, want, {.dependent = true}, follow<Wait::after, false>, 1, 32, 0, o,
                  static_cast<const int*>(o));
  };
  after_two("reads what is old", "ok", begin_the_next<Begins::behind_the_wait>);
  after_two("overtakes two", early, begin_the_next<Begins::before_it>);
  // What nobody knows to be settled may be the work of a launch before the call.
  const std::unique_ptr<int[]> unsettled(new int[64]());
  const int* const who_knows = unsettled.get();
  const auto begin_call = [&] {
    simt::conceal();
    simt::expose(o, 1024, "o", true);
    simt::expose(in, 256, "in", false);
    simt::expose(who_knows, 256, "unsettled", true, false);
  };
  const auto begins_call = [&](const char* what, const char* want, auto kernel) {
    expect("the one before", "ok", write_first, 1, 32, 0, o, in);
    begin_call();
    expect_launch(what, want, {.dependent = true}, kernel, 1, 32, 0, o, who_knows);
  };
  begins_call("reads what may be written", early, follow<Wait::after, false>);
  begins_call("reads it behind the wait", "ok", follow<Wait::before, false>);
  // But a launch of the same call that waited is behind all others.
  const auto after_call = [&](const char* what, const char* want, auto last, unsigned blocks) {
    begin_call();
    expect_launch("the first of a call", "ok", {.dependent = true}, last, blocks, 32, 0, o + 128,
                  in);
    expect_launch(what, want, {.dependent = true}, follow<Wait::after, false>, 1, 32, 0, o,
                  who_knows);
  };
  after_call("reads what an earlier call was given", "ok", begin_the_next<Begins::behind_the_wait>,
             1);
  after_call("overtakes the first of its call", early, begin_the_next<Begins::before_it>, 1);
  after_call("overtakes blocks that end early", early, first_block_waits, 2);
  simt::conceal();
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

// ---- launches and devices
// -------------------------------------------------------------------------

__global__ void nothing() {}
__global__ void of_200_registers() {}
__global__ void of_255_registers() {}

void launches() {
  simt::limits::record(reinterpret_cast<const void*>(of_200_registers), 200);
  simt::limits::record(reinterpret_cast<const void*>(of_255_registers), 255);
  // As if the compiler took 160 where 168 would fit.
  simt::limits::record(reinterpret_cast<const void*>(hand_over<32, 232, 3>), 160);
  expect("most threads", "ok", nothing, 1, 1024, 0);
  expect("more threads", "1056 threads in a block, 1024 at most", nothing, 1, 1056, 0);
  expect("no threads", "0 threads", nothing, 1, 0, 0);
  expect("no blocks", "a grid of 0 x 1 x 1 blocks", nothing, 0, 32, 0);
  expect("most registers", "ok", of_255_registers, 1, 256, 0);
  // 65,280 of 65,536 would fit if warps did not belong to a quarter of the multiprocessor.
  expect("a warp too many", "288 threads of 255 registers in a block, which has registers for 256",
         of_255_registers, 1, 288, 0);
  expect("two warps a quarter", "ok", of_200_registers, 1, 256, 0);
  expect("three warps a quarter", "too many resources requested", of_200_registers, 1, 384, 0);
  // What the compiler took counts, not what a block of that size could own.
  expect("less at entry", "ask for 63488 registers, it owns 61440", hand_over<32, 232, 3>, 1, 384,
         0);
  expect("as much as could be", "ok", hand_over<24, 232, 3>, 1, 384, 0);
  const auto device = [](const char* limits) { setenv("SPECDEC_EMU_LIMITS", limits, 1); };
  const auto shared = [](const char* what, const char* want, size_t bytes) {
    expect(what, want, nothing, 1, 32, bytes);
  };
  shared("all of 9.0", "ok", 227 << 10);
  shared("more than 9.0", "232449 bytes of shared memory in a block, 232448 at most",
         (227 << 10) + 1);
  device("8.0,4,166912");
  shared("all of 8.0", "ok", 163 << 10);
  shared("more than 8.0", "on 8.0: 166913 bytes of shared memory in a block, 166912 at most",
         (163 << 10) + 1);
  device("8.0,4,232448");
  shared("a device that says more than it has", "166912 at most", 200 << 10);
  device("9.0,4,65536");
  shared("a device that leaves less", "65536 at most", 65537);
  device("8.6,4,101376");
  shared("all of 8.6", "ok", 99 << 10);
  shared("more than 8.6", "101376 at most", (99 << 10) + 1);
  device("7.5,4,65536");
  shared("a device without a table", "no table of limits for a device of 7.5", 0);
  unsetenv("SPECDEC_EMU_LIMITS");
}

}  // namespace
}  // namespace specdec

int main() {
  const std::unique_ptr<int[]> o(new int[256]()), in(new int[64]());
  for (int seed = 0; seed < 5; seed++) {
    simt::seed(seed);
    simt::expose(o.get(), 1024, "o");
    simt::expose(in.get(), 256, "in", false);
    specdec::dependents(o.get(), in.get());
    specdec::registers();
    specdec::launches();
  }
  return specdec::simt_test::finish();
}

// The emulator notices what it says it notices, with every schedule, and goes on afterwards.
#include <memory>

#include "simt/expect.h"

namespace specdec {
namespace {

using simt_test::expect;

__global__ void deadlock() {
  if (threadIdx.x < 40) __syncthreads();
}
__global__ void half_shuffle(int* o) {
  if (threadIdx.x < 16) o[threadIdx.x] = __shfl_xor_sync(~0u, int(threadIdx.x), 1);
}
__global__ void bad_mask(int* o) { o[threadIdx.x] = __shfl_sync(0xffu, int(threadIdx.x), 1); }
__global__ void dead_lane(int* o) {
  o[threadIdx.x % 32] = threadIdx.x < 16 ? __shfl_sync(0xffffu, 1, 20) : 0;
}
__global__ void beyond_shared() { gpu::dynamic_shared<int>()[threadIdx.x + 1] = 1; }
__global__ void beyond_global(int* o) { o[threadIdx.x * 2] = 1; }
__global__ void uninitialised(int* o) { o[threadIdx.x] = gpu::dynamic_shared<int>()[threadIdx.x]; }
__global__ void static_race(int* o) {
  __shared__ int x[64];
  x[threadIdx.x] = 1;
  o[threadIdx.x] = x[63 - threadIdx.x];
}

enum class Between { nothing, sync_warp, shuffle };
template <Between kBetween>
__global__ void neighbour(int* o) {
  int* x = gpu::dynamic_shared<int>();
  x[threadIdx.x] = 1;
  if (kBetween == Between::sync_warp) __syncwarp();
  if (kBetween == Between::shuffle) __shfl_sync(~0u, 1, 0);
  o[threadIdx.x] = x[threadIdx.x ^ 1];
}

__global__ void block_race(int* o) {
  if (threadIdx.x == 0) o[0] = o[0] + 1;
}
__global__ void block_atomic(int* o) {
  if (threadIdx.x == 0) atomicAdd(o, 1);
}

// The last block to take a ticket sums what all have written.
enum class Ticket { acquire_release, fences, relaxed };
template <Ticket kTicket>
__global__ void last_block(int* o, unsigned* ticket) {
  if (threadIdx.x != 0) return;
  o[1 + blockIdx.x] = 1;
  unsigned mine;
  if (kTicket == Ticket::acquire_release) {
    mine = gpu::atomic_add_acq_rel(ticket, 1);
  } else {
    if (kTicket == Ticket::fences) __threadfence();
    mine = atomicAdd(ticket, 1u);
    if (kTicket == Ticket::fences) __threadfence();
  }
  if (mine + 1 != gridDim.x) return;
  for (unsigned i = 0; i < gridDim.x; i++) o[0] = o[0] + o[1 + i];
  *ticket = 0;
}

__global__ void write_const(const int* o) { const_cast<int*>(o)[threadIdx.x] = 1; }
__global__ void misaligned(int* o) { gpu::cp_async_16(gpu::dynamic_shared<char>() + 8, o); }
__global__ void no_wait(const int* in, int* o) {
  int* x = gpu::dynamic_shared<int>();
  gpu::cp_async_16(x + 4 * threadIdx.x, in);
  gpu::cp_async_commit();
  o[threadIdx.x] = x[4 * threadIdx.x];
}
__global__ void wait_no_barrier(int* o) {
  int* x = gpu::dynamic_shared<int>();
  gpu::cp_async_16(x + 4 * threadIdx.x, o);
  gpu::cp_async_commit();
  gpu::cp_async_wait<0>();
  o[threadIdx.x] = x[4 * (threadIdx.x ^ 1)];
}
__global__ void trap() {
  if (threadIdx.x == 7) __trap();
}
__global__ void shift(int* o) { o[threadIdx.x] = 1 << (threadIdx.x + 1); }
__global__ void large(int* o) {
  __syncthreads();
  if (threadIdx.x == 1023) o[0] = int(blockDim.x);
}
__global__ void spin(int* o) {
  if (threadIdx.x == 0) {
    while (!atomicCAS(o + 1, 1, 1)) {
    }
  } else if (threadIdx.x == 40) {
    atomicExch(o + 1, 1);
  }
}
__global__ void spin_forever(int* o) {
  while (!atomicCAS(o + 2, 1, 1)) {
  }
}

void all(int* o, int* constant, unsigned* ticket) {
  expect("barrier", "deadlock", deadlock, 1, 64, 0);
  expect("half a warp", "16 thread(s) has ended", half_shuffle, 1, 32, 0, o);
  expect("mask", "mask lacks the calling lane", bad_mask, 1, 32, 0, o);
  expect("lane", "reads lane 20", dead_lane, 1, 32, 0, o);
  expect("shared bounds", "out of bounds: write of 4 bytes at shared memory + 256 of 256",
         beyond_shared, 1, 64, 256);
  expect("global bounds", "out of bounds: write of 4 bytes|const", beyond_global, 1, 64, 0, o);
  expect("first read", "uninitialised", uninitialised, 1, 64, 256, o);
  expect("static shared", "race", static_race, 1, 64, 0, o);
  expect("no barrier", "uninit|race", neighbour<Between::nothing>, 1, 32, 128, o);
  expect("__syncwarp", "ok", neighbour<Between::sync_warp>, 1, 32, 128, o);
  expect("a shuffle is no fence", "race", neighbour<Between::shuffle>, 1, 32, 128, o);
  expect("blocks", "race", block_race, 2, 32, 0, o);
  expect("atomic", "ok", block_atomic, 2, 32, 0, o);
  expect("ticket", "ok", last_block<Ticket::acquire_release>, 4, 32, 0, o, ticket);
  expect("ticket and fences", "ok", last_block<Ticket::fences>, 4, 32, 0, o, ticket);
  expect("relaxed ticket", "race", last_block<Ticket::relaxed>, 4, 32, 0, o, ticket);
  *ticket = 0;
  expect("const", "write to const memory", write_const, 1, 32, 0, constant);
  expect("alignment", "misaligned", misaligned, 1, 32, 256, o);
  expect("wait without barrier", "uninit|race", wait_no_barrier, 1, 32, 512, o);
  expect("no wait", "copy in flight: read of 4 bytes", no_wait, 1, 32, 512, constant, o);
  expect("trap", "__trap()", trap, 1, 32, 0);
  expect("shift", "undefined behaviour: shift_out_of_bounds", shift, 1, 32, 0, o);
  expect("1024 threads", "ok", large, 1, 1024, 0, o);
  expect("1025 threads", "invalid launch", large, 1, 1025, 0, o);
  expect("228 KiB", "invalid launch", large, 1, 32, 228 << 10, o);
  o[1] = o[2] = 0;
  expect("spinning for ever", "livelock", spin_forever, 1, 64, 0, o);
  expect("spinning", "ok", spin, 1, 64, 0, o);
}

}  // namespace
}  // namespace specdec

int main() {
  const std::unique_ptr<int[]> o(new int[64]()), constant(new int[64]());
  unsigned ticket = 0;
  simt::expose(o.get(), 256, "o");
  simt::expose(constant.get(), 256, "constant", false);
  simt::expose(&ticket, sizeof ticket, "ticket");
  for (int seed = 0; seed < 5; seed++) {
    simt::seed(seed);
    specdec::all(o.get(), constant.get(), &ticket);
  }
  return specdec::simt_test::finish();
}

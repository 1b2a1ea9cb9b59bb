// Two blocks that bring each other tiles, and what the emulator says of them with one mistake at a
// time.
#include <cstdlib>
#include <cstring>

#include "gpu/hopper.cuh"
#include "simt/expect.h"

namespace specdec {
namespace {

using simt_test::expect_launch;

constexpr unsigned kBlocks = 2, kTile = 1024, kRounds = 4;

enum class Bug {
  none,
  no_first_meeting,
  no_last_meeting,
  blocks_meet_alone,
  no_wait_for_readers,
  readers_tell_their_own_block,
  one_reader_too_few,
  a_third_block,
  to_one_block,
  no_init_fence,
};

struct Shared {
  alignas(1024) unsigned char tile[kTile];
  std::uint64_t full, empty;
};

template <Bug kBug>
__global__ void __launch_bounds__(64, 1)
    exchange(const __grid_constant__ gpu::TensorMap map, unsigned* out) {
  Shared& s = *gpu::dynamic_shared<Shared>();
  const unsigned rank = gpu::cluster_rank();
  if (threadIdx.x == 0) {
    gpu::mbarrier_init(&s.full, 1);
    gpu::mbarrier_init(&s.empty, kBug == Bug::one_reader_too_few ? kBlocks - 1 : kBlocks);
    if (kBug != Bug::no_init_fence) gpu::mbarrier_init_fence();
  }
  if (kBug == Bug::no_first_meeting || kBug == Bug::blocks_meet_alone) {
    __syncthreads();
  } else {
    gpu::cluster_sync();
  }
  if (threadIdx.x == 0) {
    for (unsigned i = 0; i < kRounds; i++) {
      // A round's emptying ends a phase in every block.
      if (i > 0 && kBug != Bug::no_wait_for_readers) gpu::mbarrier_wait(&s.empty, (i - 1) % 2);
      gpu::mbarrier_arrive_expect_tx(&s.full, kTile);
      if (i % kBlocks == rank) {
        const unsigned to = kBug == Bug::a_third_block  ? 7
                            : kBug == Bug::to_one_block ? 1
                                                        : (1 << kBlocks) - 1;
        gpu::tma_multicast_2d(s.tile, map, &s.full, 0, int(i) * 8, to);
      }
    }
  } else if (threadIdx.x >= 32) {
    unsigned sum = 0;
    for (unsigned i = 0; i < kRounds; i++) {
      gpu::mbarrier_wait(&s.full, i % 2);
      for (unsigned j = threadIdx.x - 32; j < kTile; j += 32) sum += s.tile[j];
      __syncwarp();
      if (threadIdx.x < 32 + kBlocks) {
        const unsigned to = kBug == Bug::readers_tell_their_own_block ? rank : threadIdx.x - 32;
        gpu::mbarrier_arrive_in(&s.empty, to);
      }
    }
    atomicAdd(out, sum);
  }
  __syncwarp();
  if (kBug != Bug::no_last_meeting && kBug != Bug::blocks_meet_alone) gpu::cluster_sync();
}
// Shared memory beyond the block's own is another block's, or nobody's.
__global__ void reaches_over(unsigned* out) {
  auto* own = gpu::dynamic_shared<unsigned>();
  own[threadIdx.x] = threadIdx.x;
  gpu::cluster_sync();
  out[0] = own[2048 / 4 + threadIdx.x];
}
__global__ void names_a_ninth(unsigned*) {
  auto* bar = gpu::dynamic_shared<std::uint64_t>();
  gpu::mbarrier_init(bar, 1);
  gpu::cluster_sync();
  gpu::mbarrier_arrive_in(bar, 8);
}
__global__ void one_meets(unsigned*) {
  if (gpu::cluster_rank() == 0) gpu::cluster_sync();
}

template <Bug kBug>
void run(const char* what, const char* want, const gpu::TensorMap& map, unsigned* out) {
  expect_launch(what, want, {.cluster = kBlocks}, exchange<kBug>, 2 * kBlocks, 64, sizeof(Shared),
                map, out);
}

void all(const gpu::TensorMap& m, unsigned* out, bool in_order) {
  out[0] = 0;
  run<Bug::none>("correct", "ok", m, out);
  simt_test::failures += out[0] != 4 * kRounds * kTile;
  // Another order may let every barrier be there, and used by its own block, before it is needed.
  run<Bug::no_first_meeting>(
      "first meeting", in_order ? "not initialised" : "not initialised|race|init_fence|ok", m, out);
  run<Bug::no_last_meeting>("last meeting", "ended", m, out);
  run<Bug::blocks_meet_alone>(
      "alone", in_order ? "not initialised" : "not initialised|race|has ended|init_fence|ok", m,
      out);
  run<Bug::no_wait_for_readers>("readers", "race|more arrivals", m, out);
  run<Bug::readers_tell_their_own_block>("own block", "more arrivals|race|deadlock|ok", m, out);
  run<Bug::one_reader_too_few>("too few readers", "race|more arrivals|deadlock", m, out);
  run<Bug::a_third_block>("a third", "names a block that the cluster has not", m, out);
  run<Bug::to_one_block>("to one", "deadlock|race|more arrivals|has ended", m, out);
  run<Bug::no_init_fence>("init fence", "no mbarrier_init_fence()", m, out);
  const gpu::LaunchOptions two{.cluster = kBlocks};
  expect_launch("over", "out of bounds|another block|uninitialised", two, reaches_over, 2, 32, 512,
                out);
  expect_launch("ninth", "the cluster has no block 8", two, names_a_ninth, 2, 1, 64, out);
  expect_launch("one meets", "deadlock", two, one_meets, 2, 32, 64, out);
  expect_launch("odd grid", "clusters of 2 blocks", two, one_meets, 3, 32, 64, out);
  expect_launch("nine", "clusters of 9 blocks", {.cluster = 9}, one_meets, 9, 32, 64, out);
}

}  // namespace
}  // namespace specdec

int main() {
  using namespace specdec;
  const size_t bytes = kRounds * kTile;
  auto* in = static_cast<unsigned char*>(aligned_alloc(128, bytes));
  auto* out = static_cast<unsigned*>(aligned_alloc(128, 128));
  memset(in, 1, bytes);
  simt::expose(in, bytes, "in", false);
  simt::expose(out, 128, "out");
  const std::uint64_t dims[2] = {128, kRounds * 8}, strides[1] = {128};
  const std::uint32_t box[2] = {128, 8};
  const auto map = gpu::encode_tensor_map(1, in, 2, dims, strides, box, gpu::Swizzle::none);
  for (int seed = 0; seed < 5; seed++) {
    simt::seed(seed);
    all(map, out, seed == 0);
  }
  free(in);
  free(out);
  return simt_test::finish();
}

// One correct pipeline of copies and warpgroup products, and what the emulator says of it with one
// mistake at a time.
#include <cstdlib>
#include <cstring>

#include "gpu/hopper.cuh"
#include "simt/expect.h"

namespace specdec {
namespace {

using simt_test::expect;
using bf16 = __nv_bfloat16;

constexpr int kRounds = 5, kStages = 2, kTileBytes = 8192;  // 64 x 64, 128-byte swizzle

enum class Bug {
  none,
  no_init_fence,
  no_init_sync,
  no_full_wait,
  no_empty_wait,
  empty_before_wgmma_wait,
  one_of_four_warps_releases,  // none either: a product ends for the warpgroup as a whole
  too_many_arrivals,
  too_few_bytes_expected,
  too_many_bytes_expected,
  no_proxy_fence,
  another_thread_fences,
  no_barrier_after_store,
  store_without_waiting_for_others,
  cp_async_without_proxy_fence,
  no_wgmma_fence,
  no_commit,
  no_wgmma_wait,
  touch_before_wait,
  keep_one_pending,
  one_warp_differs,
  descriptor_off_its_group,
  descriptor_without_stride,
  misaligned_tile,
  misaligned_coordinate,
  copy_not_waited_for,
  barrier_counts_differ,
  barrier_of_half_a_warp,
};

struct Shared {
  alignas(1024) unsigned char tile[kStages][kTileBytes];
  std::uint64_t full[kStages], empty[kStages];
};

// Warps 0..3 multiply each tile by its transpose, after zeroing its first line; warp 4 copies.
template <Bug kBug>
__global__ void __launch_bounds__(160, 1)
    pipeline(const __grid_constant__ gpu::TensorMap map, const unsigned char* in, float* out) {
  Shared& s = *gpu::dynamic_shared<Shared>();
  const int t = threadIdx.x;
  if (t == 0) {
    for (int i = 0; i < kStages; i++) {
      gpu::mbarrier_init(&s.full[i], 1);
      gpu::mbarrier_init(&s.empty[i], kBug == Bug::one_of_four_warps_releases ? 32 : 128);
    }
    if (kBug != Bug::no_init_fence) gpu::mbarrier_init_fence();
  }
  if (kBug != Bug::no_init_sync) __syncthreads();
  if (t >= 128) {
    if (!gpu::elect_one()) return;
    for (int round = 0; round < kRounds; round++) {
      const int stage = round % kStages;
      if (kBug != Bug::no_empty_wait) {
        gpu::mbarrier_wait(&s.empty[stage], (round / kStages + 1) % 2);
      }
      gpu::mbarrier_arrive_expect_tx(&s.full[stage],
                                     kBug == Bug::too_few_bytes_expected    ? kTileBytes / 2
                                     : kBug == Bug::too_many_bytes_expected ? kTileBytes * 2
                                                                            : kTileBytes);
      for (int half = 0; half < 2; half++) {
        const int shift = kBug == Bug::misaligned_tile ? 512 : 0;
        const int x = kBug == Bug::misaligned_coordinate ? 4 : 0;  // 8 bytes
        gpu::tma_load_2d(s.tile[stage] + half * (kTileBytes / 2 - shift), map, &s.full[stage], x,
                         round * 64 + half * 32);
      }
    }
    if (kBug == Bug::copy_not_waited_for) {
      gpu::mbarrier_wait(&s.empty[0], 0);
      gpu::mbarrier_arrive_expect_tx(&s.full[1], kTileBytes / 2);
      gpu::tma_load_2d(s.tile[1], map, &s.full[1], 0, 0);
    }
    return;
  }
  float sum[32] = {}, other[32] = {};
  for (int round = 0; round < kRounds; round++) {
    const int stage = round % kStages;
    if (kBug != Bug::no_full_wait) gpu::mbarrier_wait(&s.full[stage], round / kStages % 2);
    if (kBug == Bug::cp_async_without_proxy_fence) {
      if (t < 8) gpu::cp_async_16(s.tile[stage] + t * 16, in + t * 16);
      gpu::cp_async_commit();
      gpu::cp_async_wait<0>();
    } else {
      if (t < 32) reinterpret_cast<float*>(s.tile[stage])[t] = 0;
      if (kBug == Bug::another_thread_fences ? t >= 32 : kBug != Bug::no_proxy_fence) {
        gpu::fence_proxy_async();
      }
    }
    if (kBug != Bug::no_barrier_after_store) {
      gpu::named_barrier_sync(1, kBug == Bug::barrier_of_half_a_warp                 ? 120
                                 : kBug == Bug::barrier_counts_differ && t / 32 == 1 ? 96
                                                                                     : 128);
    }
    if (kBug != Bug::no_wgmma_fence) gpu::wgmma_fence();
    for (int k = 0; k < 4; k++) {
      const auto* from = s.tile[stage] + k * 32;
      if (kBug == Bug::descriptor_off_its_group) from += 128;
      if (kBug == Bug::one_warp_differs && t / 32 == 2) from = s.tile[stage];
      const std::uint64_t d = gpu::wgmma_descriptor(
          from, gpu::Swizzle::b128, 16, kBug == Bug::descriptor_without_stride ? 0 : 1024);
      gpu::wgmma_m64k16<bf16, 64>(sum, d, d, round + k > 0);
    }
    if (kBug != Bug::no_commit) gpu::wgmma_commit();
    if (kBug == Bug::empty_before_wgmma_wait) gpu::mbarrier_arrive(&s.empty[stage]);
    if (kBug == Bug::touch_before_wait) sum[3] = 1;
    if (kBug == Bug::keep_one_pending) {
      const std::uint64_t d = gpu::wgmma_descriptor(s.tile[stage], gpu::Swizzle::b128, 16, 1024);
      gpu::wgmma_fence();
      gpu::wgmma_m64k16<bf16, 64>(other, d, d, false);
      gpu::wgmma_commit();
      gpu::wgmma_wait<1>();
      out[t] = sum[0] - sum[0] + (other[0] != other[0] ? 1 : 2);  // the second is not there yet
      gpu::wgmma_wait<0>();
    } else if (kBug != Bug::no_wgmma_wait) {
      gpu::wgmma_wait<0>();
    }
    if (kBug == Bug::store_without_waiting_for_others && t == 0) s.tile[stage][8] = 1;
    if (kBug != Bug::empty_before_wgmma_wait &&
        (kBug != Bug::one_of_four_warps_releases || t / 32 == round % 4)) {
      gpu::mbarrier_arrive(&s.empty[stage]);
    }
    if (kBug == Bug::too_many_arrivals) gpu::mbarrier_arrive(&s.empty[stage]);
  }
  if (kBug != Bug::keep_one_pending) out[t] = sum[0];
}

// A in registers, which the product reads until it is waited for.
enum class Repack { never, behind_the_wait, early, early_in_one_lane, of_the_other_step };
template <Repack kRepack>
__global__ void product_of_registers(float* out) {
  auto* tile = gpu::dynamic_shared<std::uint32_t>();
  for (int i = static_cast<int>(threadIdx.x); i < 2048; i += 128) tile[i] = 0;
  gpu::fence_proxy_async();
  __syncthreads();
  std::uint32_t a[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
  float sum[32] = {};
  const auto b = gpu::wgmma_descriptor(tile, gpu::Swizzle::b128, 16, 1024);
  gpu::wgmma_fence();
  gpu::wgmma_rs_m64k16<bf16, 64>(sum, a[0], b, false);
  gpu::wgmma_commit();
  if (kRepack == Repack::early) a[0][2] = 9;
  if (kRepack == Repack::early_in_one_lane && threadIdx.x == 77) a[0][3] = 9;
  if (kRepack == Repack::of_the_other_step) a[1][0] = 9;  // no product reads it yet
  gpu::wgmma_fence();
  gpu::wgmma_rs_m64k16<bf16, 64>(sum, a[1], b, true);
  gpu::wgmma_commit();
  gpu::wgmma_wait<1>();
  if (kRepack == Repack::behind_the_wait) a[0][0] = 9;
  gpu::wgmma_wait<0>();
  gpu::wgmma_hold(a[0]);
  out[threadIdx.x] = sum[0] + static_cast<float>(a[0][0] + a[0][2] + a[0][3] + a[1][0]);
}

__global__ void half_warpgroup(float* out) {
  const std::uint64_t d =
      gpu::wgmma_descriptor(gpu::dynamic_shared<char>(), gpu::Swizzle::b128, 16, 1024);
  float sum[32] = {};
  gpu::wgmma_fence();
  gpu::wgmma_m64k16<bf16, 64>(sum, d, d, false);
  gpu::wgmma_commit();
  gpu::wgmma_wait<0>();
  out[threadIdx.x] = sum[0];
}
__global__ void not_initialised() { gpu::mbarrier_wait(gpu::dynamic_shared<std::uint64_t>(), 0); }
__global__ void never_ends() {
  auto* bar = gpu::dynamic_shared<std::uint64_t>();
  if (threadIdx.x == 0) gpu::mbarrier_init(bar, 2);
  __syncthreads();
  if (threadIdx.x == 0) gpu::mbarrier_arrive(bar);
  gpu::mbarrier_wait(bar, 0);
}
__global__ void overwritten() {
  auto* bar = gpu::dynamic_shared<std::uint64_t>();
  gpu::mbarrier_init(bar, 1);
  *bar = 1;
  gpu::mbarrier_arrive(bar);
}

template <Bug kBug>
void run(const char* what, const char* want, const gpu::TensorMap& map, const unsigned char* in,
         float* out) {
  expect(what, want, pipeline<kBug>, 1, 160, sizeof(Shared), map, in, out);
}

void all(const gpu::TensorMap& m, const gpu::TensorMap& beyond, const unsigned char* in, float* o) {
  run<Bug::none>("correct", "ok", m, in, o);
  run<Bug::no_init_fence>("init fence", "no mbarrier_init_fence()", m, in, o);
  run<Bug::no_init_sync>("init sync", "not initialised|race", m, in, o);
  run<Bug::no_full_wait>("full wait", "copy in flight|uninitialised|race", m, in, o);
  run<Bug::no_empty_wait>("empty wait", "race|more arrivals", m, in, o);
  run<Bug::empty_before_wgmma_wait>("early release", "race", m, in, o);
  run<Bug::one_of_four_warps_releases>("one warp releases", "ok", m, in, o);
  run<Bug::too_many_arrivals>("arrivals", "more arrivals|deadlock|race", m, in, o);
  run<Bug::too_few_bytes_expected>("few bytes", "in flight|race|the block ended|deadlock", m, in,
                                   o);
  run<Bug::too_many_bytes_expected>("many bytes", "waits at mbarrier_wait", m, in, o);
  run<Bug::no_proxy_fence>("proxy fence", "no fence_proxy_async: read of 16", m, in, o);
  run<Bug::another_thread_fences>("foreign fence", "no fence_proxy_async: read of 16", m, in, o);
  run<Bug::no_barrier_after_store>("store", "race", m, in, o);
  run<Bug::store_without_waiting_for_others>("late store", "race|no fence_proxy", m, in, o);
  run<Bug::cp_async_without_proxy_fence>("cp.async", "no fence_proxy_async: read of 16", m, in, o);
  run<Bug::no_wgmma_fence>("wgmma fence", "no wgmma_fence()", m, in, o);
  run<Bug::no_commit>("commit", "never committed", m, in, o);
  run<Bug::no_wgmma_wait>("wgmma wait", "race|without waiting for it", m, in, o);
  run<Bug::touch_before_wait>("D", "D was touched before wgmma_wait", m, in, o);
  memset(o, 0, 512);
  run<Bug::keep_one_pending>("pending", "ok", m, in, o);
  simt_test::failures += o[0] != 1 || o[127] != 1;
  run<Bug::one_warp_differs>("warps", "the warps of the warpgroup issue different ones", m, in, o);
  run<Bug::descriptor_off_its_group>("start", "descriptor of A: it does not start", m, in, o);
  run<Bug::descriptor_without_stride>("stride", "descriptor of A: stride", m, in, o);
  run<Bug::misaligned_tile>("tile", "misaligned destination", m, in, o);
  run<Bug::misaligned_coordinate>("coordinate", "no multiple of 16 bytes", m, in, o);
  run<Bug::copy_not_waited_for>("copy", "in flight|no thread waited|race|has ended", m, in, o);
  run<Bug::barrier_counts_differ>("counts", "others said", m, in, o);
  run<Bug::barrier_of_half_a_warp>("half a warp", "bad id or count", m, in, o);
  run<Bug::none>("tensor", "out of bounds: read", beyond, in, o);
  const char* changed = "A was changed in its registers before wgmma_wait";
  expect("registers", "ok", product_of_registers<Repack::never>, 1, 128, 16384, o);
  expect("behind", "ok", product_of_registers<Repack::behind_the_wait>, 1, 128, 16384, o);
  expect("the next", "ok", product_of_registers<Repack::of_the_other_step>, 1, 128, 16384, o);
  expect("early", changed, product_of_registers<Repack::early>, 1, 128, 16384, o);
  expect("a lane", changed, product_of_registers<Repack::early_in_one_lane>, 1, 128, 16384, o);
  expect("64 threads", "no full warpgroup", half_warpgroup, 1, 64, 16384, o);
  expect("no init", "not initialised", not_initialised, 1, 32, 64);
  expect("phase", "32 thread(s) waits at mbarrier_wait", never_ends, 1, 32, 64);
  expect("word", "overwritten", overwritten, 1, 1, 64);
}

gpu::TensorMap map_of(const void* base, std::uint64_t rows) {
  const std::uint64_t dims[2] = {64, rows}, strides[1] = {128};
  const std::uint32_t box[2] = {64, 32};
  return gpu::encode_tensor_map(2, base, 2, dims, strides, box, gpu::Swizzle::b128);
}

}  // namespace
}  // namespace specdec

int main() {
  using namespace specdec;
  const size_t bytes = (kRounds * 64 - 16) * 128;  // the last tile reaches beyond the tensor
  auto* in = static_cast<unsigned char*>(aligned_alloc(128, bytes));
  auto* out = static_cast<float*>(aligned_alloc(128, 512));
  memset(in, 0, bytes);
  simt::expose(in, bytes, "in", false);
  simt::expose(out, 512, "out");
  for (int seed = 0; seed < 5; seed++) {
    simt::seed(seed);
    all(map_of(in, bytes / 128), map_of(in, kRounds * 64), in, out);
  }
  free(in);
  free(out);
  return simt_test::finish();
}

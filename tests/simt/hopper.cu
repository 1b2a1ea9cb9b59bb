// hopper.cuh against plain loops: tile copies, mbarrier rings, wgmma of every width, type and
// layout, on small integers, whose results are exact. Built by g++ it tests the emulator; built by
// nvcc for sm_90a and run, the GPU: both must pass, and print the same.
#include <algorithm>
#include <string>
#include <vector>

#include "gpu/hopper.cuh"
#include "simt/host.h"

namespace specdec {
namespace {

using bf16 = __nv_bfloat16;
using e4m3 = __nv_fp8_e4m3;
using gpu::Swizzle;

constexpr unsigned kSpans[4] = {0, 32, 64, 128};
const char* const kSwizzleNames[4] = {"none", "32B", "64B", "128B"};

float value(int i) { return float(i * 7 % 15 - 7); }  // exact in e4m3 too

// ---- tile copies --------------------------------------------------------------------------------
constexpr int kTileBytes = 16384;
struct TileShared {
  alignas(1024) unsigned char tile[kTileBytes];
  std::uint64_t full;
};

// Copies one box and shows the bytes as they lie in shared memory.
__global__ void __launch_bounds__(128)
    copy_tile(const __grid_constant__ gpu::TensorMap map, int rank, int4 position, unsigned bytes,
              unsigned char* out) {
  TileShared& s = *gpu::dynamic_shared<TileShared>();
  if (threadIdx.x == 0) {
    gpu::mbarrier_init(&s.full, 1);
    gpu::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    gpu::mbarrier_arrive_expect_tx(&s.full, bytes);
    gpu::prefetch_tensor_map(map);
    const int4 p = position;
    if (rank == 2) gpu::tma_load_2d(s.tile, map, &s.full, p.x, p.y);
    if (rank == 4)
      gpu::tma_load_4d(s.tile, map, &s.full, p.x, p.y, p.z, p.w, gpu::l2_evict_first());
  }
  gpu::mbarrier_wait(&s.full, 0);
  for (unsigned i = threadIdx.x; i < bytes; i += 128) out[i] = s.tile[i];
}

void tile_copies() {
  // A tensor of 5 x 3 x 20 x 72 16-bit elements with gaps in every stride.
  constexpr int kDims[4] = {72, 20, 3, 5};
  const std::uint64_t dims[4] = {72, 20, 3, 5};
  const std::uint64_t strides[3] = {160, 160 * 21, 160 * 21 * 4};
  const size_t elements = 80 * 21 * 4 * 5;
  auto* in = host::alloc<std::uint16_t>(elements);
  for (size_t i = 0; i < elements; i++) in[i] = std::uint16_t(i * 40503 + 1);
  auto* out = host::alloc<unsigned char>(kTileBytes);
  const int4 positions[] = {
      {0, 0, 0, 0}, {8, 3, 1, 2}, {-8, -2, 1, 4}, {56, 17, 2, 3}, {72, 0, 0, 0}};
  for (const int rank : {2, 4}) {
    for (int swizzle = 0; swizzle < 4; swizzle++) {
      const std::uint32_t inner = swizzle ? kSpans[swizzle] / 2 : 40;
      const std::uint32_t box[4] = {inner, 8, 2, 3};
      const gpu::TensorMap map =
          gpu::encode_tensor_map(2, in, rank, dims, strides, box, Swizzle(swizzle));
      unsigned rows = 1;
      for (int i = 1; i < rank; i++) rows *= box[i];
      for (const int4& p : positions) {
        const unsigned bytes = rows * inner * 2;
        gpu::launch(copy_tile, dim3(1), dim3(128), sizeof(TileShared), nullptr, {}, map, rank, p,
                    bytes, out);
        host::wait();
        const int at[4] = {p.x, p.y, rank > 2 ? p.z : 0, rank > 3 ? p.w : 0};
        const std::string name = "tile rank " + std::to_string(rank) + " swizzle " +
                                 kSwizzleNames[swizzle] + " x " + std::to_string(p.x);
        int wrong = 0;
        for (unsigned row = 0; row < rows; row++) {
          for (unsigned x = 0; x < inner; x++) {
            const int c[4] = {at[0] + int(x), at[1] + int(row % 8), at[2] + int(row / 8 % 2),
                              at[3] + int(row / 16)};
            bool inside = true;
            size_t from = c[0];
            for (int i = 0; i < 4; i++) inside &= c[i] >= 0 && c[i] < kDims[i];
            for (int i = 1; i < 4; i++) from += c[i] * (strides[i - 1] / 2);
            const unsigned linear = row * inner * 2 + x * 2;
            const unsigned mask = swizzle ? (1u << swizzle) - 1 : 0;
            const unsigned to = linear ^ (linear >> 7 & mask) << 4;
            wrong += (out[to] | out[to + 1] << 8) != (inside ? in[from] : 0);
          }
        }
        host::show(name.c_str(), out, bytes);
        host::expect_equal(name.c_str(), wrong, 0);
      }
    }
  }
}

// Copies successive bytes from a place in `in` to one in shared memory, and shows all of it.
__global__ void __launch_bounds__(128) copy_bytes(const unsigned char* in, unsigned from,
                                                  unsigned to, unsigned bytes, unsigned char* out) {
  TileShared& s = *gpu::dynamic_shared<TileShared>();
  if (threadIdx.x == 0) {
    gpu::mbarrier_init(&s.full, 1);
    gpu::mbarrier_init_fence();
  }
  for (unsigned i = threadIdx.x; i < kTileBytes; i += 128) s.tile[i] = 1;
  gpu::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    gpu::mbarrier_arrive_expect_tx(&s.full, 2 * bytes);
    gpu::bulk_load(s.tile + to, in + from, bytes, &s.full);
    gpu::bulk_load(s.tile + to + bytes, in, bytes, &s.full, gpu::l2_evict_first());
  }
  gpu::mbarrier_wait(&s.full, 0);
  for (unsigned i = threadIdx.x; i < kTileBytes; i += 128) out[i] = s.tile[i];
}

void byte_copies() {
  auto* in = host::alloc<unsigned char>(kTileBytes);
  for (unsigned i = 0; i < kTileBytes; i++) in[i] = static_cast<unsigned char>(i * 37 + i / 256);
  auto* out = host::alloc<unsigned char>(kTileBytes);
  const unsigned copies[][3] = {{0, 0, 16}, {16, 48, 32}, {1040, 256, 1152}, {128, 112, 2560}};
  for (const auto& [from, to, bytes] : copies) {
    gpu::launch(copy_bytes, dim3(1), dim3(128), sizeof(TileShared), nullptr, {}, in, from, to,
                bytes, out);
    host::wait();
    int wrong = 0;
    for (unsigned i = 0; i < kTileBytes; i++) {
      const unsigned at = i - to;
      const unsigned char want = i < to || at >= 2 * bytes ? 1
                                 : at < bytes              ? in[from + at]
                                                           : in[at - bytes];
      wrong += out[i] != want;
    }
    const std::string name = std::to_string(bytes) + " bytes from " + std::to_string(from);
    host::show(name.c_str(), out, kTileBytes);
    host::expect_equal(name.c_str(), wrong, 0);
  }
}

// ---- a ring of stages ---------------------------------------------------------------------------
constexpr int kStages = 3, kStageBytes = 2048, kLineBytes = 64;
constexpr int kBoxLines = kStageBytes / 2 / kLineBytes;
struct RingShared {
  alignas(128) unsigned char stage[kStages][kStageBytes];
  std::uint64_t full[kStages], empty[kStages];
};

// A producer warp copies `count` pieces through the ring, each as two boxes; two warpgroups sum
// them. The threads of each meet at a barrier of its own, then one releases the stage.
__global__ void __launch_bounds__(384, 1)
    ring(const __grid_constant__ gpu::TensorMap map, int count, unsigned* out) {
  RingShared& s = *gpu::dynamic_shared<RingShared>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      gpu::mbarrier_init(&s.full[i], 1);
      gpu::mbarrier_init(&s.empty[i], 2);
    }
    gpu::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    gpu::setmaxnreg_dec<24>();  // as attention with two consumers: all that the block owns
    if (threadIdx.x < 32 && gpu::elect_one()) {
      for (int i = 0; i < count; i++) {
        const int stage = i % kStages;
        gpu::mbarrier_wait(&s.empty[stage], (i / kStages + 1) % 2);
        gpu::mbarrier_arrive_expect_tx(&s.full[stage], kStageBytes);
        for (int half = 0; half < 2; half++) {
          gpu::tma_load_2d(s.stage[stage] + half * kStageBytes / 2, map, &s.full[stage], 0,
                           (2 * i + half) * kBoxLines);
        }
      }
    }
  } else {
    gpu::setmaxnreg_inc<240>();
    const int group = threadIdx.x / 128 - 1, t = threadIdx.x % 128;
    unsigned sum = 0;
    for (int i = 0; i < count; i++) {
      const int stage = i % kStages;
      gpu::mbarrier_wait(&s.full[stage], i / kStages % 2);
      for (int j = 0; j < 8; j++) sum = sum * 3 + s.stage[stage][(group * 128 + t) * 8 + j];
      gpu::named_barrier_sync(1 + group, 128);
      if (t == 0) gpu::mbarrier_arrive(&s.empty[stage]);
    }
    out[group * 128 + t] = sum;
  }
}

void rings() {
  constexpr int kCount = 8;
  auto* in = host::alloc<unsigned char>(kCount * kStageBytes);
  for (int i = 0; i < kCount * kStageBytes; i++) in[i] = static_cast<unsigned char>(i * 31 % 251);
  auto* out = host::alloc<unsigned>(256);
  const std::uint64_t dims[2] = {kLineBytes, kCount * kStageBytes / kLineBytes};
  const std::uint64_t strides[1] = {kLineBytes};
  const std::uint32_t box[2] = {kLineBytes, kBoxLines};
  const auto map = gpu::encode_tensor_map(1, in, 2, dims, strides, box, Swizzle::none);
  gpu::launch(ring, dim3(1), dim3(384), sizeof(RingShared), nullptr, {}, map, kCount, out);
  host::wait();
  host::show("ring", out, 256);
  for (int t = 0; t < 256; t++) {
    unsigned sum = 0;
    for (int i = 0; i < kCount; i++) {
      for (int j = 0; j < 8; j++) sum = sum * 3 + in[i * kStageBytes + t * 8 + j];
    }
    host::expect_equal("ring", out[t], sum);
  }
}

// ---- wgmma --------------------------------------------------------------------------------------
constexpr int kLine = 128;  // bytes of k that a product sums over: 64 elements of 16 bits, 128 of 8
struct WgmmaShared {
  alignas(1024) unsigned char a[64 * kLine];
  alignas(1024) unsigned char b[256 * kLine];
  std::uint64_t full;
};

// D (64 x N) = 2 A B. A is [64, k] and B is [N, k], or [k, N] if kTransB. Tiles of as many bytes
// across as the swizzle spans lie one behind the other.
template <class T, int N, bool kTransB, bool kRs>
__global__ void __launch_bounds__(128, 1)
    multiply(const __grid_constant__ gpu::TensorMap map_a,
             const __grid_constant__ gpu::TensorMap map_b, Swizzle swizzle, const T* a, float* d) {
  WgmmaShared& s = *gpu::dynamic_shared<WgmmaShared>();
  const int span = 16 << int(swizzle), tiles = kLine / span, b_across = kTransB ? N * 2 : kLine;
  const int b_tiles = (b_across + span - 1) / span, b_lines = kTransB ? kLine / 2 : N;
  if (threadIdx.x == 0) {
    gpu::mbarrier_init(&s.full, 1);
    gpu::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    gpu::mbarrier_arrive_expect_tx(&s.full, 64 * kLine + b_tiles * b_lines * span);
    for (int i = 0; i < tiles; i++) {
      gpu::tma_load_2d(s.a + i * 64 * span, map_a, &s.full, i * span / int(sizeof(T)), 0);
    }
    for (int i = 0; i < b_tiles; i++) {
      gpu::tma_load_2d(s.b + i * b_lines * span, map_b, &s.full, i * span / int(sizeof(T)), 0);
    }
  }
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  std::uint32_t fragment[4][4];
  for (int step = 0; step < 4; step++) {
    for (int r = 0; r < 4; r++) {
      const int element = (step * 32 + r / 2 * 16 + lane % 4 * 4) / int(sizeof(T));
      fragment[step][r] = *reinterpret_cast<const std::uint32_t*>(
          a + (row + r % 2 * 8) * (kLine / int(sizeof(T))) + element);
    }
  }
  float sum[N / 2];
  gpu::mbarrier_wait(&s.full, 0);
  for (int pass = 0; pass < 2; pass++) {
    gpu::wgmma_hold(sum);
    gpu::wgmma_fence();
    for (int step = 0; step < 4; step++) {
      const int at = step * 32;
      const std::uint64_t desc_a =
          gpu::wgmma_descriptor(s.a + at / span * 64 * span + at % span, swizzle, 16, 8 * span);
      const std::uint64_t desc_b =
          kTransB ? gpu::wgmma_descriptor(s.b + step * 16 * span, swizzle, b_lines * span, 8 * span)
                  : gpu::wgmma_descriptor(s.b + at / span * b_lines * span + at % span, swizzle, 16,
                                          8 * span);
      const bool accumulate = pass > 0 || step > 0;
      if constexpr (sizeof(T) == 1) {
        static_assert(kRs, "kernels have A of e4m3 in registers alone");
        gpu::wgmma_rs_m64k32_e4m3<N>(sum, fragment[step], desc_b, accumulate);
      } else if constexpr (kRs) {
        gpu::wgmma_rs_m64k16<T, N, kTransB>(sum, fragment[step], desc_b, accumulate);
      } else {
        gpu::wgmma_m64k16<T, N, kTransB>(sum, desc_a, desc_b, accumulate);
      }
    }
    gpu::wgmma_commit();
  }
  gpu::wgmma_wait<0>();
  gpu::wgmma_hold(sum);
  for (int j = 0; j < N / 2; j++) {
    d[(row + j / 2 % 2 * 8) * N + j / 4 * 8 + lane % 4 * 2 + j % 2] = sum[j];
  }
}

template <class T, int N, bool kTransB, bool kRs>
void product(const char* type) {
  constexpr int kDepth = kLine / int(sizeof(T));
  auto* a = host::alloc<T>(64 * kDepth);
  auto* b = host::alloc<T>(N * kDepth);
  auto* d = host::alloc<float>(64 * N);
  for (int i = 0; i < 64 * kDepth; i++) a[i] = T(value(i + i / kDepth));
  for (int i = 0; i < N * kDepth; i++) b[i] = T(value(i * 3 + i / kDepth + 5));
  std::vector<float> want(64 * N);
  for (int m = 0; m < 64; m++) {
    for (int n = 0; n < N; n++) {
      for (int k = 0; k < kDepth; k++) {
        want[m * N + n] +=
            2 * float(a[m * kDepth + k]) * float(b[kTransB ? k * N + n : n * kDepth + k]);
      }
    }
  }
  for (int swizzle = 1; swizzle < 4; swizzle++) {
    const unsigned across = kSpans[swizzle] / sizeof(T);
    const std::uint64_t dims_a[2] = {kDepth, 64}, stride_a[1] = {kLine};
    const std::uint64_t dims_b[2] = {kTransB ? N : kDepth, kTransB ? kDepth : N};
    const std::uint64_t stride_b[1] = {dims_b[0] * sizeof(T)};
    const std::uint32_t box_a[2] = {across, 64}, box_b[2] = {across, std::uint32_t(dims_b[1])};
    const auto map_a =
        gpu::encode_tensor_map(sizeof(T), a, 2, dims_a, stride_a, box_a, Swizzle(swizzle));
    const auto map_b =
        gpu::encode_tensor_map(sizeof(T), b, 2, dims_b, stride_b, box_b, Swizzle(swizzle));
    memset(d, 0xff, 64 * N * sizeof(float));
    gpu::launch(multiply<T, N, kTransB, kRs>, dim3(1), dim3(128), sizeof(WgmmaShared), nullptr, {},
                map_a, map_b, Swizzle(swizzle), a, d);
    host::wait();
    const std::string name = std::string(type) + " n" + std::to_string(N) +
                             (kTransB ? " [k,n] " : " [n,k] ") +
                             (kRs ? "A in registers " : "A in shared ") + kSwizzleNames[swizzle];
    host::show(name.c_str(), d, 64 * N);
    for (int i = 0; i < 64 * N; i++) {
      if (d[i] != want[i]) {
        host::expect_equal((name + " at " + std::to_string(i)).c_str(), d[i], want[i]);
        break;
      }
    }
  }
}

template <class T, int N>
void products_16(const char* type) {
  product<T, N, false, false>(type);
  product<T, N, false, true>(type);
  product<T, N, true, false>(type);
  product<T, N, true, true>(type);
}
template <int N>
void products() {
  products_16<bf16, N>("bf16");
  products_16<__half, N>("f16");
  product<e4m3, N, false, true>("e4m3");
}

}  // namespace
}  // namespace specdec

int main() {
  using namespace specdec;
  tile_copies();
  byte_copies();
  rings();
  products<8>();
  products<16>();
  products<32>();
  products<64>();
  products<80>();
  products<96>();
  products<128>();
  products<256>();
  printf("%s\n", host::failures ? "FAILED" : "passed");
  return host::failures != 0;
}

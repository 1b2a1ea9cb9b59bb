// Every primitive of gpu.cuh and every intrinsic the kernels use, on inputs whose results are
// exact. Prints one line for each. Built by g++ it shows what the emulator believes; built by nvcc
// and run on a GPU it shows the truth: `diff` of the two outputs must be empty.
#include <cmath>

#include "gpu/gpu.cuh"
#include "simt/host.h"

namespace specdec {
namespace {

using bf16 = __nv_bfloat16;

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, A... arguments) {
  gpu::launch(kernel, grid, block, smem, nullptr, {}, arguments...);
  host::wait();
}

__global__ void shuffles(unsigned* out) {
  const unsigned l = threadIdx.x % 32, v = l * l + threadIdx.x;
  unsigned* o = out + threadIdx.x * 12;
  o[0] = __shfl_sync(~0u, v, 5);
  o[1] = __shfl_sync(~0u, v, l + 3, 8);
  o[2] = __shfl_xor_sync(~0u, v, 9);
  o[3] = __shfl_up_sync(~0u, v, 3, 16);
  o[4] = __shfl_down_sync(~0u, v, 6, 8);
  o[5] = __ballot_sync(~0u, v & 2);
  o[6] = __any_sync(~0u, l == 31) + 2 * __all_sync(~0u, l < 32) + 4 * __any_sync(~0u, l > 31);
  o[7] = __match_any_sync(~0u, l % 5);
  o[8] = __reduce_add_sync(~0u, v) ^ __reduce_max_sync(~0u, v) ^ __reduce_or_sync(~0u, v);
  if (l % 2) {  // half of the warp
    o[9] = __shfl_xor_sync(0xaaaaaaaau, v, 2);
  } else {
    o[9] = __shfl_xor_sync(0x55555555u, v, 4);
  }
  o[9] ^= gpu::and_or(v * 2654435761u, 0x00f0f0ffu, 0x4b0080f1u);
  o[10] = __popc(v) + __clz(v) * 100 + __ffs(v) * 10000;
  o[11] = __umulhi(v * 2654435761u, 4000000007u);
}

__global__ void reductions(float* out) {
  const float x = float(int(threadIdx.x * 37 % 64) - 20);
  float* o = out + threadIdx.x * 4;
  o[0] = gpu::warp_sum(x);
  o[1] = gpu::warp_max(x);
  o[2] = gpu::quad_sum(x);
  o[3] = gpu::quad_max(x);
}

__global__ void barriers(int* out) {
  int* x = gpu::dynamic_shared<int>();
  const int i = threadIdx.x + threadIdx.y * blockDim.x, n = blockDim.x * blockDim.y;
  x[i] = i * i;
  __syncthreads();
  const int y = x[n - 1 - i];
  const int c = __syncthreads_count(y % 3 == 0);
  const int a = __syncthreads_and(y >= 0), o = __syncthreads_or(y == 1);
  x[i] = y + c + 1000 * a + 2000 * o;
  __syncthreads();
  out[(blockIdx.y * gridDim.x + blockIdx.x) * n + i] = x[(i + 1) % n] + blockIdx.x * 7 + blockIdx.y;
}

// An open-addressing set, as a pool of n-grams has.
__global__ void atomics(unsigned* table, unsigned* counters, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const unsigned key = i * 37 % 101 + 1;
  for (unsigned at = key % 128;; at = (at + 1) % 128) {
    const unsigned was = atomicCAS(&table[at], 0u, key);
    if (was == 0) atomicAdd(&counters[0], 1u);
    if (was == 0 || was == key) break;
  }
  atomicAdd(&counters[1], key);
  atomicMax(&counters[2], key);
  atomicOr(&counters[3], key);
  atomicInc(&counters[4], 9u);
}

// What the blocks wrote before their ticket, summed by the last of them.
__global__ void tickets(unsigned* words, unsigned* parts) {
  if (threadIdx.x != 0) return;
  parts[blockIdx.x] = blockIdx.x * blockIdx.x + 1;
  if (gpu::atomic_add_acq_rel(words, 1) + 1 != gridDim.x) return;
  unsigned sum = 0;
  for (unsigned i = 0; i < gridDim.x; i++) sum += parts[i];
  words[1] = sum;
  gpu::store_release(words + 2, gpu::load_relaxed(words) + gpu::load_acquire(words) * 100);
}

// Two groups of copies: the first is read while the second is under way. Every third of the first
// is of zeros.
__global__ void copies(const uint4* in, uint4* out) {
  uint4* s = gpu::dynamic_shared<uint4>();
  const int l = threadIdx.x;
  gpu::cp_async_16(s + l, in + l, l % 3 != 0);
  gpu::cp_async_commit();
  gpu::cp_async_16(s + 32 + l, in + 32 + l);
  gpu::cp_async_commit();
  gpu::cp_async_wait<1>();
  out[l] = s[l];
  gpu::cp_async_wait<0>();
  out[32 + l] = s[32 + l];
}

// 16x16 times 16x16, added to a sum. b is stored [n, k] and, the same bytes again, taken as [k, n].
template <class T>
__global__ void matrices(const T* in, uint32_t* fragments, float* out) {
  T* s = gpu::dynamic_shared<T>();
  const int l = threadIdx.x;
  gpu::cp_async_16(s + l * 8, in + l * 8);
  gpu::cp_async_16(s + (l + 32) * 8, in + (l + 32) * 8, l != 31);
  gpu::cp_async_commit();
  gpu::cp_async_wait<0>();  // the last 8 values are zeros
  __syncwarp();
  uint32_t a[4], b[4], bt[4], half[2];
  gpu::ldmatrix_x4(a, s + (l % 16) * 16 + l / 16 * 8);
  gpu::ldmatrix_x4(b, s + 256 + (l / 16 * 8 + l % 8) * 16 + l / 8 % 2 * 8);
  gpu::ldmatrix_x4_trans(bt, s + 256 + (l % 16) * 16 + l / 16 * 8);
  gpu::ldmatrix_x2(half, s + 256 + (l % 8) * 16 + l / 8 % 2 * 8);
  uint32_t* f = fragments + l * 14;
  for (int i = 0; i < 4; i++) f[i] = a[i], f[4 + i] = b[i], f[8 + i] = bt[i];
  for (int i = 0; i < 2; i++) f[12 + i] = half[i];
  // Number i of fragment n is element (row, column) of the sum, which starts as 16 row + column.
  const auto row = [l](int i) { return l / 4 + i / 2 * 8; };
  const auto column = [l](int n, int i) { return n % 2 * 8 + l % 4 * 2 + i % 2; };
  float c[4][4];
  for (int n = 0; n < 4; n++) {
    for (int i = 0; i < 4; i++) c[n][i] = float(row(i) * 16 + column(n, i));
  }
  gpu::mma_m16n8k16<T>(c[0], a, b[0], b[1]);
  gpu::mma_m16n8k16<T>(c[1], a, b[2], b[3]);
  gpu::mma_m16n8k16<T>(c[2], a, bt[0], bt[1]);
  gpu::mma_m16n8k16<T>(c[3], a, bt[2], bt[3]);
  for (int n = 0; n < 4; n++) {
    for (int i = 0; i < 4; i++) {
      out[n / 2 * 256 + row(i) * 16 + column(n, i)] = c[n][i];
    }
  }
}

__global__ void conversions(float* out) {
  const float x = (int(threadIdx.x) - 37) * 0.73f;
  float* o = out + threadIdx.x * 7;
  o[0] = __bfloat162float(__float2bfloat16_rn(x));
  o[1] = __half2float(__float2half_rn(x));
  o[2] = float(__nv_fp8_e4m3(x));
  o[3] = float(__nv_fp8_e5m2(x));
  const __nv_bfloat162 p = __floats2bfloat162_rn(x, -x);
  o[4] = __low2float(p) - __high2float(p);
  o[5] = __half2float(__hadd(__float2half_rn(x), __float2half_rn(1.25f)));
  o[6] = threadIdx.x == 0   ? gpu::exp2_approx(-INFINITY)
         : threadIdx.x == 1 ? gpu::exp2_approx(0)
                            : float(gpu::exp2_approx(0.01f * x) > 0);
}

template <class T>
void matrix(const char* name) {
  auto* in = host::alloc<T>(512);
  for (int i = 0; i < 512; i++) in[i] = T(float(i * 7 % 23 - 11));
  auto* fragments = host::alloc<uint32_t>(32 * 14);
  auto* out = host::alloc<float>(512);
  launch(matrices<T>, dim3(1), dim3(32), 1024, in, fragments, out);
  host::show(name, fragments, 32 * 14);
  host::show(name, out, 512);
  const auto b = [&](int r, int c) {
    return r * 16 + c >= 248 ? 0.f : float(in[256 + r * 16 + c]);
  };
  for (int r = 0; r < 16; r++) {
    for (int c = 0; c < 16; c++) {
      float x = float(r * 16 + c), y = x;
      for (int k = 0; k < 16; k++) {
        x += float(in[r * 16 + k]) * b(c, k);
        y += float(in[r * 16 + k]) * b(k, c);
      }
      host::expect_equal(name, out[r * 16 + c], x);
      host::expect_equal(name, out[256 + r * 16 + c], y);
    }
  }
}

}  // namespace
}  // namespace specdec

int main() {
  using namespace specdec;
  auto* u = host::alloc<unsigned>(64 * 12);
  launch(shuffles, dim3(1), dim3(64), 0, u);
  host::show("shuffles", u, 64 * 12);

  auto* r = host::alloc<float>(64 * 4);
  launch(reductions, dim3(1), dim3(64), 0, r);
  host::show("reductions", r, 64 * 4);

  auto* b = host::alloc<int>(6 * 96);
  launch(barriers, dim3(3, 2), dim3(24, 4), 96 * 4, b);
  host::show("barriers", b, 6 * 96);

  auto* table = host::alloc<unsigned>(128);
  auto* counters = host::alloc<unsigned>(8);
  launch(atomics, dim3(5), dim3(64), 0, table, counters, 300);
  for (int i = 0; i < 128; i++) counters[5] += table[i];  // the order within the table may differ
  host::show("atomics", counters, 8);

  auto* words = host::alloc<unsigned>(4);
  auto* parts = host::alloc<unsigned>(9);
  launch(tickets, dim3(9), dim3(32), 0, words, parts);
  host::show("tickets", words, 4);

  matrix<bf16>("bf16 matrices");
  matrix<__half>("f16 matrices");

  auto* pieces = host::alloc<uint4>(64);
  for (unsigned i = 0; i < 64; i++) pieces[i] = {i + 1, i + 100, i + 200, i + 300};
  auto* copied = host::alloc<uint4>(64);
  launch(copies, dim3(1), dim3(32), 1024, pieces, copied);
  host::show("copies", reinterpret_cast<unsigned*>(copied), 256);

  auto* f = host::alloc<float>(97 * 8);
  const unsigned numbers[4] = {1, 2, 3, 4};
  memcpy(f + 96 * 8, numbers, sizeof numbers);
  launch(conversions, dim3(1), dim3(96), 0, f);
  host::show("conversions", f, 96 * 8);
  printf("%s\n", host::failures ? "FAILED" : "passed");
  return host::failures != 0;
}

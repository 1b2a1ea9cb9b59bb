// activation(gate) * up over rows [gate | up].
//
// Grid      (rows, pieces): a thread owns 8 columns of one row.
// Bytes     rows * columns * size * 3, each once.
// Limit     few rows: launch and one load. Many rows: the bytes.
#include "decoder/decoder.h"
#include "decoder/row_elements.cuh"
#include "gpu/gpu.cuh"

namespace specdec::cuda {
namespace {

constexpr int kGateThreads = 128;

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
__device__ __forceinline__ float gelu_tanh(float x) {
  const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanhf(inner));
}

template <class T>
__global__ void __launch_bounds__(kGateThreads)
    gated_activation_kernel(const GatedActivationParams p, const bool aligned) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int at = static_cast<int>(blockIdx.y * kGateThreads + threadIdx.x) * kLaneElements;
  if (at >= p.columns) return;
  const T* gate = static_cast<const T*>(p.x) + blockIdx.x * p.x_row_stride;
  RowVector x, up;
  load_vector(gate, at, p.columns, aligned, x);
  load_vector(gate + p.columns, at, p.columns, aligned, up);
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const float active = p.activation == GateActivation::kSilu ? silu(x[i]) : gelu_tanh(x[i]);
    x[i] = rounded<T>(active) * up[i];
  }
  store_vector(x, static_cast<T*>(p.out) + blockIdx.x * p.out_row_stride, at, p.columns, aligned);
}

}  // namespace

void gated_activation(const GatedActivationParams& p) {
  if (p.rows == 0) return;
  const bool aligned = p.columns % kLaneElements == 0 &&
                       aligned_for_lanes(p.x, p.dtype, p.x_row_stride) &&
                       aligned_for_lanes(p.out, p.dtype, p.out_row_stride);
  const int piece = kGateThreads * kLaneElements;
  const dim3 grid(static_cast<unsigned>(p.rows),
                  static_cast<unsigned>((p.columns + piece - 1) / piece));
  by_type(p.dtype, [&]<class T>() {
    const gpu::LaunchOptions options{.dependent = true};
    gpu::launch(gated_activation_kernel<T>, grid, dim3(kGateThreads), 0, p.exec.stream, options, p,
                aligned);
  });
}

}  // namespace specdec::cuda

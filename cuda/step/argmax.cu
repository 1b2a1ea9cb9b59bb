// The index of the largest score of each row.
//
// Grid      (rows, pieces): a block reads one piece of a row, 16 bytes a thread and load, and keeps
//           the best (value, index); the first index wins a tie, so the cut does not show. With one
//           piece the block writes the id; else a second kernel, a warp for each row, joins the
//           pieces. Rows are cut only as far as it takes to fill a large GPU.
// Bytes     rows * vocab * size, once.
// Limit     many rows: the bytes (64 rows of 128k float32: 33 MB). One row: two launches and a
// load.
#include <algorithm>

#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "step/step.h"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kArgmaxThreads = 256;
constexpr int kWarps = kArgmaxThreads / 32;
constexpr int kMinPiece = 4096;            // elements: below, a launch costs more than it saves
constexpr int kEnoughBlocks = 264;         // two for each multiprocessor of the largest GPUs served
constexpr std::int32_t kNone = INT32_MAX;  // nothing above -infinity so far
constexpr std::int32_t kNaN = -1;

struct Best {
  float value;
  std::int32_t index;  // kNone, kNaN
};

__device__ __forceinline__ Best better(const Best& a, const Best& b) {
  if (a.index == kNaN || b.index == kNaN) return {0.0f, kNaN};
  const bool second = b.value > a.value || (b.value == a.value && b.index < a.index);
  return second ? b : a;
}

// Each thread offers elements in ascending order of index.
__device__ __forceinline__ void offer(Best& best, bool& nan, float value, std::int32_t index) {
  nan |= value != value;
  if (value > best.value) best = {value, index};
}

__device__ __forceinline__ Best best_of_warp(Best best) {
#pragma unroll
  for (int delta = 16; delta > 0; delta /= 2) {
    const Best other = {__shfl_xor_sync(kAllLanes, best.value, delta),
                        __shfl_xor_sync(kAllLanes, best.index, delta)};
    best = better(best, other);
  }
  return best;
}

// The maximum of a whole row; a row of nothing but -infinity has its first at 0.
__device__ __forceinline__ TokenId id_of(const Best& best) {
  return best.index == kNone ? 0 : best.index;
}

template <class T>
__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_kernel(const ArgmaxParams p, const int piece, Best* pieces) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  const int thread = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.x);
  const T* scores = static_cast<const T*>(p.scores) + row * p.row_stride;
  const int begin = static_cast<int>(blockIdx.y) * piece;
  const int end = begin + min(piece, p.vocab - begin);
  // Up to the first 16-byte boundary one by one, then vectors, then the rest one by one.
  const int misaligned =
      static_cast<int>(reinterpret_cast<std::uintptr_t>(scores + begin) % 16 / sizeof(T));
  const int aligned = min(end, begin + (kVector - misaligned) % kVector);
  const int vectors = (end - aligned) / kVector;

  Best best = {__int_as_float(0xff800000), kNone};
  bool nan = false;
  if (begin + thread < aligned) offer(best, nan, widen(scores[begin + thread]), begin + thread);
#pragma unroll 4
  for (int i = thread; i < vectors; i += kArgmaxThreads) {
    const int at = aligned + i * kVector;
    float x[kVector];
    load_floats(scores + at, true, x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) offer(best, nan, x[j], at + j);
  }
  const int rest = aligned + vectors * kVector + thread;
  if (rest < end) offer(best, nan, widen(scores[rest]), rest);
  if (nan) best = {0.0f, kNaN};

  Best* shared = gpu::dynamic_shared<Best>();
  best = best_of_warp(best);
  if (thread % 32 == 0) shared[thread / 32] = best;
  __syncthreads();
  if (thread != 0) return;
  for (int w = 1; w < kWarps; ++w) best = better(best, shared[w]);
  if (pieces != nullptr) {
    pieces[std::int64_t{row} * gridDim.y + blockIdx.y] = best;
  } else {
    p.ids[row] = id_of(best);
  }
}

__global__ void __launch_bounds__(kArgmaxThreads)
    join_kernel(const Best* pieces, const int num_pieces, const int rows, TokenId* ids) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32);
  if (row >= rows) return;
  Best best = {__int_as_float(0xff800000), kNone};
  for (int i = lane_id(); i < num_pieces; i += 32) {
    best = better(best, pieces[std::int64_t{row} * num_pieces + i]);
  }
  best = best_of_warp(best);
  if (lane_id() == 0) ids[row] = id_of(best);
}

// Elements of a piece of a row.
int piece_of(std::int32_t rows, std::int32_t vocab) {
  const int wanted = (kEnoughBlocks + rows - 1) / rows;
  const int pieces = std::max(1, std::min(wanted, vocab / kMinPiece));
  const int piece = (vocab + pieces - 1) / pieces;
  return (piece + kArgmaxThreads - 1) / kArgmaxThreads * kArgmaxThreads;
}

int pieces_of(std::int32_t vocab, int piece) { return (vocab + piece - 1) / piece; }

template <class T>
void launch_argmax(const ArgmaxParams& p) {
  const bool shares = p.exec.workspace != nullptr &&
                      p.exec.workspace_bytes >= argmax_workspace_bytes(p.rows, p.vocab);
  const int piece = shares ? piece_of(p.rows, p.vocab) : p.vocab;
  const int pieces = pieces_of(p.vocab, piece);
  Best* partial = pieces > 1 ? static_cast<Best*>(p.exec.workspace) : nullptr;
  const gpu::LaunchOptions options{.dependent = true};
  gpu::launch(argmax_kernel<T>, dim3(static_cast<unsigned>(p.rows), static_cast<unsigned>(pieces)),
              dim3(kArgmaxThreads), kWarps * sizeof(Best), p.exec.stream, options, p, piece,
              partial);
  if (partial == nullptr) return;
  gpu::launch(join_kernel, dim3(static_cast<unsigned>((p.rows + kWarps - 1) / kWarps)),
              dim3(kArgmaxThreads), 0, p.exec.stream, options, partial, pieces, p.rows, p.ids);
}

}  // namespace

std::int64_t argmax_workspace_bytes(std::int32_t rows, std::int32_t vocab) {
  if (rows <= 0 || vocab <= 0) return 0;
  const int pieces = pieces_of(vocab, piece_of(rows, vocab));
  return pieces > 1 ? std::int64_t{rows} * pieces * static_cast<std::int64_t>(sizeof(Best)) : 0;
}

void argmax(const ArgmaxParams& p) {
  if (p.rows == 0) return;
  switch (p.dtype) {
    case DType::kBF16:
      return launch_argmax<__nv_bfloat16>(p);
    case DType::kF16:
      return launch_argmax<__half>(p);
    default:
      return launch_argmax<float>(p);
  }
}

}  // namespace specdec::cuda

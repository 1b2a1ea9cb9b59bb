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
#include "step/row_best.cuh"
#include "step/step.h"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kArgmaxThreads = 256;
constexpr int kWarps = kArgmaxThreads / 32;
constexpr int kMinPiece = 4096;     // elements: below, a launch costs more than it saves
constexpr int kEnoughBlocks = 264;  // two for each multiprocessor of the largest GPUs served
template <class T>
__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_kernel(const ArgmaxParams p, const int piece, Best* pieces) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int row = static_cast<int>(blockIdx.x);
  const T* scores = static_cast<const T*>(p.scores) + row * p.row_stride;
  const int begin = static_cast<int>(blockIdx.y) * piece;
  const int end = begin + min(piece, p.vocab - begin);
  const Best best = best_of_block<kArgmaxThreads>(
      best_of_thread<kArgmaxThreads>(scores, begin, end), gpu::dynamic_shared<Best>());
  if (threadIdx.x != 0) return;
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
  Best best = no_best();
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

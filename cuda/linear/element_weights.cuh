// 16-bit weights as they lie in memory: an operand of linear.cuh by way of ldmatrix.
#pragma once

#include <cstdint>

#include "backend/linear_op.h"
#include "gpu/gpu.cuh"

namespace specdec::cuda {

// A stage is a line of 128 bytes for each column, swizzled as the lines of x.
template <class T_>
struct ElementWeights {
  using T = T_;
  static constexpr int kWarpRows = 32;  // of a warp of a wide block
  static constexpr int stage_bytes(int columns) {
    return columns * kLinearChunk * static_cast<int>(sizeof(T));
  }

  // A thread's share of the copies of stages. What lies outside of the matrix is zero.
  template <class Config>
  struct Copier {
    static constexpr int kPieces = Config::kColumnTile * Config::kLinePieces;
    static_assert(kPieces % Config::kRingThreads == 0, "every thread copies as much");
    const LinearParams& call;
    std::int32_t first_column;
    int thread;

    __device__ __forceinline__ Copier(const LinearParams& call, std::int32_t first_column,
                                      int thread)
        : call(call), first_column(first_column), thread(thread) {}
    __device__ __forceinline__ void copy(unsigned char* stage, std::int32_t k) const {
#pragma unroll
      for (int i = 0; i < kPieces / Config::kRingThreads; ++i) {
        const int c = thread + i * Config::kRingThreads;
        const int line = c / Config::kLinePieces, piece = c % Config::kLinePieces;
        const std::int32_t column = first_column + line, at = k + piece * 8;
        const bool valid = column < call.columns && at < call.depth;
        const T* from = static_cast<const T*>(call.weight);
        if (valid) from += column * call.weight_row_stride + at;
        gpu::cp_async_16(stage + Config::swizzle(line, piece), from, valid);
      }
    }
  };

  // The warp's columns of a stage, as fragments of 16 columns by 16 k.
  template <class Config>
  struct Operand {
    const unsigned char* stage;
    int line, piece;

    __device__ __forceinline__ Operand(const unsigned char* stage, int column, int lane)
        : stage(stage), line(column + lane % 16), piece(lane / 16) {}
    __device__ __forceinline__ void load(int step, int m, std::uint32_t (&a)[4]) const {
      gpu::ldmatrix_x4(a, stage + Config::swizzle(line + m * 16, step * 2 + piece));
    }
  };
};

}  // namespace specdec::cuda

// Weights of 8 and 4 bits (backend/packed_weight.h), widened in the registers that multiply them.
//
// A lane reads the numbers of its fragments as whole vectors of 16 bytes, in the order in which
// mma.sync takes them: neither ldmatrix nor a shuffle. Each becomes a float by its bits alone: set
// into the mantissa of a power of two, less that power and the format's zero, which is exact. Times
// the scale (and plus the minimum) in float32, rounded once to T.
#pragma once

#include <cstdint>

#include "backend/linear_op.h"
#include "gpu/gpu.cuh"
#include "kv/elements.cuh"

namespace specdec::cuda {

// Two floats, rounded, as one register of an operand, the first in its lower half.
template <class T>
__device__ __forceinline__ std::uint32_t rounded_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
}

// Number `place` of 8 that begin at `words`, less `zero`: exact.
template <int kBits>
__device__ __forceinline__ float number_of(const std::uint32_t* words, int place, int zero) {
  if constexpr (kBits == 4) {
    // The mantissa's 23 bits hold five numbers; the last three are shifted there first.
    const std::uint32_t word = place < 5 ? words[0] : words[0] >> 20;
    const int bit = (place < 5 ? place : place - 5) * 4;
    const std::uint32_t bits = (word & (15u << bit)) | (static_cast<unsigned>(150 - bit) << 23);
    return __uint_as_float(bits) - static_cast<float>((1 << (23 - bit)) + zero);
  } else {
    const std::uint32_t bits =
        __byte_perm(words[place / 4], 0x4b000000u, 0x7650u | static_cast<unsigned>(place % 4));
    return __uint_as_float(bits) - static_cast<float>((1 << 23) + zero);
  }
}

// A stage is a tile of the packed weight for every 32 columns.
template <class T_, WeightFormat kFormat>
struct PackedWeights {
  using T = T_;
  static constexpr PackedLayout kLayout = packed_layout(kFormat);
  static_assert(kLayout.kDepth == kLinearChunk && kWeightGroup == 32);
  // Every warp of a wide block that has a column widens its weights: few should.
  static constexpr int kWarpRows = 64;
  static constexpr int stage_bytes(int columns) {
    return columns / kLayout.kColumns * kLayout.tile_bytes();
  }

  // A thread's share of the copies of a stage. Tiles past the last column are zero.
  template <class Config>
  static __device__ __forceinline__ void copy(const LinearParams& call, unsigned char* to,
                                              int thread, std::int32_t first_column, std::int32_t k,
                                              std::uint64_t policy) {
    constexpr int kTilePieces = kLayout.tile_bytes() / 16;
    constexpr int kPieces = Config::kWeightBytes / 16;
    constexpr int kCopies = (kPieces - 1) / Config::kRingThreads + 1;
    const std::int64_t depth_tiles = PackedLayout::depth_tiles(call.depth);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int piece = thread + i * Config::kRingThreads;
      if (kPieces % Config::kRingThreads != 0 && piece >= kPieces) break;
      const std::int32_t column = first_column + piece / kTilePieces * kLayout.kColumns;
      const bool valid = column < call.columns;
      const unsigned char* from = static_cast<const unsigned char*>(call.weight);
      if (valid) {
        const std::int64_t tile =
            column / kLayout.kColumns * depth_tiles + k / PackedLayout::kDepth;
        from += tile * kLayout.tile_bytes() + piece % kTilePieces * 16;
      }
      gpu::cp_async_16_hint(to + piece * 16, from, valid, policy);
    }
  }

  // The warp's 32 columns of a stage, as fragments of 16 columns by 16 k.
  template <class Config>
  struct Operand {
    static constexpr int kVectors = kLayout.bits / 4;     // of a fragment's columns
    static constexpr int kSteps = 4 / kVectors;           // of 16 k in a vector
    static constexpr int kWords = kLayout.bits * 8 / 32;  // of a lane's 8 numbers of a step
    std::uint32_t numbers[Config::kColumnFragments][kVectors][4];
    // By column of the lane's, 8 apart, then by group of k.
    float scales[kLaneElements], minimums[kLayout.has_minimum ? kLaneElements : 1];

    __device__ __forceinline__ Operand(const unsigned char* stage, int column, int lane) {
      const unsigned char* tile = stage + column / kLayout.kColumns * kLayout.tile_bytes();
#pragma unroll
      for (int m = 0; m < Config::kColumnFragments; ++m) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const uint4 vector = reinterpret_cast<const uint4*>(tile)[(m * kVectors + v) * 32 + lane];
          numbers[m][v][0] = vector.x, numbers[m][v][1] = vector.y;
          numbers[m][v][2] = vector.z, numbers[m][v][3] = vector.w;
        }
      }
      const auto* factors =
          reinterpret_cast<const __half*>(tile + kLayout.number_bytes()) + lane / 4 * kLaneElements;
      load_floats(factors, true, scales);
      if constexpr (kLayout.has_minimum) {
        load_floats(factors + kLayout.kScaleBytes / 2, true, minimums);
      }
    }

    __device__ __forceinline__ void load(int step, int m, std::uint32_t (&a)[4]) const {
      const std::uint32_t* words = numbers[m][step / kSteps] + step % kSteps * kWords;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int factor = (m * 2 + r % 2) * 2 + step / 2;
        float pair[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float number = number_of<kLayout.bits>(words, 2 * r + i, kLayout.zero);
          if constexpr (kLayout.has_minimum) {
            pair[i] = fmaf(number, scales[factor], minimums[factor]);
          } else {
            pair[i] = number * scales[factor];
          }
        }
        a[r] = rounded_pair<T>(pair[0], pair[1]);
      }
    }
  };
};

}  // namespace specdec::cuda

// Weights of 8 and 4 bits (backend/packed_weight.h), widened in the registers that multiply them.
//
// A lane reads the numbers of its fragments as whole vectors of 16 bytes, in the order in which the
// matrix instructions take them: neither ldmatrix nor a shuffle. Each becomes a float by its bits
// alone: set into the mantissa of a power of two, less that power and the format's zero; an e4m3
// number is one of float16. Its product with the scale is rounded to float32, the sum with a
// minimum is rounded there again; then the weight is rounded to T.
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

// The scale of a lane's column and group, and the minimum. widen() makes a weight of number `place`
// of the 8 that begin at `words`.
template <WeightFormat kFormat>
struct WeightFactors {
  static constexpr PackedLayout kLayout = packed_layout(kFormat);
  float scale, minimum;

  __device__ __forceinline__ WeightFactors(float scale, float minimum)
      : scale(scale), minimum(minimum) {}
  __device__ __forceinline__ float widen(const std::uint32_t* words, int place) const {
    if constexpr (kFormat == WeightFormat::kF8_G) {
      // 2^-8 of the number as float16, subnormal ones too: its seven bits below the sign move by
      // one. The scale makes up for it, which is exact (ops.pack_weight refuses larger ones).
      const std::uint32_t bytes =
          __byte_perm(words[place / 4], 0u, place % 4 < 2 ? 0x1404u : 0x3424u);
      const std::uint32_t bits = gpu::and_or(bytes, 0x80008000u, bytes >> 1 & 0x3f803f80u);
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&bits));
      return (place % 2 == 0 ? pair.x : pair.y) * (scale * 256.0f);
    } else if constexpr (kLayout.bits == 8) {
      const std::uint32_t bits =
          __byte_perm(words[place / 4], 0x4b000000u, 0x7650u | static_cast<unsigned>(place % 4));
      const float number = __uint_as_float(bits) - static_cast<float>((1 << 23) + kLayout.zero);
      return kLayout.has_minimum ? __fadd_rn(__fmul_rn(number, scale), minimum) : number * scale;
    } else {
      // The mantissa's 23 bits hold five numbers; the last three are shifted there first. The
      // product is exact, so that one fused instruction rounds as two.
      static_assert(kLayout.has_minimum && kLayout.zero == 0);
      const std::uint32_t word = place < 5 ? words[0] : words[0] >> 20;
      const int bit = (place < 5 ? place : place - 5) * 4;
      const std::uint32_t bits =
          gpu::and_or(word, 15u << bit, static_cast<std::uint32_t>(150 - bit) << 23);
      return fmaf(__uint_as_float(bits) - static_cast<float>(1 << (23 - bit)), scale, minimum);
    }
  }
};

// (2^e + number) scale - (2^e + 8) scale, where the last product has at most 24 bits and is exact.
// That takes e of at most 15: numbers at bits 8, 12 and 16, the others are shifted there.
template <>
struct WeightFactors<WeightFormat::kQ4_0> {
  float scale, offsets[3];

  __device__ __forceinline__ WeightFactors(float scale, float) : scale(scale) {
#pragma unroll
    for (int i = 0; i < 3; ++i) offsets[i] = scale * -static_cast<float>((1 << (15 - 4 * i)) + 8);
  }
  __device__ __forceinline__ float widen(const std::uint32_t* words, int place) const {
    const int at = place < 2 ? place : (place - 2) % 3;
    const int bit = 8 + 4 * at;
    const std::uint32_t word = place < 2 ? words[0] << 8 : place < 5 ? words[0] : words[0] >> 12;
    const std::uint32_t bits =
        gpu::and_or(word, 15u << bit, static_cast<std::uint32_t>(150 - bit) << 23);
    return fmaf(__uint_as_float(bits), scale, offsets[at]);
  }
};

// The 8 numbers of a lane's two columns at `words` as its part of the operand of m16n8k16, which is
// also what a warp gives wgmma. factors: of the two columns.
template <class T, WeightFormat kFormat>
__device__ __forceinline__ void widen_fragment(const std::uint32_t* words,
                                               const WeightFactors<kFormat> (&factors)[2],
                                               std::uint32_t (&a)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const WeightFactors<kFormat>& weight = factors[r % 2];
    a[r] = rounded_pair<T>(weight.widen(words, 2 * r), weight.widen(words, 2 * r + 1));
  }
}

// A stage is a tile of the packed weight for every 32 columns.
template <class T_, WeightFormat kFormat>
struct PackedWeights {
  using T = T_;
  static constexpr PackedLayout kLayout = packed_layout(kFormat);
  static_assert(kLayout.kDepth == kLinearChunk && kLayout.group % 16 == 0);
  // Every warp of a wide block that has a column widens its weights: few should.
  static constexpr int kWarpRows = 64;
  static constexpr int stage_bytes(int columns) {
    return columns / kLayout.kColumns * kLayout.tile_bytes();
  }

  // A thread's share of the copies of stages: pieces of one tile each. Tiles past the last column
  // are zero.
  template <class Config>
  struct Copier {
    static constexpr int kTilePieces = kLayout.tile_bytes() / 16;
    static constexpr int kTileThreads =
        Config::kRingThreads / (Config::kColumnTile / kLayout.kColumns);
    static constexpr int kCopies = (kTilePieces - 1) / kTileThreads + 1;
    static_assert(kTileThreads % 32 == 0);
    const unsigned char* from;  // the thread's first piece at k = 0
    int first, offset;          // its number in the tile; its place in a stage
    bool valid;

    __device__ __forceinline__ Copier(const LinearParams& call, std::int32_t first_column,
                                      int thread)
        : first(thread % kTileThreads) {
      const int tile = thread / kTileThreads;
      const std::int32_t column = first_column + tile * kLayout.kColumns;
      valid = column < call.columns;
      offset = tile * kLayout.tile_bytes() + first * 16;
      from = static_cast<const unsigned char*>(call.weight);
      if (!valid) return;
      const std::int64_t before = column / kLayout.kColumns * PackedLayout::depth_tiles(call.depth);
      from += before * kLayout.tile_bytes() + first * 16;
    }
    __device__ __forceinline__ void copy(unsigned char* stage, std::int32_t k) const {
      const unsigned char* piece =
          from +
          static_cast<std::int64_t>(valid ? k / PackedLayout::kDepth : 0) * kLayout.tile_bytes();
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        if ((i + 1) * kTileThreads > kTilePieces && first + i * kTileThreads >= kTilePieces) break;
        gpu::cp_async_16(stage + offset + i * kTileThreads * 16, piece + i * kTileThreads * 16,
                         valid);
      }
    }
  };

  // The warp's 32 columns of a stage, as fragments of 16 columns by 16 k.
  template <class Config>
  struct Operand {
    static constexpr int kVectors = kLayout.bits / 4;     // of a fragment's columns
    static constexpr int kSteps = 4 / kVectors;           // of 16 k in a vector
    static constexpr int kWords = kLayout.bits * 8 / 32;  // of a lane's 8 numbers of a step
    static constexpr int kColumns = 2 * Config::kColumnFragments;  // of a lane, 8 apart
    using Factor = std::conditional_t<kLayout.is_wide, float, __half>;
    std::uint32_t numbers[Config::kColumnFragments][kVectors][4];
    const Factor* factors;                       // the lane's scales of the first group
    float scales[kColumns], minimums[kColumns];  // of one group of k

    __device__ __forceinline__ Operand(const unsigned char* stage, int column, int lane) {
      static_assert(kColumns * 8 == PackedLayout::kColumns);
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
      factors =
          reinterpret_cast<const Factor*>(tile + kLayout.number_bytes()) + lane / 4 * kColumns;
    }

    // Steps ascending, of each the fragments: factors are read once for a group.
    __device__ __forceinline__ void load(int step, int m, std::uint32_t (&a)[4]) {
      if (m == 0 && step % (kLayout.group / 16) == 0) {
        const Factor* from = factors + step * 16 / kLayout.group * PackedLayout::kColumns;
        load_floats(from, true, scales);
        if constexpr (kLayout.has_minimum) {
          constexpr int kScales = kLayout.scale_bytes() / static_cast<int>(sizeof(Factor));
          load_floats(from + kScales, true, minimums);
        }
      }
      const std::uint32_t* words = numbers[m][step / kSteps] + step % kSteps * kWords;
      const auto at = [&](int i) {
        return WeightFactors<kFormat>(scales[i], kLayout.has_minimum ? minimums[i] : 0.0f);
      };
      widen_fragment<T, kFormat>(words, {at(m * 2), at(m * 2 + 1)}, a);
    }
  };
};

}  // namespace specdec::cuda

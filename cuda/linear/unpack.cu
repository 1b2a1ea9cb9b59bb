// Packed weights (backend/packed_weight.h) as a matrix, for the products of many rows that another
// library makes.
//
// Grid      (tiles of 32 columns by 4 x 64 k): a warp turns one tile.
// Block     4 warps
// Bytes     the tiles read once; columns * depth * 2 written, or * 1 of e4m3 numbers.
// Limit     memory.
#include <type_traits>

#include "gpu/gpu.cuh"
#include "kv/elements.cuh"
#include "linear/packed_formats.h"
#include "linear/packed_weights.cuh"
#include "linear/unpack.h"
#include "step/step_rows.cuh"

namespace specdec::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kColumns = PackedLayout::kColumns, kDepth = PackedLayout::kDepth;

// Bytes from a column of a tile to the next in shared memory. The 16 spread what the lanes of a
// warp write over all banks.
template <class Out>
constexpr int kPitch = kDepth * static_cast<int>(sizeof(Out)) + 16;

struct WholeTile {
  static constexpr int kColumnFragments = kColumns / 16;
};

// A lane's pairs of successive k, at their places among the columns.
template <class T, WeightFormat kFormat>
__device__ __forceinline__ void spread_elements(const unsigned char* tile, unsigned char* columns) {
  const int lane = lane_id();
  typename PackedWeights<T, kFormat>::template Operand<WholeTile> operand(tile, 0, lane);
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
#pragma unroll
    for (int m = 0; m < WholeTile::kColumnFragments; ++m) {
      std::uint32_t a[4];
      operand.load(step, m, a);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int column = m * 16 + r % 2 * 8 + lane / 4;
        const int k = step * 16 + r / 2 * 8 + lane % 4 * 2;
        *reinterpret_cast<std::uint32_t*>(columns + column * kPitch<T> + k * 2) = a[r];
      }
    }
  }
}

// The same of e4m3 numbers as they are.
__device__ __forceinline__ void spread_numbers(const unsigned char* tile, unsigned char* columns) {
  const int lane = lane_id();
#pragma unroll
  for (int m = 0; m < kColumns / 16; ++m) {
#pragma unroll
    for (int v = 0; v < kDepth / 32; ++v) {
      const uint4 vector = reinterpret_cast<const uint4*>(tile)[(m * 2 + v) * 32 + lane];
      const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int k = v * 32 + w * 8 + lane % 4 * 2;
        unsigned char* to = columns + (m * 16 + lane / 4) * kPitch<E4M3> + k;
        *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(words[w]);
        *reinterpret_cast<std::uint16_t*>(to + 8 * kPitch<E4M3>) =
            static_cast<std::uint16_t>(words[w] >> 16);
      }
    }
  }
}

template <class Out, WeightFormat kFormat>
__global__ void __launch_bounds__(kWarps * 32) unpack_kernel(const UnpackWeightParams p) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  constexpr int kTileBytes = packed_layout(kFormat).tile_bytes();
  constexpr int kElements = 16 / static_cast<int>(sizeof(Out));  // of a vector
  constexpr int kVectors = kDepth / kElements;                   // of a column
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t depth_tiles = PackedLayout::depth_tiles(p.depth);
  const std::int64_t blocks = (depth_tiles + kWarps - 1) / kWarps;  // of 32 columns
  const std::int64_t columns_of = blockIdx.x / blocks;
  const std::int64_t k_tile = blockIdx.x % blocks * kWarps + warp;
  if (k_tile >= depth_tiles) return;
  unsigned char* columns = gpu::dynamic_shared<unsigned char>() + warp * kColumns * kPitch<Out>;
  const unsigned char* tile =
      static_cast<const unsigned char*>(p.weight) +
      ((p.first / kColumns + columns_of) * depth_tiles + k_tile) * kTileBytes;
  if constexpr (std::is_same_v<Out, E4M3>) {
    spread_numbers(tile, columns);
  } else {
    spread_elements<Out, kFormat>(tile, columns);
  }
  __syncwarp();
  const std::int64_t first_column = columns_of * kColumns, first_k = k_tile * kDepth;
#pragma unroll
  for (int i = 0; i < kColumns * kVectors / 32; ++i) {
    const int vector = i * 32 + lane_id();
    const int column = vector / kVectors, k = vector % kVectors * kElements;
    if (first_column + column >= p.columns || first_k + k >= p.depth) continue;
    *reinterpret_cast<uint4*>(static_cast<Out*>(p.out) + (first_column + column) * p.depth +
                              first_k + k) =
        *reinterpret_cast<const uint4*>(columns + column * kPitch<Out> +
                                        k * static_cast<int>(sizeof(Out)));
  }
}

template <class Out, WeightFormat kFormat>
void launch_unpack(const UnpackWeightParams& p) {
  const std::int64_t blocks = (PackedLayout::depth_tiles(p.depth) + kWarps - 1) / kWarps;
  const std::int64_t grid = PackedLayout::column_tiles(p.columns) * blocks;
  gpu::launch(unpack_kernel<Out, kFormat>, dim3(static_cast<unsigned>(grid)), dim3(kWarps * 32),
              kWarps * kColumns * kPitch<Out>, p.exec.stream, gpu::LaunchOptions{.dependent = true},
              p);
}

}  // namespace

void unpack_weight(const UnpackWeightParams& p) {
  if (p.columns == 0) return;
  if (p.dtype == DType::kF8E4M3) return launch_unpack<E4M3, WeightFormat::kF8_G>(p);
  by_format(p.dtype, p.format,
            [&]<class T, WeightFormat kFormat>() { launch_unpack<T, kFormat>(p); });
}

}  // namespace specdec::cuda

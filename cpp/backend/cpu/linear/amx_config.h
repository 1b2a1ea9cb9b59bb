// What ldtilecfg reads: the shapes of the eight tile registers.
#pragma once

#include <algorithm>
#include <cstdint>

namespace specdec::cpu {

inline constexpr int kAmxRows = 16;  // of a tile register

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  void set(int tile, int num_rows, int bytes) {
    rows[tile] = static_cast<std::uint8_t>(num_rows);
    row_bytes[tile] = static_cast<std::uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

// Up to 32 rows times 32 columns. Registers, which intrinsics name by literals: 0 and 1 hold the
// sums of the left and the right 16 columns for the first 16 rows, 2 and 3 those of the others; 4
// and 5 x of these rows, x_bytes of each; 6 and 7 the weights of the left and the right columns,
// 4 bytes of k in each of their rows.
inline TileConfig panel_config(int rows, int x_bytes) {
  TileConfig config;
  for (int group = 0; group < 2; ++group) {
    const int height = std::clamp(rows - group * kAmxRows, 0, kAmxRows);
    if (height == 0) continue;
    config.set(2 * group, height, 64);
    config.set(2 * group + 1, height, 64);
    config.set(4 + group, height, x_bytes);
  }
  config.set(6, x_bytes / 4, 64);
  config.set(7, x_bytes / 4, 64);
  return config;
}

// Call it between writing memory and the tile instruction that reads it: to GCC the intrinsics read
// nothing, and it leaves writes out that only they would see.
inline __attribute__((always_inline)) void written_for_tiles(const void* memory) {
  asm volatile("" : : "r"(memory) : "memory");
}

}  // namespace specdec::cpu

// bf16 weights with the tile instructions (AMX): up to 16 rows cost little more than one.
//
// A tile product adds 32 k to its sums: those of even k are added up in one chain and those of odd
// k in another, from zero, and the two sums, one after the other added, to what was there. So bits
// differ from those of vdpbf16ps, but a row's do not depend on how many rows a tile has.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "backend/cpu/linear/amx_config.h"
#include "backend/cpu/linear/linear_ops_avx512_bf16.h"

namespace specdec::cpu {
namespace {

constexpr int kBlockSteps = 16;  // of 2 k: what a tile product takes
constexpr int kPanelStepBytes = 128;
constexpr int kBlockBytes = kBlockSteps * kPanelStepBytes;
constexpr int kColumns = 32;

// A quarter of a block into the first-level cache: loads of tiles that find a line in the second
// level alone are slow. always_inline: GCC drops calls of a function that only prefetches.
inline __attribute__((always_inline)) void fetch_quarter(const std::byte* block, int quarter) {
#pragma GCC unroll 8
  for (int line = 0; line < kBlockBytes / 4; line += 64) {
    const std::byte* at = block + quarter * (kBlockBytes / 4) + line;
    _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
  }
}

// Adds one block to the sums, and fetches another between the instructions.
template <bool kTwoGroups>
inline __attribute__((always_inline)) void add_tiles(const std::byte* panel, const std::byte* x,
                                                     std::int64_t x_row_bytes,
                                                     const std::byte* next) {
  _tile_loadd(4, x, x_row_bytes);
  fetch_quarter(next, 0);
  _tile_loadd(6, panel, kPanelStepBytes);
  _tile_dpbf16ps(0, 4, 6);
  fetch_quarter(next, 1);
  _tile_loadd(7, panel + 64, kPanelStepBytes);
  _tile_dpbf16ps(1, 4, 7);
  fetch_quarter(next, 2);
  if constexpr (kTwoGroups) {
    _tile_loadd(5, x + kAmxRows * x_row_bytes, x_row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  fetch_quarter(next, 3);
}

// The last steps, fewer than a block's, with zeros behind them.
template <int kRows>
void add_last(const TileArgs& args, std::int64_t step) {
  const auto count = static_cast<std::size_t>(args.steps - step);
  alignas(64) std::byte panel[kBlockBytes] = {}, x[kRows * 64] = {};
  std::memcpy(panel, args.panel + step * kPanelStepBytes, count * kPanelStepBytes);
  for (int m = 0; m < kRows; ++m) {
    std::memcpy(x + m * 64, args.x + m * args.x_row_bytes + step * 4, count * 4);
  }
  written_for_tiles(panel);
  written_for_tiles(x);
  add_tiles<(kRows > kAmxRows)>(panel, x, 64, panel);
}

// 16 columns of a row of y.
inline __attribute__((always_inline)) void write_sum(const TileArgs& args, int row, int column,
                                                     Avx512Bf16::Vec sum) {
  using Op = Avx512Bf16;
  float* y = args.y + row * args.y_stride + column;
  if (args.scale != nullptr) sum = Op::mul(sum, Op::load_y(args.scale + column));
  if (args.resume) sum = Op::add(Op::load_y(y), sum);
  if (args.bias != nullptr) sum = Op::add(sum, Op::load_y(args.bias + column));
  Op::store_y(y, sum);
}

// Denormal numbers are zeros, as they are to tile products, while it lives.
class NoDenormals {
 public:
  NoDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~NoDenormals() { _mm_setcsr(before_); }
  NoDenormals(const NoDenormals&) = delete;
  NoDenormals& operator=(const NoDenormals&) = delete;

 private:
  unsigned before_;
};

struct Bf16Weights {
  static constexpr int kStepBytes = kPanelStepBytes;
  static void load(const std::byte* step, __m512i* w) {
    w[0] = _mm512_load_si512(step);
    w[1] = _mm512_load_si512(step + 64);
  }
};
struct E4m3Weights {
  static constexpr int kStepBytes = Avx512E4m3::kStepBytes;
  static void load(const std::byte* step, __m512i* w) {
    __m512bh wide[2];
    Avx512E4m3::load_step(step, wide);
    w[0] = reinterpret_cast<__m512i>(wide[0]);
    w[1] = reinterpret_cast<__m512i>(wide[1]);
  }
};

// One row: the same sums in the same order by fused multiply-adds of floats. It waits for memory
// alone, and loads of tiles reach less of its speed.
template <typename Weights>
inline __attribute__((always_inline)) void one_row_chain(const TileArgs& args) {
  constexpr int kVecs = 2;
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const auto even = [](__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); };
  const auto odd = [&](__m512i v) { return _mm512_castsi512_ps(_mm512_and_si512(v, upper)); };
  __m512 sums[kVecs] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  const std::int64_t ahead = args.prefetch - args.panel;
  {
    const NoDenormals mode;
    for (std::int64_t first = 0; first < args.steps; first += kBlockSteps) {
      const std::int64_t end = std::min(first + kBlockSteps, args.steps);
      __m512 evens[kVecs] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
      __m512 odds[kVecs] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
      for (std::int64_t step = first; step < end; ++step) {
        const std::byte* panel = args.panel + step * Weights::kStepBytes;
        Avx512Bf16::prefetch(panel + ahead);
        if constexpr (Weights::kStepBytes > 64) Avx512Bf16::prefetch(panel + ahead + 64);
        std::int32_t pair;
        std::memcpy(&pair, args.x + step * 4, sizeof(pair));
        const __m512i x = _mm512_set1_epi32(pair);
        const __m512 x_even = even(x), x_odd = odd(x);
        __m512i w[kVecs];
        Weights::load(panel, w);
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) {
          evens[v] = _mm512_fmadd_ps(even(w[v]), x_even, evens[v]);
          odds[v] = _mm512_fmadd_ps(odd(w[v]), x_odd, odds[v]);
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        sums[v] = _mm512_add_ps(sums[v], _mm512_add_ps(evens[v], odds[v]));
      }
    }
  }
  for (int v = 0; v < kVecs; ++v) write_sum(args, 0, v * Avx512Bf16::kLanes, sums[v]);
}

void one_e4m3_row_tile(const TileArgs& args) {
  for_each_group<Avx512E4m3>(args,
                             [](const TileArgs& group) { one_row_chain<E4m3Weights>(group); });
}

void widen_e4m3(const std::byte* codes, std::uint16_t* out, const std::byte* prefetch) {
  for (int i = 0; i < kScaledCodes; i += Avx512E4m3::kStepBytes) {
    Avx512E4m3::prefetch(prefetch + i);
    __m512i wide[2];
    E4m3Weights::load(codes + i, wide);
    _mm512_store_si512(out + i, wide[0]);
    _mm512_store_si512(out + i + 32, wide[1]);
  }
}

template <int kRows>
void amx_tile(const TileArgs& args) {
  constexpr bool kTwoGroups = kRows > kAmxRows;
  constexpr int kStride = kColumns * 4;
  if (*args.configured_rows != kRows) {
    const TileConfig config = panel_config(kRows, 64);
    written_for_tiles(&config);
    _tile_loadconfig(&config);
    *args.configured_rows = kRows;
  }
  if (args.carried_in) {
    written_for_tiles(args.carry);
    _tile_loadd(0, args.carry, kStride);
    _tile_loadd(1, args.carry + 16, kStride);
    if constexpr (kTwoGroups) {
      _tile_loadd(2, args.carry + kAmxRows * kColumns, kStride);
      _tile_loadd(3, args.carry + kAmxRows * kColumns + 16, kStride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwoGroups) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  const std::int64_t ahead = args.prefetch - args.panel;
  std::int64_t step = 0;
  for (; step + kBlockSteps <= args.steps; step += kBlockSteps) {
    const std::byte* panel = args.panel + step * kPanelStepBytes;
    const std::byte* x = args.x + step * 4;
    add_tiles<kTwoGroups>(panel, x, args.x_row_bytes, panel + ahead);
  }
  if (step < args.steps) add_last<kRows>(args, step);
  alignas(64) float own_sums[kRows * kColumns];
  float* sums = args.carries_on ? args.carry : own_sums;
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + 16, kStride);
  if constexpr (kTwoGroups) {
    _tile_stored(2, sums + kAmxRows * kColumns, kStride);
    _tile_stored(3, sums + kAmxRows * kColumns + 16, kStride);
  }
  if (args.carries_on) return;
  for (int m = 0; m < kRows; ++m) {
    for (int column = 0; column < kColumns; column += Avx512Bf16::kLanes) {
      write_sum(args, m, column, Avx512Bf16::load_y(sums + m * kColumns + column));
    }
  }
}

void one_row_tile(const TileArgs& args) {
  // A cut of widened weights lies in the cache: nothing to wait for.
  if (args.carried_in || args.carries_on) return amx_tile<1>(args);
  one_row_chain<Bf16Weights>(args);
}

template <int kRows>
constexpr void fill_amx_tiles(TileFn* table) {
  if constexpr (kRows == 1) {
    table[kRows] = &one_row_tile;
  } else {
    table[kRows] = &amx_tile<kRows>;
    fill_amx_tiles<kRows - 1>(table);
  }
}

}  // namespace

const LinearKernels& linear_kernels_amx() {
  static constexpr LinearKernels kernels = [] {
    LinearKernels table = make_avx512_bf16_kernels();
    table.bf16_rows = 2 * kAmxRows;
    // A tile adds up 32 k before it adds them to the chain, so that chains may be longer; y is read
    // and written less often.
    table.bf16_chain = 4 * kChainSteps;
    fill_amx_tiles<2 * kAmxRows>(table.bf16);
    std::fill(table.e4m3, table.e4m3 + kMaxTileRows + 1, nullptr);
    table.e4m3[1] = &one_e4m3_row_tile;
    table.widen = &widen_e4m3;
    table.bf16_ahead = 4096;
    table.cut_steps = kMostCutSteps;
    table.widen_groups = &widen_groups_avx512;
    table.leave = [] { _tile_release(); };
    return table;
  }();
  return kernels;
}

}  // namespace specdec::cpu

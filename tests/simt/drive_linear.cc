// The linear layer for 9.0 in the emulator: small integers, whose sums are exact, by every
// instance, with packed weights of three formats and of e4m3 too, in several schedules; packed
// weights as matrices; and how products are dealt.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backend/linear_pick.h"
#include "linear/e4m3_rows.cu"
#include "linear/hopper_e4m3.cuh"
#include "linear/hopper_packed.cuh"
#include "linear/unpack.cu"
#include "simt/host.h"

namespace specdec {
namespace {

using cuda::HopperE4m3Tile;
using cuda::HopperLinearTile;
using cuda::HopperPackedTile;
using bf16 = __nv_bfloat16;

std::vector<bf16> x, weight;
std::vector<float> partial;
struct alignas(16) Vector {
  unsigned char bytes[16];
};
std::vector<Vector> packed, numbers;
std::vector<float> row_scales;

float value(int i) { return float(i * 7 % 11 - 5); }
float weight_at(int column, int k) { return value(column * 3 + k * 2 + 1); }

int e4m3_code(float number) { return __nv_fp8_e4m3(number).__x; }

// With e4m3 scales differ by column and 64 k, all of them powers of two.
template <WeightFormat kFormat>
float scale_at(int column, int k) {
  if (kFormat != WeightFormat::kF8_A8) return 1.0f;
  return float(1 << (column + k / PackedLayout::kDepth) % 3);
}

// The weight's tiles, with minimums of -5 where there are any.
template <WeightFormat kFormat>
void pack(int columns, int depth) {
  constexpr PackedLayout kLayout = packed_layout(kFormat);
  packed.assign(size_t(kLayout.bytes(columns, depth)) / 16, {});
  unsigned char* tile = packed.data()->bytes;
  const auto set = [&](int at, float number) {
    if (kLayout.is_wide) {
      memcpy(tile + at, &number, 4);
    } else {
      const __half half = __float2half_rn(number);
      memcpy(tile + at, &half, 2);
    }
  };
  for (int c0 = 0; c0 < columns; c0 += PackedLayout::kColumns) {
    for (int k0 = 0; k0 < depth; k0 += PackedLayout::kDepth, tile += kLayout.tile_bytes()) {
      for (int c = 0; c < PackedLayout::kColumns; c++) {
        for (int k = 0; k < PackedLayout::kDepth; k++) {
          // What lies outside of the matrix has scales and numbers too, but for k.
          const bool inside = k0 + k < depth;
          const int offset = kLayout.has_minimum ? 5 : kLayout.zero;
          const float element = inside ? weight_at(c0 + c, k0 + k) : 0.0f;
          const bool floats = kFormat == WeightFormat::kF8_A8;
          const int number = floats ? e4m3_code(element) : inside ? int(element) + offset : 0;
          const int at = kLayout.number_at(c, k);
          tile[at / 2] |= static_cast<unsigned char>(number << at % 2 * 4);
          const int scale = kLayout.number_bytes() + kLayout.scale_at(c, k);
          set(scale, inside ? scale_at<kFormat>(c0 + c, k0 + k) : 0.0f);
          if (kLayout.has_minimum) set(scale + kLayout.scale_bytes(), inside ? -5.0f : 0.0f);
        }
      }
    }
  }
}

// A launch whose slices' sums go to `partial`, for the x that is there; both are exposed.
cuda::LinearLaunch launch_of(int rows, int columns, int depth, int pitch, int row_tile, int slices,
                             unsigned schedule) {
  cuda::LinearLaunch launch{};
  launch.call.x = x.data(), launch.call.x_row_stride = pitch;
  launch.call.rows = rows, launch.call.columns = columns, launch.call.depth = depth;
  launch.call.dtype = DType::kBF16, launch.call.constant_weight = schedule % 2 == 1;
  launch.part_depth = ((depth - 1) / slices / kStreamDepth + 1) * kStreamDepth;
  launch.row_tiles = (rows - 1) / row_tile + 1;
  launch.pitch = (columns + 7) / 8 * 8, launch.unit_stride = rows * launch.pitch;
  partial.assign(size_t(slices) * launch.unit_stride, NAN);
  launch.partial = partial.data();
  simt::conceal();
  simt::expose(x.data(), x.size() * 2, "x", false);
  simt::expose(partial.data(), partial.size() * 4, "partial");
  return launch;
}

// kFormat: kElements, or the packed format.
template <int kRows, int kGroups, WeightFormat kFormat = WeightFormat::kElements>
void product(int rows, int columns, int depth, int slices, unsigned schedule) {
  constexpr bool kPacked = kFormat != WeightFormat::kElements;
  constexpr int kColumns = kGroups * kStreamColumns;
  // Rows are wider than the matrix: what lies beside it is NaN.
  const int pitch = (depth + 7) / 8 * 8 + 8;
  const bf16 nan(NAN);
  x.assign(size_t(rows) * pitch, nan), weight.assign(size_t(columns) * pitch, nan);
  for (int r = 0; r < rows; r++) {
    for (int k = 0; k < depth; k++) x[size_t(r) * pitch + k] = bf16(value(r * 5 + k));
  }
  for (int c = 0; c < columns; c++) {
    for (int k = 0; k < depth; k++) weight[size_t(c) * pitch + k] = bf16(weight_at(c, k));
  }
  cuda::LinearLaunch launch = launch_of(rows, columns, depth, pitch, kRows, slices, schedule);
  launch.call.weight = weight.data(), launch.call.weight_row_stride = pitch;
  if constexpr (kPacked) {
    pack<kFormat>(columns, depth);
    launch.call.weight = packed.data(), launch.call.format = kFormat;
    simt::expose(packed.data(), packed.size() * sizeof(Vector), "weight", false);
  } else {
    simt::expose(weight.data(), weight.size() * 2, "weight", false);
  }
  const unsigned tiles = (columns - 1) / kColumns + 1;
  const dim3 grid(tiles * launch.row_tiles, unsigned(slices));
  simt::seed(schedule);
  if constexpr (kPacked) {
    cuda::launch_packed_tile<bf16, kFormat, HopperPackedTile<kFormat, kRows, kGroups>>(launch,
                                                                                       grid);
  } else {
    cuda::launch_hopper_linear<bf16, HopperLinearTile<kRows, kGroups>>(launch, grid);
  }
  int wrong = 0;
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < columns; c++) {
      float want = 0, got = 0;
      for (int k = 0; k < depth; k++) want += value(r * 5 + k) * weight_at(c, k);
      for (int s = 0; s < slices; s++) {
        got += partial[s * launch.unit_stride + r * launch.pitch + c];
      }
      wrong += got != want;
    }
  }
  char name[112];
  snprintf(name, sizeof name, "%s, tile %d, %d groups: %d x %d x %d, %d slices, schedule %u",
           kPacked ? packed_layout(kPacked ? kFormat : WeightFormat::kQ8_0).name : "bf16", kRows,
           kGroups, rows, columns, depth, slices, schedule);
  printf("%s\n", name);
  host::expect_equal(name, wrong, 0);
}

// Whole numbers up to 7 times a power of two, by the kernel that rounds rows and the one that
// multiplies them. Each row has one element of 448 powers, so that its scale is that power.
template <int kRows, int kGroups>
void e4m3_product(int rows, int columns, int depth, int slices, unsigned schedule) {
  constexpr WeightFormat kFormat = WeightFormat::kF8_A8;
  const int pitch = depth + 8, bytes = cuda::e4m3_pitch(depth);
  const auto power = [](int r) { return std::ldexp(1.0f, r % 5 - 2); };
  const auto element = [](int r, int k) { return k == r % 7 ? 448.0f : value(r * 5 + k); };
  x.assign(size_t(rows) * pitch, bf16(NAN));
  for (int r = 0; r < rows; r++) {
    for (int k = 0; k < depth; k++) x[size_t(r) * pitch + k] = bf16(element(r, k) * power(r));
  }
  pack<kFormat>(columns, depth);
  cuda::LinearLaunch launch = launch_of(rows, columns, depth, pitch, kRows, slices, schedule);
  LinearParams& call = launch.call;
  call.weight = packed.data(), call.format = kFormat;
  numbers.assign(size_t(rows) * bytes / 16, {}), row_scales.assign(size_t(rows), NAN);
  std::fill_n(numbers.data()->bytes, size_t(rows) * bytes, static_cast<unsigned char>(0x7f));
  simt::expose(packed.data(), packed.size() * sizeof(Vector), "weight", false);
  simt::expose(numbers.data(), numbers.size() * sizeof(Vector), "numbers");
  simt::expose(row_scales.data(), row_scales.size() * 4, "row scales");
  simt::seed(schedule);
  cuda::round_rows(call, {numbers.data(), row_scales.data(), cuda::E4m3Order::kOfProducts});
  call.x = numbers.data(), call.x_row_stride = bytes, call.row_scales = row_scales.data();
  const unsigned tiles = (columns - 1) / (kGroups * kStreamColumns) + 1;
  cuda::launch_e4m3_tile<bf16, HopperE4m3Tile<kRows, kGroups>>(
      launch, dim3(tiles * launch.row_tiles, unsigned(slices)));
  int wrong = 0;
  for (int r = 0; r < rows; r++) {
    wrong += row_scales[size_t(r)] != power(r);
    for (int c = 0; c < columns; c++) {
      float want = 0, got = 0;
      for (int k = 0; k < depth; k++) {
        want += element(r, k) * weight_at(c, k) * scale_at<kFormat>(c, k);
      }
      for (int s = 0; s < slices; s++) {
        got += partial[s * launch.unit_stride + r * launch.pitch + c];
      }
      wrong += got != want;
    }
  }
  char name[112];
  snprintf(name, sizeof name, "e4m3, tile %d, %d groups: %d x %d x %d, %d slices, schedule %u",
           kRows, kGroups, rows, columns, depth, slices, schedule);
  printf("%s\n", name);
  host::expect_equal(name, wrong, 0);
}

// Columns from `first` on as a matrix; kBytes: e4m3 numbers without their scales.
template <WeightFormat kFormat, bool kBytes = false>
void unpacked(int columns, int depth, int first, unsigned schedule) {
  pack<kFormat>(columns, depth);
  const int count = columns - first;
  const size_t size = size_t(count) * depth;
  numbers.assign((size * (kBytes ? 1 : 2) + 15) / 16, {});
  memset(numbers.data(), 0x7f, numbers.size() * sizeof(Vector));
  UnpackWeightParams p;
  p.weight = packed.data(), p.out = numbers.data(), p.first = first;
  p.columns = count, p.depth = depth, p.format = kFormat;
  p.dtype = kBytes ? DType::kF8E4M3 : DType::kBF16;
  simt::conceal();
  simt::expose(packed.data(), packed.size() * sizeof(Vector), "weight", false);
  simt::expose(numbers.data(), numbers.size() * sizeof(Vector), "out");
  simt::seed(schedule);
  cuda::unpack_weight(p);
  int wrong = 0;
  for (int c = 0; c < count; c++) {
    for (int k = 0; k < depth; k++) {
      const size_t at = size_t(c) * depth + k;
      const float element = weight_at(first + c, k);
      if constexpr (kBytes) {
        wrong += numbers.data()->bytes[at] != e4m3_code(element);
      } else {
        const float got = float(reinterpret_cast<const bf16*>(numbers.data())[at]);
        wrong += got != element * scale_at<kFormat>(first + c, k);
      }
    }
  }
  char name[112];
  snprintf(name, sizeof name, "unpacked %s%s: %d x %d from %d, schedule %u",
           packed_layout(kFormat).name, kBytes ? " numbers" : "", columns, depth, first, schedule);
  printf("%s\n", name);
  host::expect_equal(name, wrong, 0);
}

void choices() {
  const DeviceLimits hopper{9, 0, 132, 227 << 10, 50 << 20}, ampere{8, 0, 108, 163 << 10, 40 << 20};
  const DeviceLimits next{10, 0, 148, 227 << 10, 126 << 20}, small{9, 0, 132, 99 << 10, 50 << 20};
  const auto tile = [&](int rows) {
    return pick_linear({rows, 4096, 4096, DType::kBF16, true, false}, hopper)->row_tile;
  };
  const int tiles[][2] = {{1, 8},   {8, 8},   {9, 16},   {17, 32},   {33, 64},
                          {65, 96}, {84, 96}, {97, 128}, {128, 128}, {5000, 128}};
  for (const auto& [rows, want] : tiles) host::expect_equal("tile of rows", tile(rows), want);
  // More columns to a block where the busiest multiprocessor has less to read with it. With few
  // rows memory is the limit: small blocks.
  const int widths[][4] = {{84, 520, 4096, 64},     {84, 6144, 4096, 128},  {84, 28672, 4096, 256},
                           {84, 4096, 4096, 128},   {84, 4096, 14336, 128}, {64, 128256, 4096, 256},
                           {32, 128256, 4096, 256}, {27, 28672, 4096, 256}, {27, 6144, 4096, 64},
                           {17, 28672, 4096, 64},   {128, 8448, 1000, 64},  {128, 8449, 1000, 128},
                           {400, 4160, 4096, 128},  {11, 28672, 4096, 64}};
  for (const auto& [rows, columns, depth, want] : widths) {
    const LinearProblem problem{rows, columns, depth, DType::kBF16, true, false};
    host::expect_equal("columns of a block", pick_linear(problem, hopper)->columns, want);
  }
  const auto served = [](const DeviceLimits& limits, DType dtype, int depth, bool aligned,
                         bool overlaps) {
    const bool one = pick_linear({1, 64, depth, dtype, aligned, overlaps}, limits) != nullptr;
    const bool many = pick_linear({128, 64, depth, dtype, aligned, overlaps}, limits) != nullptr;
    host::expect_equal("a family for all numbers of rows", one, many);
    return one;
  };
  host::expect_equal("served", served(hopper, DType::kF16, 64, true, false), true);
  host::expect_equal("8.0", served(ampere, DType::kF16, 64, true, false), false);
  host::expect_equal("10.0", served(next, DType::kF16, 64, true, false), false);
  host::expect_equal("99 KB", served(small, DType::kF16, 64, true, false), false);
  host::expect_equal("float32", served(hopper, DType::kF32, 64, true, false), false);
  host::expect_equal("depth 63", served(hopper, DType::kF16, 63, true, false), false);
  host::expect_equal("unaligned", served(hopper, DType::kF16, 64, false, false), false);
  host::expect_equal("overlapping", served(hopper, DType::kF16, 64, true, true), false);
  // Packed weights: the same rule over their tiles.
  const auto packed = [&](int rows, int columns, const DeviceLimits& limits) {
    return pick_packed({rows, columns, 4096, DType::kF16, true, false}, WeightFormat::kQ4_0,
                       limits);
  };
  const int chosen[][4] = {{1, 4096, 8, 64},     {9, 4096, 32, 64},   {33, 520, 64, 64},
                           {64, 28672, 64, 128}, {84, 520, 96, 64},   {84, 28672, 96, 128},
                           {97, 64, 128, 128},   {5000, 64, 128, 128}};
  for (const auto& [rows, columns, row_tile, want] : chosen) {
    host::expect_equal("packed: tile of rows", packed(rows, columns, hopper)->row_tile, row_tile);
    host::expect_equal("packed: columns", packed(rows, columns, hopper)->columns, want);
  }
  for (const int rows : {1, 128}) {
    for (const DeviceLimits& limits : {ampere, next, small}) {
      host::expect_equal("packed: not 9.0", packed(rows, 4096, limits) == nullptr, true);
    }
  }
  // Slices: of the matrix alone, none of them empty, no chain across them.
  const int shapes[][3] = {{6144, 4096, 4}, {4096, 4096, 4}, {28672, 4096, 1}, {4096, 14336, 4},
                           {1024, 4096, 4}, {64, 65536, 8},  {64, 2047, 1},    {64, 2048, 2}};
  for (const auto& [columns, depth, slices] : shapes) {
    host::expect_equal("slices", stream_cut(columns, depth).slices, slices);
  }
  for (int columns = 1; columns < 9000; columns += 61) {
    for (int depth = 8; depth < 20000; depth += 488) {
      const StreamCut cut = stream_cut(columns, depth);
      const bool covers = std::int64_t{cut.slices} * cut.slice_depth >= depth &&
                          (cut.slices - 1) * cut.slice_depth < depth &&
                          cut.slice_depth % kStreamDepth == 0;
      host::expect_equal("slices cover k", covers, true);
    }
  }
  for (const LinearInstance& one : kLinearInstances) {
    for (const int columns : {1, 64, 65, 129, 300, 520, 6144, 128256}) {
      const LinearDeal deal = deal_linear(one.tile(), 84, columns, 4096);
      const bool whole = deal.column_tiles * one.columns >= columns &&
                         (deal.column_tiles - 1) * one.columns < columns;
      host::expect_equal("blocks cover columns", whole, true);
    }
  }
}

}  // namespace
}  // namespace specdec

int main() {
  using namespace specdec;
  choices();
  for (unsigned schedule = 0; schedule < 4; schedule++) {
    product<8, 1>(3, 70, 300, 1, schedule);
    product<16, 1>(16, 64, 2060, 2, schedule);
    product<32, 1>(40, 130, 1400, 1, schedule);
    product<32, 4>(30, 300, 1400, 1, schedule);
    product<64, 1>(61, 200, 1100, 1, schedule);
    product<64, 2>(70, 200, 1100, 1, schedule);
    product<64, 4>(60, 260, 1100, 1, schedule);
    product<96, 1>(84, 130, 904, 1, schedule);
    product<96, 2>(84, 300, 1704, 1, schedule);
    product<96, 4>(100, 450, 1704, 1, schedule);
    product<128, 1>(130, 130, 700, 1, schedule);
    product<128, 2>(128, 65, 2100, 2, schedule);
    // Strips and tiles of k that do not exist; rings walked more than once; chains; slices.
    product<8, 1, WeightFormat::kQ4_1>(3, 70, 320, 1, schedule);
    product<8, 1, WeightFormat::kQ8_0>(8, 33, 2080, 2, schedule);
    product<32, 1, WeightFormat::kQ4_0>(40, 130, 1440, 1, schedule);
    product<64, 1, WeightFormat::kQ6_K>(61, 100, 1088, 1, schedule);
    product<64, 2, WeightFormat::kQ4_0>(70, 200, 1120, 1, schedule);
    product<96, 1, WeightFormat::kQ8_0>(84, 130, 928, 1, schedule);
    product<96, 2, WeightFormat::kQ4_1>(84, 290, 1728, 1, schedule);
    product<128, 2, WeightFormat::kQ6_K>(130, 65, 2112, 2, schedule);
    e4m3_product<8, 1>(3, 70, 320, 1, schedule);
    e4m3_product<32, 1>(40, 130, 1472, 2, schedule);
    e4m3_product<64, 1>(61, 100, 1088, 1, schedule);
    e4m3_product<64, 2>(70, 200, 1152, 1, schedule);
    e4m3_product<96, 1>(84, 130, 960, 1, schedule);
    e4m3_product<96, 2>(84, 290, 1728, 1, schedule);
    e4m3_product<128, 2>(130, 65, 2112, 2, schedule);
    unpacked<WeightFormat::kQ4_0>(130, 544, 32, schedule);
    unpacked<WeightFormat::kQ4_1>(33, 96, 0, schedule);
    unpacked<WeightFormat::kQ6_K>(70, 336, 64, schedule);
    unpacked<WeightFormat::kF8_A8>(65, 320, 32, schedule);
    unpacked<WeightFormat::kF8_A8, true>(65, 320, 32, schedule);
  }
  printf("%s\n", host::failures ? "FAILED" : "passed");
  return host::failures != 0;
}

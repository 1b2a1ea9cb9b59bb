// The linear layer for 9.0 in the emulator: small integers, whose sums are exact, by every
// instance, in several schedules; and how products are dealt.
#include <cstdlib>
#include <vector>

#include "backend/linear_pick.h"
#include "linear/hopper_linear.cuh"
#include "simt/host.h"

namespace specdec {
namespace {

using cuda::HopperLinearTile;
using bf16 = __nv_bfloat16;

std::vector<bf16> x, weight;
std::vector<float> partial;

template <int kRows, int kGroups>
void product(int rows, int columns, int depth, int slices, unsigned schedule) {
  using Tile = HopperLinearTile<kRows, kGroups>;
  // Rows are wider than the matrix: what lies beside it is NaN.
  const int pitch = (depth + 7) / 8 * 8 + 8;
  const bf16 nan(NAN);
  x.assign(size_t(rows) * pitch, nan), weight.assign(size_t(columns) * pitch, nan);
  const auto value = [](int i) { return float(i * 7 % 11 - 5); };
  for (int r = 0; r < rows; r++) {
    for (int k = 0; k < depth; k++) x[size_t(r) * pitch + k] = bf16(value(r * 5 + k));
  }
  for (int c = 0; c < columns; c++) {
    for (int k = 0; k < depth; k++) weight[size_t(c) * pitch + k] = bf16(value(c * 3 + k * 2 + 1));
  }
  cuda::LinearLaunch launch{};
  launch.call.x = x.data(), launch.call.weight = weight.data();
  launch.call.x_row_stride = launch.call.weight_row_stride = pitch;
  launch.call.rows = rows, launch.call.columns = columns, launch.call.depth = depth;
  launch.call.dtype = DType::kBF16, launch.call.constant_weight = schedule % 2 == 1;
  launch.part_depth = ((depth - 1) / slices / kStreamDepth + 1) * kStreamDepth;
  launch.row_tiles = (rows - 1) / kRows + 1;
  launch.pitch = (columns + 7) / 8 * 8, launch.unit_stride = rows * launch.pitch;
  partial.assign(size_t(slices) * launch.unit_stride, NAN);
  launch.partial = partial.data();
  simt::conceal();
  simt::expose(x.data(), x.size() * 2, "x", false);
  simt::expose(weight.data(), weight.size() * 2, "weight", false);
  simt::expose(partial.data(), partial.size() * 4, "partial");
  const unsigned tiles = (columns - 1) / Tile::kColumns + 1;
  simt::seed(schedule);
  cuda::launch_hopper_linear<bf16, Tile>(launch, dim3(tiles * launch.row_tiles, unsigned(slices)));
  int wrong = 0;
  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < columns; c++) {
      float want = 0, got = 0;
      for (int k = 0; k < depth; k++) want += value(r * 5 + k) * value(c * 3 + k * 2 + 1);
      for (int s = 0; s < slices; s++) {
        got += partial[s * launch.unit_stride + r * launch.pitch + c];
      }
      wrong += got != want;
    }
  }
  char name[96];
  snprintf(name, sizeof name, "tile %d, %d groups: %d x %d x %d, %d slices, schedule %u", kRows,
           kGroups, rows, columns, depth, slices, schedule);
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
  // More columns to a block where there is one for every multiprocessor.
  const int widths[][4] = {{84, 6144, 4096, 64},    {84, 28672, 4096, 128}, {64, 128256, 4096, 128},
                           {84, 4096, 14336, 64},   {32, 128256, 4096, 64}, {128, 16768, 4096, 64},
                           {128, 16769, 4096, 128}, {400, 4160, 4096, 128}};
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
  // Slices: of the matrix alone, none of them empty, no chain across them.
  const int shapes[][3] = {{6144, 4096, 1}, {4096, 4096, 2}, {28672, 4096, 1}, {4096, 14336, 2},
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
      const LinearDeal deal = deal_linear(one, 84, columns, 4096);
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
    product<64, 1>(61, 200, 1100, 1, schedule);
    product<64, 2>(70, 200, 1100, 1, schedule);
    product<96, 1>(84, 130, 904, 1, schedule);
    product<96, 2>(84, 300, 1704, 1, schedule);
    product<128, 1>(130, 130, 700, 1, schedule);
    product<128, 2>(128, 65, 2100, 2, schedule);
  }
  printf("%s\n", host::failures ? "FAILED" : "passed");
  return host::failures != 0;
}

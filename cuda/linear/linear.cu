// Chooses and launches the kernels of the linear layer, and adds partial sums.
#include <algorithm>

#include "backend/linear_pick.h"
#include "decoder/row_elements.cuh"
#include "gpu/gpu.cuh"
#include "linear/e4m3_rows.h"
#include "linear/instances/launchers.h"
#include "linear/linear.h"
#include "linear/linear_plan.h"
#include "linear/matrix.h"
#include "linear/packed_formats.h"
#include "linear/plain.cuh"
#include "linear/sums.cuh"

namespace specdec::cuda {
namespace {

constexpr int kFoldThreads = 128;

// Grid      (vectors of 8 columns, rows): a thread adds 8 columns' partial sums, group by group.
// Bytes     units * rows * columns * 4, written just before: from L2.
// Limit     launch and one round of loads.
template <class T>
__global__ void __launch_bounds__(kFoldThreads)
    fold_linear_kernel(const LinearLaunch launch, const LinearSums sums) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const auto column =
      static_cast<std::int32_t>(blockIdx.x * kFoldThreads + threadIdx.x) * kLaneElements;
  const auto row = static_cast<std::int32_t>(blockIdx.y);
  if (column >= launch.call.columns) return;
  float total[kLaneElements];
  add_units<4>(sums, row, column, total);
  LinearLaunch result = launch;
  result.partial = nullptr;
  store_sums<T>(result, 0, row, column, total);
}

// May 16 bytes be copied from any multiple of 8 elements of the two matrices?
bool serves_matrix(const LinearParams& p) {
  return p.dtype != DType::kF32 && p.depth % kLaneElements == 0 &&
         aligned_for_lanes(p.x, p.dtype, p.x_row_stride) &&
         aligned_for_lanes(p.weight, p.dtype, p.weight_row_stride);
}

// Adds the units' sums, `units_per_group` of them to a group and the groups to an element; or
// leaves that to whoever reads them.
void launch_fold(const LinearLaunch& launch, std::int32_t units, std::int32_t units_per_group) {
  const LinearSums sums{launch.partial,  launch.unit_stride,     launch.pitch,    units,
                        units_per_group, launch.call.row_scales, launch.call.bias};
  if (launch.call.left != nullptr) {
    *launch.call.left = sums;
    return;
  }
  const int vectors = (launch.call.columns - 1) / kLaneElements + 1;
  const dim3 grid(static_cast<unsigned>((vectors - 1) / kFoldThreads + 1),
                  static_cast<unsigned>(launch.call.rows));
  const auto fold = launch.call.dtype == DType::kBF16 ? fold_linear_kernel<__nv_bfloat16>
                                                      : fold_linear_kernel<__half>;
  gpu::launch(fold, grid, dim3(kFoldThreads), 0, launch.call.exec.stream,
              gpu::LaunchOptions{.dependent = true}, launch, sums);
}

void launch_matrix(const LinearLaunch& launch, const LinearPlan& plan) {
  const dim3 grid(static_cast<unsigned>(launch.row_tiles) * plan.column_tiles,
                  static_cast<unsigned>(plan.units));
  if (launch.call.format != WeightFormat::kElements) {
    by_format(launch.call.dtype, launch.call.format, [&]<class T, WeightFormat kFormat>() {
      launch_packed<T, kFormat>(launch, plan.tile.row_tile, grid);
    });
  } else {
    const bool is_bf16 = launch.call.dtype == DType::kBF16;
    (is_bf16 ? launch_tile_bf16 : launch_tile_f16)(launch, plan.tile.row_tile, grid);
  }
  if (launch.partial != nullptr) {
    launch_fold(launch, plan.units, kLinearGroupParts / plan.parts_per_unit);
  }
}

// Calls f with the launch of each `launch_rows` rows in turn.
template <class F>
void for_each_launch(const LinearParams& p, std::int32_t launch_rows, std::int64_t row_bytes,
                     std::int64_t pitch, F f) {
  const auto out_bytes = static_cast<std::int64_t>(dtype_bytes(p.dtype));
  // x is rounded by now (linear_of_e4m3_rows).
  const std::int64_t x_bytes = p.format == WeightFormat::kF8_A8 ? 1 : out_bytes;
  for (std::int32_t first = 0; first < p.rows; first += launch_rows) {
    LinearLaunch launch{};
    launch.call = p;
    launch.call.rows = std::min(launch_rows, p.rows - first);
    launch.call.x = static_cast<const char*>(p.x) + first * p.x_row_stride * x_bytes;
    launch.call.out = static_cast<char*>(p.out) + first * p.out_row_stride * out_bytes;
    if (p.row_scales != nullptr) launch.call.row_scales = p.row_scales + first;
    if (launch.call.rows < p.rows || p.columns % kLaneElements != 0) launch.call.left = nullptr;
    launch.partial = row_bytes > 0 ? static_cast<float*>(p.exec.workspace) : nullptr;
    launch.pitch = pitch;
    launch.unit_stride = launch_rows * pitch;
    launch.aligned_out = aligned_for_lanes(p.out, p.dtype, p.out_row_stride);
    f(launch);
  }
}

LinearProblem problem_of(const LinearParams& p) {
  return {p.rows,  p.columns,        p.depth,
          p.dtype, serves_matrix(p), p.columns > 1 && p.weight_row_stride < p.depth};
}

// start(launch, grid) starts the kernel of such tiles.
template <class F>
void stream_linear(const LinearParams& p, const StreamTile& tile, F start) {
  const LinearDeal deal = deal_linear(tile, p.rows, p.columns, p.depth, p.cut_columns);
  // Rows that share memory are no matrix to the copy engine: one by one.
  const bool overlaps = p.rows > 1 && p.x_row_stride < p.depth;
  const std::int32_t launch_rows =
      overlaps ? 1 : rows_per_launch(deal.row_bytes, tile.row_tile, p.rows, p.exec.workspace_bytes);
  for_each_launch(p, launch_rows, deal.row_bytes, deal.pitch, [&](LinearLaunch& launch) {
    launch.part_depth = deal.cut.slice_depth;
    launch.parts_per_unit = 1;
    launch.row_tiles = (launch.call.rows - 1) / tile.row_tile + 1;
    const dim3 grid(static_cast<unsigned>(launch.row_tiles) * deal.column_tiles,
                    static_cast<unsigned>(deal.cut.slices));
    start(launch, grid);
    if (launch.partial != nullptr) launch_fold(launch, deal.cut.slices, 1);
  });
}

// Bytes of a row of x that is rounded to e4m3, its scale included, in either form.
constexpr std::int64_t e4m3_row_bytes(std::int32_t depth) {
  return std::int64_t{2} * e4m3_pitch(depth) + 4;
}
constexpr std::int64_t kScratchAlignment = 256;

constexpr std::int64_t aligned_scratch(std::int64_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

// Scratch for partial sums.
ScratchBytes scratch_of_sums(std::int32_t rows, std::int32_t columns, std::int32_t depth) {
  const auto wanted = [&](std::int64_t row_bytes, std::int32_t row_tile) {
    const std::int64_t most = std::max(row_bytes, kLinearMaxPartialBytes);
    return rows_per_launch(row_bytes, row_tile, rows, most) * row_bytes;
  };
  const LinearPlan plan = plan_linear(rows, columns, depth);
  ScratchBytes scratch{plan.row_bytes, wanted(plan.row_bytes, plan.tile.row_tile)};
  // Slices do not depend on the instance; the least tile wastes the least of the room.
  const LinearInstance& stream = kLinearInstances.front();
  const std::int64_t row_bytes = deal_linear(stream.tile(), rows, columns, depth).row_bytes;
  scratch.needed = std::max(scratch.needed, row_bytes);
  scratch.wanted = std::max(scratch.wanted, wanted(row_bytes, stream.row_tile));
  return scratch;
}

// What the sums of one row take at most, of whatever number of rows it is one.
constexpr std::int64_t most_sums_of_a_row(std::int32_t columns, std::int32_t depth) {
  const int units = std::max(linear_cut(depth).parts(), kStreamMaxSlices);
  return (std::int64_t{columns} + 7) / 8 * 8 * units * std::int64_t{sizeof(float)};
}

// Rounds as many rows at a time as there is scratch for, beside the sums of one row, and multiplies
// these.
void linear_of_e4m3_rows(const LinearParams& p, const DeviceLimits& limits) {
  const LinearProblem problem{p.rows, p.columns, p.depth, p.dtype, true, false};
  const StreamTile* tile = pick_packed(problem, p.format, limits);
  const std::int64_t sums = most_sums_of_a_row(p.columns, p.depth);
  const std::int64_t room = p.exec.workspace_bytes - sums - 3 * kScratchAlignment;
  const auto most = std::max<std::int64_t>(1, room / e4m3_row_bytes(p.depth));
  for (std::int32_t first = 0, rows; first < p.rows; first += rows) {
    rows = static_cast<std::int32_t>(std::min<std::int64_t>(most, p.rows - first));
    LinearParams part = p;
    part.rows = rows;
    part.x = static_cast<const char*>(p.x) + first * p.x_row_stride * 2;
    part.out = static_cast<char*>(p.out) + first * p.out_row_stride * 2;
    if (rows < p.rows) part.left = nullptr;
    E4m3Rows to{p.exec.workspace, nullptr,
                tile != nullptr ? E4m3Order::kOfProducts : E4m3Order::kElements};
    const std::int64_t numbers = aligned_scratch(rows * to.row_bytes(p.depth));
    const std::int64_t used = numbers + aligned_scratch(rows * std::int64_t{4});
    to.scales = reinterpret_cast<float*>(static_cast<char*>(p.exec.workspace) + numbers);
    round_rows(part, to);
    part.x = to.numbers;
    part.x_row_stride = to.row_bytes(p.depth) / (tile != nullptr ? 1 : 2);
    part.row_scales = to.scales;
    part.exec.workspace = static_cast<char*>(p.exec.workspace) + used;
    part.exec.workspace_bytes = p.exec.workspace_bytes - used;
    if (tile == nullptr) {
      part.format = WeightFormat::kF8_G;
      linear(part, limits);
      continue;
    }
    stream_linear(part, *tile, [&](const LinearLaunch& launch, dim3 grid) {
      (p.dtype == DType::kBF16 ? launch_hopper_e4m3<__nv_bfloat16>
                               : launch_hopper_e4m3<__half>)(launch, *tile, grid);
    });
  }
}

}  // namespace

ScratchBytes linear_scratch_bytes(std::int32_t rows, std::int32_t columns, std::int32_t depth,
                                  DType dtype, WeightFormat format) {
  if (rows <= 0 || dtype == DType::kF32) return {};
  ScratchBytes scratch = scratch_of_sums(rows, columns, depth);
  if (format == WeightFormat::kF8_A8) {
    const std::int64_t sums = most_sums_of_a_row(columns, depth);
    const std::int64_t row = e4m3_row_bytes(depth), aligned = 3 * kScratchAlignment;
    scratch.needed = sums + row + aligned;
    scratch.wanted = std::max(scratch.wanted, sums) + rows * row + aligned;
  }
  return scratch;
}

void linear(const LinearParams& p, const DeviceLimits& limits) {
  if (p.left != nullptr) *p.left = {};
  if (p.rows == 0) return;
  if (p.format == WeightFormat::kF8_A8) return linear_of_e4m3_rows(p, limits);
  if (p.format != WeightFormat::kElements) {
    // Their callers see to it that x can be copied.
    const LinearProblem problem{p.rows, p.columns, p.depth, p.dtype, true, false};
    if (const StreamTile* tile = pick_packed(problem, p.format, limits)) {
      return stream_linear(p, *tile, [&](const LinearLaunch& launch, dim3 grid) {
        by_format(p.dtype, p.format, [&]<class T, WeightFormat kFormat>() {
          launch_hopper_packed<T, kFormat>(launch, *tile, grid);
        });
      });
    }
  } else {
    if (!serves_matrix(p)) {
      by_type(p.dtype, [&]<class T>() { launch_plain_linear<T>(p); });
      return;
    }
    if (const LinearInstance* instance = pick_linear(problem_of(p), limits)) {
      const auto index = static_cast<std::size_t>(instance - kLinearInstances.data());
      return stream_linear(p, instance->tile(), linear_launcher(index));
    }
  }
  const LinearPlan plan = plan_linear(p.rows, p.columns, p.depth);
  const std::int32_t launch_rows =
      rows_per_launch(plan.row_bytes, plan.tile.row_tile, p.rows, p.exec.workspace_bytes);
  for_each_launch(p, launch_rows, plan.row_bytes, plan.pitch, [&](LinearLaunch& launch) {
    launch.part_depth = linear_cut(p.depth).part_depth;
    launch.parts_per_unit = plan.parts_per_unit;
    launch.row_tiles = (launch.call.rows - 1) / plan.tile.row_tile + 1;
    launch_matrix(launch, plan);
  });
}

}  // namespace specdec::cuda

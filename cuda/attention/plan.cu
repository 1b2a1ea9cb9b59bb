// The plan kernel: from the lengths of a step to the jobs and units of its main pass.
//
// grid     one block, for its threads must agree; once per step and kind of layer
// phases   check requests; number their jobs; describe jobs and add up their costs, or of few jobs
//          their chunks; count units and slots; write them. Jobs are taken kPlanThreads at a time.
#include "attention/plan.cuh"

namespace specdec::attention {
namespace {

// Lanes if they leave the busiest block at most that much of an equal share.
constexpr std::int64_t kLanePercent = 110;

// The jobs of one thread or of all; a number that fits no workspace stands for all larger ones.
struct Counts {
  static constexpr std::int64_t kMany = INT32_MAX / kPlanThreads;
  std::int64_t units = 0, slots = 0;

  // Two sums in one scan.
  __device__ __forceinline__ std::uint64_t packed() const {
    return static_cast<std::uint64_t>(min(units, kMany)) << 32 |
           static_cast<std::uint64_t>(min(slots, kMany));
  }
  __device__ __forceinline__ static Counts unpacked(std::uint64_t both) {
    return {static_cast<std::int64_t>(both >> 32), static_cast<std::int64_t>(both & 0xffffffffu)};
  }
};

__device__ __forceinline__ Counts count_units(const Job& job, std::int64_t begin,
                                              const Dealer& dealer, bool whole) {
  Counts counts;
  cut_job(job, begin, dealer, whole,
          [&](std::int32_t, std::int32_t first_chunk, std::int32_t end_chunk, UnitStates states) {
            ++counts.units;
            counts.slots += unit_slots(first_chunk, end_chunk, states);
          });
  return counts;
}

struct Numbered {
  std::int32_t jobs;         // of all requests
  std::int32_t least, most;  // row tiles of a request that has jobs
};

// Numbers the jobs: job_begin. A request that would exceed what fits has none, nor have those after
// it; plan_workspace() makes room for all that the host has promised.
__device__ Numbered number_jobs(const AttentionLaunch& launch, PlanShared* shared) {
  const StepView& step = launch.call.step;
  const WorkView& work = launch.work;
  std::int64_t begin = 0;     // of all requests looked at so far
  std::int64_t num_jobs = 0;  // that fit
  std::int32_t least = INT32_MAX, most = 0;
  for (std::int32_t base = 0; base < step.num_requests; base += kPlanThreads) {
    const std::int32_t b = base + static_cast<std::int32_t>(threadIdx.x);
    std::int64_t jobs = 0;
    std::int32_t tiles = 0;
    if (b < step.num_requests && work.request_flags[b] == 0) {
      const std::int64_t rows = std::int64_t{step.cu_rows[b + 1] - step.cu_rows[b]} * launch.group;
      tiles = static_cast<std::int32_t>((rows + launch.row_tile - 1) / launch.row_tile);
      jobs = std::int64_t{tiles} * launch.call.cache.num_kv_heads;
    }
    std::int64_t total, fitting;
    const std::int64_t first = begin + block_scan(jobs, shared, &total);
    const bool fits = jobs == 0 || first + jobs <= work.max_jobs;
    std::int64_t place = first;
    if (begin + total <= work.max_jobs) {
      fitting = total;
    } else {
      place = num_jobs + block_scan(fits ? jobs : std::int64_t{0}, shared, &fitting);
    }
    if (jobs > 0) {
      least = min(least, tiles);
      most = max(most, tiles);
    }
    if (b < step.num_requests) {
      work.job_begin[b] = static_cast<std::int32_t>(place);
      if (!fits) {
        work.request_flags[b] = kStatusBadLength;
        if (launch.call.exec.status != nullptr) {
          atomicOr(&launch.call.exec.status[b], static_cast<std::uint32_t>(kStatusBadLength));
        }
      }
    }
    begin += total;
    num_jobs += fitting;
  }
  if (threadIdx.x == 0) work.job_begin[step.num_requests] = static_cast<std::int32_t>(num_jobs);
  __syncthreads();
  return {static_cast<std::int32_t>(num_jobs), -block_max(-least, shared), block_max(most, shared)};
}

// Lanes are for more jobs than blocks: with fewer, tiles of one stream run at the same time anyway.
__device__ __forceinline__ Order order_of(const AttentionLaunch& launch, const Numbered& numbered) {
  const std::int32_t tiles = numbered.most, blocks = launch.work.num_blocks;
  if (tiles != numbered.least || tiles < 2 || tiles > kMaxLanes || tiles > blocks ||
      numbered.jobs <= blocks) {
    return {};
  }
  return {tiles, numbered.jobs / tiles};
}

struct Costs {
  std::int64_t sum;
  std::int32_t largest;       // of a job
  std::int64_t largest_lane;  // of the order's lanes
};

// Writes the jobs without slots; num_slots holds where the job begins on the line of all lanes.
__device__ Costs describe_jobs(const AttentionLaunch& launch, std::int32_t num_jobs,
                               const Order& order, PlanShared* shared) {
  const WorkView& work = launch.work;
  std::int64_t cost = 0;
  std::int32_t largest = 0;
  for (std::int32_t base = 0; base < num_jobs; base += kPlanThreads) {
    const std::int32_t place = base + static_cast<std::int32_t>(threadIdx.x);
    Job job = {};
    std::int32_t j = 0;
    if (place < num_jobs) {
      j = order.job_at(place);
      const std::int32_t b = request_of(work.job_begin, launch.call.step.num_requests, j);
      job = make_job(launch, request_view(launch.call.step, b), j - work.job_begin[b]);
    }
    const std::int32_t own = job_cost(job);
    std::int64_t total;
    const std::int64_t begin = cost + block_scan(std::int64_t{own}, shared, &total);
    job.num_slots = static_cast<std::int32_t>(begin);
    largest = max(largest, own);
    if (place < num_jobs) {
      work.jobs[j] = job;
      const std::int32_t lane = order.lane_of(place);
      if (order.lanes > 1 && place == lane * order.streams) shared->lane_begin[lane] = begin;
    }
    cost += total;
  }
  if (threadIdx.x == 0 && order.lanes > 1) shared->lane_begin[order.lanes] = cost;
  largest = block_max(largest, shared);  // and lane_begin is there
  std::int64_t lane = cost;
  if (order.lanes > 1) {
    lane = 0;
    for (std::int32_t i = 0; i < order.lanes; ++i) {
      lane = max(lane, shared->lane_begin[i + 1] - shared->lane_begin[i]);
    }
  }
  return {cost, largest, lane};
}

// The line of one lane in place of several: where each job begins on it.
__device__ void one_line(const AttentionLaunch& launch, std::int32_t num_jobs, PlanShared* shared) {
  std::int64_t cost = 0;
  for (std::int32_t base = 0; base < num_jobs; base += kPlanThreads) {
    const std::int32_t j = base + static_cast<std::int32_t>(threadIdx.x);
    std::int64_t total;
    const std::int64_t own = j < num_jobs ? job_cost(launch.work.jobs[j]) : 0;
    const std::int64_t begin = cost + block_scan(own, shared, &total);
    if (j < num_jobs) launch.work.jobs[j].num_slots = static_cast<std::int32_t>(begin);
    cost += total;
  }
  __syncthreads();
}

// A line of chunks in place of one of costs, if there is a block for each: a second unit would cost
// its block as much again as the few key blocks of either. Returns whether there is one.
__device__ bool one_block_per_chunk(const AttentionLaunch& launch, std::int32_t num_jobs,
                                    PlanShared* shared) {
  const std::int32_t j = static_cast<std::int32_t>(threadIdx.x);
  std::int32_t total;
  const std::int32_t own = j < num_jobs ? num_chunks(launch.work.jobs[j]) : 0;
  const std::int32_t begin = block_scan(own, shared, &total);
  const bool fits = total <= launch.work.num_blocks;
  if (fits && j < num_jobs) launch.work.jobs[j].num_slots = begin;
  __syncthreads();
  return fits;
}

__device__ __forceinline__ std::int64_t share_of(std::int64_t cost, std::int32_t blocks) {
  return cost > blocks ? (cost + blocks - 1) / blocks : 1;
}

__device__ __forceinline__ Dealer dealer_of(std::int64_t cost, std::int32_t blocks) {
  return {share_of(cost, blocks), blocks, cost < (std::int64_t{1} << 30)};
}

// Where a job begins on its lane, and who deals there.
struct Place {
  std::int32_t job;
  std::int64_t begin;
  Dealer dealer;
};
__device__ __forceinline__ Place place_of(const WorkView& work, const Order& order,
                                          const Dealer& dealer, const PlanShared& shared,
                                          std::int32_t at) {
  Place place = {order.job_at(at), 0, dealer};
  place.begin = work.jobs[place.job].num_slots;
  if (order.lanes > 1) {
    const std::int32_t lane = order.lane_of(at);
    place.begin -= shared.lane_begin[lane];
    place.dealer.first = lane * dealer.width;
  }
  return place;
}

// Does cutting the jobs leave no more units and states than fit?
__device__ bool cuts_fit(const AttentionLaunch& launch, std::int32_t num_jobs, const Order& order,
                         const Dealer& dealer, PlanShared* shared) {
  Counts mine;
  for (std::int32_t at = static_cast<std::int32_t>(threadIdx.x); at < num_jobs;
       at += kPlanThreads) {
    const Place place = place_of(launch.work, order, dealer, *shared, at);
    const Counts counts =
        count_units(launch.work.jobs[place.job], place.begin, place.dealer, false);
    mine.units += counts.units;
    mine.slots += counts.slots;
  }
  std::uint64_t all;
  block_scan(mine.packed(), shared, &all);
  const Counts counts = Counts::unpacked(all);
  return counts.units <= launch.work.max_units && counts.slots <= launch.work.max_slots;
}

__device__ void write_units(const AttentionLaunch& launch, std::int32_t num_jobs,
                            const Order& order, const Dealer& dealer, bool whole,
                            PlanShared* shared) {
  const WorkView& work = launch.work;
  Counts before;
  for (std::int32_t base = 0; base < num_jobs; base += kPlanThreads) {
    const std::int32_t at = base + static_cast<std::int32_t>(threadIdx.x);
    Job job = {};
    Place place = {};
    if (at < num_jobs) {
      place = place_of(work, order, dealer, *shared, at);
      job = work.jobs[place.job];
    }
    const Counts counts = count_units(job, place.begin, place.dealer, whole);
    std::uint64_t all;
    const Counts first = Counts::unpacked(block_scan(counts.packed(), shared, &all));
    const Counts total = Counts::unpacked(all);
    std::int64_t unit = before.units + first.units, slot = before.slots + first.slots;
    if (at < num_jobs) {
      job.first_slot = static_cast<std::int32_t>(slot);
      job.num_slots = static_cast<std::int32_t>(counts.slots);
      work.jobs[place.job] = job;
      cut_job(job, place.begin, place.dealer, whole,
              [&](std::int32_t block, std::int32_t first_chunk, std::int32_t end_chunk,
                  UnitStates states) {
                work.units[unit++] = {place.job, first_chunk,
                                      end_chunk, static_cast<std::int32_t>(slot),
                                      block,     states};
                slot += unit_slots(first_chunk, end_chunk, states);
              });
    }
    before.units += total.units;
    before.slots += total.slots;
  }
  __syncthreads();

  // Blocks ascend along the units: each unit fills in the blocks that begin with it.
  const std::int32_t num_units = static_cast<std::int32_t>(before.units);
  for (std::int32_t u = static_cast<std::int32_t>(threadIdx.x); u <= num_units; u += kPlanThreads) {
    const std::int32_t first = u == 0 ? 0 : work.units[u - 1].block + 1;
    const std::int32_t last = u == num_units ? work.num_blocks : work.units[u].block;
    for (std::int32_t block = first; block <= last; ++block) work.block_begin[block] = u;
  }
  if (threadIdx.x == 0) {
    *work.header = {num_jobs, num_units, static_cast<std::int32_t>(before.slots), whole ? 1 : 0};
  }
}

__global__ void __launch_bounds__(kPlanThreads, 1)
    plan(const __grid_constant__ AttentionLaunch launch) {
  PlanShared* shared = gpu::dynamic_shared<PlanShared>();
  gpu::grid_dependency_wait();
  gpu::launch_dependents();

  const StepView& step = launch.call.step;
  const bool reporter = (threadIdx.x & 31) == 0;
  for (std::int32_t b = static_cast<std::int32_t>(threadIdx.x >> 5); b < step.num_requests;
       b += kPlanThreads / 32) {
    const std::uint32_t flags = check_request(launch, request_view(step, b));
    if (reporter) launch.work.request_flags[b] = flags;
    if (reporter && flags != 0 && launch.call.exec.status != nullptr) {
      atomicOr(&launch.call.exec.status[b], flags);
    }
  }
  __syncthreads();

  const Numbered numbered = number_jobs(launch, shared);
  const std::int32_t num_jobs = numbered.jobs, blocks = launch.work.num_blocks;
  Order order = order_of(launch, numbered);
  const Costs cost = describe_jobs(launch, num_jobs, order, shared);
  Dealer dealer = dealer_of(cost.largest_lane, blocks / order.lanes);
  const std::int64_t equal_share = share_of(cost.sum, blocks);
  if (order.lanes > 1 && dealer.share * 100 > equal_share * kLanePercent) {
    // The blocks that no lane gets, or a lane with less to do, would idle for too long.
    order = {};
    dealer = dealer_of(cost.sum, blocks);
    one_line(launch, num_jobs, shared);
  }
  bool whole = whole_jobs_suffice(num_jobs / order.lanes, cost.largest, dealer);
  // No more jobs than blocks: one lane.
  if (!whole && num_jobs <= blocks && num_jobs <= kPlanThreads &&
      one_block_per_chunk(launch, num_jobs, shared)) {
    dealer = dealer_of(blocks, blocks);
    dealer.by_chunk = true;
  }
  whole = whole || !cuts_fit(launch, num_jobs, order, dealer, shared);
  write_units(launch, num_jobs, order, dealer, whole, shared);
}

}  // namespace

void launch_plan(const AttentionLaunch& launch) {
  gpu::launch(plan, dim3(1), dim3(kPlanThreads), sizeof(PlanShared), launch.call.exec.stream,
              {.dependent = true}, launch);
}

}  // namespace specdec::attention

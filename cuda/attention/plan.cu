// The plan kernel: from the lengths of a step to the jobs and units of its main pass.
//
// grid     one block, for its threads must agree; a few microseconds, once per step and kind of
// layer phases   check requests; number their jobs; describe jobs and add up their costs; count
// units and
//          slots; write them. Jobs are taken kPlanThreads at a time, thread t always the same ones.
#include "attention/plan.cuh"

namespace specdec::attention {
namespace {

struct Counts {
  std::int64_t units = 0, slots = 0;
};

__device__ __forceinline__ Counts count_units(const Job& job, std::int64_t begin,
                                              const Dealer& dealer, bool whole) {
  Counts counts;
  cut_job(job, begin, dealer, whole,
          [&](std::int32_t, std::int32_t first_chunk, std::int32_t end_chunk) {
            ++counts.units;
            counts.slots += first_chunk == job.first_chunk ? 1 : end_chunk - first_chunk;
          });
  return counts;
}

// Numbers the jobs: job_begin. A request that would exceed what fits has none, nor have those after
// it; plan_workspace() makes room for all that the host has promised.
__device__ std::int32_t number_jobs(const AttentionLaunch& launch, PlanShared* shared) {
  const StepView& step = launch.call.step;
  const WorkView& work = launch.work;
  std::int64_t begin = 0;     // of all requests looked at so far
  std::int64_t num_jobs = 0;  // that fit
  for (std::int32_t base = 0; base < step.num_requests; base += kPlanThreads) {
    const std::int32_t b = base + static_cast<std::int32_t>(threadIdx.x);
    std::int64_t jobs = 0;
    if (b < step.num_requests && work.request_flags[b] == 0) {
      const std::int64_t rows = std::int64_t{step.cu_rows[b + 1] - step.cu_rows[b]} * launch.group;
      jobs = (rows + launch.row_tile - 1) / launch.row_tile * launch.call.cache.num_kv_heads;
    }
    std::int64_t total, fitting;
    const std::int64_t first = begin + block_scan(jobs, shared, &total);
    const bool fits = jobs == 0 || first + jobs <= work.max_jobs;
    const std::int64_t place = num_jobs + block_scan(fits ? jobs : 0, shared, &fitting);
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
  return static_cast<std::int32_t>(num_jobs);
}

struct Costs {
  std::int64_t sum;
  std::int32_t largest;  // of a job
};

// Writes the jobs without slots; num_slots holds where the job begins on the line of costs.
__device__ Costs describe_jobs(const AttentionLaunch& launch, std::int32_t num_jobs,
                               PlanShared* shared) {
  const WorkView& work = launch.work;
  std::int64_t cost = 0;
  std::int32_t largest = 0;
  for (std::int32_t base = 0; base < num_jobs; base += kPlanThreads) {
    const std::int32_t j = base + static_cast<std::int32_t>(threadIdx.x);
    Job job = {};
    if (j < num_jobs) {
      const std::int32_t b = request_of(work.job_begin, launch.call.step.num_requests, j);
      job = make_job(launch, request_view(launch.call.step, b), j - work.job_begin[b]);
    }
    std::int64_t total;
    const std::int64_t begin = cost + block_scan(job_cost(job), shared, &total);
    job.num_slots = static_cast<std::int32_t>(begin);
    largest = max(largest, job_cost(job));
    if (j < num_jobs) work.jobs[j] = job;
    cost += total;
  }
  return {cost, block_max(largest, shared)};
}

// Does cutting the jobs leave no more units and states than fit?
__device__ bool cuts_fit(const AttentionLaunch& launch, std::int32_t num_jobs, const Dealer& dealer,
                         PlanShared* shared) {
  Counts mine;
  for (std::int32_t j = static_cast<std::int32_t>(threadIdx.x); j < num_jobs; j += kPlanThreads) {
    const Job job = launch.work.jobs[j];
    const Counts counts = count_units(job, job.num_slots, dealer, false);
    mine.units += counts.units;
    mine.slots += counts.slots;
  }
  Counts all;
  block_scan(mine.units, shared, &all.units);
  block_scan(mine.slots, shared, &all.slots);
  return all.units <= launch.work.max_units && all.slots <= launch.work.max_slots;
}

__device__ void write_units(const AttentionLaunch& launch, std::int32_t num_jobs,
                            const Dealer& dealer, bool whole, PlanShared* shared) {
  const WorkView& work = launch.work;
  Counts before;
  for (std::int32_t base = 0; base < num_jobs; base += kPlanThreads) {
    const std::int32_t j = base + static_cast<std::int32_t>(threadIdx.x);
    Job job = {};
    if (j < num_jobs) job = work.jobs[j];
    const std::int64_t line = job.num_slots;
    const Counts counts = count_units(job, line, dealer, whole);
    Counts total;
    std::int64_t unit = before.units + block_scan(counts.units, shared, &total.units);
    std::int64_t slot = before.slots + block_scan(counts.slots, shared, &total.slots);
    if (j < num_jobs) {
      job.first_slot = static_cast<std::int32_t>(slot);
      job.num_slots = static_cast<std::int32_t>(counts.slots);
      work.jobs[j] = job;
      cut_job(job, line, dealer, whole,
              [&](std::int32_t block, std::int32_t first_chunk, std::int32_t end_chunk) {
                work.units[unit++] = {j, first_chunk, end_chunk, static_cast<std::int32_t>(slot),
                                      block};
                slot += first_chunk == job.first_chunk ? 1 : end_chunk - first_chunk;
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

  const std::int32_t num_jobs = number_jobs(launch, shared);
  const Costs cost = describe_jobs(launch, num_jobs, shared);
  const std::int32_t blocks = launch.work.num_blocks;
  const Dealer dealer = {cost.sum > blocks ? (cost.sum + blocks - 1) / blocks : 1, blocks};
  const bool whole = whole_jobs_suffice(num_jobs, cost.largest, dealer) ||
                     !cuts_fit(launch, num_jobs, dealer, shared);
  write_units(launch, num_jobs, dealer, whole, shared);
}

}  // namespace

void launch_plan(const AttentionLaunch& launch) {
  gpu::launch(plan, dim3(1), dim3(kPlanThreads), sizeof(PlanShared), launch.call.exec.stream,
              {.dependent = true}, launch);
}

}  // namespace specdec::attention

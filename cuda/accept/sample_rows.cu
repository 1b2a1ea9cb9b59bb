// The token after each row of scores, drawn by its request's law, and that law if it is wanted.
//
// Grid     all rows together (row_laws.cu), then one block for each row, which is done if the row
// is
//          greedy or was weighed.
// Bytes    each row twice (largest score, masses), the second time from L2: rows fit that of a
// large
//          GPU together up to 25 MB. With top_k or top_p once, and twice more here (bins, list).
// Limit    rows with top_k or top_p: one multiprocessor's arithmetic for one row in the second
//          kernel. Others: row_laws.cu.
#include "accept/accept.h"
#include "accept/block_row.cuh"
#include "accept/row_laws.cuh"

namespace specdec::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kMaxLawThreads, 1)
    sample_kernel(const SampleRowsParams p, const RowLaws all) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int row = static_cast<int>(blockIdx.x);
  const TokenId best = p.ids[row];
  __syncthreads();  // thread 0 may write it
  StepView step;
  step.num_requests = p.rows.num_requests;
  step.cu_rows = p.rows.cu_logits;
  const int b = find_request(step, row);
  const bool owned = b < step.num_requests && step.cu_rows[b] <= row && step.cu_rows[b] >= 0;
  const SamplingLaw law = owned ? p.sampling.law(b) : SamplingLaw{};
  if (!owned || !law.valid()) {
    if (threadIdx.x == 0) {
      p.ids[row] = kBadRow;
      if (owned) report(p.exec.status, b, kStatusBadLaw);
    }
    return;
  }
  TokenId token = best;
  bool drawn = all && RowLaws::draws(law);
  if (drawn) token = all.drawn[row];
  if (token == kCutUnknown) drawn = false;
  if (drawn ? token >= 0 && p.probs != nullptr : !law.greedy()) {
    const T* scores = static_cast<const T*>(p.rows.scores) + row * p.rows.row_stride;
    BlockRow<T> laws(gpu::dynamic_shared<LawShared>(), p.rows.vocab);
    if (drawn) {
      laws.adopt(scores, best, law, all.cut_of(row, law, p.rows.vocab), all.masses_of(row));
    } else {
      token = laws.weigh(scores, best, law);
      if (token == 0) {
        const auto position = static_cast<std::uint64_t>(std::int64_t{p.rows.positions[row]} + 1);
        token = laws.draw(philox_uniform(p.sampling.seed[b], position, p.purpose, 0));
      }
    }
    if (token >= 0 && p.probs != nullptr) laws.write(p.probs + b * p.probs_stride);
  }
  if (threadIdx.x != 0) return;
  p.ids[row] = token;
  if (token == kBadRow) report(p.exec.status, b, kStatusNaN);
}

template <class T>
void launch_sample(const SampleRowsParams& p, const RowLaws& all) {
  gpu::launch(sample_kernel<T>, dim3(static_cast<unsigned>(p.rows.rows)),
              dim3(law_threads(p.rows.vocab, 32)), law_shared_bytes(p.rows.vocab), p.exec.stream,
              gpu::LaunchOptions{.dependent = true}, p, all);
}

}  // namespace

void sample_rows(const SampleRowsParams& p) {
  if (p.rows.rows == 0) return;
  RowLawsParams search;
  search.rows = p.rows;
  search.sampling = p.sampling;
  search.purpose = p.purpose;
  search.ids = p.ids;
  const RowLaws all = search_rows(search, p.exec, 0);
  switch (p.rows.dtype) {
    case DType::kBF16:
      return launch_sample<__nv_bfloat16>(p, all);
    case DType::kF16:
      return launch_sample<__half>(p, all);
    default:
      return launch_sample<float>(p, all);
  }
}

}  // namespace specdec::cuda

// Largest scores, masses and draws of all rows of a step, by all multiprocessors together.
//
// Grid     persistent blocks that take tasks from one counter: a piece of a row is searched for its
//          largest score, and when all of a row's pieces have been, each is weighed against it.
//          Tasks of one kind alternate with those of the other, kAhead rows apart, so that
//          arithmetic hides the reading. A block waits for a row's largest score alone: what it
//          waits for was taken before, by blocks that run and wait for nothing later.
//          Whoever weighs a row's last piece draws its token.
// Bytes    scores once from device memory, once more from L2; 1 / 128 of that in masses.
// Limit    some 30 instructions a token to weigh it: arithmetic from four bytes a token down.
#include <algorithm>

#include "accept/block_row.cuh"
#include "accept/row_laws.cuh"
#include "accept/row_lists.cuh"
#include "accept/row_weights.cuh"
#include "gpu/gpu.cuh"
#include "step/row_best.cuh"
#include "step/step.h"

namespace specdec::cuda {
namespace {

constexpr int kRowThreads = 256, kRowWarps = kRowThreads / 32;
constexpr int kBlocksEach = 3;                 // on a multiprocessor
constexpr int kMaxBlocks = kBlocksEach * 132;  // of the largest GPUs served
constexpr int kAhead = 4;                      // rows searched before the first is weighed
constexpr int kSearched = 4;                // chunks that a warp reads before it looks at the first
constexpr int kMostChunks = 4 * kRowWarps;  // of a piece, which has as many for each warp

struct RowShared {
  ListShared list;
  union {
    Best best[kRowWarps];
    Mass mass[kRowWarps];
  };
  std::int32_t parents[kMaxStepTokens];
  std::uint32_t ticket;
  bool last;
};

// What lies in a row's part of RowLaws::lists once its list is made; candidates follow.
struct RowList {
  std::uint32_t count;
  std::uint32_t all;  // no other token has any weight
  std::uint64_t pad;
};
static_assert(kCandidates == kLawListed && kLaneElements == kLawGroup);
static_assert(sizeof(Candidate) == 12 && sizeof(RowList) == 16 && sizeof(LawCut) == 24);

// The larger score, and of equal ones the smaller index, is the larger number; a NaN the largest.
constexpr std::uint64_t kNaNPacked = ~std::uint64_t{0};
__device__ __forceinline__ std::uint64_t packed(const Best& best) {
  if (best.index == kNaNBest) return kNaNPacked;
  if (best.index == kNoneBest) return 0;
  return std::uint64_t{order_key(best.value)} << 32 | ~static_cast<std::uint32_t>(best.index);
}

__device__ __forceinline__ void add(std::uint64_t* to, std::uint64_t x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}

// For all threads of the block: was this the last of so many pieces of a row? What the others have
// written is seen from here on.
__device__ __forceinline__ bool count_piece(unsigned* done, int pieces, RowShared* shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    shared->last = gpu::atomic_add_acq_rel(done, 1u) + 1 == static_cast<unsigned>(pieces);
  }
  __syncthreads();
  return shared->last;
}

// Whose a row is.
struct RowOwner {
  int request;
  std::int32_t node;
  SamplingLaw law;  // top_k 0 where it cuts nothing
  bool draws;       // is there a law to draw from?
  bool cuts;
};
__device__ __forceinline__ RowOwner owner_of(const RowLawsParams& p, int row) {
  StepView step;
  step.num_requests = p.rows.num_requests;
  step.cu_rows = p.rows.cu_logits;
  RowOwner owner{find_request(step, row), 0, {}, false, false};
  const int b = owner.request;
  if (b >= step.num_requests || step.cu_rows[b] > row || step.cu_rows[b] < 0) return owner;
  owner.law = p.sampling.law(b);
  owner.node = row - step.cu_rows[b];
  owner.draws = RowLaws::draws(owner.law) && (p.parents == nullptr || owner.node < kMaxStepTokens);
  owner.law.top_k = RowLaws::top_k_of(owner.law, p.rows.vocab);
  owner.cuts = owner.draws && RowLaws::cuts(owner.law, p.rows.vocab);
  return owner;
}

// The number that decides the token after a row. For all threads: shared memory is written.
__device__ __forceinline__ double uniform_of(const RowLawsParams& p, const RowOwner& owner, int row,
                                             RowShared* shared) {
  std::int64_t position = p.rows.positions[row];
  if (p.parents != nullptr) {
    const std::int32_t first = p.rows.cu_logits[owner.request];
    if (static_cast<int>(threadIdx.x) <= owner.node) {
      shared->parents[threadIdx.x] = p.parents[first + static_cast<int>(threadIdx.x)];
    }
    __syncthreads();
    position = p.rows.positions[first];
    for (std::int32_t node = owner.node; node > 0; ++position) {
      const std::int32_t parent = shared->parents[node];
      if (parent < 0 || parent >= node) break;  // no tree: nobody will ask
      node = parent;
    }
  }
  return philox_uniform(p.sampling.seed[owner.request], static_cast<std::uint64_t>(position + 1),
                        p.purpose, 0);
}

template <class T>
__device__ __forceinline__ const T* scores_of(const RowLawsParams& p, int row) {
  return static_cast<const T*>(p.rows.scores) + row * p.rows.row_stride;
}

// The largest score of each group of the chunks [begin, end), at `groups` if it is not null, and of
// all of them, with the first token of its group. The calling thread's share.
template <class T>
__device__ __forceinline__ Best best_of_chunks(const RowChunks<T>& row, int begin, int end,
                                               float* groups) {
  static_assert(kLaneElements == 8);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int whole = row.aligned ? min(end, row.vocab / kChunk) : begin;
  Best best = no_best();
  bool nan = false;
#pragma unroll 1
  for (int chunk = begin + warp; chunk < whole; chunk += kSearched * kRowWarps) {
    float x[kSearched][kLaneElements];
#pragma unroll
    for (int k = 0; k < kSearched; ++k) {  // behind the end the last one again
      load_floats(row.scores + row.first_of(min(chunk + k * kRowWarps, whole - 1)), true, x[k]);
    }
#pragma unroll
    for (int k = 0; k < kSearched; ++k) {
#pragma unroll
      for (int j = 0; j < kLaneElements; j += 2) {  // one comparison for two
        nan |= (x[k][j] != x[k][j]) | (x[k][j + 1] != x[k][j + 1]);
      }
      const float largest = fmaxf(fmaxf(fmaxf(x[k][0], x[k][1]), fmaxf(x[k][2], x[k][3])),
                                  fmaxf(fmaxf(x[k][4], x[k][5]), fmaxf(x[k][6], x[k][7])));
      const int at = chunk + k * kRowWarps;
      if (groups != nullptr && at < whole) groups[at * 32 + lane_id()] = largest;
      if (largest > best.value) best = {largest, row.first_of(min(at, whole - 1))};
    }
  }
  // What is not whole, or begins anywhere.
  row.template for_range<1>(
      max(begin, whole), end,
      [&](int chunk, std::int32_t first, int count, const float (&x)[kLaneElements]) {
        float largest = no_best().value;
#pragma unroll
        for (int j = 0; j < kLaneElements; ++j) {
          if (j >= count) break;
          nan |= x[j] != x[j];
          largest = fmaxf(largest, x[j]);
        }
        if (groups != nullptr) groups[chunk * 32 + lane_id()] = largest;
        if (largest > best.value) best = {largest, first};
      });
  if (nan) best = {0.0f, kNaNBest};
  return best;
}

// The row's largest score, the first of equal ones; kBadRow if it holds a NaN. Valid for all lanes
// of the warp that calls.
template <class T>
__device__ __forceinline__ TokenId best_token(const RowChunks<T>& row, std::uint64_t best) {
  if (best == kNaNPacked) return kBadRow;
  if (best == 0) return 0;
  const auto first = static_cast<std::int32_t>(~static_cast<std::uint32_t>(best));
  const auto key = static_cast<std::uint32_t>(best >> 32);
  const int lane = lane_id();
  const bool equal =
      lane < row.tokens_from(first) && order_key(widen(row.scores[first + lane])) == key;
  return first + __ffs(static_cast<int>(__ballot_sync(kAllLanes, equal))) - 1;
}

// Cuts and draws from a row whose list is in the shared memory. total: as in BlockRow::cut_list.
template <class T>
__device__ __forceinline__ void draw_listed(const RowLawsParams& p, const RowOwner& owner, int row,
                                            Mass total, bool all, RowShared* shared) {
  BlockRow<T> laws(&shared->list.law, p.rows.vocab);
  TokenId token = kCutUnknown;
  if (laws.cut_list(scores_of<T>(p, row), p.ids[row], owner.law, total, all)) {
    token = laws.draw(uniform_of(p, owner, row, shared));
    if (threadIdx.x == 0) p.laws.cut[row] = laws.known_cut();
  }
  if (threadIdx.x == 0) p.laws.drawn[row] = token;
}

// The last piece of a row whose law is cut by top_p alone: weighed, or its list made.
template <class T>
[[gnu::noinline]] __device__ void draw_weighed(const RowLawsParams& p, int row, RowShared* shared) {
  const RowOwner owner = owner_of(p, row);
  const auto* list = reinterpret_cast<const RowList*>(p.laws.lists + row * p.laws.list_bytes);
  const auto* from = reinterpret_cast<const Candidate*>(list + 1);
  LawShared& law = shared->list.law;
  for (std::uint32_t i = threadIdx.x; i < list->count; i += kRowThreads)
    law.candidates[i] = from[i];
  if (threadIdx.x == 0) law.listed = list->count;
  const bool all = list->all != 0;
  __syncthreads();
  draw_listed<T>(p, owner, row, p.laws.total[row], all, shared);
}

// The list of a row that has been searched; cuts and draws where that needs no mass of the row.
template <class T>
[[gnu::noinline]] __device__ void make_list(const RowLawsParams& p, int row, int pieces,
                                            RowShared* shared) {
  const RowOwner owner = owner_of(p, row);
  const T* scores = scores_of<T>(p, row);
  const TokenId best = p.ids[row];
  const float largest = best < 0 ? 0.0f : widen(scores[best]);
  if (const TokenId fault = row_fault(best, largest); fault != 0) {
    if (threadIdx.x == 0) p.laws.drawn[row] = fault;
    return;
  }
  RowChunks<T> chunks(p.rows.vocab);
  chunks.point_at(scores);
  char* at = p.laws.lists + row * p.laws.list_bytes;
  const bool all =
      list_row(chunks, reinterpret_cast<const float*>(at), {largest, owner.law}, &shared->list);
  if (owner.law.top_k > 0) return draw_listed<T>(p, owner, row, 0, all, shared);
  auto* list = reinterpret_cast<RowList*>(at);
  auto* to = reinterpret_cast<Candidate*>(list + 1);
  const LawShared& law = shared->list.law;
  for (std::uint32_t i = threadIdx.x; i < law.listed; i += kRowThreads) to[i] = law.candidates[i];
  if (threadIdx.x == 0) *list = {law.listed, all ? 1u : 0u, 0};
  if (count_piece(p.laws.done + 2 * row + 1, pieces + 1, shared)) {
    draw_weighed<T>(p, row, shared);
  }
}

template <class T>
__device__ __forceinline__ void search_piece(const RowLawsParams& p, int row, int begin, int end,
                                             int pieces, RowShared* shared) {
  const RowOwner owner = owner_of(p, row);
  RowChunks<T> chunks(p.rows.vocab);
  chunks.point_at(scores_of<T>(p, row));
  auto* groups = reinterpret_cast<float*>(p.laws.lists + row * p.laws.list_bytes);
  const Best best = best_of_block<kRowThreads>(
      best_of_chunks(chunks, begin, end, owner.cuts ? groups : nullptr), shared->best);
  if (threadIdx.x == 0) {
    atomicMax(reinterpret_cast<unsigned long long*>(p.laws.best + row),
              static_cast<unsigned long long>(packed(best)));
  }
  unsigned* searched = p.laws.done + 2 * row;
  if (!count_piece(searched, pieces, shared)) return;
  if (threadIdx.x < 32) {
    const TokenId token = best_token(chunks, p.laws.best[row]);
    if (threadIdx.x == 0) {
      p.ids[row] = token;
      gpu::store_release(searched, static_cast<unsigned>(pieces) + 1);
    }
  }
  __syncthreads();
  if (owner.cuts) make_list<T>(p, row, pieces, shared);
}

template <class T>
__device__ __forceinline__ void weigh_piece(const RowLawsParams& p, int row, int begin, int end,
                                            int pieces, RowShared* shared) {
  const RowOwner owner = owner_of(p, row);
  if (!owner.draws || owner.law.top_k > 0) return;
  if (threadIdx.x == 0) {
    while (gpu::load_acquire(p.laws.done + 2 * row) <= static_cast<unsigned>(pieces)) {
    }
  }
  __syncthreads();
  const T* scores = scores_of<T>(p, row);
  const TokenId best = p.ids[row];
  const float largest = best < 0 ? 0.0f : widen(scores[best]);
  if (const TokenId fault = row_fault(best, largest); fault != 0) {
    // Of a row that cuts, whoever makes its list says so.
    if (threadIdx.x == 0 && begin == 0 && !owner.cuts) p.laws.drawn[row] = fault;
    return;
  }
  RowChunks<T> chunks(p.rows.vocab);
  chunks.point_at(scores);
  const RowWeights weights(largest, owner.law);
  Mass* masses = p.laws.masses_of(row);
  const Mass mine = warp_sum(weigh_range(chunks, weights, begin, end, masses));
  if (lane_id() == 0) shared->mass[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    Mass sum = 0;
    for (int w = 0; w < kRowWarps; ++w) sum += shared->mass[w];
    add(p.laws.total + row, sum);
  }
  // The list of a row that cuts is one piece more.
  if (!count_piece(p.laws.done + 2 * row + 1, pieces + (owner.cuts ? 1 : 0), shared)) return;
  if (owner.cuts) return draw_weighed<T>(p, row, shared);
  const double u = uniform_of(p, owner, row, shared);
  if (threadIdx.x >= 32) return;
  const Mass unit = drawn_unit(u, p.laws.total[row]);
  const TokenId token = find_unit(chunks, masses, unit,
                                  [&](std::int32_t id) { return weights.of(widen(scores[id])); });
  if (lane_id() == 0) p.laws.drawn[row] = token;
}

template <class T>
__global__ void __launch_bounds__(kRowThreads, kBlocksEach)
    row_laws_kernel(const __grid_constant__ RowLawsParams p, const int pieces,
                    const int piece_chunks) {
  static_assert(kMaxStepTokens <= kRowThreads, "a thread for each node of a tree");
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  RowShared* shared = gpu::dynamic_shared<RowShared>();
  // Twice a block's share at most: where blocks run one after another (the emulator), the first one
  // does not do everything.
  const int tickets = 2 * pieces * (p.rows.rows + kAhead), blocks = static_cast<int>(gridDim.x);
  for (int left = 2 * ((tickets + blocks - 1) / blocks); left > 0; --left) {
    if (threadIdx.x == 0) shared->ticket = atomicAdd(p.laws.tickets, 1u);
    __syncthreads();
    const auto ticket = static_cast<int>(shared->ticket);
    __syncthreads();  // it may be written again
    const int turn = ticket / (2 * pieces), task = ticket % (2 * pieces);
    if (turn >= p.rows.rows + kAhead) return;
    const bool searches = task < pieces;
    const int row = searches ? turn : turn - kAhead;
    const int begin = (searches ? task : task - pieces) * piece_chunks;
    const int end = min(begin + piece_chunks, p.laws.chunks);
    if (searches && row < p.rows.rows) {
      search_piece<T>(p, row, begin, end, pieces, shared);
    } else if (!searches && row >= 0) {
      weigh_piece<T>(p, row, begin, end, pieces, shared);
    }
    __syncthreads();  // shared memory may be written again
  }
}

constexpr int kClearThreads = 256;

// Counters to 0; nothing drawn for rows of no request.
__global__ void __launch_bounds__(kClearThreads)
    clear_kernel(std::uint64_t* words, const int counters, const int count) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int i = static_cast<int>(blockIdx.x) * kClearThreads + static_cast<int>(threadIdx.x);
  if (i < count) words[i] = i < counters ? 0 : ~std::uint64_t{0};
}

// 64-bit words in front of the masses: counters, then drawn tokens.
constexpr std::int64_t counter_words(std::int32_t rows) { return 1 + std::int64_t{3} * rows; }
constexpr std::int64_t cleared_words(std::int32_t rows) {
  return counter_words(rows) + (std::int64_t{rows} + 1) / 2;
}
constexpr std::int64_t kCutWords = sizeof(LawCut) / 8;
static_assert(kBadRow == -1, "all ones");

template <class T>
void launch_row_laws(const RowLawsParams& p) {
  const std::int32_t rows = p.rows.rows, chunks = p.laws.chunks;
  const int wanted = std::max((chunks + kMostChunks - 1) / kMostChunks, kMaxBlocks / rows);
  const int each = (chunks + wanted - 1) / wanted;
  const int piece_chunks = (each + kRowWarps - 1) / kRowWarps * kRowWarps;
  const int used = (chunks + piece_chunks - 1) / piece_chunks;
  const std::int64_t tasks = std::int64_t{2} * rows * used;
  gpu::launch(row_laws_kernel<T>,
              dim3(static_cast<unsigned>(std::min<std::int64_t>(tasks, kMaxBlocks))),
              dim3(kRowThreads), sizeof(RowShared), p.stream, gpu::LaunchOptions{.dependent = true},
              p, used, piece_chunks);
}

}  // namespace

RowLaws place_row_laws(const ScoreRows& rows, const ExecutionContext& exec, std::int64_t offset) {
  if (exec.workspace == nullptr ||
      exec.workspace_bytes < offset + row_laws_bytes(rows.rows, rows.vocab)) {
    return {};
  }
  auto* words = reinterpret_cast<std::uint64_t*>(static_cast<char*>(exec.workspace) + offset);
  RowLaws laws;
  laws.chunks = (rows.vocab + kChunk - 1) / kChunk;
  laws.tickets = reinterpret_cast<std::uint32_t*>(words);
  laws.best = words + 1;
  laws.total = laws.best + rows.rows;
  laws.done = reinterpret_cast<unsigned*>(laws.total + rows.rows);
  laws.drawn = reinterpret_cast<TokenId*>(words + counter_words(rows.rows));
  laws.cut = reinterpret_cast<LawCut*>(words + cleared_words(rows.rows));
  laws.mass_of_chunk = words + cleared_words(rows.rows) + kCutWords * rows.rows;
  laws.list_bytes = law_list_bytes(rows.vocab);
  laws.lists = reinterpret_cast<char*>(words) + row_laws_bytes(rows.rows, rows.vocab) -
               rows.rows * laws.list_bytes;
  return laws;
}

void row_laws(const RowLawsParams& p) {
  const auto words = static_cast<int>(cleared_words(p.rows.rows));
  gpu::launch(clear_kernel,
              dim3(static_cast<unsigned>((words + kClearThreads - 1) / kClearThreads)),
              dim3(kClearThreads), 0, p.stream, gpu::LaunchOptions{.dependent = true},
              reinterpret_cast<std::uint64_t*>(p.laws.tickets),
              static_cast<int>(counter_words(p.rows.rows)), words);
  switch (p.rows.dtype) {
    case DType::kBF16:
      return launch_row_laws<__nv_bfloat16>(p);
    case DType::kF16:
      return launch_row_laws<__half>(p);
    default:
      return launch_row_laws<float>(p);
  }
}

RowLaws search_rows(RowLawsParams p, const ExecutionContext& exec, std::int64_t offset) {
  if (p.rows.rows == 0) return {};
  p.laws = place_row_laws(p.rows, exec, offset);
  p.stream = exec.stream;
  if (p.laws) {
    row_laws(p);
    return p.laws;
  }
  ArgmaxParams best;
  best.scores = p.rows.scores;
  best.row_stride = p.rows.row_stride;
  best.rows = p.rows.rows;
  best.vocab = p.rows.vocab;
  best.ids = p.ids;
  best.dtype = p.rows.dtype;
  best.exec = exec;
  best.exec.workspace_bytes = exec.workspace_bytes - offset;
  best.exec.workspace =
      best.exec.workspace_bytes > 0 ? static_cast<char*>(exec.workspace) + offset : nullptr;
  argmax(best);
  return {};
}

}  // namespace specdec::cuda

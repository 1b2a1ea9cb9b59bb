// Largest scores, masses and draws of all rows of a step, by all multiprocessors together.
//
// Grid     persistent blocks that take tasks from one counter: a piece of a row is searched for its
//          largest score, and when all of a row's pieces have been, each is weighed against it.
//          Tasks of one kind alternate with those of the other (RowOrder), so that arithmetic hides
//          the reading. A block waits for a row's largest score alone: what it waits for was taken
//          before, by blocks that run and wait for nothing later.
//          Whoever weighs a row's last piece draws its token. Where drafts have probabilities
//          (row_held.cuh), these are summed with the draft's own row, and who comes last holds the
//          draft against its parent's law. Rows and drafts that no path leads to are left out, as
//          soon as that is known.
// Bytes    scores once from device memory, once more from L2; 1 / 128 of that in masses. The
//          probabilities of drafts that a path may reach once; of a rejected one again, with its
//          parent's row, from L2.
// Limit    some 30 instructions a token to weigh it: arithmetic from four bytes a token down.
#include <algorithm>

#include "accept/row_held.cuh"
#include "accept/row_laws.cuh"
#include "accept/row_listed.cuh"
#include "accept/row_search.cuh"
#include "accept/row_task.cuh"
#include "accept/row_weights.cuh"
#include "gpu/gpu.cuh"
#include "step/row_best.cuh"
#include "step/step.h"

namespace specdec::cuda {
namespace {

constexpr int kBlocksEach = 2;  // on a multiprocessor: more would not have the registers
constexpr int kMaxBlocks = kBlocksEach * 132;   // of the largest GPUs served
constexpr int kAhead = 4;                       // rows searched before the first is weighed
constexpr std::int64_t kAheadBytes = 16 << 20;  // of a row that is searched and the one weighed
// In a piece, with as many for each warp. Taking a piece and counting it are two round trips to L2:
// with 4 a warp they took longer than the reading (H200), with 32 rows end unevenly.
constexpr int kMostChunks = 12 * kRowWarps;

// The order in which rows are searched and weighed. The first ones are searched at once, then two
// for each that is weighed, until as much is read ahead as L2 may hold beside other things; then
// one for each, and what is left is weighed. So the last row's list, one block's work, is made
// while other rows are weighed.
struct RowOrder {
  int rows, ahead, twos, ones;

  RowOrder(int count, std::int64_t row_bytes) : rows(count), ahead(std::min(count, kAhead)) {
    const auto most = std::max<std::int64_t>(kAheadBytes / row_bytes, ahead);
    twos = static_cast<int>(std::min<std::int64_t>(most - ahead, (rows - ahead) / 2));
    ones = rows - ahead - 2 * twos;
  }

  struct Turn {
    int row;
    bool searches;
  };
  __device__ Turn at(int turn) const {
    if (turn < ahead) return {turn, true};
    turn -= ahead;
    if (turn < 3 * twos) {
      const int i = turn / 3, k = turn % 3;
      return k < 2 ? Turn{ahead + 2 * i + k, true} : Turn{i, false};
    }
    turn -= 3 * twos;
    if (turn < 2 * ones) {
      const int i = turn / 2;
      return turn % 2 == 0 ? Turn{ahead + 2 * twos + i, true} : Turn{twos + i, false};
    }
    return {turn - ones + twos, false};
  }
};

// What is left to do after a piece, at a place where the block holds nothing in registers.
enum class AfterPiece { kNothing, kMakeList, kDrawWeighed, kDrawn };

template <class T>
__device__ __forceinline__ AfterPiece search_piece(const RowLawsParams& p, int row, int begin,
                                                   int end, int pieces, RowShared* shared) {
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
  if (!count_piece(searched, pieces, shared)) return AfterPiece::kNothing;
  if (threadIdx.x < 32) {
    const TokenId token = best_token(chunks, p.laws.best[row]);
    if (threadIdx.x == 0) {
      p.ids[row] = token;
      gpu::store_release(searched, static_cast<unsigned>(pieces) + 1);
    }
  }
  __syncthreads();
  return owner.cuts ? AfterPiece::kMakeList : AfterPiece::kNothing;
}

template <class T>
__device__ __forceinline__ AfterPiece weigh_piece(const RowLawsParams& p, int row, int begin,
                                                  int end, int pieces, RowShared* shared) {
  const RowOwner owner = owner_of(p, row);
  if (!owner.draws || owner.law.top_k > 0) return AfterPiece::kNothing;
  if (threadIdx.x == 0) {
    shared->skip = is_unused(p, row);
    while (!shared->skip &&
           gpu::load_acquire(p.laws.done + 2 * row) <= static_cast<unsigned>(pieces)) {
    }
  }
  __syncthreads();
  if (shared->skip) return AfterPiece::kNothing;
  const T* scores = scores_of<T>(p, row);
  const TokenId best = p.ids[row];
  const float largest = best < 0 ? 0.0f : widen(scores[best]);
  if (const TokenId fault = row_fault(best, largest); fault != 0) {
    // Where a row cuts, whoever makes its list says so.
    if (begin != 0 || owner.cuts) return AfterPiece::kNothing;
    if (threadIdx.x == 0) p.laws.drawn[row] = fault;
    return AfterPiece::kDrawn;
  }
  RowChunks<T> chunks(p.rows.vocab);
  chunks.point_at(scores);
  const RowWeights weights(largest, owner.law);
  Mass* masses = p.laws.masses_of(row);
  const Mass mine = gpu::warp_sum(weigh_range(chunks, weights, begin, end, masses));
  if (lane_id() == 0) shared->mass[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    Mass sum = 0;
    for (int w = 0; w < kRowWarps; ++w) sum += shared->mass[w];
    add(p.laws.total + row, sum);
  }
  // The list of a row that cuts is one piece more.
  if (!count_piece(p.laws.done + 2 * row + 1, pieces + (owner.cuts ? 1 : 0), shared))
    return AfterPiece::kNothing;
  if (owner.cuts) return AfterPiece::kDrawWeighed;
  const double u = uniform_of(p, owner, row, shared);
  if (threadIdx.x >= 32) return AfterPiece::kDrawn;
  const Mass unit = drawn_unit(u, p.laws.total[row]);
  const TokenId token = find_unit(chunks, masses, unit,
                                  [&](std::int32_t id) { return weights.of(widen(scores[id])); });
  if (lane_id() == 0) p.laws.drawn[row] = token;
  return AfterPiece::kDrawn;
}

// Takes a piece of a rejected draft, in the order of the queue; -1: there is none. One thread's.
__device__ __forceinline__ std::int32_t take_rejected(RowQueue* queue, int pieces) {
  const auto each = static_cast<unsigned>(pieces);
  unsigned taken = gpu::load_relaxed(&queue->taken);
  while (taken < gpu::load_relaxed(&queue->rejected) * each) {
    const unsigned found = atomicCAS(&queue->taken, taken, taken + 1);
    if (found == taken) return static_cast<std::int32_t>(taken);
    taken = found;
  }
  return -1;
}

template <class T>
__device__ __forceinline__ void subtract_piece(const RowLawsParams& p, int pieces, int piece_chunks,
                                               RowShared* shared) {
  const int turn = shared->piece / pieces, begin = shared->piece % pieces * piece_chunks;
  if (threadIdx.x == 0) {
    // Whoever rejected it is just writing it down.
    while ((shared->verdict = gpu::load_acquire(p.laws.rejected + turn)) == 0) {
    }
  }
  __syncthreads();
  const auto row = static_cast<int>(shared->verdict);
  subtract_draft_piece<T>(p, row, begin, min(begin + piece_chunks, p.laws.chunks), pieces, shared);
  __syncthreads();  // all have finished
  if (threadIdx.x == 0) gpu::atomic_add_acq_rel(&p.laws.queue->finished, 1u);
}

// What is left in the queue when there are no tasks any more: until all tasks and pieces, which may
// put something more into it, are finished.
template <class T>
__device__ __forceinline__ void empty_queue(const RowLawsParams& p, int tasks, int pieces,
                                            int piece_chunks, RowShared* shared) {
  RowQueue* queue = p.laws.queue;
  while (true) {
    if (threadIdx.x == 0) {
      while ((shared->piece = take_rejected(queue, pieces)) < 0) {
        const unsigned finished = gpu::load_acquire(&queue->finished);
        const unsigned rejected = gpu::load_relaxed(&queue->rejected);
        if (finished == static_cast<unsigned>(tasks + static_cast<int>(rejected) * pieces)) break;
      }
    }
    __syncthreads();
    if (shared->piece < 0) return;
    subtract_piece<T>(p, pieces, piece_chunks, shared);
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(kRowThreads, kBlocksEach)
    row_laws_kernel(const __grid_constant__ RowLawsParams p, const int pieces,
                    const int piece_chunks, const RowOrder order) {
  static_assert(kMaxStepTokens <= kRowThreads, "a thread for each node of a tree");
  static_assert(kSearchWarps == kRowWarps);
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  RowShared* shared = gpu::dynamic_shared<RowShared>();
  // Twice a block's share at most: where blocks run one after another (the emulator), the first one
  // does not do everything.
  const int tickets = 2 * pieces * p.rows.rows, blocks = static_cast<int>(gridDim.x);
  const bool holds = p.holds();
  for (int left = 2 * ((tickets + blocks - 1) / blocks); left > 0; --left) {
    if (threadIdx.x == 0) shared->ticket = atomicAdd(&p.laws.queue->tickets, 1u);
    if (threadIdx.x == 32) shared->piece = holds ? take_rejected(p.laws.queue, pieces) : -1;
    __syncthreads();
    const auto ticket = static_cast<int>(shared->ticket);
    if (shared->piece >= 0) subtract_piece<T>(p, pieces, piece_chunks, shared);
    __syncthreads();  // they may be written again
    if (ticket >= tickets) {
      if (holds) empty_queue<T>(p, tickets, pieces, piece_chunks, shared);
      return;
    }
    const auto [row, searches] = order.at(ticket / pieces);
    const int begin = ticket % pieces * piece_chunks;
    const int end = min(begin + piece_chunks, p.laws.chunks);
    const AfterPiece after = searches ? search_piece<T>(p, row, begin, end, pieces, shared)
                                      : weigh_piece<T>(p, row, begin, end, pieces, shared);
    bool drawn = after == AfterPiece::kDrawn;
    if (after == AfterPiece::kMakeList) drawn = make_list<T>(p, row, pieces, shared);
    if (after == AfterPiece::kDrawWeighed) drawn = draw_weighed<T>(p, row, shared);
    if (drawn && p.parents != nullptr) finish_row<T>(p, row, tickets, shared);
    if (holds) {
      __syncthreads();
      if (!searches) sum_draft<T>(p, row, begin, end, pieces, shared);
      __syncthreads();
      if (threadIdx.x == 0) gpu::atomic_add_acq_rel(&p.laws.queue->finished, 1u);
    }
    __syncthreads();  // shared memory may be written again
  }
}

constexpr int kClearThreads = 256;
// Two tokens.
constexpr std::uint64_t kNothingDrawn = std::uint64_t{static_cast<std::uint32_t>(kCutUnknown)}
                                            << 32 |
                                        static_cast<std::uint32_t>(kCutUnknown);

// Counters to 0; no token known.
__global__ void __launch_bounds__(kClearThreads)
    clear_kernel(std::uint64_t* words, const int counters, const int count) {
  gpu::grid_dependency_wait();
  gpu::launch_dependents();
  const int i = static_cast<int>(blockIdx.x) * kClearThreads + static_cast<int>(threadIdx.x);
  if (i < count) words[i] = i < counters ? 0 : kNothingDrawn;
}

// 64-bit words in front of the masses: counters, then drawn tokens.
constexpr std::int64_t kQueueWords = sizeof(RowQueue) / 8, kHeldWords = sizeof(HeldDraft) / 8;
constexpr std::int64_t kCutWords = sizeof(LawCut) / 8;
static_assert(sizeof(RowOutcome) == 8);
constexpr std::int64_t halves(std::int32_t rows) { return (std::int64_t{rows} + 1) / 2; }
constexpr std::int64_t counter_words(std::int32_t rows) {
  return kQueueWords + rows * (4 + kHeldWords) + halves(rows);
}
constexpr std::int64_t cleared_words(std::int32_t rows) {
  return counter_words(rows) + halves(rows);
}

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
              p, used, piece_chunks,
              RowOrder(rows, std::int64_t{p.rows.vocab} * static_cast<std::int64_t>(sizeof(T))));
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
  laws.queue = reinterpret_cast<RowQueue*>(words);
  laws.best = words + kQueueWords;
  laws.total = laws.best + rows.rows;
  laws.held = reinterpret_cast<HeldDraft*>(laws.total + rows.rows);
  laws.outcome = reinterpret_cast<RowOutcome*>(laws.held + rows.rows);
  laws.done = reinterpret_cast<unsigned*>(laws.outcome + rows.rows);
  laws.rejected = laws.done + 2 * rows.rows;
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
              reinterpret_cast<std::uint64_t*>(p.laws.queue),
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

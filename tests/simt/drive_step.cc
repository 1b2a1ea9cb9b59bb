// The kernels around a step, against plain loops: geometry from parents[], mask packing, argmax.
#include "simt/drive.h"
#include "step/argmax.cu"
#include "step/build_step.cu"
#include "tree/draft_tree.h"

namespace {

using namespace drive;

struct StepOutputs {
  std::int32_t* positions;
  std::uint32_t* mask;
  std::uint8_t* is_tree;
  std::int64_t* slots;
};

void expect_row(const StepOutputs& out, int row, std::int32_t position, const std::uint32_t* mask,
                std::int64_t slot) {
  expect(out.positions[row] == position, "build_step: position of row %d = %d, not %d", row,
         out.positions[row], position);
  for (int w = 0; w < kMaskWords; ++w) {
    expect(out.mask[row * kMaskWords + w] == mask[w],
           "build_step: mask word %d of row %d = %x, not %x", w, row,
           out.mask[row * kMaskWords + w], mask[w]);
  }
  if (out.slots == nullptr) return;
  expect(out.slots[row] == slot, "build_step: slot of row %d = %lld, not %lld", row,
         static_cast<long long>(out.slots[row]), static_cast<long long>(slot));
}

// A request that may be broken, and what is to come of it.
struct Expected {
  std::uint32_t flags = 0;
  bool tree = false, cleared = false;
};

void build_case(Rng& rng) {
  Arena arena;
  std::vector<Request> requests;
  const int num = rng.in(1, 7), max_depth = rng.of({kMaxDraftLen, 6});
  for (int b = 0; b < num; ++b) {
    const int kv_len = rng.chance(20) ? 0 : rng.below(70);
    std::vector<std::int32_t> parents;
    switch (rng.below(5)) {
      case 0:
        break;  // no rows
      case 1:   // a chain of any length
        for (int i = 0, n = rng.of({1, 2, 31, 33, 127, 128, 129, 300}); i < n; ++i) {
          parents.push_back(i - 1);
        }
        break;
      default:
        parents =
            random_parents(rng, rng.of({1, 2, 5, 27, 32, 33, 64, 65, 84, 127, 128}), max_depth);
    }
    requests.push_back({kv_len, parents});
  }
  SceneOptions o;
  o.page_size = rng.of({1, 4, 16, 128});
  o.padding_rows = rng.of({0, 0, 1, 200});
  Scene s = make_scene(arena, rng, requests, o);

  std::vector<Expected> expected(static_cast<std::size_t>(num));
  for (int b = 0; b < num; ++b) {
    const Request& r = s.requests[b];
    Expected& e = expected[b];
    e.tree = !r.chain();
    if (r.rows() == 0 || !rng.chance(30)) continue;
    std::int32_t* parents = s.parents + s.cu_rows[b];
    const int node = rng.below(r.rows());
    switch (rng.below(5)) {
      case 0:  // not in topological order
        parents[node] = node == 0 ? rng.of({0, -2, 0x7fffffff})
                                  : rng.of({-1, -2, node, node + 1, INT32_MIN, 0x7fffffff});
        e = {kStatusBadTree, false, false};
        break;
      case 1:  // a tree deeper than max_depth, or a long chain that is none
        if (r.rows() < max_depth + 3) break;
        for (int i = 1; i < r.rows(); ++i) parents[i] = i - 1;
        parents[r.rows() - 1] = r.rows() - 3;
        e = {kStatusBadTree, false, false};
        if (max_depth >= r.rows() - 2 && r.rows() <= kMaxStepTokens) e = {0, true, false};
        break;
      case 2:
        s.kv_len[b] = rng.of({-1, 0x7fffffff, s.step.page_table_stride * o.page_size});
        e = {kStatusBadLength, false, true};
        break;
      case 3:
        s.page_table[b * s.step.page_table_stride + (r.kv_len + node) / o.page_size] =
            rng.of({-1, s.cache.num_pages, 0x7fffffff});
        e.flags = kStatusBadPage;
        break;
      default:
        break;
    }
  }
  BuildStepParams p;
  p.step = s.step;
  p.step.positions = nullptr, p.step.mask = nullptr, p.step.is_tree = nullptr;
  p.max_depth = max_depth;
  p.num_pages = s.cache.num_pages, p.page_size = o.page_size;
  const auto rows = static_cast<std::size_t>(s.rows());
  StepOutputs out;
  p.positions = out.positions = arena.array<std::int32_t>("positions out", rows, true);
  p.mask = out.mask = arena.array<std::uint32_t>("mask out", rows * kMaskWords, true);
  p.is_tree = out.is_tree = arena.array<std::uint8_t>("is_tree out", num, true);
  out.slots = rng.chance(80) ? arena.array<std::int64_t>("slots out", rows, true) : nullptr;
  p.slots = out.slots;
  p.exec.status = s.status;
  cuda::build_step(p);

  const std::uint32_t zero[kMaskWords] = {};
  for (int b = 0; b < num; ++b) {
    const Request& r = s.requests[b];
    const Expected& e = expected[b];
    // Without slots the page table is not read.
    const std::uint32_t flags = out.slots == nullptr ? e.flags & ~kStatusBadPage : e.flags;
    expect(s.status[b] == flags, "build_step: status[%d] = %u, not %u", b, s.status[b], flags);
    expect(out.is_tree[b] == (e.tree ? 1 : 0), "build_step: is_tree[%d] = %d", b, out.is_tree[b]);
    const int n = r.rows();
    std::vector<std::int32_t> parents(s.parents + s.cu_rows[b], s.parents + s.cu_rows[b] + n);
    if (!e.tree) {
      for (int i = 0; i < n; ++i) parents[i] = i - 1;
    }
    std::vector<std::int32_t> depths(parents.size());
    std::vector<std::uint32_t> mask(parents.size() * kMaskWords, 0);
    derive_depths(parents.data(), n, depths.data());
    if (n <= kMaxStepTokens) derive_mask(parents.data(), n, mask.data());
    for (int i = 0; i < n; ++i) {
      const int row = s.cu_rows[b] + i, token = r.kv_len + i;
      if (e.cleared) {
        expect_row(out, row, 0, zero, -1);
        continue;
      }
      const std::int32_t page = s.page_table[b * s.step.page_table_stride + token / o.page_size];
      const bool bad = page < 0 || page >= s.cache.num_pages;
      expect_row(out, row, r.kv_len + depths[i], mask.data() + i * kMaskWords,
                 bad ? -1 : std::int64_t{page} * o.page_size + token % o.page_size);
    }
  }
  for (int row = s.cu_rows[num]; row < s.rows(); ++row) expect_row(out, row, 0, zero, -1);
}

void pack_case(Rng& rng, int columns) {
  Arena arena;
  PackMaskParams p;
  p.rows = rng.of({0, 1, 7, 128}), p.cols = columns;
  p.num_words = (columns + 31) / 32 + rng.below(2);
  p.column_stride = rng.of({1, 1, 3});
  p.row_stride = columns * p.column_stride + rng.below(4);
  const auto size = static_cast<std::size_t>(std::max(p.rows, 1) * p.row_stride);
  std::uint8_t* mask = arena.array<std::uint8_t>("bool mask", size, false);
  for (int i = 0; i < p.rows; ++i) {
    for (int j = 0; j < columns; ++j) mask[i * p.row_stride + j * p.column_stride] = rng.chance(50);
  }
  const auto words = static_cast<std::size_t>(p.rows * p.num_words);
  p.mask = mask, p.words = arena.array<std::uint32_t>("words", words, true);
  cuda::pack_mask(p);
  for (int i = 0; i < p.rows; ++i) {
    for (int j = 0; j < p.num_words * 32; ++j) {
      const bool want = j < columns && mask[i * p.row_stride + j * p.column_stride] != 0;
      const bool got = (p.words[i * p.num_words + j / 32] >> j % 32 & 1) != 0;
      expect(got == want, "pack_mask: %d columns, row %d bit %d", columns, i, j);
    }
  }
}

void argmax_case(Rng& rng, DType dtype, int vocab) {
  Arena arena;
  ArgmaxParams p;
  p.dtype = dtype, p.vocab = vocab;
  p.rows = rng.of({1, 3, 9});
  p.row_stride = vocab + rng.of({0, 1, 8, 64});  // what pads a row is NaN
  const std::size_t size = static_cast<std::size_t>(p.rows * p.row_stride) * dtype_bytes(dtype);
  char* scores = arena.bytes("scores", size, false, dtype_bytes(dtype) * rng.below(4));
  std::vector<TokenId> want;
  for (int i = 0; i < p.rows; ++i) {
    const int kind = rng.below(6);
    const int levels = rng.of({3, 1000});  // few levels: many ties
    for (int j = 0; j < vocab; ++j) {
      float x = static_cast<float>(rng.below(levels));
      if (kind == 0) x = -INFINITY;
      if (kind == 1) x = rng.chance(50) ? 0.0f : -0.0f;
      if (kind == 2 && x < 2) x = -INFINITY;
      write(dtype, x, scores, i * p.row_stride + j);
    }
    if (kind == 3)
      write(dtype, NAN, scores, i * p.row_stride + rng.of({0, vocab - 1, rng.below(vocab)}));
    if (kind == 4) {
      write(dtype, INFINITY, scores, i * p.row_stride + rng.of({0, vocab - 1, rng.below(vocab)}));
    }
    TokenId best = 0;
    bool nan = false;
    for (int j = 0; j < vocab; ++j) {
      const float x = read(dtype, scores, i * p.row_stride + j);
      nan |= std::isnan(x);
      if (x > read(dtype, scores, i * p.row_stride + best)) best = j;
    }
    want.push_back(nan ? -1 : best);
  }
  p.scores = scores;
  for (const bool shared : {false, true}) {
    p.ids = arena.array<TokenId>("ids", static_cast<std::size_t>(p.rows), true);
    if (shared) {
      p.exec.workspace_bytes = cuda::argmax_workspace_bytes(p.rows, vocab);
      p.exec.workspace =
          arena.bytes("workspace", static_cast<std::size_t>(p.exec.workspace_bytes), true);
    }
    cuda::argmax(p);
    for (int i = 0; i < p.rows; ++i) {
      expect(p.ids[i] == want[i], "argmax %s, %d columns: row %d = %d, not %d", dtype_name(dtype),
             vocab, i, p.ids[i], want[i]);
    }
  }
}

}  // namespace

int main() {
  return main_of("drive_step", [](Rng& rng) {
    for (int i = 0; i < 40; ++i) build_case(rng);
    for (int n : {1, 2, 31, 32, 33, 63, 64, 65, 84, 96, 127, 128}) pack_case(rng, n);
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (int vocab : {1, 2, 7, 255, 1000, 4095, 8191, 8192, 8193, 12700}) {
        argmax_case(rng, dtype, vocab);
      }
    }
  });
}

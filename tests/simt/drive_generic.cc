// The generic attention kernel: against a softmax in double, and against itself. A node of a tree
// has the bits of its path laid out as a committed prefix, in other pages, decoded with one row.
#include "attention/generic.cu"
#include "simt/drive.h"

namespace {

using namespace drive;

// The numbers of a request: K and V of each token of one layer and head, by position of the step's
// slots (committed tokens, then rows).
void fill_pool(Rng& rng, const Scene& s, int layer) {
  for (int b = 0; b < s.step.num_requests; ++b) {
    const int tokens = s.requests[b].kv_len + s.requests[b].rows();
    for (int g = 0; g < s.cache.num_kv_heads; ++g) {
      for (int t = 0; t < tokens; ++t) {
        for (int d = 0; d < s.cache.head_dim; ++d) {
          const std::int64_t at = s.at(b, layer, g, t) + d;
          write(s.cache.dtype, rng.uniform() * 2, s.k, at);
          write(s.cache.dtype, rng.uniform() * 2, s.v, at);
        }
      }
    }
  }
}

// Token slots that a row sees, in position order.
std::vector<int> visible_slots(const SpecAttentionParams& p, int b, int row) {
  const int first = p.step.cu_rows[b], kv_len = p.step.kv_len[b];
  std::vector<int> slots;
  for (int t = 0; t < kv_len; ++t) slots.push_back(t);
  for (int i = 0; i <= row - first; ++i) {
    const bool sees =
        p.step.is_tree[b] == 0 || (p.step.mask[row * kMaskWords + i / 32] >> i % 32 & 1) != 0;
    if (sees) slots.push_back(kv_len + i);
  }
  const int n = static_cast<int>(slots.size());
  if (p.sliding_window > 0 && n > p.sliding_window) {
    slots.erase(slots.begin(), slots.begin() + (n - p.sliding_window));
  }
  return slots;
}

void expect_row(const SpecAttentionParams& p, const Scene& s, int b, int row) {
  const int group = p.num_heads / s.cache.num_kv_heads, head_dim = s.cache.head_dim;
  const std::vector<int> slots = visible_slots(p, b, row);
  for (int h = 0; h < p.num_heads; ++h) {
    const int g = h / group;
    const double k_scale = p.k_scale != nullptr ? p.k_scale[g * p.scale_stride] : 1.0;
    const double v_scale = p.v_scale != nullptr ? p.v_scale[g * p.scale_stride] : 1.0;
    std::vector<double> scores;
    double most = p.sinks != nullptr ? p.sinks[h] : -INFINITY;
    for (int slot : slots) {
      double score = 0;
      for (int d = 0; d < head_dim; ++d) {
        score += static_cast<double>(read(p.dtype, p.q, row * p.q_row_stride + h * head_dim + d)) *
                 read(s.cache.dtype, s.k, s.at(b, p.layer, g, slot) + d) * k_scale;
      }
      score *= static_cast<double>(p.scale);
      if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
      scores.push_back(score);
      most = std::fmax(most, score);
    }
    double sum = p.sinks != nullptr ? std::exp(p.sinks[h] - most) : 0.0;
    for (double score : scores) sum += std::exp(score - most);
    for (int d = 0; d < head_dim; ++d) {
      double want = 0, size = 0;
      for (std::size_t i = 0; i < slots.size(); ++i) {
        const double value = read(s.cache.dtype, s.v, s.at(b, p.layer, g, slots[i]) + d) * v_scale;
        want += std::exp(scores[i] - most) / sum * value;
        size += std::exp(scores[i] - most) / sum * std::fabs(value);
      }
      const float got = read(p.dtype, p.out, row * p.out_row_stride + h * head_dim + d);
      expect(std::fabs(got - want) <= 1.01 * rounding(p.dtype, want) + 4e-6 * size,
             "generic: request %d row %d head %d dim %d: %.9g, not %.9g", b, row, h, d, got, want);
    }
  }
}

struct Case {
  DType dtype, stored;
  int group, layer;
  float scale, softcap;
  int window;
  bool sinks;
};

SpecAttentionParams make_call(Arena& arena, Rng& rng, const Scene& s, const Case& c) {
  SpecAttentionParams p;
  const int kv_heads = s.cache.num_kv_heads;
  p.step = s.step, p.cache = s.cache;
  p.layer = c.layer, p.dtype = c.dtype;
  p.num_heads = c.group * kv_heads;
  p.scale = c.scale, p.softcap = c.softcap, p.sliding_window = c.window;
  const int row = p.num_heads * s.cache.head_dim;
  p.q_row_stride = row + rng.of({0, 8, 3}), p.out_row_stride = row + rng.of({0, 8, 1});
  p.q = random_rows(arena, rng, "q", c.dtype, s.rows(), row, p.q_row_stride, 3.0f);
  p.out = arena.bytes("out", s.rows() * p.out_row_stride * dtype_bytes(c.dtype), true);
  std::vector<float> sinks, scales;
  for (int h = 0; h < p.num_heads; ++h) sinks.push_back(rng.uniform() * 3);
  if (c.sinks) p.sinks = arena.copy("sinks", sinks);
  if (c.stored == DType::kF8E4M3) {
    p.scale_stride = rng.below(2);
    for (int g = 0; g < kv_heads; ++g) scales.push_back(0.4f + 0.3f * static_cast<float>(g));
    p.k_scale = arena.copy("k_scale", scales), p.v_scale = arena.copy("v_scale", scales);
  }
  p.exec.status = s.status;
  return p;
}

Case random_case(Rng& rng, DType dtype, DType stored) {
  Case c;
  c.dtype = dtype, c.stored = stored;
  c.group = rng.of({1, 2, 3, 8, 9});
  c.layer = 0;
  c.scale = 0.2f;
  c.softcap = rng.chance(30) ? 2.0f : 0.0f;
  c.window = rng.chance(30) ? rng.of({1, 5, 32, 70}) : 0;
  c.sinks = rng.chance(30);
  return c;
}

SceneOptions random_options(Rng& rng, DType stored) {
  SceneOptions o;
  o.dtype = stored;
  o.layers = rng.in(1, 2), o.heads = rng.in(1, 2);
  o.page_size = rng.of({1, 4, 16, 128});
  o.head_dim = rng.of({8, 64, 80, 128, 136, 256});
  o.layout = rng.below(3);
  return o;
}

// `most_keys` above 1024: more chunks than a block has warps.
void attention_case(Rng& rng, DType dtype, DType stored, int most_keys) {
  Arena arena;
  SceneOptions o = random_options(rng, stored);
  o.padding_rows = rng.of({0, 2});
  Case c = random_case(rng, dtype, stored);
  c.layer = rng.below(o.layers);
  std::vector<Request> requests = random_requests(rng, rng.in(1, 4), 9, most_keys);
  if (most_keys > 1000) {
    o.head_dim = rng.of({8, 24}), o.heads = 1;
    requests = {{most_keys - rng.below(200), random_parents(rng, 3)}};
  }
  Scene s = make_scene(arena, rng, std::move(requests), o);
  fill_pool(rng, s, c.layer);
  // Trees of any mask: a row sees itself and any rows before it.
  if (rng.chance(30)) {
    auto* mask = const_cast<std::uint32_t*>(s.step.mask);
    for (int b = 0; b < s.step.num_requests; ++b) {
      for (int i = 0; i < s.requests[b].rows(); ++i) {
        mask[(s.cu_rows[b] + i) * kMaskWords] =
            (static_cast<std::uint32_t>(rng.next()) & ((1u << i) - 1)) | 1u << i;
      }
    }
  }
  const SpecAttentionParams p = make_call(arena, rng, s, c);
  const int num = s.step.num_requests, broken = rng.chance(40) ? rng.below(num) : -1;
  std::uint32_t flag = 0;
  if (broken >= 0 && s.requests[broken].rows() > 0) {
    const Request& r = s.requests[broken];
    switch (rng.below(4)) {
      case 0:
        flag = kStatusBadPage;
        for (std::size_t i = 0; i < s.pages[broken].size(); ++i) {
          s.page_table[broken * s.step.page_table_stride + i] = s.cache.num_pages;
        }
        break;
      case 1:
        flag = kStatusBadLength;
        s.kv_len[broken] = rng.of({-1, 0x7fffffff});
        break;
      case 2:
        if (r.chain()) break;
        flag = kStatusBadTree;
        for (int i = 0; i < r.rows(); ++i) {
          const_cast<std::uint32_t*>(s.step.mask)[(s.cu_rows[broken] + i) * kMaskWords + 3] |=
              1u << 31;
        }
        break;
      default:
        flag = kStatusNaN;
        for (int g = 0; g < o.heads; ++g) {
          for (int i = 0; i < r.rows(); ++i) {
            write(stored, NAN, s.k, s.at(broken, c.layer, g, r.kv_len + i));
          }
        }
    }
  }
  cuda::generic_attention(p);
  const int width = p.num_heads * o.head_dim;
  for (int b = 0; b < num; ++b) {
    const bool bad = flag != 0 && b == broken;
    expect(s.status[b] == (bad ? flag : 0), "generic: status[%d] = %u", b, s.status[b]);
    for (int row = s.cu_rows[b]; row < s.cu_rows[b + 1]; ++row) {
      if (!bad) {
        expect_row(p, s, b, row);
        continue;
      }
      for (int e = 0; e < width; ++e) {
        expect(read(dtype, p.out, row * p.out_row_stride + e) == 0,
               "generic: row %d of a bad request", row);
      }
    }
  }
  const char* out = static_cast<const char*>(p.out);
  const std::size_t size = dtype_bytes(dtype);
  for (int row = 0; row < s.rows(); ++row) {
    if (row >= s.cu_rows[num]) {
      for (int e = 0; e < width; ++e) {
        expect(read(dtype, p.out, row * p.out_row_stride + e) == 0, "generic: padding row %d", row);
      }
    }
    for (std::size_t i = width * size; i < p.out_row_stride * size; ++i) {
      expect(out[row * p.out_row_stride * size + i] == '\xff', "generic: wrote behind row %d", row);
    }
  }
}

// Every node of a tree, again as the one row of a request whose prefix is the node's path.
void exact_case(Rng& rng, DType dtype, DType stored) {
  Arena arena;
  const SceneOptions o = random_options(rng, stored);
  const Case c = random_case(rng, dtype, stored);
  // Paths that cross no boundary of groups and chunks, one, or many.
  const int kv_len = rng.of({rng.in(20, 100), rng.in(110, 128), rng.in(240, 256)});
  std::vector<Request> trees{{kv_len, random_parents(rng, rng.in(6, 20))}};
  Scene s = make_scene(arena, rng, trees, o);
  fill_pool(rng, s, 0);
  const SpecAttentionParams p = make_call(arena, rng, s, c);
  cuda::generic_attention(p);

  std::vector<Request> alone;
  for (int i = 0; i < trees[0].rows(); ++i) {
    const int depth = static_cast<int>(path_to(trees[0].parents, i).size());
    alone.push_back({trees[0].kv_len + depth, {-1}});
  }
  SceneOptions other = o;
  other.page_size = o.page_size == 16 ? 4 : 16;
  Scene t = make_scene(arena, rng, alone, other);
  SpecAttentionParams one = make_call(arena, rng, t, c);
  one.scale_stride = p.scale_stride, one.sinks = p.sinks;
  one.q = p.q, one.q_row_stride = p.q_row_stride;
  const std::int64_t width = o.head_dim;
  for (int i = 0; i < trees[0].rows(); ++i) {
    std::vector<int> slots;
    for (int token = 0; token <= trees[0].kv_len; ++token) slots.push_back(token);
    for (int node : path_to(trees[0].parents, i)) slots.push_back(trees[0].kv_len + node);
    for (std::size_t token = 0; token < slots.size(); ++token) {
      for (int g = 0; g < o.heads; ++g) {
        for (int d = 0; d < width; ++d) {
          const std::int64_t from = s.at(0, 0, g, slots[token]) + d;
          const std::int64_t to = t.at(i, 0, g, static_cast<int>(token)) + d;
          write(stored, read(stored, s.k, from), t.k, to);
          write(stored, read(stored, s.v, from), t.v, to);
        }
      }
    }
  }
  cuda::generic_attention(one);
  for (int i = 0; i < s.rows(); ++i) {
    for (int e = 0; e < p.num_heads * width; ++e) {
      const float a = read(dtype, p.out, i * p.out_row_stride + e);
      const float b = read(dtype, one.out, i * one.out_row_stride + e);
      expect(std::memcmp(&a, &b, 4) == 0, "generic: node %d differs from its path: %.9g, %.9g", i,
             a, b);
    }
  }
}

}  // namespace

int main() {
  return main_of("drive_generic", [](Rng& rng) {
    const DType types[] = {DType::kF32, DType::kF16, DType::kBF16};
    for (DType stored : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3}) {
      for (DType dtype : types) {
        attention_case(rng, dtype, stored, 40);
        attention_case(rng, dtype, stored, 200);
        exact_case(rng, dtype, stored);
      }
      attention_case(rng, types[rng.below(3)], stored, 1300);
    }
  });
}

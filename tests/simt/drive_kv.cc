// The kernels that write the paged K/V, against plain loops: append, norm + rope + append, compact.
// Whole pools are compared, so a write to a wrong place is seen wherever it lands.
#include "kv/append.cu"
#include "kv/compact.cu"
#include "kv/rope_append.cu"
#include "simt/drive.h"

namespace {

using namespace drive;

bool same_number(float a, float b) {
  return std::isnan(a) ? std::isnan(b) : std::memcmp(&a, &b, 4) == 0;
}

// Every element of a pool that no row owns keeps its bits; `owned` marks the others.
void expect_untouched(const char* what, const Scene& s, const char* pool,
                      const std::vector<bool>& owned) {
  const std::size_t size = dtype_bytes(s.cache.dtype);
  for (std::size_t i = 0; i < owned.size(); ++i) {
    if (owned[i]) continue;
    for (std::size_t j = 0; j < size; ++j) {
      if (pool[i * size + j] == '\xff') continue;
      return expect(false, "%s: element %zu of the pool was written", what, i);
    }
  }
  expect(true, "%s", what);
}

std::vector<bool> nothing_owned(const Scene& s) {
  return std::vector<bool>(s.pool_bytes / dtype_bytes(s.cache.dtype), false);
}

SceneOptions random_options(Rng& rng, DType dtype) {
  SceneOptions o;
  o.dtype = dtype;
  o.layers = rng.in(1, 3);
  o.heads = rng.of({1, 2, 3, 8});
  o.page_size = rng.of({1, 2, 16, 64});
  o.head_dim = rng.of({8, 24, 64, 80, 128, 256});
  o.layout = rng.below(3);
  o.padding_rows = rng.chance(30) ? 5 : 0;
  return o;
}

void append_case(Rng& rng, DType in, DType stored, bool break_it) {
  Arena arena;
  const SceneOptions o = random_options(rng, stored);
  Scene s = make_scene(arena, rng, random_requests(rng, rng.in(1, 40), 9, 50), o);
  const int row = o.heads * o.head_dim, rows = s.rows();
  AppendKvParams p;
  p.step = s.step, p.cache = s.cache, p.dtype = in;
  p.layer = rng.below(o.layers);
  p.k_row_stride = row + rng.of({0, 8, 64, 3}), p.v_row_stride = row + rng.of({0, 8, 5});
  const float range = rng.of({1.0f, 0.01f, 2000.0f});
  char* k = random_rows(arena, rng, "k", in, rows, row, p.k_row_stride, range, false);
  p.v = random_rows(arena, rng, "v", in, rows, row, p.v_row_stride, range);
  if (rows > 0) {
    const float specials[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 448.0f, 465.0f, 0x1p-10f};
    for (int i = 0; i < 8; ++i) write(in, specials[i], k, rng.below(row));
  }
  p.k = k;
  std::vector<float> k_scale, v_scale;
  if (stored == DType::kF8E4M3 && rng.chance(70)) {
    p.scale_stride = rng.below(2);
    for (int g = 0; g < o.heads; ++g) {
      k_scale.push_back(0.01f + std::fabs(rng.uniform())), v_scale.push_back(0.5f);
    }
    p.k_scale = arena.copy("k_scale", k_scale), p.v_scale = arena.copy("v_scale", v_scale);
  }
  p.exec.status = s.status;

  // One request is broken in one of three ways; it is flagged and the others are served.
  const int broken = break_it ? rng.below(s.step.num_requests) : -1;
  std::uint32_t flag = 0;
  if (break_it && s.requests[broken].rows() > 0) {
    const int way = rng.below(3);
    flag = way == 0 ? kStatusBadPage : kStatusBadLength;
    if (way == 0) {
      for (int i = 0; i < static_cast<int>(s.pages[broken].size()); ++i) {
        s.page_table[broken * s.step.page_table_stride + i] =
            rng.of({-1, s.cache.num_pages, 0x7fffffff, INT32_MIN});
      }
    }
    if (way == 1) s.kv_len[broken] = rng.of({-1, INT32_MIN});
    if (way == 2) s.kv_len[broken] = rng.of({0x7fffffff, o.page_size * s.step.page_table_stride});
  }
  cuda::append_kv(p);

  std::vector<bool> owned = nothing_owned(s);
  for (int b = 0; b < s.step.num_requests; ++b) {
    const bool bad = flag != 0 && b == broken;
    expect(s.status[b] == (bad ? flag : 0), "append: status[%d] = %u", b, s.status[b]);
    for (int i = 0; i < s.requests[b].rows() && !bad; ++i) {
      for (int g = 0; g < o.heads; ++g) {
        for (int d = 0; d < o.head_dim; ++d) {
          const std::int64_t to = s.at(b, p.layer, g, s.requests[b].kv_len + i) + d;
          owned[to] = true;
          const int from = s.cu_rows[b] + i, e = g * o.head_dim + d;
          float want_k = read(in, p.k, from * p.k_row_stride + e);
          float want_v = read(in, p.v, from * p.v_row_stride + e);
          if (p.k_scale != nullptr) {
            want_k /= p.k_scale[g * p.scale_stride], want_v /= p.v_scale[g * p.scale_stride];
          }
          char rounded[4];
          write(stored, want_k, rounded, 0);
          want_k = read(stored, rounded, 0);
          write(stored, want_v, rounded, 0);
          want_v = read(stored, rounded, 0);
          const float got_k = read(stored, s.k, to), got_v = read(stored, s.v, to);
          expect(same_number(got_k, want_k) && same_number(got_v, want_v),
                 "append %s -> %s: request %d row %d head %d dim %d: %g, %g instead of %g, %g",
                 dtype_name(in), dtype_name(stored), b, i, g, d, got_k, got_v, want_k, want_v);
        }
      }
    }
  }
  expect_untouched("append k", s, s.k, owned);
  expect_untouched("append v", s, s.v, owned);
}

// What rope_append_kv returns for one head, in double.
void reference_head(const RopeAppendKvParams& p, const void* weight, int position,
                    std::vector<double>& x) {
  const int n = p.cache.head_dim, half = p.rotary_dim / 2;
  if (weight != nullptr) {
    double squares = 0;
    for (double a : x) squares += a * a;
    for (int d = 0; d < n; ++d) {
      const double w = read(p.norm_dtype, weight, d) + (p.norm_plus_one ? 1.0 : 0.0);
      x[d] = x[d] / std::sqrt(squares / n + static_cast<double>(p.norm_eps)) * w;
    }
  }
  for (int i = 0; i < half; ++i) {
    const int first = p.interleaved ? 2 * i : i, second = p.interleaved ? 2 * i + 1 : i + half;
    const double c = p.cos[position * p.rope_row_stride + i];
    const double s = p.sin[position * p.rope_row_stride + i];
    const double a = x[first], b = x[second];
    x[first] = a * c - b * s, x[second] = b * c + a * s;
  }
}

void rope_case(Rng& rng, DType in, DType stored) {
  Arena arena;
  SceneOptions o = random_options(rng, stored);
  Scene s = make_scene(arena, rng, random_requests(rng, rng.in(1, 5), 5, 20), o);
  const int kv_heads = o.heads, heads = rng.chance(10) ? 0 : kv_heads * rng.of({1, 2, 3, 7});
  const int rows = s.rows(), width = (heads + 2 * kv_heads) * o.head_dim;
  RopeAppendKvParams p;
  p.step = s.step, p.cache = s.cache, p.dtype = in;
  p.layer = rng.below(o.layers);
  p.num_heads = heads;
  // One fused projection; sometimes its rows are not aligned to vectors.
  const std::int64_t stride = width + rng.of({0, 0, 8, 1});
  char* fused = random_rows(arena, rng, "qkv", in, rows, width, stride, 2.0f, true);
  const auto size = static_cast<std::int64_t>(dtype_bytes(in));
  p.q = fused, p.k = fused + heads * o.head_dim * size;
  p.v = fused + (heads + kv_heads) * o.head_dim * size;
  p.q_row_stride = p.k_row_stride = p.v_row_stride = stride;
  const std::vector<char> before(fused, fused + std::max(rows, 1) * stride * size);
  const bool in_place = rng.chance(50);
  p.q_out_row_stride = in_place ? stride : heads * o.head_dim + rng.of({0, 8, 2});
  char* q_out = fused;
  if (!in_place) {
    q_out = arena.bytes("q_out", (std::max(rows, 1) * p.q_out_row_stride + 1) * size, true);
  }
  p.q_out = q_out;

  p.max_positions = 128;  // above 50, the longest request
  p.rotary_dim = rng.of({0, o.head_dim, o.head_dim, o.head_dim / 2, 2, 6});
  p.interleaved = rng.chance(40);
  const int half = p.rotary_dim / 2;
  const bool joint = rng.chance(50);  // [cos | sin] rows
  std::vector<float> cos, sin;
  p.rope_row_stride = joint ? 2 * half : half + rng.below(2);
  const auto entries =
      static_cast<std::size_t>(p.max_positions * std::max<std::int64_t>(p.rope_row_stride, 1));
  cos.assign(entries, NAN), sin.assign(entries, NAN);
  for (int t = 0; t < p.max_positions; ++t) {
    for (int i = 0; i < half; ++i) {
      const double angle = t * std::pow(100.0, -static_cast<double>(i) / std::max(half, 1));
      const std::int64_t at = t * p.rope_row_stride + i;
      cos[at] = static_cast<float>(1.1 * std::cos(angle));
      (joint ? cos[at + half] : sin[at]) = static_cast<float>(1.1 * std::sin(angle));
    }
  }
  p.cos = arena.copy("cos", cos);
  p.sin = joint ? p.cos + half : arena.copy("sin", sin);
  p.norm_dtype = rng.of({DType::kF32, DType::kBF16, DType::kF16});
  p.norm_plus_one = rng.chance(30);
  p.norm_eps = 1e-5f;
  if (rng.chance(50)) {
    p.q_norm = random_rows(arena, rng, "q_norm", p.norm_dtype, 1, o.head_dim, o.head_dim, 1.5f);
  }
  if (rng.chance(50)) {
    p.k_norm = random_rows(arena, rng, "k_norm", p.norm_dtype, 1, o.head_dim, o.head_dim, 1.5f);
  }
  std::vector<float> scales(static_cast<std::size_t>(kv_heads), 1.0f);
  if (stored == DType::kF8E4M3) {
    p.scale_stride = rng.below(2);
    for (float& scale : scales)
      scale = p.scale_stride == 1 ? 0.02f + std::fabs(rng.uniform()) : 0.25f;
    p.k_scale = arena.copy("k_scale", scales), p.v_scale = arena.copy("v_scale", scales);
  }
  p.exec.status = s.status;
  // One row's position is outside the tables.
  const int total = s.cu_rows[s.step.num_requests];
  const int outside = total > 0 && p.rotary_dim > 0 && rng.chance(30) ? rng.below(total) : -1;
  if (outside >= 0) {
    const_cast<std::int32_t*>(p.step.positions)[outside] =
        rng.of({-1, p.max_positions, 0x7fffffff});
  }
  cuda::rope_append_kv(p);

  std::vector<bool> owned = nothing_owned(s);
  std::vector<double> x(static_cast<std::size_t>(o.head_dim));
  for (int b = 0; b < s.step.num_requests; ++b) {
    const bool flagged = outside >= s.cu_rows[b] && outside < s.cu_rows[b + 1];
    expect(s.status[b] == (flagged ? kStatusBadLength : 0u), "rope: status[%d] = %u", b,
           s.status[b]);
    for (int row = s.cu_rows[b]; row < s.cu_rows[b + 1]; ++row) {
      const int token = s.requests[b].kv_len + row - s.cu_rows[b];
      for (int h = 0; h < heads + 2 * kv_heads; ++h) {
        const bool is_q = h < heads, is_k = !is_q && h < heads + kv_heads;
        const int g = is_q ? h : (h - heads) % kv_heads;
        for (int d = 0; d < o.head_dim; ++d) {
          x[d] = read(in, before.data(), row * stride + h * o.head_dim + d);
        }
        if (is_q || is_k) {
          if (row != outside)
            reference_head(p, is_q ? p.q_norm : p.k_norm, p.step.positions[row], x);
        }
        double size_of_head = 0;
        for (double a : x) size_of_head = std::fmax(size_of_head, std::fabs(a));
        for (int d = 0; d < o.head_dim; ++d) {
          if (is_q) {
            const float got = read(in, q_out, row * p.q_out_row_stride + h * o.head_dim + d);
            const double want = row == outside ? 0.0 : x[d];
            const double bound = 1.01 * rounding(in, want) + 1e-6 * size_of_head;
            expect(std::fabs(got - want) <= bound, "rope q: row %d head %d dim %d: %g, not %g", row,
                   h, d, got, want);
            continue;
          }
          if (row == outside) continue;
          const std::int64_t to = s.at(b, p.layer, g, token) + d;
          owned[to] = true;
          const double scale = stored == DType::kF8E4M3 ? scales[p.scale_stride == 1 ? g : 0] : 1.0;
          const float got = read(stored, is_k ? s.k : s.v, to);
          const double want = std::fmin(std::fmax(x[d] / scale, -448.0), 448.0);
          const double whole = stored == DType::kF8E4M3 ? want : x[d];
          const double bound = 1.01 * rounding(stored, whole) + 1e-6 * size_of_head / scale;
          expect(std::fabs(got - whole) <= bound, "rope %s: row %d head %d dim %d: %g, not %g",
                 is_k ? "k" : "v", row, g, d, got, whole);
        }
      }
    }
  }
  expect_untouched("rope k", s, s.k, owned);
  expect_untouched("rope v", s, s.v, owned);
  if (in_place) return;
  expect(std::memcmp(before.data(), fused, before.size()) == 0, "rope wrote to its inputs");
}

void compact_case(Rng& rng, DType dtype, bool break_it) {
  Arena arena;
  SceneOptions o = random_options(rng, dtype);
  o.padding_rows = 0;
  Scene s = make_scene(arena, rng, random_requests(rng, rng.in(1, 4), rng.of({9, 128}), 40), o);
  for (std::size_t i = 0; i < s.pool_bytes; ++i) {
    s.k[i] = static_cast<char>(rng.next()), s.v[i] = static_cast<char>(rng.next());
  }
  const int num = s.step.num_requests;
  std::vector<std::int32_t> path(static_cast<std::size_t>(num) * kMaxStepTokens, 0x7ffffff0);
  std::vector<std::int32_t> path_len(static_cast<std::size_t>(num), 0);
  for (int b = 0; b < num; ++b) {
    const Request& r = s.requests[b];
    if (r.rows() < 2 || rng.chance(15)) continue;
    std::vector<std::int32_t> nodes = path_to(r.parents, rng.below(r.rows()));
    if (rng.chance(25)) {  // as long as can be: all but a few nodes
      nodes.clear();
      for (int i = 1; i < r.rows(); ++i) {
        if (i < 4 || !rng.chance(5)) nodes.push_back(i);
      }
    }
    std::copy(nodes.begin(), nodes.end(), path.begin() + b * kMaxStepTokens);
    path_len[b] = static_cast<int>(nodes.size());
  }
  const int broken = break_it ? rng.below(num) : -1;
  std::uint32_t flag = 0;
  if (break_it && path_len[broken] > 0) {
    const int n = path_len[broken];
    std::int32_t* nodes = path.data() + broken * kMaxStepTokens;
    flag = kStatusBadTree;
    switch (rng.below(4)) {
      case 0:
        nodes[rng.below(n)] = rng.of({-1, 0, 0x7fffffff, s.requests[broken].rows()});
        break;
      case 1:
        path_len[broken] = rng.of({-1, 0x7fffffff, s.requests[broken].rows()});
        break;
      case 2:
        flag = kStatusBadLength;
        s.kv_len[broken] = rng.of({-1, 0x7fffffff});
        break;
      default:
        if (nodes[n - 1] == n) {  // a chain reads no page
          flag = 0;
          break;
        }
        flag = kStatusBadPage;
        s.page_table[broken * s.step.page_table_stride +
                     (s.requests[broken].kv_len + nodes[n - 1]) / o.page_size] = s.cache.num_pages;
    }
  }
  std::vector<char> want_k(s.k, s.k + s.pool_bytes), want_v(s.v, s.v + s.pool_bytes);
  const std::size_t size = dtype_bytes(dtype), head_bytes = o.head_dim * size;
  for (int b = 0; b < num; ++b) {
    if (b == broken && flag != 0) continue;
    for (int layer = 0; layer < o.layers; ++layer) {
      for (int g = 0; g < o.heads; ++g) {
        for (int i = 0; i < path_len[b]; ++i) {  // all are read before one is written
          const int from = s.requests[b].kv_len + path[b * kMaxStepTokens + i];
          const std::int64_t at = s.at(b, layer, g, from) * static_cast<std::int64_t>(size);
          const std::int64_t to =
              s.at(b, layer, g, s.requests[b].kv_len + 1 + i) * static_cast<std::int64_t>(size);
          std::memcpy(want_k.data() + to, s.k + at, head_bytes);
          std::memcpy(want_v.data() + to, s.v + at, head_bytes);
        }
      }
    }
  }
  CompactKvParams p;
  p.step = s.step, p.cache = s.cache;
  p.path = arena.copy("path", path), p.path_len = arena.copy("path_len", path_len);
  p.exec.status = s.status;
  cuda::compact_kv(p);
  expect(std::memcmp(want_k.data(), s.k, s.pool_bytes) == 0, "compact: k differs");
  expect(std::memcmp(want_v.data(), s.v, s.pool_bytes) == 0, "compact: v differs");
  for (int b = 0; b < num; ++b) {
    expect(s.status[b] == (b == broken ? flag : 0u), "compact: status[%d] = %u, not %u", b,
           s.status[b], flag);
  }
}

}  // namespace

int main() {
  return main_of("drive_kv", [](Rng& rng) {
    const DType inputs[] = {DType::kF32, DType::kF16, DType::kBF16};
    const DType stored[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3};
    for (DType to : stored) {
      for (DType in : inputs) {
        append_case(rng, in, to, false);
        append_case(rng, in, to, true);
        for (int i = 0; i < 2; ++i) rope_case(rng, in, to);
      }
      for (int i = 0; i < 4; ++i) compact_case(rng, to, i % 2 != 0);
    }
  });
}

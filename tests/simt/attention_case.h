// Problems for the attention kernels and what they should give, for C++ programs under the
// emulator. The expected result is a plain loop in double precision over a row's keys; it shares no
// code with the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "attention/spec_attention.h"
#include "simt/simt.h"

namespace attention_case {

using namespace specdec;

inline float to_float(__half x) { return __half2float(x); }
inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float to_float(__nv_fp8_e4m3 x) { return float(x); }
template <class T>
DType dtype_of() {
  if (std::is_same_v<T, __half>) return DType::kF16;
  return std::is_same_v<T, __nv_bfloat16> ? DType::kBF16 : DType::kF8E4M3;
}

struct Shape {
  int heads = 4, kv_heads = 2, head_dim = 64, page_size = 16;
  int window = 0, max_depth = 6;
  float softcap = 0;
  bool sinks = false, exact = true;
};

// One request: how many tokens are committed, and the step's rows as a tree.
struct RequestRows {
  int kv_len;
  std::vector<int> parents;
  bool tree;
};

inline int depth_of(const std::vector<int>& parents, int node) {
  return node == 0 ? 0 : 1 + depth_of(parents, parents[node]);
}
inline std::vector<int> path_of(const std::vector<int>& parents, int node) {  // root first
  std::vector<int> path;
  for (int i = node; i >= 0; i = parents[i]) path.insert(path.begin(), i);
  return path;
}
inline RequestRows chain(int kv_len, int rows, bool as_tree = false) {
  RequestRows r{kv_len, {}, as_tree};
  for (int i = 0; i < rows; ++i) r.parents.push_back(i - 1);
  return r;
}
inline RequestRows random_tree(int kv_len, int rows, int max_depth, std::mt19937& rng) {
  RequestRows r{kv_len, {-1}, true};
  for (int i = 1; i < rows; ++i) {
    int parent = i - 1 - int(rng() % std::min(i, 5));
    while (depth_of(r.parents, parent) >= max_depth) parent = r.parents[parent];
    r.parents.push_back(parent);
  }
  return r;
}

// The numbers of one request: per slot K and V of all KV heads, per row the queries.
template <class T, class Kv>
struct Content {
  std::vector<Kv> k, v;  // [slots][G][K]
  std::vector<T> q;      // [rows][H][K]
};

template <class T, class Kv>
Content<T, Kv> random_content(const Shape& s, const RequestRows& r, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  Content<T, Kv> c;
  const size_t slots = r.kv_len + r.parents.size();
  for (size_t i = 0; i < slots * s.kv_heads * s.head_dim; ++i) {
    c.k.push_back(Kv(normal(rng)));
    c.v.push_back(Kv(normal(rng)));
  }
  for (size_t i = 0; i < r.parents.size() * s.heads * s.head_dim; ++i) {
    c.q.push_back(T(2 * normal(rng)));
  }
  return c;
}

// A batch in memory as the kernels see it. Unused K/V and outputs are NaN, pages are shuffled, page
// ids past a request's length are wild, query rows are strided.
template <class T, class Kv>
struct Batch {
  Shape shape;
  std::vector<RequestRows> requests;
  std::vector<Content<T, Kv>> content;
  std::vector<int32_t> positions, parents, cu_rows{0}, kv_len, pages;
  std::vector<uint32_t> mask, status;
  std::vector<uint8_t> is_tree;
  std::vector<Kv> k, v;
  std::vector<T> q, out;
  std::vector<float> sinks, k_scale, v_scale;
  SpecAttentionParams call;
  int num_pages = 0;

  int rows() const { return cu_rows.back(); }
  size_t at(int page, int head, int in_page) const {
    return ((size_t(page) * shape.kv_heads + head) * shape.page_size + in_page) * shape.head_dim;
  }

  Batch(const Shape& s, std::vector<RequestRows> rs, std::vector<Content<T, Kv>> cs,
        std::mt19937& rng)
      : shape(s), requests(std::move(rs)), content(std::move(cs)) {
    const size_t count = requests.size();
    int stride = 2;
    for (const auto& r : requests) {
      const int used = (r.kv_len + int(r.parents.size()) + s.page_size - 1) / s.page_size;
      stride = std::max(stride, used + 2), num_pages += used + 1;
    }
    std::vector<int> order(num_pages);
    for (int i = 0; i < num_pages; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), rng);
    pages.assign(count * stride, 0x7fffffff);
    const size_t elements = size_t(num_pages) * s.kv_heads * s.page_size * s.head_dim;
    k.resize(elements), v.resize(elements);
    std::memset(static_cast<void*>(k.data()), sizeof(Kv) == 1 ? 0x7f : 0xff, elements * sizeof(Kv));
    std::memset(static_cast<void*>(v.data()), sizeof(Kv) == 1 ? 0x7f : 0xff, elements * sizeof(Kv));
    const int q_stride = s.heads * s.head_dim + 8;
    int next_page = 0;
    for (size_t b = 0; b < count; ++b) {
      const RequestRows& r = requests[b];
      const int n = int(r.parents.size()), slots = n == 0 ? 0 : r.kv_len + n;
      for (int i = 0; i * s.page_size < slots; ++i) pages[b * stride + i] = order[next_page++];
      for (int slot = 0; slot < slots; ++slot) {
        for (int g = 0; g < s.kv_heads; ++g) {
          const size_t to = at(pages[b * stride + slot / s.page_size], g, slot % s.page_size);
          const size_t from = (size_t(slot) * s.kv_heads + g) * s.head_dim;
          std::copy_n(&content[b].k[from], s.head_dim, &k[to]);
          std::copy_n(&content[b].v[from], s.head_dim, &v[to]);
        }
      }
      for (int i = 0; i < n; ++i) {
        parents.push_back(r.parents[i]);
        positions.push_back(r.kv_len + depth_of(r.parents, i));
        uint32_t words[kMaskWords] = {};
        if (r.tree) {
          for (int j : path_of(r.parents, i)) words[j / 32] |= 1u << (j % 32);
        }
        mask.insert(mask.end(), words, words + kMaskWords);
        const size_t from = size_t(i) * s.heads * s.head_dim;
        q.insert(q.end(), &content[b].q[from], &content[b].q[from] + s.heads * s.head_dim);
        q.insert(q.end(), 8, T(std::nanf("")));
      }
      cu_rows.push_back(cu_rows.back() + n);
      kv_len.push_back(r.kv_len);
      is_tree.push_back(r.tree);
    }
    out.resize(size_t(rows()) * s.heads * s.head_dim);
    std::memset(static_cast<void*>(out.data()), 0xff, out.size() * sizeof(T));
    status.assign(count, 0);
    for (int h = 0; h < s.heads; ++h) sinks.push_back(0.5f * h);
    for (int g = 0; g < s.kv_heads; ++g) {
      k_scale.push_back(0.5f + g), v_scale.push_back(1.5f - 0.25f * g);
    }

    StepView& step = call.step;
    step.num_requests = int(count), step.num_rows = rows();
    step.positions = positions.data(), step.parents = parents.data(), step.mask = mask.data();
    step.cu_rows = cu_rows.data(), step.kv_len = kv_len.data(), step.is_tree = is_tree.data();
    step.page_table = pages.data(), step.page_table_stride = stride;
    KvCacheView& cache = call.cache;
    cache.k = k.data(), cache.v = v.data(), cache.dtype = dtype_of<Kv>();
    cache.num_layers = 1, cache.num_pages = num_pages, cache.num_kv_heads = s.kv_heads;
    cache.page_size = s.page_size, cache.head_dim = s.head_dim;
    cache.stride_token = s.head_dim, cache.stride_head = s.page_size * s.head_dim;
    cache.stride_page = s.kv_heads * cache.stride_head;
    cache.stride_layer = num_pages * cache.stride_page;
    call.q = q.data(), call.out = out.data(), call.dtype = dtype_of<T>();
    call.q_row_stride = q_stride, call.out_row_stride = s.heads * s.head_dim;
    call.num_heads = s.heads, call.scale = 1.0f / std::sqrt(float(s.head_dim));
    call.sliding_window = s.window, call.softcap = s.softcap;
    call.sinks = s.sinks ? sinks.data() : nullptr;
    if (sizeof(Kv) == 1) {
      call.k_scale = k_scale.data(), call.v_scale = v_scale.data(), call.scale_stride = 1;
    }
    call.exact = s.exact, call.max_depth = s.max_depth;
    call.exec.status = status.data();
  }

  void expose() const {
    const auto one = [](const auto& x, const char* name, bool writable = false) {
      simt::expose(x.data(), x.size() * sizeof(x[0]), name, writable);
    };
    one(positions, "positions"), one(mask, "mask"), one(cu_rows, "cu_rows");
    one(kv_len, "kv_len"), one(is_tree, "is_tree"), one(pages, "page_table");
    one(k, "k"), one(v, "v"), one(q, "q"), one(out, "out", true), one(status, "status", true);
    one(sinks, "sinks"), one(k_scale, "k_scale"), one(v_scale, "v_scale");
  }

  // One head of one row, in double precision.
  std::vector<double> expected(int b, int row, int head) const {
    const RequestRows& r = requests[b];
    const Content<T, Kv>& c = content[b];
    const int g = head / (shape.heads / shape.kv_heads), dim = shape.head_dim;
    const std::vector<int> path = path_of(r.parents, row);
    const int position = r.kv_len + int(path.size()) - 1;
    std::vector<double> scores, result(dim, 0.0);
    std::vector<int> slots;
    for (int p = 0; p <= position; ++p) {
      if (shape.window > 0 && position - p >= shape.window) continue;
      slots.push_back(p < r.kv_len ? p : r.kv_len + path[p - r.kv_len]);
    }
    const double ks = call.k_scale ? k_scale[g] : 1, vs = call.v_scale ? v_scale[g] : 1;
    double top = shape.sinks ? double(sinks[head]) : -1e300, sum = 0;
    for (int slot : slots) {
      double dot = 0;
      for (int i = 0; i < dim; ++i) {
        dot += double(to_float(c.q[(size_t(row) * shape.heads + head) * dim + i])) *
               to_float(c.k[(size_t(slot) * shape.kv_heads + g) * dim + i]);
      }
      dot *= call.scale * ks;
      if (shape.softcap > 0) dot = shape.softcap * std::tanh(dot / shape.softcap);
      scores.push_back(dot);
      top = std::max(top, dot);
    }
    if (shape.sinks) sum += std::exp(sinks[head] - top);
    for (size_t i = 0; i < slots.size(); ++i) {
      const double p = std::exp(scores[i] - top);
      sum += p;
      for (int e = 0; e < dim; ++e) {
        result[e] += p * vs * to_float(c.v[(size_t(slots[i]) * shape.kv_heads + g) * dim + e]);
      }
    }
    for (double& x : result) x /= sum;
    return result;
  }

  // The greatest error of any element over what the type's rounding explains; inf for a NaN.
  double worst_error() const {
    const double ulp = std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8;
    double worst = 0;
    for (size_t b = 0; b < requests.size(); ++b) {
      for (int i = 0; i < int(requests[b].parents.size()); ++i) {
        for (int h = 0; h < shape.heads; ++h) {
          const std::vector<double> want = expected(int(b), i, h);
          const T* got = &out[(size_t(cu_rows[b] + i) * shape.heads + h) * shape.head_dim];
          for (int e = 0; e < shape.head_dim; ++e) {
            const double error = std::abs(to_float(got[e]) - want[e]);
            if (!(error >= 0)) return std::numeric_limits<double>::infinity();
            worst = std::max(worst, error / (ulp * (std::abs(want[e]) + 1)));
          }
        }
      }
    }
    return worst;
  }
};

// Node `node` of a request decoded alone: its path committed, one row.
template <class T, class Kv>
std::pair<RequestRows, Content<T, Kv>> alone(const Shape& s, const RequestRows& r,
                                             const Content<T, Kv>& c, int node) {
  const std::vector<int> path = path_of(r.parents, node);
  const size_t kv = size_t(s.kv_heads) * s.head_dim, q = size_t(s.heads) * s.head_dim;
  Content<T, Kv> out;
  out.k.assign(c.k.begin(), c.k.begin() + r.kv_len * kv);
  out.v.assign(c.v.begin(), c.v.begin() + r.kv_len * kv);
  for (int j : path) {
    const size_t from = (r.kv_len + j) * kv;
    out.k.insert(out.k.end(), c.k.begin() + from, c.k.begin() + from + kv);
    out.v.insert(out.v.end(), c.v.begin() + from, c.v.begin() + from + kv);
  }
  out.q.assign(c.q.begin() + node * q, c.q.begin() + (node + 1) * q);
  return {chain(r.kv_len + int(path.size()) - 1, 1), out};
}

}  // namespace attention_case

// What the kernel drivers share: seeded numbers, exposed arrays, hostile steps and pools.
//
// A driver runs kernels in the emulator against plain host loops. Everything that a kernel may
// touch is exposed, all else is out of bounds; pools and outputs start as NaN in every element
// type (all bits set); page ids behind a request's last page are huge.
#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "backend/cpu/e4m3.h"
#include "backend/cpu/half.h"
#include "backend/ops.h"
#include "gpu/gpu.cuh"

namespace drive {

using namespace specdec;

inline int failures = 0, checks = 0;

__attribute__((format(printf, 2, 3))) inline void expect(bool good, const char* format, ...) {
  ++checks;
  if (good) return;
  if (++failures > 20) return;  // enough to see what is wrong
  std::va_list args;
  va_start(args, format);
  std::printf("FAIL ");
  std::vprintf(format, args);
  std::printf("\n");
  va_end(args);
}

struct Rng {  // splitmix64
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  int below(int n) { return static_cast<int>(next() % static_cast<std::uint64_t>(n)); }
  int in(int low, int high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-23f - 1.0f; }  // [-1, 1)
  template <class T>
  T of(std::initializer_list<T> list) {
    return list.begin()[below(static_cast<int>(list.size()))];
  }
};

inline float read(DType dtype, const void* base, std::int64_t at) {
  const char* p =
      static_cast<const char*>(base) + at * static_cast<std::int64_t>(dtype_bytes(dtype));
  std::uint16_t half;
  float value;
  switch (dtype) {
    case DType::kF8E4M3:
      return e4m3_to_float(static_cast<std::uint8_t>(*p));
    case DType::kF32:
      std::memcpy(&value, p, 4);
      return value;
    default:
      std::memcpy(&half, p, 2);
      return dtype == DType::kBF16 ? bf16_to_float(half) : f16_to_float(half);
  }
}

// Nearest even; what is larger than 448, infinity included, becomes 448; a NaN stays a NaN.
inline std::uint8_t float_to_e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint8_t>(sign | 0x7fu);
  if (magnitude >= std::bit_cast<std::uint32_t>(448.0f)) {
    return static_cast<std::uint8_t>(sign | 0x7eu);
  }
  if (magnitude < std::bit_cast<std::uint32_t>(0x1p-6f)) {
    // Subnormal: adding 2^14 leaves the multiple of 2^-9, rounded, in the mantissa.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<std::uint8_t>(
        sign | (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0x1p14f)));
  }
  const std::uint32_t rounded = magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<std::uint8_t>(sign | (rounded >> 20));
}

inline void write(DType dtype, float value, void* base, std::int64_t at) {
  char* p = static_cast<char*>(base) + at * static_cast<std::int64_t>(dtype_bytes(dtype));
  std::uint16_t half;
  switch (dtype) {
    case DType::kF8E4M3:
      *p = static_cast<char>(float_to_e4m3(value));
      return;
    case DType::kF32:
      std::memcpy(p, &value, 4);
      return;
    default:
      half = dtype == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
      std::memcpy(p, &half, 2);
  }
}

// Half the distance between neighbouring numbers of the type around `value`.
inline double rounding(DType dtype, double value) {
  const double size = std::fabs(value);
  switch (dtype) {
    case DType::kF8E4M3:
      return std::fmax(size * 0x1p-4, 0x1p-10);
    case DType::kBF16:
      return size * 0x1p-8;
    case DType::kF16:
      return std::fmax(size * 0x1p-11, 0x1p-25);
    default:
      return size * 0x1p-24;
  }
}

// Arrays that live for one case and that kernels may touch.
class Arena {
 public:
  Arena() { simt::conceal(); }
  ~Arena() { simt::conceal(); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // `offset` bytes behind a 16-byte boundary, all bits set.
  char* bytes(const char* name, std::size_t size, bool writable, std::size_t offset = 0) {
    blocks_.emplace_back(size + offset + 16, '\xff');
    std::vector<char>& block = blocks_.back();
    const std::size_t skew = reinterpret_cast<std::uintptr_t>(block.data()) % 16;
    char* data = block.data() + (16 - skew) % 16 + offset;
    simt::expose(data, size == 0 ? 1 : size, name, writable);
    return data;
  }
  template <class T>
  T* array(const char* name, std::size_t n, bool writable) {
    return reinterpret_cast<T*>(bytes(name, n * sizeof(T), writable));
  }
  template <class T>
  T* copy(const char* name, const std::vector<T>& from) {
    T* data = array<T>(name, from.size(), false);
    if (!from.empty()) std::memcpy(data, from.data(), from.size() * sizeof(T));
    return data;
  }

 private:
  std::deque<std::vector<char>> blocks_;
};

// Parents of a random tree of n nodes.
inline std::vector<std::int32_t> random_parents(Rng& rng, int n, int max_depth = kMaxDraftLen) {
  const int shape = rng.below(4);
  std::vector<std::int32_t> parents(static_cast<std::size_t>(n), -1), depth(parents.size(), 0);
  for (int i = 1; i < n; ++i) {
    int parent = 0;
    if (shape == 0) parent = rng.below(i);
    if (shape == 1) parent = std::max(0, i - 1 - rng.below(3));  // deep
    if (shape == 2) parent = (i - 1) / 2;
    if (shape == 3) parent = rng.chance(80) ? 0 : rng.below(i);  // wide
    while (depth[parent] >= max_depth) parent = parents[parent];
    parents[i] = parent;
    depth[i] = depth[parent] + 1;
  }
  return parents;
}

// The nodes from the golden token's child down to `node`.
inline std::vector<std::int32_t> path_to(const std::vector<std::int32_t>& parents, int node) {
  std::vector<std::int32_t> path;
  for (int i = node; i > 0; i = parents[i]) path.insert(path.begin(), i);
  return path;
}

struct Request {
  int kv_len;
  std::vector<std::int32_t> parents;
  int rows() const { return static_cast<int>(parents.size()); }
  bool chain() const {
    for (int i = 1; i < rows(); ++i) {
      if (parents[i] != i - 1) return false;
    }
    return true;
  }
};

// A pool in one of several layouts, and the step of some requests on shuffled pages of it.
struct Scene {
  std::vector<Request> requests;
  std::vector<std::vector<std::int32_t>> pages;  // of each request
  StepView step;
  KvCacheView cache;
  std::size_t pool_bytes = 0;
  char *k = nullptr, *v = nullptr;
  std::uint32_t* status = nullptr;
  std::int32_t* page_table = nullptr;
  std::int32_t* kv_len = nullptr;
  std::int32_t* cu_rows = nullptr;
  std::int32_t* parents = nullptr;

  int rows() const { return step.num_rows; }
  // Elements from the start of the pool to a token of a request.
  std::int64_t at(int b, int layer, int head, int token) const {
    return layer * cache.stride_layer + pages[b][token / cache.page_size] * cache.stride_page +
           head * cache.stride_head + token % cache.page_size * cache.stride_token;
  }
};

struct SceneOptions {
  DType dtype = DType::kF32;
  int layers = 1, heads = 1, page_size = 16, head_dim = 64;
  int layout = 0;        // 0: [L, P, G, S, K]; 1: [L, P, S, G, K]; 2: as 0 with odd gaps
  int padding_rows = 0;  // rows behind the last request
};

inline Scene make_scene(Arena& arena, Rng& rng, std::vector<Request> requests,
                        const SceneOptions& o) {
  Scene s;
  s.requests = std::move(requests);
  const int num_requests = static_cast<int>(s.requests.size());
  int num_pages = 3, stride = 1, rows = 0;
  std::vector<int> needed;
  for (const Request& r : s.requests) {
    needed.push_back((r.kv_len + r.rows() + o.page_size - 1) / o.page_size);
    num_pages += needed.back();
    stride = std::max(stride, needed.back() + rng.below(3));
  }
  std::vector<std::int32_t> order(static_cast<std::size_t>(num_pages));
  for (int i = 0; i < num_pages; ++i) order[i] = i;
  for (int i = num_pages - 1; i > 0; --i) std::swap(order[i], order[rng.below(i + 1)]);

  std::vector<std::int32_t> table(static_cast<std::size_t>(num_requests) * stride, 0x7ffffff0);
  std::vector<std::int32_t> cu_rows{0}, kv_len, parents;
  std::vector<std::uint8_t> is_tree;
  int used = 0;
  for (int b = 0; b < num_requests; ++b) {
    const Request& r = s.requests[b];
    s.pages.emplace_back(order.begin() + used, order.begin() + used + needed[b]);
    used += needed[b];
    std::copy(s.pages[b].begin(), s.pages[b].end(), table.begin() + b * stride);
    rows += r.rows();
    cu_rows.push_back(rows);
    kv_len.push_back(r.kv_len);
    is_tree.push_back(!r.chain());
    parents.insert(parents.end(), r.parents.begin(), r.parents.end());
    s.step.max_rows = std::max(s.step.max_rows, r.rows());
    s.step.max_kv_len = std::max(s.step.max_kv_len, r.kv_len + r.rows());
  }
  const int all_rows = rows + o.padding_rows;
  std::vector<std::int32_t> positions(static_cast<std::size_t>(all_rows), 0x7ffffff0);
  std::vector<std::uint32_t> mask(static_cast<std::size_t>(all_rows) * kMaskWords, 0);
  for (int b = 0; b < num_requests; ++b) {
    const Request& r = s.requests[b];
    for (int i = 0; i < r.rows(); ++i) {
      const int row = cu_rows[b] + i;
      positions[row] = r.kv_len + static_cast<int>(path_to(r.parents, i).size());
      if (r.rows() > kMaxStepTokens) continue;
      for (int j = i; j >= 0; j = r.parents[j]) mask[row * kMaskWords + j / 32] |= 1u << j % 32;
    }
  }

  s.step.num_requests = num_requests;
  s.step.num_rows = all_rows;
  s.step.positions = arena.copy("positions", positions);
  s.step.parents = s.parents = arena.copy("parents", parents);
  s.step.mask = arena.copy("mask", mask);
  s.step.cu_rows = s.cu_rows = arena.copy("cu_rows", cu_rows);
  s.step.kv_len = s.kv_len = arena.copy("kv_len", kv_len);
  s.step.is_tree = arena.copy("is_tree", is_tree);
  s.step.page_table = s.page_table = arena.copy("page_table", table);
  s.step.page_table_stride = stride;

  KvCacheView& c = s.cache;
  c.dtype = o.dtype;
  c.num_layers = o.layers, c.num_pages = num_pages, c.num_kv_heads = o.heads;
  c.page_size = o.page_size, c.head_dim = o.head_dim;
  if (o.layout == 1) {
    c.stride_head = o.head_dim;
    c.stride_token = o.heads * c.stride_head;
    c.stride_page = o.page_size * c.stride_token;
  } else {
    c.stride_token = o.head_dim + (o.layout == 2 ? 1 : 0);
    c.stride_head = o.page_size * c.stride_token + (o.layout == 2 ? 3 : 0);
    c.stride_page = o.heads * c.stride_head;
  }
  c.stride_layer = num_pages * c.stride_page;
  s.pool_bytes = static_cast<std::size_t>(o.layers * c.stride_layer) * dtype_bytes(o.dtype);
  c.k = s.k = arena.bytes("k_pages", s.pool_bytes, true);
  c.v = s.v = arena.bytes("v_pages", s.pool_bytes, true);
  s.status = arena.array<std::uint32_t>("status", static_cast<std::size_t>(num_requests), true);
  std::fill_n(s.status, num_requests, 0u);
  return s;
}

inline std::vector<Request> random_requests(Rng& rng, int num, int max_rows, int max_kv_len) {
  std::vector<Request> requests;
  for (int b = 0; b < num; ++b) {
    const int rows = rng.chance(15) ? 0 : rng.in(1, max_rows);
    requests.push_back({rng.chance(15) ? 0 : rng.below(max_kv_len + 1), random_parents(rng, rows)});
  }
  return requests;
}

// A tensor of rows with random numbers; NaN between the rows.
inline char* random_rows(Arena& arena, Rng& rng, const char* name, DType dtype, int rows,
                         int elements, std::int64_t stride, float range, bool writable = false) {
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(rows, 1) * stride);
  char* data = arena.bytes(name, size * dtype_bytes(dtype), writable);
  for (int r = 0; r < rows; ++r) {
    for (int e = 0; e < elements; ++e) write(dtype, rng.uniform() * range, data, r * stride + e);
  }
  return data;
}

// Runs the cases of a driver under several schedules and says how it went.
template <class F>
int main_of(const char* name, F cases) {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    simt::seed(seed);
    Rng rng{seed * 7919 + 1};
    try {
      cases(rng);
    } catch (const simt::Error& error) {
      expect(false, "%s, seed %d: %s", name, static_cast<int>(seed), error.what());
    }
  }
  std::printf("%s: %d checks, %d failures\n", name, checks, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace drive

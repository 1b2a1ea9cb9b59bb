// drive_hopper.cc: plan, Hopper main pass and finish of attention on the emulator, against loops in
// double precision and against themselves: the tile's height, the number of thread blocks and what
// part of a row's path is committed must not change a bit.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention/finish.cuh"
#include "attention/hopper_launch.cuh"
#include "attention/plan.cu"

namespace specdec::attention {
namespace {

struct Request {
  int kv_len, rows;
  bool tree;
};

struct Problem {
  DType dtype = DType::kBF16, kv_dtype = DType::kBF16;
  int dim = 128, page_size = 64, heads = 4, kv_heads = 1;
  std::vector<Request> requests;
  bool exact = true;
  int max_depth = 8, window = 0;
  float softcap = 0.0f, scale = 0.125f;
  bool sinks = false;
  std::uint32_t seed = 1;
};

std::uint16_t to_bits(DType dtype, float x) {
  if (dtype == DType::kBF16) return std::bit_cast<std::uint16_t>(__float2bfloat16(x));
  if (dtype == DType::kF16) return std::bit_cast<std::uint16_t>(__float2half(x));
  return __nv_fp8_e4m3(x).__x;
}
double to_double(DType dtype, std::uint16_t x) {
  if (dtype == DType::kBF16) return __bfloat162float(std::bit_cast<__nv_bfloat16>(x));
  if (dtype == DType::kF16) return __half2float(std::bit_cast<__half>(x));
  __nv_fp8_e4m3 value;
  value.__x = static_cast<unsigned char>(x);
  return float(value);
}

// A problem's tensors. K and V of request b, slot s, head g, in slot order, are in k and v; the
// pool has them on shuffled pages, everything else in it is NaN.
struct Data {
  Problem problem;
  int layers = 2, layer = 1, num_pages = 0, stride = 0;
  std::vector<unsigned char> k_pool, v_pool;
  std::vector<std::uint16_t> q, out;
  std::vector<std::vector<std::uint16_t>> k, v;
  std::vector<std::int32_t> positions, parents, cu_rows, kv_len, page_table;
  std::vector<std::uint32_t> mask, status;
  std::vector<std::uint8_t> is_tree;
  std::vector<float> sinks, k_scale, v_scale;

  const std::uint16_t* vector_of(const std::vector<std::uint16_t>& of, int slot, int g) const {
    return &of[(static_cast<std::size_t>(slot) * problem.kv_heads + g) * problem.dim];
  }
};

// Lays k, v and the page table out in a pool.
void make_pool(Data& d, std::mt19937& random) {
  const Problem& p = d.problem;
  const int count = static_cast<int>(p.requests.size());
  d.stride = 3, d.num_pages = 4;
  for (const Request& r : p.requests) {
    const int pages = (r.kv_len + r.rows + p.page_size - 1) / p.page_size;
    d.stride = std::max(d.stride, pages + 2), d.num_pages += pages;
  }
  std::vector<int> ids(d.num_pages);
  for (int i = 0; i < d.num_pages; ++i) ids[i] = i;
  std::shuffle(ids.begin(), ids.end(), random);
  const std::size_t page = static_cast<std::size_t>(p.kv_heads) * p.page_size * p.dim;
  // All bits set is NaN in every type.
  d.k_pool.assign(page * d.num_pages * d.layers * dtype_bytes(p.kv_dtype), 0xff);
  d.v_pool = d.k_pool;
  const auto store = [&](std::vector<unsigned char>& pool, std::size_t at, const std::uint16_t* x) {
    const std::size_t bytes = dtype_bytes(p.kv_dtype);
    for (int c = 0; c < p.dim; ++c) std::memcpy(&pool[(at + c) * bytes], x + c, bytes);
  };
  d.page_table.assign(static_cast<std::size_t>(count) * d.stride, 0x7fffffff);
  int next = 0;
  for (int b = 0; b < count; ++b) {
    const int slots = p.requests[b].kv_len + p.requests[b].rows;
    for (int s = 0; s < slots; ++s) {
      std::int32_t& id = d.page_table[b * d.stride + s / p.page_size];
      if (s % p.page_size == 0) id = ids[next++];
      for (int g = 0; g < p.kv_heads; ++g) {
        const std::size_t at =
            page * (static_cast<std::size_t>(d.layer) * d.num_pages + id) +
            (static_cast<std::size_t>(g) * p.page_size + s % p.page_size) * p.dim;
        store(d.k_pool, at, d.vector_of(d.k[b], s, g));
        store(d.v_pool, at, d.vector_of(d.v[b], s, g));
      }
    }
  }
}

Data make_data(const Problem& p) {
  Data d;
  d.problem = p;
  std::mt19937 random(p.seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<std::uint16_t>& to, std::size_t n, DType dtype) {
    to.resize(n);
    for (std::uint16_t& x : to) x = to_bits(dtype, normal(random));
  };
  d.cu_rows = {0};
  for (const Request& r : p.requests) {
    d.k.emplace_back(), d.v.emplace_back();
    const std::size_t numbers = static_cast<std::size_t>(r.kv_len + r.rows) * p.kv_heads * p.dim;
    fill(d.k.back(), numbers, p.kv_dtype), fill(d.v.back(), numbers, p.kv_dtype);
    d.kv_len.push_back(r.kv_len), d.is_tree.push_back(r.tree);
    const std::size_t first = d.positions.size();
    for (int i = 0; i < r.rows; ++i) {
      int parent = i - 1;
      if (r.tree && i > 0) {
        do parent = static_cast<int>(random() % i);
        while (d.positions[first + parent] - r.kv_len >= p.max_depth);
      }
      d.parents.push_back(parent);
      d.positions.push_back(i == 0 ? r.kv_len : d.positions[first + parent] + 1);
      std::vector<std::uint32_t> bits(kMaskWords, 0);
      if (r.tree && i > 0) {
        std::copy_n(&d.mask[(first + parent) * kMaskWords], kMaskWords, bits.begin());
      }
      if (r.tree) bits[i / 32] |= 1u << i % 32;
      d.mask.insert(d.mask.end(), bits.begin(), bits.end());
    }
    d.cu_rows.push_back(static_cast<std::int32_t>(d.positions.size()));
  }
  fill(d.q, d.positions.size() * p.heads * p.dim, p.dtype);
  for (int h = 0; h < p.heads; ++h) d.sinks.push_back(normal(random));
  for (int g = 0; g < p.kv_heads; ++g) {
    const bool scaled = p.kv_dtype == DType::kF8E4M3;
    d.k_scale.push_back(scaled ? 0.5f + 0.25f * g : 1.0f);
    d.v_scale.push_back(scaled ? 1.5f - 0.25f * g : 1.0f);
  }
  make_pool(d, random);
  return d;
}

// The row's path as a request of its own: what it sees is committed, and the row is alone.
Data alone(const Data& d, int b, int row) {
  const Problem& p = d.problem;
  Data one;
  one.problem = p;
  one.sinks = d.sinks, one.k_scale = d.k_scale, one.v_scale = d.v_scale;
  const int step_row = d.cu_rows[b] + row, position = d.positions[step_row];
  one.problem.requests = {{position, 1, false}};
  std::vector<int> slots;
  for (int at = row; at >= 0; at = d.parents[d.cu_rows[b] + at]) {
    slots.push_back(d.kv_len[b] + at);
  }
  for (int s = d.kv_len[b] - 1; s >= 0; --s) slots.push_back(s);
  std::reverse(slots.begin(), slots.end());
  one.k.emplace_back(), one.v.emplace_back();
  for (const int s : slots) {
    for (int g = 0; g < p.kv_heads; ++g) {
      const std::uint16_t *k = d.vector_of(d.k[b], s, g), *v = d.vector_of(d.v[b], s, g);
      one.k[0].insert(one.k[0].end(), k, k + p.dim), one.v[0].insert(one.v[0].end(), v, v + p.dim);
    }
  }
  one.cu_rows = {0, 1}, one.kv_len = {position}, one.is_tree = {0}, one.positions = {position};
  one.parents = {-1}, one.mask.assign(kMaskWords, 0);
  const std::size_t numbers = static_cast<std::size_t>(p.heads) * p.dim;
  one.q.assign(&d.q[step_row * numbers], &d.q[step_row * numbers] + numbers);
  std::mt19937 random(p.seed + 99);
  make_pool(one, random);
  return one;
}

// What the problems below need: each kernel takes seconds to compile with its checks.
struct Kernel {
  DType dtype, kv_dtype;
  int dim, row_tile;
  MainLauncher launch;
};
template <class T, class Tile>
Kernel kernel() {
  const DType dtype = std::is_same_v<T, __half> ? DType::kF16 : DType::kBF16;
  return {dtype, Tile::kWiden ? DType::kF8E4M3 : dtype, Tile::kDim, Tile::kRowTile,
          launch_hopper<T, Tile>};
}
const Kernel kKernels[] = {
    kernel<__nv_bfloat16, HopperTile<128, 1>>(),
    kernel<__nv_bfloat16, HopperTile<128, 2>>(),
    kernel<__nv_bfloat16, HopperTile<128, 3>>(),
    kernel<__nv_bfloat16, HopperTile<64, 2>>(),
    kernel<__nv_bfloat16, HopperTile<64, 3>>(),
    kernel<__nv_bfloat16, HopperTile<96, 1>>(),
    kernel<__nv_bfloat16, HopperTile<256, 1>>(),
    kernel<__half, HopperTile<128, 2>>(),
    kernel<__half, HopperTile<80, 1>>(),
    kernel<__half, HopperTile<80, 2>>(),
    kernel<__nv_bfloat16, HopperTile<128, 1, true>>(),
    kernel<__nv_bfloat16, HopperTile<128, 2, true>>(),
    kernel<__nv_bfloat16, HopperTile<256, 1, true>>(),
    kernel<__half, HopperTile<80, 1, true>>(),
};
MainLauncher launcher(const Problem& p, int row_tile) {
  for (const Kernel& k : kKernels) {
    if (k.dtype == p.dtype && k.kv_dtype == p.kv_dtype && k.dim == p.dim &&
        k.row_tile == row_tile) {
      return k.launch;
    }
  }
  return nullptr;
}
// The smallest there is: a row alone runs in it.
int smallest_tile(const Problem& p) {
  int row_tile = 64;
  while (launcher(p, row_tile) == nullptr) row_tile += 64;
  return row_tile;
}

template <class T>
void expose(const std::vector<T>& of, const char* name, bool writable = false) {
  simt::expose(of.data(), of.size() * sizeof(T), name, writable);
}

// Runs the three kernels; the result is in d.out and d.status.
void run(Data& d, int row_tile, int num_blocks) {
  const Problem& p = d.problem;
  const std::int32_t count = static_cast<std::int32_t>(p.requests.size());
  const std::int32_t rows = d.cu_rows.back();
  d.out.assign(d.q.size(), to_bits(p.dtype, std::nanf("")));
  d.status.assign(count, 0);

  AttentionLaunch launch;
  SpecAttentionParams& call = launch.call;
  StepView& step = call.step;
  step.num_requests = count, step.num_rows = rows;
  step.positions = d.positions.data(), step.parents = d.parents.data(), step.mask = d.mask.data();
  step.cu_rows = d.cu_rows.data(), step.kv_len = d.kv_len.data(), step.is_tree = d.is_tree.data();
  step.page_table = d.page_table.data(), step.page_table_stride = d.stride;
  for (const Request& r : p.requests) {
    step.max_rows = std::max(step.max_rows, r.rows);
    step.max_kv_len = std::max(step.max_kv_len, r.kv_len + r.rows);
  }
  KvCacheView& cache = call.cache;
  cache.k = d.k_pool.data(), cache.v = d.v_pool.data(), cache.dtype = p.kv_dtype;
  cache.num_layers = d.layers, cache.num_pages = d.num_pages, cache.num_kv_heads = p.kv_heads;
  cache.page_size = p.page_size, cache.head_dim = p.dim, cache.stride_token = p.dim;
  cache.stride_head = std::int64_t{p.page_size} * p.dim;
  cache.stride_page = cache.stride_head * p.kv_heads;
  cache.stride_layer = cache.stride_page * d.num_pages;
  call.layer = d.layer, call.q = d.q.data(), call.out = d.out.data();
  call.q_row_stride = call.out_row_stride = std::int64_t{p.heads} * p.dim;
  call.num_heads = p.heads, call.dtype = p.dtype, call.scale = p.scale;
  call.sliding_window = p.window, call.softcap = p.softcap;
  call.sinks = p.sinks ? d.sinks.data() : nullptr;
  call.exact = p.exact, call.max_depth = p.max_depth, call.exec.status = d.status.data();
  call.k_scale = d.k_scale.data(), call.v_scale = d.v_scale.data(), call.scale_stride = 1;
  const std::int64_t layer =
      call.layer * cache.stride_layer * static_cast<std::int64_t>(dtype_bytes(p.kv_dtype));
  launch.k = d.k_pool.data() + layer, launch.v = d.v_pool.data() + layer;
  launch.group = p.heads / p.kv_heads;
  while (1 << launch.page_shift < p.page_size) ++launch.page_shift;
  launch.row_tile = row_tile, launch.granule = kGranule16Bit;

  WorkView& work = launch.work;
  work.max_jobs = work.max_units = work.max_slots = 256, work.num_blocks = num_blocks;
  std::vector<WorkHeader> header(1);
  std::vector<Job> jobs(work.max_jobs);
  std::vector<Unit> units(work.max_units);
  std::vector<std::int32_t> job_begin(count + 1), block_begin(num_blocks + 1);
  std::vector<std::uint32_t> flags(count);
  const float nan = std::nanf("");
  std::vector<float> state_ml(static_cast<std::size_t>(work.max_slots) * row_tile * 2, nan);
  std::vector<float> state_o(static_cast<std::size_t>(work.max_slots) * row_tile * p.dim, nan);
  work.header = header.data(), work.jobs = jobs.data(), work.units = units.data();
  work.job_begin = job_begin.data(), work.block_begin = block_begin.data();
  work.request_flags = flags.data(), work.state_ml = state_ml.data(), work.state_o = state_o.data();

  simt::conceal();
  expose(d.k_pool, "k"), expose(d.v_pool, "v"), expose(d.q, "q"), expose(d.out, "out", true);
  expose(d.positions, "positions"), expose(d.parents, "parents"), expose(d.mask, "mask");
  expose(d.cu_rows, "cu_rows"), expose(d.kv_len, "kv_len"), expose(d.is_tree, "is_tree");
  expose(d.page_table, "page_table"), expose(d.status, "status", true), expose(d.sinks, "sinks");
  expose(d.k_scale, "k_scale"), expose(d.v_scale, "v_scale");
  expose(header, "header", true), expose(jobs, "jobs", true), expose(units, "units", true);
  expose(job_begin, "job_begin", true), expose(block_begin, "block_begin", true);
  expose(flags, "flags", true), expose(state_ml, "state_ml", true);
  expose(state_o, "state_o", true);
  launch_plan(launch);
  launcher(p, row_tile)(launch);
  const bool e4m3 = p.kv_dtype == DType::kF8E4M3;
  if (p.dtype == DType::kBF16) {
    e4m3 ? launch_finish_heads<__nv_bfloat16, __nv_fp8_e4m3, 4>(launch)
         : launch_finish_heads<__nv_bfloat16, __nv_bfloat16, 4>(launch);
  } else {
    e4m3 ? launch_finish_heads<__half, __nv_fp8_e4m3, 4>(launch)
         : launch_finish_heads<__half, __half, 4>(launch);
  }
  simt::conceal();
}

// Greatest difference from sums in double precision.
double error(const Data& d) {
  const Problem& p = d.problem;
  double worst = 0;
  for (std::size_t b = 0; b < p.requests.size(); ++b) {
    for (int row = 0; row < p.requests[b].rows; ++row) {
      const int step_row = d.cu_rows[b] + row;
      std::vector<int> slots;  // descending in position
      for (int at = row; at >= 0; at = d.parents[d.cu_rows[b] + at]) {
        slots.push_back(d.kv_len[b] + at);
      }
      for (int s = d.kv_len[b] - 1; s >= 0; --s) slots.push_back(s);
      if (p.window > 0 && static_cast<int>(slots.size()) > p.window) slots.resize(p.window);
      for (int h = 0; h < p.heads; ++h) {
        const int g = h / (p.heads / p.kv_heads);
        const std::size_t at = (static_cast<std::size_t>(step_row) * p.heads + h) * p.dim;
        std::vector<double> scores;
        double top = p.sinks ? d.sinks[h] : -INFINITY;
        for (const int s : slots) {
          double x = 0;
          for (int c = 0; c < p.dim; ++c) {
            x += to_double(p.dtype, d.q[at + c]) *
                 to_double(p.kv_dtype, d.vector_of(d.k[b], s, g)[c]);
          }
          x *= static_cast<double>(p.scale) * d.k_scale[g];
          if (p.softcap > 0) x = p.softcap * std::tanh(x / p.softcap);
          scores.push_back(x), top = std::max(top, x);
        }
        double sum = p.sinks ? std::exp(d.sinks[h] - top) : 0;
        std::vector<double> o(p.dim, 0.0);
        for (std::size_t i = 0; i < slots.size(); ++i) {
          const double e = std::exp(scores[i] - top);
          sum += e;
          for (int c = 0; c < p.dim; ++c) {
            o[c] += e * d.v_scale[g] * to_double(p.kv_dtype, d.vector_of(d.v[b], slots[i], g)[c]);
          }
        }
        for (int c = 0; c < p.dim; ++c) {
          const double off = std::fabs(to_double(p.dtype, d.out[at + c]) - o[c] / sum);
          if (!(off <= worst)) worst = off;
        }
      }
    }
  }
  return worst;
}

int failures = 0;
void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

std::string name(const Problem& p) {
  char text[200];
  std::snprintf(text, sizeof text, "%s/%s k%d page %d H%d/%d %s depth %d window %d cap %g scale %g",
                dtype_name(p.dtype), dtype_name(p.kv_dtype), p.dim, p.page_size, p.heads,
                p.kv_heads, p.exact ? "exact" : "fast", p.max_depth, p.window, p.softcap, p.scale);
  return text;
}

// One problem in all tiles and in several numbers of thread blocks.
void check(const Problem& p, bool with_alone) {
  Data first = make_data(p);
  bool have = false;
  for (const int row_tile : {64, 128, 192}) {
    if (launcher(p, row_tile) == nullptr) continue;
    for (const int num_blocks : {1, 3, 7}) {
      if (have && num_blocks == 1 && row_tile > 64) continue;
      Data d = make_data(p);
      run(d, row_tile, num_blocks);
      const std::string what =
          name(p) + " tile " + std::to_string(row_tile) + " blocks " + std::to_string(num_blocks);
      for (const std::uint32_t flags : d.status) expect(flags == 0, what + ": status");
      if (!have) {
        first = d, have = true;
        const double off = error(d), limit = p.dtype == DType::kBF16 ? 0.02 : 0.003;
        std::printf("%s: error %.2g\n", name(p).c_str(), off);
        std::fflush(stdout);
        expect(off <= limit, what + ": error " + std::to_string(off));
      } else {
        expect(d.out == first.out, what + ": other bits");
      }
    }
  }
  if (!with_alone) return;
  const std::size_t numbers = static_cast<std::size_t>(p.heads) * p.dim;
  for (std::size_t b = 0; b < p.requests.size(); ++b) {
    const int rows = p.requests[b].rows;
    for (int row = 0; row < rows; row += std::max(1, rows / 3)) {
      Data one = alone(first, static_cast<int>(b), row);
      run(one, smallest_tile(p), 2);
      expect(std::equal(one.out.begin(), one.out.end(),
                        first.out.begin() + (first.cu_rows[b] + row) * numbers),
             name(p) + ": request " + std::to_string(b) + " row " + std::to_string(row) +
                 " has other bits alone");
    }
  }
}

// A page outside the pool flags its request and leaves the other alone.
void check_bad_page() {
  Problem p;
  p.requests = {{300, 5, true}, {300, 5, true}};
  Data good = make_data(p), bad = make_data(p);
  run(good, 128, 3);
  bad.page_table[1] = bad.num_pages;
  run(bad, 128, 3);
  expect(bad.status[0] == kStatusBadPage && bad.status[1] == 0, "bad page: status");
  const std::size_t half = bad.out.size() / 2;
  expect(std::equal(bad.out.begin() + half, bad.out.end(), good.out.begin() + half),
         "bad page: other request");
}

int drive() {
  const auto problem = [](auto change) {
    Problem p;
    p.requests = {{300, 21, true}, {0, 3, true}, {70, 1, false}, {127, 40, false}};
    change(p);
    return p;
  };
  check(problem([](Problem&) {}), true);
  check(problem([](Problem& p) { p.dtype = p.kv_dtype = DType::kF16, p.page_size = 16; }), true);
  check(problem([](Problem& p) { p.dim = 64, p.page_size = 32, p.kv_heads = 2, p.window = 100; }),
        true);
  check(problem(
            [](Problem& p) { p.dim = 80, p.page_size = 128, p.dtype = p.kv_dtype = DType::kF16; }),
        true);
  check(problem([](Problem& p) { p.dim = 96, p.softcap = 2.0f; }), true);
  check(problem([](Problem& p) { p.dim = 256, p.scale = -0.0625f, p.sinks = true; }), true);
  check(problem([](Problem& p) {
          // More pages than are looked up at once; scores whose maximum keeps rising.
          p.requests = {{590, 7, true}};
          p.heads = 6, p.kv_heads = 2, p.page_size = 16, p.scale = 1.0f;
        }),
        true);
  check(problem([](Problem& p) { p.exact = false, p.page_size = 16; }), false);
  check(problem([](Problem& p) { p.exact = false, p.dim = 64, p.window = 5, p.softcap = 5.0f; }),
        false);
  check(problem([](Problem& p) { p.kv_dtype = DType::kF8E4M3, p.page_size = 32; }), true);
  check(problem([](Problem& p) {
          p.kv_dtype = DType::kF8E4M3, p.dtype = DType::kF16, p.dim = 80, p.kv_heads = 2;
          p.page_size = 16, p.window = 90;
        }),
        true);
  check(problem([](Problem& p) { p.kv_dtype = DType::kF8E4M3, p.dim = 256, p.exact = false; }),
        false);
  check_bad_page();
  std::printf(failures ? "%d FAILURES\n" : "all good\n", failures);
  return failures != 0;
}

}  // namespace
}  // namespace specdec::attention

int main() { return specdec::attention::drive(); }

// drive_attention.cc: plan, Ampere main pass and finish kernel under the emulator, against a loop
// in double precision, and the bits of rows over tiles, cuts, schedules and ways of laying a path.
// Prints one line per case; the exit status is the number of cases that failed.
#include <cstdio>

#include "../../cuda/attention/plan.cu"
#include "attention/ampere.cuh"
#include "attention/finish.cuh"
#include "simt/attention_case.h"

using namespace attention_case;
using attention::AmpereConfig;

static int failures = 0;

static void verdict(bool good, const char* what, const std::string& detail) {
  printf("%-6s %-46s %s\n", good ? "ok" : "FAILED", what, detail.c_str());
  fflush(stdout);
  failures += !good;
}

// A workspace for everything a small batch may need, filled with NaN.
template <class Config>
struct Workspace {
  std::vector<unsigned char> bytes;
  attention::WorkLayout layout;

  Workspace(int requests, int num_blocks, int max_slots) {
    layout.max_jobs = 256, layout.max_units = 1024, layout.max_slots = max_slots;
    layout.num_blocks = num_blocks;
    layout.row_tile = Config::kRowTile, layout.head_dim = Config::kHeadDim;
    int64_t end = 0;
    const auto place = [&](int64_t size) {
      const int64_t at = end;
      end += (size + 255) / 256 * 256;
      return at;
    };
    layout.header = place(sizeof(attention::WorkHeader));
    layout.jobs = place(layout.max_jobs * sizeof(attention::Job));
    layout.units = place(layout.max_units * sizeof(attention::Unit));
    layout.job_begin = place((requests + 1) * 4);
    layout.block_begin = place((num_blocks + 1) * 4);
    layout.request_flags = place(requests * 4);
    layout.state_ml = place(int64_t{max_slots} * Config::kRowTile * 8);
    layout.state_o = place(int64_t{max_slots} * Config::kRowTile * Config::kHeadDim * 4);
    layout.total_bytes = end;
    bytes.assign(end, 0xff);
  }
};

struct Run {
  int num_blocks = 3, max_slots = 256;
  uint64_t seed = 0;
};

template <class Config, class T, class Kv>
attention::WorkHeader run(Batch<T, Kv>& batch, const Run& how) {
  Workspace<Config> work(int(batch.requests.size()), how.num_blocks, how.max_slots);
  attention::AttentionInstance instance = {};
  instance.row_tile = Config::kRowTile, instance.granule = attention::kGranule16Bit;
  batch.call.exec.workspace = work.bytes.data();
  std::memset(static_cast<void*>(batch.out.data()), 0xff, batch.out.size() * sizeof(T));
  std::fill(batch.status.begin(), batch.status.end(), 0);
  simt::seed(how.seed);
  simt::conceal();
  batch.expose();
  simt::expose(work.bytes.data(), work.bytes.size(), "workspace", true);
  const auto launch = attention::make_launch(batch.call, work.layout, instance);
  attention::launch_plan(launch);
  attention::launch_ampere<Config>(launch);
  attention::launch_finish_types<T, Kv>(launch);
  return *launch.work.header;
}

template <class T, class Kv>
Batch<T, Kv> make_batch(const Shape& s, const std::vector<RequestRows>& rows, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<Content<T, Kv>> content;
  for (const RequestRows& r : rows) content.push_back(random_content<T, Kv>(s, r, rng));
  return Batch<T, Kv>(s, rows, content, rng);
}

static std::vector<RequestRows> mixed(int max_depth, uint32_t seed) {
  std::mt19937 rng(seed);
  return {random_tree(300 + int(seed) * 7, 11, max_depth, rng),
          chain(0, 3),
          chain(77, 0),
          chain(64 + max_depth, 1),
          random_tree(0, 9, max_depth, rng),
          chain(530, 2, true)};
}

// Allowed error in units of rounding: half a one for the output, the rest for P and the scores.
constexpr double kErrors = 1;

template <class T, class Kv, int kDim, int kTile>
void check_values(const char* what, Shape s, const std::vector<RequestRows>& rows, Run how = {}) {
  s.head_dim = kDim;
  auto batch = make_batch<T, Kv>(s, rows, 7 + uint32_t(how.seed));
  try {
    const auto header = run<AmpereConfig<T, Kv, kDim, kTile>>(batch, how);
    const double error = batch.worst_error();
    bool clean = true;
    for (uint32_t f : batch.status) clean = clean && f == 0;
    verdict(error < kErrors && clean, what,
            "error " + std::to_string(error) + ", units " + std::to_string(header.num_units) +
                ", slots " + std::to_string(header.num_slots));
  } catch (const std::exception& e) {
    verdict(false, what, e.what());
  }
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Tiles and cuts change no bit.
template <class T, class Kv, int kDim>
void check_tiles(const char* what, Shape s, const std::vector<RequestRows>& rows) {
  s.head_dim = kDim;
  auto batch = make_batch<T, Kv>(s, rows, 21);
  try {
    run<AmpereConfig<T, Kv, kDim, 16>>(batch, {.num_blocks = 1});
    const auto first = batch.out;
    std::string differing;
    const auto again = [&](const char* name, auto config, Run how) {
      run<decltype(config)>(batch, how);
      if (!same_bits(first, batch.out)) differing += std::string(" ") + name;
    };
    using C16 = AmpereConfig<T, Kv, kDim, 16>;
    using C64 = AmpereConfig<T, Kv, kDim, 64>;
    again("blocks 7", C16(), {.num_blocks = 7, .seed = 3});
    again("blocks 64", C16(), {.num_blocks = 64, .seed = 4});
    again("whole jobs", C16(), {.num_blocks = 64, .max_slots = 30});
    again("tile 64", C64(), {.num_blocks = 1});
    again("tile 64 cut", C64(), {.num_blocks = 40, .seed = 5});
    if constexpr (kDim <= 128) {
      again("tile 128 cut", AmpereConfig<T, Kv, kDim, 128>(), {.num_blocks = 30, .seed = 6});
    }
    verdict(differing.empty(), what, differing.empty() ? "same bits" : "differ:" + differing);
  } catch (const std::exception& e) {
    verdict(false, what, e.what());
  }
}

// Every node of a tree has the bits of its path decoded alone.
template <class T, class Kv, int kDim, int kTile>
void check_alone(const char* what, Shape s, const std::vector<RequestRows>& rows) {
  s.head_dim = kDim;
  auto batch = make_batch<T, Kv>(s, rows, 33);
  try {
    run<AmpereConfig<T, Kv, kDim, kTile>>(batch, {.num_blocks = 20});
    std::vector<RequestRows> single_rows;
    std::vector<Content<T, Kv>> single_content;
    for (size_t b = 0; b < rows.size(); ++b) {
      for (int i = 0; i < int(rows[b].parents.size()); ++i) {
        auto [r, c] = alone(s, rows[b], batch.content[b], i);
        single_rows.push_back(r), single_content.push_back(c);
      }
    }
    std::mt19937 rng(5);
    Batch<T, Kv> singles(s, single_rows, single_content, rng);
    run<AmpereConfig<T, Kv, kDim, 16>>(singles, {.num_blocks = 2, .seed = 9});
    const bool good = same_bits(batch.out, singles.out) && batch.worst_error() < kErrors;
    verdict(good, what, std::to_string(single_rows.size()) + " rows");
  } catch (const std::exception& e) {
    verdict(false, what, e.what());
  }
}

// The first request of a batch, a tree of 11 rows, is damaged: it is told of, what the damage
// reaches (all rows, or some heads of its last row) is zero, and everything else keeps its bits.
template <class T, class Kv, int kDim, class Damage>
void check_fault(const char* what, Shape s, uint32_t flag, bool all_rows, Damage&& damage) {
  s.head_dim = kDim;
  auto batch = make_batch<T, Kv>(s, mixed(6, 4), 51);
  try {
    run<AmpereConfig<T, Kv, kDim, 16>>(batch, {.num_blocks = 5});
    const auto good = batch.out;
    damage(batch);
    run<AmpereConfig<T, Kv, kDim, 16>>(batch, {.num_blocks = 5, .seed = 1});
    const int row_size = s.heads * kDim;
    std::string fault;
    for (size_t b = 0; b < batch.requests.size(); ++b) {
      if (batch.status[b] != (b == 0 ? flag : 0)) fault += " status";
      for (int row = batch.cu_rows[b]; row < batch.cu_rows[b + 1]; ++row) {
        int zeros = 0, same = 0;
        for (int i = row * row_size; i < (row + 1) * row_size; ++i) {
          zeros += to_float(batch.out[i]) == 0.0f;
          same += std::memcmp(&batch.out[i], &good[i], sizeof(T)) == 0;
        }
        const bool hit = b == 0 && (all_rows || row == 10);
        if (hit ? zeros < row_size / 2 || same > row_size / 2 : same != row_size) fault += " row";
        if (hit && all_rows && zeros != row_size) fault += " not zero";
      }
    }
    verdict(fault.empty(), what, fault);
  } catch (const std::exception& e) {
    verdict(false, what, e.what());
  }
}

int main() {
  using H = __half;
  using B = __nv_bfloat16;
  using F = __nv_fp8_e4m3;
  check_values<H, H, 64, 16>("f16 k64 tile 16", {}, mixed(6, 1));
  check_values<H, H, 64, 64>("f16 k64 tile 64, page 64", {.page_size = 64}, mixed(6, 2),
                             {.num_blocks = 9, .seed = 1});
  check_values<B, B, 80, 16>("bf16 k80", {.heads = 3, .kv_heads = 1}, mixed(6, 3), {.seed = 2});
  check_values<H, H, 96, 64>("f16 k96 group 5", {.heads = 5, .kv_heads = 1}, mixed(6, 4));
  check_values<B, B, 128, 64>("bf16 k128 page 32", {.page_size = 32}, mixed(6, 5), {.seed = 3});
  check_values<H, H, 128, 128>("f16 k128 tile 128", {.heads = 8, .kv_heads = 2}, mixed(6, 6),
                               {.num_blocks = 5});
  check_values<H, H, 256, 16>("f16 k256", {.heads = 2, .kv_heads = 1}, mixed(6, 1));
  check_values<H, F, 64, 64>("f16 over e4m3 k64", {}, mixed(6, 2), {.num_blocks = 4});
  check_values<B, F, 128, 16>("bf16 over e4m3 k128", {.page_size = 128}, mixed(6, 3));
  check_values<H, F, 80, 16>("f16 over e4m3 k80", {}, mixed(6, 4));
  check_values<H, F, 256, 16>("f16 over e4m3 k256", {.heads = 2, .kv_heads = 2}, mixed(6, 4));
  check_values<H, H, 64, 64>("group 12, MQA", {.heads = 12, .kv_heads = 1}, mixed(6, 1));
  check_values<H, H, 64, 16>("window 100", {.window = 100}, mixed(6, 2), {.num_blocks = 11});
  check_values<H, H, 64, 16>("window 3", {.window = 3}, mixed(6, 2));
  check_values<H, H, 64, 64>("soft cap, sinks", {.softcap = 5, .sinks = true}, mixed(6, 3));
  check_values<H, H, 64, 16>("max_depth 127", {.max_depth = 127}, mixed(40, 3));
  check_values<H, H, 64, 64>("prefill chunks", {}, {chain(0, 150), chain(200, 90)},
                             {.num_blocks = 6});
  check_values<H, H, 64, 128>("prefill, window 70", {.window = 70}, {chain(33, 210)});
  check_values<H, H, 64, 16>("fast", {.exact = false}, mixed(6, 4), {.num_blocks = 8});
  check_values<H, H, 64, 64>("fast, window 3", {.window = 3, .exact = false}, mixed(9, 5));
  {
    std::mt19937 rng(3);
    check_values<H, H, 64, 128>("fast, 128 nodes", {.window = 300, .exact = false},
                                {random_tree(290, 128, 60, rng), random_tree(63, 97, 30, rng)});
    check_values<H, H, 64, 128>("128 nodes", {.max_depth = 60},
                                {random_tree(290, 128, 60, rng), random_tree(63, 97, 30, rng)});
  }
  check_tiles<H, H, 64>("tiles f16 k64", {}, mixed(6, 1));
  check_tiles<B, B, 128>("tiles bf16 k128 group 3", {.heads = 3, .kv_heads = 1}, mixed(6, 2));
  check_tiles<B, F, 256>("tiles bf16 over e4m3 k256", {.heads = 2, .kv_heads = 1}, mixed(6, 3));
  check_tiles<H, H, 96>("tiles f16 k96 window 200", {.window = 200}, mixed(6, 4));
  check_alone<H, H, 64, 64>("alone f16 k64", {}, mixed(6, 5));
  check_alone<B, B, 128, 128>("alone bf16 k128 window 90", {.window = 90}, mixed(6, 6));
  check_alone<B, F, 80, 64>("alone bf16 over e4m3 k80", {.softcap = 20}, mixed(6, 1));
  check_alone<H, H, 256, 64>("alone f16 k256", {.heads = 2, .kv_heads = 1}, mixed(6, 2));
  check_alone<H, H, 64, 64>("alone prefill", {}, {chain(250, 40), chain(0, 20)});
  check_fault<H, H, 64>("page outside the pool, main", {}, kStatusBadPage, true,
                        [](auto& batch) { batch.pages[3] = batch.num_pages; });
  check_fault<H, H, 64>("negative page, tail", {}, kStatusBadPage, true,
                        [](auto& batch) { batch.pages[batch.kv_len[0] / 16] = -1; });
  check_fault<H, H, 64>("row's mask misses itself", {}, kStatusBadTree, false,
                        [](auto& batch) { batch.mask[10 * kMaskWords] &= ~(1u << 10); });
  check_fault<H, H, 64>("row's position is not its depth", {}, kStatusBadTree, false,
                        [](auto& batch) { batch.positions[10] += 100; });
  check_fault<H, H, 64>("NaN in a query", {}, kStatusNaN, false, [](auto& batch) {
    batch.q[10 * size_t(batch.call.q_row_stride) + 3] = H(std::nanf(""));
    batch.q[10 * size_t(batch.call.q_row_stride) + 64] = H(std::nanf(""));
    batch.q[10 * size_t(batch.call.q_row_stride) + 128] = H(std::nanf(""));
  });
  check_fault<H, F, 64>("NaN in an e4m3 key", {}, kStatusNaN, true, [](auto& batch) {
    const size_t at = batch.at(batch.pages[2], 1, 5);
    std::memset(static_cast<void*>(&batch.k[at]), 0x7f, 1);
  });
  check_fault<H, H, 64>("NaN in a key", {}, kStatusNaN, true, [](auto& batch) {
    for (int g = 0; g < 2; ++g) batch.k[batch.at(batch.pages[2], g, 5) + 1] = H(std::nanf(""));
  });
  return failures;
}

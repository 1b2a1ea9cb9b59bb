// drive_plan.cc: the plan kernel alone, under the emulator: whatever the lengths, every chunk of
// every job is in exactly one unit, slots are dense and in order, blocks get consecutive units of
// about equal cost, and what cannot be is refused request by request.
#include <cstdio>

#include "../../cuda/attention/plan.cu"
#include "simt/attention_case.h"

using namespace specdec;
using namespace specdec::attention;

static int failures = 0;

struct Lengths {
  std::vector<int32_t> kv_len, rows;
  std::vector<uint8_t> tree;
};

struct Setup {
  int group = 4, kv_heads = 2, row_tile = 64, page_shift = 4, window = 0, sinks = 0, max_depth = 6;
  int num_blocks = 13, max_jobs = 4096, max_units = 8192, max_slots = 20000;
  bool exact = true;
};

// Runs the plan over `lengths`, with page `bad_page` of each of `bad` outside the pool, and returns
// what is wrong with the result. `refused`: the flags that each request has to get.
static std::string check(const Setup& s, const Lengths& lengths,
                         const std::vector<uint32_t>& refused, int bad = -1, int bad_page = 0) {
  const int count = int(lengths.kv_len.size());
  std::vector<int32_t> cu_rows{0}, pages, job_begin(count + 1, -7),
      block_begin(s.num_blocks + 1, -7);
  int stride = 1;
  const auto hopeless = [&](int b) { return lengths.kv_len[b] < 0 || lengths.kv_len[b] > 1000000; };
  for (int b = 0; b < count; ++b) {
    cu_rows.push_back(cu_rows.back() + lengths.rows[b]);
    if (hopeless(b)) continue;
    stride = std::max(stride, ((lengths.kv_len[b] + lengths.rows[b]) >> s.page_shift) + 1);
  }
  pages.assign(size_t(count) * stride, 0x7fffffff);
  for (int b = 0; b < count; ++b) {
    if (hopeless(b)) continue;
    const int used =
        (lengths.kv_len[b] + lengths.rows[b] + (1 << s.page_shift) - 1) >> s.page_shift;
    for (int i = 0; i < used; ++i) pages[size_t(b) * stride + i] = i % 5;
  }
  if (bad >= 0) pages[size_t(bad) * stride + bad_page] = 5;
  std::vector<uint32_t> status(count, 0), flags(count, 0xffffffff);
  std::vector<Job> jobs(s.max_jobs);
  std::vector<Unit> units(s.max_units);
  std::vector<WorkHeader> header(1);

  AttentionLaunch launch;
  SpecAttentionParams& call = launch.call;
  call.step.num_requests = count, call.step.num_rows = cu_rows.back();
  call.step.cu_rows = cu_rows.data(), call.step.kv_len = lengths.kv_len.data();
  call.step.is_tree = lengths.tree.data(), call.step.page_table = pages.data();
  call.step.page_table_stride = stride;
  call.cache.num_pages = 5, call.cache.num_kv_heads = s.kv_heads;
  call.cache.page_size = 1 << s.page_shift;
  call.sliding_window = s.window, call.sink_tokens = s.sinks, call.max_depth = s.max_depth,
  call.exact = s.exact;
  call.exec.status = status.data();
  launch.work = {header.data(),      jobs.data(),  units.data(), job_begin.data(),
                 block_begin.data(), flags.data(), nullptr,      nullptr,
                 s.max_jobs,         s.max_units,  s.max_slots,  s.num_blocks};
  launch.group = s.group, launch.page_shift = s.page_shift;
  launch.row_tile = s.row_tile, launch.granule = kGranule16Bit;

  simt::conceal();
  const auto expose = [](auto& x, const char* name, bool writable) {
    simt::expose(x.data(), x.size() * sizeof(x[0]), name, writable);
  };
  expose(cu_rows, "cu_rows", false), expose(lengths.kv_len, "kv_len", false);
  expose(lengths.tree, "is_tree", false), expose(pages, "pages", false);
  expose(status, "status", true), expose(flags, "flags", true), expose(jobs, "jobs", true);
  expose(units, "units", true), expose(header, "header", true);
  expose(job_begin, "job_begin", true), expose(block_begin, "block_begin", true);
  try {
    launch_plan(launch);
  } catch (const std::exception& e) {
    return e.what();
  }

  const auto at = [](const char* what, int i) { return what + (" at " + std::to_string(i)); };
  int job = 0, unit = 0, slot = 0;
  int64_t total = 0, dearest_chunk = 0;
  std::vector<int64_t> load(s.num_blocks, 0);
  for (int b = 0; b < count; ++b) {
    if (flags[b] != refused[b] || status[b] != refused[b]) return at("flags", b);
    if (job_begin[b] != job) return at("job_begin", b);
    const int n = refused[b] ? 0 : lengths.rows[b] * s.group;
    for (int g = 0; g < s.kv_heads; ++g) {
      for (int first = 0; first < n; first += s.row_tile, ++job) {
        const Job& j = jobs[job];
        if (j.request != b || j.kv_head != g || j.row_block != first / s.row_tile) {
          return at("job", job);
        }
        // The keys that the rows of the block see, one row and key at a time.
        int begin = INT32_MAX, end = 0;
        const int last = std::min(first + s.row_tile, n) - 1;
        for (int token = first / s.group; token <= last / s.group; ++token) {
          const bool tree = lengths.tree[b];
          const int depth = tree ? std::min(s.max_depth, lengths.rows[b] - 1) : token;
          for (int d : tree ? std::vector<int>{0, depth} : std::vector<int>{token}) {
            const int p = lengths.kv_len[b] + d;
            const int oldest = s.window > 0 ? std::max(0, p + 1 - s.window) : 0;
            const int lo = oldest > s.sinks ? oldest : 0;
            const int hi = !s.exact ? (tree ? lengths.kv_len[b] + lengths.rows[b] : p + 1)
                                    : std::max(0, p - s.max_depth) / 16 * 16;
            begin = std::min(begin, lo), end = std::max(end, hi);
          }
        }
        // Sink tokens that lie apart, and what is between.
        int hole_begin = 0, hole_end = 0;
        const int sink_end = begin > 0 ? std::min(s.sinks, end) : 0;
        if (begin >= end) {
          begin = 0, end = sink_end;
        } else if (sink_end > 0) {
          hole_begin = sink_end, hole_end = begin, begin = 0;
        }
        if (j.first_key != begin || j.end_key != end) return at("keys of job", job);
        if (j.hole_begin != hole_begin || j.hole_end != hole_end) return at("hole of job", job);
        const bool apart = hole_end > 0 && chunk_of(hole_end) > chunk_of(hole_begin - 1);
        const int sink_chunks = apart ? chunk_of(hole_begin - 1) + 1 : 0;
        if (j.first_slot != slot) return at("first_slot", job);
        if (end == 0) {
          if (j.num_slots != 0 || j.first_chunk != j.end_chunk) return at("empty job", job);
          continue;
        }
        int chunk = chunk_of(begin);
        while (chunk_begin(chunk) < end) {
          if (unit >= header[0].num_units) return at("missing unit", unit);
          const Unit& u = units[unit];
          if (u.job != job || u.first_chunk != chunk || u.end_chunk <= chunk || u.slot != slot) {
            return at("unit", unit);
          }
          if (u.block < 0 || u.block >= s.num_blocks || unit < block_begin[u.block] ||
              unit >= block_begin[u.block + 1]) {
            return at("block of unit", unit);
          }
          const bool first_unit = chunk == chunk_of(begin);
          const bool after = !first_unit && units[unit - 1].states == UnitStates::kHandsOn;
          if (u.end_chunk == sink_chunks && first_unit && units[unit + 1].block == u.block) {
            if (u.states != UnitStates::kHandsOn) return at("unit does not hand on", unit);
          } else if (first_unit || after) {
            if (u.states != UnitStates::kOne) return at("unit leaves not one state", unit);
            ++slot;
          } else {
            if (u.states != UnitStates::kOnePerChunk) return at("unit leaves one state", unit);
            slot += u.end_chunk - u.first_chunk;
          }
          if (apart && chunk < sink_chunks && u.end_chunk > sink_chunks) return at("gap", unit);
          for (; chunk < u.end_chunk; ++chunk) {
            int from = std::max(chunk_begin(chunk), begin);
            int to = std::min(chunk_begin(chunk + 1), end);
            if (apart && chunk < sink_chunks) to = std::min(to, hole_begin);
            if (apart && chunk >= sink_chunks) from = std::max(from, hole_end);
            const int blocks = (to + 63) / 64 - from / 64;
            load[u.block] += blocks;
            total += blocks;
            dearest_chunk = std::max<int64_t>(dearest_chunk, blocks);
          }
          if (apart && chunk == sink_chunks) chunk = chunk_of(hole_end);
          ++unit;
        }
        if (j.num_slots != slot - j.first_slot) return at("num_slots", job);
        if (chunk != j.end_chunk) return at("end_chunk", job);
      }
    }
  }
  if (job_begin[count] != job || header[0].num_jobs != job) return "number of jobs";
  if (header[0].num_units != unit || header[0].num_slots != slot) return "number of units or slots";
  if (block_begin[0] != 0 || block_begin[s.num_blocks] != unit) return "block_begin";
  if (slot > s.max_slots || unit > s.max_units) return "more than fits";
  if (header[0].whole_jobs == 0) {
    const int64_t share = total / s.num_blocks + 1;
    for (int i = 0; i < s.num_blocks; ++i) {
      // A job's constant cost shifts shares by at most one key block per job.
      if (load[i] > 2 * share + dearest_chunk) return at("overloaded block", i);
    }
  }
  return "";
}

static void expect(const char* name, const std::string& fault) {
  printf("%-6s %-40s %s\n", fault.empty() ? "ok" : "FAILED", name, fault.c_str());
  fflush(stdout);
  failures += !fault.empty();
}

int main() {
  std::mt19937 rng(1);
  const auto lengths = [&](int count, int max_kv, int max_rows) {
    Lengths l;
    for (int b = 0; b < count; ++b) {
      l.tree.push_back(rng() % 2);
      l.kv_len.push_back(rng() % 5 == 0 ? 0 : int(rng() % max_kv));
      l.rows.push_back(rng() % 7 == 0
                           ? 0
                           : 1 + int(rng() % (l.tree.back() ? std::min(max_rows, 128) : max_rows)));
    }
    return l;
  };
  const auto fine = [](const Lengths& l) { return std::vector<uint32_t>(l.kv_len.size(), 0); };
  for (int seed = 0; seed < 4; ++seed) {
    simt::seed(seed);
    Lengths l = lengths(9, 3000, 40);
    expect("mixed", check({}, l, fine(l)));
    expect("many blocks", check({.num_blocks = 264}, l, fine(l)));
    expect("window", check({.group = 3, .row_tile = 16, .window = 500}, l, fine(l)));
    expect("sink tokens",
           check({.group = 3, .row_tile = 16, .window = 500, .sinks = 5}, l, fine(l)));
    expect("sink tokens of several chunks",
           check({.row_tile = 16, .window = 300, .sinks = 700, .num_blocks = 60}, l, fine(l)));
    expect("sink tokens, no window to speak of",
           check({.window = 1, .sinks = 64, .exact = seed % 2 == 0}, l, fine(l)));
    expect("fast", check({.row_tile = 128, .window = 70, .exact = false}, l, fine(l)));
    expect("no room to cut", check({.num_blocks = 200, .max_slots = 300}, l, fine(l)));
  }
  Lengths l = lengths(512, 4000, 12);
  expect("512 requests", check({.group = 1, .kv_heads = 3, .num_blocks = 132}, l, fine(l)));
  l = {{0, 120000}, {3000, 2}, {0, 0}};
  expect("prefill beside a long context", check({.row_tile = 128, .num_blocks = 50}, l, fine(l)));
  l = {{5, 7}, {0, 0}, {0, 1}};
  expect("no rows at all", check({}, l, fine(l)));

  l = {{100, -1, 50, 300, 40, 77}, {3, 2, 129, 4, 4, 5}, {1, 0, 1, 1, 0, 0}};
  std::vector<uint32_t> refused(6, 0);
  refused[1] = kStatusBadLength, refused[2] = kStatusBadTree;
  expect("negative length, too large a tree", check({}, l, refused));
  refused[3] = kStatusBadPage;
  expect("bad page in the tail", check({}, l, refused, 3, 302 / 16));
  refused[3] = 0;
  expect("bad page past the end", check({}, l, refused, 5, 90 / 16 + 1));
  l = {{2000000000, 30}, {5, 5}, {0, 0}};
  expect("length beyond the page table", check({}, l, {kStatusBadLength, 0}));
  l = {{30, 30, 30}, {5, 200, 1}, {0, 0, 0}};
  expect("more jobs than fit",
         check({.max_jobs = 6, .max_units = 6}, l, {0, kStatusBadLength, kStatusBadLength}));
  return failures;
}

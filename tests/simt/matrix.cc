// Matrix products of a warp (mma) and of a warpgroup (wgmma), from the PTX ISA's fragment tables.
// Sums are exact, then truncated to fp32, as tensor cores do within an ulp or two.
//
// wgmma: D is NaN from issue to wait, A in registers must not change; the operands in shared memory
// are read, and the product is computed, at the wait. Every warp does its 16 rows by itself, so
// that an operand which one warp has not waited for is seen as such.
#include <algorithm>
#include <deque>
#include <vector>

#include "simt/async.h"

namespace simt {
namespace {

// ---- elements -----------------------------------------------------------------------------------
constexpr unsigned kMaxK = 32, kMaxN = 256;

const float* half_values() {
  static const std::vector<float> values = [] {
    std::vector<float> v(1 << 16);
    for (unsigned i = 0; i < v.size(); i++) v[i] = __half2float(std::bit_cast<__half>(uint16_t(i)));
    return v;
  }();
  return values.data();
}
const float* e4m3_values() {
  static const std::vector<float> values = [] {
    std::vector<float> v(1 << 8);
    for (unsigned i = 0; i < v.size(); i++) v[i] = float(std::bit_cast<__nv_fp8_e4m3>(uint8_t(i)));
    return v;
  }();
  return values.data();
}

// Bytes to values; count is of elements.
void decode(Element type, const void* bytes, unsigned count, float* out) {
  const auto* wide = static_cast<const uint16_t*>(bytes);
  if (type == Element::bf16) {
    for (unsigned i = 0; i < count; i++) out[i] = std::bit_cast<float>(uint32_t(wide[i]) << 16);
  } else if (type == Element::f16) {
    const float* values = half_values();
    for (unsigned i = 0; i < count; i++) out[i] = values[wide[i]];
  } else {
    const float* values = e4m3_values();
    for (unsigned i = 0; i < count; i++) out[i] = values[static_cast<const uint8_t*>(bytes)[i]];
  }
}
unsigned per_register(Element type) { return type == Element::e4m3 ? 4 : 2; }

float truncated(double x) {
  return float(std::bit_cast<double>(std::bit_cast<uint64_t>(x) & ~((1ull << 29) - 1)));
}

// With g = lane / 4, t = lane % 4 and p elements in a register, of which this is number h:
//   A (16 x 8p): register 0 row g, 1 row g+8, 2 row g, 3 row g+8; column pt + h, in 2 and 3 + 4p
//   B (8p x 8):  register 0 row pt + h, 1 the same + 4p; column g
//   D (16 x n):  value j is row g + j / 2 % 2 * 8, column j / 4 * 8 + 2t + j % 2
void decode_a(Element type, unsigned lane, const uint32_t (&a)[4], float (*rows)[kMaxK]) {
  const unsigned p = per_register(type);
  for (unsigned r = 0; r < 4; r++) {
    decode(type, &a[r], p, &rows[lane / 4 + r % 2 * 8][lane % 4 * p + r / 2 * 4 * p]);
  }
}
unsigned d_row(unsigned lane, unsigned j) { return lane / 4 + j / 2 % 2 * 8; }
unsigned d_column(unsigned lane, unsigned j) { return j / 4 * 8 + lane % 4 * 2 + j % 2; }

// ---- mma ----------------------------------------------------------------------------------------
struct MmaLane {
  uint32_t a[4], b[2];
  float c[4];
};

template <Element kType>
void mma_warp(void* p) {
  Slots<MmaLane> lanes{static_cast<char*>(p)};
  const unsigned per = per_register(kType), depth = 8 * per;
  float a[16][kMaxK], b[kMaxK][8], values[4];
  double sums[16][8];
  for (unsigned l = 0; l < 32; l++) {
    decode_a(kType, l, lanes[l].a, a);
    for (unsigned r = 0; r < 2; r++) {
      decode(kType, &lanes[l].b[r], per, values);
      for (unsigned h = 0; h < per; h++) b[l % 4 * per + r * 4 * per + h][l / 4] = values[h];
    }
    for (unsigned j = 0; j < 4; j++) sums[d_row(l, j)][d_column(l, j)] = lanes[l].c[j];
  }
  for (unsigned m = 0; m < 16; m++) {
    for (unsigned k = 0; k < depth; k++) {
      for (unsigned n = 0; n < 8; n++) sums[m][n] += double(a[m][k]) * b[k][n];
    }
  }
  for (unsigned l = 0; l < 32; l++) {
    for (unsigned j = 0; j < 4; j++) {
      lanes[l].c[j] = truncated(sums[d_row(l, j)][d_column(l, j)]);
    }
  }
  stats().mma++;
}

// ---- operands in shared memory ------------------------------------------------------------------
struct Operand {
  unsigned start, lead, stride, span;
  bool k_contiguous;

  // Offset of the 16 bytes that hold element (row, chunk): of a row m or n and a chunk of k, or of
  // a row k and a chunk of n.
  unsigned offset(unsigned row, unsigned chunk) const {
    unsigned linear = start;
    if (k_contiguous) {
      linear += row / 8 * stride + row % 8 * (span ? span : 16) + chunk * (span ? 16 : lead);
    } else if (span) {
      linear +=
          chunk / (span / 16) * lead + chunk % (span / 16) * 16 + row / 8 * stride + row % 8 * span;
    } else {
      linear += chunk * stride + row / 8 * lead + row % 8 * 16;
    }
    return unsigned(swizzled(linear, span));
  }
  const char* at(unsigned row, unsigned chunk) const {
    const unsigned o = offset(row, chunk);
    if (o + 16 > dynamic_shared_bytes()) fail("wgmma: an operand reaches beyond shared memory");
    return static_cast<const char*>(dynamic_shared()) + o;
  }
};

// rows: of m or n. Rejects what no layout in shared memory could mean, and what is not modelled.
Operand decode_descriptor(uint64_t d, bool k_contiguous, unsigned rows, const char* name) {
  const auto reject = [&](const char* why) {
    fail(std::string("wgmma: descriptor of ") + name + ": " + why);
  };
  constexpr unsigned kSpans[4] = {0, 128, 64, 32};
  Operand o;
  o.span = kSpans[d >> 62], o.k_contiguous = k_contiguous;
  o.start = unsigned(d & 0x3fff) << 4;
  o.lead = unsigned(d >> 16 & 0x3fff) << 4, o.stride = unsigned(d >> 32 & 0x3fff) << 4;
  if (d & ~0xc0003fff3fff3fffull) reject("reserved bits, or a base offset, are set");
  if (o.start < kSharedBase) reject("the address is not one of dynamic shared memory");
  o.start -= kSharedBase;
  const unsigned group = 8 * o.span;
  if (!o.span) {
    if (!o.lead || !o.stride) reject("without swizzle both offsets count");
  } else if (k_contiguous) {
    if (o.start % group >= o.span) reject("it does not start in the first line of a swizzle group");
    if (o.start % o.span + 32 > o.span) reject("it runs over the end of a swizzled line");
    if (o.stride % group || (!o.stride && rows > 8)) reject("stride between groups of 8 rows");
  } else {
    if (o.start % group) reject("it does not start at a swizzle group");
    if (o.stride % group || !o.stride) reject("stride between groups of 8 k");
    if (rows * 2 > o.span && (o.lead % group || !o.lead)) reject("offset between spans of n");
  }
  return o;
}

// ---- wgmma --------------------------------------------------------------------------------------
struct Issued {
  Wgmma op;
  Site site;
  unsigned group;
  float* d[32];
  uint32_t fragment[32][4];
  const uint32_t* source[32];  // the registers that A was in, which it may read until the wait
  std::vector<float> initial;  // D of each lane; empty if it starts from zero
};
struct Warp {
  std::deque<Issued> pending;
  unsigned issued = 0, committed = 0;
  bool fenced = false;
  std::vector<uint32_t> steps;   // of the actor, at the end of each group
  std::vector<unsigned> parked;  // ranks that wait for this warp to commit
};
struct Warpgroup {
  std::vector<std::pair<Wgmma, Site>> log;  // every instruction so far, as the first warp issued it
};
std::vector<Warp> warps;
std::vector<Warpgroup> warpgroups;
Site issue_site;

struct WgmmaLane {
  Wgmma op;
  float* d;
  const uint32_t* source;
  uint32_t fragment[4];
};

bool same(const Wgmma& x, const Wgmma& y) {
  return x.type == y.type && x.n == y.n && x.trans_b == y.trans_b && x.accumulate == y.accumulate &&
         x.a_in_registers == y.a_in_registers && x.a == y.a && x.b == y.b;
}
Operand operand_a(const Wgmma& op) { return decode_descriptor(op.a, true, 64, "A"); }
Operand operand_b(const Wgmma& op) { return decode_descriptor(op.b, !op.trans_b, op.n, "B"); }
unsigned depth(const Wgmma& op) { return 8 * per_register(op.type); }

// Calls f(row, chunk) for all 16 bytes of B.
template <class F>
void for_each_b(const Wgmma& op, F f) {
  const unsigned rows = op.trans_b ? depth(op) : op.n, chunks = op.trans_b ? op.n / 8 : 2;
  for (unsigned r = 0; r < rows; r++) {
    for (unsigned c = 0; c < chunks; c++) f(r, c);
  }
}

void announce_reads(const Wgmma& op, unsigned warp) {
  const unsigned actor = check::warp_actor(warp);
  for (unsigned l = 0; l < 32; l++) check::follow(actor, warp * 32 + l);
  const auto read = [&](const char* p) {
    check::access_as(actor, p, 16, false, check::plain, issue_site);
  };
  if (!op.a_in_registers) {
    const Operand a = operand_a(op);
    for (unsigned r = 0; r < 16; r++) {
      read(a.at(warp % 4 * 16 + r, 0)), read(a.at(warp % 4 * 16 + r, 1));
    }
  }
  const Operand b = operand_b(op);
  for_each_b(op, [&](unsigned r, unsigned c) { read(b.at(r, c)); });
}

void issue(void* p) {
  Slots<WgmmaLane> lanes{static_cast<char*>(p)};
  const unsigned index = rank() / 32;
  Warp& w = warps[index];
  const Wgmma& op = lanes[0].op;
  const std::string where = "wgmma " + at(issue_site) + ": ";
  if ((index / 4 + 1) * 4 > warps.size()) fail(where + "no full warpgroup");
  if (!w.fenced) fail(where + "no wgmma_fence() since the last commit or wait");
  for (unsigned l = 1; l < 32; l++) {
    if (!same(op, lanes[l].op)) fail(where + "operands differ within the warp");
  }
  auto& log = warpgroups[index / 4].log;
  if (w.issued == log.size()) log.push_back({op, issue_site});
  const auto& [first, first_site] = log[w.issued++];
  if (!same(op, first)) {
    fail(where + "the warps of the warpgroup issue different ones, see " + at(first_site));
  }
  announce_reads(op, index);
  Issued& i = w.pending.emplace_back();
  i.op = op, i.site = issue_site, i.group = w.committed;
  const bool chained = std::any_of(w.pending.begin(), w.pending.end() - 1,
                                   [&](const Issued& before) { return before.d[0] == lanes[0].d; });
  for (unsigned l = 0; l < 32; l++) {
    i.d[l] = lanes[l].d, i.source[l] = lanes[l].source;
    memcpy(i.fragment[l], lanes[l].fragment, sizeof i.fragment[l]);
    if (op.accumulate && !chained) i.initial.insert(i.initial.end(), i.d[l], i.d[l] + op.n / 2);
    memset(i.d[l], 0xff, op.n / 2 * sizeof(float));
  }
  stats().wgmma += index % 4 == 0;
}

void compute(Warp& w, unsigned index) {
  static float a[16][kMaxK], b[kMaxK][kMaxN];
  static double sums[16][kMaxN];
  const Issued i = std::move(w.pending.front());
  w.pending.pop_front();
  const Wgmma& op = i.op;
  const unsigned per_chunk = 8 * per_register(op.type) / 2, half = op.n / 2, k_count = depth(op);
  for (unsigned l = 0; l < 32; l++) {
    if (op.a_in_registers) {
      if (memcmp(i.source[l], i.fragment[l], sizeof i.fragment[l]) != 0) {
        fail("wgmma " + at(i.site) + ": A was changed in its registers before wgmma_wait");
      }
      decode_a(op.type, l, i.fragment[l], a);
    }
    for (unsigned j = 0; j < half; j++) {
      sums[d_row(l, j)][d_column(l, j)] = i.initial.empty() ? 0 : i.initial[l * half + j];
    }
  }
  if (!op.a_in_registers) {
    const Operand o = operand_a(op);
    for (unsigned r = 0; r < 16; r++) {
      for (unsigned c = 0; c < 2; c++) {
        decode(op.type, o.at(index % 4 * 16 + r, c), per_chunk, &a[r][c * per_chunk]);
      }
    }
  }
  const Operand o = operand_b(op);
  for_each_b(op, [&](unsigned r, unsigned c) {
    if (op.trans_b) {
      decode(op.type, o.at(r, c), 8, &b[r][c * 8]);
      return;
    }
    float values[16];
    decode(op.type, o.at(r, c), per_chunk, values);
    for (unsigned e = 0; e < per_chunk; e++) b[c * per_chunk + e][r] = values[e];
  });
  for (unsigned m = 0; m < 16; m++) {
    for (unsigned k = 0; k < k_count; k++) {
      const double x = a[m][k];
      for (unsigned n = 0; n < op.n; n++) sums[m][n] += x * b[k][n];
    }
  }
  // The next one into the same registers goes on from here, without the thread seeing it.
  const auto next = std::find_if(w.pending.begin(), w.pending.end(),
                                 [&](const Issued& later) { return later.d[0] == i.d[0]; });
  if (next != w.pending.end() && !next->op.accumulate) return;
  for (unsigned l = 0; l < 32; l++) {
    float result[kMaxN / 2];
    for (unsigned j = 0; j < half; j++) {
      result[j] = truncated(sums[d_row(l, j)][d_column(l, j)]);
      uint32_t bits;
      memcpy(&bits, i.d[l] + j, sizeof bits);
      if (bits != ~0u) fail("wgmma " + at(i.site) + ": D was touched before wgmma_wait");
    }
    if (next != w.pending.end()) {
      next->initial.insert(next->initial.end(), result, result + half);
    } else {
      memcpy(i.d[l], result, half * sizeof(float));
    }
  }
}

}  // namespace

void mma(Element type, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site here) {
  const auto leader = type == Element::bf16 ? mma_warp<Element::bf16> : mma_warp<Element::f16>;
  const MmaLane mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  memcpy(c, gather(~0u, mine, "mma", here, leader)[lane()].c, sizeof c);
}

void wgmma(const Wgmma& op, float* d, const uint32_t* fragment, Site here) {
  issue_site = here;
  WgmmaLane mine{op, d, fragment, {}};
  if (op.a_in_registers) memcpy(mine.fragment, fragment, sizeof mine.fragment);
  gather(~0u, mine, "wgmma", here, issue);
}
void wgmma_fence(Site here) {
  gather(~0u, 0, "wgmma_fence", here, [](void*) { warps[rank() / 32].fenced = true; });
}
void wgmma_commit(Site here) {
  gather(~0u, 0, "wgmma_commit", here, [](void*) {
    Warp& w = warps[rank() / 32];
    w.committed++, w.fenced = false;
    w.steps.push_back(check::step(check::warp_actor(rank() / 32)));
    for (unsigned r : w.parked) unpark(r);
    w.parked.clear();
  });
}
void wgmma_wait(unsigned pending_groups, Site here) {
  static unsigned leave;
  const unsigned index = rank() / 32, first = index / 4 * 4;
  const unsigned committed = warps[index].committed;
  const unsigned target = committed > pending_groups ? committed - pending_groups : 0;
  if (Quiet quiet; true) {
    // A product is one of four warps: it ends when all of them have issued it.
    for (unsigned i = first; i < std::min<size_t>(first + 4, warps.size()); i++) {
      while (warps[i].committed < target) {
        warps[i].parked.push_back(rank());
        park("wgmma_wait", here);
      }
    }
  }
  leave = target;
  gather(~0u, 0, "wgmma_wait", here, [](void*) {
    const unsigned index = rank() / 32;
    Warp& w = warps[index];
    w.fenced = false;
    while (!w.pending.empty() && w.pending.front().group < leave) compute(w, index);
    if (leave == w.committed && !w.pending.empty()) {
      fail("wgmma " + at(w.pending.front().site) + ": waited for, but never committed");
    }
  });
  Quiet quiet;
  for (unsigned i = first; target && i < first + 4; i++) {
    check::learn(rank(), check::warp_actor(i), warps[i].steps[target - 1]);
  }
}

void wgmma_begin_block(unsigned threads) {
  warps.assign((threads + 31) / 32, {});
  warpgroups.assign((threads + 127) / 128, {});
}
std::string wgmma_unfinished() {
  for (const Warp& w : warps) {
    if (!w.pending.empty()) {
      return "wgmma " + at(w.pending.front().site) + ": the block ended without waiting for it";
    }
  }
  return {};
}

}  // namespace simt

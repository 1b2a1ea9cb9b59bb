// Products of a warpgroup. D is NaN from the issue to the wait; operands in shared memory are read,
// and the product is taken, at the wait. Each warp does its 16 rows by itself, so that an operand
// which one warp has not waited for is seen as such.
#include <algorithm>

#include "ptx/matrix.h"
#include "ptx/ops.h"
#include "ptx/tensor_map.h"

namespace ptx {
namespace {

constexpr unsigned kMaxWidth = 256;
struct Shape {  // Opcode::detail
  Element type;
  std::uint8_t a_in_registers;
  std::uint16_t n;
};
Shape shape_of(const Op& o) {
  Shape s;
  memcpy(&s, &o.detail, sizeof s);
  return s;
}
unsigned depth_of(Element type) { return type == Element::e4m3 ? 32 : 16; }

// ---- operands in shared memory ------------------------------------------------------------------
struct Matrix {
  unsigned start, lead, stride, span;
  bool k_contiguous;

  // The address of 16 bytes: of row m or n and the number of a chunk of k, or of row k and a chunk
  // of n. Rows lie in groups of 8.
  unsigned chunk(unsigned row, unsigned number) const {
    unsigned at = start + row % 8 * (span ? span : 16);
    if (k_contiguous) {
      at += row / 8 * stride + number * (span ? 16 : lead);
    } else if (span) {
      const unsigned per_span = span / 16;
      at += row / 8 * stride + number / per_span * lead + number % per_span * 16;
    } else {
      at += row / 8 * lead + number * stride;
    }
    return unsigned(swizzled(at, span));
  }
};

// rows: of m or n. What no layout could mean is an error, and so is a base offset.
Matrix matrix_of(std::uint64_t d, bool k_contiguous, unsigned rows) {
  const auto field = [&](unsigned bit) { return unsigned(d >> bit & 0x3fff) * 16; };
  static constexpr unsigned kSpans[4] = {0, 128, 64, 32};
  const Matrix m{field(0), field(16), field(32), kSpans[d >> 62], k_contiguous};
  if (d & ~0xc0003fff3fff3fffull) throw Error("descriptor: bits are set that mean nothing here");
  if (m.start < kSharedBase) throw Error("descriptor: no address of shared memory");
  const unsigned group = 8 * m.span;
  if (m.span == 0) {
    if (!m.lead || !m.stride) throw Error("descriptor: without swizzle both offsets count");
  } else if (k_contiguous) {
    if (m.start % group >= m.span || m.start % m.span + 32 > m.span) {
      throw Error("descriptor: does not start in the first line of a swizzle group");
    }
    if (m.stride % group || (!m.stride && rows > 8)) throw Error("descriptor: stride of 8 rows");
  } else {
    if (m.start % group) throw Error("descriptor: does not start at a swizzle group");
    if (m.stride % group || !m.stride) throw Error("descriptor: stride of 8 k");
    if (rows * 2 > m.span && (m.lead % group || !m.lead))
      throw Error("descriptor: offset of spans");
  }
  return m;
}

// 16 bytes as numbers.
unsigned read_chunk(Block& b, Element type, unsigned address, float* out) {
  const char* bytes = b.shared_at(address, 16);
  const unsigned size = type == Element::e4m3 ? 1 : 2;
  for (unsigned i = 0; i < 16 / size; i++) {
    unsigned bits = 0;
    memcpy(&bits, bytes + i * size, size);
    out[i] = widened(type, bits);
  }
  return 16 / size;
}
void read_a(Block& b, Element type, std::uint64_t descriptor, unsigned first_row,
            float (*a)[kMaxDepth]) {
  const Matrix m = matrix_of(descriptor, true, 64);
  for (unsigned r = 0; r < 16; r++) {
    const unsigned per = read_chunk(b, type, m.chunk(first_row + r, 0), a[r]);
    read_chunk(b, type, m.chunk(first_row + r, 1), a[r] + per);
  }
}
void read_b(Block& b, Element type, std::uint64_t descriptor, unsigned n, bool n_contiguous,
            float (*out)[kMaxWidth]) {
  const Matrix m = matrix_of(descriptor, !n_contiguous, n);
  const unsigned lines = n_contiguous ? depth_of(type) : n, chunks = n_contiguous ? n / 8 : 2;
  float values[16];
  for (unsigned line = 0; line < lines; line++) {
    for (unsigned c = 0; c < chunks; c++) {
      const unsigned per = read_chunk(b, type, m.chunk(line, c), values);
      for (unsigned i = 0; i < per; i++) {
        (n_contiguous ? out[line][c * per + i] : out[c * per + i][line]) = values[i];
      }
    }
  }
}

// ---- issue --------------------------------------------------------------------------------------
// Operands: D, A (a descriptor or four registers), B, whether D counts; constants: the signs of A
// and B, and for 16 bits whether A (if in memory) and B are stored the other way.
void issue(Warp& w, const Op& o) {
  if (w.active != w.now.mask) throw Error("lanes under a guard at an .aligned instruction");
  if (!w.converged()) return;
  const Shape s = shape_of(o);
  const unsigned half = s.n / 2, at_b = half + (s.a_in_registers ? 4 : 1);
  if (w.all != ~0u || (w.index / 4 + 1) * 4 > w.block->warps.size()) {
    throw Error("no full warpgroup");
  }
  if (!w.products.fenced) throw Error("no wgmma.fence since the last commit or wait");
  const auto same = [&](unsigned i) {
    const auto* values = w.at<std::uint64_t>(o.x[i]);
    for (unsigned l = 1; l < 32; l++) {
      if (values[l] != values[0]) throw Error("operands differ within the warp");
    }
    return values[0];
  };
  const std::uint32_t scale = w.predicate(o, at_b + 1);
  if (scale != 0 && scale != ~0u) throw Error("operands differ within the warp");
  if (!s.a_in_registers && s.type != Element::e4m3 && o.constants[2] != 0) {
    throw Error("A stored with m contiguous: not known to this interpreter");
  }
  for (unsigned i = 0; i < 2; i++) {
    if (std::int64_t(o.constants[i]) != 1 && std::int64_t(o.constants[i]) != -1) {
      throw Error("the sign of an operand is 1 or -1");
    }
  }
  Product p = {};
  p.op = &o, p.a = s.a_in_registers ? 0 : same(half), p.b = same(at_b);
  p.accumulate = scale != 0, p.group = w.products.committed;
  for (unsigned i = 0; s.a_in_registers && i < 4; i++) {
    memcpy(p.fragment[i], w.at<std::uint32_t>(o.x[half + i]), sizeof p.fragment[i]);
  }
  std::vector<std::string>& log = w.block->products[w.index / 4];
  const std::string mine = w.block->program->where(o) + ": A " + hex(p.a) + ", B " + hex(p.b);
  if (w.products.issued == log.size()) log.push_back(mine);
  if (log[w.products.issued++] != mine) {
    throw Error("the warps of the warpgroup issue different ones: " + mine + "; " +
                log[w.products.issued - 1]);
  }
  const bool chained = std::any_of(w.products.pending.begin(), w.products.pending.end(),
                                   [&](const Product& q) { return q.op->x[0] == o.x[0]; });
  for (unsigned i = 0; i < half; i++) {
    float* d = w.at<float>(o.x[i]);
    if (p.accumulate && !chained) p.initial.insert(p.initial.end(), d, d + 32);
    memset(static_cast<void*>(d), 0xff, 32 * sizeof(float));
  }
  w.products.pending.push_back(std::move(p));
}

// ---- wait ---------------------------------------------------------------------------------------
void compute(Warp& w) {
  static float a[16][kMaxDepth], b[kMaxDepth][kMaxWidth];
  static double sums[16][kMaxWidth];
  const Product p = std::move(w.products.pending.front());
  w.products.pending.pop_front();
  const Op& o = *p.op;
  const Shape s = shape_of(o);
  const unsigned half = s.n / 2;
  const bool narrow = s.type == Element::e4m3;
  const bool n_contiguous = !narrow && o.constants[s.a_in_registers ? 2 : 3] != 0;
  if (s.a_in_registers) {
    const std::uint32_t* const registers[4] = {p.fragment[0], p.fragment[1], p.fragment[2],
                                               p.fragment[3]};
    fragment_a(s.type, registers, a);
  } else {
    read_a(*w.block, s.type, p.a, w.index % 4 * 16, a);
  }
  read_b(*w.block, s.type, p.b, s.n, n_contiguous, b);
  const double sign = double(std::int64_t(o.constants[0])) * double(std::int64_t(o.constants[1]));
  for (unsigned i = 0; i < half; i++) {
    for (unsigned l = 0; l < 32; l++) {
      sums[d_row(l, i)][d_column(l, i)] = p.initial.empty() ? 0 : p.initial[i * 32 + l];
    }
  }
  for (unsigned m = 0; m < 16; m++) {
    for (unsigned k = 0; k < depth_of(s.type); k++) {
      const double x = sign * a[m][k];
      for (unsigned n = 0; n < s.n; n++) sums[m][n] += x * b[k][n];
    }
  }
  // The next one into the same registers goes on from here; no thread has seen this sum.
  const auto next = std::find_if(w.products.pending.begin(), w.products.pending.end(),
                                 [&](const Product& q) { return q.op->x[0] == o.x[0]; });
  const bool goes_on = next != w.products.pending.end();
  if (goes_on && !next->accumulate) return;
  for (unsigned i = 0; i < half; i++) {
    float* d = w.at<float>(o.x[i]);
    for (unsigned l = 0; l < 32; l++) {
      const float result = cut(sums[d_row(l, i)][d_column(l, i)]);
      if (std::bit_cast<std::uint32_t>(d[l]) != ~0u) throw Error("D was written before the wait");
      if (goes_on) {
        next->initial.push_back(result);
      } else {
        d[l] = result;
      }
    }
  }
}

bool aligned(Warp& w) {
  if (w.active != w.now.mask) throw Error("lanes under a guard at an .aligned instruction");
  return w.converged();
}
void fence(Warp& w, const Op&) {
  if (aligned(w)) w.products.fenced = true;
}
void commit(Warp& w, const Op&) {
  if (!aligned(w)) return;
  w.products.committed++, w.products.fenced = false;
}
void wait(Warp& w, const Op& o) {
  if (!aligned(w)) return;
  auto& products = w.products;
  products.fenced = false;
  const auto pending = unsigned(o.constants[0]);
  const unsigned until = products.committed > pending ? products.committed - pending : 0;
  while (!products.pending.empty() && products.pending.front().group < until) compute(w);
  if (until == products.committed && !products.pending.empty()) {
    throw Error("waits for a wgmma that was never committed");
  }
}

}  // namespace

void add_warpgroup_products(Table& t) {
  static constexpr struct {
    Element type;
    const char* name;
  } kTypes[] = {{Element::bf16, "k16.f32.bf16.bf16"},
                {Element::f16, "k16.f32.f16.f16"},
                {Element::e4m3, "k32.f32.e4m3.e4m3"}};
  for (const auto& [type, name] : kTypes) {
    for (unsigned n = 8; n <= kMaxWidth; n += 8) {
      const std::string full = "wgmma.mma_async.sync.aligned.m64n" + std::to_string(n) + name;
      const std::string d(n / 2, 'w');
      const bool narrow = type == Element::e4m3;
      for (const bool in_registers : {false, true}) {
        const Shape s{type, in_registers, std::uint16_t(n)};
        Opcode code{issue, d + (in_registers ? "wwww" : "x") + "xpnn"};
        if (!narrow) code.signature += in_registers ? "n" : "nn";
        memcpy(&code.detail, &s, sizeof s);
        put(t, full + (in_registers ? " registers" : ""), code);
      }
    }
  }
  put(t, "wgmma.fence.sync.aligned", {fence, ""});
  put(t, "wgmma.commit_group.sync.aligned", {commit, ""});
  put(t, "wgmma.wait_group.sync.aligned", {wait, "n"});
}

}  // namespace ptx

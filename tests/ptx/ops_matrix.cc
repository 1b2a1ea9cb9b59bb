// ldmatrix and mma, by the fragment tables of the PTX ISA. A sum is taken exactly (in double, in
// the order of k) and cut to fp32, as the emulator does: tensor cores are within an ulp or two of
// it.
#include "ptx/matrix.h"
#include "ptx/ops.h"

namespace ptx {
namespace {

void all_lanes(Warp& w) {
  if (w.active != w.now.mask) throw Error("lanes under a guard at an .aligned instruction");
}

// Lane 8i + r holds the address of row r of matrix i. A lane gets two neighbours of row lane / 4,
// or of column lane / 4 with .trans.
template <unsigned kMatrices, bool kTrans>
void ldmatrix(Warp& w, const Op& o) {
  all_lanes(w);
  if (!w.converged()) return;
  if (w.all != ~0u) throw Error("a warp that is not full");
  std::uint16_t rows[kMatrices][8][8];
  for (unsigned i = 0; i < kMatrices; i++) {
    for (unsigned r = 0; r < 8; r++) {
      const std::uint64_t at = w.value(o, kMatrices, 8 * i + r) + o.disp[0];
      if (at % 16) throw Error("misaligned row");
      memcpy(rows[i][r], w.block->shared_at(at, 16), 16);
    }
  }
  for (unsigned i = 0; i < kMatrices; i++) {
    std::uint32_t* d = w.at<std::uint32_t>(o.x[i]);
    for (unsigned l = 0; l < 32; l++) {
      const unsigned line = l / 4, first = l % 4 * 2;
      const std::uint32_t low = kTrans ? rows[i][first][line] : rows[i][line][first];
      const std::uint32_t high = kTrans ? rows[i][first + 1][line] : rows[i][line][first + 1];
      d[l] = low | high << 16;
    }
  }
}

// Operands: four of D, four of A, two of B, four of C.
template <Element kType>
void mma(Warp& w, const Op& o) {
  constexpr unsigned kDepth = 16;
  all_lanes(w);
  if (!w.converged()) return;
  if (w.all != ~0u) throw Error("a warp that is not full");
  float a[16][kMaxDepth], b[kDepth][8];
  const std::uint32_t* fragment[4];
  for (unsigned i = 0; i < 4; i++) fragment[i] = w.at<std::uint32_t>(o.x[4 + i]);
  fragment_a(kType, fragment, a);
  constexpr unsigned kPer = kDepth / 8;  // elements in a register
  for (unsigned r = 0; r < 2; r++) {
    const std::uint32_t* bits = w.at<std::uint32_t>(o.x[8 + r]);
    for (unsigned l = 0; l < 32; l++) {
      for (unsigned h = 0; h < kPer; h++) {
        const unsigned k = r * kDepth / 2 + l % 4 * kPer + h;
        b[k][l / 4] = widened(kType, element_of(kType, bits[l], h));
      }
    }
  }
  double sums[16][8];
  for (unsigned i = 0; i < 4; i++) {
    const float* c = w.at<float>(o.x[10 + i]);
    for (unsigned l = 0; l < 32; l++) sums[d_row(l, i)][d_column(l, i)] = c[l];
  }
  for (unsigned m = 0; m < 16; m++) {
    for (unsigned k = 0; k < kDepth; k++) {
      for (unsigned n = 0; n < 8; n++) sums[m][n] += double(a[m][k]) * b[k][n];
    }
  }
  for (unsigned i = 0; i < 4; i++) {
    float* d = w.at<float>(o.x[i]);
    for (unsigned l = 0; l < 32; l++) d[l] = cut(sums[d_row(l, i)][d_column(l, i)]);
  }
}

}  // namespace

void add_matrices(Table& t) {
  const std::string ld = "ldmatrix.sync.aligned.m8n8.";
  put(t, ld + "x1.shared.b16", {ldmatrix<1, false>, "wm"});
  put(t, ld + "x2.shared.b16", {ldmatrix<2, false>, "wwm"});
  put(t, ld + "x4.shared.b16", {ldmatrix<4, false>, "wwwwm"});
  put(t, ld + "x1.trans.shared.b16", {ldmatrix<1, true>, "wm"});
  put(t, ld + "x4.trans.shared.b16", {ldmatrix<4, true>, "wwwwm"});
  const std::string all(14, 'w');
  put(t, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", {mma<Element::bf16>, all});
  put(t, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", {mma<Element::f16>, all});
}

}  // namespace ptx

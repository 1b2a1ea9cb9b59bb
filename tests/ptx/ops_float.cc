// Floating point. Compiled without contraction: what the text does not fuse is not fused here.
// The approximations (ex2, lg2, rcp, rsqrt, div.approx...) are computed by the host's library: the
// last bits of hardware's are not known.
#include <cfenv>
#include <cmath>

#include "ptx/elements.h"
#include "ptx/ops.h"

namespace ptx {
namespace {

template <class T>
struct Add {
  T operator()(T a, T b) const { return a + b; }
};
template <class T>
struct Sub {
  T operator()(T a, T b) const { return a - b; }
};
template <class T>
struct Mul {
  T operator()(T a, T b) const { return a * b; }
};
template <class T>
struct Div {
  T operator()(T a, T b) const { return a / b; }
};
template <class T>
struct Fma {
  T operator()(T a, T b, T c) const { return std::fma(a, b, c); }
};
template <class T>
struct Min {  // a NaN gives the other number, -0 is less than 0
  T operator()(T a, T b) const {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) ? a : b;
    return a < b ? a : b;
  }
};
template <class T>
struct Max {
  T operator()(T a, T b) const {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) ? b : a;
    return a < b ? b : a;
  }
};
template <class T>
struct Neg {
  T operator()(T a) const { return -a; }
};
template <class T>
struct Abs {
  T operator()(T a) const { return std::fabs(a); }
};
template <class T>
struct CopySign {  // the first operand's sign, the second's size
  T operator()(T a, T b) const { return std::copysign(b, a); }
};
template <class T>
struct Sqrt {
  T operator()(T a) const { return std::sqrt(a); }
};
template <class T>
struct Rcp {
  T operator()(T a) const { return T(1) / a; }
};
struct Rsqrt {
  float operator()(float a) const { return 1.0f / std::sqrt(a); }
};

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
template <class F>
struct Flush {
  float operator()(float a) const { return flushed(F{}(flushed(a))); }
};
struct Ex2 {
  float operator()(float a) const { return std::exp2(a); }
};
struct Lg2 {
  float operator()(float a) const { return std::log2(a); }
};
struct Tanh {
  float operator()(float a) const { return std::tanh(a); }
};

// Rounded another way than to nearest; noinline keeps the sum between the two calls.
__attribute__((noinline)) float rounded_fma(float a, float b, float c, int way) {
  std::fesetround(way);
  volatile float x = a;
  const volatile float r = std::fma(x, b, c);
  std::fesetround(FE_TONEAREST);
  return r;
}
template <int kWay>
struct FmaTo {
  float operator()(float a, float b, float c) const { return rounded_fma(a, b, c, kWay); }
};

// ---- 16 bits, one or two in a register ----------------------------------------------------------
// An f32 result of two 16-bit numbers, rounded once more, is what one rounding gives for +, - and
// *.
template <class F, Element kType>
struct Short {
  std::uint16_t operator()(std::uint16_t a, std::uint16_t b) const {
    return narrow16(kType, F{}(widened(kType, a), widened(kType, b)));
  }
};
template <class S>
struct Pair {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const {
    const auto half = [&](unsigned i) {
      return std::uint32_t{S{}(std::uint16_t(a >> 16 * i), std::uint16_t(b >> 16 * i))} << 16 * i;
    };
    return half(0) | half(1);
  }
};
template <Element kType>
struct FmaShort {
  std::uint16_t operator()(std::uint16_t a, std::uint16_t b, std::uint16_t c) const {
    return fma16(kType, a, b, c);
  }
};
template <Element kType>
struct FmaPair {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t c) const {
    const std::uint32_t low = fma16(kType, std::uint16_t(a), std::uint16_t(b), std::uint16_t(c));
    const std::uint32_t high =
        fma16(kType, std::uint16_t(a >> 16), std::uint16_t(b >> 16), std::uint16_t(c >> 16));
    return low | high << 16;
  }
};
template <Element kType>
void put_short_fma(Table& t, const std::string& type) {
  using U = std::uint32_t;
  using H = std::uint16_t;
  put_map<FmaShort<kType>, H, H, H, H>(t, "fma.rn." + type);
  put_map<FmaPair<kType>, U, U, U, U>(t, "fma.rn." + type + "x2");
}
template <class F>
void put_short(Table& t, const std::string& op) {
  using Half = Short<F, Element::f16>;
  using Brain = Short<F, Element::bf16>;
  using U = std::uint32_t;
  using H = std::uint16_t;
  put_map<Half, H, H, H>(t, op + ".f16"), put_map<Brain, H, H, H>(t, op + ".bf16");
  put_map<Pair<Half>, U, U, U>(t, op + ".f16x2"), put_map<Pair<Brain>, U, U, U>(t, op + ".bf16x2");
}

// ---- comparisons --------------------------------------------------------------------------------
// bits: what the comparison is true for: 1 less, 2 equal, 4 greater, 8 unordered
template <class T, unsigned kTrueFor>
void setp(Warp& w, const Op& o) {
  const T *a = w.at<const T>(o.x[1]), *b = w.at<const T>(o.x[2]);
  std::uint32_t r = 0;
  for (unsigned l = 0; l < 32; l++) {
    const unsigned is = a[l] < b[l] ? 1 : a[l] == b[l] ? 2 : a[l] > b[l] ? 4 : 8;
    r |= std::uint32_t{(kTrueFor & is) != 0} << l;
  }
  w.set_predicate(o.x[0], r);
}
template <class T>
void put_comparisons(Table& t, const std::string& type) {
  const std::string s{'p', letter<T>(), letter<T>()};
  put(t, "setp.eq." + type, {setp<T, 2>, s}), put(t, "setp.ne." + type, {setp<T, 5>, s});
  put(t, "setp.lt." + type, {setp<T, 1>, s}), put(t, "setp.le." + type, {setp<T, 3>, s});
  put(t, "setp.gt." + type, {setp<T, 4>, s}), put(t, "setp.ge." + type, {setp<T, 6>, s});
  put(t, "setp.equ." + type, {setp<T, 10>, s}), put(t, "setp.neu." + type, {setp<T, 13>, s});
  put(t, "setp.ltu." + type, {setp<T, 9>, s}), put(t, "setp.leu." + type, {setp<T, 11>, s});
  put(t, "setp.gtu." + type, {setp<T, 12>, s}), put(t, "setp.geu." + type, {setp<T, 14>, s});
  put(t, "setp.num." + type, {setp<T, 7>, s}), put(t, "setp.nan." + type, {setp<T, 8>, s});
}

struct AddTowardsZero {
  float operator()(float a, float b) const { return FmaTo<FE_TOWARDZERO>{}(a, 1.0f, b); }
};

template <class T>
void put_float(Table& t, const std::string& type) {
  for (const char* rounding : {".", ".rn."}) {
    put_map<Add<T>, T, T, T>(t, "add" + (rounding + type));
    put_map<Sub<T>, T, T, T>(t, "sub" + (rounding + type));
    put_map<Mul<T>, T, T, T>(t, "mul" + (rounding + type));
  }
  put_map<Fma<T>, T, T, T, T>(t, "fma.rn." + type);
  put_map<Div<T>, T, T, T>(t, "div.rn." + type);
  put_map<Sqrt<T>, T, T>(t, "sqrt.rn." + type);
  put_map<Rcp<T>, T, T>(t, "rcp.rn." + type);
  put_map<Min<T>, T, T, T>(t, "min." + type);
  put_map<Max<T>, T, T, T>(t, "max." + type);
  put_map<Neg<T>, T, T>(t, "neg." + type);
  put_map<Abs<T>, T, T>(t, "abs." + type);
  put_map<CopySign<T>, T, T, T>(t, "copysign." + type);
  put_comparisons<T>(t, type);
}

}  // namespace

void add_floats(Table& t) {
  put_float<float>(t, "f32"), put_float<double>(t, "f64");
  put_map<FmaTo<FE_DOWNWARD>, float, float, float, float>(t, "fma.rm.f32");
  put_map<FmaTo<FE_UPWARD>, float, float, float, float>(t, "fma.rp.f32");
  put_map<FmaTo<FE_TOWARDZERO>, float, float, float, float>(t, "fma.rz.f32");
  put_map<AddTowardsZero, float, float, float>(t, "add.rz.f32");
  put_map<Div<float>, float, float, float>(t, "div.approx.f32");
  put_map<Div<float>, float, float, float>(t, "div.full.f32");
  put_map<Ex2, float, float>(t, "ex2.approx.f32");
  put_map<Flush<Ex2>, float, float>(t, "ex2.approx.ftz.f32");
  put_map<Lg2, float, float>(t, "lg2.approx.f32");
  put_map<Flush<Lg2>, float, float>(t, "lg2.approx.ftz.f32");
  put_map<Rcp<float>, float, float>(t, "rcp.approx.f32");
  put_map<Flush<Rcp<float>>, float, float>(t, "rcp.approx.ftz.f32");
  put_map<Rsqrt, float, float>(t, "rsqrt.approx.f32");
  put_map<Flush<Rsqrt>, float, float>(t, "rsqrt.approx.ftz.f32");
  put_map<Sqrt<float>, float, float>(t, "sqrt.approx.f32");
  put_map<Tanh, float, float>(t, "tanh.approx.f32");
  put_short<Add<float>>(t, "add"), put_short<Sub<float>>(t, "sub"), put_short<Mul<float>>(t, "mul");
  put_short_fma<Element::f16>(t, "f16"), put_short_fma<Element::bf16>(t, "bf16");
}

}  // namespace ptx

// Conversions between types.
#include <cmath>

#include "ptx/elements.h"
#include "ptx/ops.h"

namespace ptx {
namespace {

// Registers may be wider than the type: the source is cut, the result extended as its type says.
template <class D, class S>
void convert_integer(Warp& w, const Op& o) {
  lanes_of(w.active, [&](unsigned l) {
    const D d = D(S(w.value(o, 1, l)));
    if (o.widths[0] == Width::half) w.at<std::uint16_t>(o.x[0])[l] = std::uint16_t(d);
    if (o.widths[0] == Width::word) w.at<std::uint32_t>(o.x[0])[l] = std::uint32_t(d);
    if (o.widths[0] == Width::wide) w.at<std::uint64_t>(o.x[0])[l] = std::uint64_t(d);
  });
}
template <class D, class S>
void put_pair(Table& t, const char* d, const char* s) {
  if constexpr (!std::is_same_v<D, S>) {
    put(t, std::string("cvt.") + d + "." + s, {convert_integer<D, S>, "vv"});
  }
}
template <class D>
void put_from(Table& t, const char* d) {
  put_pair<D, std::int8_t>(t, d, "s8"), put_pair<D, std::uint8_t>(t, d, "u8");
  put_pair<D, std::int16_t>(t, d, "s16"), put_pair<D, std::uint16_t>(t, d, "u16");
  put_pair<D, std::int32_t>(t, d, "s32"), put_pair<D, std::uint32_t>(t, d, "u32");
  put_pair<D, std::int64_t>(t, d, "s64"), put_pair<D, std::uint64_t>(t, d, "u64");
}

enum class Round { zero, nearest, down, up };
// A float that does not fit gives the nearest number of the type, NaN gives 0.
template <class D, class S, Round kRound>
struct ToInteger {
  D operator()(S x) const {
    if (std::isnan(x)) return 0;
    const S r = kRound == Round::zero      ? std::trunc(x)
                : kRound == Round::nearest ? std::nearbyint(x)
                : kRound == Round::down    ? std::floor(x)
                                           : std::ceil(x);
    if (r <= S(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
    if (r >= S(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
    return D(r);
  }
};
template <class D, class S>
struct Cast {
  D operator()(S x) const { return D(x); }
};
template <class I, class F>
void put_real(Table& t, const std::string& i, const std::string& f) {
  put_map<Cast<F, I>, F, I>(t, "cvt.rn." + f + "." + i);
  put_map<ToInteger<I, F, Round::zero>, I, F>(t, "cvt.rzi." + i + "." + f);
  put_map<ToInteger<I, F, Round::nearest>, I, F>(t, "cvt.rni." + i + "." + f);
  put_map<ToInteger<I, F, Round::down>, I, F>(t, "cvt.rmi." + i + "." + f);
  put_map<ToInteger<I, F, Round::up>, I, F>(t, "cvt.rpi." + i + "." + f);
}

struct Saturate {
  float operator()(float x) const { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }  // NaN: 0
};
struct RoundToIntegral {
  float operator()(float x) const { return std::nearbyint(x); }
};
struct Floor {
  float operator()(float x) const { return std::floor(x); }
};
struct Truncate {
  float operator()(float x) const { return std::trunc(x); }
};

// ---- 16 and 8 bits ------------------------------------------------------------------------------
template <Element kType>
struct Narrow {
  std::uint16_t operator()(float x) const { return narrow16(kType, x); }
};
template <Element kType>
struct Widen {
  float operator()(std::uint16_t x) const { return widened(kType, x); }
};
template <Element kType>
struct NarrowTwo {  // the first operand becomes the high half
  std::uint32_t operator()(float a, float b) const {
    return std::uint32_t{narrow16(kType, a)} << 16 | narrow16(kType, b);
  }
};
template <std::uint8_t (*kNarrow)(float)>
struct NarrowToBytes {
  std::uint16_t operator()(float a, float b) const {
    return std::uint16_t(kNarrow(a) << 8 | kNarrow(b));
  }
};
struct WidenE5m2 {
  std::uint32_t operator()(std::uint16_t x) const {
    return std::uint32_t(x & 0xff00) << 16 | std::uint32_t(x & 0xff) << 8;
  }
};
struct WidenE4m3 {
  std::uint32_t operator()(std::uint16_t x) const {
    const auto half = [](unsigned bits) {
      return std::uint32_t{narrow16(Element::f16, widened(Element::e4m3, bits))};
    };
    return half(x >> 8) << 16 | half(x & 0xff);
  }
};

}  // namespace

void add_conversions(Table& t) {
  put_from<std::int8_t>(t, "s8"), put_from<std::uint8_t>(t, "u8");
  put_from<std::int16_t>(t, "s16"), put_from<std::uint16_t>(t, "u16");
  put_from<std::int32_t>(t, "s32"), put_from<std::uint32_t>(t, "u32");
  put_from<std::int64_t>(t, "s64"), put_from<std::uint64_t>(t, "u64");
  put_real<std::int32_t, float>(t, "s32", "f32"), put_real<std::uint32_t, float>(t, "u32", "f32");
  put_real<std::int64_t, float>(t, "s64", "f32"), put_real<std::uint64_t, float>(t, "u64", "f32");
  put_real<std::int32_t, double>(t, "s32", "f64"), put_real<std::uint32_t, double>(t, "u32", "f64");
  put_real<std::int64_t, double>(t, "s64", "f64"), put_real<std::uint64_t, double>(t, "u64", "f64");
  put_real<std::int16_t, float>(t, "s16", "f32"), put_real<std::uint16_t, float>(t, "u16", "f32");
  put_map<Cast<double, float>, double, float>(t, "cvt.f64.f32");
  put_map<Cast<float, double>, float, double>(t, "cvt.rn.f32.f64");
  put_map<Saturate, float, float>(t, "cvt.sat.f32.f32");
  put_map<RoundToIntegral, float, float>(t, "cvt.rni.f32.f32");
  put_map<Floor, float, float>(t, "cvt.rmi.f32.f32");
  put_map<Truncate, float, float>(t, "cvt.rzi.f32.f32");
  using H = std::uint16_t;
  using U = std::uint32_t;
  put_map<Narrow<Element::f16>, H, float>(t, "cvt.rn.f16.f32");
  put_map<Narrow<Element::bf16>, H, float>(t, "cvt.rn.bf16.f32");
  put_map<Widen<Element::f16>, float, H>(t, "cvt.f32.f16");
  put_map<Widen<Element::bf16>, float, H>(t, "cvt.f32.bf16");
  put_map<NarrowTwo<Element::f16>, U, float, float>(t, "cvt.rn.f16x2.f32");
  put_map<NarrowTwo<Element::bf16>, U, float, float>(t, "cvt.rn.bf16x2.f32");
  put_map<NarrowToBytes<narrow_e4m3>, H, float, float>(t, "cvt.rn.satfinite.e4m3x2.f32");
  put_map<NarrowToBytes<narrow_e5m2>, H, float, float>(t, "cvt.rn.satfinite.e5m2x2.f32");
  put_map<WidenE5m2, U, H>(t, "cvt.rn.f16x2.e5m2x2");
  put_map<WidenE4m3, U, H>(t, "cvt.rn.f16x2.e4m3x2");
}

}  // namespace ptx

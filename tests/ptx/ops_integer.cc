// Integers, logic, predicates, moves.
#include "ptx/ops.h"

namespace ptx {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
constexpr unsigned kBits = 8 * sizeof(T);

template <class T>
struct Add {
  T operator()(T a, T b) const { return T(Unsigned<T>(a) + Unsigned<T>(b)); }
};
template <class T>
struct Sub {
  T operator()(T a, T b) const { return T(Unsigned<T>(a) - Unsigned<T>(b)); }
};
template <class T>
struct MulLow {
  T operator()(T a, T b) const { return T(std::uint64_t(a) * std::uint64_t(b)); }
};
template <class T>
struct MulHigh {
  T operator()(T a, T b) const {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return T(Wide(a) * Wide(b) >> kBits<T>);
  }
};
template <class D, class T>
struct MulWide {
  D operator()(T a, T b) const { return D(D(a) * D(b)); }
};
template <class D, class T>
struct MadWide {
  D operator()(T a, T b, D c) const { return D(Unsigned<D>(D(a) * D(b)) + Unsigned<D>(c)); }
};
template <class T>
struct MadLow {
  T operator()(T a, T b, T c) const {
    return T(std::uint64_t(a) * std::uint64_t(b) + std::uint64_t(c));
  }
};
template <class T>
struct Div {  // by zero: all bits set, as the hardware's routine happens to give
  T operator()(T a, T b) const {
    if (b == 0) return T(-1);
    if (std::is_signed_v<T> && b == T(-1)) return T(0 - Unsigned<T>(a));
    return T(a / b);
  }
};
template <class T>
struct Rem {
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == T(-1)) return 0;
    return T(a % b);
  }
};
template <class T>
struct Min {
  T operator()(T a, T b) const { return b < a ? b : a; }
};
template <class T>
struct Max {
  T operator()(T a, T b) const { return a < b ? b : a; }
};
template <class T>
struct Neg {
  T operator()(T a) const { return T(0 - Unsigned<T>(a)); }
};
template <class T>
struct Abs {
  T operator()(T a) const { return a < 0 ? T(0 - Unsigned<T>(a)) : a; }
};
template <class T>
struct And {
  T operator()(T a, T b) const { return a & b; }
};
template <class T>
struct Or {
  T operator()(T a, T b) const { return a | b; }
};
template <class T>
struct Xor {
  T operator()(T a, T b) const { return a ^ b; }
};
template <class T>
struct Not {
  T operator()(T a) const { return T(~a); }
};
template <class T>
struct Shl {  // counts from the register's width on give 0
  T operator()(T a, std::uint32_t n) const { return n >= kBits<T> ? T(0) : T(a << n); }
};
template <class T>
struct Shr {
  T operator()(T a, std::uint32_t n) const {
    if (n >= kBits<T>) return a < 0 ? T(-1) : T(0);
    return T(a >> n);
  }
};
template <bool kLeft, bool kWrap>
struct Funnel {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t n) const {
    n = kWrap ? n & 31 : std::min(n, 32u);
    const std::uint64_t both = std::uint64_t{b} << 32 | a;
    return std::uint32_t(kLeft ? both << n >> 32 : both >> n);
  }
};
template <class T>
struct Popc {
  std::uint32_t operator()(T a) const { return unsigned(std::popcount(a)); }
};
template <class T>
struct Clz {
  std::uint32_t operator()(T a) const { return unsigned(std::countl_zero(a)); }
};
template <class T>
struct Brev {
  T operator()(T a) const {
    T r = 0;
    for (unsigned i = 0; i < kBits<T>; i++) r = T(r << 1 | (a >> i & 1));
    return r;
  }
};
template <class T, bool kShift>
struct Bfind {  // the highest set bit, or how far it is from the top
  std::uint32_t operator()(T a) const {
    if (a == 0) return ~0u;
    const unsigned zeros = unsigned(std::countl_zero(a));
    return kShift ? zeros : kBits<T> - 1 - zeros;
  }
};
template <class T>
struct Bfi {  // a's low bits into b
  T operator()(T a, T b, std::uint32_t at, std::uint32_t count) const {
    at &= 0xff, count &= 0xff;
    if (at >= kBits<T> || count == 0) return b;
    const T ones = count >= kBits<T> ? T(~T(0)) : T((T(1) << count) - 1);
    return T((b & ~(ones << at)) | (a & ones) << at);
  }
};
template <class T>
struct Bfe {
  T operator()(T a, std::uint32_t at, std::uint32_t count) const {
    at &= 0xff, count &= 0xff;
    if (count == 0) return 0;
    const unsigned top = std::min(at + count - 1, kBits<T> - 1);
    const bool sign = std::is_signed_v<T> && (Unsigned<T>(a) >> top & 1);
    Unsigned<T> r = sign ? Unsigned<T>(-1) : 0;
    for (unsigned i = 0; i < count && i < kBits<T> && at + i < kBits<T>; i++) {
      const Unsigned<T> bit = Unsigned<T>(1) << i;
      r = Unsigned<T>((r & ~bit) | (Unsigned<T>(a) >> (at + i) & 1 ? bit : 0));
    }
    return T(r);
  }
};
struct Prmt {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t select) const {
    const std::uint64_t both = std::uint64_t{b} << 32 | a;
    std::uint32_t r = 0;
    for (unsigned i = 0; i < 4; i++) {
      const unsigned pick = select >> 4 * i & 15;
      const unsigned byte = unsigned(both >> 8 * (pick & 7)) & 0xff;
      r |= (pick & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return r;
  }
};
struct Lop3 {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                           std::uint32_t table) const {
    std::uint32_t r = 0;
    for (unsigned i = 0; i < 8; i++) {
      if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    }
    return r;
  }
};
template <class T>
struct Same {
  T operator()(T a) const { return a; }
};

// ---- predicates ---------------------------------------------------------------------------------
struct CompareEq {
  template <class T>
  bool operator()(T a, T b) const {
    return a == b;
  }
};
struct CompareNe {
  template <class T>
  bool operator()(T a, T b) const {
    return a != b;
  }
};
struct CompareLt {
  template <class T>
  bool operator()(T a, T b) const {
    return a < b;
  }
};
struct CompareLe {
  template <class T>
  bool operator()(T a, T b) const {
    return a <= b;
  }
};
struct CompareGt {
  template <class T>
  bool operator()(T a, T b) const {
    return a > b;
  }
};
struct CompareGe {
  template <class T>
  bool operator()(T a, T b) const {
    return a >= b;
  }
};
template <class F, class T>
void setp(Warp& w, const Op& o) {
  const T *a = w.at<const T>(o.x[1]), *b = w.at<const T>(o.x[2]);
  std::uint32_t r = 0;
  for (unsigned l = 0; l < 32; l++) r |= std::uint32_t{F{}(a[l], b[l])} << l;
  w.set_predicate(o.x[0], r);
}
template <class T>
void put_compare(Table& t, const std::string& type, bool ordered) {
  const std::string signature{'p', letter<T>(), letter<T>()};
  put(t, "setp.eq." + type, {setp<CompareEq, T>, signature});
  put(t, "setp.ne." + type, {setp<CompareNe, T>, signature});
  if (!ordered) return;
  put(t, "setp.lt." + type, {setp<CompareLt, T>, signature});
  put(t, "setp.le." + type, {setp<CompareLe, T>, signature});
  put(t, "setp.gt." + type, {setp<CompareGt, T>, signature});
  put(t, "setp.ge." + type, {setp<CompareGe, T>, signature});
}

template <class T>
void selp(Warp& w, const Op& o) {
  T* d = w.at<T>(o.x[0]);
  const T *a = w.at<const T>(o.x[1]), *b = w.at<const T>(o.x[2]);
  const std::uint32_t p = w.predicate(o, 3);
  lanes_of(w.active, [&](unsigned l) { d[l] = p >> l & 1 ? a[l] : b[l]; });
}

template <int kHow>
void predicate_op(Warp& w, const Op& o) {
  const std::uint32_t a = w.predicate(o, 1), b = kHow < 3 ? w.predicate(o, 2) : 0;
  w.set_predicate(o.x[0], kHow == 0   ? a & b
                          : kHow == 1 ? a | b
                          : kHow == 2 ? a ^ b
                          : kHow == 3 ? ~a
                                      : a);
}

// Moves between a register and the parts of one: the first part is the low one.
template <class Whole, class Part>
void pack(Warp& w, const Op& o) {
  lanes_of(w.active, [&](unsigned l) {
    Whole r = 0;
    for (unsigned i = 0; i < sizeof(Whole) / sizeof(Part); i++) {
      r |= Whole(w.at<Part>(o.x[1 + i])[l]) << 8 * sizeof(Part) * i;
    }
    w.at<Whole>(o.x[0])[l] = r;
  });
}
template <class Whole, class Part>
void unpack(Warp& w, const Op& o) {
  constexpr unsigned kParts = sizeof(Whole) / sizeof(Part);
  lanes_of(w.active, [&](unsigned l) {
    const Whole v = w.at<Whole>(o.x[kParts])[l];
    for (unsigned i = 0; i < kParts; i++) {
      w.at<Part>(o.x[i])[l] = Part(v >> 8 * sizeof(Part) * i);
    }
  });
}

template <class T>
void put_integer(Table& t, const std::string& type) {
  put_map<Add<T>, T, T, T>(t, "add." + type);
  put_map<Sub<T>, T, T, T>(t, "sub." + type);
  put_map<MulLow<T>, T, T, T>(t, "mul.lo." + type);
  put_map<MulHigh<T>, T, T, T>(t, "mul.hi." + type);
  put_map<MadLow<T>, T, T, T, T>(t, "mad.lo." + type);
  put_map<Div<T>, T, T, T>(t, "div." + type);
  put_map<Rem<T>, T, T, T>(t, "rem." + type);
  put_map<Min<T>, T, T, T>(t, "min." + type);
  put_map<Max<T>, T, T, T>(t, "max." + type);
  put_map<Shr<T>, T, T, std::uint32_t>(t, "shr." + type);
  put_compare<T>(t, type, true);
  if constexpr (std::is_signed_v<T>) {
    put_map<Neg<T>, T, T>(t, "neg." + type);
    put_map<Abs<T>, T, T>(t, "abs." + type);
  }
}
template <class T>
void put_bits(Table& t, const std::string& type) {
  put_map<And<T>, T, T, T>(t, "and." + type);
  put_map<Or<T>, T, T, T>(t, "or." + type);
  put_map<Xor<T>, T, T, T>(t, "xor." + type);
  put_map<Not<T>, T, T>(t, "not." + type);
  put_map<Shl<T>, T, T, std::uint32_t>(t, "shl." + type);
  put_map<Shr<T>, T, T, std::uint32_t>(t, "shr." + type);
  put_compare<T>(t, type, false);
}
template <class T>
void put_counts(Table& t, const std::string& bits, const std::string& type) {
  put_map<Popc<T>, std::uint32_t, T>(t, "popc." + bits);
  put_map<Clz<T>, std::uint32_t, T>(t, "clz." + bits);
  put_map<Brev<T>, T, T>(t, "brev." + bits);
  put_map<Bfi<T>, T, T, T, std::uint32_t, std::uint32_t>(t, "bfi." + bits);
  put_map<Bfind<T, false>, std::uint32_t, T>(t, "bfind." + type);
  put_map<Bfind<T, true>, std::uint32_t, T>(t, "bfind.shiftamt." + type);
}
template <class D, class T>
void put_wide(Table& t, const std::string& type) {
  put_map<MulWide<D, T>, D, T, T>(t, "mul.wide." + type);
  put_map<MadWide<D, T>, D, T, T, D>(t, "mad.wide." + type);
}
template <class T>
void put_moves(Table& t, const std::string& bits) {
  for (const char* type : {"b", "u", "s", "f"}) {
    if (sizeof(T) == 2 && *type == 'f') continue;
    put_map<Same<T>, T, T>(t, "mov." + (type + bits));
    put(t, "selp." + (type + bits), {selp<T>, {letter<T>(), letter<T>(), letter<T>(), 'p'}});
  }
}

}  // namespace

void add_integers(Table& t) {
  put_integer<std::int16_t>(t, "s16"), put_integer<std::uint16_t>(t, "u16");
  put_integer<std::int32_t>(t, "s32"), put_integer<std::uint32_t>(t, "u32");
  put_integer<std::int64_t>(t, "s64"), put_integer<std::uint64_t>(t, "u64");
  put_bits<std::uint16_t>(t, "b16"), put_bits<std::uint32_t>(t, "b32");
  put_bits<std::uint64_t>(t, "b64");
  put_counts<std::uint32_t>(t, "b32", "u32"), put_counts<std::uint64_t>(t, "b64", "u64");
  put_wide<std::int32_t, std::int16_t>(t, "s16"), put_wide<std::uint32_t, std::uint16_t>(t, "u16");
  put_wide<std::int64_t, std::int32_t>(t, "s32"), put_wide<std::uint64_t, std::uint32_t>(t, "u32");
  put_map<Bfe<std::uint32_t>, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>(
      t, "bfe.u32");
  put_map<Bfe<std::int32_t>, std::int32_t, std::int32_t, std::uint32_t, std::uint32_t>(t,
                                                                                       "bfe.s32");
  using U = std::uint32_t;
  put_map<Funnel<true, true>, U, U, U, U>(t, "shf.l.wrap.b32");
  put_map<Funnel<false, true>, U, U, U, U>(t, "shf.r.wrap.b32");
  put_map<Funnel<true, false>, U, U, U, U>(t, "shf.l.clamp.b32");
  put_map<Funnel<false, false>, U, U, U, U>(t, "shf.r.clamp.b32");
  put_map<Prmt, U, U, U, U>(t, "prmt.b32");
  put_map<Lop3, U, U, U, U, U>(t, "lop3.b32");
  put_moves<std::uint16_t>(t, "16"), put_moves<std::uint32_t>(t, "32");
  put_moves<std::uint64_t>(t, "64");
  put(t, "mov.b32 pack2", {pack<std::uint32_t, std::uint16_t>, "whh"});
  put(t, "mov.b64 pack2", {pack<std::uint64_t, std::uint32_t>, "xww"});
  put(t, "mov.b64 pack4", {pack<std::uint64_t, std::uint16_t>, "xhhhh"});
  put(t, "mov.b32 unpack2", {unpack<std::uint32_t, std::uint16_t>, "hhw"});
  put(t, "mov.b64 unpack2", {unpack<std::uint64_t, std::uint32_t>, "wwx"});
  put(t, "mov.b64 unpack4", {unpack<std::uint64_t, std::uint16_t>, "hhhhx"});
  put(t, "and.pred", {predicate_op<0>, "ppp"}), put(t, "or.pred", {predicate_op<1>, "ppp"});
  put(t, "xor.pred", {predicate_op<2>, "ppp"}), put(t, "not.pred", {predicate_op<3>, "pp"});
  put(t, "mov.pred", {predicate_op<4>, "pp"});
}

}  // namespace ptx

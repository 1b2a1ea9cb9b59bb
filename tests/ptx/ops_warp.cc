// What the lanes of a warp do together. The lanes that an instruction names have to be there, and a
// lane that executes it has to be among them.
#include <algorithm>

#include "ptx/ops.h"

namespace ptx {
namespace {

// True once all lanes that any lane here names are here; each must name the same as those it names.
bool members(Warp& w, const Op& o, unsigned i) {
  const std::uint32_t* masks = w.at<std::uint32_t>(o.x[i]);
  std::uint32_t wanted = 0;
  lanes_of(w.active, [&](unsigned l) {
    if (!(masks[l] >> l & 1)) throw Error("a lane is not in its own mask " + hex(masks[l]));
    wanted |= masks[l];
  });
  if (!w.gather(wanted)) return false;
  lanes_of(w.active, [&](unsigned l) {
    lanes_of(masks[l], [&](unsigned other) {
      if (!(w.active >> other & 1) || masks[other] != masks[l]) {
        throw Error("lanes " + hex(masks[l]) + " were named, they do not all take part");
      }
    });
  });
  return true;
}

// kHow: 0 idx, 1 up, 2 down, 3 bfly. The third operand holds a clamp and, from bit 8 on, the bits
// of a lane's number that are its segment's.
template <int kHow>
void shfl(Warp& w, const Op& o) {
  if (!members(w, o, 5)) return;
  const std::uint32_t *masks = w.at<std::uint32_t>(o.x[5]), *by = w.at<std::uint32_t>(o.x[3]),
                      *c = w.at<std::uint32_t>(o.x[4]);
  std::uint32_t values[32], found = 0;
  memcpy(values, w.at<std::uint32_t>(o.x[2]), sizeof values);
  std::uint32_t* d = w.at<std::uint32_t>(o.x[0]);
  lanes_of(w.active, [&](unsigned l) {
    const std::uint32_t n = by[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
    const std::uint32_t top = (l & segment) | (clamp & ~segment), low = l & segment;
    const int from = kHow == 1   ? int(l) - int(n)
                     : kHow == 2 ? int(l + n)
                     : kHow == 3 ? int(l ^ n)
                                 : int(low | (n & ~segment));
    const bool inside = kHow == 1 ? from >= int(top) : from <= int(top);
    const unsigned source = inside ? unsigned(from) : l;
    if (!(masks[l] >> source & 1)) throw Error("reads a lane that takes no part");
    d[l] = values[source];
    found |= std::uint32_t{inside} << l;
  });
  if (o.widths[1] == Width::predicate) w.set_predicate(o.x[1], found);
}
// Without the predicate: the same operands but for that one.
template <int kHow>
void shfl_alone(Warp& w, const Op& o) {
  Op with = o;
  with.x.insert(with.x.begin() + 1, kTrash);
  with.widths.insert(with.widths.begin() + 1, Width::word);
  shfl<kHow>(w, with);
}

// kHow: 0 ballot, 1 any, 2 all, 3 uni
template <int kHow>
void vote(Warp& w, const Op& o) {
  if (!members(w, o, 2)) return;
  const std::uint32_t p = w.predicate(o, 1), *masks = w.at<std::uint32_t>(o.x[2]);
  std::uint32_t results = 0;
  lanes_of(w.active, [&](unsigned l) {
    const std::uint32_t set = p & masks[l];
    if (kHow == 0) w.at<std::uint32_t>(o.x[0])[l] = set;
    const bool is = kHow == 1   ? set != 0
                    : kHow == 2 ? set == masks[l]
                                : set == 0 || set == masks[l];
    results |= std::uint32_t{is} << l;
  });
  if (kHow != 0) w.set_predicate(o.x[0], results);
}

template <class T>
void match_any(Warp& w, const Op& o) {
  if (!members(w, o, 2)) return;
  const std::uint32_t* masks = w.at<std::uint32_t>(o.x[2]);
  T values[32];
  memcpy(values, w.at<T>(o.x[1]), sizeof values);
  lanes_of(w.active, [&](unsigned l) {
    std::uint32_t r = 0;
    lanes_of(masks[l],
             [&](unsigned other) { r |= std::uint32_t{values[other] == values[l]} << other; });
    w.at<std::uint32_t>(o.x[0])[l] = r;
  });
}

template <class T, class F>
void redux(Warp& w, const Op& o) {
  if (!members(w, o, 2)) return;
  const std::uint32_t* masks = w.at<std::uint32_t>(o.x[2]);
  T values[32];
  memcpy(values, w.at<T>(o.x[1]), sizeof values);
  lanes_of(w.active, [&](unsigned l) {
    T r = values[l];
    lanes_of(masks[l] & ~(1u << l), [&](unsigned other) { r = F{}(r, values[other]); });
    w.at<T>(o.x[0])[l] = r;
  });
}
struct Least {
  template <class T>
  T operator()(T a, T b) const {
    return std::min(a, b);
  }
};
struct Greatest {
  template <class T>
  T operator()(T a, T b) const {
    return std::max(a, b);
  }
};

void sync(Warp& w, const Op& o) { members(w, o, 0); }
void active_mask(Warp& w, const Op& o) {  // CUDA promises a lane no more than itself
  lanes_of(w.active, [&](unsigned l) { w.at<std::uint32_t>(o.x[0])[l] = 1u << l; });
}
void elect(Warp& w, const Op& o) {
  if (!members(w, o, 2)) return;
  const std::uint32_t* masks = w.at<std::uint32_t>(o.x[2]);
  std::uint32_t leaders = 0;
  // Which lane is not said; not the first, on which nothing may rely.
  lanes_of(w.active, [&](unsigned l) {
    leaders |= std::uint32_t{l == 31u - unsigned(std::countl_zero(masks[l]))} << l;
  });
  w.set_predicate(o.x[1], leaders);
}
// The registers of a warpgroup change hands: cuda_check holds the sums against what a block owns.
void set_registers(Warp& w, const Op& o) {
  if (!w.converged()) return;
  const std::uint64_t n = o.constants[0];
  if (n % 8 || n < 24 || n > 256) throw Error("setmaxnreg: a multiple of 8 in 24..256");
}

}  // namespace

void add_warp_operations(Table& t) {
  put(t, "shfl.sync.idx.b32", {shfl<0>, "wpwwww"}), put(t, "shfl.sync.up.b32", {shfl<1>, "wpwwww"});
  put(t, "shfl.sync.down.b32", {shfl<2>, "wpwwww"});
  put(t, "shfl.sync.bfly.b32", {shfl<3>, "wpwwww"});
  put(t, "shfl.sync.idx.b32 5", {shfl_alone<0>, "wwwww"});
  put(t, "shfl.sync.up.b32 5", {shfl_alone<1>, "wwwww"});
  put(t, "shfl.sync.down.b32 5", {shfl_alone<2>, "wwwww"});
  put(t, "shfl.sync.bfly.b32 5", {shfl_alone<3>, "wwwww"});
  put(t, "vote.sync.ballot.b32", {vote<0>, "wpw"}), put(t, "vote.sync.any.pred", {vote<1>, "ppw"});
  put(t, "vote.sync.all.pred", {vote<2>, "ppw"}), put(t, "vote.sync.uni.pred", {vote<3>, "ppw"});
  put(t, "match.any.sync.b32", {match_any<std::uint32_t>, "www"});
  put(t, "match.any.sync.b64", {match_any<std::uint64_t>, "wxw"});
  put(t, "redux.sync.add.u32", {redux<std::uint32_t, std::plus<>>, "www"});
  put(t, "redux.sync.add.s32", {redux<std::uint32_t, std::plus<>>, "www"});
  put(t, "redux.sync.min.u32", {redux<std::uint32_t, Least>, "www"});
  put(t, "redux.sync.min.s32", {redux<std::int32_t, Least>, "www"});
  put(t, "redux.sync.max.u32", {redux<std::uint32_t, Greatest>, "www"});
  put(t, "redux.sync.max.s32", {redux<std::int32_t, Greatest>, "www"});
  put(t, "redux.sync.and.b32", {redux<std::uint32_t, std::bit_and<>>, "www"});
  put(t, "redux.sync.or.b32", {redux<std::uint32_t, std::bit_or<>>, "www"});
  put(t, "redux.sync.xor.b32", {redux<std::uint32_t, std::bit_xor<>>, "www"});
  put(t, "bar.warp.sync", {sync, "w"}), put(t, "activemask.b32", {active_mask, "w"});
  put(t, "elect.sync", {elect, "wpw"});
  put(t, "setmaxnreg.inc.sync.aligned.u32", {set_registers, "n"});
  put(t, "setmaxnreg.dec.sync.aligned.u32", {set_registers, "n"});
}

}  // namespace ptx

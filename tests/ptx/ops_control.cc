// Branches, calls, ends, barriers of the block.
#include "ptx/ops.h"

namespace ptx {
namespace {

// The lanes under the guard go to `pc`, the others stay.
void go(Warp& w, std::uint32_t lanes, std::uint32_t pc) {
  if (lanes == w.now.mask) {
    w.next = pc;
  } else {
    w.split(lanes, pc);
  }
}
void bra(Warp& w, const Op& o) { go(w, w.active, o.target); }
void bra_uniform(Warp& w, const Op& o) {
  if (w.active != w.now.mask) throw Error("bra.uni: lanes go different ways");
  w.next = o.target;
}

void copy_parameters(Warp& w, const std::vector<CopyParameter>& copies) {
  for (const CopyParameter& c : copies) {
    lanes_of(w.active, [&](unsigned l) {
      memcpy(w.block->local_at(w.index, l, c.to, c.bytes),
             w.block->local_at(w.index, l, c.from, c.bytes), c.bytes);
    });
  }
}
void call(Warp& w, const Op& o) {
  if (w.active != w.now.mask) throw Error("call: under a guard that lanes differ in");
  if (w.now.depth == w.now.calls.size()) throw Error("call: too many calls inside each other");
  const Call& c = w.block->program->calls[std::size_t(o.call)];
  copy_parameters(w, c.arguments);
  w.now.calls[w.now.depth++] = w.now.pc;
  w.next = c.target;
}
void end_lanes(Warp& w) {
  w.live &= ~w.active;
  w.now.mask &= ~w.active;
}
void ret(Warp& w, const Op&) {
  if (w.now.depth == 0) return end_lanes(w);
  if (w.active != w.now.mask) {  // those that stay become a group of their own
    const std::uint32_t stay = w.now.mask & ~w.active;
    w.split(stay, w.next);
  }
  const std::uint32_t at = w.now.calls[--w.now.depth];
  w.now.calls[w.now.depth] = 0;
  const Op& from = w.block->program->code[at];
  copy_parameters(w, w.block->program->calls[std::size_t(from.call)].results);
  w.next = at + 1;
}
void leave(Warp& w, const Op&) { end_lanes(w); }
void trap(Warp&, const Op&) { throw Error("the kernel stopped itself"); }

// ---- barriers -----------------------------------------------------------------------------------
void unguarded(Warp& w) {
  if (w.active != w.now.mask) throw Error("lanes under a guard at an .aligned instruction");
}
std::uint32_t uniform(Warp& w, const Op& o, unsigned i) {
  const std::uint32_t* values = w.at<std::uint32_t>(o.x[i]);
  const unsigned first = unsigned(std::countr_zero(w.active));
  lanes_of(w.active, [&](unsigned l) {
    if (values[l] != values[first]) throw Error("lanes name different barriers");
  });
  return values[first];
}
void barrier(Warp& w, const Op& o) {
  unguarded(w);
  if (!w.converged()) return;
  const unsigned count = o.x.size() > 1 ? uniform(w, o, 1) : 0;
  if (o.x.size() > 1 && count == 0) throw Error("a barrier of no threads");
  w.block->arrive(w, nullptr, uniform(w, o, 0), count, 0);
}
void barrier_reduce(Warp& w, const Op& o) {
  unguarded(w);
  if (!w.converged()) return;
  const std::uint32_t p = w.predicate(o, 2) & w.active;
  w.block->arrive(w, &o, uniform(w, o, 1), 0, unsigned(std::popcount(p)));
}

}  // namespace

void add_control(Table& t) {
  put(t, "bra", {bra, "L"}), put(t, "bra.uni", {bra_uniform, "L"});
  put(t, "call.uni", {call, "call"}), put(t, "call", {call, "call"});
  put(t, "ret", {ret, ""}), put(t, "exit", {leave, ""}), put(t, "trap", {trap, ""});
  put(t, "bar.sync", {barrier, "w"}), put(t, "bar.sync 2", {barrier, "ww"});
  put(t, "bar.red.popc.u32", {barrier_reduce, "wwp", 4, false, 0});
  put(t, "bar.red.and.pred", {barrier_reduce, "pwp", 4, false, 1});
  put(t, "bar.red.or.pred", {barrier_reduce, "pwp", 4, false, 2});
}

}  // namespace ptx

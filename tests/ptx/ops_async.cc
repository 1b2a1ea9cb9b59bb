// Copies that run beside the threads. Their destination is NaN from the issue on; the data come as
// late as the waits allow, those of bulk copies last first.
#include "ptx/ops.h"
#include "ptx/tensor_map.h"

namespace ptx {
namespace {

std::uint64_t address(Warp& w, const Op& o, unsigned operand, unsigned which, unsigned lane) {
  return w.value(o, operand, lane) + o.disp[which];
}

// ---- cp.async -----------------------------------------------------------------------------------
void cp_async(Warp& w, const Op& o) {
  const auto bytes = unsigned(o.constants[0]);
  if (bytes != 16) throw Error("cp.async.cg copies 16 bytes");
  lanes_of(w.active, [&](unsigned l) {
    const std::uint64_t to = address(w, o, 0, 0, l), from = address(w, o, 1, 1, l);
    const std::uint32_t valid = w.at<std::uint32_t>(o.x[2])[l];
    if (valid > bytes) throw Error("cp.async: more bytes of source than of the copy");
    if (to % bytes || (valid && from % bytes)) throw Error("cp.async: misaligned");
    char* d = w.block->shared_at(to, bytes);
    const char* s = valid ? w.block->global_at(from, valid, false) : nullptr;
    memset(d, 0xff, bytes);
    w.copies[l].back().push_back({d, s, valid, bytes - valid});
  });
}
void cp_async_commit(Warp& w, const Op&) {
  lanes_of(w.active, [&](unsigned l) { w.copies[l].emplace_back(); });
}
void cp_async_wait(Warp& w, const Op& o) {
  lanes_of(w.active, [&](unsigned l) {
    auto& groups = w.copies[l];
    while (groups.size() > o.constants[0] + 1) {
      for (const AsyncCopy& c : groups.front()) {
        if (c.bytes) memcpy(c.to, c.from, c.bytes);
        memset(c.to + c.bytes, 0, c.zeros);
      }
      groups.pop_front();
    }
  });
}

// ---- mbarriers ----------------------------------------------------------------------------------
std::uint64_t cookie(std::uint64_t address) { return 0x7074785f6d626172 ^ address; }

Mbarrier& find(Block& b, std::uint64_t address) {
  const auto found = b.mbarriers.find(std::uint32_t(address));
  if (found == b.mbarriers.end()) throw Error("no mbarrier at " + hex(address));
  std::uint64_t now;
  memcpy(&now, b.shared_at(address, 8), 8);
  if (now != cookie(address)) throw Error("the mbarrier at " + hex(address) + " was overwritten");
  return found->second;
}
void settle(Block& b, Mbarrier& m) {
  if (m.pending || m.bytes) return;
  m.phase ^= 1, m.pending = m.count;
  b.wake();
}
void mbarrier_init(Warp& w, const Op& o) {
  lanes_of(w.active, [&](unsigned l) {
    Block& b = *w.block;
    const std::uint64_t at = address(w, o, 0, 0, l);
    const std::uint32_t count = w.at<std::uint32_t>(o.x[1])[l];
    if (at % 8 || !count || count >= 1u << 20) throw Error("bad address or count");
    const std::uint64_t is = cookie(at);
    memcpy(b.shared_at(at, 8), &is, 8);
    Mbarrier m;
    m.count = m.pending = count, m.initialiser = w.index * 32 + l;
    if (!b.mbarriers.emplace(std::uint32_t(at), m).second) throw Error("initialised twice");
  });
}
void mbarrier_init_fence(Warp& w, const Op&) {
  lanes_of(w.active, [&](unsigned l) {
    for (auto& [at, m] : w.block->mbarriers) m.fenced |= m.initialiser == w.index * 32 + l;
  });
}
template <bool kExpects>
void mbarrier_arrive(Warp& w, const Op& o) {
  lanes_of(w.active, [&](unsigned l) {
    Mbarrier& m = find(*w.block, address(w, o, 1, 0, l));
    if (m.pending == 0) throw Error("more arrivals than the phase expects");
    if (kExpects) m.bytes += w.at<std::uint32_t>(o.x[2])[l];
    if (m.bytes >= 1 << 20) throw Error("too many bytes in one phase");
    --m.pending;
    settle(*w.block, m);
  });
}
// Hardware may answer no at any time and be asked again: so the first answer is no unless the phase
// has ended; then the lanes wait until that of one of them has.
void mbarrier_try_wait(Warp& w, const Op& o) {
  std::uint32_t ended = 0;
  lanes_of(w.active, [&](unsigned l) {
    Mbarrier& m = find(*w.block, address(w, o, 1, 0, l));
    const std::uint32_t parity = w.at<std::uint32_t>(o.x[2])[l];
    if (parity > 1) throw Error("a parity is 0 or 1");
    if (m.phase == parity) return;
    m.unseen = false;
    ended |= 1u << l;
  });
  if (ended == 0 && w.now.refused) return w.wait_for_event();
  w.now.refused = ended == 0;
  w.set_predicate(o.x[0], ended);
}

// ---- bulk copies --------------------------------------------------------------------------------
Mbarrier& counting(Block& b, std::uint64_t at) {
  Mbarrier& m = find(b, at);
  if (!m.fenced) throw Error("no fence after the mbarrier's init");
  return m;
}
void start(Block& b, Mbarrier& m, unsigned bytes, std::function<void()> copy) {
  b.later.push_back([&b, &m, bytes, copy = std::move(copy)] {
    copy();
    m.bytes -= bytes, m.unseen = true;
    settle(b, m);
  });
}

void land(Block& b, const TensorMap& t, const std::array<std::int64_t, 5>& origin, std::uint64_t to,
          unsigned bytes) {
  const unsigned e = t.element;
  for (unsigned i = 0; i < bytes / e; i++) {  // elements in the order of the box
    std::uint64_t from = t.base;
    bool inside = true;
    for (unsigned d = 0, rest = i; d < 5; d++) {
      const std::int64_t at = origin[d] + rest % t.box[d];
      rest /= t.box[d];
      inside &= at >= 0 && at < std::int64_t(t.dims[d]);
      from += std::uint64_t(at * std::int64_t(t.strides[d]));
    }
    const std::uint64_t linear = to + std::uint64_t{i} * e;
    char* d = b.shared_at(swizzled(linear & ~std::uint64_t{15}, t.span) + linear % 16, e);
    if (inside) {
      memcpy(d, b.global_at(from, e, false), e);
    } else {
      memset(d, 0, e);
    }
  }
}

void bulk_copy(Warp& w, const Op& o) {
  lanes_of(w.active, [&](unsigned l) {
    const std::uint64_t to = address(w, o, 0, 0, l), from = address(w, o, 1, 1, l);
    const std::uint32_t bytes = w.at<std::uint32_t>(o.x[2])[l];
    if (to % 16 || from % 16 || bytes % 16 || bytes == 0) throw Error("misaligned");
    Block& b = *w.block;
    Mbarrier& m = counting(b, address(w, o, 3, 2, l));
    memset(b.shared_at(to, bytes), 0xff, bytes);
    start(b, m, bytes, [&b, from, to, bytes] {
      memcpy(b.shared_at(to, bytes), b.global_at(from, bytes, false), bytes);
    });
  });
}

template <unsigned kRank>
void tensor_copy(Warp& w, const Op& o) {
  Block& b = *w.block;
  lanes_of(w.active, [&](unsigned l) {
    const std::uint64_t to = address(w, o, 0, 0, l), map = address(w, o, 1, 1, l);
    TensorMap t;
    if (map % 64) throw Error("a tensor map that is not aligned to 64 bytes");
    memcpy(&t, reinterpret_cast<const void*>(map), sizeof t);
    if (t.magic != kTensorMapMagic) throw Error("not a tensor map");
    if (t.rank != kRank) throw Error("the tensor map has rank " + std::to_string(t.rank));
    std::array<std::int64_t, 5> origin = {};
    for (unsigned i = 0; i < kRank; i++) {
      origin[i] = std::int32_t(w.at<std::uint32_t>(o.x[2 + i])[l]);
    }
    unsigned bytes = t.element;
    for (const unsigned side : t.box) bytes *= side;
    if (to % std::max(128u, 8u * t.span)) throw Error("misaligned destination");
    if (origin[0] * std::int64_t{t.element} % 16 != 0) {
      throw Error("the innermost coordinate is no multiple of 16 bytes");
    }
    Mbarrier& m = counting(b, address(w, o, 2 + kRank, 2, l));
    memset(b.shared_at(to, bytes), 0xff, bytes);
    start(b, m, bytes, [&b, t, origin, to, bytes] { land(b, t, origin, to, bytes); });
  });
}

void policy(Warp& w, const Op& o) {
  lanes_of(w.active, [&](unsigned l) { w.at<std::uint64_t>(o.x[0])[l] = o.detail; });
}
void prefetch(Warp& w, const Op& o) {
  lanes_of(w.active, [&](unsigned l) { w.block->global_at(address(w, o, 0, 0, l), 1, false); });
}
void prefetch_map(Warp& w, const Op& o) {
  lanes_of(w.active, [&](unsigned l) {
    const std::uint64_t map = address(w, o, 0, 0, l);
    std::uint64_t magic;
    memcpy(&magic, reinterpret_cast<const void*>(map), sizeof magic);
    if (map % 64 || magic != kTensorMapMagic) throw Error("not a tensor map");
  });
}
void nothing(Warp&, const Op&) {}

}  // namespace

void add_async(Table& t) {
  const std::string cp = "cp.async.cg.shared.global";
  put(t, cp, {cp_async, "mmnw"}), put(t, cp + ".L2::128B", {cp_async, "mmnw"});
  put(t, "cp.async.commit_group", {cp_async_commit, ""});
  put(t, "cp.async.wait_group", {cp_async_wait, "n"});
  put(t, "createpolicy.fractional.L2::evict_normal.b64", {policy, "x", 8, false, 1});
  put(t, "createpolicy.fractional.L2::evict_first.b64", {policy, "x", 8, false, 2});
  put(t, "prefetch.global.L2", {prefetch, "m"});
  put(t, "prefetch.tensormap", {prefetch_map, "m"});
  put(t, "mbarrier.init.shared::cta.b64", {mbarrier_init, "mw"});
  put(t, "mbarrier.arrive.shared::cta.b64", {mbarrier_arrive<false>, "xm"});
  put(t, "mbarrier.arrive.expect_tx.shared::cta.b64", {mbarrier_arrive<true>, "xmw"});
  put(t, "mbarrier.try_wait.parity.shared::cta.b64", {mbarrier_try_wait, "pmw"});
  put(t, "fence.mbarrier_init.release.cluster", {mbarrier_init_fence, ""});
  put(t, "fence.proxy.async.shared::cta", {nothing, ""});
  const auto tile = [](unsigned rank) {
    return "cp.async.bulk.tensor." + std::to_string(rank) +
           "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint";
  };
  put(t, "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint",
      {bulk_copy, "mmwmx"});
  put(t, tile(2), {tensor_copy<2>, "mmwwmx"});
  put(t, tile(4), {tensor_copy<4>, "mmwwwwmx"});
}

}  // namespace ptx
